"""What the figures of results of every kind plot, written down before they were drawn from one list of records.

`python -m reporting.plotted` writes `plotted.json.gz` anew; do so only where a figure shall plot something else.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pandas as pd

from fulldepth.results import Results, compare, tabulate
from reporting import exit_folders, skip_folders, synthetic
from reporting.synthetic import row, versus

FILE = Path(__file__).with_name("plotted.json.gz")


def weight(layer, source):
    return (1 + math.sin(layer + 3 * source)) / 2


def memory():
    """Measures of special architectures: signed retrieval, images against texts, detection."""
    rows = []
    for layer in range(2, 6):
        rows.append(row("expected_retrieval", layer, 0.4 * layer, "value", "routing", count=960, unit="layers"))
        for statistic, factor in (("share", 1.0), ("mean", -2.0)):
            rows += [
                row("retrieval_weight", layer, factor * weight(layer, source), statistic, "routing", source, 960)
                for source in range(layer)
            ]
            rows += [
                row("retrieval_weight", layer, weight(layer, head), statistic, f"head_{head}", layer - 1, 960)
                for head in range(12)
            ]
    for measure, statistic in (("cosine", "matched"), ("retrieval", "text_to_image")):
        rows += [
            row(measure, image, 0.1 * image - 0.05 * text, statistic, "cross", text, 7)
            for image in range(3)
            for text in range(5)
        ]
    for layer in range(6):
        rows += [
            row("lens_accuracy", layer, 0.15 * layer, count=500),
        ]
        precisions = (("ap", 0.05), ("ap50", 0.1), ("ap75", 0.07))[: 3 * bool(layer)]
        rows += [row("average_precision", layer, factor * layer, name, count=500) for name, factor in precisions]
    return Results(tabulate(rows), {"kind": "measure", "model": {"num_layers": 5}})


def joined():
    """Four folders of one model, as the report joins them."""
    parts = {
        "out": skip_folders.search(), "curve": skip_folders.curve(), "bench": skip_folders.bench(),
        "another": skip_folders.another(),
    }  # fmt: skip
    table = pd.concat([one.table.assign(folder=name) for name, one in parts.items()], ignore_index=True)
    return Results(table, {"kind": "skips", "parts": [{**one.meta, "label": name} for name, one in parts.items()]})


def sweeps():
    aligned = exit_folders.classifier_exit("runs/aligned", accuracy=0.905, share=0.99)
    return compare([exit_folders.classifier_exit(), aligned], names=["plain", "aligned"])


def evaluations():
    return versus(exit_folders.evaluation(), exit_folders.evaluation("b", better=0.1))


KINDS = {
    "language_model": synthetic.language_model,
    "removal": synthetic.removal,
    "classifier": synthetic.classifier,
    "two_towers": synthetic.two_towers,
    "memory": memory,
    "series": synthetic.series,
    "comparison": synthetic.comparison,
    "relative": lambda: synthetic.comparison("relative"),
    "training": synthetic.training,
    "groups": synthetic.over_seeds,
    "search": skip_folders.search,
    "ranking": skip_folders.ranked,
    "curve": skip_folders.curve,
    "bench": skip_folders.bench,
    "served": skip_folders.served,
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


def rounded(values):
    """Numbers to eight significant digits, as plain JSON."""
    if isinstance(values, float):
        return float(f"{values:.8g}") if math.isfinite(values) else None
    if isinstance(values, str | int) or values is None:
        return values
    return [rounded(value.item() if hasattr(value, "item") else value) for value in values]


def plotted(results):
    """Name of a figure -> the name and the arrays of each of its traces."""
    parts = ("x", "y", "z", "error_x.array", "error_x.arrayminus", "error_y.array")

    def arrays(trace):
        there = [part for part in parts if part.partition(".")[0] in trace and trace[part] is not None]
        return {"name": trace.name} | {part: rounded(trace[part]) for part in there}

    return {name: [arrays(trace) for trace in figure.data] for name, figure in results.figures().items()}


def main():
    text = json.dumps({name: plotted(build()) for name, build in KINDS.items()}, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
