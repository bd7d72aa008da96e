"""Pages of training runs: the objective and the costs."""

from __future__ import annotations

from collections.abc import Mapping

from fulldepth.reporting.phrases import TERMS, quantity, short
from fulldepth.reporting.source import PageSource, curve_of
from fulldepth.reporting.tables import Meta, Table, flatten


def objective_line(objective: Meta) -> str:
    """The terms of the loss with their options, in one line."""
    replaced = any((objective or {}).get(term) is not None for term in ("aligned", "multi_exit"))
    parts = [] if replaced else ["cross-entropy"]
    for term, value in (objective or {}).items():
        if term != "energy_warmup" and value is not None:
            options = flatten(value if isinstance(value, Mapping) else {"weight": value})
            options_text = ", ".join(f"{short(name, 40)} {option}" for name, option in options.items())
            parts.append(f"{TERMS.get(term, term).lower()} ({options_text})")
    return " + ".join(short(part, 200) for part in parts)


def cost_tables(source: PageSource) -> dict[str, list[Table]]:
    """Id of a section -> table of one run: training time, throughput and peak memory as last recorded."""
    rows = []
    units = dict(zip(source.table.measure, source.table.unit, strict=True))
    for measure, name in (
        ("elapsed", "Training time"),
        ("throughput", "Throughput"),
        ("peak_memory", "Peak memory"),
    ):
        values = list(curve_of(source.table, measure, site="model", by="step").points.values())
        if values:
            varies = measure == "throughput" and len(values) > 1
            extent = f" at last ({min(values):,.0f} to {max(values):,.0f})" if varies else ""
            rows.append([name, quantity(values[-1], units[measure]) + extent])
    note = "Evaluating and saving are left out of time and throughput."
    return {"cost": [Table("Time and memory", [""], rows, note=note)]}
