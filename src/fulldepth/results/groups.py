"""Compares two groups of results over seeds: paired differences with Student's t-test, for every number of the table.

The unit is a trained model. Two results with the same seed make a pair, because they share the order of the data and,
where shapes allow, the first weights. See `uncertainty.paired_test` for the formulas.

Source: "JREG: final-layer jumps", App. G, Tables 13, 14 and 18.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fulldepth.core.errors import FulldepthError, one_line, unknown
from fulldepth.core.number_format import plus_minus, rounded
from fulldepth.core.thresholds import BUSY
from fulldepth.core.uncertainty import holm, paired_test, quantile
from fulldepth.results import verdict
from fulldepth.results.differences import Depth, counterparts, depth_of_results
from fulldepth.results.document import Finding
from fulldepth.results.folder import Results
from fulldepth.results.influences import KEYS
from fulldepth.results.pages import unique_names
from fulldepth.results.reasons import unlike
from fulldepth.results.table import COLUMNS
from fulldepth.results.verdict import Entry, Number
from fulldepth.settings.layers import flattened
from fulldepth.settings.measure import SPEED_ONLY
from fulldepth.settings.train import MAY_DIFFER

FEWEST_PAIRS = 2
SURE = 5
"""Fewest pairs for a test, and fewest pairs for a test that is not called an indication."""
LEVEL = 0.05
"""p below which a claim holds."""
WINDOWED = ("train_loss", "penalty", "throughput")
"""Measures that are means since the previous evaluation: comparable only if that one was at the same step."""
COSTS = ("elapsed", "throughput", "peak_memory")
"""Measures of a run that depend on what else the machine does."""
NUMBERS = {
    "validation_loss": Number("Validation loss", "validation_loss", "mean", None),
    "train_loss": Number("Training loss", "train_loss", "mean", None),
    **verdict.NUMBERS,
    "elapsed": Number("Training time", "elapsed", "value", None),
    "peak_memory": Number("Peak memory", "peak_memory", "value", None),
}
"""Numbers that the headline states, if the results have them."""
NOT_COMPARABLE = (
    verdict.DATA,
    ("the tokenizers differ", "settings", "tokenizer"),
    ("the sequence lengths differ", "settings", "sequence_length"),
    ("the numbers of validation targets differ", "", "targets"),
)
"""Differences that make two training runs incomparable, see `reasons.unlike`."""
OTHER_REASONS = (
    ("the batch sizes differ", "settings", "global_batch_size"),
    ("the learning-rate schedules are of different length", "settings", "steps"),
    *verdict.OTHER_REASONS,
    *((f"the versions of {package} differ", "versions", package) for package in ("torch", "transformers")),
)
"""Other differences that affect the numbers."""


class Member(NamedTuple):
    """One result of a group."""

    place: str
    """Its folder, for messages."""
    seed: int
    settings: dict[str, Any]
    """Settings that must be equal within a group, by dotted name."""
    results: Results


def compare_groups(
    groups: tuple[Sequence[tuple[str, Results]], Sequence[tuple[str, Results]]],
    labels: Sequence[str],
    depth: Depth | None,
    claims: Mapping[str, str],
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Compare the first group with the second one.

    Args:
        groups: folder and results of each member: training runs, or measurements of the models that they gave.
        labels: labels of both groups.
        depth: how layers are aligned, see `fulldepth.results.differences.counterparts`; None = by their number if
            depths are equal.
        claims: number of the headline -> claimed sign of its difference.

    Returns:
        The table, and the entries of the document. The table has two kinds of rows. Rows with a `seed` are those of
        every member; in the first group they have the `difference` from the member with the same seed. Rows without a
        seed are the tests, one for each number: mean of the first group, mean `difference`, its standard error
        `difference_error`, sample standard `deviation`, both one-sided 95 % bounds, two-sided `p`, and the number of
        pairs as `count`.

    Raises:
        FulldepthError: for a member without a seed or with the seed or other settings of another one, fewer than two
            pairs, runs without a common step, results that are not comparable, or a claim on an unknown number.
    """
    first_group, second_group = ({member.seed: member for member in _members(group)} for group in groups)
    seeds = sorted(first_group.keys() & second_group.keys())
    if len(seeds) < FEWEST_PAIRS:
        labelled_groups = zip(labels, (first_group, second_group), strict=True)
        listed = "; ".join(f"{label} has {one_line(sorted(group), 100)}" for label, group in labelled_groups)
        raise FulldepthError(
            f"A comparison of groups needs {FEWEST_PAIRS} pairs of results with the same seed, got {len(seeds)} "
            f"(seeds: {listed}). Train each method with the same seeds: fulldepth train RECIPE seed=1 --output A/seed-1"
        )
    lines = [
        f"{label}: seed {seed} has no counterpart and is left out ({one_line(group[seed].place, 200)})."
        for label, group, other in ((labels[0], first_group, second_group), (labels[1], second_group, first_group))
        for seed in sorted(group.keys() - other.keys())
    ]
    pairs = [(first_group[seed], second_group[seed]) for seed in seeds]
    members = [member for pair in pairs for member in pair]
    depths = [depth_of_results(group[seeds[0]].results) for group in (first_group, second_group)]
    depth = depth or ("layer" if depths[0] == depths[1] else "relative")
    kind = str(members[0].results.meta["kind"])
    entries = [[_entry(label, member) for label, member in zip(labels, pair, strict=True)] for pair in pairs]
    lines += _reasons(entries, kind)
    step, tables = _tables(members, labels)
    for member, table in zip(members, tables, strict=True):
        _check_unique(member, table)
    if step is not None:
        lines += _notes_on_runs(members, step)
    rows = []
    aligned_at_ends = []
    for index, seed in enumerate(seeds):
        first, second = tables[2 * index : 2 * index + 2]
        paired = counterparts(first, depths[0], second, depths[1], depth)[:, 0]
        from_last = counterparts(first, depths[0], second, depths[1], "relative")[:, 0]
        named = first.assign(model=labels[0], seed=seed)
        rows.append(named.assign(difference=first["value"] - paired, against=paired))
        rows.append(second.assign(model=labels[1], seed=seed, difference=float("nan")))
        aligned_at_ends.append(named.assign(difference=first["value"] - from_last, against=from_last))
    every = pd.concat(rows, ignore_index=True).astype({"seed": "Int64"})
    tests = _tests(every[every["model"] == labels[0]])
    last_layers = _tests(pd.concat(aligned_at_ends, ignore_index=True))  # last against last, whatever `depth` is
    findings = list(_headline(last_layers, depths[0], labels, claims))
    headline = {test["name"]: finding for test, finding in findings} | dict(_redundancy(tests, labels))
    remarks: dict[str, list[str]] = {}
    for member in members:
        incomplete = [] if member.results.meta.get("complete", True) else ["it is not complete."]
        for text in [*incomplete, *(member.results.meta.get("warnings") or [])]:
            remarks.setdefault(text, []).append(one_line(member.place, 200))
    for text, (first_place, *other_places) in remarks.items():
        lines.append(f"{first_place}{f' and {len(other_places)} others' if other_places else ''}: {text}")
    table = pd.concat([every, tests], ignore_index=True).drop(columns=["against", "by_seed"])
    models = [
        {
            **{name: value for name, value in entry.items() if name != "label"},
            "label": label,
            "seeds": seeds,
            "losses_by_flops": _losses_by_flops(group),
        }
        for label, entry, group in zip(labels, entries[0], zip(*pairs, strict=True), strict=True)
    ]
    document = {
        "of": "groups",
        "groups_of": kind,
        "depth": depth,
        "models": [{**models[0], "baseline": False}, {**models[1], "baseline": True}],
        "tests": [test for test, _ in findings],
        "headline": headline,
        "warnings": lines,
    }
    return table, document if step is None else document | {"step": step}


