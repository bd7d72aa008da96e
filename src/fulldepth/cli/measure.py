"""`fulldepth measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulldepth import console
from fulldepth.cli.door import DEBUG, Debug, app, listed

MEASURES = (
    *("displacement", "jump_rate", "coherence", "cosine", "cka", "norm_ratio", "lens_accuracy", "lens_loss"),
    *("saturation", "effective_depth", "nc1", "renyi_entropy", "separability", "spectral_norm", "mmd"),
    *("retrieval_weight", "expected_retrieval", "stream_mixing"),
)
"""The names of `fulldepth.metrics.METRICS`, which would take torch to import; a test holds them equal."""

MEASURING, SELECTING, LOADING = "What to measure", "Samples", "Loading the model"


@app.command("measure")
def measure_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint folder, Hub name, or a folder of checkpoint-N (with or without a final model).",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="A .txt, .jsonl (text | prompt+response | text+label), .tsv or .parquet file, a folder or .zip of "
            "images in class folders, a Hub data set, or corpus:builtin.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Result folder; made if absent.")],
    measures: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated names out of {', '.join(MEASURES)}. [default: all that model and data allow]",
            rich_help_panel=MEASURING,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Which tokens count: all, no-first, last, cls, eos; padding never does. "
            "[default: auto = all for language models, cls, last or eos for classifiers and CLIP]",
            rich_help_panel=MEASURING,
        ),
    ] = None,
    words: Annotated[
        str | None,
        typer.Option(
            help="Look-alike words whose separability is measured: is,are,was,were.", rich_help_panel=MEASURING
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Model that MMD compares with, layer by layer.", rich_help_panel=MEASURING),
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option(help="Sequences to read. [default: 256]", rich_help_panel=SELECTING)
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a sequence. [default: 256, or the model's positions if fewer]", rich_help_panel=SELECTING
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Sequences in one forward pass; no number depends on it. [default: 8]", rich_help_panel=SELECTING
        ),
    ] = None,
    lens_tokens: Annotated[
        int | None,
        typer.Option(
            help="Read only a seeded sample of this many positions with the lens. [default: all]",
            rich_help_panel=SELECTING,
        ),
    ] = None,
    reservoir_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens kept for cosine, CKA, NC1 and MMD; exact while the data fit. [default: 2048]",
            rich_help_panel=SELECTING,
        ),
    ] = None,
    entropy_sequences: Annotated[
        int | None,
        typer.Option(help="Sequences that enter the matrix entropies. [default: 64]", rich_help_panel=SELECTING),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of every sample. [default: 0]", rich_help_panel=SELECTING)
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a Hub data set or image folder.", rich_help_panel=SELECTING)
    ] = None,
    truncate: Annotated[
        bool | None,
        typer.Option("--truncate", help="Cut pairs that are too long, rather than refuse.", rich_help_panel=SELECTING),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16. [default: auto, the checkpoint's own]", rich_help_panel=LOADING),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, cuda:1, mps. [default: the first accelerator]", rich_help_panel=LOADING),
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(help="auto: spread a large model over devices, CPU and disk.", rich_help_panel=LOADING),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder or Hub name of the tokenizer. [default: the checkpoint's]", rich_help_panel=LOADING),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a Hub model.", rich_help_panel=LOADING)
    ] = None,
    tower: Annotated[
        str | None, typer.Option(help="text or vision, for models with two towers.", rich_help_panel=LOADING)
    ] = None,
    trust_remote_code: Annotated[
        bool | None,
        typer.Option(
            "--trust-remote-code", help="Run modelling code that the checkpoint carries.", rich_help_panel=LOADING
        ),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="YAML file of settings, or a shipped recipe: quick, full.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting as key=value, for example --set anatomy.blocks=decoder.layers."),
    ] = None,
    series: Annotated[
        bool,
        typer.Option(
            "--series/--no-series",
            help="--no-series: of a folder with checkpoint-N and a final model, measure the final model alone.",
            rich_help_panel=SELECTING,
        ),
    ] = True,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Measure everything anew (every checkpoint of a series, too) and replace the results in the output "
            "folder. New checkpoints of a growing series need no --overwrite.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure what every layer of a checkpoint does, in one pass over the data.

    MODEL is a checkpoint folder, a Hub name, or the folder of a training run (checkpoint-100, checkpoint-200, ...),
    which gives a series. The result is one folder: `report.html` (open it in a browser), `results.parquet` (the table)
    and `results.json` (settings, headline). A run that was interrupted goes on where it stopped, and a series whose
    training went on is extended by the new checkpoints.

    Several processes: `torchrun --nproc-per-node 2 -m fulldepth measure MODEL --data text.txt --output out/`
    """
    DEBUG["on"] |= debug
    given = {
        "measures": listed(measures),
        "tokens": tokens,
        "words": listed(words),
        "reference": reference,
        "max_sequences": max_sequences,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "lens_tokens": lens_tokens,
        "reservoir_tokens": reservoir_tokens,
        "entropy_sequences": entropy_sequences,
        "seed": seed,
        "split": split,
        "truncate": truncate,
        "dtype": dtype,
        "device": device,
        "device_map": device_map,
        "tokenizer": tokenizer,
        "revision": revision,
        "tower": tower,
        "trust_remote_code": trust_remote_code,
    }
    from fulldepth import recipes, report
    from fulldepth.measure import MeasureSettings, measure_into

    resolved = recipes.layer(
        MeasureSettings,
        recipes.read(recipe, "measure") if recipe else {},
        {name: value for name, value in given.items() if value is not None},
        recipes.assignments(settings or []),
    )
    with console.watching() as watcher:
        results = measure_into(model, data, output, resolved, overwrite=overwrite, series=series, watcher=watcher)
    if console.is_main():
        console.finish(results, report.write(output))
