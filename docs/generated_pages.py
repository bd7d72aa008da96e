"""Pages made from other files: a MkDocs hook.

Every result folder below `docs/gallery/` becomes `gallery/NAME.html`; the program's commands and settings become
`commands.md` and `settings.md`; the public names become the pages below `api/`; `CHANGELOG.md` and `CONTRIBUTING.md`
become pages, with links that hold below `docs/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.structure.files import File, Files
from pydantic_core import PydanticUndefined

from fulldepth.cli import app
from fulldepth.metrics import Measure
from fulldepth.reporting import render
from fulldepth.results import Results
from fulldepth.settings import Settings
from fulldepth.settings.bench import BenchSettings
from fulldepth.settings.compare import CompareSettings
from fulldepth.settings.evaluate import EvaluateSettings
from fulldepth.settings.exit import ExitSettings, LayersSettings
from fulldepth.settings.generate import GenerateSettings
from fulldepth.settings.heal import HealSettings
from fulldepth.settings.measure import LensSettings, MeasureSettings
from fulldepth.settings.search import CurveSettings, ExportSettings, SearchSettings
from fulldepth.settings.train import TrainSettings

DOCS = Path(__file__).parent
GALLERY = DOCS / "gallery"
SETTINGS: dict[str, type[Settings]] = {
    "measure": MeasureSettings,
    "lens": LensSettings,
    "train": TrainSettings,
    "skip search": SearchSettings,
    "skip heal": HealSettings,
    "skip apply": ExportSettings,
    "skip curve": CurveSettings,
    "skip bench": BenchSettings,
    "exit": ExitSettings,
    "exit export": LayersSettings,
    "generate": GenerateSettings,
    "evaluate": EvaluateSettings,
    "compare": CompareSettings,
}
"""Command -> the class that declares its settings."""
ROOMS = ("architectures", "settings", "metrics", "hf", "execution", "data", "losses", "results", "measurement")
ROOMS += ("training", "skip", "exit", "evaluation")
"""Packages with a page of their public names, lower ones first; a name is shown in the first that exports it."""
CHOSEN = {
    "hf": ("Anatomy", "Family", "Head", "load_checkpoint", "truncated"),
    "execution": ("Activations", "Verified", "capture", "find_anatomy", "read_layers", "verify"),
    "results": ("Finding", "Results", "compare"),
}
"""Names shown of rooms that export much for other rooms."""
INHERITED = '["!^_", "!^(update|compute|rows|memory|reset)$"]'
"""What every measure has is shown once, at `Measure`."""


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """MkDocs: add the pages."""
    for folder in sorted(path for path in GALLERY.iterdir() if path.is_dir()):
        results = Results.load(folder)
        page = render(results.table, results.meta)
        files.append(File.generated(config, f"gallery/{folder.name}.html", content=page))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        text = (DOCS.parent / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    for name, text in {"commands.md": commands(), "settings.md": settings(), **api()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def programs() -> Iterator[tuple[str, Any]]:
    """Name and click command of every command that the help lists."""

    def below(group: Any, before: str) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            if command.hidden:
                continue
            if hasattr(command, "commands"):
                yield from below(command, f"{before}{name} ")
            else:
                yield f"{before}{name}", command

    return below(typer.main.get_command(app), "")


def commands() -> str:
    """The page of commands: help, arguments and options of each."""
    parts = [
        "# Commands\n\nMade from the program's own help. `--set key=value` reaches every [setting](settings.md), also "
        "those without an option. `python -m fulldepth` is the same program.\n"
    ]
    for name, command in programs():
        listed: dict[str, list[str]] = {}
        usage = [f"fulldepth {name}"]
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                usage.append((parameter.metavar or parameter.name).upper())
                shown, panel = f"`{usage[-1]}`", "Arguments and options"
            else:
                if parameter.required:
                    usage.append(f"{parameter.opts[0]} {parameter.name.upper()}")
                shown = " ".join(f"`{flag}`" for flag in [*parameter.opts, *parameter.secondary_opts])
                panel = parameter.rich_help_panel or "Arguments and options"
            listed.setdefault(panel, []).append(f"| {shown} | {_cell(parameter.help or '')} |")
        parts += [f"## {name}\n", f"```console\n$ {' '.join(usage)}\n```\n", _prose(command.help or "") + "\n"]
        for panel, rows in listed.items():
            parts.append(_table((panel, ""), rows))
    return "\n".join(parts)


def settings() -> str:
    """The page of settings: name, type, default and meaning of every field of the settings classes."""
    parts = [
        "# Settings\n\nMade from the classes that declare them. The same names are keywords in Python, keys of "
        "recipes, and names for `--set name=value`; those in [commands](commands.md) have an option, too. Unknown "
        "names and wrong types are errors.\n"
    ]
    for command, kind in SETTINGS.items():
        parts += [f"## {command}\n", _table(("setting", "type", "default", "meaning"), _fields(kind))]
    return "\n".join(parts)


def _fields(kind: type[Settings], before: str = "") -> Iterable[str]:
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            yield from _fields(field.annotation, f"{before}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        stated = "" if default is PydanticUndefined or default is None else f"`{json.dumps(default)}`"
        cells = map(_cell, (f"`{before}{name}`", _type(field.annotation), stated, field.description or ""))
        yield f"| {' | '.join(cells)} |"


def _type(annotation: Any) -> str:
    """A type as a reader of YAML names it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(map(str, inner))
    if origin is list:
        return f"list of {_type(inner[0])}"
    if origin is dict or annotation is dict:
        return "mapping"
    if origin is Union or type(annotation).__name__ == "UnionType":
        return " or ".join(_type(part) for part in inner if part is not type(None))
    if hasattr(annotation, "__metadata__"):
        return _type(inner[0])
    return {str: "text", int: "integer", float: "number", bool: "true, false"}.get(annotation, str(annotation))


