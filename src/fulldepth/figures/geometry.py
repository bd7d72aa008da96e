"""Geometry of representations and projections: norms, entropy, spectral norms, classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import NO_FIRST, select
from fulldepth.figures.draw import Drawn, Line, first_line, logarithmic, of_layers, over_layers
from fulldepth.figures.record import Figure, Method, Quantity, Source, readings
from fulldepth.figures.style import CATEGORICAL, SHARE, ZERO, axis, categorical, label

SITES = {"residual": "Residual stream", "value": "Value states"}


def _entropy(source: Source) -> Iterator[tuple[str, go.Figure | None]]:
    statistics = [str(s).split(":") for s in select(source.table, "renyi_entropy")["statistic"].unique()]
    triples = [parts for parts in statistics if len(parts) == 3 and parts[0] == "mean"]
    for preset in dict.fromkeys(parts[1] for parts in triples):
        alphas = sorted({parts[2] for parts in triples if parts[1] == preset})
        lines = [
            Line(
                "renyi_entropy",
                f"{name}, α = {label(alpha, 8)}",
                f"mean:{preset}:{alpha}",
                site,
                color,
                categorical(6 * turn)["dash"],
            )
            for color, (site, name) in zip(CATEGORICAL, SITES.items(), strict=False)
            for turn, alpha in enumerate(alphas)
        ]
        drawn = over_layers(
            source.table,
            source.layers,
            lines,
            title="Matrix entropy per layer",
            subtitle="Rényi entropy of a sequence’s Gram matrix; low = collapsed onto few directions",
            alt=first_line("Entropy in nats", ".2f"),
            first=0,
            yaxis=axis("Entropy (nats)", **ZERO),
            variant=f"Preset {label(preset, 24)}",
        )
        yield preset, drawn


def _entropies(table: pd.DataFrame) -> tuple[Quantity, ...]:
    """A curve for each site, preset and order."""
    quantities = []
    entropies = select(table, "renyi_entropy")[["statistic", "site"]].drop_duplicates()
    for statistic, site in entropies.itertuples(index=False):
        kind, _, reading = str(statistic).partition(":")
        preset, colon, alpha = reading.partition(":")
        if kind == "mean" and colon and ":" not in alpha and site in SITES:
            variant = f"{SITES[site]}, {label(preset, 24)}, α = {label(alpha, 8)}"
            key = f"{site}:{preset}:{alpha}"
            quantities.append(
                Quantity("renyi_entropy", statistic, "Matrix entropy", "Entropy (nats)", site, key=key, variant=variant)
            )
    return tuple(quantities)


def _projections(table: pd.DataFrame) -> tuple[Quantity, ...]:
    """A curve for each projection."""
    norms = select(table, "spectral_norm")
    pairs = norms[norms["statistic"] != "max"][["site", "statistic"]].dropna().drop_duplicates()
    return tuple(
        Quantity(
            "spectral_norm",
            statistic,
            "Spectral norm",
            "‖W‖₂",
            site,
            form=".3f",
            key=site,
            variant=label(site, 36) + (", mean of experts" if statistic == "mean" else ""),
        )
        for site, statistic in pairs.itertuples(index=False)
    )


def _spectral_norm(source: Source) -> go.Figure | None:
    sites = [site for site in select(source.table, "spectral_norm")["site"].unique() if site is not None]
    lines = [
        line
        for statistic, suffix in (("value", ""), ("mean", ", mean of experts"))
        for site in sites
        if (line := Line("spectral_norm", label(site + suffix, 48), statistic, site, form=".3f")).curve(source.table)
    ]
    return over_layers(
        source.table,
        source.layers,
        [replace(line, **categorical(index)) for index, line in enumerate(lines)],
        alt=_largest_norm,
        yaxis=axis("‖W‖₂", **ZERO),
        hoverlabel={"font": {"size": 11}},
        height=420,
    )


def _largest_norm(drawn: Drawn) -> str:
    norm, name = max((max(value for value in values.values if value is not None), line.name) for line, values in drawn)
    return f"{len(drawn)} projections; the largest norm, {norm:.2f}, is in {name}."


FIGURES = (
    Figure(
        "norm_ratio",
        "geometry",
        of_layers(
            Line("norm_ratio", "All counted tokens", form=".3f"),
            Line("norm_ratio", "Without first token", "mean" + NO_FIRST, color=CATEGORICAL[1], dash="dash", form=".3f"),
            alt=first_line("Norm ratio", ".2f"),
            yaxis=lambda values: logarithmic(values, "‖h‖ / ‖update‖"),
            level=1,
        ),
        title="Residual dominance per layer",
        subtitle="Norm of the incoming stream over the norm of what the layer adds (log scale)",
        methods=(
            Method(
                "Residual dominance",
                ("norm_ratio",),
                "Per token, then averaged. Above 1 the stream outweighs what the layer adds to it.",
                formula=r"r_l = \frac{‖h_{l − 1}‖}{‖h_l − h_{l − 1}‖}",
                source="Jiang et al., <cite>Tracing Representation Progression</cite>, Fig. 11.",
            ),
        ),
        curves=(Quantity("norm_ratio", "mean", "Residual dominance", "‖h‖ / ‖update‖", form=".3f"),),
        followed=True,
    ),
    Figure(
        "renyi_entropy",
        "geometry",
        lambda source: readings(_entropy(source)),
        methods=(
            Method(
                "Matrix entropy",
                ("renyi_entropy",),
                (
                    "λ are the eigenvalues of a sequence’s Gram matrix; α = 1 is the limit. In nats: its exponential "
                    "is roughly how many directions the tokens of one sequence fill. Presets differ in how states are "
                    "prepared and cannot be compared."
                ),
                formula=r"S_α = \frac{1}{1 − α} log ∑_i {(\frac{λ_i}{tr K})}^α, \quad K = Z Z^T",
                source=(
                    "Gerasimov et al., <cite>You Do Not Fully Utilize Transformer’s Representation Capacity</cite>, "
                    "Sec. 5.3."
                ),
            ),
        ),
        curves=_entropies,
        followed=True,
    ),
    Figure(
        "spectral_norm",
        "geometry",
        _spectral_norm,
        title="Spectral norm per projection",
        subtitle="Largest singular value of each weight matrix",
        methods=(
            Method(
                "Spectral norm",
                ("spectral_norm",),
                "The largest singular value of a weight matrix: the most by which it can stretch its input.",
                source="<cite>Hopscotch: Discovering and Skipping Redundancies in Language Models</cite>, analysis.",
            ),
        ),
        curves=_projections,
        secondary=True,
    ),
    Figure(
        "nc1",
        "geometry",
        of_layers(
            Line("nc1", "NC1", "value", form=".3~g"),
            alt=first_line("NC1", ".3g"),
            yaxis=lambda values: logarithmic(values, "NC1"),
            first=0,
        ),
        title="Class collapse per layer (NC1)",
        subtitle="Within-class over between-class spread; small = classes have collapsed to points (log scale)",
        methods=(
            Method(
                "NC1",
                ("nc1",),
                (
                    "Spread within the K classes against the spread between them. It falls towards zero as every "
                    "class gathers at its mean."
                ),
                formula=r"NC1 = \frac{1}{K} tr(Σ_W Σ_B^+)",
                source="Jiang et al., <cite>Tracing Representation Progression</cite>, footnote 5.",
            ),
        ),
        curves=(Quantity("nc1", "value", "Class collapse (NC1)", "NC1", form=".3~g", settings={"type": "log"}),),
        followed=True,
    ),
    Figure(
        "separability",
        "geometry",
        of_layers(
            *(
                Line("separability", name, site=site, color=color, form=".1%", spread="std")
                for color, (site, name) in zip(CATEGORICAL, SITES.items(), strict=False)
            ),
            alt=first_line("Separability", ".1%"),
            yaxis=axis("Accuracy", **SHARE),
            first=0,
        ),
        title="Linear separability of look-alike words",
        subtitle="Cross-validated accuracy of a logistic regression; bars: one standard deviation over folds",
        methods=(
            Method(
                "Linear separability",
                ("separability",),
                (
                    "Accuracy of a logistic regression that tells look-alike words apart from their states: stratified "
                    "five-fold cross-validation, features standardised inside each fold. Falling values mean that "
                    "representations collapse."
                ),
                source=(
                    "Gerasimov et al., <cite>You Do Not Fully Utilize Transformer’s Representation Capacity</cite>, "
                    "Sec. 5.3."
                ),
            ),
        ),
        curves=(Quantity("separability", "mean", "Linear separability", "Accuracy", form=".1%", settings=SHARE),),
        followed=True,
    ),
    Figure(
        "mmd",
        "geometry",
        of_layers(
            Line("mmd", "MMD²", "value", form=".4~g"),
            alt=first_line("MMD²", ".3g"),
            yaxis=axis("MMD²", **ZERO),
            first=0,
        ),
        title="Distance from the reference model",
        subtitle="Squared maximum mean discrepancy of the hidden states, RBF kernel",
        methods=(
            Method(
                "Maximum mean discrepancy",
                ("mmd",),
                (
                    "Distance between the states of this model and of the reference at the same layer, with a Gaussian "
                    "kernel as wide as the median distance between points. 0 means that the two are distributed alike."
                ),
                formula=r"MMD^2 = E \thin k(x, x^′) + E \thin k(y, y^′) − 2 E \thin k(x, y)",
                source=(
                    "<cite>Hopscotch: Discovering and Skipping Redundancies in Language Models</cite>, analysis; "
                    "V-statistic."
                ),
            ),
        ),
        curves=(Quantity("mmd", "value", "Distance from the reference model", "MMD²", form=".4~g"),),
    ),
)
