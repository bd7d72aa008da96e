"""Groups over seeds: every number against scipy's paired t-test, what is said about it, and what is refused."""

from __future__ import annotations

import shlex
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from cli.conftest import main  # noqa: F401
from fulldepth.measurement import measure
from fulldepth.results import Results, compare, tabulate
from refusals import refused
from reporting.synthetic import group, row, training
from training.conftest import SHORT, recipe, sources  # noqa: F401

KEYS = ["measure", "site", "layer", "other", "statistic"]
"""Columns that identify a number."""
LAST = 300
"""Last step of the synthetic runs."""


def methods(**changes):
    """Groups of five runs: JREG, and its baseline."""
    jreg = group("tiny-jreg", 0.06, 3.42, {"jump": 0.09}, range(5), **changes)
    return jreg, group("tiny-llama", 0.3, 3.41, {}, range(5))


def values(runs, measure, layer=None, step=LAST):
    """A number of every run, in order."""
    found = []
    for run in runs:
        rows = run.table[(run.table.measure == measure) & (run.table.step == step)]
        rows = rows if layer is None else rows[rows.layer == layer]
        found.append(rows[rows.statistic != "std"].value.item())
    return np.array(found)


def by_name(results):
    return {test["name"]: test for test in results.meta["tests"]}


def test_every_number_has_scipys_paired_test():
    jreg, llama = methods()
    found = compare(jreg[::-1], against=llama, names=["jreg", "llama"])  # in any order: pairs have the same seed
    tests = found.table[found.table.seed.isna()]
    places = [("displacement", layer) for layer in range(1, 13)] + [("jump_rate", 12), ("validation_loss", None)]
    for measure_name, layer in places:
        own, base = (values(runs, measure_name, layer) for runs in (jreg, llama))
        rows = tests[(tests.measure == measure_name) & (tests.layer.isna() if layer is None else tests.layer == layer)]
        (row,) = rows.to_dict("records")
        expected = [stats.ttest_rel(own, base, alternative=side) for side in ("two-sided", "greater", "less")]
        assert row["p"] == pytest.approx(expected[0].pvalue, rel=1e-6)
        assert row["lower_bound"] == pytest.approx(expected[1].confidence_interval(0.95).low, rel=1e-6)
        assert row["upper_bound"] == pytest.approx(expected[2].confidence_interval(0.95).high, rel=1e-6)
        assert row["difference"] == pytest.approx(np.mean(own - base))
        assert row["deviation"] == pytest.approx(np.std(own - base, ddof=1))
        assert (row["value"], row["count"], row["model"]) == (pytest.approx(own.mean()), 5, "jreg")
    single = found.table[(found.table.measure == "validation_loss") & found.table.seed.notna()]
    own = single[single.model == "jreg"].sort_values("seed")
    assert own["difference"].to_numpy() == pytest.approx(
        values(jreg, "validation_loss") - values(llama, "validation_loss")
    )
    assert (found.is_comparison, found.meta["step"], found.meta["warnings"]) == (True, LAST, [])
    assert list(found.headline)[:3] == ["validation_loss", "train_loss", "zeta_L"]
    p = sorted(tests[tests.measure == "displacement"]["p"])
    smaller = next((rank for rank, one in enumerate(p) if one * (12 - rank) >= 0.05), 12)
    assert f"smaller at {smaller}" in found.headline["redundancy_change"]["sentence"]


def test_a_claim_has_a_one_sided_test_and_a_bound():
    jreg, llama = methods()
    claims = {"zeta_L": "less", "validation_loss": "less"}
    found = compare(jreg, against=llama, names=["jreg", "llama"], claims=claims)
    zeta, loss = (by_name(found)[name] for name in claims)
    own, base = (values(runs, "jump_rate", 12) for runs in (jreg, llama))
    expected = stats.ttest_rel(own, base, alternative="less")
    assert zeta["p"] == pytest.approx(expected.pvalue, rel=1e-6)
    assert zeta["bound"] == pytest.approx(-expected.confidence_interval(0.95).high)
    own, base = (values(runs, "validation_loss") for runs in (jreg, llama))
    assert loss["p"] == pytest.approx(stats.ttest_rel(own, base, alternative="less").pvalue, rel=1e-6)
    assert (zeta["p_corrected"], loss["p_corrected"]) == (pytest.approx(2 * zeta["p"]), pytest.approx(loss["p"]))
    assert "less as claimed" in found.headline["zeta_L"]["sentence"]
    assert "against the claim (less)" in found.headline["validation_loss"]["sentence"]
    alike = compare(group("llama", 0.31, 3.41, {}, range(5)), against=llama, claims=claims)
    low, high = by_name(alike)["validation_loss"]["interval"]
    assert low < 0 < high
    for name in ("validation_loss", "train_loss"):
        assert "no measurable difference (95 % interval" in alike.headline[name]["sentence"]
    with refused(None, "zeta_X", "zeta_L"):
        compare(jreg, against=llama, claims={"zeta_X": "less"})
    with refused("--set claims has no effect without --against"):
        compare(jreg, claims={"zeta_L": "less"})


