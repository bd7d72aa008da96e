"""Which measure of a layer predicts what its removal costs: rank correlations over the layers of a model.

    python benchmarks/predictors.py FOLDER MODEL --data TEXTS [--groups 4] [--sequences 8] [--length 128]

TEXTS (a folder or file that `fulldepth measure` reads) is divided into disjoint groups of documents. On every group
each measure is taken, and the loss in nats that the removal of each single layer adds (`layer_effect`, statistic
`loss_added`, removed at every position). Spearman's correlation over the layers but the last compares a measure on one
group with the cost on the next one, so no document is in both. The table states the mean over the groups and its
standard error, which is over documents: the layers of a model are all there are. The row `loss_added` is the cost
itself, on other documents: no measure can be expected to do better. Every measured group is a line of
FOLDER/predictors.jsonl, so a further run measures only what is missing; without MODEL the stored lines are printed.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from scipy.stats import spearmanr

import fulldepth
from fulldepth.data import open_source
from fulldepth.data.records import TextRecord

CAUSAL = ("mean_all", "max_all", "mean_future", "max_future", "divergence_all", "output_change_all")
"""Statistics of `layer_effect` that are compared; those with later layers are averaged over these."""
REPRESENTATIONAL = ["displacement", "contribution", "lens_loss", "cka"]
COST = "loss_added"


def by_layer(results: Any, measure: str, statistic: str, site: str, other: str = "mean") -> dict[int, float]:
    """Layer -> value; where there are values for several other layers, their mean or largest."""
    table = results.table
    rows = table[(table.measure == measure) & (table.statistic == statistic) & (table.site == site)]
    values = rows.groupby("layer").value
    combined = values.max() if other == "max" else values.mean()
    return {int(layer): float(value) for layer, value in combined.items()}


def causal(model: str, texts: list[str], **settings: Any) -> dict[str, dict[int, float]]:
    """The statistics of `layer_effect` with the first token left alone, and the cost of a removal at every position."""
    taken = fulldepth.measure(model, texts, measures=["layer_effect"], effect_positions=2, **settings)
    found = {
        f"layer_effect {name}": by_layer(taken, "layer_effect", name, "layer", "max" if name[:3] == "max" else "mean")
        for name in CAUSAL
    }
    removed = fulldepth.measure(
        model, texts, measures=["layer_effect"], effect_positions=1, effect_first=True, **settings
    )
    return found | {COST: by_layer(removed, "layer_effect", COST, "layer")}


def representational(model: str, texts: list[str], **settings: Any) -> dict[str, dict[int, float]]:
    """What the states alone say of each layer."""
    taken = fulldepth.measure(model, texts, measures=REPRESENTATIONAL, **settings)
    loss = by_layer(taken, "lens_loss", "mean", "residual")
    table = taken.table
    cka = table[(table.measure == "cka") & (table.statistic == "debiased") & (table.other == table.layer - 1)]
    cosine = by_layer(taken, "contribution", "cosine", "layer")
    return {
        "depth (number of the layer)": {layer: float(layer) for layer in loss if layer},
        "displacement": by_layer(taken, "displacement", "mean", "residual"),
        "relative norm of the update": by_layer(taken, "contribution", "relative_norm", "layer"),
        "1 - cosine of the update with the stream": {layer: 1 - value for layer, value in cosine.items()},
        "loss of the lens, before minus after": {layer: loss[layer - 1] - loss[layer] for layer in loss if layer},
        "1 - CKA with the layer before": dict(zip(map(int, cka.layer), map(float, 1 - cka.value), strict=True)),
    }


def groups_of(data: str, groups: int) -> list[list[str]]:
    """The texts of the data, dealt to groups in turn, the longest first."""
    texts = sorted((record.text for record in open_source(data).of(TextRecord)), key=len, reverse=True)
    return [texts[start::groups] for start in range(groups)]


def correlations(lines: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Predictor -> (mean over the groups, standard error)."""
    taken: dict[int, dict[str, dict[str, float]]] = defaultdict(dict)
    for line in lines:
        taken[line["group"]] |= line["values"]
    order = sorted(taken)
    found: dict[str, list[float]] = defaultdict(list)
    for place, group in enumerate(order):
        cost = taken[order[(place + 1) % len(order)]][COST]
        layers = sorted(cost, key=int)[:-1]  # nothing follows the last one
        for name, values in taken[group].items():
            predicted = [values.get(layer, np.nan) for layer in layers]
            found[name].append(float(spearmanr(predicted, [cost[layer] for layer in layers]).statistic))
    return {name: (mean(values), stdev(values) / len(values) ** 0.5) for name, values in found.items()}


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--data", default="corpus:builtin")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    path = asked.folder / "predictors.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    settings = {"max_sequences": asked.sequences, "sequence_length": asked.length}
    if asked.model is not None:
        for number, texts in enumerate(groups_of(asked.data, asked.groups)):
            for kind, function in (("representational", representational), ("causal", causal)):
                key = {
                    "model": Path(asked.model).name,
                    "data": Path(asked.data).name,
                    "group": number,
                    "of": asked.groups,
                    **settings,
                }
                if any(line["key"] == key and line["kind"] == kind for line in lines):
                    continue
                values = function(asked.model, texts, **settings)
                line = {"key": key, "kind": kind, "group": number, "values": values}
                lines.append(json.loads(json.dumps(line)))
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    by_model: dict[str, dict[str, tuple[float, float]]] = {}
    for model in dict.fromkeys(line["key"]["model"] for line in lines):
        by_model[model] = correlations([line for line in lines if line["key"]["model"] == model])
    names = dict.fromkeys(name for found in by_model.values() for name in found)
    print("| predictor | " + " | ".join(by_model) + " |")
    print("|---|" + "---|" * len(by_model))
    for name in names:
        cells = [
            f"{found[name][0]:+.2f} ± {found[name][1]:.2f}" if name in found else "" for found in by_model.values()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
