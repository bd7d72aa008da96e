"""Compares results of one kind: one table of all rows with their differences from the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fulldepth.core import launch
from fulldepth.core.errors import FulldepthError, unknown
from fulldepth.reporting.kinds import KINDS
from fulldepth.results import groups, tasks, verdict
from fulldepth.results.differences import (
    STEPS,
    Depth,
    Interval,
    counterparts,
    depth_of_results,
    difference_errors,
    is_paired,
    paired_rows,
    step_interval,
)
from fulldepth.results.document import SCHEMA_VERSION, provenance
from fulldepth.results.folder import Results, claimed, finite
from fulldepth.results.pages import unique_names
from fulldepth.results.reasons import Entry
from fulldepth.results.table import COLUMNS
from fulldepth.settings.compare import CompareSettings
from fulldepth.settings.keywords import takes_settings


@takes_settings(CompareSettings)
def compare(
    results: Sequence[Results | str | Path] | Mapping[str, Results | str | Path],
    *,
    against: Sequence[Results | str | Path] | None = None,
    settings: CompareSettings,
    output: str | Path | None = None,
    overwrite: bool = False,
) -> Results:
    r"""Compare measurements of several models (or of one model on several data), or two groups of models over seeds.

    Results of `fulldepth exit` are compared with each other, and so are those of `fulldepth evaluate`. Training runs
    are compared in groups: a difference of two single runs may be that of their seeds.

    The table holds the rows of every model, labelled in the column `model`; the column `difference` is the value minus
    the baseline's value at the same depth, in the row's unit (NaN for the baseline itself, and where it has no such
    row, or is not comparable). For the mean displacement this is the redundancy change

    .. math:: \Delta_l = \Psi_l - \Psi_l^{\text{baseline}}

    which is positive where a layer does more than in the baseline. `difference_error` is its standard error, paired
    where both results are of the same documents (see `results.differences`, and the entry `paired` of a model).

    ```python
    both = fulldepth.compare({"plain": "out-a", "tuned": "out-b"}, output="cmp/")
    both.values("displacement", "mean", "residual", model="tuned")
    ```

    With `against`, every number of the first group has a paired t-test over seeds, at the last common step of runs.
    Rows with a seed are those of single results; the row of a number without a seed has the mean `difference`, its
    sample standard `deviation`, the one-sided 95 % bounds `lower_bound` and `upper_bound`, and the two-sided `p`
    (`uncertainty.paired_test`, `results.groups`).

    ```python
    cmp = fulldepth.compare(["jreg/seed-0", "jreg/seed-1"], against=["llama/seed-0", "llama/seed-1"])
    cmp.table[cmp.table.seed.isna()]
    ```

    At equal relative depth l/L the baseline is interpolated between its layers, and `jump_rate` is counted from the
    last layer.

    Args:
        results: two or more result folders, or `Results`; or a mapping of their labels to them. Of a series of
            checkpoints, the last step is compared. With `against` a group: runs, or measurements of runs, that
            differ in the seed alone; of a mapping, its values.
        against: the group that the first group is compared with; it has the same seeds.
        settings: an instance of `CompareSettings`, or its fields as keywords.
        output: result folder, which also gets the page; None = nothing is written.
        overwrite: replace results in the output folder.

    Returns:
        Results of kind `comparison`, with one sentence for each headline difference. Where data, token policy or
        sequence length, or the examples and prompts of a task, make numbers incomparable, the sentence is the reason
        and the numbers have no difference.

    Raises:
        FulldepthError: for fewer than two results, a folder without results or with results of another kind, a
            comparison as input, results of several kinds, training runs without `against`, repeated or too few names,
            names beside a mapping, or an unknown baseline; for groups also as `results.groups.compare_groups`.

    Source: "JREG: final-layer jumps", Eq. 7, App. G.
    """
    settings.check_effect(against=against is not None)
    with claimed(output, overwrite):
        if isinstance(results, Mapping):
            if against is None and settings.names is not None:
                raise FulldepthError("A mapping names its results by its keys; leave out names, or give a list.")
            if against is None:
                settings = settings.model_copy(update={"names": list(results)})
            results = list(results.values())
        compared = _compared(results, settings) if against is None else _of_groups(results, against, settings)
        if output is not None and launch.is_main():
            compared.save(output, overwrite=overwrite)
    return compared


def _compared(results: Sequence[Results | str | Path], settings: CompareSettings) -> Results:
    """The comparison as results."""
    if isinstance(results, str | Path | Results) or len(results) < 2:
        raise FulldepthError("A comparison needs at least two result folders.")
    loaded = [_readable(item) for item in results]
    labels = settings.names
    first = settings.baseline
    if labels is None:
        labels = unique_names(
            [
                Path(item.meta["model"].get("name") or "model") if isinstance(item, Results) else Path(item).resolve()
                for item in results
            ]
        )
    if len(labels) != len(results):
        raise FulldepthError(f"Got {len(labels)} names for {len(results)} results. Give one name for each result.")
    if len(set(labels)) < len(labels) or "" in labels:
        raise FulldepthError(f"Names must differ from one another and not be empty, got {', '.join(labels)!r}.")
    kind = _common_kind(labels, loaded)
    if kind == "training":
        raise FulldepthError(
            "Two single runs cannot be compared: their difference may come from the seed alone. Train each method with "
            "several seeds and give groups: fulldepth compare A/seed-* --against B/seed-* --output cmp/ (measurements "
            "of single runs can be compared: fulldepth measure RUN --data text.txt --output OUT)."
        )
    if isinstance(first, str):
        if first not in labels:
            raise unknown("baseline", first, labels)
        first = labels.index(first)
    elif not 0 <= first < len(labels):
        raise FulldepthError(f"The baseline must be a position from 0 to {len(labels) - 1} or a name, got {first}.")
    depth: Depth = settings.depth or ("layer" if len(set(map(depth_of_results, loaded))) == 1 else "relative")
    compared = {"baseline": labels[first], "depth": depth}
    loaded = [_last_step(item) for item in loaded]
    table, entries = _side_by_side(loaded, labels, first, depth)
    for result, label in zip(loaded, labels, strict=True):
        if not result.meta.get("complete", True):
            entries["warnings"].append(f"{label}: the {KINDS[kind].called.rpartition(' ')[2]} is not complete.")
        entries["warnings"] += [f"{label}: {warning}" for warning in result.meta.get("warnings") or []]
    return _results(table, {"names": labels, **compared}, compared | entries)


def _of_groups(
    results: Sequence[Results | str | Path], against: Sequence[Results | str | Path], settings: CompareSettings
) -> Results:
    """The comparison of two groups as results."""
    if "baseline" in settings.model_fields_set:
        raise FulldepthError("--baseline has no effect with --against: the second group is the baseline.")
    members = [[item] if isinstance(item, str | Path | Results) else list(item) for item in (results, against)]
    places = [[str(item) if isinstance(item, str | Path) else "A result" for item in group] for group in members]
    labels = settings.names or groups.labels_of(places)
    if len(labels) != len(members) or len(set(labels)) < len(members) or "" in labels:
        raise FulldepthError(f"Two groups need two different names, got {', '.join(labels)!r}.")
    loaded = [[_readable(item) for item in group] for group in members]
    kind = _common_kind([*places[0], *places[1]], [*loaded[0], *loaded[1]])
    if not KINDS[kind].is_grouped:
        raise FulldepthError(f"Groups may hold training runs or measurements, got results of kind {kind}.")
    if kind == "measure":
        loaded = [[_last_step(item) for item in group] for group in loaded]
    first, second = (list(zip(*pair, strict=True)) for pair in zip(places, loaded, strict=True))
    table, entries = groups.compare_groups((first, second), labels, settings.depth, settings.claims)
    settled = {"names": labels, "baseline": labels[1], "depth": entries["depth"], "claims": settings.claims}
    return _results(table, settled, {"baseline": labels[1], **entries})


def _common_kind(labels: Sequence[str], loaded: Sequence[Results]) -> str:
    """The kind that all results have; raise if they differ."""
    kinds = [str(result.meta["kind"]) for result in loaded]
    if len(set(kinds)) > 1:
        listed = ", ".join(f"{label} is {KINDS[kind].called}" for label, kind in zip(labels, kinds, strict=True))
        advice = " Measure the runs first: fulldepth measure RUN" if "training" in kinds else ""
        raise FulldepthError(f"Results of several kinds cannot be compared: {listed}.{advice}")
    if not kinds:
        raise FulldepthError("A comparison needs at least two result folders.")
    return kinds[0]


def _results(table: pd.DataFrame, settings: dict[str, Any], entries: dict[str, Any]) -> Results:
    """Results of kind `comparison` with these settings and entries."""
    return Results(
        table,
        finite({"schema_version": SCHEMA_VERSION, **provenance("comparison", settings, packages=()), **entries}),
    )


def _side_by_side(
    measured: list[Results], labels: list[str], first: int, depth: Depth
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table of all models' rows with their differences from the baseline, and the entries of the document."""
    baseline = measured[first]
    kind = KINDS[baseline.meta["kind"]]
    models = [
        _entry(result, label, index == first)
        for index, (result, label) in enumerate(zip(measured, labels, strict=True))
    ]
    tables = []
    intervals: dict[tuple[str, str], Interval | None] = {}
    for entry, result in zip(models, measured, strict=True):
        label = entry["label"]
        rows = result.table[COLUMNS].assign(model=label, difference=float("nan"), difference_error=float("nan"))
        if not entry["baseline"]:
            base = counterparts(rows, depth_of_results(result), baseline.table, depth_of_results(baseline), depth)
            rows["difference"] = rows["value"] - base[:, 0]
            rows["difference_error"] = difference_errors(result, baseline, depth)
            rows["error_at_last"] = difference_errors(result, baseline, "relative")  # last layer against last layer
            rows["is_paired"] = paired_rows(result, baseline)
            entry["paired"] = is_paired(result, baseline)
            rows.loc[_incomparable_rows(rows, entry, models[first]), ["difference", "difference_error"]] = float("nan")
            _note_pairing(entry, rows[rows["is_paired"] & rows["difference"].notna()], models[first])
            intervals |= {(name, label): step_interval(name, result, baseline) for name in STEPS}
        tables.append(rows)
    table = pd.concat(tables, ignore_index=True)
    texts = {
        "headline": verdict.comparison_headline(table, models, intervals),
        "warnings": verdict.comparison_warnings(table, models),
    }
    table = table.drop(columns=["error_at_last", "is_paired"])
    return table, {"models": models, **texts} | ({"of": kind.name} if kind.held else {})


