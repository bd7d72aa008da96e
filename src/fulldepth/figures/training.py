"""One training run: losses, penalties, learning rate and speed over steps, and what became of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.draw import line
from fulldepth.figures.record import TRAINING, Figure, Method, Source, readings
from fulldepth.figures.rows import curve, number, select
from fulldepth.figures.steps import STEP_AXIS, change, step_line, thin
from fulldepth.figures.style import CATEGORICAL, SEQUENTIAL, Figures, extremes, figure, label, layer_axis

LOSSES = {"validation_loss": "Validation", "train_loss": "Training"}
TERMS = {
    "jump": "Jump penalty",
    "coherence": "Coherence penalty",
    "orthogonality": "Orthogonality penalty",
    "aligned": "Aligned loss",
    "similarity": "Similarity penalty",
}
"""Site of the rows `penalty` -> what the term is called."""
PROFILES = 7
"""Steps whose displacement is drawn as a profile over layers."""
LATER = "Second half"
"""The reading of a figure that leaves the steep beginning out."""


@dataclass(frozen=True)
class Track:
    """One number over steps. False where it has no finite value."""

    steps: list[int]
    values: list[float | None]
    unit: str = "1"

    def __bool__(self) -> bool:
        return any(value is not None for value in self.values)

    def later(self) -> Track:
        """The second half of the steps; nothing where too little would be left to see."""
        half = [(s, v) for s, v in zip(self.steps, self.values, strict=True) if 2 * s >= max(self.steps, default=0)]
        enough = 3 <= len(half) < len(self.steps)
        return Track([s for s, _ in half], [v for _, v in half], self.unit) if enough else Track([], [])


def track(
    table: pd.DataFrame, measure: str, site: str = "model", layer: int | None = None, column: str = "value"
) -> Track:
    """A row of each step as one line, ascending; of one layer where the rows have layers."""
    rows = select(table, measure, site=site)
    if layer is not None:
        rows = rows[(rows["layer"] == layer).fillna(False).astype(bool)]
    rows = rows.drop_duplicates("step", keep="last").sort_values("step")
    units = rows["unit"].dropna().unique()
    return Track(
        [int(step) for step in rows["step"]],
        [number(value) for value in rows[column]],
        str(units[0]) if len(units) else "1",
    )


def terms(table: pd.DataFrame) -> list[str]:
    """The penalties that the table knows, in the order of `TERMS`, then any other."""
    known = [str(site) for site in select(table, "penalty")["site"].dropna().unique()]
    return [term for term in TERMS if term in known] + [term for term in known if term not in TERMS]


def _loss(table: pd.DataFrame, later: bool) -> go.Figure | None:
    found = {name: track(table, measure) for measure, name in LOSSES.items()}
    if later:
        found = {name: one.later() for name, one in found.items()}
    found = {name: one for name, one in found.items() if one}
    if not found:
        return None
    traces = [
        step_line(one.steps, one.values, name, CATEGORICAL[index], ".4f", "solid" if name == "Validation" else "dash")
        for index, (name, one) in enumerate(found.items())
    ]
    name, shown = next(iter(found.items()))
    return figure(
        traces,
        alt=change(f"{name} loss in nats", shown.steps, shown.values, ".3f"),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "Loss (nats)"}},
        variant=LATER if later else "All steps",
        showlegend=True,
    )


def _penalties(table: pd.DataFrame, meta: Mapping[str, Any]) -> Figures:
    """One small figure a term: their sizes have nothing to do with one another."""
    known = terms(table)
    tracks = ((index, term, track(table, "penalty", term)) for index, term in enumerate(known))
    return readings(
        (
            term,
            penalty_figure(
                [step_line(found.steps, found.values, term_name(term), CATEGORICAL[index % len(CATEGORICAL)], ".4~g")],
                term,
                found.unit,
                change(term_name(term), found.steps, found.values, ".4g"),
                _weight(meta, term),
                beside=len(known) > 1,
            ),
        )
        for index, term, found in tracks
        if found
    )


def penalty_figure(
    traces: list[go.Scatter], term: str, unit: str, alt: str, weight: float | None = None, *, beside: bool
) -> go.Figure:
    """The figure of one term; side by side with the others' where there are several."""
    stated = weight is not None
    return figure(
        traces,
        title="Penalties over training" if beside else f"{term_name(term)} over training",
        subtitle="Mean since the previous evaluation, before its weight"
        + (f" of {weight:g}" if stated and not beside else ""),
        alt=alt,
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "nats" if unit == "nats" else "Penalty"}, "rangemode": "tozero", "tickformat": ".3~g"},
        variant=term_name(term) + (f", weight {weight:g}" if stated else "") if beside else "",
        beside=beside,
        height=300 if beside else 380,
    )


def term_name(term: str) -> str:
    """What readers call a term of the objective."""
    return TERMS.get(term) or label(term, 40)


