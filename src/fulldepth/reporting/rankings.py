"""Draws the scores of all blocks by which a ranking chose, for pages of `fulldepth skip`."""

from __future__ import annotations

from dataclasses import replace

from fulldepth.reporting.charts import Figure, readings
from fulldepth.reporting.draw import Drawn, chart, value_axis
from fulldepth.reporting.phrases import PARTS
from fulldepth.reporting.skip import num_layers_of, parts, removals
from fulldepth.reporting.source import PageSource, curve_of
from fulldepth.reporting.style import CATEGORICAL, Figures, label, layer_axis


def ranking(record: Figure, source: PageSource) -> Figures:
    """Scores by layer, one line for each part of a layer, removed blocks marked; one variant for each folder."""
    drawings = []
    for folder in parts(source):
        removed = {place for removal in removals([folder]) for place in removal.places}
        for line in record.lines:
            drawn = []
            for index, (part, name) in enumerate(PARTS.items()):
                scores = curve_of(folder.table, line.measure, line.statistic, part)
                pairs = zip(scores.at, scores.values, strict=True)
                marked = replace(scores, values=[score if (at, part) in removed else None for at, score in pairs])
                color = CATEGORICAL[index]
                drawn.append(Drawn(scores, name[0].upper() + name[1:], color, form=line.form))
                drawn.append(Drawn(marked, f"Removed {name}", color, form=line.form, plot="marks"))
            values = [score for curve in drawn for score in curve.curve.values]
            drawing = chart(
                drawn,
                xaxis=layer_axis(num_layers_of([folder])),
                yaxis=value_axis(line.name, record.scale, values),
                variant=label(folder.label, 40),
                height=record.height,
                showlegend=True,
            )
            drawings.append((folder.label, drawing))
    return readings(drawings)
