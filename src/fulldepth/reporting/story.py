"""The opening paragraph of a measurement: which layers do little, what stands out, and what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from fulldepth.figures import stack_rows
from fulldepth.figures.curves import num_layers
from fulldepth.reporting import reference
from fulldepth.reporting.phrases import short
from fulldepth.thresholds import IDLE, LARGE_JUMP

MOST = 2
"""Maximum number of findings after the first sentence."""
NOISE = 2.0
"""Standard errors below which a difference is not mentioned."""
FAR = 1.5
"""Ratio to the median layer from which the last layer, or one in the middle, is called different."""
COMPARE = "fulldepth compare THIS_FOLDER OTHER_FOLDER --output comparison/"
"""Suggested for models whose blocks cannot be searched."""
BUILTIN = "corpus:builtin"
"""Name of the built-in corpus, of which each command reads the part that it needs."""
EARLY = 0.9
"""Share of the layers up to which the effective depth is worth a sentence."""
BLOCKS = 4
"""Number of blocks that the suggested search removes, for deep models."""

Values = dict[int, float]
"""Layer -> finite value."""


@dataclass(frozen=True)
class Facts:
    """The numbers of one measurement from which the paragraph is made."""

    table: pd.DataFrame
    layers: int

    def values(self, measure: str, *statistics: str) -> Values:
        """The values of the first statistic that the table has, by layer, at the residual stream."""
        rows = self.table[(self.table["measure"] == measure) & (self.table["site"] == "residual")]
        for statistic in statistics:
            chosen = rows[(rows["statistic"] == statistic) & np.isfinite(rows["value"].astype("float64"))]
            chosen = chosen.dropna(subset=["layer"])
            if len(chosen):
                return {int(layer): float(value) for layer, value in zip(chosen["layer"], chosen["value"], strict=True)}
        return {}

    def number(self, measure: str, statistic: str) -> float:
        """A number without a layer; NaN if the table lacks it."""
        rows = self.table[(self.table["measure"] == measure) & (self.table["statistic"] == statistic)]
        return float(rows["value"].iloc[0]) if len(rows) else math.nan

    @cached_property
    def displacement(self) -> Values:
        """Mean displacement of each layer."""
        return self.values("displacement", "mean")

    @cached_property
    def errors(self) -> Values:
        """Standard errors of the mean displacement."""
        return self.values("displacement", "standard_error")

    @cached_property
    def coherence(self) -> Values:
        """Mean coherence of each layer, corrected for bias where the table has it."""
        return self.values("coherence", "mean_corrected", "mean")

    @cached_property
    def settled(self) -> Values:
        """Share of the predictions that have settled by each layer."""
        return self.values("saturation", "cumulative")

    @cached_property
    def idle(self) -> list[int]:
        """Layers whose mean displacement is below `IDLE` by more than twice its standard error."""
        return [layer for layer, mean in self.displacement.items() if mean + NOISE * self.errors.get(layer, 0.0) < IDLE]

    @cached_property
    def median(self) -> float:
        """Median displacement of the layers before the last."""
        before = [mean for layer, mean in self.displacement.items() if layer < self.layers]
        return float(np.median(before)) if before else math.nan


def numbers(facts: Facts) -> dict[str, float]:
    """Measure of `reference.MEASURES` -> finite value."""
    last, layers = facts.displacement.get(facts.layers, math.nan), facts.layers
    jumps = facts.values("jump_rate", "value")
    found = {
        **{name: jumps.get(layers - back, math.nan) for back, name in enumerate(("zeta_L", "zeta_L-1", "zeta_L-2"))},
        "idle_share": len(facts.idle) / layers if facts.displacement else math.nan,
        "last_over_median": last / facts.median if facts.median else math.nan,
        "late_share": 1 - facts.settled.get(layers - 2, math.nan) if layers > 2 else math.nan,
        "mean_coherence": facts.number("coherence", "mean_corrected_of_layers"),
        "median_saturation": facts.number("saturation", "median") / layers,
        "effective_depth": facts.number("effective_depth", "relative_eps=0.05") / layers,
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def story(facts: Facts, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """The paragraph on one model at one step: `sentences`, and the command to run `next` with the reason for it.

    The first sentence says which layers do little. Those after it are the `MOST` findings that are most unusual among
    the reference values. None if the table has no displacement.
    """
    if not facts.displacement:
        return None
    name = str((meta.get("model") or {}).get("name") or "")
    ranked = sorted(_findings(facts, name), key=lambda finding: -finding[0])
    return {
        "sentences": [_little(facts), *(text for _, text in ranked[:MOST])],
        "next": _next(meta, facts.layers),
    }


def by_stack(table: pd.DataFrame, meta: Mapping[str, Any]) -> dict[str, Facts]:
    """Title of each stack of a model -> its numbers; of a model of one stack, "" -> them."""
    if not meta.get("stacks"):
        return {"": Facts(table, num_layers(table, meta.get("model")))}
    tables = {str(stack["name"]): (stack_rows(table, str(stack["name"])), stack) for stack in meta["stacks"]}
    return {name.capitalize(): Facts(rows, num_layers(rows, stack)) for name, (rows, stack) in tables.items()}


def opening(table: pd.DataFrame, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """`story` of a measurement; of a model of several stacks the first two sentences on each."""
    stacks = by_stack(table, meta)
    if "" in stacks:
        return story(stacks[""], meta)
    sentences: list[str] = []
    for name, facts in stacks.items():
        told = story(facts, {})
        if told:
            first, *others = told["sentences"][:2]
            sentences += [f"{name}: {first}", *others]
    return {"sentences": sentences, "next": _next({}, 0)} if sentences else None


def paragraph(table: pd.DataFrame, meta: Mapping[str, Any]) -> str:
    """The sentences of `opening` as one paragraph; empty if there is none."""
    told = opening(table, meta)
    return " ".join(told["sentences"]) if told else ""


def _little(facts: Facts) -> str:
    """Which layers do little: those below the threshold, or else the one with the smallest displacement."""
    if facts.idle:
        verb = "turns" if len(facts.idle) == 1 else "turn"
        least = min(facts.idle, key=facts.displacement.__getitem__)
        which = f", layer {least} least" if len(facts.idle) > 2 else ""
        return (
            f"{len(facts.idle)} of {facts.layers} layers {verb} the residual stream by less than {IDLE:.0%}: "
            f"{spans(facts.idle)}{which}.".replace("%", " %")
        )
    least = min(facts.displacement, key=facts.displacement.__getitem__)
    return (
        f"No layer turns the residual stream by clearly less than {100 * IDLE:.0f} %; layer {least} of {facts.layers} "
        f"turns it least, by {100 * facts.displacement[least]:.1f} %."
    )


def spans(layers: list[int]) -> str:
    """Ascending layers as text: `4 to 8, 13`."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    texts = [
        str(run[0]) if len(run) == 1 else f"{run[0]} and {run[1]}" if len(run) == 2 else f"{run[0]} to {run[-1]}"
        for run in runs
    ]
    return ("layer " if len(layers) == 1 else "layers ") + ", ".join(texts)


