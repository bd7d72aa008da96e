"""Pages of training runs and their comparisons: model and settings, costs, tables of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fulldepth.figures.record import Source
from fulldepth.figures.style import minus
from fulldepth.figures.training import term_name, track
from fulldepth.reporting.findings import Shown
from fulldepth.reporting.measured import Meta, Pairs, compared, fingerprints, labelled, run
from fulldepth.reporting.phrases import NOTHING, dotted, model_line, quantity, scaled, short, stated
from fulldepth.reporting.tables import PROSE, Table, by_subject, flatten, settings_table

Column = tuple[str, str, str, str]
"""Title, key of the run's own number, key of the number relative to the baseline (either may be empty), and format of
the latter: Python's for a difference, `×` for a multiple."""


def byline_of_runs(source: Source) -> str:
    """How many runs are compared, at which step, and how their layers are aligned."""
    step = source.meta.get("step")
    return compared(source.meta, "training runs", f"at step {step:,}, " if isinstance(step, int) else "")


def differences(entry: Meta, _: Source) -> list[Shown]:
    """The findings of a comparison of runs; all but the validation losses are marked as later."""
    return [
        Shown(finding, later=not name.startswith("validation_loss"))
        for name, finding in (entry.get("headline") or {}).items()
    ]


def tables(source: Source) -> dict[str, list[Table]]:
    """Id of a section -> tables of one run."""
    return {"cost": [_cost(source)], "settings": [settings_table("All settings", source.meta.get("settings"))]}


def tables_of_runs(source: Source) -> dict[str, list[Table]]:
    """Id of a section -> tables of a comparison of runs."""
    meta = source.meta
    return {"displacement": [_jumps(meta)], "cost": [_costs(meta)], "settings": [_runs(meta), _differing(meta)]}


def about(meta: Meta) -> Pairs:
    """Pairs on the model, the data and the training."""
    return [*_subject(meta), *run(meta, "Written")]


def about_runs(meta: Meta) -> Pairs:
    """Pairs that all runs of a comparison have in common."""
    return [*_shared(meta), *run(meta, "Written")]


def _subject(meta: Meta) -> Pairs:
    settings, data, model = (meta.get(key) or {} for key in ("settings", "data", "model"))
    described = short(settings["about"], 400) if settings.get("about") else ""
    return [
        ("Recipe", dotted(stated(meta, ("recipe", "{}")), described)),
        ("Model", model_line(model)),
        ("Objective", _objective(meta)),
        ("Data", _data(data)),
        ("Schedule", _schedule(settings)),
        ("Optimiser", _optimiser(settings)),
        ("Fingerprint", fingerprints([("data", data.get("hash"))])),
    ]


def _shared(meta: Meta) -> Pairs:
    first, *others = [_subject(entry) for entry in meta.get("models") or []] or [[]]
    return [pair for pair in first if all(pair in pairs for pairs in others)]


def _runs(meta: Meta) -> Table:
    """Table of the differences between the runs, one row per run."""
    subjects = {labelled(entry): dict(_subject(entry)) for entry in meta.get("models") or []}
    columns = [key for key in next(iter(subjects.values()), {}) if key not in dict(_shared(meta))]
    rows = [[name, *(pairs[key] or NOTHING for key in columns)] for name, pairs in subjects.items()]
    return Table("The runs", columns, rows if columns else [], "Run", text=True)


def _objective(meta: Meta) -> str:
    """The terms of the loss with their options."""
    objective = (meta.get("settings") or {}).get("objective") or {}
    parts = [] if objective.get("aligned") is not None else ["cross-entropy"]
    for term, value in objective.items():
        if term != "energy_warmup" and value is not None:
            options = flatten(value if isinstance(value, Mapping) else {"weight": value})
            listed_options = ", ".join(f"{short(name, 40)} {option}" for name, option in options.items())
            parts.append(f"{term_name(term).lower()} ({listed_options})")
    return " + ".join(short(part, 200) for part in parts)


def _data(data: Meta) -> str:
    """Training data, and the amount held out."""
    counts = (
        ("tokens", "{} tokens"),
        ("documents", "{} documents"),
        ("train_sequences", "{} sequences"),
        ("validation_sequences", "{} sequences for validation"),
    )
    return dotted(stated(data, ("name", "{}")), stated(data, *counts, written=scaled))


