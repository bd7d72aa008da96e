"""Settings as keyword arguments of a command's function."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest
import torch
from pydantic import TypeAdapter

import fulldepth
from fulldepth.core.progress import Watcher
from fulldepth.exit import export_layers, generate_texts, sweep
from fulldepth.settings import Settings
from fulldepth.settings.keywords import takes_settings
from fulldepth.skip import bench, curve, export, generate_responses, search
from fulldepth.skip.heal import heal
from fulldepth.skip.least_squares import refit
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


@takes_settings(Sample, positional={"names": 1}, recipes="measure")
def verb(
    model: str,
    output: str | None = None,
    *,
    settings: Sample,
    watcher: Watcher,
    recipe: Any = None,
    tokenizer: Any = None,
) -> tuple[str, Sample, Any]:
    """Do something.

    Args:
        model: a name.
        output: a folder.
        settings: fields of `Sample`.
        watcher: receives messages
            and progress.
        recipe: a mapping.
        tokenizer: an object or a name.
    """
    assert isinstance(watcher, Watcher)
    return model, settings, tokenizer


def test_keywords_are_layered_over_an_instance_and_a_recipe():
    assert verb("m")[1] == Sample()
    settings = verb("m", "a, b", settings=Sample(count=7), dtype=torch.bfloat16, **{"inner.rate": 0.25})[1]
    assert settings == Sample(count=7, names=["a", "b"], dtype="bfloat16", inner=Inner(rate=0.25))
    below = {"count": 1, "inner": {"rate": 2.0}}
    assert verb("m", recipe=below, count=2)[1] == Sample(count=2, inner=Inner(rate=2.0))
    assert verb("m", recipe=Sample(count=4), settings=Sample(count=5))[1].count == 5
    assert verb("m", recipe=below, settings=Sample(count=5, most=4), count=7)[1].count == 7
    assert verb("m", count=None)[1].count == 3  # None is no count
    assert verb("m", most=None)[1].most is None


def test_a_setting_is_given_by_position_and_reaches_the_function_as_a_field_only():
    assert verb("m", "a", "out/", count=2)[1] == verb("m", output="out/", names=["a"], count=2)[1]
    with pytest.raises(TypeError, match="multiple values for argument 'names'"):
        verb("m", "a", names="b")
    with pytest.raises(TypeError, match="too many positional"):
        verb("m", "a", "out/", 3)
    for function in COMMANDS:
        own = inspect.signature(inspect.unwrap(function)).parameters
        kind = get_type_hints(inspect.unwrap(function))["settings"]
        assert set(own) & set(kind.model_fields) <= {"tokenizer"}, function
    assert [*inspect.signature(search).parameters][:3] == ["model", "data", "blocks"]
    assert [*inspect.signature(fulldepth.evaluate).parameters][:3] == ["model", "tasks", "output"]


def test_an_object_is_an_argument_and_its_name_a_setting(tmp_path):
    tokenizer = object()
    _, settings, given = verb("m", tokenizer=tokenizer)
    assert given is tokenizer
    assert settings.tokenizer is None
    _, settings, given = verb("m", tokenizer=tmp_path)
    assert given is None
    assert settings.tokenizer == str(tmp_path)


def test_what_settings_apply_to_are_settings_or_parameters_with_such_values():
    tables = 0
    for function in COMMANDS:
        kind = get_type_hints(inspect.unwrap(function))["settings"]
        parameters = {*inspect.signature(inspect.unwrap(function)).parameters, "generate_responses"}
        for entry in kind.applies:
            tables += 1
            for path in entry.names:
                *outer, last = path.split(".")
                owner = kind.model_fields[outer[0]].annotation if outer else kind
                assert last in owner.model_fields, path
            for name, values in entry.beside.items():
                *outer, last = name.split(".")
                owner = kind.model_fields[outer[0]].annotation if outer else kind
                field = owner.model_fields.get(last)
                assert field is not None or name in parameters, f"{kind}: {name}"
                if field is not None and values:
                    TypeAdapter(list[field.annotation]).validate_python(list(values))
    assert tables > 10


def test_wrong_keywords_are_refused_by_name():
    for wrong, name in (({"cuont": 1}, "count"), ({"count": "x"}, "count"), ({"inner": {"rat": 1}}, "inner.rate")):
        with refused(name):
            verb("m", **wrong)


COMMANDS = [fulldepth.compare, fulldepth.evaluate, fulldepth.train, fulldepth.measure, fulldepth.lens]
COMMANDS += [sweep, export_layers, generate_texts, generate_responses, search, curve, bench, export, heal, refit]


@pytest.mark.parametrize("function", [*COMMANDS, verb], ids=lambda f: f.__name__)
def test_signature_and_docstring_list_every_setting(function):
    parameters = inspect.signature(function).parameters
    assert "settings" not in parameters
    assert "watcher" not in parameters
    assert function in (fulldepth.compare, export) or "progress" in parameters
    assert [name for name in parameters if f"\n    {name}:" not in function.__doc__] == []
    assert not [name for name in ("settings", "watcher") if f"\n    {name}:" in function.__doc__]


def test_a_signature_shows_names_types_and_defaults():
    parameter = inspect.signature(verb).parameters["count"]
    assert (parameter.kind, parameter.default, parameter.annotation) == (parameter.KEYWORD_ONLY, 3, int)
    assert inspect.signature(search).parameters["max_sequences"].annotation == int | None, "without pydantic's bounds"
    assert "    count: Number of things." in verb.__doc__
    assert "    inner: mapping with the keys rate.\n    progress: whether a bar shows" in verb.__doc__
    assert "file; False = nowhere.\n    recipe: a mapping." in verb.__doc__, "no rest of an entry of two lines"
