"""Layered settings: what overrides what, what is refused, and in which words."""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulldepth.settings import Settings, assignments, layer, names, read
from fulldepth.settings.evaluate import EvaluateSettings
from fulldepth.settings.exit import ExitSettings
from fulldepth.settings.layers import assigned
from fulldepth.settings.search import CurveSettings, SearchSettings
from fulldepth.settings.strict_yaml import as_yaml
from fulldepth.settings.train import TrainSettings
from refusals import refused


class Optimiser(Settings):
    rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)


class Sample(Settings):
    measures: list[str] | None = None
    words: tuple[str, ...] = ()
    seed: int = 0
    limit: int | str = pydantic.Field(default=8, union_mode="left_to_right")
    tokens: Literal["all", "no-first"] = "all"
    folder: Path | None = None
    optimiser: Optimiser = Optimiser()
    stages: tuple[Optimiser, ...] = ()


def test_a_later_source_wins_key_by_key_also_inside_mappings():
    settings = layer(
        Sample,
        {"seed": 1, "optimiser": {"rate": 0.5, "betas": [0.8, 0.9]}},
        {"optimiser": {"rate": 0.25}},
        assignments(["seed=3"]),
    )
    assert settings == Sample(seed=3, optimiser=Optimiser(rate=0.25, betas=(0.8, 0.9)))


def test_given_blocks_drop_how_a_recipe_chooses_blocks():
    """All recipes of `skip`, and two that state everything that `given` makes needless."""
    choosing = {"search": "greedy", "criterion": "kl", "budget": "9s", "pool": 3, "exchanges": 1, "confidence": 0.9}
    aimed = {**choosing, "target_speedup": 1.2, "context": 64, "granularity": "layer", "epochs": 3}
    needless = {*choosing, "blocks", "target_speedup", "context"}
    for recipe in (*(read(name, "skip") for name in names("skip")), {**choosing, "blocks": 5}, aimed):
        kept = {key: value for key, value in recipe.items() if key not in needless}
        expected = SearchSettings(**kept, search="given", given=[3])
        assert layer(SearchSettings, recipe, {"given": [3]}).model_dump() == expected.model_dump()
    assert layer(CurveSettings, {"search": "exact", "blocks": 5}, {"given": [3]}).blocks == 1
    for together in ({"search": "exact", "given": [3]}, {"blocks": 5, "given": [3]}):
        with refused("--given"):
            layer(SearchSettings, {}, together)


def test_another_data_set_drops_what_the_recipe_says_about_its_own():
    recipe = {"data": {"name": "a/b", "config": "c", "split": "train", "validation": "a/b", "validation_share": 0.1}}
    for changes, validation in (({"name": "rows.tsv"}, None), ({"name": "rows.tsv", "validation": "a/b"}, "a/b")):
        data = layer(TrainSettings, recipe, {"data": changes}).data
        assert (data.name, data.config, data.split, data.validation) == ("rows.tsv", None, None, validation)
        assert data.validation_share == 0.1
    assert layer(TrainSettings, {"data": {"tokens": "folder"}}, {"data": {"name": "rows.tsv"}}).data.tokens == "folder"
    assert layer(TrainSettings, {"data": {"name": "a", "tokens": "b"}}, {"data": {"name": "c"}}).data.tokens is None
    unchanged = layer(TrainSettings, recipe, {"data": {"name": "a/b", "split": "test"}}).data
    assert (unchanged.config, unchanged.split, unchanged.validation) == ("c", "test", "a/b")


def test_a_single_value_of_a_list_is_a_list_of_one():
    """Where text alone is also allowed it stays text; what the list may not hold is still refused."""

    class Lists(Settings):
        inner: Sample = Sample()
        numbers: list[Annotated[float, pydantic.Field(gt=0)]] | None = None
        choices: list[Literal["a", "b"]] = pydantic.Field(default=["a"], min_length=1)
        either: str | list[str] = ""

    settings = layer(Lists, {"inner": {"measures": "cka"}, "numbers": 0.5, "choices": "b", "either": "text"})
    assert settings.inner.measures == ["cka"]
    assert (settings.numbers, settings.choices, settings.either) == ([0.5], ["b"], "text")
    assert layer(Lists, {"numbers": "0.5, 1", "choices": "a,b"}) == Lists(numbers=[0.5, 1.0], choices=["a", "b"])
    for wrong in ({"numbers": "0.5,x"}, {"numbers": True}, {"choices": "c"}, {"choices": ""}):
        with refused(next(iter(wrong))):
            layer(Lists, wrong)