def _schedule(settings: Meta) -> str:
    sizes = [settings.get(key) for key in ("steps", "global_batch_size", "sequence_length")]
    steps, batch, length = (value if isinstance(value, int) else 0 for value in sizes)
    if not steps * batch * length:
        return ""
    interval = settings.get("eval_every")
    evaluated = f" · evaluated every {interval:,} steps" if isinstance(interval, int) else ""
    if settings.get("task", "causal-lm") != "causal-lm":
        unit = "texts" if settings["task"] == "text-classification" else "images"
        return f"{steps:,} steps × {batch:,} {unit}{evaluated}"
    total = scaled(steps * batch * length)
    return f"{steps:,} steps × {batch:,} sequences × {length:,} tokens = {total} tokens{evaluated}"


def _optimiser(settings: Meta) -> str:
    if not isinstance(settings.get("learning_rate"), int | float):
        return ""
    parts = [f"AdamW, learning rate {settings['learning_rate']:g}"]
    for key, template in (
        ("min_learning_rate", "down to {:g}"),
        ("warmup", "warm-up over {:.2%} of the steps"),
        ("warmup_steps", "{:,} warm-up steps"),
        ("weight_decay", "weight decay {:g}"),
        ("clip", "gradients clipped at {:g}"),
    ):
        if isinstance(settings.get(key), int | float) and settings[key]:
            parts.append(template.format(settings[key]))
    if settings.get("decay") not in (None, "matrices"):
        parts.append(f"decay of {short(settings['decay'], 30)}")
    parts += [short(settings[key], 30) for key in ("schedule", "precision") if settings.get(key)]
    return " · ".join(parts)


def _cost(source: Source) -> Table:
    """Time, speed and memory of one run, as last recorded."""
    rows = []
    for measure, name, unit in (
        ("elapsed", "Training time", "s"),
        ("throughput", "Throughput", "tokens/s"),
        ("peak_memory", "Peak memory", "MiB"),
    ):
        values = [value for value in track(source.table, measure).values if value is not None]
        if values:
            varies = measure == "throughput" and len(values) > 1
            extent = f" at last ({min(values):,.0f} to {max(values):,.0f})" if varies else ""
            rows.append([name, quantity(values[-1], unit) + extent])
    note = "Evaluating and saving are left out of time and throughput."
    return Table("Time and memory", [""], rows, note=note)


def side_by_side(source: Source) -> Table:
    """The comparison in one table: one row per run, at the last common step."""
    meta = source.meta
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
        f"{when}Time, memory and parameters are multiples of the baseline’s, time where the 95 % interval of the ratio "
        "does not hold 1. One run each: how much another seed would change is not known."
    )
    return _by_run(meta, "Runs side by side", columns, note)


def _jumps(meta: Meta) -> Table:
    columns = (
        ("Last layer", "zeta_L", "zeta_L", "+.1f"),
        ("Last two layers", "zeta_L-1", "zeta_L-1", "+.1f"),
        ("Last three layers", "zeta_L-2", "zeta_L-2", "+.1f"),
        ("Displacement, median change", "", "redundancy_change", "+.2f"),
    )
    note = (
        "Jump rates ζ with the difference from the baseline in percentage points; then, times 10⁻², the change of the "
        "layers’ displacement, its median over layers."
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
        "× is a multiple of the baseline’s, given where the machine was otherwise idle, of time where the 95 % "
        "interval of the ratio does not hold 1."
    )
    return _by_run(meta, "Time and memory", columns, note)


def _by_run(meta: Meta, title: str, columns: Iterable[Column], note: str) -> Table:
    runs = [(labelled(entry), entry) for entry in meta.get("models") or []]
    return by_subject(title, "Run", runs, {name: _cell(meta, *how) for name, *how in columns}, note)


def _cell(meta: Meta, own: str, against: str, form: str) -> Callable[[Meta], str]:
    def cell(entry: Meta) -> str:
        finding = (entry.get("headline") or {}).get(own) or {}
        amount = quantity(finding.get("value"), str(finding.get("unit", "1"))) if own else NOTHING
        relation = ((meta.get("headline") or {}).get(f"{against}:{entry.get('label')}") or {}).get("value")
        if not isinstance(relation, int | float):
            return amount
        relative = f"{relation:.2f}×" if form == "×" else minus(relation, form)
        return f"{amount} ({relative})" if own else relative

    return cell


def _differing(meta: Meta) -> Table:
    """The settings in which the runs differ: one row per setting, one column per run."""
    models = meta.get("models") or []
    flat = [flatten(entry.get("settings") or {}) for entry in models]
    keys = dict.fromkeys(key for settings in flat for key in settings if key not in PROSE)
    rows = [
        [short(key, 80), *(short(settings.get(key, NOTHING), 60) for settings in flat)]
        for key in keys
        if len({settings.get(key) for settings in flat}) > 1
    ]
    note = "Settings that are equal in all runs are left out."
    return Table("What differs", [labelled(entry) for entry in models], rows, "Setting", note, text=True)
