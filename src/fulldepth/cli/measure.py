"""`fulldepth measure`."""

from __future__ import annotations

from typing import Annotated

import typer

from fulldepth.cli.options import Output, command
from fulldepth.cli.program import app
from fulldepth.core import bars, console
from fulldepth.settings.measure import MeasureSettings


@command(app, "measure", MeasureSettings, recipes="measure", headline=True)
def measure_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint folder, .gguf file, package:NAME (the model inside an installed package), Hub name, or a "
            "folder of checkpoint-N (with or without a final model).",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="A .txt, .jsonl (text | prompt+response | text+label), .tsv or .parquet file, a folder of such files, "
            "a folder of images in class folders, a Hub data set, or corpus:builtin.",
        ),
    ],
    output: Output,
    settings: MeasureSettings,
    series: Annotated[
        bool,
        typer.Option(
            "--series/--no-series",
            help="--no-series: of a folder with checkpoint-N and a final model, measure the final model alone.",
            rich_help_panel="Data",
        ),
    ] = True,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Measure everything again (also every checkpoint of a series) and replace the results in the output "
            "folder. New checkpoints of a growing series need no --overwrite.",
        ),
    ] = False,
) -> None:
    """Measure what every layer of a checkpoint does.

    MODEL is a checkpoint, or the folder of a training run (checkpoint-100, checkpoint-200, ...), which gives a series.
    The result is one folder: `report.html` (open it in a browser), `results.parquet` (the table), `groups.parquet`
    (for paired comparisons) and `results.json` (settings, headline). An interrupted series resumes after its last
    checkpoint, and is extended by new ones; a single checkpoint is measured again from the start.

    Example: `fulldepth measure MODEL --data text.txt --measures default,layer_effect --output out/`

    Several processes: `torchrun --nproc-per-node 2 -m fulldepth measure MODEL --data text.txt --output out/`
    """
    console.loading()
    from fulldepth.measurement import measure_into
    from fulldepth.results import PAGE

    with bars.watching() as watcher:
        results = measure_into(model, data, output, settings, overwrite=overwrite, series=series, watcher=watcher)
    console.finish(results, output / PAGE)
