"""How fast a measurement of 64 sequences starts on a file of two million rows, and how much memory it adds.

`python benchmarks/limit.py` writes the files (or uses those in `--folder`), and measures each in a process of its own
with a model of a few thousand weights: seconds from opening the data to the first batch, seconds of the measurement,
and how far the peak of memory rises above what the process held with the model.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
from transformers import LlamaConfig, LlamaForCausalLM

import fulldepth
from fulldepth.data import builtin_texts, open_source, prepare, train_tokenizer

ROWS, SEQUENCES, GOAL_MIB = 2_000_000, 64, 1536
WORDS = 40


def write(folder: Path, rows: int) -> list[Path]:
    """A `.jsonl` and a `.parquet` file of the same rows, each a passage of a novel and its number."""
    words = builtin_texts("heldout")[0].replace('"', "").replace("\\", "").split()
    paths = [folder / "rows.jsonl", folder / "rows.parquet"]
    schema = pyarrow.schema({"text": pyarrow.string()})
    with paths[0].open("w", encoding="utf-8") as file, pyarrow.parquet.ParquetWriter(paths[1], schema) as table:
        for first in range(0, rows, 100_000):
            numbers = range(first, min(rows, first + 100_000))
            starts = [number * 7919 % (len(words) - WORDS) for number in numbers]
            texts = [f"{n} {' '.join(words[s : s + WORDS])}" for n, s in zip(numbers, starts, strict=True)]
            file.writelines(f'{{"text": "{text}"}}\n' for text in texts)
            table.write_table(pyarrow.table({"text": texts}, schema))
    return paths


def peak() -> float:
    """MiB of this process at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**20


def one(path: Path) -> None:
    """Measure one file, and print a row."""
    tokenizer = train_tokenizer([builtin_texts("heldout")[1][:50_000]], 500)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    prepare(open_source("corpus:builtin"), task="causal-lm", tokenizer=tokenizer, max_sequences=1)  # loads libraries
    before, start = peak(), time.perf_counter()
    source = open_source(path, limit=SEQUENCES, window=256)
    next(prepare(source, task="causal-lm", tokenizer=tokenizer, max_sequences=SEQUENCES).batches(8))
    first = time.perf_counter() - start
    held, start = peak() - before, time.perf_counter()
    fulldepth.measure(model, str(path), tokenizer=tokenizer, max_sequences=SEQUENCES, progress=False)
    whole = time.perf_counter() - start
    print(
        f"| {path.name} | {path.stat().st_size >> 20} | {len(source):,} | {first:.1f} | {held:.0f} | {whole:.1f} |",
        flush=True,
    )
    if held > GOAL_MIB:
        sys.exit(f"{held:.0f} MiB are more than {GOAL_MIB}")


def main() -> None:
    """Write the files and measure each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        return one(chosen.one)
    print("| file | MiB | rows read | s to the first batch | MiB of memory beside the model | s of the measurement |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for path in write(Path(folder), chosen.rows):
            subprocess.run([sys.executable, __file__, "--one", str(path)], check=True)


if __name__ == "__main__":
    main()