def _weight(meta: Mapping[str, Any], term: str) -> float | None:
    """The term's weight where the settings state it."""
    stated = ((meta.get("settings") or {}).get("objective") or {}).get(term)
    found = stated.get("weight") if isinstance(stated, Mapping) else stated
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _learning_rate(source: Source) -> go.Figure | None:
    found = track(source.table, "learning_rate")
    if not found:
        return None
    return figure(
        [step_line(found.steps, found.values, "Learning rate", CATEGORICAL[0], ".3~e")],
        alt=change("Learning rate", found.steps, found.values, ".2e"),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "Learning rate"}, "rangemode": "tozero", "tickformat": "~e"},
    )


def _profiles(source: Source) -> go.Figure | None:
    """The displacement of every layer at a few steps, the later the stronger."""
    rows = select(source.table, "displacement", "mean", "residual")
    found = {step: curve(rows[rows["step"] == step], "displacement", "mean") for step in sorted(set(rows["step"]))}
    steps = [int(step) for step, one in found.items() if one]
    if not steps:
        return None
    shown = thin(steps, PROFILES)
    last = found[shown[-1]]
    return figure(
        [line(found[step], f"Step {step:,}", _shade(index, len(shown))) for index, step in enumerate(shown)],
        alt=extremes(f"Mean displacement at step {shown[-1]:,}", last.layers, last.values),
        xaxis=layer_axis(source.layers),
        yaxis={"title": {"text": "Displacement Ψ"}, "rangemode": "tozero"},
        showlegend=True,
    )


def _shade(index: int, count: int) -> str:
    """Colour of profile number `index` of `count`: the last is the strongest."""
    first, final = 2, len(SEQUENTIAL) - 1
    return SEQUENTIAL[final if count == 1 else first + round(index * (final - first) / (count - 1))]


def _throughput(source: Source) -> go.Figure | None:
    found = track(source.table, "throughput")
    if not found:
        return None
    return figure(
        [step_line(found.steps, found.values, "Throughput", CATEGORICAL[0], ",.0f")],
        alt=change("Tokens per second", found.steps, found.values, ",.0f"),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "Tokens/s"}, "rangemode": "tozero", "tickformat": "~s"},
    )


FIGURES = (
    Figure(
        "loss",
        "loss",
        lambda source: readings((key, _loss(source.table, bool(key))) for key in ("", "later")),
        kinds=(TRAINING,),
        title="Loss over training",
        subtitle="Cross-entropy per token without penalties; training: mean since the previous evaluation",
        methods=(
            Method(
                "Loss",
                ("validation_loss", "train_loss"),
                (
                    "Mean cross-entropy per token in nats, without penalties. The validation loss is of documents "
                    "that are held out of training, with the model in evaluation mode; the training loss is the mean "
                    "over the steps since the previous evaluation, so that it belongs to a slightly younger model. "
                    "Step 0 is the model before its first step."
                ),
            ),
        ),
    ),
    Figure(
        "learning_rate",
        "loss",
        _learning_rate,
        kinds=(TRAINING,),
        title="Learning rate",
        subtitle="As it stood at each evaluation",
    ),
    Figure(
        "penalty",
        "loss",
        lambda source: _penalties(source.table, source.meta),
        kinds=(TRAINING,),
        methods=(
            Method(
                "Penalties",
                ("penalty",),
                (
                    "What the objective adds to the cross-entropy, before its weight: the mean since the previous "
                    "evaluation. Jump: displacement averaged over layers with the weights softmax(α l), l = 1..L. "
                    "Coherence: squared distance of the attention sub-layers’ coherence from its target. "
                    "Orthogonality: squared off-diagonal entries of the channels’ correlations. Aligned: "
                    "cross-entropy of every layer’s own prediction, weighted by depth, in nats. Similarity: one minus "
                    "the cosine to the last layer."
                ),
                source=(
                    "Shibata et al., <cite>Suppressing Final Layer Hidden State Jumps in Transformer "
                    "Pretraining</cite>, Eq. 5–6; <cite>CR-Guided Transformers</cite>, Sec. 3.3; Jiang et al., "
                    "<cite>Tracing Representation Progression</cite>, Eq. 5 and App. B.3."
                ),
            ),
        ),
    ),
    Figure(
        "displacement",
        "displacement",
        _profiles,
        kinds=(TRAINING,),
        title="Displacement per layer",
        subtitle="On the validation data, the later the stronger; 0 = the layer keeps the direction, ½ = orthogonal",
    ),
    Figure(
        "throughput",
        "cost",
        _throughput,
        kinds=(TRAINING,),
        title="Throughput",
        subtitle="Tokens per second since the previous evaluation; evaluating and saving left out",
        methods=(
            Method(
                "Time and memory",
                ("throughput", "elapsed", "peak_memory"),
                (
                    "Training time leaves evaluating and saving out. Throughput counts the tokens of all processes "
                    "since the previous evaluation. Peak memory is the most that was allocated on the accelerator so "
                    "far, or, without one, that the process held, libraries included: its ratios are then closer to "
                    "one than those of the training itself."
                ),
            ),
        ),
    ),
)
