"""The first screen of a measurement: which layers do little, what stands out, what to do next, and the strip of layers.

A sentence is written only if the data support it: its numbers are measurably beyond what it compares them with
(`uncertainty.measurable`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from fulldepth.core import shell
from fulldepth.core.errors import enumerated
from fulldepth.core.number_format import in_percent, in_percent_with_error, to_decimals, with_error
from fulldepth.core.thresholds import FEEDS, IDLE, LARGE_JUMP, degrees
from fulldepth.core.uncertainty import measurable, stated_groups
from fulldepth.reporting.phrases import place_of, short
from fulldepth.reporting.source import PageSource, curve_of, num_layers, rows_of_stack
from fulldepth.reporting.style import SEQUENTIAL, layer_axis

MOST = 2
"""Maximum number of findings after the first sentence."""
FAR = 1.25
"""If the last layer's angle exceeds the median layer's by this factor, the sentence states the factor."""
COMPARE = {
    "why": "measure another model on the same data:",
    "command": "fulldepth compare THIS_FOLDER OTHER_FOLDER --output comparison/",
}
"""Suggested for models whose blocks cannot be searched."""
BUILTIN = "corpus:builtin"
"""Name of the built-in corpus. Each command chooses the part that it needs."""
EARLY = 0.9
"""Share of the layers up to which a layer with nearly all of the accuracy is worth a sentence."""
BLOCKS = 4
"""Number of blocks that the suggested search removes, for deep models."""
PARTS = {"layer": "", "attention": "attention", "mlp": "MLP"}
"""Part that `layer_effect` removes -> its name in sentences; a whole layer needs none."""
WEAKEST = 0.01
STRONGEST = 1.0
"""Divergences in nats of the lightest and the darkest shade, on a logarithmic scale."""
LOWEST = 0.005
HIGHEST = 0.5
"""Displacements of the lightest and the darkest shade; the shades between them are a logarithmic scale."""


class Values(dict[int, float]):
    """Layer -> finite value; NaN for other layers."""

    def __missing__(self, _: int) -> float:
        return math.nan


@dataclass(frozen=True)
class Facts:
    """The numbers of one measurement from which the paragraph and the strip are made."""

    table: pd.DataFrame
    layers: int
    independent: float = math.inf
    """Number of groups of clusters that the standard errors rest on, for Student's t."""

    @classmethod
    def of(cls, table: pd.DataFrame, meta: Mapping[str, Any], model: Mapping[str, Any] | None) -> Facts:
        """The numbers of a model, or of one stack of it.

        Args:
            table: its rows.
            meta: the document of the measurement.
            model: its entry in the document.
        """
        return cls(table, num_layers(table, model), stated_groups(meta.get("data") or {}))

    def values(self, measure: str, *statistics: str, site: str = "residual") -> Values:
        """The values of the first statistic that the table has, by layer, at a site."""
        return Values(curve_of(self.table, measure, "|".join(statistics), site).points)

    @cached_property
    def removed_part(self) -> str | None:
        """The part that `layer_effect` removed: whole layers, or else the first of `PARTS` in the table."""
        measured = (part for part in PARTS if self.values("layer_effect", "later_all", "divergence_all", site=part))
        return next(measured, None)

    def effect(self, statistic: str) -> Values:
        """A statistic of `layer_effect` by the layer that was removed, or whose `removed_part` was."""
        part = self.removed_part
        return Values() if part is None else self.values("layer_effect", statistic, site=part)

    @cached_property
    def displacement(self) -> Values:
        """Mean displacement of each layer."""
        return self.values("displacement", "mean")

    @cached_property
    def errors(self) -> Values:
        """Standard errors of the mean displacement."""
        return self.values("displacement", "standard_error")

    @cached_property
    def settled(self) -> Values:
        """Share of the predictions that have settled by each layer."""
        return self.values("saturation", "cumulative")

    @cached_property
    def idle(self) -> list[int]:
        """Layers whose mean displacement is measurably below `IDLE`, among all layers."""
        return [layer for layer in self.beyond(IDLE) if self.displacement[layer] < IDLE]

    @cached_property
    def median(self) -> tuple[float, float]:
        """Median displacement of the layers before the last, and its standard error.

        The error is that of the middle layer; of two middle layers, the larger error.
        """
        before = sorted((mean, layer) for layer, mean in self.displacement.items() if layer < self.layers)
        middle = before[(len(before) - 1) // 2 : len(before) // 2 + 1]
        if not middle:
            return math.nan, math.nan
        means, errors = zip(*((mean, self.errors[layer]) for mean, layer in middle), strict=True)
        return sum(means) / len(means), max(errors)

    def beyond(self, value: float, error: float = 0.0, layers: Collection[int] | None = None) -> list[int]:
        """Layers, among `layers` (None = all), whose mean displacement differs measurably from `value` with `error`."""
        compared = [layer for layer in self.displacement if layers is None or layer in layers]
        errors = [math.hypot(self.errors[layer], error) for layer in compared]
        differs = measurable([self.displacement[layer] - value for layer in compared], errors, self.independent)
        return [layer for layer, yes in zip(compared, differs, strict=True) if yes]


def paragraph(facts: Facts, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """The paragraph on one model at one step: `sentences`, and the command to run `next` with the reason for it.

    The first sentence states which layers do little. At most `MOST` sentences follow, each only if the data support it.
    Without displacement there is only the sentence on removal; None if there is none either.
    """
    if not facts.displacement:
        sentence = _effect(facts)
        return {"sentences": [sentence], "next": _next(meta, facts)} if sentence else None
    idle = f"{len(facts.idle)} of {facts.layers} layers: {layer_spans(facts.idle)}" if facts.idle else "no layer"
    first = f"Displacement is clearly below {IDLE:g} ({degrees(IDLE):.0f} degrees) in {idle}."
    if not facts.errors:
        first = "Displacement has no standard error, so it is not concluded which layers do little."
    findings = [_effect(facts), _linear(facts, meta), _last(facts), _late(facts), _early(facts)]
    return {"sentences": [first, *list(filter(None, findings))[:MOST]], "next": _next(meta, facts)}


def by_stack(table: pd.DataFrame, meta: Mapping[str, Any]) -> dict[str, Facts]:
    """Title of each stack -> its numbers; the title is "" if the model has a single stack."""
    if not meta.get("stacks"):
        return {"": Facts.of(table, meta, meta.get("model"))}
    tables = {str(stack["name"]): (rows_of_stack(table, str(stack["name"])), stack) for stack in meta["stacks"]}
    return {name.capitalize(): Facts.of(rows, meta, stack) for name, (rows, stack) in tables.items()}


def measurement_story(source: PageSource) -> dict[str, Any] | None:
    """The paragraph on a measurement; for a model of several stacks, the first two sentences about each stack."""
    stacks = by_stack(source.table, source.meta)
    if "" in stacks:
        return paragraph(stacks[""], source.meta)
    paragraphs = [(name, part["sentences"]) for name, facts in stacks.items() if (part := paragraph(facts, {}))]
    sentences = [text for name, (first, *further) in paragraphs for text in (f"{name}: {first}", *further[:1])]
    return {"sentences": sentences, "next": COMPARE} if sentences else None


def layer_spans(layers: list[int]) -> str:
    """Ascending layers as text: `layers 4 to 8, 12 and 13`; two neighbours are two layers, three a span."""
    firsts, lasts = (sorted(layer for layer in layers if layer + step not in layers) for step in (-1, 1))
    texts: list[str] = []
    for first, last in zip(firsts, lasts, strict=True):
        texts += [f"{first} to {last}"] if last > first + 1 else map(str, range(first, last + 1))
    return f"layer{'s' * (len(layers) > 1)} {enumerated(texts)}"


def _last(facts: Facts) -> str:
    """Sentences that compare the last layer with the median layer and state its jump rate; empty without an error."""
    last = facts.displacement[facts.layers]
    error = facts.errors[facts.layers]
    median, median_error = facts.median
    if math.isnan(last + error) or not median > 0:
        return ""
    amount = f"{_with_error(last, error)} ({degrees(last):.0f} degrees)"
    middle = f"the median layer ({to_decimals(median)}, {degrees(median):.0f} degrees)"
    ratio = degrees(last) / degrees(median)
    if not facts.beyond(median, median_error, [facts.layers]):
        sentence = f"The last layer’s displacement, {amount}, does not differ measurably from that of {middle}."
    elif ratio > FAR:
        sentence = f"The last layer’s displacement is {amount}: {ratio:.1f} times the angle of {middle}."
    else:
        sentence = f"The last layer’s displacement is {amount}, {'below' if ratio < 1 else 'above'} that of {middle}."
    jump, jump_error = (facts.values("jump_rate", name)[facts.layers] for name in ("value", "standard_error"))
    if not (jump > 0 and measurable(jump, jump_error, facts.independent)[0]):
        return sentence
    size = ": large" if jump > LARGE_JUMP else ": not large"
    size *= bool(measurable(jump - LARGE_JUMP, jump_error, facts.independent)[0])
    return f"{sentence} Its jump rate is {with_error(jump, jump_error, 1)} %{size}."


def _effect(facts: Facts) -> str:
    """A sentence on the layers whose removal changes later layers at later tokens by more than `FEEDS`, and on those
    whose removal does so by less, and changes predictions more than twice as much where it also takes place at the
    token that is predicted from; empty if neither is measurable.
    """
    later, later_error, now, now_error, future, future_error = (
        facts.effect(f"{prefix}{name}")
        for name in ("later_future", "divergence_all", "divergence_future")
        for prefix in ("", "standard_error_of_")
    )
    layers = sorted(later)
    differs = measurable(
        [later[layer] - FEEDS for layer in layers], [later_error[layer] for layer in layers], facts.independent
    )
    clear = [layer for layer, yes in zip(layers, differs, strict=True) if yes]
    feeding = [layer for layer in clear if later[layer] > FEEDS]
    below = [layer for layer in clear if later[layer] < FEEDS]
    nearer = measurable(
        [now[layer] / 2 - future[layer] for layer in below],
        [math.hypot(now_error[layer] / 2, future_error[layer]) for layer in below],
        facts.independent,
    )
    alone = [layer for layer, yes in zip(below, nearer, strict=True) if yes and now[layer] / 2 > future[layer]]
    part = facts.removed_part or "layer"
    share = in_percent(FEEDS)
    hurts = f"Removing {_one_of(feeding, part)} changes what later layers compute at later tokens (by over {share})"
    edits = f"{_one_of(alone, part)} changes mostly the prediction at the token where it is missing"
    if feeding and alone:
        return f"{hurts}; removing {edits}."
    return f"{hurts}." if feeding else f"Removing {edits} (later tokens by under {share})." if alone else ""


def _with_error(displacement: float, error: float) -> str:
    """A displacement with its standard error; `below 0.0005` needs none."""
    text = to_decimals(displacement)
    return text if text.startswith("below") else with_error(displacement, error, 3)


def _one_of(layers: list[int], part: str) -> str:
    """Return what is removed, in words: `one of layers 2 to 5`, `the attention of layer 1`."""
    whose = f"the {PARTS[part]} of " * bool(PARTS[part])
    return whose + "one of " * (len(layers) > 1) + layer_spans(layers)


def _late(facts: Facts) -> str:
    """A sentence on the share of predictions that change in the last two layers; empty if not measurable."""
    layer = facts.layers - 2
    share = 1 - facts.settled[layer]
    error = facts.values("saturation", "standard_error_of_cumulative")[layer]
    if layer < 1 or not (share > 0 and measurable(share, error, facts.independent)[0]):
        return ""
    return f"{in_percent_with_error(share, error)} of all predictions change in the last two layers."


def _early(facts: Facts) -> str:
    """A sentence on the first layer with measurably 95 % of the last layer's accuracy; empty if it is not early."""
    right, errors = (facts.values("lens_accuracy", name) for name in ("mean", "standard_error"))
    target, error = (0.95 * values[facts.layers] for values in (right, errors))
    depths = range(1, facts.layers)
    above = np.array([right[layer] - target for layer in depths])
    noise = [math.hypot(errors[layer], error) for layer in depths]
    enough = measurable(above, noise, facts.independent) & (above > 0)
    depth = int(enough.argmax()) + 1 if enough.any() else facts.layers
    return f"Layer {depth} already has 95 % of the last layer’s accuracy." if depth <= EARLY * facts.layers else ""


def _linear(facts: Facts, meta: Mapping[str, Any]) -> str:
    """The finding on what early layers know by a fixed map; empty if it was not measured, or is not measurable."""
    finding = (meta.get("headline") or {}).get("linear_lens_gain") or {}
    gain, error = (float(finding.get(name) or math.nan) for name in ("value", "standard_error"))
    is_gain = gain > 0 and measurable(gain, error, facts.independent)[0]
    return short(finding.get("sentence") or "", 400) if is_gain else ""


def _predicts(facts: Facts, classes: int | None) -> bool:
    """Return True if the last layer predicts measurably better than a uniform guess and than the embeddings."""
    (right, right_error), (loss, loss_error) = (
        [facts.values(measure, statistic) for statistic in ("mean", "standard_error")]
        for measure in ("lens_accuracy", "lens_loss")
    )
    last = facts.layers
    better = right[last] - (1 / classes if classes else 0.0)
    gain = loss[0] - loss[last]
    errors = [right_error[last], math.hypot(loss_error[0], loss_error[last])]
    return better > 0 and gain > 0 and bool(measurable([better, gain], errors, facts.independent).all())


def _next(meta: Mapping[str, Any], facts: Facts) -> dict[str, str] | None:
    """The suggested next command, with its reason: the search for removable blocks, or a comparison.

    A comparison is suggested for models in memory, and for those whose blocks cannot be searched. None for a language
    model that does not measurably predict better than chance.
    """
    model = meta.get("model") or {}
    data = meta.get("data") or {}
    place = place_of(meta)
    skips = model["skips"] if model.get("skips") is not None else ["attention"]  # earlier versions do not state it
    if model.get("task") != "causal-lm" or not place or not skips:
        return COMPARE
    if not _predicts(facts, data.get("num_classes")):
        return None
    blocks = min(BLOCKS, max(1, facts.layers // 6))
    texts = str(data.get("path") or data.get("name") or "") if data.get("kind") in ("text", "pairs", "chats") else ""
    if texts.startswith(BUILTIN):
        texts = BUILTIN
    source = shell.word(short(texts or "pairs.jsonl", 400))
    options = shell.same_text(meta.get("settings") or {})
    part = "" if "attention" in skips else " --granularity layer --no-fit"  # scalars are of attention and MLP
    return {
        "why": "find removable blocks:",
        "command": f"fulldepth skip search {place} --data {source}{options} --blocks {blocks}{part} --output plan/",
    }


def profile(facts: Facts, removed: Sequence[int] = ()) -> dict[str, Any] | None:
    """The strip of layers of one model at one step; None without displacement and without removal of layers.

    `idle` lists the layers that do little, and `limit` states the criterion. Each of `rows` has `name`, `hint`, the
    name of the `figure` with the same numbers, and for the layers 1..L `shades` (0 to 10, null for an unknown value)
    and `texts`. `removed` lists layers from which blocks were removed; they get a row of their own.
    """
    effect = facts.effect("divergence_all")
    if not facts.displacement and not effect:
        return None
    scale = math.log(HIGHEST / LOWEST)
    effect_scale = math.log(STRONGEST / WEAKEST)
    part = PARTS[facts.removed_part or "layer"]
    whose = f"of its {part} " if part else ""
    depths = range(1, facts.layers + 1)
    darkest = len(SEQUENTIAL) - 1
    rows: list[dict[str, Any]] = []
    for name, hint, figure, shares, text in (
        (
            "Displacement", "strong = turns far", "displacement",
            {layer: math.log(max(mean, LOWEST) / LOWEST) / scale for layer, mean in facts.displacement.items()},
            lambda at, _: f"displacement {_with_error(facts.displacement[at], facts.errors[at])}",
        ),
        (
            "Coherence", "strong = copies", "coherence", facts.values("coherence", "mean_corrected", "mean"),
            lambda _, value: f"coherence {value:.2f}",
        ),
        (
            "Effect", f"strong = removal {whose}changes predictions", "effect_output",
            {at: math.log(max(value, WEAKEST) / WEAKEST) / effect_scale for at, value in effect.items()},
            lambda at, _: f"{effect[at]:.3g} nats without {f'its {part}' if part else 'it'}",
        ),
        (
            "Settled", "strong = predictions final", "saturation", facts.settled,
            lambda _, share: f"{in_percent(share)} of predictions settled",
        ),
        (
            "Removed", "strong = its block was removed", "displacement",
            {layer: float(layer in removed) for layer in depths if removed}, lambda _, gone: "removed" * bool(gone),
        ),
    ):  # fmt: skip
        shades = [round(darkest * min(max(shares[at], 0.0), 1.0)) if at in shares else None for at in depths]
        texts = [text(at, shares[at]) if at in shares else "" for at in depths]
        if any(texts):
            rows.append({"name": name, "hint": hint, "figure": figure, "shades": shades, "texts": texts})
    limit = f"displacement clearly below {IDLE:g}"
    named = layer_axis(facts.layers)["tickvals"]
    return {"layers": facts.layers, "named": named, "idle": facts.idle, "limit": limit, "rows": rows}
