"""Judges the claims of experiments/claims.yaml from stored runs, in seconds; writes docs/claims.md and README's table.

    python experiments/verdicts.py docs/claims/          # every POOL.jsonl there, with POOL.timed.jsonl

The page is docs/claims.md.

Each claim is a one-sided t-test of paired differences by seed, with Holm's correction within its paper (JREG, App. G).
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fulldepth.core.uncertainty import holm, paired_test
from fulldepth.settings import read
from run import POOLS, arms_of, hash_of, read_lines, settings_of

CLAIMS: dict[str, Any] = read(Path(__file__).with_name("claims.yaml"), "train")
FEWEST, INDICATION = 5, 3
"""Seeds of a verdict, and of an indication that is named so."""
LEVEL = 0.05
POWER = (
    "Differences are mean ± standard deviation over seeds, with their own sign; the bound is that of the one-sided "
    "95 % interval, positive where the claim holds: -3.21 with a bound of +3.1 is a number that fell by 3.21, and by "
    "at least 3.1 (95 %). For a claim with a margin, such as less than two points, both are counted from the margin. "
    "Five seeds see effects of about 1.4 standard deviations (80 % power)."
)
GLANCE = (
    "Under each verdict stand the pools of runs that give it, which the sections below describe. A pool with its "
    "number of seeds in brackets, fewer than five, gives an indication. Why a claim is not judged stands below its "
    "pool's table."
)
WORDS = ("held", "not held", "inconclusive", "not judged")
"""Verdicts."""
Runs = dict[str, dict[int, dict[str, Any]]]
"""Arm -> seed -> numbers."""


class Column(NamedTuple):
    """A column of the table of composition."""

    title: str
    number: str
    digits: int
    factor: float = 1.0


COMPOSITION = (
    Column("validation loss, nats", "validation_loss", 3),
    Column("zeta_L, %", "zeta_0", 2),
    Column("first layer within 5 % of the final loss", "near_final", 1),
    Column("3 attention blocks removed, nats", "removed_attention", 3),
    Column("3 layers removed, nats", "removed_layer", 3),
    Column("tokens that leave early, % (1 point of accuracy)", "exit_share", 1, 100.0),
    Column("speed of early exit, measured", "exit_measured_speedup", 2),
    Column("accepted drafts a round, of 4", "accepted_a_round", 2),
    Column("speed of self-speculation, measured", "speculation_speedup", 2),
    Column("same text, %", "same_text", 0, 100.0),
)
SPEEDS = {"speculation_speedup": "self-speculation", "exit_measured_speedup": "early exit"}
"""Measured speed-up -> what has it."""
README_NUMBERS = ("validation_loss", "removed_attention", "exit_share", "accepted_a_round")
"""Columns of README's table."""
README_START = "<!-- composition -->"
README_END = "<!-- end of composition -->"
COMPOSED = ("real", "small", "small-cuda")
"""Pools with a table of composition."""


class Judged(NamedTuple):
    """A claim with its test; the numbers are None where there was none."""

    paper: str
    name: str
    claim: dict[str, Any]
    seeds: int
    mean: float | None = None
    deviation: float | None = None
    bound: float | None = None
    """Lower 95 % bound of the difference in the claimed direction."""
    p: float | None = None
    against: bool = False
    """Whether the 95 % interval of the difference excludes the claimed direction."""
    reason: str = ""
    """Why it was not judged."""


def load(path: Path) -> Runs:
    """The runs of a pool, with the speeds in the file beside it, if there is one.

    Raises:
        SystemExit: for a damaged line, a run twice, runs of several versions, devices or settings, or runs of one seed
            on several data.
    """
    timed = path.with_suffix(".timed.jsonl")
    lines, runs = read_lines(path), Runs()
    check_settings(path, lines)
    for name in ("versions", "device"):
        if len({str(line[name]) for line in [*lines, *read_lines(timed)]}) > 1:
            raise SystemExit(f"{path}: the runs differ in {name}; a verdict needs runs of one. Remove those of others.")
    if len({(line["seed"], line.get("data")) for line in lines}) > len({line["seed"] for line in lines}):
        raise SystemExit(f"{path}: runs of one seed differ in their data. Remove those of others.")
    for line in lines:
        if line["seed"] in runs.setdefault(line["arm"], {}):
            raise SystemExit(f"{path}: {line['arm']}, seed {line['seed']} stands there twice. Remove one of the lines.")
        runs[line["arm"]][line["seed"]] = line["numbers"]
    if timed.exists():
        for arm, seeds in load(timed).items():
            for seed, numbers in seeds.items():
                runs[arm][seed] = numbers | runs[arm][seed]
    return runs


