"""Tables of aligned training and its rivals: trains recipe x method x seed, measures each model and leaves it early.

    python benchmarks/aligned.py tiny-vit --seeds 0 1 2 --output aligned-runs/
    python benchmarks/aligned.py tiny-vit data.name=cifar10/ data.validation=cifar10/ model.image_size=32 \
        model.patch_size=4 --data cifar10/ --output cifar-runs/
    python examples/shapes.py shapes/ && python benchmarks/aligned.py tiny-detr --output shapes-runs/

Every training, measurement and sweep is a process of its own (`fulldepth train`, `measure`, `exit`) with a folder of
its own. What is complete is not repeated, and an interrupted training is resumed, so the script can be started again.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fulldepth.results import Results
from fulldepth.settings import layer, read
from fulldepth.settings.train import TrainSettings

METHODS = ("baseline", "aligned", "cos-regularised", "multi-exit")
DATA = {
    "digits:builtin/train": "digits:builtin/test",
    "authors/train.tsv": "authors/test.tsv",
    "shapes/instances_train.json": "shapes/instances_validation.json",
}
THRESHOLDS = "0.5,0.8,0.95"
"""For the curve of the page; the threshold of the table is chosen among all values."""
DROP = 0.01
"""Largest loss of accuracy for which the threshold is chosen, on half of the data; the other half is reported."""


class Row(NamedTuple):
    """A row of the table for each layer."""

    name: str
    measure: str
    statistic: str
    shown: Callable[[float], float] = float


PERCENT: Callable[[float], float] = lambda value: 100 * value  # noqa: E731
BY_LAYER = (
    Row("accuracy, %", "lens_accuracy", "mean", PERCENT),
    Row("perplexity", "lens_loss", "mean", math.exp),
    Row("AP50, %", "average_precision", "ap50", PERCENT),
    Row("AP, %", "average_precision", "ap", PERCENT),
    Row("NC1", "nc1", "value"),
)
ONLY_LANGUAGE = ("perplexity",)


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
    log = folder.parent / "log" / f"{folder.name}.txt"
    most = ["--max-sequences", str(sequences), "--set", "truncate=true"]
    if not complete(measured):
        run(["measure", str(checkpoint), "--data", data, *most, "--output", str(measured)], log)
    if not complete(left):
        options = ["--threshold", THRESHOLDS, "--target-accuracy-drop", str(DROP), "--output", str(left)]
        run(["exit", str(checkpoint), "--data", data, *most, *options], log)
    return Results.load(measured), Results.load(left)


def numbers(measured: Results, left: Results) -> dict[str, float | None]:
    """The numbers of one model, by the name of their row."""
    table, found = measured.table, dict[str, float | None]()
    classifies = (table.measure == "nc1").any()
    for row in BY_LAYER:
        if classifies and row.name in ONLY_LANGUAGE:
            continue
        rows = table[(table.measure == row.measure) & (table.statistic == row.statistic) & (table.site == "residual")]
        for line in rows[rows.layer > 0].sort_values("layer").itertuples():
            found[f"{row.name}, layer {line.layer}"] = row.shown(line.value)
    for name in ("median_saturation", "effective_depth"):
        if name in measured.meta["headline"]:
            found[name.replace("_", " ")] = float(measured.meta["headline"][name]["value"])
    [chosen] = [entry for entry in left.meta["exits"] if entry["calibrated"] and entry["split"] == "report"]
    found["early exit: change in points"] = -100 * chosen["drop"]
    found["early exit: speed-up by layers"] = chosen["theoretical_speedup"]
    found["early exit: measured speed-up"] = chosen["measured_speedup"]
    return found


def shown(values: Sequence[float | None]) -> str:
    """Mean and standard deviation over the seeds."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    digits = 1 if max(abs(value) for value in known) >= 10 else 2
    spread = f" ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.{digits}f}{spread}"


def print_table(runs: dict[str, list[dict[str, float | None]]], seeds: int) -> None:
    """Print a Markdown table: one column for each method."""
    print(f"\n| mean ± standard deviation over {seeds} seeds | {' | '.join(runs)} |")
    print("|---" * (len(runs) + 1) + "|")
    for name in dict.fromkeys(name for models in runs.values() for model in models for name in model):
        columns = [shown([model.get(name) for model in models]) for models in runs.values()]
        print(f"| {name} | {' | '.join(columns)} |")


def main() -> None:
    """Run everything that is not there yet and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("changes", nargs="*", help="KEY=VALUE, for every training")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data", help="test data; by default the test part of the recipe's built-in data")
    parser.add_argument("--sequences", type=int, default=1000, help="of the test data")
    parser.add_argument("--only-train", action="store_true", help="train what is missing, and stop there")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_intermixed_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    name: Any = layer(TrainSettings, read(asked.recipe, "train")).data.name
    data = asked.data or DATA.get(name)
    if data is None:
        raise SystemExit(f"Give the test data for {name}: --data.")
    runs: dict[str, list[dict[str, float | None]]] = {}
    for method in asked.methods:
        for seed in asked.seeds:
            folder = asked.output / f"{method}-{seed}"
            checkpoint = train(asked.recipe, method, seed, asked.changes, folder)
            print(f"{method}, seed {seed}: trained", flush=True)
            if not asked.only_train:
                runs.setdefault(method, []).append(numbers(*assess(checkpoint, data, asked.sequences, folder)))
    if runs:
        print_table(runs, len(asked.seeds))


if __name__ == "__main__":
    main()