def labels_of(groups: Sequence[Sequence[str | Path]]) -> list[str]:
    """Labels of groups of folders: the common start of the paths of each group, without the word `seed`."""
    shared = [commonprefix([str(Path(folder).resolve()) for folder in group]) for group in groups]  # noqa: RUF071
    return unique_names([Path(re.sub(r"[\W_]*(seed)?[\W_]*\d*$", "", text) or "group") for text in shared])


def _members(group: Sequence[tuple[str, Results]]) -> Iterator[Member]:
    """The results of a group with their seeds.

    Raises:
        FulldepthError: if one has no seed, or two have the same, or differ in other settings.
    """
    seen: dict[int, Member] = {}
    for place, results in group:
        settings = results.meta.get("settings") or {}
        training = settings if results.meta["kind"] == "training" else results.meta.get("training") or {}
        seed = training.get("seed")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise FulldepthError(
                f"{place} does not state the seed that its model was trained with. Groups hold runs of fulldepth "
                "train, or measurements of their folders that this version of fulldepth measure wrote."
            )
        fixed = {name: value for name, value in flattened(training).items() if name not in MAY_DIFFER | {"seed"}}
        if training is not settings:
            measured = {name: value for name, value in flattened(settings).items() if name not in SPEED_ONLY}
            fixed = {f"training.{name}": value for name, value in fixed.items()} | measured
        member = Member(place, seed, fixed, results)
        if seed in seen:
            raise FulldepthError(f"{place} and {seen[seed].place} have the same seed, {seed}. Leave one of them out.")
        first = next(iter(seen.values()), member)
        different = [name for name in fixed | first.settings if fixed.get(name) != first.settings.get(name)]
        if different:
            listed = [f"{name} is {fixed.get(name)} and {first.settings.get(name)}" for name in different]
            raise FulldepthError(
                f"{place} and {first.place} are in one group and differ in more than the seed: "
                f"{one_line('; '.join(listed), 300)}."
            )
        seen[seed] = member
        yield member