def _entry(result: Results, label: str, is_baseline: bool) -> Entry:
    """The entry of a model in `models`."""
    meta = result.meta
    held = {key: meta[key] for key in KINDS[meta["kind"]].held if meta.get(key) is not None}
    if "tasks" in held:
        held["tasks"] = {task: dict(entry or {}) for task, entry in held["tasks"].items()}  # gets the entry `paired`
    return {
        "label": label,
        "baseline": is_baseline,
        "run": {"seed": meta.get("seed")},
        **{part: meta.get(part) or {} for part in ("model", "data", "token_policy", "sampling", "versions")},
        "read": _read(result),
        "headline": meta.get("headline") or {},
        "lens_grid": meta.get("lens_grid"),
        "left_out": meta.get("left_out") or [],
        **held,
    }


def _incomparable_rows(rows: pd.DataFrame, entry: Entry, baseline: Entry) -> NDArray[np.bool_]:
    """`[rows]` which rows have no difference, because they are not comparable with those of the baseline."""
    if verdict.incomparable(entry, baseline):
        return np.ones(len(rows), bool)
    none = np.zeros(len(rows), bool)
    return np.logical_or.reduce([none, *(test.rows(rows) for test in tasks.refused(entry, baseline))])


def _note_pairing(entry: Entry, paired: pd.DataFrame, baseline: Entry) -> None:
    """Note in the entries of an evaluation's tasks whether their main scores are compared by example.

    The evaluation itself is paired if all tasks are that have a difference.
    """
    refused = {test.site for test in tasks.refused(entry, baseline)}
    for task, scores, _ in tasks.shared(entry, baseline):
        main = (paired["site"] == task) & (paired["statistic"] == scores.get("metric"))
        entry["tasks"][task]["paired"] = bool(main.any())
    if shared := [task for task, *_ in tasks.shared(entry, baseline)]:
        compared = [entry["tasks"][task]["paired"] for task in shared if task not in refused]
        entry["paired"] = bool(compared) and all(compared)


