"""One training run: losses, penalties, learning rate and speed over steps, and displacement profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import curve, select
from fulldepth.figures.draw import line, set_first_apart
from fulldepth.figures.record import TRAINING, Figure, Method, Source, readings
from fulldepth.figures.steps import Track, first_track, over_steps, thin, track
from fulldepth.figures.style import (
    CATEGORICAL,
    SEQUENTIAL,
    ZERO,
    Figures,
    axis,
    categorical,
    extremes,
    figure,
    label,
    layer_axis,
)

TERMS = {
    "jump": "Jump penalty",
    "coherence": "Coherence penalty",
    "orthogonality": "Orthogonality penalty",
    "aligned": "Aligned loss",
    "similarity": "Similarity penalty",
}
"""Site of the rows `penalty` -> name of the term."""
PROFILES = 7
"""Maximum number of steps whose displacement is drawn over layers."""
LATER = "Second half"
"""Name of the variant without the steep beginning."""


def terms(table: pd.DataFrame) -> list[str]:
    """The penalties in the table: those of `TERMS` in its order, then any others."""
    sites = [str(site) for site in select(table, "penalty")["site"].dropna().unique()]
    return [term for term in TERMS if term in sites] + [term for term in sites if term not in TERMS]


def _losses(source: Source) -> Figures:
    tracks = [
        track(source.table, "validation_loss", name="Validation"),
        track(source.table, "train_loss", name="Training", color=CATEGORICAL[1], dash="dash"),
    ]
    later = [run_track.later() for run_track in tracks]
    return readings(
        (key, _loss(part, variant)) for key, part, variant in (("", tracks, "All steps"), ("later", later, LATER))
    )


def _loss(tracks: Sequence[Track], variant: str) -> go.Figure | None:
    return over_steps(
        tracks,
        ".4f",
        alt=first_track("{} loss in nats", ".3f"),
        yaxis=axis("Loss (nats)"),
        variant=variant,
        showlegend=True,
    )


def _penalties(source: Source) -> Figures:
    """One small figure per term, because their scales are unrelated."""
    logged_terms = terms(source.table)
    return readings(
        (
            term,
            penalty_figure(
                [track(source.table, "penalty", term, name=term_name(term), color=categorical(index)["color"])],
                term,
                first_track("{}", ".4g"),
                _weight(source.meta, term),
                beside=len(logged_terms) > 1,
            ),
        )
        for index, term in enumerate(logged_terms)
    )


def penalty_figure(
    tracks: Sequence[Track],
    term: str,
    alt: Callable[[Sequence[Track]], str],
    weight: float | None = None,
    *,
    beside: bool,
    **layout: Any,
) -> go.Figure | None:
    """The figure of one term; side by side with those of other terms if `beside`."""
    stated = "" if weight is None else f"weight {weight:g}"
    return over_steps(
        tracks,
        ".4~g",
        title="Penalties over training" if beside else f"{term_name(term)} over training",
        subtitle="Mean since the previous evaluation, before its weight"
        + (f" of {weight:g}" if stated and not beside else ""),
        alt=alt,
        yaxis=axis("nats" if tracks[0].unit == "nats" else "Penalty", **ZERO, tickformat=".3~g"),
        variant=", ".join(filter(None, [term_name(term), stated])) if beside else "",
        beside=beside,
        height=300 if beside else 380,
        **layout,
    )


def term_name(term: str) -> str:
    """Displayed name of a term of the objective."""
    return TERMS.get(term) or label(term, 40)


def _weight(meta: Mapping[str, Any], term: str) -> float | None:
    """The term's weight if the settings state it."""
    stated = ((meta.get("settings") or {}).get("objective") or {}).get(term)
    weight = stated.get("weight") if isinstance(stated, Mapping) else stated
    return float(weight) if isinstance(weight, int | float) and not isinstance(weight, bool) else None


def _profiles(source: Source) -> go.Figure | None:
    """The displacement of every layer at a few steps, later steps in stronger colours."""
    rows = select(source.table, "displacement", "mean", "residual")
    profiles = {step: curve(rows[rows["step"] == step], "displacement", "mean") for step in sorted(set(rows["step"]))}
    steps = [int(step) for step, profile in profiles.items() if profile]
    if not steps:
        return None
    shown = thin(steps, PROFILES)
    last = profiles[shown[-1]]
    drawn = figure(
        [line(profiles[step], f"Step {step:,}", _shade(index, len(shown))) for index, step in enumerate(shown)],
        alt=extremes(f"Mean displacement at step {shown[-1]:,}", last.layers, last.values),
        xaxis=layer_axis(source.layers),
        yaxis=axis("Displacement Ψ", **ZERO),
        showlegend=True,
    )
    return set_first_apart(drawn, [f"Step {step:,}" for step in shown])


def _shade(index: int, count: int) -> str:
    """Colour of profile number `index` of `count`; the last is the strongest."""
    first, final = 2, len(SEQUENTIAL) - 1
    return SEQUENTIAL[final if count == 1 else first + round(index * (final - first) / (count - 1))]


FIGURES = (
    Figure(
        "loss",
        "loss",
        _losses,
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
        lambda source: over_steps(
            [track(source.table, "learning_rate", name="Learning rate")],
            ".3~e",
            alt=first_track("{}", ".2e"),
            yaxis=axis("Learning rate", **ZERO, tickformat="~e"),
        ),
        kinds=(TRAINING,),
        title="Learning rate",
        subtitle="As it stood at each evaluation",
    ),
    Figure(
        "penalty",
        "loss",
        _penalties,
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
        lambda source: over_steps(
            [track(source.table, "throughput", name="Throughput")],
            ",.0f",
            alt=first_track("Tokens per second", ",.0f"),
            yaxis=axis("Tokens/s", **ZERO, tickformat="~s"),
        ),
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
                    "far, or, without one, that the process held since the run began, libraries included: its "
                    "ratios are then closer to one than those of the training itself. Time and memory are compared "
                    "only of runs during which other programs used at most 10 % of the machine’s CPU time."
                ),
            ),
        ),
    ),
)
