"""Pages of training runs and their comparisons: model and settings, costs, runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fulldepth.reporting.measured import Meta, Shown, labelled
from fulldepth.reporting.phrases import NOTHING, TERMS, quantity, scaled, short
from fulldepth.reporting.source import PageSource, curve
from fulldepth.reporting.style import minus
from fulldepth.reporting.tables import PROSE, Table, by_subject, flatten, settings_table


def differences(entry: Meta, _: PageSource) -> list[Shown]:
    """The findings of a comparison of runs; all but the validation losses are marked as later."""
    headline = (entry.get("headline") or {}).items()
    return [Shown(finding, later=not name.startswith("validation_loss")) for name, finding in headline]


def objective_line(objective: Meta) -> str:
    """The terms of the loss with their options."""
    parts = [] if (objective or {}).get("aligned") is not None else ["cross-entropy"]
    for term, value in (objective or {}).items():
        if term != "energy_warmup" and value is not None:
            options = flatten(value if isinstance(value, Mapping) else {"weight": value})
            told = ", ".join(f"{short(name, 40)} {option}" for name, option in options.items())
            parts.append(f"{TERMS.get(term, term).lower()} ({told})")
    return " + ".join(short(part, 200) for part in parts)


def schedule_line(settings: Meta) -> str:
    """Steps, batches and tokens."""
    steps, batch, length = (settings.get(key) for key in ("steps", "global_batch_size", "sequence_length"))
    if not (steps and batch and length):
        return ""
    if settings.get("task", "causal-lm") != "causal-lm":
        return f"{steps:,} steps × {batch:,} {'texts' if settings['task'] == 'text-classification' else 'images'}"
    total = scaled(steps * batch * length)
    return f"{steps:,} steps × {batch:,} sequences × {length:,} tokens = {total} tokens"


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
    return {
        "cost": [Table("Time and memory", [""], rows, note=note)],
        "settings": [settings_table("All settings", source.meta.get("settings"))],
    }


def side_by_side(source: PageSource) -> Table:
    """The comparison in one table: one row per run, at the last common step."""
    meta = source.meta

    def cell(own: str, against: str, form: str) -> Callable[[Meta], str]:
        def text(entry: Meta) -> str:
            finding = (entry.get("headline") or {}).get(own) or {}
            amount = quantity(finding.get("value"), str(finding.get("unit", "1"))) if own else NOTHING
            relation = ((meta.get("headline") or {}).get(f"{against}:{entry.get('label')}") or {}).get("value")
            if not isinstance(relation, int | float):
                return amount
            relative = f"{relation:.2f}×" if form == "×" else minus(relation, form)
            return f"{amount} ({relative})" if own else relative

        return text

    columns = {
        "Validation loss": cell("validation_loss", "", ""),
        "Difference": cell("", "validation_loss", "+.3f"),
        "Jump of the last layer": cell("zeta_L", "zeta_L", "+.1f"),
        "Displacement": cell("", "redundancy_change", "+.2f"),
        "Time per step": cell("time_per_step", "time_per_step", "×"),
        "Peak memory": cell("peak_memory", "peak_memory", "×"),
        "Parameters": cell("parameters", "parameters", "×"),
    }
    step = meta.get("step")
    when = f"At step {step:,}. " if isinstance(step, int) else ""
    note = f"""{when}In brackets the difference from the baseline, or the multiple of it (×): of time only where
    the 95 % interval of the ratio does not hold 1, and where the machine was otherwise idle. Displacement is the
    median change over layers, times 10⁻². One run each: how much another seed would change is not known."""
    runs = [(labelled(entry), entry) for entry in meta.get("models") or []]
    return by_subject("Runs side by side", "Run", runs, columns, note)


def tables_of_runs(source: PageSource) -> dict[str, list[Table]]:
    """The settings in which the runs differ: one row per setting, one column per run."""
    models = source.meta.get("models") or []
    flat = [flatten(entry.get("settings") or {}) for entry in models]
    keys = dict.fromkeys(key for settings in flat for key in settings if key not in PROSE)
    rows = [
        [short(key, 80), *(short(settings.get(key, NOTHING), 60) for settings in flat)]
        for key in keys
        if len({settings.get(key) for settings in flat}) > 1
    ]
    note = "Settings that are equal in all runs are left out."
    return {
        "settings": [Table("What differs", [labelled(entry) for entry in models], rows, "Setting", note, text=True)]
    }
