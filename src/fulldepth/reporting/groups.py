"""Page of a comparison of two groups over seeds: the tests, the differences by seed, and the settings that differ."""

from __future__ import annotations

from textwrap import wrap

from fulldepth.core.number_format import plus_minus
from fulldepth.reporting.charts import Figure, readings
from fulldepth.reporting.draw import Drawn, chart, points, value_axis
from fulldepth.reporting.measured import PageFinding
from fulldepth.reporting.phrases import quantity, short
from fulldepth.reporting.source import PageSource, PlottedCurve, number
from fulldepth.reporting.style import CATEGORICAL, MUTED, Figures, axis, categorical, figure, label, minus
from fulldepth.reporting.tables import PROSE, Meta, Table, across, flatten, of_record, page_texts


def findings_of_groups(entry: Meta, _: PageSource) -> list[PageFinding]:
    """The findings in the order of the document, without cards: the table shows their numbers."""
    return [PageFinding(finding) for finding in (entry.get("headline") or {}).values()]


def tests_table(source: PageSource) -> Table:
    """Results of the t-tests: one row for each number."""
    rows = []
    for test in source.meta.get("tests") or []:
        unit = test["unit"]
        cells = {name: quantity(test.get(name), unit) for name in ("value", "against") if test.get(name) is not None}
        mean, spread, claim = (test.get(name) for name in ("difference", "deviation", "claim"))
        if mean is not None:
            cells["difference"] = f"{minus(mean, '+.3g')} {plus_minus(spread)}".rstrip()
        if ends := test.get("interval"):
            cells["interval"] = " to ".join(minus(end, "+.3g") for end in ends)
        if claim:
            bound = "" if test.get("bound") is None else minus(test["bound"], "+.3g")
            cells |= {"claim": short(claim, 20), "bound": bound, "p_corrected": test.get("p_corrected")}
        rows.append((_title(test), cells | {"p": test.get("p"), "pairs": test["pairs"]}))
    first, second = ([*_labels(source), "", ""])[:2]
    table = of_record("seeds", rows, f"{first} minus {second}")
    named = {"Mean": first, "Mean of the other": second}
    columns = [named.get(column, column) for column in table.columns]
    step = source.meta.get("step")
    note = f"At step {step:,}. {table.note}" if isinstance(step, int) else table.note
    return Table(table.title, columns, table.rows, table.corner, note)


def _labels(source: PageSource) -> list[str]:
    return [short(entry.get("label", "?"), 40) for entry in source.meta.get("models") or []]


def _title(test: Meta) -> str:
    """The name of a number as on the cards."""
    return str((page_texts()["headlines"].get(test["name"]) or [short(test["title"], 60)])[0])


def settings_tables(source: PageSource) -> dict[str, list[Table]]:
    """A table of the settings in which the groups differ."""
    models = source.meta.get("models") or []
    flat = [flatten(entry.get("training") or entry.get("settings") or {}) for entry in models]
    names = dict.fromkeys(name for settings in flat for name in settings if name not in (*PROSE, "seed"))
    differing = [name for name in names if len({settings.get(name) for settings in flat}) > 1]
    cells = [
        {short(name, 80): short(settings[name], 60) for name in differing if name in settings} for settings in flat
    ]
    note = "Settings that are equal in both groups are left out."
    return {"settings": [across("What differs", [*zip(models, cells, strict=True)], "Setting", note=note, text=True)]}


def seeds(_: Figure, source: PageSource) -> Figures:
    """Difference of each number: one point per seed, and the mean with its 95 % interval.

    The unit is the standard deviation of the differences.
    """
    dots: list[tuple[float, int, str]] = []
    means: list[tuple[float, int, str]] = []
    ends: list[float] = []
    names: list[str] = []
    for test in source.meta.get("tests") or []:
        scale = test.get("deviation")
        mean = test.get("difference")
        interval = test.get("interval")
        if scale and mean is not None and interval:
            at = len(names)
            unit = "" if test["unit"] == "1" else f" {short(test['unit'], 20)}"
            seed_of = zip(test.get("by_seed") or [], _seeds(source), strict=False)
            dots += [
                (value / scale, at, f"seed {seed}: {minus(value, '+.4g')}{unit}")
                for value, seed in seed_of
                if value is not None
            ]
            extent = " to ".join(minus(end, "+.3g") for end in interval)
            means.append((mean / scale, at, f"mean {minus(mean, '+.4g')}{unit} ({extent})"))
            ends.append((interval[1] - mean) / scale)
            names.append("<br>".join(label(line) for line in wrap(_title(test), 18)))
    if not names:
        return {}
    first, second = ([*_labels(source), "", ""])[:2]
    (x, y, hover_texts) = zip(*dots, strict=True) if dots else ((), (), ())
    (mean_x, mean_y, mean_hover_texts) = zip(*means, strict=True)
    bars = {"array": ends, "thickness": 2, "width": 6, "color": CATEGORICAL[1]}
    drawn = figure(
        [
            points("One seed", x, y, CATEGORICAL[0], "%{customdata}", customdata=hover_texts),
            points(
                "Mean with 95 % interval", mean_x, mean_y, CATEGORICAL[1], "%{customdata}", customdata=mean_hover_texts,
                error_x=bars, marker={"symbol": "diamond", "size": 11},
            ),
        ],
        title=f"Differences by seed: {label(first)} minus {label(second)}",
        xaxis=axis("Standard deviations", zeroline=False),
        yaxis=axis("", tickvals=[*range(len(names))], ticktext=names, range=[len(names) - 0.4, -0.6]),
        height=130 + 52 * len(names), hovermode="closest", showlegend=True,
    )  # fmt: skip
    drawn.layout.meta["alt"] = " ".join(
        f"{name.replace('<br>', ' ')}: {text}." for name, (_, _, text) in zip(names, means, strict=True)
    )
    return {"": drawn.add_vline(0, line={"color": MUTED, "width": 1})}


def loss_by_flops(record: Figure, source: PageSource) -> Figures:
    """Validation loss of both groups over the FLOPs of their training, with 95 % intervals over seeds."""
    drawn = []
    for index, entry in enumerate(source.meta.get("models") or []):
        losses = entry.get("losses_by_flops") or []
        mean, low, high = (
            PlottedCurve([*range(len(losses))], [number(loss.get(name)) for loss in losses], ["?"] * len(losses))
            for name in ("mean", "low", "high")
        )
        peta = [float(f"{loss['flops'] / 1e15:.4g}") for loss in losses]
        name = label(entry.get("label", "?"), 40)
        drawn.append(Drawn(mean, name, **categorical(index), low=low, high=high, across=peta))
    across = axis("Training compute (10¹⁵ FLOP)", unifiedhovertitle={"text": "%{x} · 10¹⁵ FLOP"})
    drawing = chart(drawn, xaxis=across, yaxis=value_axis(record.axis, record.scale), showlegend=True)
    return readings([("", drawing)])


def _seeds(source: PageSource) -> list[int]:
    """The seeds of the pairs."""
    return next((entry["seeds"] for entry in source.meta.get("models") or [] if entry.get("seeds")), [])
