"""Options of a command, generated from the settings class of its verb.

A setting's name, type, default and help are stated once, in the class: its docstring is the help, a final `None = ...`
is the default, and the class's `options` list the settings that have an option of their own, by panel. Every setting
can also be set with `--set name=value`.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo

from fulldepth.cli.program import DEBUG, RUNNING, Debug, saved_at
from fulldepth.core import console
from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import check_outside
from fulldepth.settings import Settings, assignments, layer, merge, names, read
from fulldepth.settings.layers import kinds, members

Command = TypeVar("Command", bound=Callable[..., None])
TEXTS = ("prompt", "text")
"""Parameters that are never paths."""
NONE = re.compile(r"[;,.:]?\s*None = (.*?)\.?$", re.DOTALL)
"""Pattern of the end of a docstring that states the meaning of None."""

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Checkpoint folder, .gguf file, package:NAME (installed), or Hub name.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Result folder; created if absent.")]
NewFolder = Annotated[Path, typer.Option("--output", "-o", help="Folder of the checkpoint; must not exist.")]
OptionalOutput = Annotated[Path | None, typer.Option("--output", "-o", help="Result folder; created if absent.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace results in the output folder.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="<key=value>",
        help="Any setting by name, also those without an option; the value is YAML. Overrides options, and a recipe if "
        "there is one; may be given several times.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="The same as --set: steps=500 model.hidden_size=256 objective.jump=1."),
]


def json_option(printed: str) -> Any:
    """The option `--json` of a command that prints this as JSON."""
    return Annotated[
        bool, typer.Option("--json", help=f"Print {printed} as JSON on stdout, everything else on stderr.")
    ]


def command(
    app: typer.Typer,
    name: str,
    settings: type[Settings] | None = None,
    *,
    recipes: str | None = None,
    headline: bool | str = False,
    parser: type[typer.core.TyperCommand] | None = None,
) -> Callable[[Command], Command]:
    """Add a function to a program as a command.

    The function's parameter `settings`, if present, is not an option: it receives an instance of the settings class,
    layered from defaults, recipe, options and `key=value`. The help lists the generated options at the position of
    `settings` among the parameters.

    Args:
        app: the program, or one of its groups.
        name: name of the command.
        settings: the class whose fields become options.
        recipes: the verb whose recipes the command reads, from its argument `recipe` (which `KEY=VALUE` arguments may
            follow) if the function has such a parameter, else from the option `--recipe`. None = no recipes.
        headline: True if the command prints a headline, which gives it the option `--json`; or what it prints instead,
            as in "the table of tokens".
        parser: class of the command; None = typer's own.
    """

    def add(function: Command) -> Command:
        hints = get_type_hints(function, include_extras=True)
        accepted = inspect.signature(function).parameters
        fields: dict[str, tuple[FieldInfo, str]] = {}  # name -> field and panel of the settings that have an option
        if settings is not None:
            panels = [(panel, name) for panel, field_names in settings.options.items() for name in field_names]
            fields = {name: (settings.model_fields[name], panel) for panel, name in panels}

        def run(**values: Any) -> None:
            DEBUG["on"] |= values.pop("debug")
            values = {key: value if key in TEXTS else at_home(value) for key, value in values.items()}
            check_arguments(values, hints.get("output") in (Output, OptionalOutput))
            RUNNING.update(
                resumable="resume" in values,
                output=values.get("output"),
                overwrites=values.get("overwrite", False),
                saved=saved_at(values.get("output")),
                settings=settings,
            )
            as_json = values.pop("as_json", False)
            if settings is not None:
                option_values = {key: value for key in fields if (value := values.pop(key)) is not None}
                assigned = [*(values.pop("changes", None) or []), *(values.pop("assigned") or [])]
                changes = merge(option_values, at_home(assignments(assigned)))
                recipe = read(values["recipe"], recipes or "") if values.get("recipe") else {}
                left_out: list[str] | None = [] if values.get("resume") else None
                values["settings"] = layer(settings, recipe, changes, left_out=left_out)
                for sentence in left_out or []:
                    typer.echo(sentence, err=True)
            with console.json_on_stdout() if as_json else nullcontext():
                function(**{key: value for key, value in values.items() if key in accepted})

        entries: dict[str, tuple[Any, Any]] = {}  # name -> (annotation, default)
        for key, parameter in accepted.items():
            if key != "settings":
                entries[key] = hints[key], parameter.default
                continue
            if "recipe" in accepted:
                entries["changes"] = Changes, None
            entries |= {name: (_option(name, *field, "recipe" in accepted), None) for name, field in fields.items()}
            if recipes is not None and "recipe" not in accepted:
                text = f"YAML file of settings, or a shipped recipe: {', '.join(names(recipes))}."
                option = typer.Option(help=text, autocompletion=starting(names(recipes)))
                entries["recipe"] = Annotated[str | None, option], None
            entries["assigned"] = Assignments, None
        if headline:
            entries["as_json"] = json_option("the headline" if headline is True else headline), False
        entries["debug"] = Debug, False
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in entries.items()
        ]
        run.__name__ = function.__name__
        run.__doc__ = function.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name, cls=parser)(run)
        return function

    return add


LOCAL = ("model", "original", "exports", "data", "heldout", "fit", "plan")
"""Parameters that name models, data or plans."""
ENDINGS = (".txt", ".jsonl", ".tsv", ".parquet", ".json", ".gguf", ".yaml")
"""Endings that mark a name as a file: names on the Hub do not have them."""
OURS = [
    *("results.*", "groups.parquet", "report.html", "plan.json", "progress.json", "settings.yaml", "responses.*"),
    *("own.jsonl", "own.json", "answers", "steps", "measure", "search", "run", "tokenizer", "*.lock"),
]
"""Patterns of what commands write into an output folder, beside hidden files."""


def check_arguments(values: Mapping[str, Any], results: bool) -> None:
    """Refuse files that do not exist, and an output among the data or among other files, before torch is imported.

    Args:
        values: parameter -> its value.
        results: True if the output is a result folder, which may exist.

    Raises:
        FulldepthError: names the path.
    """
    named = [value for key in LOCAL if (value := values.get(key)) is not None]
    given = [argument for value in named for argument in (value if isinstance(value, list) else [value])]
    for argument in itertools.chain.from_iterable(map(_sources, given)):
        text = str(argument)
        is_path = isinstance(argument, Path) or text.startswith(("/", "./", "../")) or text.endswith(ENDINGS)
        if is_path and ":" not in text and not Path(text).exists():
            raise FulldepthError(f"There is no file or folder {one_line(text, 300)}.")
    output = values.get("output")
    check_outside(output, values.get("data"), values.get("heldout"), values.get("fit"))
    if not results or output is None or not output.is_dir():
        return
    names = sorted(path.name for path in output.iterdir() if not path.name.startswith("."))
    if names and not any(fnmatch(name, pattern) for name in names for pattern in OURS):
        raise FulldepthError(
            f"{output} holds {len(names)} files or folders of something else ({one_line(', '.join(names), 200)}). "
            "Choose a new or empty folder."
        )


def _sources(argument: Any) -> list[Any]:
    """The names in an argument: sources of data with commas between them, and with shares (`a.jsonl=0.3`)."""
    if not isinstance(argument, str) or "," not in argument or Path(argument).exists():
        return [argument]
    return [re.sub("=[0-9.eE+-]+$", "", name.strip()) for name in argument.split(",")]


def at_home(value: Any) -> Any:
    """Replace a leading `~` of paths and texts by the home folder, also inside lists and mappings.

    A shell does not replace `~` in quotes or after `=`, and libraries that write files do not agree on it.
    """
    if isinstance(value, dict):
        return {key: at_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [at_home(inner) for inner in value]
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _option(name: str, field: FieldInfo, panel: str, negatable: bool) -> Any:
    """Annotation of a Typer option; `negatable` if a recipe may set the default, so that `--no-...` is needed."""
    value_kinds = kinds(field.annotation)
    flag = f"--{name.replace('_', '-')}"
    is_scalar = len(value_kinds) == 1 and value_kinds <= {bool, int, float}
    kind = value_kinds.pop() if is_scalar else str  # lists and unions are text
    flags = [f"{flag}/--no-{flag[2:]}" if kind is bool and (negatable or field.default is not False) else flag]
    choices = _choices(field.annotation)
    complete = starting(choices) if choices else None
    return Annotated[
        kind | None, typer.Option(*flags, help=_help(field), rich_help_panel=panel, autocompletion=complete)
    ]


def starting(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """A completion function for the shell, which completes a word to one of the choices."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def _choices(annotation: Any) -> list[str]:
    """The texts that a setting accepts; none if it accepts any."""
    literals = [part for part in members(annotation) if get_origin(part) is Literal]
    return [str(choice) for literal in literals for choice in get_args(literal)]


def _help(field: FieldInfo) -> str:
    """Help text of an option: the setting's docstring, choices that it does not name, and the default in brackets."""
    text = " ".join((field.description or "").split())
    default = field.get_default(call_default_factory=True)
    stated = NONE.search(text) if default is None else None
    text = f"{text[: stated.start()]}." if stated else text
    choices = _choices(field.annotation)
    if any(not re.search(rf"\b{re.escape(choice)}\b", text) for choice in choices):
        text += f" One of: {', '.join(choices)}."
    if stated:
        return f"{text} [default: {stated[1]}]"
    if default is None or default is False or default == []:
        return text
    if default is True:
        return f"{text} [default: on]"
    return f"{text} [default: {','.join(map(str, default)) if isinstance(default, list) else default}]"
