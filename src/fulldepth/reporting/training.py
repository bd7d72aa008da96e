"""Pages of training runs and their comparisons: model and settings, costs, runs side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fulldepth.reporting.measured import Shown
from fulldepth.reporting.phrases import TERMS, quantity, short
from fulldepth.reporting.source import PageSource, curve, number
from fulldepth.reporting.style import minus
from fulldepth.reporting.tables import PROSE, Meta, Table, across, flatten, labelled, of_record, texts


def differences(entry: Meta, _: PageSource) -> list[Shown]:
    """The findings of a comparison of runs, the validation losses first."""
    headline = entry.get("headline") or {}
    return [Shown(headline[name]) for name in sorted(headline, key=lambda name: not name.startswith("validation_loss"))]


def objective_line(objective: Meta) -> str:
    """The terms of the loss with their options."""
    replaced = any((objective or {}).get(term) is not None for term in ("aligned", "multi_exit"))
    parts = [] if replaced else ["cross-entropy"]
    for term, value in (objective or {}).items():
        if term != "energy_warmup" and value is not None:
            options = flatten(value if isinstance(value, Mapping) else {"weight": value})
            told = ", ".join(f"{short(name, 40)} {option}" for name, option in options.items())
            parts.append(f"{TERMS.get(term, term).lower()} ({told})")
    return " + ".join(short(part, 200) for part in parts)


def tables(source: PageSource) -> dict[str, list[Table]]:
    """Id of a section -> tables of one run: time, speed and memory as last recorded, and all settings."""
    rows = []
    for measure, name, unit in (
        ("elapsed", "Training time", "s"),
        ("throughput", "Throughput", "tokens/s"),
        ("peak_memory", "Peak memory", "MiB"),
    ):
        values = list(curve(source.table, measure, site="model", by="step").points.values())
        if values:
            varies = measure == "throughput" and len(values) > 1
            extent = f" at last ({min(values):,.0f} to {max(values):,.0f})" if varies else ""
            rows.append([name, quantity(values[-1], unit) + extent])
    note = "Evaluating and saving are left out of time and throughput."
    return {"cost": [Table("Time and memory", [""], rows, note=note)]}


def side_by_side(source: PageSource) -> Table:
    """The comparison in one table: one row per run, at the last common step."""
    meta, runs = source.meta, []
    record = texts()["tables"]["runs"]
    for entry in meta.get("models") or []:
        cells = {}
        for (name,) in record["columns"].values():
            against, form = record["relations"].get(name, ("", ""))
            found = (entry.get("headline") or {}).get(name) or {}
            relation = number(((meta.get("headline") or {}).get(f"{against}:{entry.get('label')}") or {}).get("value"))
            relative = "" if relation is None else f"{relation:.2f}×" if form == "×" else minus(relation, form)
            amount = quantity(found.get("value"), str(found.get("unit", "1"))) if found else ""
            cells[name] = f"{amount} ({relative})" if amount and relative else amount or relative
        runs.append((labelled(entry), cells))
    table, step = of_record("runs", runs), meta.get("step")
    return replace(table, note=f"At step {step:,}. {table.note}") if isinstance(step, int) else table


def tables_of_runs(source: PageSource) -> dict[str, list[Table]]:
    """The settings in which the runs differ: one row per setting, one column per run."""
    models = source.meta.get("models") or []
    flat = [flatten(entry.get("settings") or {}) for entry in models]
    keys = dict.fromkeys(key for settings in flat for key in settings if key not in PROSE)
    differing = [key for key in keys if len({settings.get(key) for settings in flat}) > 1]
    cells = [{short(key, 80): short(own[key], 60) for key in differing if key in own} for own in flat]
    note, models = "Settings that are equal in all runs are left out.", list(zip(models, cells, strict=True))
    return {"settings": [across("What differs", models, "Setting", note=note, text=True)]}
