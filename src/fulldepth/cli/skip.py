"""`fulldepth skip`: finds blocks that contribute little, and exports the model without them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulldepth.cli.options import Model, NewFolder, Output, Overwrite, command
from fulldepth.cli.program import app
from fulldepth.core import console, launch
from fulldepth.settings.bench import BenchSettings
from fulldepth.settings.heal import HealSettings
from fulldepth.settings.search import CurveSettings, ExportSettings, SearchSettings

skip = typer.Typer(
    name="skip",
    help="Remove the attentions, MLPs or layers that contribute least, heal what is left, export a checkpoint.\n\n"
    "First `skip search`, which writes a plan; then `skip apply`, which makes a checkpoint from it, or `skip heal`, "
    "which heals it first. `skip curve` shows how many blocks can be removed, `skip bench` what that saves.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(skip)

DATA = "Data"
KINDS = (
    "Rows with prompt + response or messages (.jsonl, .parquet; the loss is on responses), plain text, a Hub data set, "
    "or corpus:builtin. Of skip search and skip heal also own: text that the unmodified model writes first. Several "
    "sources with commas, with shares of the rows: own=0.7,file.jsonl=0.3."
)

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, or the folder that holds it.")]
Planned = Annotated[str, typer.Argument(metavar="MODEL", help="The checkpoint that the plan was made for.")]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        help=f"{KINDS} Use the data of the search for the same held-out tokens.",
    ),
]
Searched = Annotated[
    str | None,
    typer.Option(
        "--data",
        help=f"{KINDS} A fifth of the rows scores blocks.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Heldout = Annotated[
    str | None,
    typer.Option(
        help="Data of which all rows score blocks, in place of a fifth of --data, which may then be left out unless "
        "scalars are trained on it.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]


@command(skip, "search", SearchSettings, recipes="skip", headline=True)
def search_command(
    model: Model,
    output: Output,
    settings: SearchSettings,
    data: Searched = None,
    heldout: Heldout = None,
    generate_responses: Annotated[
        int | None,
        typer.Option(help="Let the model first answer this many prompts, as in the paper.", rich_help_panel=DATA),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Temperature of these responses; 0 = greedy.", rich_help_panel=DATA)
    ] = 0.0,
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens of a response.", rich_help_panel=DATA)
    ] = 256,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted search.")] = False,
) -> None:
    """Find the blocks whose removal costs least on held-out data, and train scalars that heal the rest.

    Greedy: one block at a time, with all candidates measured again after each removal. The plan is one JSON file;
    `fulldepth skip apply` makes a checkpoint from it.

    Example: `fulldepth skip search MODEL --data pairs.jsonl --blocks 4 --output out/`

    Example: `fulldepth skip search MODEL --data text.jsonl --target-speedup 1.2 --output out/`

    Example: `fulldepth skip search MODEL --data own --max-sequences 200 --blocks 4 --output out/`

    Several processes share the candidates: `torchrun --nproc-per-node 2 -m fulldepth skip search ...`
    """
    console.loading()
    from fulldepth.results import PAGE
    from fulldepth.results import Results as Saved
    from fulldepth.skip import search

    search(
        model,
        data,
        output=output,
        settings=settings,
        heldout=heldout,
        responses=generate_responses,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        resume=resume,
        progress=True,
    )
    if launch.is_main():
        results = Saved.load(output)
        console.line(f"Plan: {output / 'plan.json'}")
        removed = ", ".join(results.meta.get("removed_modules") or [])
        console.line(f"Removed (layers counted from 0, as in transformers): {removed}")
        console.finish(results, output / PAGE)


@command(skip, "apply", ExportSettings)
def apply_command(
    plan: PlanFile,
    model: Planned,
    output: NewFolder,
    settings: ExportSettings,
    format: Annotated[
        str,
        typer.Option(
            help="folded: an ordinary checkpoint of the same class; loads anywhere, no faster. fast: without the "
            "blocks on disk, in memory and in the cache; carries its code. decilm: the same in the layout of vLLM and "
            "mlx-lm. layer: without whole layers, for plans of that granularity. gguf: one file for llama.cpp, from "
            "a MODEL that is a GGUF file; --output names it (small.gguf). mergekit: a recipe (small.yaml) by which "
            "mergekit writes what layer holds."
        ),
    ] = "folded",
) -> None:
    """Make a checkpoint from a plan. Its logits are checked in a fresh process before it gets its name.

    Example: `fulldepth skip apply out/plan.json MODEL --format fast --output fast/`
    """
    console.loading()
    from fulldepth.skip import export

    exported = export(plan, model, format, output, settings=settings)
    title = "Recipe" if exported.format == "mergekit" else "Checkpoint"
    console.checkpoint(exported, output, [("format", exported.format)], title)


@command(skip, "heal", HealSettings, headline=True)
def heal_command(
    plan: PlanFile,
    model: Planned,
    data: Data,
    output: NewFolder,
    settings: HealSettings,
    heldout: Annotated[
        str | None,
        typer.Option(
            help="Data to measure healing on. [default: rows of --data that did not choose the blocks]",
            rich_help_panel=DATA,
        ),
    ] = None,
) -> None:
    """Heal a plan's model, and write an ordinary checkpoint with a page on what healing gained.

    First without training: from the last output projection before a removed block on, the remaining ones are refitted
    by least squares, so that the stream matches the original's. Then by distillation from the original (`--steps 0`
    leaves it out); the original is trained in the same way as a control. Before the work, every export is tried with a
    few of the layers. If writing the GGUF file fails nevertheless, the healed checkpoint is kept. Run the same command
    again, with another --gguf-type if that was the reason, to write the file without healing again.

    Example: `fulldepth skip heal out/plan.json MODEL --data text.jsonl --output healed/`

    Example: `fulldepth skip heal plan/ MODEL --data own,text.jsonl --tasks piqa_local --task-data t/ -o healed/`
    """
    console.loading()
    from fulldepth.results import PAGE
    from fulldepth.skip.heal import heal

    results = heal(plan, model, data, output, settings=settings, heldout=heldout, progress=True)
    console.finish(results, output / PAGE)


@command(skip, "curve", CurveSettings, headline=True)
def curve_command(
    model: Model,
    output: Output,
    settings: CurveSettings,
    data: Searched = None,
    heldout: Heldout = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted curve.")] = False,
) -> None:
    """Remove blocks one by one and show the cost of each: loss, divergence, changed predictions, break point.

    The break point is the number of blocks up to which the loss grows along a straight line that ends in a kink. It
    has a 95 % interval and does not depend on --blocks; a curve that bends smoothly has none.

    Example: `fulldepth skip curve MODEL --data text.txt --blocks 12 --output curve/`
    """
    console.loading()
    from fulldepth.results import PAGE
    from fulldepth.skip import curve

    measured = curve(model, data, output=output, heldout=heldout, resume=resume, settings=settings, progress=True)
    console.finish(measured.results, output / PAGE)


@command(skip, "bench", BenchSettings, headline=True)
def bench_command(
    original: Annotated[str, typer.Argument(metavar="ORIGINAL", help="The checkpoint before blocks were removed.")],
    exports: Annotated[list[str], typer.Argument(metavar="EXPORT...", help="Checkpoints, or .gguf files.")],
    output: Output,
    settings: BenchSettings,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="Also measure each model's held-out loss: with the data of `skip search`, on its held-out tokens.",
            rich_help_panel=DATA,
        ),
    ] = None,
    heldout: Annotated[
        str | None,
        typer.Option(help="Data of which all rows are used. [default: a seeded fifth]", rich_help_panel=DATA),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Time exports beside their original: prefill and decode separately, memory, cache.

    All models run in turn, in rounds, so that other load on the machine affects all of them alike. Times are compared
    by the median of the rounds' ratios, with its 95 % interval. With data, the loss of every model is measured on the
    same held-out tokens.

    A .gguf file is timed by llama.cpp (pip install xllamacpp), on as many threads, one sequence at a time. Its times
    are compared with those of the original under llama.cpp if ORIGINAL is a GGUF file, else of the first .gguf file.

    With `--concurrency` the models are timed under load instead: in servers that batch the requests of several clients
    (.gguf files in llama.cpp's, checkpoint folders in vLLM if it is installed), tokens per second and the time to the
    first token. `--contexts` are the lengths of the prompts: random tokens, or the beginnings of held-out rows.

    Example: `fulldepth skip bench MODEL fast/ small.gguf --data pairs.jsonl --output bench/`

    Example: `fulldepth skip bench model.gguf small.gguf --concurrency 1,8,32 --output load/`
    """
    from fulldepth.results import PAGE, check_free

    check_free(output, overwrite)  # before torch is imported
    console.loading()
    from fulldepth.skip import bench

    results = bench(
        original, exports, output, overwrite=overwrite, data=data, heldout=heldout, settings=settings, progress=True
    )
    console.finish(results, output / PAGE)