def _entry(label: str, member: Member) -> Entry:
    """Entry of a member in the form that `reasons.unlike` compares."""
    meta = member.results.meta
    losses = _rows(member.results.table, "validation_loss")["count"].dropna()
    parts = ("model", "data", "settings", "versions", "token_policy", "sampling")
    stated = {part: meta.get(part) or {} for part in parts}
    about = {
        "training": meta.get("training"),
        "recipe": meta.get("recipe"),
        "targets": int(losses.iloc[-1]) if len(losses) else None,
    }
    return {"label": f"{label}, seed {member.seed}", "run": {"seed": meta.get("seed")}, **stated, **about}


def _reasons(pairs: list[list[Entry]], kind: str) -> list[str]:
    """Warnings that a small difference may have other reasons than the methods: at most one on a pair, one on depths.

    Training runs are compared only within a pair: with another seed, the held-out documents differ by design.

    Raises:
        FulldepthError: if a pair, or two measurements of one group, are not comparable.
    """
    firsts = pairs[0]
    lines = []
    for first, second in pairs:
        for entry, other in ((first, second), (first, firsts[0]), (second, firsts[1])):
            finding = verdict.incomparable(entry, other) if kind == "measure" else None
            if kind == "training" and entry is first and other is second:
                finding = verdict.not_comparable(entry, other, NOT_COMPARABLE)
            if finding is not None:
                raise FulldepthError(str(finding.sentence))
            if reasons := unlike(entry, other, OTHER_REASONS, where_stated=True):
                labels = f"{entry['label']} and {other['label']}"
                lines.append(f"{labels}: a small difference may have other reasons than the methods: {reasons}.")
    return [*lines[:1], *verdict.depth_warning(*firsts)]


def _rows(table: pd.DataFrame, measure: str) -> pd.DataFrame:
    """The finite rows of a measure."""
    return table[(table["measure"] == measure) & np.isfinite(table["value"])]


def _tables(members: list[Member], labels: Sequence[str]) -> tuple[int | None, list[pd.DataFrame]]:
    """The last common step of runs with each member's table at that step; for measurements None with the whole tables.

    Raises:
        FulldepthError: if runs have no evaluated step in common.
    """
    if members[0].results.meta["kind"] != "training":
        return None, [member.results.table[COLUMNS] for member in members]
    evaluated = [{int(step) for step in _rows(member.results.table, "validation_loss")["step"]} for member in members]
    common = set.intersection(*evaluated)
    if not common:
        listed = "; ".join(
            f"{one_line(member.place, 100)}: {one_line(sorted(steps), 60)}"
            for member, steps in zip(members[:2], evaluated, strict=False)
        )
        raise FulldepthError(f"The runs of {' and '.join(labels)} have no evaluated step in common ({listed}).")
    step = max(common)
    before = {max((earlier for earlier in steps if earlier < step), default=-1) for steps in evaluated}
    left_out = {"other_load", "learning_rate", *(WINDOWED if len(before) > 1 else ())}
    left_out |= {*COSTS} if any(_busy(member, step) for member in members) else set()
    tables = [member.results.table for member in members]
    return step, [
        table[(table["step"] == step) & ~table["measure"].isin(left_out)][COLUMNS].reset_index(drop=True)
        for table in tables
    ]