def _findings(facts: Facts, name: str) -> Iterator[tuple[float, str]]:
    """(how unusual, sentence) of every finding that is larger than its noise."""
    values = numbers(facts)
    for measure, sentence in (
        ("last_over_median", _last(facts, values, name)),
        ("late_share", _late(facts, values)),
        ("effective_depth", _early(facts, values)),
    ):
        if sentence and measure in values:
            yield reference.unusual(measure, values[measure], name), sentence
    if outlier := _outlier(facts):
        yield 0.0, outlier


def _last(facts: Facts, values: Mapping[str, float], name: str) -> str:
    """The last layer against the median layer, and its jump among those of published models."""
    last, ratio = facts.displacement.get(facts.layers), values.get("last_over_median")
    if last is None or ratio is None:
        return ""
    jump = values.get("zeta_L", 0.0)
    known = reference.of_measure("zeta_L", name)
    among = f" ({len(known)} known models: {known[0]:.1f} to {known[-1]:.1f})" if known else ""
    size = "a large jump" if round(jump, 1) >= LARGE_JUMP else "a jump"
    if abs(last - facts.median) <= NOISE * facts.errors.get(facts.layers, 0.0) or 1 / FAR < ratio < FAR:
        return f"The last layer turns it about as far as the median layer does ({100 * last:.1f} %): no jump."
    amounts = f"{100 * last:.1f} % against {100 * facts.median:.1f} %"
    if ratio < 1:
        return f"The last layer turns it less than the median layer does ({amounts}): no jump."
    told = f": {size} of {jump:.1f} points over the layer before{among}" if round(jump, 1) > 0 else ""
    return f"The last layer turns it {ratio:.1f} times as far as the median layer ({amounts}){told}."


def _late(facts: Facts, values: Mapping[str, float]) -> str:
    """Where predictions settle."""
    share, median = values.get("late_share"), values.get("median_saturation")
    if share is None or median is None:
        return ""
    if share >= 1 / 3:
        return f"{100 * share:.0f} % of all predictions still change in the last two layers."
    layer = round(median * facts.layers)
    return f"Half of all predictions are final after layer {layer}; {100 * share:.0f} % change in the last two layers."


def _early(facts: Facts, values: Mapping[str, float]) -> str:
    """The first layer that is nearly as accurate as the last, if it is not the last."""
    depth = round(values.get("effective_depth", 1.0) * facts.layers)
    if depth > EARLY * facts.layers:
        return ""
    return f"Layer {depth} already has 95 % of the last layer’s accuracy."


def _outlier(facts: Facts) -> str:
    """The layer in the middle that turns the stream much farther than the median layer."""
    middle = {layer: mean for layer, mean in facts.displacement.items() if 2 < layer < facts.layers - 1}
    if not middle or not facts.median:
        return ""
    layer = max(middle, key=middle.__getitem__)
    ratio = middle[layer] / facts.median
    if ratio < 2 * FAR:
        return ""
    return f"In the middle, layer {layer} stands out: {ratio:.1f} times the median."


def _next(meta: Mapping[str, Any], layers: int) -> dict[str, str]:
    """What to run next, and why: the search for blocks that can go, or a comparison where there is no such search."""
    model, data = meta.get("model") or {}, meta.get("data") or {}
    if model.get("task") != "causal-lm" or not model.get("name"):
        return {"why": "measure another model on the same data:", "command": COMPARE}
    blocks = min(BLOCKS, max(1, layers // 6))
    texts = str(data.get("name") or "") if data.get("kind") in ("text", "pairs") else ""
    if texts.startswith(BUILTIN):
        texts = BUILTIN
    name, source = (shlex.quote(short(text, 160)) for text in (model["name"], texts or "pairs.jsonl"))
    return {
        "why": "measure which can go:",
        "command": f"fulldepth skip search {name} --data {source} --blocks {blocks} --output plan/",
    }
