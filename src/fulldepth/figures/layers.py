"""What layers do to the states: displacement and jump rate, coherence, norms, entropy, weights, classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import NO_FIRST, curve, select
from fulldepth.figures.draw import (
    Drawn,
    Line,
    band,
    logarithmic,
    of_layers,
    over_layers,
    set_first_apart,
)
from fulldepth.figures.record import Figure, Method, Quantity, Source, readings
from fulldepth.figures.style import CATEGORICAL, SHARE, ZERO, Figures, axis, categorical, label
from fulldepth.thresholds import LARGE_JUMP

FIRST_SCREEN = 310
"""Height in pixels of the figures that the page shows without scrolling."""
SAME = 0.1
"""Largest relative difference of the means with and without first tokens of which only one is drawn."""
DISPLACEMENTS = (
    Line("displacement", "Mean"),
    Line("displacement", "Mean without first token", "mean" + NO_FIRST, color=CATEGORICAL[1], dash="dash"),
    Line(
        "displacement",
        "Last layer after the final norm",
        site="final_normed",
        color=CATEGORICAL[3],
        trace={"mode": "markers", "marker": {"symbol": "diamond-open", "size": 10, "line": {"width": 2}}},
    ),
)
PER_LAYER = (Quantity("displacement", "mean", "Displacement", "Displacement Ψ"),)
PERCENT = {**ZERO, "ticksuffix": " %"}
COHERENT = {"residual": "Whole layer", "attention": "Attention sub-layer"}
"""Site of coherence -> its name."""
STATES = {"residual": "Residual stream", "value": "Value states"}
"""Site of entropy and separability -> its name."""
UNIT = {"range": [0, 1.04]}


def _displacement(source: Source) -> Figures:
    """Layers 2 to L if layer 1 would flatten them, and all layers on a logarithmic scale."""
    mean, other = (line.curve(source.table).values for line in DISPLACEMENTS[:2])
    alike = len(mean) == len(other) and None not in (*mean, *other) and np.allclose(other, mean, SAME, 0)  # type: ignore[arg-type]
    drawn = _displacements(source, DISPLACEMENTS[: 1 if alike else 2])
    logarithm = _displacements(source, DISPLACEMENTS)
    if logarithm is None:
        return {}
    values = [value for trace in logarithm.data for value in trace.y]
    if drawn is None or min((value for value in values if value is not None), default=0) <= 0:
        return {"": logarithm}
    drawn = set_first_apart(drawn, [line.name for line in DISPLACEMENTS[:2]])
    apart = drawn.layout.yaxis.range is not None
    logarithm.update_layout(yaxis=logarithmic(values, "Displacement Ψ (log scale)"))
    drawn.layout.meta["variant"] = f"Layers 2 to {source.layers}" if apart else "Linear"
    logarithm.layout.meta["variant"] = "All layers, log scale" if apart else "Log scale"
    return {"": drawn, "log": logarithm}


def _displacements(source: Source, lines: Sequence[Line]) -> go.Figure | None:
    low, high = (curve(source.table, "displacement", statistic) for statistic in ("p05", "p95"))
    return over_layers(
        source.table,
        source.layers,
        lines,
        behind=band(low, high, "p05–p95", CATEGORICAL[0]),
        yaxis=axis("Displacement Ψ", **ZERO),
        height=FIRST_SCREEN,
    )


def _coherences(table: pd.DataFrame) -> tuple[Quantity, ...]:
    """Mean coherence of both sites, corrected for bias if the table has that: it is about 1/n for n sequences."""
    statistics = set(table.loc[table["measure"] == "coherence", "statistic"])
    statistic = "mean_corrected" if "mean_corrected" in statistics else "mean"
    return tuple(
        Quantity("coherence", statistic, "Coherence", "Coherence", site, settings=UNIT, key=key, variant=name)
        for key, (site, name) in zip(("", "attention"), COHERENT.items(), strict=True)
    )


def _coherence(source: Source) -> go.Figure | None:
    lines = [
        Line("coherence", one.variant, one.statistic, one.site, color)
        for color, one in zip(CATEGORICAL, _coherences(source.table), strict=False)
    ]
    return over_layers(source.table, source.layers, lines, yaxis=axis("Coherence", **UNIT))


def _entropies(table: pd.DataFrame) -> tuple[Quantity, ...]:
    """A curve for each site, preset and order."""
    quantities = []
    for statistic, site in select(table, "renyi_entropy")[["statistic", "site"]].drop_duplicates().to_numpy():
        kind, *reading = str(statistic).split(":")
        if kind == "mean" and len(reading) == 2 and site in STATES:
            preset, alpha = reading
            variant = f"{STATES[site]}, {label(preset, 24)}, α = {label(alpha, 8)}"
            key = f"{site}:{preset}:{alpha}"
            quantities.append(
                Quantity("renyi_entropy", statistic, "Matrix entropy", "Entropy (nats)", site, key=key, variant=variant)
            )
    return tuple(quantities)


def _entropy(source: Source) -> Iterator[tuple[str, go.Figure | None]]:
    """One figure for each preset: states are prepared differently, so that presets cannot be compared."""
    every = [quantity.key.split(":") for quantity in _entropies(source.table)]
    for preset in dict.fromkeys(own for _, own, _ in every):
        alphas = sorted({alpha for _, own, alpha in every if own == preset})
        lines = [
            Line(
                "renyi_entropy",
                f"{name}, α = {label(alpha, 8)}",
                f"mean:{preset}:{alpha}",
                site,
                color,
                categorical(6 * turn)["dash"],
            )
            for color, (site, name) in zip(CATEGORICAL, STATES.items(), strict=False)
            for turn, alpha in enumerate(alphas)
        ]
        yield (
            preset,
            over_layers(
                source.table,
                source.layers,
                lines,
                first=0,
                yaxis=axis("Entropy (nats)", **ZERO),
                variant=f"Preset {label(preset, 24)}",
            ),
        )


def _spectral_norm(source: Source) -> go.Figure | None:
    """A line for each projection, and for the mean of the experts of a layer."""
    pairs = select(source.table, "spectral_norm")[["statistic", "site"]].dropna().drop_duplicates()
    lines = [
        Line("spectral_norm", label(site + suffix, 48), statistic, site, form=".3f")
        for statistic, suffix in (("value", ""), ("mean", ", mean of experts"))
        for site in pairs.loc[pairs["statistic"] == statistic, "site"]
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


JREG = "Shibata et al., <cite>Suppressing Final Layer Hidden State Jumps in Transformer Pretraining</cite>"
LIME = "Gerasimov et al., <cite>You Do Not Fully Utilize Transformer’s Representation Capacity</cite>, Sec. 5.3."
TRACING = "Jiang et al., <cite>Tracing Representation Progression</cite>"
DISPLACEMENT = (
    Figure(
        "displacement",
        "displacement",
        _displacement,
        title="Displacement per layer",
        subtitle="0 = keeps the direction, ½ = orthogonal, 1 = opposite",
        methods=(
            Method(
                "Displacement Ψ",
                ("displacement",),
                """Per token, then averaged. 0 means that the layer keeps the direction of its input, ½ that its
                output is orthogonal to it, 1 that it turns it around. A long run of values near zero is depth that
                hardly works. The open diamond reads the last layer after the final norm, as some published numbers
                do.""",
                r"Ψ_l = 1 − \frac{1 + cos(h_{l − 1}, h_l)}{2}",
                f"{JREG}, Eq. 2.",
            ),
        ),
        curves=PER_LAYER,
        followed=True,
    ),
    Figure(
        "jump_rate",
        "displacement",
        of_layers(
            Line("jump_rate", "ζ", "value", form=".2f", bar=True),
            yaxis=axis("ζ (%)", **PERCENT),
            level=LARGE_JUMP,
            height=FIRST_SCREEN,
        ),
        title="Jump rate from each layer on",
        subtitle=f"Growth up to the last layer; large from {LARGE_JUMP:g} % (dotted)",
        methods=(
            Method(
                "Jump rate ζ",
                ("jump_rate",),
                f"""In per cent. How much the mean displacement grows from layer l to the last; {LARGE_JUMP:g} % or
                more is a large jump: work that piles up at the end instead of being spread over the depth.""",
                r"ζ_l = 100 ∑_{k = l}^L max(0, \bar{Ψ}_k − \bar{Ψ}_{k − 1})",
                f"{JREG}, Eq. 3.",
            ),
        ),
        curves=(Quantity("jump_rate", "value", "Jump rate", "ζ (%)", form=".2f", settings=PERCENT),),
    ),
)
FIGURES = (
    Figure(
        "coherence",
        "coherence",
        _coherence,
        title="Coherence per layer",
        subtitle="1 = the layer copies, 0 = unrelated; mean over channels and frequencies, corrected for bias",
        methods=(
            Method(
                "Coherence",
                ("coherence",),
                """Each channel is standardised along the sequence, turned into a distribution over positions by a
                softmax, and Fourier transformed; S are spectra averaged over sequences. Near 1 the layer copies, near
                0 its output is unrelated to its input; cells between 0.3 and 0.7 count as effective. The estimate is
                biased up by about one over the number of sequences; the figures show it corrected for that.""",
                r"γ^2(d, k) = \frac{{|S_{x y}(d, k)|}^2}{S_{x x}(d, k) \space S_{y y}(d, k)}",
                "<cite>CR-Guided Transformers</cite>, Sec. 3.1 and App. A.3.",
            ),
        ),
        curves=_coherences,
        followed=True,
    ),
    Figure(
        "coherence_effective",
        "coherence",
        of_layers(
            *(
                Line("coherence", name, "share_0.3_0.7", site, color, form=".1%")
                for color, (site, name) in zip(CATEGORICAL, COHERENT.items(), strict=False)
            ),
            yaxis=axis("Share of cells", **ZERO, tickformat=".0%"),
        ),
        title="Share of effective cells",
        subtitle="Channel-frequency cells with a coherence between 0.3 and 0.7",
    ),
    Figure(
        "norm_ratio",
        "geometry",
        of_layers(
            Line("norm_ratio", "All counted tokens", form=".3f"),
            Line("norm_ratio", "Without first token", "mean" + NO_FIRST, color=CATEGORICAL[1], dash="dash", form=".3f"),
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
                r"r_l = \frac{‖h_{l − 1}‖}{‖h_l − h_{l − 1}‖}",
                f"{TRACING}, Fig. 11.",
            ),
        ),
        curves=(Quantity("norm_ratio", "mean", "Residual dominance", "‖h‖ / ‖update‖", form=".3f"),),
        followed=True,
    ),
    Figure(
        "renyi_entropy",
        "geometry",
        lambda source: readings(_entropy(source)),
        title="Matrix entropy per layer",
        subtitle="Rényi entropy of a sequence’s Gram matrix; low = collapsed onto few directions",
        methods=(
            Method(
                "Matrix entropy",
                ("renyi_entropy",),
                """λ are the eigenvalues of a sequence’s Gram matrix; α = 1 is the limit. In nats: its exponential is
                roughly how many directions the tokens of one sequence fill. Presets differ in how states are prepared
                and cannot be compared.""",
                r"S_α = \frac{1}{1 − α} log ∑_i {(\frac{λ_i}{tr K})}^α, \quad K = Z Z^T",
                LIME,
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
        secondary=True,
    ),
    Figure(
        "nc1",
        "geometry",
        of_layers(
            Line("nc1", "NC1", "value", form=".3~g"),
            yaxis=lambda values: logarithmic(values, "NC1"),
            first=0,
        ),
        title="Class collapse per layer (NC1)",
        subtitle="Within-class over between-class spread; small = classes have collapsed to points (log scale)",
        methods=(
            Method(
                "NC1",
                ("nc1",),
                """Spread within the K classes against the spread between them. It falls towards zero as every class
                gathers at its mean.""",
                r"NC1 = \frac{1}{K} tr(Σ_W Σ_B^+)",
                f"{TRACING}, footnote 5.",
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
                for color, (site, name) in zip(CATEGORICAL, STATES.items(), strict=False)
            ),
            yaxis=axis("Accuracy", **SHARE),
            first=0,
        ),
        title="Linear separability of look-alike words",
        subtitle="Cross-validated accuracy of a logistic regression; bars: one standard deviation over folds",
        methods=(
            Method(
                "Linear separability",
                ("separability",),
                """Accuracy of a logistic regression that tells look-alike words apart from their states: stratified
                five-fold cross-validation, features standardised inside each fold. Falling values mean that
                representations collapse.""",
                source=LIME,
            ),
        ),
        curves=(Quantity("separability", "mean", "Linear separability", "Accuracy", form=".1%", settings=SHARE),),
        followed=True,
    ),
)