def _check_unique(member: Member, table: pd.DataFrame) -> None:
    """Check that every number stands in one row.

    Raises:
        FulldepthError: if one stands in several.
    """
    known = table[np.isfinite(table["value"])]
    repeated = known[known.duplicated([*KEYS, "unit"])]
    if len(repeated):
        row = repeated.iloc[0]
        layer = "" if pd.isna(row["layer"]) else f" of layer {row['layer']}"
        raise FulldepthError(
            f"{one_line(member.place, 200)} has several rows for one number: {row['measure']} {row['statistic']}"
            f"{layer}. Leave one of them, or run the command again that wrote them."
        )


def _busy(member: Member, step: int) -> str:
    """The reason why the costs of a run cannot be compared; empty if other programs hardly used the machine."""
    loads = _rows(member.results.table, "other_load")
    load = loads[loads["step"] <= step]["value"].max()
    if pd.isna(load):
        return f"it is not recorded how busy the machine of {one_line(member.place, 100)} was"
    return f"other programs used {load:.0%} of the CPU during {one_line(member.place, 100)}" if load > BUSY else ""


def _notes_on_runs(members: list[Member], step: int) -> list[str]:
    """Notes on the common step, and on costs that are not compared."""
    lines = ["The only evaluated step that all runs have is 0, before training."] if step == 0 else []
    if further := [member.place for member in members if member.results.table["step"].max() > step]:
        lines.append(f"{one_line(', '.join(further), 300)}: trained past step {step:,}, the last that all runs have.")
    if busy := next(filter(None, (_busy(member, step) for member in members)), ""):
        lines.append(f"Time and memory are not compared, because {busy}.")
    return lines


def _losses_by_flops(group: Sequence[Member]) -> list[dict[str, float]]:
    """Validation losses of a group of runs at every step that all its seeds have, by the training FLOPs up to it.

    They are means over seeds with 95 % intervals (Student's t). Empty for measurements, and for runs that do not state
    their FLOPs.
    """
    meta = group[0].results.meta
    total = (meta.get("model") or {}).get("training_flops")
    steps = (meta.get("settings") or {}).get("steps")
    if meta["kind"] != "training" or not total or not steps:
        return []
    rows = [_rows(member.results.table, "validation_loss") for member in group]
    losses = pd.concat([table.set_index("step")["value"] for table in rows], axis=1).dropna().sort_index()  # [S, seeds]
    reach = quantile(len(group)) / len(group) ** 0.5
    means = losses.mean(axis=1)
    ends = reach * losses.std(axis=1)
    return [
        {"flops": total * step / steps, "mean": mean, "low": mean - end, "high": mean + end}
        for step, mean, end in zip(losses.index.tolist(), means.tolist(), ends.tolist(), strict=True)
    ]


def _tests(rows: pd.DataFrame) -> pd.DataFrame:
    """The test rows: one for each number that every pair has."""
    pairs = rows["seed"].nunique()
    keys = rows.groupby(["measure", "site", "layer", "other", "statistic", "unit"], dropna=False, sort=False)
    rows = rows.assign(key=keys.ngroup())
    rows = rows[np.isfinite(rows["difference"])]
    rows = rows[rows.groupby("key")["key"].transform("size") == pairs].sort_values(["key", "seed"], kind="stable")
    differences, values, base_values = (
        rows[name].to_numpy(np.float64).reshape(-1, pairs).T for name in ("difference", "value", "against")
    )  # [pairs, numbers] each
    test = paired_test(differences)
    return rows.iloc[::pairs][[*COLUMNS, "model"]].assign(
        value=values.mean(0),
        count=pd.array(test.pairs, dtype="Int64"),
        seed=pd.array([pd.NA] * len(test.pairs), dtype="Int64"),
        difference=test.mean,
        difference_error=test.error,
        deviation=test.deviation,
        lower_bound=test.end(0.05),
        upper_bound=test.end(0.95),
        p=test.p(),
        against=base_values.mean(0),
        by_seed=pd.Series(differences.T.tolist(), dtype=object).to_numpy(),
    )


