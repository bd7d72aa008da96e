"""Rate of tokenising into the cache beside the bare Rust tokenizer on the same texts, and memory of reading windows.

`python benchmarks/data.py` prints a table; the bare tokenizer encodes as many documents at once, with as many threads.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from fulldepth.data import builtin_texts, open_documents, pack, train_tokenizer
from fulldepth.data.token_cache import BATCH_DOCUMENTS


def main() -> None:
    """Print the figures: processor time, so that other processes of a shared machine matter less."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, default=8192)
    options = parser.parse_args()
    tokenizer = train_tokenizer(builtin_texts("train"), vocab_size=options.vocabulary)
    core, documents = tokenizer.backend_tokenizer, open_documents("corpus:builtin")
    texts = list(documents)
    seconds: dict[str, list[float]] = {"pack": [], "encode_batch_fast": []}
    tokens = 0
    for number in range(options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            packed = pack(documents, tokenizer, sequence_length=1024, cache=Path(folder))
            middle = time.process_time()
            for first in range(0, len(texts), BATCH_DOCUMENTS):
                core.encode_batch_fast(texts[first : first + BATCH_DOCUMENTS], add_special_tokens=False)
            end = time.process_time()
        tokens = packed.tokens
        if number:  # the first round fills the tokenizer's own cache
            seconds["pack"].append(middle - start)
            seconds["encode_batch_fast"].append(end - middle)
    print("| what | tokens per second of processor time, median |\n|---|---|")
    for name, times in seconds.items():
        print(f"| {name} | {tokens / statistics.median(times):,.0f} |")
    held = packed.train.part.places.nbytes + packed.train.part.stops.nbytes
    print(f"\nMemory of the training part: {held / packed.train.documents:.0f} bytes a document.")


if __name__ == "__main__":
    main()