def check_settings(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Check that the runs of a file are of one design: those of an arm have the same settings, and all arms have those
    of the pool, or all have others (`--set`).

    Raises:
        SystemExit: with the name of an arm.
    """
    pool = path.stem.partition(".")[0]
    settings: dict[str, str] = {}
    is_as_designed: dict[bool, str] = {}
    for line in lines:
        arm = line["arm"]
        if settings.setdefault(arm, line.get("settings")) != line.get("settings"):
            raise SystemExit(f"{path}: the runs of {arm} differ in their settings. Remove those of others.")
        if "settings" in line and pool in POOLS and arm in arms_of(pool):
            is_as_designed.setdefault(line["settings"] == hash_of(settings_of(pool, arm, {})), arm)
    if len(is_as_designed) > 1:
        raise SystemExit(
            f"{path}: {is_as_designed[True]} has the settings of the pool and {is_as_designed[False]} has others; a "
            "verdict needs runs of one design. Remove those of others."
        )


def number_of(numbers: dict[str, Any], name: str) -> float:
    """A number of a run, or one of `derived`.

    Raises:
        KeyError: if the run lacks it.
    """
    rule = CLAIMS["derived"].get(name)
    if rule is None:
        if numbers.get(name) is None:
            raise KeyError(name)
        return float(numbers[name])

    def mean(key: str) -> float:
        if "layers" not in rule:
            return number_of(numbers, key)
        depth = len(numbers.get("displacement", numbers[key]))
        first, last = (end if isinstance(end, int) else depth - int(end[2:] or 0) for end in rule["layers"])
        values = numbers[key][-depth:]  # a list that has layer 0 begins with it
        return fmean(values[first - 1 : last])

    return mean(rule["mean"]) - (mean(rule["minus"]) if "minus" in rule else 0.0)


def judge(paper: str, name: str, claim: dict[str, Any], runs: Runs, pool: str = "small") -> Judged:
    """Test a claim, before the correction for several claims."""
    control = POOLS[pool]["control"]
    arms = [runs.get(control if arm == "control" else arm, {}) for arm in claim["arms"]]
    seeds = sorted(set.intersection(*map(set, arms)))
    judged = Judged(paper, name, claim, len(seeds))
    if len(seeds) < INDICATION:
        return judged._replace(reason=f"an arm has {len(seeds)} of the {INDICATION} seeds that it takes")
    gate = CLAIMS["gates"].get(claim.get("gate"))
    try:
        if gate:
            level = fmean(number_of(one, gate["number"]) for one in runs[control].values())
            if level < gate["least"]:
                return judged._replace(
                    reason=f"{gate['name']} of `{control}` is {level:.2f}, below {gate['least']:g}: {gate['meaning']}"
                )
        values = [[number_of(arm[seed], claim["number"]) for seed in seeds] for arm in arms]
    except KeyError as missing:
        return judged._replace(reason=f"the runs have no `{missing.args[0]}`")
    others = values[1] if len(values) > 1 else [0.0] * len(seeds)
    differences = [one - other - claim.get("than", 0.0) for one, other in zip(values[0], others, strict=True)]
    test = paired_test(differences)
    if not test.error:
        return judged._replace(mean=float(test.mean), reason="the difference is the same for every seed")
    greater = claim["direction"] == "greater"
    return judged._replace(
        mean=float(test.mean),
        deviation=float(test.deviation),
        bound=float(test.end(0.05) if greater else -test.end(0.95)),
        p=float(test.p(claim["direction"])),
        against=bool(test.end(0.975) < 0 if greater else test.end(0.025) > 0),
    )


def verdict(judged: Judged, adjusted: float) -> str:
    """`held`, `not held` or `inconclusive` for a claim that was tested."""
    word = "held" if adjusted < LEVEL else "not held" if judged.against else "inconclusive"
    return word if judged.seeds >= FEWEST else f"{word} (indication, {judged.seeds} seeds)"


def claimed_in(pool: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Paper, name and entry of the claims that are made of a pool."""
    return [
        (paper, name, claim)
        for paper, own in CLAIMS["papers"].items()
        for name, claim in own.items()
        if pool in CLAIMS["pools"][claim.get("pools", "scratch")]
    ]


def adjusted_in_papers(every: Sequence[Judged]) -> dict[tuple[str, str], float]:
    """Paper and name of the claims of a pool that were tested -> p after Holm's correction within the paper."""
    adjusted = {}
    for paper in CLAIMS["papers"]:
        own = [judged for judged in every if judged.paper == paper and judged.p is not None]
        for judged, p in zip(own, holm([judged.p for judged in own]), strict=True):
            adjusted[paper, judged.name] = p
    return adjusted


def overview(pools: dict[str, Runs]) -> list[str]:
    """For every claim the pools of each verdict, as lines of Markdown."""
    listed: dict[tuple[str, str], dict[str, list[str]]] = {}
    for pool, runs in pools.items():
        every = [judge(*claimed, runs, pool) for claimed in claimed_in(pool)]
        adjusted = adjusted_in_papers(every)
        for judged in every:
            of_test = adjusted.get((judged.paper, judged.name))
            word = "not judged" if of_test is None else verdict(judged, of_test).partition(" (")[0]
            is_indication = of_test is not None and judged.seeds < FEWEST
            cells = listed.setdefault((judged.paper, judged.name), {})
            cells.setdefault(word, []).append(pool + f" ({judged.seeds})" * is_indication)
    lines = [f"| paper | claim | {' | '.join(WORDS)} |", "|---" * (len(WORDS) + 2) + "|"]
    for paper, own in CLAIMS["papers"].items():
        for name, claim in own.items():
            if cells := listed.get((paper, name)):
                pools_of_words = [", ".join(cells.get(word, [])) for word in WORDS]
                lines.append(f"| {paper} | {claim['sentence']} | {' | '.join(pools_of_words)} |")
    return lines


def table_of(pool: str, runs: Runs) -> list[str]:
    """The table of a pool's judged claims, and why the others were not judged, as lines of Markdown."""
    every = [judge(*claimed, runs, pool) for claimed in claimed_in(pool)]
    in_papers = adjusted_in_papers(every)
    over_all = iter(holm([judged.p for judged in every if judged.p is not None]))
    rows = []
    for judged in every:
        if judged.p is None:
            continue
        adjusted = in_papers[judged.paper, judged.name]
        cells = [
            judged.claim["sentence"],
            verdict(judged, adjusted),
            f"{judged.mean:+.3g} ± {judged.deviation:.2g}",
            f"{judged.bound:+.3g}",
            probability(judged.p),
            f"{probability(adjusted)}, {probability(next(over_all))}",
            f"{judged.paper}, {judged.name}: `{judged.claim['number']}`, {judged.seeds} seeds",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    head = ["claim", "verdict", "difference", "bound", "p", "Holm: in the paper, over all", "what was compared"]
    table = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows, ""] if rows else []
    reasons: dict[str, list[str]] = {}
    for judged in every:
        if judged.p is None:
            reasons.setdefault(judged.reason, []).append(f"{judged.paper}, {judged.name}")
    unjudged = [f"- Not judged, because {reason}: {'; '.join(names)}." for reason, names in reasons.items()]
    return [f"## Pool {pool}", "", POOLS[pool].get("about", ""), "", *table, *unjudged, ""]


def probability(p: float) -> str:
    """A probability for people."""
    return "< 0.001" if p < 0.001 else f"{p:.2g}"


def composition(pool: str, runs: Runs) -> list[str]:
    """What each method of training does for the others: differences to the control, as lines of Markdown."""
    control = POOLS[pool]["control"]
    about = (
        f"The row of `{control}` has its own numbers; the others have the mean difference to it ± its standard error "
        "over paired seeds, in bold where the two-sided 95 % interval excludes zero."
    )
    table = differences_to_control(pool, runs, COMPOSITION)
    return [f"## What composes, pool {pool}", "", about, "", *table, "", *advice(pool, runs), ""]


def compared_arms(pool: str, runs: Runs) -> list[str]:
    """The control, then the other arms that share with it the seeds of an indication; none if there are no others."""
    control = POOLS[pool]["control"]
    seeds = runs.get(control, {}).keys()
    others = [arm for arm in arms_of(pool) if arm != control and len(seeds & runs.get(arm, {}).keys()) >= INDICATION]
    return [control, *others] if others else []


def differences_to_control(pool: str, runs: Runs, columns: Sequence[Column]) -> list[str]:
    """A row for every arm with enough runs, the control first; a column for every number that the control has.

    The seeds of an arm are those that it shares with the control.
    """
    control = POOLS[pool]["control"]
    columns = [column for column in columns if values_of(runs, control, column)]
    lines = [
        f"| trained with | seeds | {' | '.join(column.title for column in columns)} |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for arm in compared_arms(pool, runs):
        cells = [cell(runs, control, arm, column) for column in columns]
        seeds = runs[control].keys() & runs[arm].keys()  # a difference is of those that both have
        lines.append(f"| {arm} | {len(seeds)} | {' | '.join(cells)} |")
    return lines


def readme_with(text: str, runs: Runs) -> str:
    """README with the rows of pool `real` between its marks; unchanged if it has no marks."""
    columns = [column for column in COMPOSITION if column.number in README_NUMBERS]
    table = "\n".join(differences_to_control("real", runs, columns))
    return re.sub(f"{README_START}.*?{README_END}", f"{README_START}\n{table}\n{README_END}", text, flags=re.DOTALL)


def values_of(runs: Runs, arm: str, column: Column) -> dict[int, float]:
    """Seed -> number of an arm, for the seeds that have it."""
    values = {}
    for seed, numbers in runs.get(arm, {}).items():
        with contextlib.suppress(KeyError):
            values[seed] = column.factor * number_of(numbers, column.number)
    return values


def cell(runs: Runs, control: str, arm: str, column: Column) -> str:
    """The text of a cell: a level of the control, a difference of another arm; empty for fewer than two seeds."""
    own = values_of(runs, arm, column)
    reference = values_of(runs, control, column)
    if arm == control:
        return f"{fmean(own.values()):.{column.digits}f}"
    differences = [own[seed] - reference[seed] for seed in sorted(own.keys() & reference.keys())]
    if len(differences) < 2:
        return ""
    test = paired_test(differences)
    digits = column.digits
    if 0 < test.error < 0.5 * 10.0**-digits:  # as many as show the error
        digits = -math.floor(math.log10(test.error))
    text = f"{test.mean:+.{digits}f} ± {test.error:.{digits}f}"
    if not test.error:  # the same for every seed says nothing of other seeds
        return f"{test.mean:+.{digits}f}"
    measurable = test.end(LEVEL / 2) > 0 or test.end(1 - LEVEL / 2) < 0
    return f"**{text}**" if measurable else text


def advice(pool: str, runs: Runs) -> list[str]:
    """Sentences on speeds that were measured, only where the 95 % interval of a speed-up over the seeds is above 1."""
    sentences = []
    for arm in arms_of(pool):
        for number, words in SPEEDS.items():
            values = list(values_of(runs, arm, Column("", number, 2)).values())
            if len(values) < INDICATION:
                continue
            test = paired_test(values)
            low, high = float(test.end(LEVEL / 2)), float(test.end(1 - LEVEL / 2))
            if low > 1:
                sentences.append(
                    f"- Trained with `{arm}`, {words} is {test.mean:.2f} times as fast as the full model "
                    f"({low:.2f} to {high:.2f}, {len(values)} seeds)."
                )
    return sentences or ["- No speed-up was measurable."] if timed_runs(runs) else []


def timed_runs(runs: Runs) -> bool:
    """Whether speeds were measured."""
    return any(speed in numbers for seeds in runs.values() for numbers in seeds.values() for speed in SPEEDS)


def page_of(files: list[Path]) -> str:
    """The page on the runs in the files of one folder, as Markdown."""
    page = ["# Claims", "", __doc__.strip().splitlines()[-1], POWER, ""]
    pools = {path.stem: load(path) for path in files if not path.stem.endswith(".timed")}
    page += ["## At a glance", "", GLANCE, "", *overview(pools), ""]
    for pool in COMPOSED:
        if pool in pools and compared_arms(pool, pools[pool]):
            page += composition(pool, pools[pool])
    for pool, runs in pools.items():
        page += table_of(pool, runs)
    page += ["## Measured alone", ""]
    for entry in CLAIMS["elsewhere"]:
        page.append(f"- {entry['claim']}: {entry['sentence']} [{entry['verdict']}]({entry['page']}).")
    return "\n".join([*page, ""])


def main() -> None:
    """Write the page beside the folder of runs."""
    if len(sys.argv) != 2 or not (files := sorted(Path(sys.argv[1]).glob("*.jsonl"))):
        raise SystemExit(
            "Give the folder of the runs, which holds POOL.jsonl: python experiments/verdicts.py docs/claims/"
        )
    page = page_of(files)
    folder = Path(sys.argv[1])
    folder.with_suffix(".md").write_text(page, encoding="utf-8")
    real = load(folder / "real.jsonl")
    if compared_arms("real", real):
        readme = folder.parents[1] / "README.md"
        readme.write_text(readme_with(readme.read_text("utf-8"), real), encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