def test_a_limit_of_zero_is_a_limit():
    """0 switches off what is counted; of an accuracy it allows no loss at all."""
    settings = layer(ExitSettings, {"target_accuracy_drop": 0, "calibration_share": 0.25})
    assert (settings.target_accuracy_drop, settings.calibration_share) == (0.0, 0.25)
    with refused("max-new-tokens has no effect with --set prompts=0"):
        layer(ExitSettings, {"prompts": 0, "max_new_tokens": 3})


def test_settings_are_frozen_and_their_resolved_copy_loads_again():
    settings = layer(Sample, {"folder": Path("a/b"), "words": ["is", "are"]})
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        settings.seed = 4
    assert layer(Sample, json.loads(settings.model_dump_json())) == settings


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ({"sed": 1}, ["'seed'"]),
        ({"optimiser": {"rat": 1}}, ["'optimiser.rate'"]),
        ({"stages": [{"rat": 1}]}, ["'stages.0.rate'"]),
        ({"seed": "3"}, ["seed"]),
        ({"seed": True}, ["seed"]),
        (
            {"seed": 1.5, "tokens": "al"},
            ["seed", "tokens"],
        ),
        ({"words": ["a", 7]}, ["words.1"]),
        ({"limit": []}, ["limit"]),
        ({"optimiser": 3}, ["optimiser"]),
        ({"seed": object()}, ["Settings hold plain values"]),
    ],
)
def test_what_is_wrong_is_said_one_line_each(source, lines):
    with refused() as caught:
        layer(Sample, source)
    said = str(caught.value).splitlines()
    assert len(said) == len(lines)
    for wanted, line in zip(lines, said, strict=True):
        assert wanted in line


def test_assignments_parse_yaml_and_open_mappings():
    got = assignments(
        ["a.b.c=[1, x]", "a.d=1e-3", "e=", "f=a=b", "g=no", "h='1'", "i=2026-01-01", "j=012", "k=.5", "l=-3"]
    )
    assert got == {
        "a": {"b": {"c": [1, "x"]}, "d": 0.001},
        "e": None,
        "f": "a=b",
        "g": "no",
        "h": "1",
        "i": "2026-01-01",
        "j": "012",
        "k": 0.5,
        "l": -3,
    }


def test_a_number_sign_in_an_assigned_path_does_not_cut_it():
    """In YAML ` #` begins a comment: a run would start from `runs`, or without a checkpoint."""
    paths = ["runs #2/a.txt", "#2 runs/", "[x] #1", "a#b", " # "]
    assert [assignments([f"a={path}"])["a"] for path in paths] == ["runs #2/a.txt", "#2 runs/", "[x] #1", "a#b", "#"]
    assert assignments(["a='x #2'", "b=[x, '#2']"]) == {"a": "x #2", "b": ["x", "#2"]}


numbers = st.integers() | st.floats(allow_nan=False)


@given(st.recursive(numbers | st.booleans() | st.none(), lambda inner: st.lists(inner, max_size=3), max_leaves=6))
def test_assignments_read_every_json_value_back(value):
    text = json.dumps(value).replace("-Infinity", "-.inf").replace("Infinity", ".inf")
    assert assignments([f"a={text}"]) == {"a": value}


@pytest.mark.parametrize("name", names("measure"))
def test_every_shipped_recipe_fits_its_verb(name):
    from fulldepth.measurement import MeasureSettings

    recipe = read(name, "measure")
    assert layer(MeasureSettings, recipe).model_dump(include=set(recipe)) == recipe


