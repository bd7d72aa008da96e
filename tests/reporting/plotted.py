"""What the figures of results of every kind plot, written down before they were drawn from one list of records.

`python -m reporting.plotted` writes `plotted.json.gz` anew; do so only where a figure shall plot something else.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from fulldepth.comparison import compare
from fulldepth.results import Results, tabulate
from reporting import exit_folders, skip_folders, synthetic

FILE = Path(__file__).with_name("plotted.json.gz")


def weight(layer: int, source: int) -> float:
    return (1 + math.sin(layer + 3 * source)) / 2


def memory() -> Results:
    """Measures of special architectures: signed retrieval, streams, images against texts, probes, detection."""
    rows: list[tuple[Any, ...]] = []
    for layer in range(2, 6):
        rows.append(("expected_retrieval", "routing", layer, None, "value", 0.4 * layer, 960, "layers"))
        for statistic, factor in (("share", 1.0), ("mean", -2.0)):
            rows += [
                ("retrieval_weight", "routing", layer, source, statistic, factor * weight(layer, source), 960, "1")
                for source in range(layer)
            ]
    for shift, statistic in enumerate(("input", "kept", "given", "output")):
        for branch in ("attention", "mlp"):
            rows += [
                ("stream_mixing", f"{branch}_stream_{i}", layer, None, statistic, shift + i - layer, 96, "1")
                for i in range(3)
                for layer in range(1, 6)
            ]
    for measure, statistic in (("cosine", "matched"), ("retrieval", "text_to_image")):
        rows += [
            (measure, "cross", image, text, statistic, 0.1 * image - 0.05 * text, 7, "1")
            for image in range(3)
            for text in range(5)
        ]
    for layer in range(6):
        rows.append(("probe_accuracy", "residual", layer, None, "mean", 0.1 + 0.1 * layer, 500, "1"))
        rows.append(("probe_accuracy", "residual", layer, None, "standard_error", 0.01, 500, "1"))
        rows.append(("lens_accuracy", "residual", layer, None, "mean", 0.15 * layer, 500, "1"))
        rows.append(("lens_accuracy", "attention_output", layer, None, "mean", 0.14 * layer, 500, "1"))
        rows += [
            ("average_precision", "residual", layer, None, name, factor * layer, 500, "1")
            for name, factor in (("ap", 0.05), ("ap50", 0.1), ("ap75", 0.07))
            if layer
        ]
    return Results(tabulate(rows), {"kind": "measure", "model": {"num_layers": 5}})


def joined() -> Results:
    """The four folders of one removal, as the report joins them."""
    parts = {
        "out": skip_folders.search(), "curve": skip_folders.curve(), "bench": skip_folders.bench(),
        "quantised": skip_folders.quantised(),
    }  # fmt: skip
    table = pd.concat([one.table.assign(folder=name) for name, one in parts.items()], ignore_index=True)
    return Results(table, {"kind": "skips", "parts": [{**one.meta, "label": name} for name, one in parts.items()]})


def sweeps() -> Results:
    aligned = exit_folders.classifier_exit("runs/aligned", accuracy=0.905, share=0.99)
    return compare([exit_folders.classifier_exit(), aligned], names=["plain", "aligned"])


def evaluations() -> Results:
    return compare([exit_folders.evaluation(), exit_folders.evaluation("b", better=0.1)], names=["a", "b"])


KINDS: dict[str, Callable[[], Results]] = {
    "language_model": synthetic.language_model,
    "classifier": synthetic.classifier,
    "two_towers": synthetic.two_towers,
    "memory": memory,
    "series": synthetic.series,
    "comparison": synthetic.comparison,
    "relative": lambda: synthetic.comparison("relative"),
    "training": synthetic.training,
    "trainings": synthetic.training_comparison,
    "search": skip_folders.search,
    "curve": skip_folders.curve,
    "bench": skip_folders.bench,
    "quantised": skip_folders.quantised,
    "skips": joined,
    "exit": exit_folders.classifier_exit,
    "decoder": exit_folders.decoder_exit,
    "generation": exit_folders.generation,
    "evaluation": exit_folders.evaluation,
    "exits": sweeps,
    "evaluations": evaluations,
    "stored": lambda: Results.load(FILE.parents[2] / "docs" / "gallery" / "minilm"),
}  # fmt: skip
"""Name -> results of a kind."""


def rounded(values: Any) -> Any:
    """Numbers to eight significant digits, as plain JSON."""
    if isinstance(values, float):
        return float(f"{values:.8g}") if math.isfinite(values) else None
    if isinstance(values, str | int) or values is None:
        return values
    return [rounded(value.item() if hasattr(value, "item") else value) for value in values]


def plotted(results: Results) -> dict[str, list[dict[str, Any]]]:
    """Name of a figure -> the arrays of each of its traces."""
    parts = ("x", "y", "z", "error_x.array", "error_x.arrayminus", "error_y.array")

    def arrays(trace: Any) -> dict[str, Any]:
        there = [part for part in parts if part.partition(".")[0] in trace and trace[part] is not None]
        return {part: rounded(trace[part]) for part in there}

    return {name: [arrays(trace) for trace in figure.data] for name, figure in results.figures().items()}


def main() -> None:
    text = json.dumps({name: plotted(build()) for name, build in KINDS.items()}, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
