"""Settings as keyword arguments of a command's function."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import fulldepth
from fulldepth.core.progress import Watcher
from fulldepth.exit import export_layers, generate_texts, sweep
from fulldepth.settings import Settings
from fulldepth.settings.keywords import takes_settings
from fulldepth.skip import bench, curve, search
from refusals import refused


class Inner(Settings):
    rate: float = 0.5


class Sample(Settings):
    count: int = 3
    """Number of things."""
    names: list[str] | None = None
    most: int | None = 9
    dtype: str = "auto"
    tokenizer: str | None = None
    inner: Inner = Inner()


@takes_settings(Sample, recipes="measure")
def verb(
    model: str,
    names: Any = None,
    *,
    settings: Sample,
    watcher: Watcher,
    recipe: Any = None,
    tokenizer: Any = None,
) -> tuple[str, Sample, Any]:
    """Do something."""
    assert isinstance(watcher, Watcher)
    return model, settings, tokenizer


def test_keywords_are_layered_over_an_instance_and_a_recipe():
    assert verb("m")[1] == Sample()
    settings = verb("m", "a, b", settings=Sample(count=7), dtype=torch.bfloat16, **{"inner.rate": 0.25})[1]
    assert settings == Sample(count=7, names=["a", "b"], dtype="bfloat16", inner=Inner(rate=0.25))
    below = {"count": 1, "inner": {"rate": 2.0}}
    assert verb("m", recipe=below, count=2)[1] == Sample(count=2, inner=Inner(rate=2.0))
    assert verb("m", recipe=Sample(count=4), settings=Sample(count=5))[1].count == 5
    assert verb("m", count=None)[1].count == 3  # None is no count
    assert verb("m", most=None)[1].most is None


def test_an_object_is_an_argument_and_its_name_a_setting(tmp_path):
    tokenizer = object()
    _, settings, given = verb("m", tokenizer=tokenizer)
    assert given is tokenizer
    assert settings.tokenizer is None
    _, settings, given = verb("m", tokenizer=tmp_path)
    assert given is None
    assert settings.tokenizer == str(tmp_path)


def test_wrong_keywords_are_refused_by_name():
    for wrong, name in (({"cuont": 1}, "count"), ({"count": "x"}, "count"), ({"inner": {"rat": 1}}, "inner.rate")):
        with refused(name):
            verb("m", **wrong)


COMMANDS = [fulldepth.compare, fulldepth.evaluate, fulldepth.train, sweep, export_layers, generate_texts, search]


@pytest.mark.parametrize("function", [*COMMANDS, curve, bench, verb], ids=lambda f: f.__name__)
def test_signature_and_docstring_list_every_setting(function):
    parameters = inspect.signature(function).parameters
    assert "settings" not in parameters
    assert "watcher" not in parameters
    assert function is fulldepth.compare or "progress" in parameters
    shown = [name for name in parameters if f"\n    {name}:" in function.__doc__]
    assert set(parameters) - {"progress", "recipe"} <= {*shown, "model", "names", "tokenizer"}


def test_a_signature_shows_names_types_and_defaults():
    parameter = inspect.signature(verb).parameters["count"]
    assert (parameter.kind, parameter.default, parameter.annotation) == (parameter.KEYWORD_ONLY, 3, int)
    assert inspect.signature(search).parameters["max_sequences"].annotation == int | None, "without pydantic's bounds"
    assert "    count: Number of things." in verb.__doc__