def test_few_seeds_are_an_indication_and_others_are_left_out_by_name():
    jreg, llama = methods()
    found = compare(jreg[:3], against=llama[1:], names=["jreg", "llama"])
    assert found.meta["models"][0]["seeds"] == [1, 2]
    assert "2 seeds (an indication)" in found.headline["zeta_L"]["sentence"]
    left_out = [line for line in found.meta["warnings"] if "no counterpart" in line]
    assert [line.split(":")[0] for line in left_out] == ["jreg", "llama", "llama"]
    assert "5 seeds:" in compare(jreg, against=llama).headline["zeta_L"]["sentence"]


def test_only_what_all_runs_have_at_the_common_step_is_tested():
    jreg, llama = methods(steps=(0, 100, 200))
    found = compare(jreg, against=llama)
    assert found.meta["step"] == 200
    assert by_name(found)["validation_loss"]["by_seed"] == pytest.approx(
        values(jreg, "validation_loss", step=200) - values(llama, "validation_loss", step=200)
    )
    assert "train_loss" not in by_name(found)  # over steps 101 to 200, the baseline's over 151 to 200
    assert any("trained past step 200" in line for line in found.meta["warnings"])
    for run in llama:
        run.table.loc[run.table.measure == "other_load", "value"] = 0.5
    busy = compare(methods()[0], against=llama)
    assert not busy.table.measure.isin(["elapsed", "throughput", "peak_memory"]).any()
    assert any("Time and memory are not compared" in line and "50%" in line for line in busy.meta["warnings"])


def test_other_depths_meet_at_relative_depth():
    shallow = group("half", 0.1, 3.4, {}, range(3), layers=6)
    deep = methods()[1][:3]
    found = compare(shallow, against=deep)
    tests = found.table[found.table.seed.isna() & (found.table.measure == "displacement") & (found.table.layer == 2)]
    own, base = (values(runs, "displacement", layer) for runs, layer in ((shallow, 2), (deep, 4)))
    assert tests["p"].iloc[0] == pytest.approx(stats.ttest_rel(own, base).pvalue, rel=1e-6)
    assert any("6 and 12 layers" in line for line in found.meta["warnings"])


@pytest.mark.parametrize("depth", ["layer", "relative"])
@pytest.mark.parametrize("swapped", [False, True])
def test_headline_numbers_of_last_layers_are_of_the_last_layer_of_each_group(depth, swapped):
    groups = (group("half", 0.1, 3.4, {}, range(3), layers=6), methods()[1][:3])
    first, second = groups[::-1] if swapped else groups
    tests = by_name(compare(first, against=second, depth=depth))
    places = {"last_layer_displacement": ("displacement", 0), "zeta_L": ("jump_rate", 0), "zeta_L-2": ("jump_rate", 2)}
    for name, (measured, back) in places.items():
        own, base = (values(runs, measured, runs[0].meta["model"]["num_layers"] - back) for runs in (first, second))
        assert (tests[name]["value"], tests[name]["against"]) == (pytest.approx(own.mean()), pytest.approx(base.mean()))
        assert tests[name]["p"] == pytest.approx(stats.ttest_rel(own, base).pvalue, rel=1e-6)


def changed(runs, part, **changes):
    for run in runs:
        run.meta[part] = {**run.meta[part], **changes}
    return runs


def test_groups_that_prove_nothing_are_refused():
    jreg, llama = methods()
    cases = [
        ((jreg[:1], llama), "2 pairs", "got 1"),
        ((jreg[:2], llama[2:]), "2 pairs", "got 0", "[0, 1]", "[2, 3, 4]"),
        (([*jreg, jreg[0]], llama), "same seed, 0"),
        (([*jreg[:2], *group("x", 0.1, 3.4, {}, [2], learning_rate=1.0)], llama), "learning_rate is 1.0 and 0.002"),
        ((jreg, changed(methods()[1], "data", hash="sha256:ee")), "the data differ"),
        ((jreg, changed(methods()[1], "settings", tokenizer="other")), "the tokenizers differ"),
        ((jreg, [training(steps=(5, 7), seed=seed) for seed in range(5)]), "300"),
        ((changed(methods()[0], "settings", seed=None), llama), "does not state the seed"),
        ((jreg, []), "2 pairs"),
    ]
    for (first, second), *words in cases:
        with refused(None, *words[:1]) as caught:
            compare(first, against=second)
        assert all(word in str(caught.value) for word in words[1:]), caught.value
    with refused("--baseline has no effect with --against"):
        compare(jreg, against=llama, baseline=1)
    with refused("several kinds"):
        compare(jreg, against=[Results(llama[0].table.drop(columns="step"), {**llama[0].meta, "kind": "measure"})])


