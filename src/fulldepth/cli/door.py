"""The door of the command line: the program, its general options, and how it ends.

Commands are a thin layer: they parse, show progress, call one function of a verb, and say where the page is. Verbs are
imported when called, so that `--help` needs no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fulldepth import console
from fulldepth.errors import FulldepthError, is_out_of_memory

app = typer.Typer(
    name="fulldepth",
    help="Find out how much of a Transformer's depth really works.\n\n"
    "Start with `fulldepth demo --output demo-run/`, or measure a checkpoint of your own: "
    "`fulldepth measure MODEL --data text.txt --output out/`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

DEBUG = {"on": False}
"""Set by `--debug`: errors show their traceback."""

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
"""Of every command: it may also stand after the command's name."""


def _print_version(asked: bool) -> None:
    """The whole work of `--version`: it runs before a command is looked for."""
    if asked:
        from fulldepth import __version__

        typer.echo(f"fulldepth {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of every command."""
    DEBUG["on"] = debug


def listed(text: str | None) -> list[str] | None:
    """A comma-separated list."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def whole_numbers(option: str, text: str | None) -> list[int] | None:
    """A comma-separated list of whole numbers."""
    words = listed(text)
    if words is not None and not (words and all(word.isdecimal() for word in words)):
        raise FulldepthError(f"{option} {text}: expected whole numbers such as 3,7.")
    return None if words is None else [int(word) for word in words]


def refuse_existing(folder: Path, overwrite: bool) -> None:
    """Earlier results are never overwritten unasked."""
    if not overwrite and (folder / "results.json").exists():
        raise FulldepthError(f"{folder} already holds results. Choose another --output, or replace with --overwrite.")


def main() -> None:
    """Run the command line; mistakes of the user end with exit code 2 and one message."""
    try:
        app(standalone_mode=True)
    except FulldepthError as error:
        _fail(str(error), error)
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _fail("Out of memory. Try a smaller --batch-size or --sequence-length, or --device-map auto.", error)
    except SystemExit as leaving:  # typer turns an interruption into this code and says nothing
        if leaving.code == 130:
            typer.echo("Interrupted; the same command goes on where it stopped.", err=True)
        raise


def _fail(message: str, error: BaseException) -> None:
    """Print one readable message and leave with 2; with `--debug` show where it came from."""
    if DEBUG["on"]:
        raise error
    console.error(message)
    sys.exit(2)
