"""Tokenising beside the bare Rust tokenizer, and the memory of a process that reads 100 billion tokens.

`python benchmarks/data.py` prints both tables; `--memory FOLDER` is the second one's reading process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fulldepth.data import Windows, builtin_texts, open_documents, train_tokenizer
from fulldepth.data.cache.encoder import Encoder
from fulldepth.data.cache.splitting import Split, open_parts
from fulldepth.data.cache.token_files import LENGTH, EncodedDocuments, Note, Shard, Shards, write_json, write_shard
from fulldepth.data.cache.writers import batches

WINDOW, WINDOWS = 1024, 102_000_000
FILE_TOKENS = 2**25
MIB = 2**20


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--memory", type=Path, help="Only read the synthetic cache in this folder.")
    options = parser.parse_args()
    if options.memory:
        read_windows(options.memory)
        return
    encoding(options.rounds, options.vocabulary)
    memory()


def encoding(rounds: int, vocabulary: int) -> None:
    """Tokens/s of a writer, from texts to a file on the disk, and of the bare tokenizer on the same batches, in turn.

    Processor time of one thread, so that other processes of a shared machine matter less.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = train_tokenizer(builtin_texts("train"), vocab_size=vocabulary)
    texts = list(batches(iter(open_documents("corpus:builtin"))))[:1]
    encoder, core = Encoder(tokenizer), tokenizer.backend_tokenizer
    tokens = sum(len(encoder(batch).ids) for batch in texts)
    order = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"writer": [], "encode_batch_fast": [], "encode_batch": []}
    with tempfile.TemporaryDirectory() as folder:
        shards = Shards(Path(folder), encoder.dtype)
        work = {
            "writer": lambda: write_shard(shards, 0, 0, EncodedDocuments(map(encoder, texts))),
            "encode_batch_fast": lambda: [core.encode_batch_fast(t, add_special_tokens=False) for t in texts],
            "encode_batch": lambda: [core.encode_batch(t, add_special_tokens=False) for t in texts],
        }
        for number in range(rounds + 1):
            for name in order.permutation(sorted(work)):
                start = time.process_time()
                work[name]()
                if number:  # the first round fills the tokenizer's own cache
                    seconds[name].append(time.process_time() - start)
    print("| what | tokens/s of a thread, median | writer's rate to it, median (quartiles) | goal |")
    print("|---|---|---|---|")
    for name, times in seconds.items():
        ratios = [there / own for own, there in zip(seconds["writer"], times, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rate = tokens / statistics.median(times)
        ratio = "-" if name == "writer" else f"{middle:.2f} ({low:.2f} to {high:.2f})"
        print(f"| {name} | {rate:,.0f} | {ratio} | {'-' if name == 'writer' else '0.90'} |")


def memory() -> None:
    """What a fresh process needs beyond its imports to read windows of a cache of 104 billion tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        synthetic(folder)
        command = [sys.executable, __file__, "--memory", str(folder)]
        print("\n| what | figure | goal |\n|---|---|---|")
        for title in ("first start, which makes the table", "later start"):
            made = subprocess.run(command, check=True, capture_output=True, text=True)
            for line in made.stdout.splitlines():
                print(f"| {title}: {line} |")


def synthetic(folder: Path) -> None:
    """Files of token ids full of holes: 102 million windows, 1,024 ids a document on average; lengths are real."""
    shards = Shards(folder, np.dtype("<u2"))
    random = np.random.default_rng(0)
    count = -(-WINDOWS * WINDOW // FILE_TOKENS)
    for number in range(count):
        documents = FILE_TOKENS // WINDOW
        cuts = np.sort(random.integers(1, FILE_TOKENS, documents - 1))
        lengths = np.diff(np.concatenate([[0], cuts, [FILE_TOKENS]]))
        path = shards.path(number, 0)
        with path.open("wb") as file:
            file.truncate(FILE_TOKENS * shards.dtype.itemsize)
            file.seek(0, os.SEEK_END)
            file.write(lengths.astype(LENGTH).tobytes())
        note = Note(tokens=FILE_TOKENS, documents=documents, highest=0, last=True, hash=f"sha256:{number:064x}")
        write_json(path.with_suffix(".json"), note.model_dump())


def read_windows(folder: Path) -> None:
    """Open the cache as a run does, read windows all over it, and print what that took."""
    before = resident_and_peak()
    shards = Shards(folder, np.dtype("<u2"))
    units = len(list(folder.glob("*.bin"))) - len(list(folder.glob("split-*.bin")))
    start = time.perf_counter()
    files: list[Shard | None] = [shard for unit in range(units) for shard in shards.of_unit(unit)]
    tokens = open_parts(shards, files, Split(0.01, 0))
    assert tokens is not None
    opened = time.perf_counter() - start
    opening = resident_and_peak()
    windows = Windows(tokens.parts["train"], WINDOW, across_documents=False)
    order = np.random.default_rng(1).integers(0, len(windows), 20_000)
    start = time.perf_counter()
    for index in order:
        windows[int(index)]
    each = (time.perf_counter() - start) / len(order)
    after = resident_and_peak()
    print(f"windows | {len(windows):,} | -")
    print(f"seconds to open | {opened:.1f} | -")
    held = (after[0] - before[0]) / MIB
    print(f"memory after 20,000 windows at random, beyond the imports | {held:.0f} MiB | 50 MB")
    print(f"peak while opening, beyond the imports | {max(0, opening[1] - before[1]) / MIB:.0f} MiB | -")
    print(f"microseconds for a window at random | {1e6 * each:.0f} | -")


def resident_and_peak() -> tuple[int, int]:
    """Resident bytes of this process now, maps of files included, and the most that there have been."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


if __name__ == "__main__":
    main()