def test_a_file_is_read_and_an_empty_one_changes_nothing(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 3\nwords: [no, yes]\n")
    assert read(path, "measure") == {"seed": 3, "words": ["no", "yes"]}
    path.write_text("# nothing\n")
    assert read(str(path), "measure") == {}


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in itertools.pairwise("abcdefghijk")
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- 1\n", "must hold `key: value` lines, got \\[1\\]"),
        ("a: [1\n", "cannot be read: .*line 2"),
        ("a: 1\na: 2\n", "'a' appears twice"),
        ("[a]: 2\n", "a key must be plain text"),
        ("a: !!python/object/apply:os.getcwd []\n", "the tag 'tag:yaml.org,2002:python/object/apply:os.getcwd'"),
        ("trust_remote_code: true\n", "trust_remote_code. A file cannot allow code"),
        ("model: [{trust_remote_code: 'yes'}]\n", "trust_remote_code. A file cannot allow code"),
        (BOMB, "alias"),
        ("a: " + "[" * 100_000, "nested deeper than 32 levels"),
        ("a: " + "{a: " * 300 + "1" + "}" * 300, "nested deeper than 32 levels"),
        ("a: " + "9" * 100_000, "a number of 100,000 digits"),
        ("# " + "x" * (1 << 20), "larger than 1 MiB"),
    ],
)
def test_a_broken_or_hostile_file_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    with refused(message, str(path)) as caught:
        read(path, "measure")
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for name in (tmp_path / "pipe.yaml", tmp_path, Path("/dev/zero"), "a\0b", "x" * 100_000):
        with refused():
            read(name, "measure")


def test_hostile_settings_are_refused_at_once_in_few_characters():
    hostile = ["=3", "a..b=3", "a=[1", ".".join("a" * 10_000) + "=1", "a=" + "[" * 10_000, "a=&x [*x]", "x" * 100_000]
    for argument in hostile:
        with refused():
            assignments([argument])
    for settings in ({"x" * 100_000: 1}, {f"unknown_{i}": i for i in range(1000)}, {"seed": "y" * 100_000}):
        with refused():
            layer(Sample, settings)
    endless = {}
    endless["seed"] = endless
    deep = 1
    for _ in range(100_000):
        deep = {"seed": deep}
    for settings in (endless, deep):
        with refused("plain values"):
            layer(Sample, settings, settings)


def test_an_unknown_recipe_names_the_near_and_the_known(tmp_path):
    with refused(r"Unknown measure recipe 'quik'. Did you mean 'quick'\?"):
        read("quik", "measure")
    with refused(r"no recipe file .*nothing\.yaml"):
        read(tmp_path / "nothing.yaml", "measure")


@pytest.mark.parametrize(
    ("given", "parsed", "written", "of_six"),
    [
        ("all", "all", "all", [1, 2, 3, 4, 5, 6]),
        ("full", "full", "full", [6]),
        ("4, 2", [4, 2], "4,2", [2, 4, 6]),
        ([1, 6], [1, 6], "1,6", [1, 6]),
        (3, [3], "3", [3, 6]),
        (None, None, None, None),
    ],
)
def test_exit_layers_are_parsed_once_and_recorded_as_text(given, parsed, written, of_six):
    settings = layer(EvaluateSettings, {"tasks": ["a"], "exit_layers": given})
    assert settings.exit_layers == parsed
    assert settings.model_dump()["exit_layers"] == settings.model_dump(mode="json")["exit_layers"] == written
    assert layer(EvaluateSettings, settings.model_dump(mode="json")) == settings
    assert settings.exit_layers_of(6) == of_six


@pytest.mark.parametrize("given", ["", "none", "1,,2", "1-3", True, 1.5, [1, "x"], "12345"])
def test_other_exit_layers_are_refused(given):
    with refused("--exit-layers is .* expected all, full, or layers such as 1,6,12"):
        layer(EvaluateSettings, {"tasks": ["a"], "exit_layers": given})
    for beyond in ("0", "3,9"):
        with refused(f"no exit layer {beyond[-1]}: the model has the layers 1 to 6"):
            layer(EvaluateSettings, {"tasks": ["a"], "exit_layers": beyond}).exit_layers_of(6)


AMBIGUOUS = (
    "1e5",
    "1e-3",
    "inf",
    "007",
    "yes",
    "1_0",
    "null",
    "None",
    "~",
    "",
    "1:30",
    "2020-01-01",
    "0x1f",
    ".5",
    "=",
)
AMBIGUOUS += ("#x", "a, b", "[1]", "{a: 1}", "true", "a: b", "- a")


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_texts_that_look_like_other_values_read_back(text, tmp_path):
    values = {
        "text": text,
        "texts": [text, "b"],
        "inside": {"text": text, "large": math.inf},
        "none": None,
        "rate": 1e-5,
    }
    (tmp_path / "settings.yaml").write_text(as_yaml(values))
    assert read(tmp_path / "settings.yaml", "train") == values
    assert assignments(shlex.split(assigned(values))[1::2]) == values
