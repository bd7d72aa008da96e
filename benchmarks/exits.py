"""Early exit of classifiers: measured against theoretical speed-up, at several batch sizes.

python benchmarks/exits.py MODEL --data validation.jsonl [--batches 64,16,1] [--rounds 9] [--sequences 512]

Trains nothing: MODEL is a classifier of texts or images whose layers agree, such as one trained with the aligned loss.
The goal is a ratio of at least 0.9 at batch 64 on a CPU. Threads: OMP_NUM_THREADS.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch

from fulldepth import exit


def main() -> None:
    """Print one table for every batch size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--batches", default="64,16,1")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--thresholds", default="0.6,0.7,0.8,0.9,0.95,0.99,1.0")
    parser.add_argument("--rule", default="confidence")
    asked = parser.parse_args()
    thresholds = [float(text) for text in asked.thresholds.split(",")]
    print(f"{torch.get_num_threads()} threads")
    for batch in map(int, asked.batches.split(",")):
        results = exit.sweep(
            asked.model,
            asked.data,
            rule=asked.rule,
            threshold=thresholds,
            batch_size=batch,
            repeats=asked.rounds,
            max_sequences=asked.sequences,
        )
        print(f"\nbatch {batch}, {results.meta['full']['seconds']:.2f} s for the model's own forward passes\n")
        print("| threshold | accuracy | agreement | layers saved | theoretical | measured | ratio |")
        print("|---|---|---|---|---|---|---|")
        ratios = []
        for row in results.meta["exits"]:
            theory, speed = row["theoretical_speedup"], row["measured_speedup"]
            ratios.append(speed / theory)
            print(
                f"| {row['threshold']:g} | {row['accuracy']:.3f} | {row['agreement']:.3f} | {1 - 1 / theory:.0%} "
                f"| {theory:.2f} | {speed:.2f} | {ratios[-1]:.2f} |"
            )
        print(f"\nmedian ratio {median(ratios):.2f}, smallest {min(ratios):.2f}")


if __name__ == "__main__":
    main()
