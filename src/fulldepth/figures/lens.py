"""Predictions of every layer: accuracy and loss of the lens, saturation, probes, average precision."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import Curve, number, select
from fulldepth.figures.draw import Line, of_layers, over_layers, set_first_apart
from fulldepth.figures.record import Figure, Method, Quantity, Source
from fulldepth.figures.style import CATEGORICAL, SHARE, ZERO, axis, label

TOLERANCES = {"eps=": "ε", "relative_eps=": "relative ε"}
"""Prefix of a statistic of `effective_depth` -> symbol."""
PERCENT = {**ZERO, "tickformat": ".0%"}
SATURATION = (
    Line("saturation", "Settle at this layer", "share", form=".1%", bar=True),
    Line("saturation", "Settled so far", "cumulative", color=CATEGORICAL[1], form=".1%"),
)
PROBES = (
    Line("probe_accuracy", "Linear probe, second set", form=".2%", spread="standard_error"),
    Line("lens_accuracy", "The model’s own head, measured data", color=CATEGORICAL[1], dash="dash", form=".2%"),
)


def _saturation(source: Source) -> go.Figure | None:
    half = median_layer(SATURATION[1].curve(source.table))
    settled = f"Half of all positions have settled by layer {half:.0f}." if half is not None else ""
    scale = axis("Share of positions", **SHARE)
    return over_layers(source.table, source.layers, SATURATION, alt=lambda _: settled, yaxis=scale)


def _loss(source: Source) -> go.Figure | None:
    drawn = over_layers(
        source.table,
        source.layers,
        [Line("lens_loss", "Loss"), _after_attention("lens_loss")],
        yaxis=axis("Loss (nats)", **ZERO),
        first=0,
    )
    return drawn and set_first_apart(drawn, ["Loss"])


def _probes(source: Source) -> go.Figure | None:
    """Probes beside the model's own head; None without probes."""
    if not PROBES[0].curve(source.table):
        return None
    scale = axis("Accuracy", **PERCENT)
    return over_layers(source.table, source.layers, PROBES, yaxis=scale, first=0)


def _after_attention(measure: str, form: str = ".4f") -> Line:
    """The line of a lens that also reads between the attention and the MLP of every layer."""
    return Line(measure, "After attention", site="attention_output", color=CATEGORICAL[1], dash="dot", form=form)


def median_layer(cumulative: Curve) -> float | None:
    """First layer by which half of the positions have settled."""
    pairs = zip(cumulative.layers, cumulative.values, strict=True)
    return next((float(layer) for layer, share in pairs if share is not None and share >= 0.5), None)


def tolerances(table: pd.DataFrame, prefix: str) -> dict[str, float]:
    """Tolerance (as written) -> effective depth, of the statistics that start with `prefix`."""
    rows = select(table, "effective_depth")
    return {
        label(str(statistic).removeprefix(prefix), 12): depth
        for statistic, value in zip(rows["statistic"], rows["value"], strict=True)
        if str(statistic).startswith(prefix) and (depth := number(value)) is not None
    }


TRACING = "Jiang et al., <cite>Tracing Representation Progression</cite>"
PER_LAYER = Method(
    "Accuracy and loss per layer",
    ("lens_accuracy", "lens_loss"),
    """The model’s own final norm and head applied to the state of every layer; layers of a multi-exit model before the
    last are read by heads of their own. Accuracy is the share of positions whose top prediction is the true token or
    class; loss is the cross-entropy in nats, that is, the loss of a model that stops at this layer. The last layer’s
    values are the model’s own. “After attention”, if drawn, is the same in the middle of the layer, before its MLP is
    added.""",
    source=f"{TRACING}, Eq. 2; Shibata et al., App. K.",
)
FIGURES = (
    Figure(
        "lens_accuracy",
        "predictions",
        of_layers(
            Line("lens_accuracy", "Accuracy", form=".2%"),
            _after_attention("lens_accuracy", ".2%"),
            yaxis=axis("Accuracy", **PERCENT),
            first=0,
        ),
        title="Accuracy per layer",
        subtitle="Final norm and head applied to every layer; share of correct top predictions",
        methods=(
            PER_LAYER,
            Method(
                "Effective depth",
                ("effective_depth",),
                """The first layer whose accuracy is at least 1 − ε; L if there is none. For models that are far from
                perfect the relative reading says more: the first layer that reaches 1 − ε of the last layer’s
                accuracy.""",
                source=f"{TRACING}, Def. 1.",
            ),
        ),
        curves=(Quantity("lens_accuracy", "mean", "Accuracy", "Accuracy", form=".2%", settings=PERCENT),),
        followed=True,
    ),
    Figure(
        "probe_accuracy",
        "predictions",
        _probes,
        title="Linear probes per layer",
        subtitle="What a classifier fitted to each layer’s features gets right, beside the model’s own head",
        methods=(
            Method(
                "Linear probes",
                ("probe_accuracy",),
                """Logistic regression on the frozen features of each layer, fitted to the measured data and scored on
                a second set: the mean over classes of the share that is right. The model’s own head is read on the
                measured data. A probe far above it says that a layer holds the classes in directions that the head
                does not read.""",
                source=f"{TRACING}, App. B.4.",
            ),
        ),
        curves=(Quantity("probe_accuracy", "mean", "Linear probes", "Accuracy", form=".2%", settings=PERCENT),),
    ),
    Figure(
        "lens_loss",
        "predictions",
        _loss,
        title="Loss per layer",
        subtitle="Cross-entropy if the model stopped at this layer",
        methods=(PER_LAYER,),
        curves=(Quantity("lens_loss", "mean", "Loss", "Loss (nats)"),),
        followed=True,
        secondary=True,
    ),
    Figure(
        "saturation",
        "predictions",
        _saturation,
        title="Where predictions settle",
        subtitle="First layer from which the top prediction never changes again",
        methods=(
            Method(
                "Saturation",
                ("saturation",),
                """The first layer from which a position’s top prediction stays what it is at the end, right or wrong.
                Bars: share of positions that settle at each layer. Line: share that has settled so far.""",
                r"s_n = min \{ l : g(h_n^l) = … = g(h_n^L) \}",
                f"{TRACING}, Sec. 2.2.",
            ),
        ),
        curves=(
            Quantity(
                "saturation", "cumulative", "Settled predictions", "Share of positions", form=".1%", settings=SHARE
            ),
        ),
    ),
    Figure(
        "average_precision",
        "predictions",
        of_layers(
            Line("average_precision", "AP50", "ap50", form=".1%"),
            Line("average_precision", "AP75", "ap75", color=CATEGORICAL[1], dash="dash", form=".1%"),
            Line("average_precision", "AP, IoU 0.5 to 0.95", "ap", color=CATEGORICAL[2], dash="dot", form=".1%"),
            yaxis=axis("Average precision", **SHARE),
        ),
        title="Average precision per decoder layer",
        subtitle="Each layer read by the model’s final norm, class head and box head; multi-exit models have own heads",
        methods=(
            Method(
                "Average precision",
                ("average_precision",),
                """Every query gives one detection: its most probable class, with that probability as score. A
                detection is right if it overlaps a free object of its class by at least the threshold (intersection
                over union). AP50 has the threshold 0.5, AP is the mean over 0.5, 0.55, …, 0.95.""",
                source="Lin et al., <cite>Microsoft COCO</cite>, its evaluation code.",
            ),
        ),
        curves=(
            Quantity("average_precision", "ap50", "Average precision (AP50)", "AP50", form=".1%", settings=PERCENT),
        ),
        followed=True,
    ),
)
