"""Verdicts of experiments/verdicts.py against scipy, and what they refuse."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
from scipy import stats

from places import ROOT

sys.path.insert(0, str(ROOT / "experiments"))

from run import hash_of, sealed, settings_of
from verdicts import (
    CLAIMS,
    COMPOSITION,
    README_END,
    README_START,
    advice,
    compared_arms,
    composition,
    differences_to_control,
    judge,
    load,
    page_of,
    readme_with,
    table_of,
)

DEPTH = 12


def line(arm, seed, **numbers):
    rng = np.random.default_rng([seed, len(arm)])
    by_layer = {name: rng.uniform(0.1, 0.9, DEPTH).tolist() for name in ("displacement", "coherence_attention")}
    plain = {"validation_loss": float(rng.normal(4, 0.05)), "zeta_0": 5.0 + float(rng.normal()), **by_layer}
    return {"arm": arm, "seed": seed, "versions": {"torch": "2"}, "device": "cpu", "numbers": plain | numbers}


def stored(path, lines):
    path.write_text("".join(json.dumps(sealed(each)) + "\n" for each in lines))
    return path


def lines(arms=("llama", "jreg", "tree"), seeds=5, **numbers):
    return [line(arm, seed, **numbers) for arm in arms for seed in range(seeds)]


def test_the_page_on_claims_is_made_of_the_stored_runs():
    files = sorted((ROOT / "docs" / "claims").glob("*.jsonl"))
    assert (ROOT / "docs" / "claims.md").read_text() == page_of(files), (
        "run python experiments/verdicts.py docs/claims/"
    )


def test_the_overview_has_the_verdicts_of_the_tables():
    """Read from the page: a claim that has no verdict in the table of a pool is not judged, or not about it."""
    page = (ROOT / "docs" / "claims.md").read_text()
    glance = page.split("## At a glance\n")[1].split("\n## ")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in glance.splitlines() if line.startswith("|")]
    assert {row[1] for row in rows} <= {
        claim["sentence"] for own in CLAIMS["papers"].values() for claim in own.values()
    }
    assert head[2:] == ["held", "not held", "inconclusive", "not judged"]
    sections = re.findall(r"^## Pool (\S+)\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    assert len(sections) == len(list((ROOT / "docs" / "claims").glob("*.jsonl")))
    for paper, sentence, *cells in rows:
        [name] = [name for name, claim in CLAIMS["papers"][paper].items() if claim["sentence"] == sentence]
        expected = {word: [] for word in head[2:]}
        for pool, section in sections:
            tested = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \| [+-]", section, re.MULTILINE))
            if sentence in tested:
                word, _, seeds = tested[sentence].partition(" (indication, ")
                expected[word].append(f"{pool} ({seeds[0]})" if seeds else pool)
            elif re.search(rf"{paper}, {name}[;.]", section):
                expected["not judged"].append(pool)
        stated = [cell.strip(" |") for cell in cells] + [""] * (4 - len(cells))
        assert stated == [", ".join(pools) for pools in expected.values()], sentence


def test_the_readmes_table_is_made_of_the_stored_runs():
    readme = (ROOT / "README.md").read_text()
    runs = load(ROOT / "docs" / "claims" / "real.jsonl")
    assert bool(compared_arms("real", runs)) == (README_START in readme)
    assert readme == readme_with(readme, runs), "run python experiments/verdicts.py docs/claims/"


def test_the_readmes_table_has_the_differences_of_pool_real(tmp_path):
    runs = load(stored(tmp_path / "real.jsonl", lines(("plain", "aligned"), seeds=3)))
    text = readme_with(f"before\n{README_START}\nold\n{README_END}\nafter", runs)
    assert text.startswith(f"before\n{README_START}\n| trained with | seeds | validation loss, nats |")
    losses = [np.array([runs[arm][seed]["validation_loss"] for seed in range(3)]) for arm in ("aligned", "plain")]
    assert f"| aligned | 3 | {np.mean(losses[0] - losses[1]):+.3f} ± " in text.replace("**", "")
    assert "old" not in text
    assert text.endswith(f"{README_END}\nafter")


def test_a_claim_is_a_paired_one_sided_t_test(tmp_path):
    runs = load(stored(tmp_path / "small.jsonl", lines()))
    judged = judge("JREG", "loss", CLAIMS["papers"]["JREG"]["loss"], runs)
    ours, theirs = ([runs[arm][seed]["validation_loss"] for seed in range(5)] for arm in ("jreg", "llama"))
    expected = stats.ttest_rel(ours, theirs, alternative="less")
    assert judged.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert judged.bound == pytest.approx(-expected.confidence_interval(0.95).high, rel=1e-9)
    assert judged.mean == pytest.approx(np.mean(ours) - np.mean(theirs))
    middle = judge("JREG", "middle", CLAIMS["papers"]["JREG"]["middle"], runs)
    means = [[np.mean(runs[arm][seed]["displacement"][1:11]) for seed in range(5)] for arm in ("jreg", "llama")]
    assert middle.p == pytest.approx(stats.ttest_rel(*means, alternative="greater").pvalue, rel=1e-9)


@pytest.mark.parametrize(
    ("changed", "seeds", "expected"),
    [
        ({"tree": -0.5}, 5, "| held |"),
        ({"tree": 0.5}, 5, "| not held |"),
        ({"tree": -0.5}, 3, "| held (indication, 3 seeds) |"),
        ({"tree": -0.5}, 2, "- Not judged, because an arm has 2 of the 3 seeds that it takes: "),
    ],
)
def test_verdicts(changed, seeds, expected, tmp_path):
    every = lines(seeds=seeds)
    for each in every:
        each["numbers"]["validation_loss"] += changed.get(each["arm"], 0.0)
    table = table_of("small", load(stored(tmp_path / "small.jsonl", every)))
    [row] = [text for text in table if "tree-loss" in text]
    assert expected in row


def test_without_a_jump_its_claims_are_not_judged(tmp_path):
    table = table_of("small", load(stored(tmp_path / "small.jsonl", lines(zeta_0=0.2))))
    [row] = [text for text in table if "JREG, suppresses-L;" in text]
    assert row.startswith(
        "- Not judged, because zeta_L (%) of `llama` is 0.20, below 1: the last layer has no jump: JREG"
    )


def test_the_table_of_composition_has_paired_differences_in_bold_where_zero_is_excluded(tmp_path):
    runs = load(stored(tmp_path / "small.jsonl", lines(("llama", "jreg", "tree"))))
    for seed in range(5):
        runs["tree"][seed]["validation_loss"] -= 0.5
    table = {
        row.split(" | ")[0].strip("| "): row.split(" | ")[2] for row in composition("small", runs) if " | 5 | " in row
    }
    own = {arm: np.array([runs[arm][seed]["validation_loss"] for seed in range(5)]) for arm in runs}
    assert table["llama"] == f"{own['llama'].mean():.3f}"
    for arm in ("jreg", "tree"):
        differences = own[arm] - own["llama"]
        text = f"{differences.mean():+.3f} ± {stats.sem(differences):.3f}"
        measurable = stats.ttest_1samp(differences, 0).pvalue < 0.05
        assert table[arm] == (f"**{text}**" if measurable else text)
    assert table["tree"].startswith("**")


def test_advice_on_speeds_needs_three_seeds_and_an_interval_above_one(tmp_path):
    def sentences(*speeds):
        timed = [
            line("aligned", seed) | {"numbers": {"speculation_speedup": speed, "exit_measured_speedup": None}}
            for seed, speed in enumerate(speeds)
        ]
        stored(tmp_path / "real.timed.jsonl", timed)
        return advice("real", load(stored(tmp_path / "real.jsonl", lines(("plain", "aligned")))))

    [sentence] = sentences(1.30, 1.32, 1.34)
    low, high = stats.t.interval(0.95, 2, 1.32, 0.02 / 3**0.5)
    assert f"self-speculation is 1.32 times as fast as the full model ({low:.2f} to {high:.2f}, 3 seeds)" in sentence
    assert sentences(1.0, 1.3, 1.6) == ["- No speed-up was measurable."]
    assert sentences(1.3, 1.31) == ["- No speed-up was measurable."]


def test_damaged_repeated_and_mixed_lines_are_one_message_each(tmp_path):
    path = stored(tmp_path / "small.jsonl", lines())
    whole = path.read_text()
    path.write_text(whole.replace('"seed": 0', '"seed": 9', 1))
    with pytest.raises(SystemExit, match="line 1: damaged or edited"):
        load(path)
    path.write_text(whole + "{broken\n")
    with pytest.raises(SystemExit, match="line 16: damaged"):
        load(path)
    path.write_text(whole + whole.splitlines(keepends=True)[0])
    with pytest.raises(SystemExit, match="llama, seed 0 stands there twice"):
        load(path)
    other = line("lime", 0) | {"versions": {"torch": "3"}}
    elsewhere = line("lime", 0) | {"data": "sha256:0"}
    with pytest.raises(SystemExit, match="runs of one seed differ in their data"):
        load(stored(tmp_path / "data.jsonl", [line("llama", 0), elsewhere]))
    with pytest.raises(SystemExit, match="differ in versions"):
        load(stored(path, [*lines(), other]))


def test_runs_of_other_settings_versions_and_devices_are_no_pool(tmp_path):
    designed = {arm: hash_of(settings_of("small", arm, {})) for arm in ("llama", "tree")}
    short = hash_of(settings_of("small", "tree", {"steps": 100}))

    def pool(**settings):
        return [line(arm, seed) | {"settings": settings[arm]} for arm in settings for seed in range(5)]

    path = stored(tmp_path / "small.jsonl", pool(**designed))
    assert {*load(path)} == {"llama", "tree"}
    with pytest.raises(SystemExit, match="llama has the settings of the pool and tree has others"):
        load(stored(tmp_path / "small.jsonl", pool(**designed | {"tree": short})))
    other = line("tree", 5) | {"settings": short}
    with pytest.raises(SystemExit, match="the runs of tree differ in their settings"):
        load(stored(tmp_path / "small.jsonl", [*pool(tree=designed["tree"]), other]))
    stored(path, pool(**designed))
    for name, value in (("versions", {"torch": "3"}), ("device", "cuda")):
        stored(tmp_path / "small.timed.jsonl", [line("llama", 0, speculation_speedup=1.3) | {name: value}])
        with pytest.raises(SystemExit, match=f"differ in {name}"):
            load(path)


def test_the_seeds_of_a_difference_are_those_of_both_arms():
    runs = {"llama": {seed: {"validation_loss": 4 + seed} for seed in range(3)}}
    runs["tree"] = {seed: {"validation_loss": 4 + seed * seed} for seed in range(5)}
    [*_, row] = differences_to_control("small", runs, COMPOSITION)
    test = stats.ttest_rel([4, 5, 8], [4, 5, 6])
    assert row == f"| tree | 3 | {2 / 3:+.3f} ± {2 / 3 / test.statistic:.3f} |"


def test_what_was_measured_alone_stands_in_the_log():
    log = (ROOT / "docs" / "log.md").read_text()
    [cost] = CLAIMS["elsewhere"]
    row = next(line for line in log.splitlines() if line.startswith("| JREG, to Llama"))
    time, memory = (row.split(" | ")[column].removesuffix(", missed") for column in (1, 3))
    assert cost["verdict"].startswith(f"no measurable difference in time: {time}; {memory} peak memory")
    low, high = map(float, re.search(r"\((.*) to (.*)\)", time).groups())
    assert low < 1 < high
