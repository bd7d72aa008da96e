"""Comparisons: what stands beside what, in numbers worked out another way, and what is said about it."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from pandas.testing import assert_frame_equal
from scipy.interpolate import RegularGridInterpolator

from evaluation import small_world
from fulldepth.exit import sweep
from fulldepth.hf.model_hash import model_hash
from fulldepth.measurement import measure
from fulldepth.results import Results, compare, tabulate
from refusals import refused
from reporting import synthetic
from reporting.synthetic import row, versus


def measurement(layers, rows, name="models/toy", **changes):
    meta = {
        "kind": "measure",
        "complete": True,
        "model": {"name": name, "num_layers": layers, "width": 8},
        "data": {"name": "text.txt", "kind": "text", "hash": "sha256:aa", "sequences": 4, "sequence_length": 16},
        "token_policy": {"name": "all", "sentence": "Every token counts."},
        "headline": {},
        "lens_grid": None,
        "left_out": [],
        "warnings": [],
    }
    return Results(tabulate(rows), {**meta, **changes})


def displacements(values, statistic="mean"):
    return [row("displacement", layer, value, statistic) for layer, value in enumerate(values, start=1)]


def pairs(matrix, measure="cka", statistic="debiased"):
    size = len(matrix)
    return [row(measure, a, matrix[a, b], statistic, other=b) for a in range(size) for b in range(size)]


def differences(found, label="b"):
    return found.table[found.table.model == label].set_index(["layer", "other"])["difference"]


def symmetric(rng, size):
    half = rng.uniform(size=(size, size))
    matrix = (half + half.T) / 2
    np.fill_diagonal(matrix, 1.0)
    return matrix


def test_the_redundancy_change_of_models_by_hand():
    profiles = [0.10, 0.20, 0.40], [0.15, 0.18, 0.10], [0.10, 0.30, 0.40]
    models = [measurement(3, displacements(values)) for values in profiles]
    found = compare(models, names=["plain", "jreg", "z"])
    assert_allclose(differences(found, "jreg"), [0.05, -0.02, -0.30], atol=1e-12)
    assert differences(found, "plain").isna().all()
    change = found.headline["redundancy_change:jreg"]
    assert change["value"] == pytest.approx(-0.02)  # the median: layer 3 alone would make the mean -0.09
    assert change["unit"] == "1"
    assert (found.is_comparison, found.meta["depth"], found.meta["warnings"]) == (True, "layer", [])
    by_name, by_place = (compare(models, names=["x", "y", "z"], baseline=first) for first in ("y", 1))
    assert by_name.meta["baseline"] == "y"
    assert_allclose(differences(by_name, "z"), [-0.05, 0.12, 0.30])
    assert_frame_equal(by_name.table, by_place.table)
    assert [model["baseline"] for model in by_name.meta["models"]] == [False, True, False]


@settings(max_examples=12)
@given(
    deep=st.integers(1, 13),
    shallow=st.integers(1, 13),
    seed=st.integers(0, 100),
)
def test_relative_depth_interpolates_between_the_baselines_layers(deep, shallow, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(size=shallow), rng.uniform(size=deep)
    found = versus(
        measurement(shallow, displacements(a)),
        measurement(deep, displacements(b)),
        depth="relative",
    )
    at = np.arange(1, deep + 1) / deep
    expected = b - np.interp(at, np.arange(1, shallow + 1) / shallow, a)
    assert_allclose(differences(found), expected, atol=1e-12)


@settings(max_examples=12)
@given(deep=st.integers(1, 9), shallow=st.integers(1, 9), seed=st.integers(0, 100))
def test_pairs_of_layers_are_interpolated_bilinearly_and_a_layer_stays_itself(deep, shallow, seed):
    rng = np.random.default_rng(seed)
    a, b = symmetric(rng, shallow + 1), symmetric(rng, deep + 1)
    found = versus(measurement(shallow, pairs(a)), measurement(deep, pairs(b)), depth="relative")
    grid = np.arange(shallow + 1) / shallow
    oracle = RegularGridInterpolator((grid, grid), a)
    for (layer, other), value in differences(found).items():  # a layer stays like itself: 1 - 1
        wanted = 0.0 if layer == other else b[layer, other] - oracle([layer / deep, other / deep]).item()
        assert value == pytest.approx(wanted, abs=1e-10), (layer, other)


def test_pairs_written_once_stand_for_both_orders():
    rng = np.random.default_rng(0)
    a, b = symmetric(rng, 3), symmetric(rng, 3)
    once = [one for one in pairs(a) if one[2] >= one[3]]
    found = versus(measurement(2, once), measurement(2, pairs(b)))
    assert_allclose(differences(found), (b - a).flatten(), atol=1e-12)


def test_what_is_not_interpolated():
    """Jump rates meet from the end; rows without a layer, and of a single layer, directly."""

    def rows(layers, rates, depth, last):
        first = layers - len(rates) + 1
        made = [row("jump_rate", n, rate, "value", unit="%") for n, rate in enumerate(rates, start=first)]
        made.append(row("effective_depth", None, depth, "eps=0.05", unit="layers"))
        made.append(row("displacement", layers, last, site="final_normed"))
        return measurement(layers, made)

    a, b = rows(3, [30.0, 20.0], 3.0, 0.25), rows(5, [9.0, 8.0, 7.0, 6.0], 7.0, 0.75)
    found = versus(a, b)
    assert found.meta["depth"] == "relative"
    assert_allclose(differences(found), [np.nan, np.nan, 7 - 30.0, 6 - 20.0, 4.0, 0.5])


def test_same_layer_on_request_leaves_what_the_baseline_has_not():
    a, b = measurement(2, displacements([0.1, 0.2])), measurement(3, displacements([0.4, 0.4, 0.4]))
    found = versus(a, b, depth="layer")
    assert_allclose(differences(found), [0.3, 0.2, np.nan])


def test_statistics_sites_and_missing_values_do_not_mix():
    a = displacements([0.1, 0.2]) + displacements([0.5, np.nan], "std")
    b = displacements([0.3, 0.3]) + displacements([0.6, 0.6], "std") + displacements([0.9, 0.9], "mean:no-first")
    b.append(row("norm_ratio", 1, 4.0))
    found = versus(measurement(2, a), measurement(2, b))
    assert_allclose(differences(found), [0.2, 0.1, 0.1, np.nan, np.nan, np.nan, np.nan], atol=1e-12)
    assert found.meta["warnings"] == ["a has no norm_ratio; b has."]


def test_folders_in_and_a_folder_out(tmp_path):
    a = measurement(2, displacements([0.1, 0.2]))
    folders = [a.save(tmp_path / where) for where in ("x/run", "y/run", "z/run")]
    found = compare([str(folders[0]), folders[1], folders[2]])
    assert [model["label"] for model in found.meta["models"]] == ["x/run", "y/run", "z/run"]
    assert [model["label"] for model in compare([a, a]).meta["models"]] == ["toy (1)", "toy (2)"]
    again = Results.load(found.save(tmp_path / "out"))
    assert_frame_equal(again.table, found.table)
    assert again.meta == json.loads(json.dumps(found.meta))
    assert set(again.table.columns) == {*a.table.columns, "model", "difference", "difference_error"}
    with refused(r"out is a comparison already"):
        compare([tmp_path / "out", folders[0]])
    with refused(r"The result cannot be compared: it does not state the number of layers \(model.num_layers\)"):
        compare([a, measurement(2, displacements([0.1, 0.2]), model={"name": "toy"})])


def test_a_layer_counts_where_its_difference_is_larger_than_its_noise():
    """Two standard errors of a difference of independent means, sqrt(a^2 + b^2) each."""
    plain, changed = [0.10, 0.20, 0.30, 0.40], [0.13, 0.23, 0.30, 0.30]
    errors = [0.02, 0.001, 0.001, 0.001]
    noise = displacements(errors, "standard_error")
    a, b = (measurement(4, displacements(means) + noise) for means in (plain, changed))
    found = versus(a, b).headline
    assert "larger in b than in a at 1 of 4 layers and smaller at 1" in found["redundancy_change:b"]["sentence"]


def test_headline_numbers_become_differences():
    a, b = (
        measurement(
            4,
            [
                row("jump_rate", 4, zeta, "value", unit="%"),
                row("coherence", None, np.nan, "mean_corrected_of_layers"),
            ],
        )
        for zeta in (12.5, 4.25)
    )
    found = versus(a, b).headline
    assert found["zeta_L:b"]["value"] == -8.25
    for less, verdict in ((1e-8, "; no difference"), (1e-6, "; difference")):  # relative; float32 rounds at 1.2e-7
        other = measurement(4, [row("jump_rate", 4, 12.5 * (1 - less), "value", unit="%")])
        assert verdict in versus(a, other).headline["zeta_L:b"]["sentence"]
    assert "mean_coherence:b" not in found


@pytest.mark.parametrize(("part", "suffix"), [("layer", ""), ("attention", "_attention"), ("mlp", "_mlp")])
def test_effects_of_removal_are_compared_by_part(part, suffix):
    def measured(value, error):
        statistic = "later_future_of_layers"
        names = {statistic: value, f"standard_error_of_{statistic}": error}
        return measurement(4, [row("layer_effect", None, number, name, site=part) for name, number in names.items()])

    entry = versus(measured(0.30, 0.03), measured(0.50, 0.04)).headline[f"effect_on_later{suffix}:b"]
    assert entry["value"] == pytest.approx(0.2)
    assert entry["standard_error"] == pytest.approx(0.05)
    assert "difference +0.2 ± 0.05" in entry["sentence"]


@pytest.mark.parametrize(
    ("clusters", "verdict"),
    [
        ({"clusters": 22, "independent": 22.0}, "unpaired difference +0.2 ± 0.05"),
        ({"clusters": 3}, "no measurable difference (unpaired, at most 0.43)"),
        ({"clusters": 22, "independent": 3.0}, "no measurable difference (unpaired, at most 0.43)"),
    ],
)
def test_few_clusters_measure_by_student_s_t(clusters, verdict):
    """Four standard errors: three clusters take 4.527 of them."""
    data = {"hash": "sha256:1", "name": "texts", **clusters}
    numbers = ({"mean": 0.3, "standard_error": 0.03}, {"mean": 0.5, "standard_error": 0.04})
    first, second = (
        measurement(4, [row("displacement", 4, value, name) for name, value in stated.items()], data=data)
        for stated in numbers
    )
    assert f"; {verdict}." in versus(first, second).headline["last_layer_displacement:b"]["sentence"]


@pytest.mark.parametrize(
    ("changes", "measure", "warned"),
    [
        ({"settings": {"score": "all"}}, "lens_loss", "different tokens of the responses or prompts"),
        ({"settings": {"effect_first": True}}, "layer_effect", "only one of them removes parts at the first token"),
        ({"settings": {"effect_first": True}}, "displacement", ""),
        ({"linear_lens": {"data": {"hash": "sha256:b", "name": "b.txt"}}}, "lens_loss", "b: b.txt, a: a.txt"),
    ],
)
def test_what_was_removed_predicted_or_fitted_on_otherwise_is_said(changes, measure, warned):
    stated = {
        "settings": {"score": "responses", "effect_first": False},
        "linear_lens": {"data": {"hash": "sha256:a", "name": "a.txt"}},
    }
    rows = [row(measure, 1, 0.5, "mean")]
    warnings = versus(measurement(4, rows, **stated), measurement(4, rows, **{**stated, **changes})).meta["warnings"]
    assert any(warned in line for line in warnings) if warned else not warnings


def test_directed_pairs_are_not_swapped():
    """What layer 1 does to layer 2 is no number of layer 2 and layer 1."""
    of_two = [row("layer_effect", 1, 0.5, "mean_all", other=2)]
    of_three = [
        *of_two,
        row("layer_effect", 2, 0.7, "mean_all", other=3),
        row("layer_effect", 2, 0.1, "mean_all", other=1),
    ]
    found = differences(versus(measurement(3, of_two), measurement(3, of_three)))
    assert found[1, 2] == 0.0
    assert np.isnan(found[2, 1])


@settings(max_examples=15)
@given(deep=st.integers(2, 9), shallow=st.integers(2, 9), upward=st.booleans(), seed=st.integers(0, 100))
def test_directed_pairs_at_relative_depth_need_no_diagonal(deep, shallow, upward, seed):
    """A function that is linear in both layers is met exactly; others stay within the range of the baseline."""
    rng = np.random.default_rng(seed)
    offset, slope, other_slope = rng.normal(size=3)
    measure, first = ("layer_effect", 1) if upward else ("retrieval_weight", 0)

    def pairs_of(layers):
        ordered = [(low, high) for low in range(first, layers + 1) for high in range(low + 1, layers + 1)]
        return ordered if upward else [(high, low) for low, high in ordered]

    def measured(layers, value):
        return measurement(layers, [row(measure, a, value(a, b), "mean", other=b) for a, b in pairs_of(layers)])

    def linear(a, b):
        return offset + slope * a + other_slope * b

    found = versus(measured(shallow, linear), measured(deep, lambda a, b: 0.0), depth="relative")
    for pair, difference in differences(found).items():
        low, high = (
            min(max(place * shallow / deep, first + k), shallow - 1 + k) for k, place in enumerate(sorted(pair))
        )
        if high - low < 1:
            low, high = (low + high - 1) / 2, (low + high + 1) / 2
        assert_allclose(-difference, linear(low, high) if upward else linear(high, low), atol=1e-8)
    values = {pair: rng.uniform() for pair in pairs_of(shallow)}
    found = versus(measured(shallow, lambda a, b: values[a, b]), measured(deep, lambda a, b: 0.0), depth="relative")
    assert differences(found).between(-max(values.values()) - 1e-9, -min(values.values()) + 1e-9).all()


def test_equal_numbers_whose_errors_are_zero_state_none():
    """No jump in either model, whatever the documents: no error of another sample is known."""
    rows = [row("jump_rate", 4, 0.0, name, unit="%") for name in ("value", "standard_error")]
    entry = versus(measurement(4, rows), measurement(4, rows)).headline["zeta_L:b"]
    assert entry["standard_error"] is None
    assert "the same for all of the data" in entry["no_standard_error"]
    assert entry["sentence"].endswith("no difference.")


@pytest.mark.parametrize(
    ("part", "changes", "warned"),
    [
        ("data", {"hash": "sha256:bb", "text_hash": "t"}, ""),
        ("model", {"dtype": "bfloat16"}, "other reasons"),
        ("model", {"dtype": None}, ""),
        ("sampling", {"reservoir_tokens": 30}, "other reasons"),
        ("versions", {"fulldepth": "2"}, "other reasons"),
    ],
)
def test_what_makes_a_difference_doubtful_is_said(part, changes, warned):
    sampling = {"reservoir_tokens": 40, "counted_tokens": 64}
    a, b = (
        measurement(2, displacements([0.1, 0.2]), sampling=dict(sampling), versions={"fulldepth": "1"})
        for _ in range(2)
    )
    for one in (a, b):
        one.meta["model"]["dtype"], one.meta["data"]["text_hash"] = "float32", "t"
    b.meta[part] = b.meta[part] | changes
    found = versus(a, b)
    lines = found.meta["warnings"]
    assert len(lines) == bool(warned)
    assert all(warned in line for line in lines)
    assert "redundancy_change:b" in found.headline


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        ("data", {"hash": "sha256:bb"}, "the data differ"),
        ("data", {"text_hash": "u"}, "the data differ"),
        ("data", {"sequence_length": 32}, "the sequence lengths differ"),
        ("token_policy", {"name": "last"}, "the token policies differ"),
    ],
)
def test_what_is_not_comparable_has_a_reason_in_place_of_differences(part, changes, reason, tmp_path):
    a, b, c = (measurement(2, displacements([0.1, 0.2])) for _ in range(3))
    for one in (a, b, c):
        one.meta["data"]["text_hash"] = None if changes == {"hash": "sha256:bb"} else "t"  # None: an earlier version
    b.meta[part] = b.meta[part] | changes
    found = compare({"a": a, "c": c, "b": b}).headline
    assert next(iter(found)) == "comparable:b"
    assert {name for name in found if name.endswith(":b")} == {"comparable:b"}
    assert reason in found["comparable:b"]["sentence"]
    assert "redundancy_change:c" in found
    compared = compare({"a": a, "c": c, "b": b}, output=tmp_path / "out")
    assert_allclose(differences(compared, "c"), [0.0, 0.0])
    assert differences(compared, "b").isna().all()
    assert compared.table.query("model == 'b'")["difference_error"].isna().all()
    assert "b" not in {line.name for line in compared.figures()["difference_displacement"].data}
    for one in (a, b):  # one model on other data: what differs is the data
        one.meta["model"] |= {"hash": "sha256:dd", "config_hash": "sha256:cc"}
    assert ("comparable:b" in compare({"a": a, "b": b}).headline) == (reason != "the data differ")
    for other in ({"hash": "sha256:ee"}, {"hash": None}, {"config_hash": "sha256:ff"}):
        b.meta["model"] |= {"hash": "sha256:dd", "config_hash": "sha256:cc", **other}
        assert "comparable:b" in compare({"a": a, "b": b}).headline, "names and configurations do not make one model"


@pytest.mark.parametrize("command", [partial(measure, measures=["displacement"]), partial(sweep, repeats=0, prompts=0)])
def test_one_model_has_the_same_weights_not_the_same_name(command):
    """Two models made in Python have one class name and one configuration; a copy under another name is one model."""
    options = {"tokenizer": small_world.tokenizer(), "sequence_length": 16, "max_sequences": 8, "progress": False}
    texts = [[f"{noun} {number} {text} " * 6 for number, noun in enumerate(small_world.NOUNS)] for text in ("x", "y")]
    first, other, again = (small_world.model(seed) for seed in (0, 1, 0))
    again.name_or_path = "again"
    base = command(first, texts[0], **options)
    assert base.meta["model"]["hash"] == model_hash(first)
    assert "comparable:b" in compare({"a": base, "b": command(other, texts[1], **options)}).headline
    assert "comparable:b" not in compare({"a": base, "b": command(again, texts[1], **options)}).headline
    assert "comparable:b" not in compare({"a": base, "b": command(other, texts[0], **options)}).headline


ONE = measurement(1, displacements([0.1]))


@pytest.mark.parametrize(
    ("results", "changes", "name"),
    [
        ([ONE, ONE], {"names": ["a"]}, "1 names"),
        ([ONE, ONE], {"names": ["a", "a"]}, "a, a"),
        ([ONE, ONE], {"names": ["plain", "tuned"], "baseline": "plein"}, "'plain'"),
        ([ONE, ONE], {"baseline": 2}, "2"),
        ([ONE, ONE], {"depth": "layers"}, "depth"),
        ([ONE], {}, "two"),
        ("folder", {}, "two"),
        ([ONE, "absent"], {}, "absent"),
        ([ONE, Results(ONE.table, {**ONE.meta, "kind": "train"})], {}, "'train'"),
        ([synthetic.two_towers(), ONE], {}, "2 stacks of layers (image, text). Measure"),
        ([ONE, synthetic.two_towers()], {}, "--set tower=text"),
    ],
)
def test_bad_inputs_are_refused(results, changes, name):
    with refused(None, name):
        compare(results, **changes)