def _table(header: tuple[str, ...], rows: Iterable[str]) -> str:
    return "\n".join([f"| {' | '.join(header)} |", "|---" * len(header) + "|", *rows, ""])


def _prose(text: str) -> str:
    """A docstring as Markdown: paragraphs, without what only a terminal needs."""
    return "\n\n".join(" ".join(part.split()) for part in text.replace("\b", "").split("\n\n")).replace("<", "&lt;")


def _cell(text: str) -> str:
    """Text inside a table; outside of code `<` and `|` would be markup."""
    flat = " ".join(text.split()).replace("|", "\\|")
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_$])", r"\\\1", part).replace("<", "&lt;")
        for part in re.split(r"(`[^`]*`)", flat)
    )


def api() -> dict[str, str]:
    """Pages of public names: the functions and classes in every room's `__all__`, without settings classes."""
    pages, shown = {}, set()
    for room in ROOMS:
        parts = [f"# fulldepth.{room}\n"]
        for name, value in public(room):
            if (value.__module__, name) in shown:
                continue
            shown.add((value.__module__, name))
            inherits = isinstance(value, type) and issubclass(value, Measure) and value is not Measure
            options = f"\n    options:\n      filters: {INHERITED}" if inherits else ""
            parts.append(f"::: {value.__module__}.{name}{options}\n")
        pages[f"api/{room}.md"] = "\n".join(parts)
    return pages


def public(room: str) -> list[tuple[str, Any]]:
    """Name and object of what a room exports with a docstring, functions first."""
    module = import_module(f"fulldepth.{room}")
    found = [(name, getattr(module, name)) for name in CHOSEN.get(room, module.__all__)]
    names = [
        (name, value)
        for name, value in found
        if callable(value) and value.__doc__ and getattr(value, "__name__", "") == name and "Settings" not in name
    ]
    return sorted(names, key=lambda pair: isinstance(pair[1], type))
