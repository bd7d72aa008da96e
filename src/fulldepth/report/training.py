"""Training runs on the page: what was trained, its costs, and the tables of a comparison of runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from fulldepth.figures.steps import track
from fulldepth.figures.style import minus
from fulldepth.figures.training_run import term_name
from fulldepth.report.phrases import model_line, quantity, scaled, short

Meta = Mapping[str, Any]
Table = dict[str, Any]
"""`title`, `note`, `corner` (head of the first column), `columns`, `rows` (name first), `folded`, `text`."""

PROSE = ("about", "source")
"""Settings that are prose and decide nothing."""
NOTHING = "–"


def table(title: str, columns: list[str], rows: list[list[str]], **more: Any) -> Table:
    """A table for the page."""
    return {"title": title, "note": "", "corner": "", "folded": False, "text": False, **more} | {
        "columns": columns,
        "rows": rows,
    }


def tables(results: pd.DataFrame, meta: Meta) -> dict[str, list[Table]]:
    """Id of a section -> tables that stand in it; of one run, or of a comparison of runs."""
    if meta.get("models"):
        made = {"displacement": [_jumps(meta)], "cost": [_costs(meta)], "settings": [_runs(meta), _differing(meta)]}
    else:
        made = {"cost": [_cost(results)], "settings": [_settings(meta)]}
    return {section: [one for one in found if one["rows"]] for section, found in made.items()}


def about(meta: Meta) -> list[tuple[str, str]]:
    """(what, text) pairs on one run; an empty text where the document does not say."""
    settings, data, model = (meta.get(key) or {} for key in ("settings", "data", "model"))
    named = [short(settings["about"], 400)] if settings.get("about") else []
    return [
        ("Recipe", " · ".join([*([short(meta["recipe"], 160)] if meta.get("recipe") else []), *named])),
        ("Model", model_line(model)),
        ("Objective", _objective(meta)),
        ("Data", data_line(data)),
        ("Schedule", _schedule(settings)),
        ("Optimiser", _optimiser(settings)),
        ("Fingerprint", f"data {short(data['hash'], 23)}" if data.get("hash") else ""),
    ]


def shared(meta: Meta) -> list[tuple[str, str]]:
    """The pairs of `about` that all runs of a comparison have in common."""
    every = [about(entry) for entry in meta["models"]]
    return [pair for pair in every[0] if all(pair in pairs for pairs in every)]


def _runs(meta: Meta) -> Table:
    """The other pairs: a row a run."""
    every = {_name(entry): dict(about(entry)) for entry in meta["models"]}
    common = dict(shared(meta))
    columns = [what for what in next(iter(every.values())) if what not in common]
    rows = [[name, *(pairs[what] or NOTHING for what in columns)] for name, pairs in every.items()] if columns else []
    return table("The runs", columns, rows, corner="Run", text=True)


def _objective(meta: Meta) -> str:
    """The terms of the loss with their options."""
    objective = (meta.get("settings") or {}).get("objective") or {}
    parts = [] if objective.get("aligned") is not None else ["cross-entropy"]
    for term, value in objective.items():
        if term != "energy_warmup" and value is not None:
            options = flatten(value if isinstance(value, Mapping) else {"weight": value})
            parts.append(f"{term_name(term).lower()} ({', '.join(f'{short(k, 40)} {v}' for k, v in options.items())})")
    return " + ".join(short(part, 200) for part in parts)


def data_line(data: Meta) -> str:
    """What was trained on, and how much is held out, in one line."""
    parts = [short(data["name"], 160)] if data.get("name") else []
    for key, what in (
        ("tokens", "tokens"),
        ("documents", "documents"),
        ("train_sequences", "sequences"),
        ("validation_sequences", "sequences for validation"),
    ):
        if data.get(key):
            parts.append(f"{scaled(data[key])} {what}")
    return " · ".join(parts)


def _schedule(settings: Meta) -> str:
    sizes = [settings.get(key) for key in ("steps", "global_batch_size", "sequence_length")]
    steps, batch, length = (value if isinstance(value, int) else 0 for value in sizes)
    if not steps * batch * length:
        return ""
    every = settings.get("eval_every")
    evaluated = f" · evaluated every {every:,} steps" if isinstance(every, int) else ""
    total = scaled(steps * batch * length)
    return f"{steps:,} steps × {batch:,} sequences × {length:,} tokens = {total} tokens{evaluated}"


def _optimiser(settings: Meta) -> str:
    if not isinstance(settings.get("learning_rate"), int | float):
        return ""
    parts = [f"AdamW, learning rate {settings['learning_rate']:g}"]
    for key, what in (
        ("min_learning_rate", "down to {:g}"),
        ("warmup_steps", "{:,} warm-up steps"),
        ("weight_decay", "weight decay {:g}"),
        ("clip", "gradients clipped at {:g}"),
    ):
        if isinstance(settings.get(key), int | float) and settings[key]:
            parts.append(what.format(settings[key]))
    if settings.get("decay") not in (None, "matrices"):
        parts.append(f"decay of {short(settings['decay'], 30)}")
    parts += [short(settings[key], 30) for key in ("schedule", "precision") if settings.get(key)]
    return " · ".join(parts)


def _cost(results: pd.DataFrame) -> Table:
    """Time, speed and memory of one run, as last recorded."""
    rows = []
    for measure, name, unit in (
        ("elapsed", "Training time", "s"),
        ("throughput", "Throughput", "tokens/s"),
        ("peak_memory", "Peak memory", "MiB"),
    ):
        values = [value for value in track(results, measure).values if value is not None]
        if values:
            varies = measure == "throughput" and len(values) > 1
            beside = f" at last ({min(values):,.0f} to {max(values):,.0f})" if varies else ""
            rows.append([name, quantity(values[-1], unit) + beside])
    return table("Time and memory", [""], rows, note="Evaluating and saving are left out of time and throughput.")


def _settings(meta: Meta) -> Table:
    flat = flatten(meta.get("settings") or {})
    rows = [[short(key, 80), short(value, 200)] for key, value in flat.items() if key not in PROSE]
    return table("All settings", [""], rows, folded=True, text=True)


def flatten(settings: Any, prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as YAML would show it; what is unset is left out."""
    if isinstance(settings, Mapping):
        flat: dict[str, str] = {}
        for key, value in settings.items():
            flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
        return flat
    if settings is None or settings == []:
        return {}
    if isinstance(settings, bool):
        return {prefix: str(settings).lower()}
    if isinstance(settings, list | tuple):
        return {prefix: ", ".join(map(str, settings))}
    return {prefix: f"{settings:.12g}" if isinstance(settings, float) else str(settings)}


