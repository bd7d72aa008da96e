"""The opening paragraph and the strip of layers, against sentences and numbers written down by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

from evaluation import small_world
from fulldepth.core.thresholds import degrees
from fulldepth.measurement import measure
from fulldepth.reporting.story import Facts, layer_spans, paragraph, profile
from fulldepth.results import tabulate
from fulldepth.skip import search
from refusals import refused
from reporting.synthetic import row

BARE = Facts(tabulate([("cka", "residual", 1, 1, "biased", 1.0, 3, "1")]), 1)
"""Of a model of which nothing is known that a sentence or a strip is about."""
META = {"model": {"name": "org/m", "task": "causal-lm"}, "data": {"name": "my texts.txt", "kind": "text"}}
LAYERS = " --granularity layer --no-fit"
"""Flags of a search of a model whose attention and MLP cannot be left out."""
ERROR = 0.0001
"""Standard error of every number that is not about noise."""


def facts(means, error=ERROR, settled=None, right=None, loss=None, jump_error=0.1):
    """Facts of a model with these mean displacements, shares settled so far, accuracies and losses (layers 0..L)."""
    layers = len(means)
    rows = []

    def add(measure, values, statistic="mean", first=1, name="standard_error", spread=error):
        for layer, value in enumerate(values or [], first):
            rows.append(row(measure, layer, value, statistic, count=9))
            if spread:
                rows.append(row(measure, layer, spread, name, count=9))

    add("displacement", means)
    rates = [100 * sum(np.diff(means).clip(min=0)[at:]) for at in range(layers - 1)]
    add("jump_rate", rates, "value", first=2, spread=error and jump_error)
    add("saturation", settled, "cumulative", name="standard_error_of_cumulative", spread=error and 0.02)
    add("lens_accuracy", right, first=0, spread=error and 0.01)
    add("lens_loss", loss, first=0, spread=error and 0.1)
    return Facts(tabulate(rows), layers)


PREDICTS = {"right": [0.0, 0, 0, 0.1, 0.2, 0.4, 0.45], "loss": [9.0, 9, 8, 7, 6, 5, 4]}


def test_the_paragraph_of_a_model_with_a_jump():
    told = paragraph(facts([0.5, 0.01, 0.015, 0.018, 0.03, 0.15], settled=[0, 0, 0.1, 0.3, 0.6, 1.0], **PREDICTS), META)
    assert told == {
        "sentences": [
            "Displacement is clearly below 0.02 (16 degrees) in 3 of 6 layers: layers 2 to 4.",
            "The last layer’s displacement is 0.1500 ± 0.0001 (46 degrees): 3.0 times the angle of the median layer "
            "(0.018, 15 degrees). Its jump rate is 12.0 ± 0.1 %: large.",
            "70.0 ± 2.0 % of all predictions change in the last two layers.",
        ],
        "next": {
            "why": "find removable blocks:",
            "command": "fulldepth skip search org/m --data 'my texts.txt' --blocks 1 --output plan/",
        },
    }
    placed = {**META, "data": {**META["data"], "path": "far/my texts.txt"}}
    told = paragraph(
        facts([0.5, 0.01, 0.015, 0.018, 0.03, 0.15], settled=[0, 0, 0.1, 0.3, 0.6, 1.0], **PREDICTS), placed
    )
    assert "--data 'far/my texts.txt' --blocks" in told["next"]["command"], "the data are not in this folder"
    assert round(math.degrees(math.acos(1 - 2 * 0.15)) / math.degrees(math.acos(1 - 2 * 0.018)), 1) == 3.0


def test_the_advised_search_loads_the_model_as_the_measurement_did():
    shown = facts([0.5, 0.01, 0.015, 0.018, 0.03, 0.15], settled=[0, 0, 0.1, 0.3, 0.6, 1.0], **PREDICTS)
    model = {**META["model"], "name": "-my  model", "revision": "v1"}
    meta = {**META, "model": model, "settings": {"tokenizer": "tok en", "revision": "main", "chat": False}}
    command = paragraph(shown, meta)["next"]["command"]
    assert (
        "search './-my  model' --revision v1 --tokenizer 'tok en' --data 'my texts.txt' --no-chat --blocks" in command
    )
    hidden = {**meta, "model": {**model, "name": "a\u202eb"}}
    assert "compare" in paragraph(shown, hidden)["next"]["command"], "a page cannot show this name as it is"


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (small_world.model, ""),
        (
            lambda: MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=3, state_size=4, vocab_size=259)),
            LAYERS,
        ),
        (lambda: BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=3, n_head=4, vocab_size=259)), LAYERS),
    ],
)
def test_the_advised_search_is_accepted(make, flags):
    """Where attention and MLP cannot be left out, whole layers are; a model in memory has no place to name."""
    data = [f"the {noun} rises {number} " * 4 for number, noun in enumerate(small_world.NOUNS)]
    options = {"tokenizer": small_world.tokenizer(), "sequence_length": 32, "progress": False}
    model = make().eval()
    described = measure(model, data, measures=["displacement"], **options).meta["model"]
    shown = facts([0.5, 0.01, 0.015, 0.018, 0.03, 0.15], settled=[0, 0, 0.1, 0.3, 0.6, 1.0], **PREDICTS)
    assert "THIS_FOLDER" in paragraph(shown, {**META, "model": described})["next"]["command"]
    command = paragraph(shown, {**META, "model": described | {"name": "org/m"}})["next"]["command"]
    assert command == f"fulldepth skip search org/m --data 'my texts.txt' --blocks 1{flags} --output plan/"
    given = {"granularity": "layer"} if flags else {}
    assert len(search(model, data, blocks=1, fit=False, **given, **options).blocks) == 1
    if flags:
        with refused("granularity layer"):
            search(model, data, blocks=1, fit=False, **options)
        with refused("--no-fit"):
            search(model, data, blocks=1, **given, **options)


def test_angles_of_displacements():
    for angle in (0.0, 3.6, 16.26, 43.3, 90.0, 180.0):
        cosine = math.cos(math.radians(angle))
        assert degrees((1 - cosine) / 2) == pytest.approx(angle, abs=1e-5)
    assert round(degrees(0.02), 1) == 16.3  # not 3.6, which is 0.02 of a half turn


def test_nothing_is_said_that_noise_could_be():
    means = [0.1, 0.019, 0.019, 0.04, 0.04, 0.041]
    sure, unsure, unknown = (paragraph(facts(means, error), META)["sentences"] for error in (0.0001, 0.001, None))
    assert sure[0] == "Displacement is clearly below 0.02 (16 degrees) in 2 of 6 layers: layers 2 and 3."
    assert unsure[0] == "Displacement is clearly below 0.02 (16 degrees) in no layer."
    assert "(23 degrees), above that of the median layer (0.040, 23 degrees)." in sure[1]
    assert "does not differ measurably from that of the median layer" in unsure[1]
    assert not any("times" in text for text in (*sure, *unsure))
    assert unknown == ["Displacement has no standard error, so it is not concluded which layers do little."]


def test_three_clusters_take_student_s_t():
    """The layers are five standard errors below the limit: of three clusters, 3.8 % of such differences are chance."""
    told = facts([0.5, 0.01, 0.01, 0.5], error=0.002)
    few = replace(told, independent=3.0)
    assert paragraph(told, META)["sentences"][0].endswith("in 2 of 4 layers: layers 2 and 3.")
    assert paragraph(few, META)["sentences"][0].endswith("in no layer.")
    clear = replace(facts([0.5, 0.01, 0.01, 0.5], error=0.0002), independent=3.0)
    assert paragraph(clear, META)["sentences"][0].endswith("in 2 of 4 layers: layers 2 and 3.")


def test_idle_layers_are_counted_after_holm():
    """Of 30 layers at 2.2 standard errors below the limit none is clear; each alone would be."""
    assert facts([0.02 - 2.2 * 0.001] * 30, 0.001).idle == []
    assert facts([0.02 - 2.2 * 0.001], 0.001).idle == [1]
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(300):  # layers exactly at the limit: at most one paragraph in twenty names one
        wrong += bool(facts((0.02 + 0.001 * rng.standard_normal(30)).tolist(), 0.001).idle)
    assert wrong <= 0.05 * 300


@pytest.mark.parametrize(("error", "size"), [(0.5, ": large"), (1.5, ""), (7.0, None)])
def test_a_jump_has_a_size_only_beyond_its_error(error, size):
    text = paragraph(facts([0.5, 0.01, 0.015, 0.018, 0.03, 0.15], jump_error=error), META)["sentences"][1]
    expected = "" if size is None else f" Its jump rate is 12.0 ± {error:.1f} %{size}."
    assert text.endswith(f"3.0 times the angle of the median layer (0.018, 15 degrees).{expected}")


def test_an_early_layer_is_named_only_if_it_is_measurably_as_accurate():
    right = [0.0, 0.0, 0.3, 0.42, 0.44, 0.44, 0.44, 0.44, 0.44, 0.44, 0.44]  # 0.95 x 0.44 = 0.418
    told = paragraph(facts([0.1] * 10, right=right), META)["sentences"]
    assert not any("95 %" in text for text in told)  # 0.022 above, with an error of 0.014
    right = [0.0, 0.0, 0.3, 0.42, 0.50, 0.50, 0.48, 0.46, 0.44, 0.44, 0.44]
    told = paragraph(facts([0.1] * 10, right=right), META)["sentences"]
    assert told[-1] == "Layer 4 already has 95 % of the last layer’s accuracy."


@pytest.mark.parametrize(
    "numbers",
    [{"right": [0.0] * 7, "loss": PREDICTS["loss"]}, {"right": PREDICTS["right"], "loss": [9.0] * 7}, {}],
)
def test_a_model_that_is_not_known_to_predict_gets_no_advice(numbers):
    assert paragraph(facts([0.1] * 6, **numbers), META)["next"] is None


def effects(later, divergence, error=0.01, site="layer"):
    """Rows of `layer_effect`: the change at later tokens, the divergence at every token; a twentieth of it at later."""
    rows = []
    for layer, (change, now) in enumerate(zip(later, divergence, strict=True), start=1):
        numbers = {"later_future": change, "divergence_all": now, "divergence_future": now / 20}
        for name, value in numbers.items():
            if value is not None:
                rows.append(row("layer_effect", layer, value, name, site))
                rows.append(row("layer_effect", layer, error, f"standard_error_of_{name}", site))
    return rows


def with_effects(*rows):
    """Facts with displacements of six layers and rows of `layer_effect`."""
    base = facts([0.1] * 6)
    return Facts(pd.concat([base.table, tabulate([*rows])]), 6)


LATER = [0.5, 0.3, 0.11, 0.02, 0.03, None]
NOW = [2.0, 1.0, 0.4, 0.2, 0.3, 1.0]


def test_layers_that_feed_later_tokens_and_layers_that_edit_a_prediction_are_named():
    told = paragraph(with_effects(*effects(LATER, NOW)), META)["sentences"]
    assert told[1] == (
        "Removing one of layers 1 and 2 changes what later layers compute at later tokens (by over 10 %); removing one "
        "of layers 4 and 5 changes mostly the prediction at the token where it is missing."
    )
    feeding = paragraph(with_effects(*effects(LATER[:3], NOW[:3])), META)["sentences"]
    assert feeding[1] == (
        "Removing one of layers 1 and 2 changes what later layers compute at later tokens (by over 10 %)."
    )


@pytest.mark.parametrize(("part", "name"), [("attention", "the attention"), ("mlp", "the MLP")])
def test_parts_of_layers_and_single_layers_are_named(part, name):
    told = paragraph(with_effects(*effects([0.5, None, None, 0.02, 0.03], [2.0, 1, 1, 0.2, 0.3], site=part)), META)
    assert told["sentences"][1] == (
        f"Removing {name} of layer 1 changes what later layers compute at later tokens (by over 10 %); removing {name} "
        "of one of layers 4 and 5 changes mostly the prediction at the token where it is missing."
    )
    strip = profile(with_effects(*effects(LATER, [0.001, 0.01, 0.1, 1.0, 8.0, 0.03], site=part)))
    (effect,) = [entry for entry in strip["rows"] if entry["name"] == "Effect"]
    assert effect["texts"][2] == f"0.1 nats without its {name.removeprefix('the ')}"
    assert effect["hint"] == f"strong = removal of its {name.removeprefix('the ')} changes predictions"


def test_small_displacements_are_no_zeros():
    small = facts([0.2, 0.0006, 0.2, 0.0002])
    (strip,) = profile(small)["rows"]
    assert strip["texts"][1::2] == ["displacement 0.0006 ± 0.0001", "displacement below 0.0005"]
    assert "displacement is below 0.0005 (2 degrees)" in " ".join(paragraph(small, META)["sentences"])


@pytest.mark.parametrize("error", [0.3, math.nan])
def test_no_effect_is_named_within_its_error(error):
    told = paragraph(with_effects(*effects(LATER, NOW, error)), META)["sentences"]
    assert not any("Removing" in text for text in told)
    assert not any("Removing" in text for text in paragraph(facts([0.1] * 6), META)["sentences"])


def test_a_layer_that_changes_later_predictions_as_much_edits_none_alone():
    rows = [entry for entry in effects([0.02], [0.2]) if "divergence_future" not in entry[4]]
    rows += [
        row("layer_effect", 1, value, name, "layer")
        for name, value in (("divergence_future", 0.21), ("standard_error_of_divergence_future", 0.01))
    ]
    assert not any("Removing" in text for text in paragraph(with_effects(*rows), META)["sentences"])


def test_mostly_means_more_than_half():
    rows = effects([0.05], [0.1], 0.0005)
    near = [(*entry[:5], 0.04 if entry[4] == "divergence_future" else entry[5], *entry[6:]) for entry in rows]
    far = [(*entry[:5], 0.095 if entry[4] == "divergence_future" else entry[5], *entry[6:]) for entry in rows]
    assert "Removing layer 1 changes mostly" in " ".join(paragraph(with_effects(*near), META)["sentences"])
    assert "mostly" not in " ".join(paragraph(with_effects(*far), META)["sentences"])


def test_the_strip_shows_the_divergence_without_each_layer():
    strip = profile(
        with_effects(*effects(LATER, [0.001, 0.01, 0.1, 1.0, 8.0, 0.03]), *effects([0.1], [3.0], site="mlp"))
    )
    (effect,) = [entry for entry in strip["rows"] if entry["name"] == "Effect"]
    assert effect["shades"] == [0, 0, 5, 10, 10, 2]  # a logarithmic scale from 0.01 to 1
    assert effect["texts"][2] == "0.1 nats without it"


def test_removal_alone_has_a_strip_and_a_sentence():
    alone = Facts(tabulate(effects(LATER, NOW)), 6)
    assert [entry["name"] for entry in profile(alone)["rows"]] == ["Effect"]
    (sentence,) = paragraph(alone, META)["sentences"]
    assert sentence.startswith("Removing one of layers 1 and 2 ")
    assert paragraph(Facts(tabulate(effects(LATER, NOW, 0.3)), 6), META) is None


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([3], "layer 3"),
        ([3, 4], "layers 3 and 4"),
        ([9, 2, 3, 4, 7], "layers 2 to 4, 7 and 9"),
        ([5, 6, 8, 10], "layers 5, 6, 8 and 10"),
    ],
)
def test_layers_in_words(layers, text):
    assert layer_spans(layers) == text


def test_the_strip_has_a_shade_for_every_number():
    strip = profile(facts([0.5, 0.005, 0.05, 0.0001], settled=[0, 0.5, 0.96, 1]))
    displacement, settled = strip["rows"]
    assert displacement["shades"] == [10, 0, 5, 0]  # a logarithmic scale from 0.005 to 0.5
    assert settled["shades"] == [0, 5, 10, 10]
    assert displacement["texts"][0] == "displacement 0.5000 ± 0.0001"
    assert strip["idle"] == [2, 4]
    assert strip["limit"] == "displacement clearly below 0.02"
    assert profile(BARE) is None


def test_models_without_blocks_to_search_are_compared():
    told = paragraph(facts([0.1, 0.2]), {**META, "model": {"name": "m", "task": "representation"}})
    assert told["next"]["command"].startswith("fulldepth compare ")
    assert paragraph(BARE, META) is None


@pytest.mark.parametrize(("independent", "named"), [(None, "layers 1 to 3"), (3.0, "no layer")])
def test_the_paragraph_takes_students_t_of_the_documents_that_the_results_state(independent, named):
    rows = []
    for layer, mean in enumerate((0.014, 0.014, 0.014, 0.1), start=1):
        rows += [row("displacement", layer, mean), row("displacement", layer, 0.001, "standard_error")]
    meta = {"model": {"name": "m", "num_layers": 4}, "data": {"clusters": 22, "independent": independent}}
    told = paragraph(Facts.of(tabulate(rows), meta, meta["model"]), meta)["sentences"][0]
    assert told.endswith(f"{named}.")


def test_advice_needs_a_loss_that_is_measurably_below_that_of_the_embeddings():
    """0.25 nats are 2.5 errors of one of both losses, and 1.8 of their difference."""
    right = [0.0, 0, 0, 0.1, 0.2, 0.4, 0.45]
    for first, advised in ((4.25, False), (4.35, True)):
        loss = [first] * 6 + [4.0]
        told = paragraph(facts([0.1] * 6, right=right, loss=loss), META)
        assert (told["next"] is not None) is advised
