"""Tables of aligned training and its rivals: trains recipe x method x seed, measures each model and leaves it early.

    python benchmarks/aligned.py tiny-vit --seeds 0 1 2 --output aligned-runs/
    python benchmarks/aligned.py tiny-vit data.name=cifar10.zip data.validation=cifar10.zip model.image_size=32 \
        model.patch_size=4 --data cifar10.zip --output cifar-runs/

Every training, measurement and sweep is a process of its own (`fulldepth train`, `measure`, `exit`) with a folder of
its own. What is complete is not repeated, and an interrupted training is resumed, so the script can be started again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fulldepth.results import Results
from fulldepth.settings import layer, read
from fulldepth.settings.train import TrainSettings

METHODS = ("baseline", "aligned", "cos-regularised", "multi-exit")
DATA = {"digits:builtin/train": "digits:builtin/test", "authors:builtin/train": "authors:builtin/test"}
THRESHOLDS = "0.3,0.4,0.5,0.6,0.7,0.8,0.85,0.9,0.95,0.98,0.99,0.995,1.0"


def run(command: Sequence[str], log: Path) -> None:
    """Run `fulldepth ...`; its output goes to a file, whose end is shown if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        ended = subprocess.run([sys.executable, "-m", "fulldepth", *command], stdout=file, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise SystemExit(f"fulldepth {' '.join(command)} failed:\n{log.read_text(encoding='utf-8')[-2000:]}")


def complete(folder: Path) -> bool:
    """Whether a folder holds results, complete ones of a training."""
    if not (folder / "results.json").exists():
        return False
    return bool(Results.load(folder).meta.get("complete", True))


def train(recipe: str, method: str, seed: int, changes: Sequence[str], folder: Path) -> Path:
    """Train one model; its last checkpoint."""
    if not complete(folder):
        more = ["--resume"] if (folder / "settings.yaml").exists() else []
        options = ["--method", method, "--seed", str(seed), "--output", str(folder), *more]
        run(["train", recipe, *changes, *options], folder.parent / "log" / f"{folder.name}.txt")
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def assess(checkpoint: Path, data: str, sequences: int, folder: Path) -> tuple[Results, Results]:
    """Results of `measure` and `exit` on test data."""
    measured, left = folder.with_name(f"{folder.name}-measure"), folder.with_name(f"{folder.name}-exit")
    log, most = folder.parent / "log" / f"{folder.name}.txt", ["--max-sequences", str(sequences)]
    if not complete(measured):
        run(["measure", str(checkpoint), "--data", data, *most, "--output", str(measured)], log)
    if not complete(left):
        options = ["--rule", "confidence,patience", "--thresholds", THRESHOLDS, "--output", str(left)]
        run(["exit", str(checkpoint), "--data", data, *most, *options], log)
    return Results.load(measured), Results.load(left)


def numbers(measured: Results, left: Results) -> dict[str, list[float]]:
    """The numbers of one model; those by layer are in order of the layers 1..L.

    The speed-up at equal accuracy is the largest measured one whose accuracy is at least the full model's.
    """
    table = measured.table
    found: dict[str, list[float]] = {}
    for name, measure in (("accuracy by layer", "lens_accuracy"), ("NC1 by layer", "nc1")):
        rows = table[(table.measure == measure) & (table.site == "residual") & (table.layer > 0)]
        rows = rows[rows.statistic.isin(["mean", "value"])].sort_values("layer")
        found[name] = rows.value.tolist()
    full = left.meta["full"]["accuracy"]
    found["accuracy"] = [full]
    kept = [entry["measured_speedup"] for entry in left.meta["exits"] if entry["accuracy"] >= full]
    found["speed-up at equal accuracy"] = [max([1.0, *[speed for speed in kept if speed is not None]])]
    for name in ("median_saturation", "effective_depth"):
        finding = measured.meta["headline"].get(name)
        found[name.replace("_", " ")] = [] if finding is None else [float(finding["value"])]
    return found


def shown(runs: Sequence[Sequence[float]]) -> str:
    """Mean and standard deviation over the seeds; of lists, each place."""
    places = [[value for value in values if value is not None] for values in zip(*runs, strict=True)]
    return ", ".join(
        f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")
        for values in places
    )


def print_table(rows: dict[str, list[dict[str, list[float]]]], seeds: int) -> None:
    """Print a Markdown table: one column for each method."""
    print(f"\n| mean ± standard deviation over {seeds} seeds | {' | '.join(rows)} |")
    print("|---" * (len(rows) + 1) + "|")
    for name in next(iter(rows.values()))[0]:
        print(f"| {name} | {' | '.join(shown([found[name] for found in runs]) for runs in rows.values())} |")


def main() -> None:
    """Run everything that is not there yet and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("changes", nargs="*", help="KEY=VALUE, for every training")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data", help="test data; by default the test part of the recipe's built-in data")
    parser.add_argument("--sequences", type=int, default=1000, help="of the test data")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_intermixed_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    name: Any = layer(TrainSettings, read(asked.recipe, "train")).data.name
    data = asked.data or DATA.get(name)
    if data is None:
        raise SystemExit(f"Give the test data for {name}: --data.")
    rows: dict[str, list[dict[str, list[float]]]] = {}
    for method in asked.methods:
        for seed in asked.seeds:
            folder = asked.output / f"{method}-{seed}"
            checkpoint = train(asked.recipe, method, seed, asked.changes, folder)
            found = numbers(*assess(checkpoint, data, asked.sequences, folder))
            rows.setdefault(method, []).append(found)
            print(f"{method}, seed {seed}: accuracy {found['accuracy'][0]:.3f}", flush=True)
    print_table(rows, len(asked.seeds))


if __name__ == "__main__":
    main()