def sentences(headline: Mapping[str, Meta]) -> tuple[list[str], list[str]]:
    """What is said of all runs together, first; then every run against the baseline."""
    said: tuple[list[str], list[str]] = ([], [])
    for name, entry in headline.items():
        if entry.get("sentence"):
            said[":" in name].append(short(entry["sentence"], 600))
    return said if said[0] else (said[1], [])


def side_by_side(meta: Meta) -> Table:
    """The comparison in one table: a row a run, at the last step that all have."""
    columns = (
        ("Validation loss", "validation_loss", "", NOTHING),
        ("Difference", "", "validation_loss", "+.3f"),
        ("Jump of the last layer", "zeta_L", "", NOTHING),
        ("Time per step", "", "time_per_step", "×"),
        ("Peak memory", "", "peak_memory", "×"),
        ("Parameters", "", "parameters", "×"),
    )
    step = meta.get("step")
    when = f"At step {step:,}. " if isinstance(step, int) else ""
    note = (
        f"{when}Time, memory and parameters are multiples of the baseline’s. One run each: how much another seed would "
        "change is not known."
    )
    return _by_run(meta, "Runs side by side", columns, note)


def _jumps(meta: Meta) -> Table:
    columns = (
        ("Last layer", "zeta_L", "zeta_L", "+.1f"),
        ("Last two layers", "zeta_L-1", "zeta_L-1", "+.1f"),
        ("Last three layers", "zeta_L-2", "zeta_L-2", "+.1f"),
        ("Displacement, mean change", "", "redundancy_change", "+.2f"),
        ("Displacement, greatest change", "", "greatest_redundancy_change", "+.2f"),
    )
    note = (
        "Jump rates ζ with the difference from the baseline in percentage points; then, times 10⁻², the change of the "
        "layers’ displacement: its mean over layers, and where it is greatest."
    )
    return _by_run(meta, "Jump rates and redundancy", columns, note)


def _costs(meta: Meta) -> Table:
    columns = (
        ("Time per step", "time_per_step", "time_per_step", "×"),
        ("Throughput", "throughput", "", NOTHING),
        ("Peak memory", "peak_memory", "peak_memory", "×"),
        ("Parameters", "parameters", "parameters", "×"),
    )
    note = (
        "Time and throughput are medians over the intervals between evaluations, evaluating and saving left out; "
        "× is a multiple of the baseline’s."
    )
    return _by_run(meta, "Time and memory", columns, note)


def _by_run(meta: Meta, title: str, columns: Iterable[tuple[str, str, str, str]], note: str) -> Table:
    """A row a run; columns that no run fills are left out.

    A column is its title, the run's own number, the number against the baseline (either may be empty) and the latter's
    format: Python's for a difference, `×` for a multiple.
    """
    models = meta.get("models") or []
    cells = {name: [_cell(meta, entry, *how) for entry in models] for name, *how in columns}
    kept = {name: column for name, column in cells.items() if set(column) != {NOTHING}}
    rows = [[_name(entry), *(column[at] for column in kept.values())] for at, entry in enumerate(models)]
    return table(title, list(kept), rows if kept else [], corner="Run", note=note)


def _cell(meta: Meta, entry: Meta, own: str, against: str, form: str) -> str:
    stated = (entry.get("headline") or {}).get(own) or {}
    amount = quantity(stated.get("value"), str(stated.get("unit", "1"))) if own else NOTHING
    relation = ((meta.get("headline") or {}).get(f"{against}:{entry.get('label')}") or {}).get("value")
    if not isinstance(relation, int | float):
        return amount
    beside = f"{relation:.2f}×" if form == "×" else minus(relation, form)
    return f"{amount} ({beside})" if own else beside


def _name(entry: Meta) -> str:
    label = short(entry.get("label", "?"), 60)
    return f"{label} (baseline)" if entry.get("baseline") and label != "baseline" else label


def _differing(meta: Meta) -> Table:
    """The settings in which the runs differ: a row a setting, a column a run."""
    models = meta.get("models") or []
    flat = [flatten(entry.get("settings") or {}) for entry in models]
    keys = dict.fromkeys(key for one in flat for key in one if key not in PROSE)
    rows = [
        [short(key, 80), *(short(one.get(key, NOTHING), 60) for one in flat)]
        for key in keys
        if len({one.get(key) for one in flat}) > 1
    ]
    note = "Settings that are equal in all runs are left out."
    return table("What differs", [_name(entry) for entry in models], rows, corner="Setting", text=True, note=note)
