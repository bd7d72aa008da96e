"""`fulldepth exit`."""

from __future__ import annotations

from typing import Annotated

import typer

from fulldepth import console
from fulldepth.cli.options import Model, NewFolder, Output, Overwrite, command
from fulldepth.cli.program import app
from fulldepth.settings.exit import ExitSettings, LayersSettings

DATA = (
    "For classifiers rows with text + label, or a folder of images in class folders; for language models text as for "
    "measure, a Hub data set, or corpus:builtin."
)


@command(app, "exit", ExitSettings, headline=True)
def exit_command(
    model: Model,
    data: Annotated[str, typer.Option("--data", help=DATA)],
    output: Output,
    settings: ExitSettings,
    overwrite: Overwrite = False,
) -> None:
    """Leave a model early: accuracy, agreement, exits per layer and speed, over rules and thresholds.

    The model's own final norm and head are applied after every layer; a sample leaves at the first layer where the rule
    exceeds the threshold. Classifiers of texts and images run with samples removed as they leave, timed against the
    model's own forward pass. With --target-accuracy-drop a threshold is chosen on one part of the data and reported on
    the other.

    Example: `fulldepth exit MODEL --data validation.jsonl --threshold 0.7,0.9,0.99 --output out/`

    `fulldepth exit export` writes a checkpoint with the first layers instead (`exit export --help`).
    """
    from fulldepth.results import PAGE, check_free

    check_free(output, overwrite)  # before torch is imported
    console.loading()
    from fulldepth.exit import sweep

    results = sweep(model, data, output=output, overwrite=overwrite, settings=settings, progress=True)
    console.finish(results, output / PAGE)


@command(app, "exit export", LayersSettings)
def exit_export_command(
    model: Model,
    output: NewFolder,
    settings: LayersSettings,
    data: Annotated[str | None, typer.Option("--data", help=f"With --effective-depth. {DATA}")] = None,
) -> None:
    """Write an ordinary checkpoint with a model's first layers, final norm and head, checked in a fresh process.

    Example: `fulldepth exit export MODEL --layers 6 --output short/`
    """
    console.loading()
    from fulldepth.exit import export_layers

    exported = export_layers(model, output, data=data, settings=settings, progress=True)
    console.checkpoint(exported, output, [("layers", f"{exported.layers} of {exported.num_layers}")])
