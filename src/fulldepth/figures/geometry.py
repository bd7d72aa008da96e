"""Norms, entropy, weights, classes: the geometry of the representations and of the projections."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.draw import line
from fulldepth.figures.record import SHARE, Figure, Method, Quantity, Source, readings
from fulldepth.figures.rows import NO_FIRST, Curve, curve, select
from fulldepth.figures.style import CATEGORICAL, MUTED, categorical, extremes, figure, label, layer_axis

SITES = {"residual": "Residual stream", "value": "Value states"}


def logarithmic(values: list[float | None], title: str) -> dict[str, object]:
    """A log axis where every value is positive; else a linear one, so that nothing vanishes."""
    known = [value for value in values if value is not None]
    if min(known, default=0) <= 0:
        return {"title": {"text": title}, "rangemode": "tozero"}
    marks = (1, 2, 5) if max(known) / min(known) < 1e3 else (1,)
    ticks = [mark * 10.0**power for power in range(-12, 13) for mark in marks]
    return {"title": {"text": title}, "type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _norm_ratio(source: Source) -> go.Figure | None:
    ratio, without = curve(source.table, "norm_ratio", "mean"), curve(source.table, "norm_ratio", "mean" + NO_FIRST)
    traces = [line(ratio, "All counted tokens", CATEGORICAL[0], form=".3f")] if ratio else []
    if without:
        traces.append(line(without, "Without first token", CATEGORICAL[1], "dash", form=".3f"))
    if not traces:
        return None
    drawn = figure(
        traces,
        alt=extremes("Norm ratio", ratio.layers, ratio.values, ".2f"),
        xaxis=layer_axis(source.layers),
        yaxis=logarithmic(ratio.values + without.values, "‖h‖ / ‖update‖"),
    )
    drawn.add_hline(1, line={"color": MUTED, "dash": "dot", "width": 1})
    return drawn


def _entropy(table: pd.DataFrame, layers: int) -> Iterator[tuple[str, go.Figure]]:
    statistics = [str(s).split(":") for s in select(table, "renyi_entropy")["statistic"].unique()]
    triples = [parts for parts in statistics if len(parts) == 3 and parts[0] == "mean"]
    for preset in dict.fromkeys(parts[1] for parts in triples):
        alphas = sorted({parts[2] for parts in triples if parts[1] == preset})
        found = {
            (site, alpha): curve(table, "renyi_entropy", f"mean:{preset}:{alpha}", site)
            for site in SITES
            for alpha in alphas
        }
        traces = [
            line(
                entropy,
                f"{SITES[site]}, α = {label(alpha, 8)}",
                CATEGORICAL[list(SITES).index(site)],
                categorical(6 * alphas.index(alpha))["dash"],
            )
            for (site, alpha), entropy in found.items()
            if entropy
        ]
        if not traces:
            continue
        shown = next(entropy for entropy in found.values() if entropy)
        yield (
            preset,
            figure(
                traces,
                title="Matrix entropy per layer",
                subtitle="Rényi entropy of a sequence’s Gram matrix; low = collapsed onto few directions",
                alt=extremes("Entropy in nats", shown.layers, shown.values, ".2f"),
                xaxis=layer_axis(layers, first=0),
                yaxis={"title": {"text": "Entropy (nats)"}, "rangemode": "tozero"},
                variant=f"Preset {label(preset, 24)}",
            ),
        )


def _entropies(table: pd.DataFrame) -> tuple[Quantity, ...]:
    """A curve for each site, preset and order."""
    found = []
    entropies = select(table, "renyi_entropy")[["statistic", "site"]].drop_duplicates()
    for statistic, site in entropies.itertuples(index=False):
        kind, _, rest = str(statistic).partition(":")
        preset, colon, alpha = rest.partition(":")
        if kind == "mean" and colon and ":" not in alpha and site in SITES:
            variant = f"{SITES[site]}, {label(preset, 24)}, α = {label(alpha, 8)}"
            key = f"{site}:{preset}:{alpha}"
            found.append(
                Quantity("renyi_entropy", statistic, "Matrix entropy", "Entropy (nats)", site, key=key, variant=variant)
            )
    return tuple(found)


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
    norms = {site: curve(source.table, "spectral_norm", "value", site) for site in sites}
    norms |= {f"{site}, mean of experts": curve(source.table, "spectral_norm", "mean", site) for site in sites}
    norms = {site: norm for site, norm in norms.items() if norm}
    if not norms:
        return None
    traces = []
    for index, (site, norm) in enumerate(norms.items()):
        style = categorical(index)
        traces.append(line(norm, label(site, 48), style["color"], style["dash"], ".3f"))
    largest = max((max(v for v in norm.values if v is not None), site) for site, norm in norms.items())
    return figure(
        traces,
        alt=f"{len(norms)} projections; the largest norm, {largest[0]:.2f}, is in {label(largest[1], 48)}.",
        xaxis=layer_axis(source.layers),
        yaxis={"title": {"text": "‖W‖₂"}, "rangemode": "tozero"},
        hoverlabel={"font": {"size": 11}},
        height=420,
    )


def _nc1(source: Source) -> go.Figure | None:
    collapse = curve(source.table, "nc1", "value")
    if not collapse:
        return None
    return figure(
        [line(collapse, "NC1", CATEGORICAL[0], form=".3~g")],
        alt=extremes("NC1", collapse.layers, collapse.values, ".3g"),
        xaxis=layer_axis(source.layers, first=0),
        yaxis=logarithmic(collapse.values, "NC1"),
    )


def _separability(source: Source) -> go.Figure | None:
    traces = []
    shown: Curve | None = None
    for index, (site, name) in enumerate(SITES.items()):
        mean, spread = (
            curve(source.table, "separability", "mean", site),
            curve(source.table, "separability", "std", site),
        )
        if not mean:
            continue
        shown = shown or mean
        drawn = line(mean, name, CATEGORICAL[index], form=".1%")
        widths = dict(zip(spread.layers, spread.values, strict=True))
        if spread:
            heights = [widths.get(layer) or 0 for layer in mean.layers]
            drawn.error_y = {"array": heights, "color": CATEGORICAL[index], "thickness": 1.5, "width": 3}
        traces.append(drawn)
    if shown is None:
        return None
    return figure(
        traces,
        alt=extremes("Separability", shown.layers, shown.values, ".1%"),
        xaxis=layer_axis(source.layers, first=0),
        yaxis={"title": {"text": "Accuracy"}, "range": [0, 1.04], "tickformat": ".0%"},
    )


def _mmd(source: Source) -> go.Figure | None:
    distance = curve(source.table, "mmd", "value")
    if not distance:
        return None
    return figure(
        [line(distance, "MMD²", CATEGORICAL[0], form=".4~g")],
        alt=extremes("MMD²", distance.layers, distance.values, ".3g"),
        xaxis=layer_axis(source.layers, first=0),
        yaxis={"title": {"text": "MMD²"}, "rangemode": "tozero"},
    )


FIGURES = (
    Figure(
        "norm_ratio",
        "geometry",
        _norm_ratio,
        title="Residual dominance per layer",
        subtitle="Norm of the incoming stream over the norm of what the layer adds (log scale)",
        methods=(
            Method(
                "Residual dominance",
                ("norm_ratio",),
                "Per token, then averaged. Above 1 the stream outweighs what the layer adds to it.",
                formula=(
                    "<msub><mi>r</mi><mi>l</mi></msub><mo>=</mo><mfrac><mrow><mo>‖</mo><msub><mi>h</mi><mrow><mi>l</mi>"
                    "<mo>−</mo><mn>1</mn></mrow></msub><mo>‖</mo></mrow><mrow><mo>‖</mo><msub><mi>h</mi><mi>l</mi>"
                    "</msub><mo>−</mo><msub><mi>h</mi><mrow><mi>l</mi><mo>−</mo><mn>1</mn></mrow></msub><mo>‖</mo>"
                    "</mrow></mfrac>"
                ),
                source="Jiang et al., <cite>Tracing Representation Progression</cite>, Fig. 11.",
            ),
        ),
        curves=(Quantity("norm_ratio", "mean", "Residual dominance", "‖h‖ / ‖update‖", form=".3f"),),
        followed=True,
    ),
    Figure(
        "renyi_entropy",
        "geometry",
        lambda source: readings(_entropy(source.table, source.layers)),
        methods=(
            Method(
                "Matrix entropy",
                ("renyi_entropy",),
                (
                    "λ are the eigenvalues of a sequence’s Gram matrix; α = 1 is the limit. In nats: its exponential "
                    "is roughly how many directions the tokens of one sequence fill. Presets differ in how states are "
                    "prepared and cannot be compared."
                ),
                formula=(
                    "<msub><mi>S</mi><mi>α</mi></msub><mo>=</mo><mfrac><mn>1</mn><mrow><mn>1</mn><mo>−</mo><mi>α</mi>"
                    "</mrow></mfrac><mi>log</mi><munder><mo>∑</mo><mi>i</mi></munder><msup><mrow><mo>(</mo><mfrac>"
                    "<msub><mi>λ</mi><mi>i</mi></msub><mrow><mi>tr</mi><mi>K</mi></mrow></mfrac><mo>)</mo></mrow>"
                    '<mi>α</mi></msup><mo>,</mo><mspace width="0.8em"></mspace><mi>K</mi><mo>=</mo><mi>Z</mi><msup>'
                    "<mi>Z</mi><mi>T</mi></msup>"
                ),
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
    ),
    Figure(
        "nc1",
        "geometry",
        _nc1,
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
                formula=(
                    "<mi>NC1</mi><mo>=</mo><mfrac><mn>1</mn><mi>K</mi></mfrac><mi>tr</mi><mo>(</mo><msub><mi>Σ</mi>"
                    "<mi>W</mi></msub><msubsup><mi>Σ</mi><mi>B</mi><mo>+</mo></msubsup><mo>)</mo>"
                ),
                source="Jiang et al., <cite>Tracing Representation Progression</cite>, footnote 5.",
            ),
        ),
        curves=(Quantity("nc1", "value", "Class collapse (NC1)", "NC1", form=".3~g", settings={"type": "log"}),),
        followed=True,
    ),
    Figure(
        "separability",
        "geometry",
        _separability,
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
        _mmd,
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
                formula=(
                    '<msup><mi>MMD</mi><mn>2</mn></msup><mo>=</mo><mi>E</mi><mspace width="0.1em"></mspace><mi>k</mi>'
                    "<mo>(</mo><mi>x</mi><mo>,</mo><msup><mi>x</mi><mo>′</mo></msup><mo>)</mo><mo>+</mo><mi>E</mi>"
                    '<mspace width="0.1em"></mspace><mi>k</mi><mo>(</mo><mi>y</mi><mo>,</mo><msup><mi>y</mi><mo>′</mo>'
                    '</msup><mo>)</mo><mo>−</mo><mn>2</mn><mi>E</mi><mspace width="0.1em"></mspace><mi>k</mi><mo>(</mo>'
                    "<mi>x</mi><mo>,</mo><mi>y</mi><mo>)</mo>"
                ),
                source=(
                    "<cite>Hopscotch: Discovering and Skipping Redundancies in Language Models</cite>, analysis; "
                    "V-statistic."
                ),
            ),
        ),
        curves=(Quantity("mmd", "value", "Distance from the reference model", "MMD²", form=".4~g"),),
    ),
)
