"""`fulldepth data`: prepares the training data before training starts."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fulldepth import bars, console
from fulldepth.cli.options import command, starting
from fulldepth.cli.program import app
from fulldepth.settings import layer, names
from fulldepth.settings.train import TrainSettings as TrainOptions

data = typer.Typer(
    name="data",
    help="Prepare the text that training reads.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(data)


@data.callback()
def _group() -> None:
    """Keep `prepare` a subcommand although it is the only one."""


@command(data, "prepare", recipes="train", resumes=True)
def prepare_command(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="Name of a recipe (fulldepth train --list), or a YAML file.",
            autocompletion=starting(names("train")),
        ),
    ],
    settings: dict[str, Any],
    whole: Annotated[
        bool, typer.Option("--all", help="Tokenise all of the text, including what the run does not reach.")
    ] = False,
) -> None:
    """Tokenise the text of a recipe, so that `fulldepth train RECIPE` finds the tokens and starts at once.

    No accelerator is needed. A text is tokenised once per tokenizer, for all seeds, lengths and numbers of steps. The
    tokens are stored in `data.cache`, else under `$FULLDEPTH_CACHE`, else under `~/.cache/fulldepth`. A run that needs
    more tokens extends them.

    A killed command resumes where it stopped.

    Example: `fulldepth data prepare jreg-1b data.cache=/shared/tokens`
    """
    layer(TrainOptions, settings)  # finds wrong settings before torch is imported
    console.loading()
    from fulldepth.training import TrainSettings, prepare_text

    with bars.watching() as watcher:
        packed = prepare_text(layer(TrainSettings, settings), whole=whole, watcher=watcher)
    if console.is_main():
        for warning in packed.warnings:
            console.line(f"Note: {warning}")
        console.line(
            f"{packed.tokens:,} tokens of {packed.documents:,} documents are in {packed.folder}; "
            f"fulldepth train {recipe} finds them there."
        )
