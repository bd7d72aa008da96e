"""Layered settings: defaults < recipe (YAML) < `key=value`. Unknown keys and wrong types are errors, all at once."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

import pydantic
import yaml

from fulldepth.core.errors import FulldepthError, brief, enumerated, one_line, unknown
from fulldepth.core.files import read_bytes, reading
from fulldepth.core.shell import arguments as listed
from fulldepth.core.shell import word
from fulldepth.settings.strict_yaml import MOST_DEPTH, as_flow, parse, parse_value

_INSTALLED = Path(__file__).parents[1] / "recipes_data"
_CHECKOUT = Path(__file__).parents[3] / "recipes"
RECIPES = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
"""One folder of YAML files for each command. A wheel contains a copy; an editable install reads the checkout's."""

CONSENT = "trust_remote_code"
"""The setting that a recipe may not hold: who runs the command allows foreign code, not a file."""
MOST_BYTES = 1 << 20
"""Largest recipe file."""
MOST_PROBLEMS = 100
"""Invalid settings that one error message lists at most."""


@dataclass(frozen=True)
class Applies:
    """Settings that have an effect only beside certain values of another setting, or of one of several."""

    names: tuple[str, ...]
    """These settings; `data.column` for one inside `data`."""
    beside: Mapping[str, tuple[str, ...]]
    """The other setting, or a parameter of the command's function -> its values; `SET` = a value that is set."""


SET = ()
"""In `Applies`: any value but None, False, nothing and the whole number 0, each of which switches off. A limit of 0.0
is a value."""


def _is_set(value: Any) -> bool:
    """Return True if a setting is switched on, see `SET`."""
    return isinstance(value, float) or bool(value)


