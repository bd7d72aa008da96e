"""Settings of a command as keyword arguments of its Python function."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic.fields import FieldInfo

from fulldepth.core import bars
from fulldepth.settings.layers import Settings, layer, nested, read

Result = TypeVar("Result")
PROGRESS = inspect.Parameter("progress", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="bool | None")
PROGRESS_HELP = (
    "whether a bar shows the progress: None = in a terminal, and as lines in a notebook; True = also as lines in a log "
    "file; False = nowhere."
)


def with_progress(function: Callable[..., Result]) -> Callable[..., Result]:
    """Give a function with a parameter `watcher` the keyword `progress`, which shows a bar where no watcher is given.

    Signature and docstring name `progress` in place of `watcher`.
    """

    @wraps(function)
    def call(*args: Any, progress: bool | None = None, **given: Any) -> Result:
        given_watcher = given.pop("watcher", None)
        with bars.watching(progress) if given_watcher is None else nullcontext(given_watcher) as watcher:
            return function(*args, watcher=watcher, **given)

    signature = inspect.signature(function)
    listed = [parameter for name, parameter in signature.parameters.items() if name != "watcher"]
    call.__signature__ = signature.replace(parameters=[*listed, PROGRESS])  # type: ignore[attr-defined]
    call.__doc__ = _with_entries(function, "watcher", {"progress": PROGRESS_HELP})
    return call


def takes_settings(
    kind: type[Settings], *, positional: Mapping[str, int] | None = None, recipes: str | None = None
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Give a command's function its settings as keyword arguments.

    The function has a keyword `settings`, and receives an instance of `kind` there. Its callers give the fields of
    `kind` by name (a dot in a name opens a mapping, as on the command line), or an instance, or both; settings are
    layered as defaults < recipe < instance < keywords, and checked once. The signature lists them, and so does the
    docstring, in place of its entry `settings`. The function itself has no parameter for a setting, with one exception:
    a parameter `tokenizer` receives a tokenizer object, while a folder or name is the setting. A function with a
    parameter `watcher` also gets `progress`, see `with_progress`. Where a parameter `resume` is true, settings without
    effect are left out with a message instead of refused.

    Args:
        kind: the settings class.
        positional: settings that may also be given by position -> that position in the call, from 0.
        recipes: the command whose recipes the function's parameter `recipe` names; it may also be a mapping or an
            instance.
    """

    def add(function: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(function)
        types = get_type_hints(kind)  # without bounds
        fields = {
            name: inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.get_default(call_default_factory=True),
                annotation=types[name],
            )
            for name, field in kind.model_fields.items()
            if name not in signature.parameters
        }
        listed = [parameter for parameter in signature.parameters.values() if parameter.name != "settings"]
        for name, place in (positional or {}).items():
            listed.insert(place, fields.pop(name).replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD))
        public = signature.replace(parameters=[*listed, *fields.values()])

        @wraps(function)
        def call(*args: Any, settings: Settings | None = None, **given: Any) -> Result:
            named = {name: given.pop(name) for name in [*given] if name in public.parameters}
            arguments = public.bind_partial(*args, **named).arguments
            for name in [*arguments]:
                is_object = name in signature.parameters and not isinstance(arguments[name], str | Path)
                if name in kind.model_fields and not is_object:
                    given[name] = arguments.pop(name)
            for name, field in kind.model_fields.items():  # None stands for the default where it is no value
                if given.get(name, field) is None and NoneType not in get_args(field.annotation):
                    del given[name]
            stated = nested((name, _plain(value)) for name, value in given.items())
            recipe = arguments.get("recipe")
            below = read(recipe, recipes or "") if isinstance(recipe, str | Path) else _stated(recipe)
            # An interrupted run may have begun when settings without effect were not refused.
            left_out: list[str] | None = [] if arguments.get("resume") else None
            checked = layer(kind, below, _stated(settings), stated, left_out=left_out)
            if not isinstance(settings, Settings):  # the command line names what it leaves out itself
                for sentence in left_out or []:
                    arguments["watcher"].say(sentence)
            return function(settings=checked, **arguments)

        call.__signature__ = public  # type: ignore[attr-defined]
        described = {name: _described(field) for name, field in kind.model_fields.items()}
        described = {name: text for name, text in described.items() if name not in signature.parameters}
        call.__doc__ = _with_entries(function, "settings", described)
        return with_progress(call) if "watcher" in signature.parameters else call

    return add


def _with_entries(function: Callable[..., Any], replaced: str, entries: Mapping[str, str]) -> str:
    """The docstring of a function, with the entry of one parameter replaced by those of others (name -> text)."""
    texts = [f"{name}: {' '.join(text.split())}" for name, text in entries.items()]
    layout: dict[str, Any] = {"initial_indent": " " * 4, "subsequent_indent": " " * 8, "break_on_hyphens": False}
    listed = "\n".join(textwrap.fill(text, 120, break_long_words=False, **layout) for text in texts)
    entry = re.compile(rf"^ {{4}}{replaced}:.*(?:\n {{8}}.*)*", re.MULTILINE)
    return entry.sub(lambda _: listed, inspect.cleandoc(function.__doc__ or ""))


def _described(field: FieldInfo) -> str:
    """The description of a setting; of a mapping of settings, its keys."""
    inner: Any = field.annotation
    is_mapping = isinstance(inner, type) and issubclass(inner, Settings)
    return f"mapping with the keys {', '.join(inner.model_fields)}." if is_mapping else field.description or ""


def _stated(settings: Settings | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The given settings as plain values, without defaults."""
    return settings.model_dump(mode="json", exclude_unset=True) if isinstance(settings, Settings) else settings or {}


def _plain(value: Any) -> Any:
    """The value as a recipe would state it; a dtype or device of torch by its name."""
    is_torch = type(value).__module__ == "torch"
    return str(value).removeprefix("torch.") if is_torch else list(value) if isinstance(value, tuple) else value
