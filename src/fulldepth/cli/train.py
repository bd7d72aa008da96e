"""`fulldepth train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulldepth.cli.options import NewFolder, OptionalOutput, command, starting
from fulldepth.cli.program import app
from fulldepth.core import console
from fulldepth.core.errors import FulldepthError
from fulldepth.settings import names, read
from fulldepth.settings.train import TrainSettings


@command(app, "train", TrainSettings, recipes="train", headline=True)
def train_command(
    *,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help=f"A YAML file of settings, or a recipe: {', '.join(names('train'))}.",
            autocompletion=starting(names("train")),
        ),
    ] = None,
    settings: TrainSettings,
    output: OptionalOutput = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the last complete checkpoint in the run folder.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the recipes and exit.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print parameters, FLOPs and memory, and exit."),
    ] = False,
) -> None:
    """Train a model that uses its whole depth: JREG, tree residual with CR, LIME, Hyper-Connections, aligned training.

    RECIPE holds the settings; options and `KEY=VALUE` override them. The defaults below apply to settings that the
    recipe does not set. The run folder gets checkpoints, `settings.yaml`, `results.parquet` (losses, penalties,
    displacement and jump rates at every evaluation) and `report.html`. Measure the checkpoints with `fulldepth measure
    RUN --data text.txt --output out/`, and compare two methods with `fulldepth compare A/seed-* --against B/seed-*`.

    Example: `fulldepth train tiny-jreg --steps 300 objective.jump.alpha=0.3 --output jreg-run/`

    Several processes: `torchrun --nproc-per-node 2 -m fulldepth train tiny-jreg --output jreg-run/`

    The model alone, without optimiser: `fulldepth train export jreg-run/ --output model/` (`train export --help`).
    """
    if listing:
        console.table([(name, read(name, "train").get("about", "")) for name in names("train")])
        return
    if recipe is None:
        raise FulldepthError(f"A recipe is required: {', '.join(names('train'))}, or a YAML file.")
    if output is None and not dry_run:
        raise FulldepthError("A run folder is required: --output RUN.")
    console.loading()
    from fulldepth.results import PAGE
    from fulldepth.training import dry_run_lines, train

    if output is None or dry_run:
        console.table(dry_run_lines(settings))
        return
    results = train(recipe, output, resume=resume, settings=settings, progress=True)
    console.finish(results, output / PAGE)


@command(app, "train export")
def train_export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a training run, or one of its checkpoints.")],
    output: NewFolder,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint. [default: the last complete one]")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. [default: the checkpoint's]")] = None,
    stock: Annotated[
        bool,
        typer.Option(
            "--stock",
            help="Write a depth_llama as a Llama of transformers, proven in a fresh process: LayerNorm scaling goes "
            "into the norms' gains; refused for a tree, a memory and Hyper-Connections.",
        ),
    ] = False,
) -> None:
    """Copy the model of a run's checkpoint (config, tokenizer, safetensors), without what only resuming needs.

    Example: `fulldepth train export jreg-run/ --step 1000 --dtype bfloat16 --output model/`
    """
    console.loading()
    from fulldepth.training import export_run

    folder = export_run(run, output, step=step, dtype=dtype, stock=stock, progress=True)
    console.table([("model", str(folder))])