class NoEffectError(FulldepthError):
    """The error for a setting that has no effect beside the others."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name
        """The setting; `data.column` for one inside `data`."""


class Settings(pydantic.BaseModel):
    """Base of every command's settings: frozen; unknown keys, implicit conversions and settings without effect are
    errors.
    """

    # Dumps keep infinities; pydantic's default replaces them by None.
    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )

    options: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Panel of the command's help -> settings that have their own option there."""
    applies: ClassVar[tuple[Applies, ...]] = ()
    """Which settings have no effect without others."""
    described_by: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Setting -> others that describe its value; a source that changes it drops what earlier sources say of those."""
    number_is: ClassVar[str | None] = None
    """Option that a number states in place of a mapping of options, in settings that are no fields: with `weight`,
    `jump: 0.5` is `jump: {weight: 0.5}`."""

    @classmethod
    def without_outdated(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
        """Earlier values, without those that describe a value which a later source changes."""
        changed = [key for key in cls.described_by if key in above and key in below and above[key] != below[key]]
        outdated = {name for key in changed for name in cls.described_by[key]}
        return {key: value for key, value in below.items() if key not in outdated}

    @pydantic.model_validator(mode="after")
    def _all_have_an_effect(self) -> Self:
        self.check_effect()
        return self

    def check_effect(self, **parameters: Any) -> None:
        """Refuse a setting that differs from its default and has no effect beside the others (see `applies`).

        Args:
            **parameters: those of the command's function that `applies` names. Without them its entries about
                parameters are not checked.

        Raises:
            NoEffectError: which says why it has no effect, and what it applies to.
        """
        inside = {f"{key}.{name}": value for key, part in self if isinstance(part, Settings) for name, value in part}
        values = dict(self) | inside | parameters
        for entry in self.applies:
            if any(
                other not in values or (values[other] in wanted if wanted else _is_set(values[other]))
                for other, wanted in entry.beside.items()
            ):
                continue
            for name in entry.names:
                if values[name] != self._default(name):
                    raise NoEffectError(self._no_effect(name, entry, values), name)

    @classmethod
    def _default(cls, name: str) -> Any:
        """Default of a setting, also of one inside another (`data.column`)."""
        outer, _, inner = name.partition(".")
        if inner:
            return _inner_class(cls, outer)._default(inner)  # type: ignore[union-attr]
        return cls.model_fields[name].get_default(call_default_factory=True)

    @classmethod
    def _no_effect(cls, name: str, entry: Applies, values: Mapping[str, Any]) -> str:
        """`--budget has no effect with --search exact; it applies to greedy.`"""
        absent = []
        present = []
        for other in entry.beside:
            field = cls.model_fields.get(other)
            is_absent = values[other] in (None, []) or (
                values[other] is False and (field is None or field.default is False)
            )
            if is_absent:
                absent.append(cls.option(other))
            else:
                present.append(cls.option(other, values[other]))
        reasons = [f"with {' and '.join(present)}"] if present else []
        reasons += [f"without {' or '.join(absent)}"] if absent else []
        wanted = [value for values in entry.beside.values() for value in values]
        advice = f"; it applies to {enumerated(wanted)}" if wanted else ""
        return f"{cls.option(name)} has no effect {' and '.join(reasons)}{advice}."

    @classmethod
    def option(cls, name: str, value: Any = None) -> str:
        """A setting, with a value if one is given, as the command line has it: `--search exact`, `--no-fit`."""
        dashed = name.replace("_", "-")
        has_option = name not in cls.model_fields or any(name in names for names in cls.options.values())
        if not has_option:
            return f"--set {name}" if value is None else f"--set {name}={json.dumps(value)}"
        if value is False:
            return f"--no-{dashed}"
        return f"--{dashed}" if value is None else f"--{dashed} {value}"


S = TypeVar("S", bound=pydantic.BaseModel)


def recorded(settings: Settings) -> dict[str, Any]:
    """Settings for a JSON document, which has no infinity: there it is the text `.inf`, as in a recipe."""

    def written(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: written(inner) for key, inner in value.items()}
        return ".inf" if value == math.inf else value

    return written(settings.model_dump(mode="json"))


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value of nested settings."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= flattened(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def layer(
    model: type[S], *sources: Mapping[str, Any], lists_of_one: bool = True, left_out: list[str] | None = None
) -> S:
    """Settings from several sources; a later source overrides an earlier one, key by key, also inside mappings.

    A source that changes a setting drops what earlier sources say about its former value (`without_outdated`). Values
    are validated strictly, as JSON types: 1 is a number, `true` and "1" are not.

    Args:
        model: the settings class, which defines the defaults.
        sources: nested mappings of plain values (`read`, `assignments`, or keyword arguments).
        lists_of_one: read comma-separated text, or a single value, as a list where one is expected; False for a file
            that a program wrote.
        left_out: settings without effect are left out, and receives a sentence on each; None = they are refused.

    Returns:
        An instance of the settings class.

    Raises:
        FulldepthError: one line for each unknown key, missing value and wrong type.
    """
    merged: dict[str, Any] = {}
    try:
        for source in sources:
            merged = merge(merged, source, model)
        merged = _with_lists(model, merged) if lists_of_one else merged
        document = json.dumps(merged, default=os.fspath)
    except (TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = one_line(error)
        raise FulldepthError(f"Settings hold plain values (text, numbers, lists, mappings): {reason}.") from error
    try:
        return model.model_validate_json(document, strict=True)
    except pydantic.ValidationError as error:
        idle = [stated for stated in _stated_errors(error) if isinstance(stated, NoEffectError)]
        if left_out is None or len(idle) < error.error_count():
            raise FulldepthError(brief("\n".join(_complaints(model, merged, error)))) from error
    left_out += [f"{stated} It is left out." for stated in idle]
    for stated in idle:
        merged = _without(merged, stated.name)
    return layer(model, merged, lists_of_one=lists_of_one, left_out=left_out)


def _stated_errors(error: pydantic.ValidationError) -> list[Any]:
    """The errors that validators raised, one for each problem; None for a problem that pydantic found."""
    return [problem.get("ctx", {}).get("error") for problem in error.errors(include_url=False)]


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Nested values without the one that a dotted name states."""
    key, _, inner = name.partition(".")
    if inner:
        return {**values, key: _without(values[key], inner)}
    return {other: value for other, value in values.items() if other != key}