def test_two_single_runs_are_refused_with_the_command_for_groups():
    (one, *_), (other, *_) = methods()
    with refused("seed", "fulldepth compare A/seed-* --against B/seed-*"):
        compare([one, other])


def test_versions_and_steps_that_differ_are_noted():
    jreg, llama = methods()
    changed(llama, "versions", torch="2.12.0")
    changed(llama, "settings", steps=600)
    (line,) = compare(jreg, against=llama, names=["a", "b"]).meta["warnings"]
    assert "a, seed 0 and b, seed 0" in line
    assert "the versions of torch differ" in line
    assert "schedules are of different length" in line


def keyed(table):
    """The table by the columns that identify a number, as text."""
    return table.set_index(table[KEYS].astype(str).agg(tuple, axis=1))


def shell(command, folder):
    """A command line as a shell reads it, with its patterns."""
    text = f"{shlex.quote(sys.executable)} -m fulldepth {command}"
    return subprocess.run(text, shell=True, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_trained_groups_from_the_shell_and_measured_ones(tmp_path, recipe, main):  # noqa: F811
    """Two methods, three seeds each, trained; the same models measured."""
    for method in ("standard", "jreg"):
        for seed in range(3):
            path = recipe(**SHORT, method=method, seed=seed)
            code, _, said = main("train", path, "--output", tmp_path / method / f"seed-{seed}")
            assert code == 0, said
    done = shell("compare jreg/seed-* --against standard/seed-* --set claims.zeta_L=less -o cmp", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "jreg" in done.stdout
    assert "Page: cmp/report.html" in done.stdout
    found = Results.load(tmp_path / "cmp")
    own, base = ([Results.load(tmp_path / method / f"seed-{n}") for n in range(3)] for method in ("jreg", "standard"))
    losses = [values(runs, "validation_loss", step=2) for runs in (own, base)]
    assert by_name(found)["validation_loss"]["p"] == pytest.approx(stats.ttest_rel(*losses).pvalue, rel=1e-6)
    assert [entry["label"] for entry in found.meta["models"]] == ["jreg", "standard"]
    assert by_name(found)["zeta_L"]["claim"] == "less"
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    measured = [
        [
            measure(str(tmp_path / name / f"seed-{n}"), str(text), output=tmp_path / "out" / name / str(n))
            for n in range(3)
        ]
        for name in ("jreg", "standard")
    ]
    folders = [f"{tmp_path}/out/{name}/{n}" for name in ("jreg", "standard") for n in range(3)]
    code, out, said = main(
        "compare", *folders[:3], f"--against={folders[3]}", *folders[4:], "--output", tmp_path / "both", "--json"
    )
    assert code == 0, said
    both = Results.load(tmp_path / "both")
    assert '"last_layer_loss"' in out
    single = [[keyed(one.table)["value"] for one in group] for group in measured]
    tests = keyed(both.table[both.table.seed.isna()])
    for key, test in [*zip(tests.index, tests.to_dict("records"), strict=True)][::7]:
        numbers = [[one.loc[[key]].item() for one in group] for group in single]
        expected = stats.ttest_rel(*numbers).pvalue
        assert test["difference"] == pytest.approx(np.mean(numbers[0]) - np.mean(numbers[1]), abs=1e-12)
        assert test["deviation"] == 0 or test["p"] == pytest.approx(expected, rel=1e-6)
    with refused("2 pairs"):
        compare(folders[:1], against=folders[3:])
    with refused("does not state the seed"):
        for one in measured[0]:
            one.meta["training"] = None
        compare(measured[0], against=measured[1])


def test_a_number_in_several_rows_is_refused():
    jreg, llama = methods()
    rows = jreg[2].table
    several = rows[(rows.measure == "validation_loss") & (rows.step == LAST)]
    jreg[2] = Results(pd.concat([rows, several]), jreg[2].meta)
    with refused(None, "several rows for one number: validation_loss mean"):
        compare(jreg, against=llama)
    with refused(None, "several rows for one number: validation_loss mean"):
        compare(llama, against=jreg)
    jreg[2] = Results(pd.concat([rows, several.assign(value=np.nan)]), jreg[2].meta)  # says nothing of the number
    assert "validation_loss" in compare(jreg, against=llama).headline


def measured(effects, seed):
    """A measurement of a trained model whose layers change later ones by `effects`, by the part that is removed."""
    rows = [row("layer_effect", None, value, "later_future_of_layers", part) for part, value in effects.items()]
    meta = {"kind": "measure", "model": {"name": "m", "num_layers": 2}, "data": {"hash": "sha256:a"}, "settings": {}}
    return Results(tabulate(rows), {**meta, "training": {"seed": seed}})


def test_effects_of_removed_parts_are_compared_over_seeds():
    values = np.random.default_rng(0).normal(0.5, 0.1, (2, 3, 5))  # [group, part, seed]
    parts = ("layer", "attention", "mlp")
    both = [[measured(dict(zip(parts, group[:, seed], strict=True)), seed) for seed in range(5)] for group in values]
    compared = compare(both[0], against=both[1], names=["a", "b"], claims={"effect_on_later": "greater"})
    found = {test["name"]: test for test in compared.meta["tests"]}
    for part, first, second in zip(parts, *values, strict=True):
        name = "effect_on_later" if part == "layer" else f"effect_on_later_{part}"
        side = "greater" if part == "layer" else "two-sided"
        assert found[name]["p"] == pytest.approx(stats.ttest_rel(first, second, alternative=side).pvalue)


def test_a_mapping_beside_against_is_one_group():
    """Its keys name members, so they are no names of the two groups."""
    first, second = ([measured({"layer": value + seed}, seed) for seed in range(2)] for value in (1.0, 3.0))
    options = {"names": ["jreg", "llama"]}
    by_name = {"jreg-0": first[0], "jreg-1": first[1]}
    assert compare(by_name, against=second, **options).headline == compare(first, against=second, **options).headline
    labels = [model["label"] for model in compare(by_name, against=second).meta["models"]]
    assert labels == [model["label"] for model in compare(first, against=second).meta["models"]]
    with refused("leave out names"):
        compare(by_name, **options)


def test_losses_by_flops_are_means_over_seeds_with_students_interval():
    jreg, llama = group("tiny-jreg", 0.06, 3.42, {"jump": 0.09}, range(5)), group("tiny-llama", 0.3, 3.41, {}, range(5))
    models = compare(jreg, against=llama).meta["models"]
    for model, runs, flops in zip(models, (jreg, llama), (7.5e14, 6e14), strict=True):
        tables = [run.table[run.table.measure == "validation_loss"].set_index("step")["value"] for run in runs]
        assert len(model["losses_by_flops"]) == 7
        for entry, step in zip(model["losses_by_flops"], range(0, 301, 50), strict=True):
            losses = [table[step] for table in tables]
            reach = stats.t.ppf(0.975, len(losses) - 1) * stats.sem(losses)
            assert entry["flops"] == pytest.approx(flops * step / 300)
            assert entry["mean"] == pytest.approx(np.mean(losses))
            assert (entry["high"] - entry["mean"], entry["mean"] - entry["low"]) == pytest.approx(
                (reach, reach), abs=1e-12
            )


def test_layers_of_a_redundancy_change_share_its_risk_over_seeds():
    """p values of 0.02 at four of twelve layers: each below 0.05, none after Holm's correction."""
    differences = stats.t.ppf(1 - 0.01, 4) * np.ones(12)
    differences[4:] = 0.1
    base = group("tiny-llama", 0.3, 3.41, {}, range(5))
    noise = np.array([-1.0, 1, 0.5, -0.5, 0])
    noise = noise / noise.std(ddof=1) * 5**0.5  # a standard error of 1
    other = group("tiny-other", 0.3, 3.41, {}, range(5))
    for seed, (one, two) in enumerate(zip(base, other, strict=True)):
        table = one.table.copy()
        at = (table.measure == "displacement") & (table.statistic == "mean")
        layers = table.loc[at, "layer"].astype(int).to_numpy()
        table.loc[at, "value"] += 1e-3 * (differences[layers - 1] + noise[seed])
        two.table = table
        two.meta["settings"] = one.meta["settings"]
    found = compare(other, against=base, names=["other", "llama"])
    tests = found.table[found.table.seed.isna() & (found.table.measure == "displacement")]
    assert (tests["p"] < 0.05).sum() == 4
    assert "no measurable difference" in found.headline["redundancy_change"]["sentence"]
