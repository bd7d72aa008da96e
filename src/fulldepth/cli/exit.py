"""`fulldepth exit` and `fulldepth generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from fulldepth.cli.options import Model, NewFolder, OptionalOutput, Output, Overwrite, command
from fulldepth.cli.program import app
from fulldepth.core import console
from fulldepth.settings.exit import ExitSettings, LayersSettings
from fulldepth.settings.generate import GenerateSettings

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
    console.loading()
    from fulldepth.exit import sweep
    from fulldepth.results import PAGE

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


@command(app, "generate", GenerateSettings, headline="texts and statistics")
def generate_command(
    model: Model,
    settings: GenerateSettings,
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt",
            help="Text to continue (--no-chat), or the message of a user if the tokenizer has a chat template; "
            "may be given several times.",
            show_default=False,
        ),
    ],
    output: OptionalOutput = None,
    overwrite: Overwrite = False,
) -> None:
    """Continue a text, drafting tokens with the model's own first layers or leaving layers out where it is sure.

    With --speculate-from, drafts of the first layers are confirmed by the others: greedy text is that of plain
    decoding, sampled text has the same distribution, and `auto` decodes plainly where a short trial is no faster. With
    --threshold, tokens leave at the first layer that is sure of them. Text is printed on stdout, statistics on
    stderr.

    Example: `fulldepth generate MODEL --prompt "The capital of France is" --speculate-from auto`
    """
    console.loading()
    from fulldepth.exit import generate_texts
    from fulldepth.results import PAGE

    written = generate_texts(
        model,
        prompt,
        output=output,
        overwrite=overwrite,
        settings=settings,
        progress=True,
    )
    for number, text in enumerate(written.texts, start=1):
        console.texts(text if len(written.texts) == 1 else f"[{number}] {text}")
    for finding in written.results.headline.values():
        console.note(finding["sentence"])
    console.answer({"texts": written.texts, "stats": written.generation.stats.as_dict()})
    if output is not None:
        console.note(f"Page: {output / PAGE}")