def read(recipe: str | Path, verb: str) -> dict[str, Any]:
    """Read the settings in a YAML file or in a recipe of the package.

    Args:
        recipe: path of a file, or a name such as `quick` (see `names`).
        verb: the command whose recipes are looked up by name.

    Returns:
        The settings that the recipe states, without defaults.

    Raises:
        FulldepthError: if there is no such file or name, the file is not a small YAML mapping without aliases and tags,
            or it allows code of a checkpoint to run.
    """
    path = Path(recipe)
    with reading(one_line(path)):  # the operating system may refuse the name itself
        is_file = path.is_file()
    if not is_file:
        if path.suffix in (".yaml", ".yml") or len(path.parts) != 1:
            raise FulldepthError(
                f"There is no recipe file {one_line(path)}. Recipes by name: {', '.join(names(verb))}."
            )
        if path.name not in names(verb):
            raise unknown(f"{verb} recipe", path.name, names(verb))
        path = RECIPES / verb / f"{path.name}.yaml"
    content = read_bytes(path, most=MOST_BYTES)
    try:
        settings = parse(content.decode("utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise FulldepthError(f"The recipe {path} cannot be read: {one_line(error)}") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise FulldepthError(f"The recipe {path} must hold `key: value` lines, got {_show(settings)}.")
    if _allows_code(settings):
        raise FulldepthError(
            f"The recipe {path} sets {CONSENT}. A file cannot allow code of a checkpoint to run: leave it out, and "
            "give --trust-remote-code on the command line, or trust_remote_code=True in Python."
        )
    return settings


def _allows_code(value: Any) -> bool:
    """Return True if settings that were read from a file allow code of a checkpoint, at any depth."""
    if isinstance(value, dict):
        return any((key == CONSENT and inner is not False) or _allows_code(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_allows_code, value))


def names(verb: str) -> list[str]:
    """Names of a command's recipes in the package, sorted.

    Args:
        verb: the command, such as `measure`.

    Returns:
        The names without their ending.
    """
    return sorted(path.stem for path in (RECIPES / verb).glob("*.yaml"))


def assignments(arguments: Iterable[str]) -> dict[str, Any]:
    """Nested settings from `key=value` arguments: a dot in the key opens a mapping, the value is YAML.

    `["seed=1", "a.b=[x, y]"]` gives `{"seed": 1, "a": {"b": ["x", "y"]}}`. A value in which YAML sees a comment
    is text.

    Args:
        arguments: texts of the form `key=value`; a later one overrides an earlier one.

    Returns:
        The settings, in mappings for keys with dots.

    Raises:
        FulldepthError: if an argument is not `key=value`.
    """
    values: list[tuple[str, Any]] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise FulldepthError(f"Expected key=value (or key.inner=value), got {one_line(argument, 200)!r}.")
        if len(path) > MOST_DEPTH or len(text) > MOST_BYTES:
            raise FulldepthError(
                f"The setting {one_line(argument, 200)!r} has {len(path):,} keys and {len(text):,} characters. "
                f"Expected at most {MOST_DEPTH} and {MOST_BYTES:,}."
            )
        try:
            values.append((key.strip(), parse_value(text)))
        except (ValueError, yaml.YAMLError) as error:
            stated = one_line(argument, 200)
            raise FulldepthError(f"The value in {stated!r} is not valid YAML: {one_line(error)}") from error
    return nested(values)


def assigned(settings: Mapping[str, Any]) -> str:
    """Settings as options of the command line, each after a space: ` --set seed=1 --set 'contexts=[8,16]'`.

    `assignments` reads them back: a value that is not read as itself, such as the text `1e-3`, is quoted.

    Args:
        settings: name of each setting -> its value; a dot in a name opens a mapping.

    Returns:
        The options; an empty text without settings.
    """
    options = []
    for key, value in settings.items():
        text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
        try:
            reads_back = parse(text) == value
        except (ValueError, yaml.YAMLError):
            reads_back = False
        if not reads_back:
            text = as_flow(value)
        options.append(f" --set {quote(f'{key}={text}')}")
    return "".join(options)


def command_line(verb: str, arguments: Iterable[Any], options: Mapping[str, Any], settings: Settings) -> str:
    """The command that calls a verb with these arguments, its options that are set, and what differs from defaults.

    Args:
        verb: the command, such as `skip bench`.
        arguments: its arguments, in order.
        options: name of each option without the dashes -> its value; None = the option is left out.
        settings: the settings; those that equal their defaults are left out.

    Returns:
        A line for a shell, with quotes where they are needed.
    """
    named = "".join(f" --{key} {word(value)}" for key, value in options.items() if value is not None)
    changed = settings.model_dump(mode="json", exclude_defaults=True)
    return f"fulldepth {verb} {listed(arguments)}{named}{assigned(changed)}"


def nested(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Nested settings from pairs of key and value; a dot in a key opens a mapping.

    Raises:
        FulldepthError: if a key has both a value and keys inside it, of which one would be lost.
    """
    settings: dict[str, Any] = {}
    with_inner: dict[str, str] = {}  # key -> a longer one that opens it
    values = [*values]
    for key, _ in values:
        parts = key.split(".")
        with_inner |= {".".join(parts[:count]): key for count in range(1, len(parts))}
    for key, value in values:
        if key in with_inner and not isinstance(value, Mapping):
            raise FulldepthError(
                f"{one_line(key, 100)}={one_line(value, 60)} and {one_line(with_inner[key], 100)} exclude each other. "
                f"Give keys inside {one_line(key, 100)} alone."
            )
        for part in reversed(key.split(".")):
            value = {part: value}
        settings = merge(settings, value)
    return settings


def merge(
    below: Mapping[str, Any], above: Mapping[str, Any], model: type[pydantic.BaseModel] | None = None
) -> dict[str, Any]:
    """Merge two nested mappings; values of `above` override those of `below`.

    Args:
        below: earlier values.
        above: later values.
        model: the settings class, which drops earlier values that a later one makes outdated.

    Returns:
        A new mapping; the given ones do not change.
    """
    merged = dict(model.without_outdated(below, above) if model and issubclass(model, Settings) else below)
    for key, value in above.items():
        inner = merged.get(key)
        if isinstance(inner, Mapping) != isinstance(value, Mapping):
            inner, value = (_options(given, key, model) for given in (inner, value))
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(inner, value, _inner_class(model, key))
        else:
            merged[key] = value
    return merged


def _options(value: Any, key: str, model: type[pydantic.BaseModel] | None) -> Any:
    """A number as the option that it states, where the settings class has such an option; else the value itself."""
    option = getattr(model, "number_is", None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if option is None or not is_number or (model is not None and key in model.model_fields):
        return value
    return {option: value}


def _with_lists(model: type[pydantic.BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with comma-separated text, or a single number, where a list is expected as a list."""
    listed = {}
    for key, value in values.items():
        inner = _inner_class(model, key)
        field = model.model_fields.get(key)
        if inner is not None and isinstance(value, Mapping):
            value = _with_lists(inner, value)
        elif field is not None and type(value) in (str, int, float):
            expected = kinds(field.annotation)
            if list in expected and type(value) not in expected:
                items = [part.strip() for part in str(value).split(",") if part.strip()]
                lists = (part for part in members(field.annotation) if get_origin(part) is list)
                of_text = any(str in kinds(get_args(part)[0]) for part in lists)
                value = items if of_text else [parse(item) for item in items]
        listed[key] = value
    return listed


def members(annotation: Any) -> list[Any]:
    """The annotation, or the members of a union, without bounds."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [part for member in get_args(annotation) for part in members(member)]
    return [annotation]


def kinds(annotation: Any) -> set[Any]:
    """The plain types of an annotation, without None, bounds and choices; `list` for a list of anything."""
    origins = [get_origin(part) or part for part in members(annotation)]
    return {str if origin is Literal else origin for origin in origins} - {NoneType}


def _inner_class(model: type[pydantic.BaseModel] | None, key: str) -> type[pydantic.BaseModel] | None:
    """The settings class in a field's annotation, such as `Inner` in `list[Inner] | None`; None if it has none."""
    field = None if model is None else model.model_fields.get(key)
    return None if field is None else next(_classes(field.annotation), None)


def _complaints(model: type[pydantic.BaseModel], given: dict[str, Any], error: pydantic.ValidationError) -> list[str]:
    """One line for each invalid setting."""
    expected: dict[str, list[str]] = {}
    given_values: dict[str, Any] = {}
    lines = []
    for problem in error.errors(include_url=False)[:MOST_PROBLEMS]:
        keys, value = _locate(given, problem["loc"])
        if problem["type"] == "extra_forbidden":
            inner: type[pydantic.BaseModel] = model
            for key in keys[:-1]:  # an index or key of a container of settings has no class
                inner = _inner_class(inner, key) or inner
            known = [".".join([*keys[:-1], name]) for name in inner.model_fields]
            lines.append(str(unknown("setting", ".".join(keys), known)))
        elif isinstance(stated := problem.get("ctx", {}).get("error"), FulldepthError):
            lines.append(str(stated))
        elif problem["type"] == "missing":
            lines.append(f"{'.'.join([*keys, str(problem['loc'][-1])])}: a value is required.")
        else:
            given_values[".".join(keys)] = value
            message = re.sub("^(Input should be|Value error,|List should have) ", "", problem["msg"])
            expected.setdefault(".".join(keys), []).append(message)
    return [
        *lines,
        *(
            f"{one_line(name, 200)}: got {_show(given_values[name])}, expected {' or '.join(dict.fromkeys(wanted))}."
            for name, wanted in expected.items()
        ),
    ]


def _locate(given: Any, location: tuple[int | str, ...]) -> tuple[list[str], Any]:
    """The longest prefix of pydantic's location that exists in `given` (the rest names members of unions)."""
    keys: list[str] = []
    for part in location:
        try:
            given = given[part]
        except (KeyError, IndexError, TypeError):
            break
        keys.append(str(part))
    return keys, given


def _classes(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    """Settings classes in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _classes(argument)


def _show(value: Any) -> str:
    text = one_line(json.dumps(value, default=os.fspath, ensure_ascii=False), 1000)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
