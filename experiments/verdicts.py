"""Judges the claims of experiments/claims.yaml from stored runs; writes tables and docs/claims.md, in seconds.

    python experiments/verdicts.py docs/claims/          # every *.jsonl there; the page is docs/claims.md

Each claim is a one-sided t-test of paired differences by seed, with Holm's correction within its paper (JREG, App. G).
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fulldepth.settings import read
from fulldepth.uncertainty import holm, paired_test
from run import read_lines

CLAIMS, POOLS = (read(Path(__file__).with_name(name), "train") for name in ("claims.yaml", "pools.yaml"))
FEWEST, INDICATION = 5, 3
"""Seeds of a verdict, and of an indication that is named so."""
LEVEL = 0.05
POWER = (
    "Differences are mean ± standard deviation over seeds; the bound is the lower end of the one-sided 95 % interval, "
    "in the claimed direction. Five seeds see effects of about 1.4 standard deviations (80 % power)."
)
Runs = dict[str, dict[int, dict[str, Any]]]
"""Arm -> seed -> numbers."""


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
    """The runs of a pool, all of one version and one data set.

    Raises:
        SystemExit: for a damaged line, a run twice, or runs of several versions or data.
    """
    lines, runs = read_lines(path), Runs()
    for name in ("versions", "device"):
        if len({str(line[name]) for line in lines}) > 1:
            raise SystemExit(f"{path}: the runs differ in {name}; a verdict needs runs of one. Remove those of others.")
    for line in lines:
        if line["seed"] in runs.setdefault(line["arm"], {}):
            raise SystemExit(f"{path}: {line['arm']}, seed {line['seed']} stands there twice. Remove one of the lines.")
        runs[line["arm"]][line["seed"]] = line["numbers"]
    return runs


def number_of(numbers: dict[str, Any], name: str) -> float:
    """A number of a run, or one of `derived`.

    Raises:
        KeyError: if the run lacks it.
    """
    rule = CLAIMS["derived"].get(name)
    if rule is None:
        return float(numbers[name])

    def mean(key: str) -> float:
        if "layers" not in rule:
            return float(numbers[key])
        depth = len(numbers["displacement"])
        first, last = (end if isinstance(end, int) else depth - int(end[2:] or 0) for end in rule["layers"])
        values = numbers[key][-depth:]  # a list that has layer 0 begins with it
        return fmean(values[first - 1 : last])

    return mean(rule["mean"]) - (mean(rule["minus"]) if "minus" in rule else 0.0)


def judge(paper: str, name: str, claim: dict[str, Any], runs: Runs) -> Judged:
    """Test a claim, before the correction for several claims."""
    arms = [runs.get(arm, {}) for arm in claim["arms"]]
    seeds = sorted(set.intersection(*map(set, arms)))
    judged = Judged(paper, name, claim, len(seeds))
    if len(seeds) < INDICATION:
        return judged._replace(reason=f"{len(seeds)} seeds; it takes {INDICATION}")
    gate = CLAIMS["gates"].get(claim.get("gate"))
    try:
        if (
            gate
            and (level := fmean(number_of(one, gate["number"]) for one in runs[gate["arm"]].values())) < gate["least"]
        ):
            return judged._replace(reason=f"{gate['number']} of {gate['arm']} is {level:.2f}, below {gate['least']}")
        values = [[number_of(arm[seed], claim["number"]) for seed in seeds] for arm in arms]
    except KeyError as missing:
        return judged._replace(reason=f"the runs have no {missing.args[0]}")
    others = values[1] if len(values) > 1 else [claim.get("than", 0.0)] * len(seeds)
    differences = [one - other for one, other in zip(values[0], others, strict=True)]
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
    """`held`, `not held`, `inconclusive` or `not judged`."""
    if judged.p is None:
        return f"not judged: {judged.reason}"
    word = "held" if adjusted < LEVEL else "not held" if judged.against else "inconclusive"
    return word if judged.seeds >= FEWEST else f"{word} (indication, {judged.seeds} seeds)"


def table_of(pool: str, runs: Runs) -> list[str]:
    """The table of a pool, as lines of Markdown."""
    every = [judge(paper, name, claim, runs) for paper, own in CLAIMS["papers"].items() for name, claim in own.items()]
    over_all = iter(holm([judged.p for judged in every if judged.p is not None]))
    lines = [
        f"## Pool {pool}",
        "",
        POOLS["about"].get(pool, ""),
        "",
        "| claim | number | seeds | difference | bound | p (Holm in the paper, over all) | verdict |",
        "|---" * 7 + "|",
    ]
    for paper in CLAIMS["papers"]:
        own = [judged for judged in every if judged.paper == paper]
        adjusted = iter(holm([judged.p for judged in own if judged.p is not None]))
        for judged in own:
            p = next(adjusted) if judged.p is not None else 1.0
            numbers = ["", "", ""]
            if judged.p is not None:
                numbers = [
                    f"{judged.mean:+.4g} ± {judged.deviation:.2g}",
                    f"{judged.bound:+.4g}",
                    f"{judged.p:.3g} ({p:.3g}, {next(over_all):.3g})",
                ]
            cells = [f"{paper}, {judged.name}: {judged.claim['sentence']}", judged.claim["number"], str(judged.seeds)]
            lines.append(f"| {' | '.join([*cells, *numbers, verdict(judged, p)])} |")
    return [*lines, ""]


def page_of(files: list[Path]) -> str:
    """The page on the runs in the files of one folder, as Markdown."""
    page = ["# Claims", "", __doc__.strip().splitlines()[-1], POWER, ""]
    for path in files:
        page += table_of(path.stem, load(path))
    return "\n".join(page)


def main() -> None:
    """Write the page beside the folder of runs."""
    if len(sys.argv) != 2 or not (files := sorted(Path(sys.argv[1]).glob("*.jsonl"))):
        raise SystemExit(
            "Give the folder of the runs, which holds POOL.jsonl: python experiments/verdicts.py docs/claims/"
        )
    page = page_of(files)
    Path(sys.argv[1]).with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