def _read(result: Results) -> dict[str, Any]:
    """The parts that a measurement removed, its predictions and the text of its fit, of the measures that it has."""
    meta = result.meta
    settings = meta.get("settings") or {}
    measures = {*result.table["measure"]}
    read = {"score": settings.get("score")}
    if "layer_effect" in measures:
        read |= {name: settings.get(name) for name in ("effect_first", "effect_positions")}
    if fitted := (meta.get("linear_lens") or {}).get("data"):
        read |= {"fit": fitted.get("hash"), "fit_name": fitted.get("name")}
    return read


def _readable(item: Results | str | Path) -> Results:
    """Load results of a kind that can be compared; raise for other kinds."""
    results = item if isinstance(item, Results) else Results.load(item)
    where = "The result" if isinstance(item, Results) else str(item)
    if results.is_comparison:
        raise FulldepthError(f"{where} is a comparison already; compare the measurements that it was made from.")
    layers = (results.meta.get("model") or {}).get("num_layers")
    kind = results.meta.get("kind")
    called = [kind_of_results.called for kind_of_results in KINDS.values() if kind_of_results.called]
    if kind not in KINDS or not KINDS[kind].called:
        expected = ", ".join(called)
        raise FulldepthError(f"{where} cannot be compared: its kind is {kind!r}; expected {expected}.")
    if not isinstance(layers, int):
        raise FulldepthError(f"{where} cannot be compared: it does not state the number of layers (model.num_layers).")
    if stacks := [str(stack["name"]) for stack in results.meta.get("stacks") or []]:
        raise FulldepthError(
            f"{where} cannot be compared: it measures {len(stacks)} stacks of layers ({', '.join(stacks)}). "
            f"Measure the same stack of each model: fulldepth measure MODEL --set tower={stacks[-1]}"
        )
    return results


def _last_step(series: Results) -> Results:
    """Turn a series into a measurement of its last checkpoint, with a warning; return other results as they are."""
    if not series.is_series:
        return series
    step = series.table["step"].max()
    last: dict[str, Any] = next((entry for entry in series.meta.get("steps") or [] if entry["step"] == step), {})
    note = f"a series of checkpoints; the last one, step {step}, is compared."
    stated = {key: value for key, value in last.items() if value is not None}
    stated["model"] = series.meta["model"] | {k: v for k, v in stated.get("model", {}).items() if v is not None}
    meta = {**series.meta, **stated, "warnings": [*(series.meta.get("warnings") or []), note]}
    frames = (series.table, series.influences)
    table, influences = (None if rows is None else rows[rows["step"] == step].drop(columns="step") for rows in frames)
    assert table is not None
    return Results(table, meta, influences)