def _headline(
    tests: pd.DataFrame, layers: int, labels: Sequence[str], claims: Mapping[str, str]
) -> Iterator[tuple[dict[str, Any], Finding]]:
    """Yield, for each number of the headline, its entry in `tests` and its finding.

    Raises:
        FulldepthError: for a claim on a number that the results do not have.
    """
    tested = {}
    for name, number in NUMBERS.items():
        rows = tests[(tests["measure"] == number.measure) & (tests["statistic"] == number.statistic)]
        layer = -1 if number.back is None else layers - number.back
        rows = rows[rows["site"].isin([number.site, "model"]) & (rows["layer"].fillna(-1) == layer)]
        if len(rows):
            tested[name] = rows.iloc[0]
    for name in claims:
        if name not in tested:
            raise unknown("number in claims", name, tested)
    one_sided = {}
    for name, sign in claims.items():
        p = tested[name]["p"]
        as_claimed = (tested[name]["difference"] > 0) == (sign == "greater")
        one_sided[name] = p / 2 if as_claimed else 1 - p / 2
    corrected = dict(zip(one_sided, holm([*one_sided.values()]), strict=True))
    for name, row in tested.items():
        reach = quantile(int(row["count"])) * row["difference_error"]
        test: dict[str, Any] = {
            "name": name,
            "title": NUMBERS[name].title,
            "unit": str(row["unit"]),
            **{key: float(row[key]) for key in ("value", "against", "difference", "deviation", "p")},
            "pairs": int(row["count"]),
            "by_seed": row["by_seed"],
            "interval": [float(row["difference"] - reach), float(row["difference"] + reach)],
        }
        if claim := claims.get(name):
            bound = row["lower_bound"] if claim == "greater" else -row["upper_bound"]
            test |= {"claim": claim, "bound": float(bound), "p": one_sided[name], "p_corrected": corrected[name]}
        low, high = test["interval"]
        yield test, Finding(test["difference"], test["unit"], _sentence(test, labels), interval=(low, high))


def _sentence(test: Mapping[str, Any], labels: Sequence[str]) -> str:
    """The result of one test in a sentence. If the interval contains 0, it says "no measurable difference"."""
    unit = "" if test["unit"] == "1" else f" {test['unit']}"
    low, high = test["interval"]
    value, against = (rounded(test[name]) for name in ("value", "against"))
    change = rounded(test["difference"], "+.3g")
    spread = f"{change} {plus_minus(test['deviation'])} (standard deviation)"
    interval = f"95 % interval {rounded(low, '+.3g')} to {rounded(high, '+.3g')}"
    p = f"p = {test['p']:.2g}"
    sign = test.get("claim")
    if not test["deviation"]:
        same = f"difference {change}, the same for every seed"
        result = same if test["difference"] else "no difference"
    elif sign and test["p_corrected"] < LEVEL:
        result = f"{sign} as claimed: {spread}, by at least {rounded(test['bound'], '.2g')} (95 % bound), one-sided {p}"
    elif sign and (high < 0 if sign == "greater" else low > 0):
        result = f"against the claim ({sign}): {spread}, {interval}"
    elif sign:
        p = f"one-sided p = {test['p_corrected']:.2g} of all claims"
        result = f"no measurable difference ({interval}, {p})"
    elif low <= 0 <= high:
        result = f"no measurable difference ({interval}, {p})"
    else:
        result = f"difference {spread}, {interval}, {p}"
    seeds = f"{test['pairs']} seeds" + " (an indication)" * (test["pairs"] < SURE)
    return f"{test['title']}: {value}{unit} in {labels[0]} against {against}{unit} in {labels[1]}, {seeds}: {result}."


def _redundancy(tests: pd.DataFrame, labels: Sequence[str]) -> Iterator[tuple[str, Finding]]:
    """The redundancy change (JREG, Eq. 7): at how many layers displacement differs, after Holm's correction."""
    rows = tests[(tests["measure"] == "displacement") & (tests["statistic"] == "mean") & (tests["site"] == "residual")]
    if len(rows):
        change = rows["difference"].to_numpy(np.float64)
        layers = len(rows)
        differs = holm(rows["p"]) < LEVEL
        larger, smaller = (int((differs & side).sum()) for side in (change > 0, change < 0))
        text = f"larger in {labels[0]} than in {labels[1]} at {larger} of {layers} layers and smaller at {smaller}"
        if not differs.any():
            text = f"no measurable difference between {labels[0]} and {labels[1]} at any of {layers} layers"
        yield "redundancy_change", Finding(float(np.median(change)), "1", f"Displacement: {text} (over seeds).")
