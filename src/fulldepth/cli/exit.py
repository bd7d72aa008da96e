"""`fulldepth exit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulldepth import bars, console
from fulldepth.cli.options import PushToHub, command
from fulldepth.cli.program import app
from fulldepth.errors import FulldepthError
from fulldepth.settings.exit import EXPORTS, ExitSettings


@command(app, "exit", ExitSettings, headline=True)
def exit_command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Checkpoint folder, .gguf file, package:NAME (installed), or Hub name."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Result folder, created if absent; or the new checkpoint, which must not exist."
        ),
    ],
    settings: ExitSettings,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="For classifiers rows with text + label, or a folder of images in class folders; for language "
            "models text as for measure, a Hub data set, or corpus:builtin.",
        ),
    ] = None,
    push_to_hub: PushToHub = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results in the output folder.")] = False,
) -> None:
    """Leave a model early: accuracy, agreement, exits per layer and speed, over rules and thresholds.

    The model's own final norm and head are applied after every layer; a sample leaves at the first layer where the rule
    exceeds the threshold. Classifiers of texts and images run with samples removed as they leave, timed against the
    model's own forward pass. With --target-accuracy-drop a threshold is chosen on one part of the data and reported on
    the other.

    Example: `fulldepth exit MODEL --data validation.jsonl --thresholds 0.7,0.9,0.99 --output out/`

    With one of --export-layers, --memory-budget and --effective-depth it writes an ordinary checkpoint with the first
    layers instead, checked in a fresh process: `fulldepth exit MODEL --export-layers 6 --output short/`
    """
    if settings.exports:
        console.loading()
        from fulldepth.exit import export_layers

        given = {"data": data, "push_to_hub": push_to_hub, **settings.model_dump(exclude_unset=True)}
        with bars.watching() as watcher:
            exported = export_layers(model, output, watcher=watcher, **given)
        console.checkpoint(exported, output, [("layers", f"{exported.layers} of {exported.num_layers}")])
        return
    if push_to_hub is not None:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in EXPORTS)
        raise FulldepthError(f"--push-to-hub uploads a checkpoint, which one of {options} makes.")
    if data is None:
        raise FulldepthError("A sweep needs --data: texts, labelled texts or images.")
    from fulldepth.results import PAGE, check_free

    check_free(output, overwrite)  # before torch is imported
    console.loading()
    from fulldepth.exit import sweep

    with bars.watching() as watcher:
        results = sweep(model, data, output=output, overwrite=overwrite, watcher=watcher, settings=settings)
    console.finish(results, output / PAGE)
