"""Time and memory of a training step of image classifiers by method, relative to the baseline's.

A ViT of the ViT-S shape on random images: cross-entropy alone (baseline), the loss of all layers through the shared
head (aligned, at every step), through a head for each layer (multi-exit), and the cosine regulariser. Steps of methods
alternate within a round, so that other load on the machine falls on all of them; a ratio is the median over rounds.
Peak memory is measured in a process of its own for each method.

    python benchmarks/aligned_steps.py                      # ViT-S/16 at 224 pixels, 1,000 classes, batch of 8
    python benchmarks/aligned_steps.py --layers 4 --width 64 --heads 2 --pixels 32 --batch 4 --rounds 3
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch
from transformers import ViTConfig, ViTForImageClassification

from fulldepth.losses import Objective, add_exit_heads

METHODS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "aligned": {"aligned": {"schedule": "always"}},
    "multi-exit": {"multi_exit": {"schedule": "always"}},
    "cos-regularised": {"similarity": 1.0},
}
GOAL = {"time": 1.25, "memory": 1.05}


class Stepper:
    """A model with its objective and optimiser.

    Args:
        method: key of `METHODS`.
        options: shape, batch and device.
    """

    def __init__(self, method: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = ViTConfig(
            hidden_size=options.width,
            intermediate_size=4 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            image_size=options.pixels,
            patch_size=options.patch,
            num_labels=options.classes,  # type: ignore[call-arg]
        )
        self.model = ViTForImageClassification(config).train().to(options.device)
        if method == "multi-exit":
            add_exit_heads(self.model)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        terms = METHODS[method]
        self.objective = Objective(**terms).attach(self.model) if terms else None
        generator = torch.Generator().manual_seed(1)
        pixels = torch.randn(options.batch, 3, options.pixels, options.pixels, generator=generator)
        labels = torch.randint(options.classes, (options.batch,), generator=generator)
        self.batch = {"pixel_values": pixels.to(options.device), "labels": labels.to(options.device)}
        self.autocast = torch.autocast(options.device, torch.bfloat16, enabled=options.autocast)

    def step(self) -> float:
        """Seconds of one optimiser step."""
        _wait(self.batch["labels"].device)
        start = time.perf_counter()
        with self.autocast:
            output = self.model(**self.batch)
            loss = output.loss if self.objective is None else self.objective(output, self.batch)[0]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        _wait(self.batch["labels"].device)
        return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak(method: str, options: argparse.Namespace) -> tuple[float, float]:
    """MiB of the peak memory of a process with this method: in total, and above its state before the first step."""
    stepper = Stepper(method, options)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
        for _ in range(3):
            stepper.step()
        return torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_allocated() / 2**20 - before
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for _ in range(3):
        stepper.step()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return after, after - before


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 12, "width": 384, "heads": 6, "pixels": 224, "patch": 16, "classes": 1000, "batch": 8}
    for name, default in {**sizes, "rounds": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--autocast", action="store_true", help="bfloat16 products")
    parser.add_argument("--peak", choices=METHODS, help="measure the memory of one method in this process")
    options = parser.parse_args()
    if options.peak:
        print(*peak(options.peak, options))
        return
    memory = {}
    for method in METHODS:
        command = [sys.executable, __file__, *sys.argv[1:], "--peak", method]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        memory[method] = [float(word) for word in done.stdout.split()]
    steppers = {method: Stepper(method, options) for method in METHODS}
    for stepper in steppers.values():
        stepper.step()
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    names = list(METHODS)
    for number in range(options.rounds):
        for turn in range(len(names)):
            method = names[(turn + number) % len(names)]
            seconds[method].append(steppers[method].step())
    print(f"{'method':16} {'parameters':>12} {'s/step':>8} {'time':>7} {'peak MiB':>9} {'memory':>7}")
    for method, stepper in steppers.items():
        ratio = median(own / base for own, base in zip(seconds[method], seconds["baseline"], strict=True))
        print(
            f"{method:16} {stepper.parameters:12,} {median(seconds[method]):8.3f} {ratio:6.3f}x "
            f"{memory[method][0]:9.0f} {memory[method][0] / memory['baseline'][0]:6.3f}x"
        )
    print(f"Goal for aligned: at most {GOAL['time']}x the time and {GOAL['memory']}x the memory.")


if __name__ == "__main__":
    main()
