"""The command line: a thin door. It parses, shows progress, calls one function of a verb, and says where the page is.

Verbs are imported when called, so that `--help` needs no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fulldepth import console
from fulldepth.errors import FulldepthError, is_out_of_memory

app = typer.Typer(
    name="fulldepth",
    help="Find out how much of a Transformer's depth really works.\n\n"
    "Start with `fulldepth demo --output demo-run/`, or measure a checkpoint of your own: "
    "`fulldepth measure MODEL --data text.txt --output out/`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

DEBUG = {"on": False}
"""Set by `--debug`: errors show their traceback."""

MEASURES = (
    *("displacement", "jump_rate", "coherence", "cosine", "cka", "norm_ratio", "lens_accuracy", "lens_loss"),
    *("saturation", "effective_depth", "nc1", "renyi_entropy", "separability", "spectral_norm", "mmd"),
    *("retrieval_weight", "expected_retrieval", "stream_mixing"),
)
"""The names of `fulldepth.metrics.METRICS`, which would take torch to import; a test holds them equal."""

MEASURING, SELECTING, LOADING = "What to measure", "Samples", "Loading the model"


def _print_version(asked: bool) -> None:
    """The whole work of `--version`: it runs before a command is looked for."""
    if asked:
        from fulldepth import __version__

        typer.echo(f"fulldepth {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of every command."""
    DEBUG["on"] = debug


@app.command("measure")
def measure_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint folder, Hub name, or a folder of checkpoint-N.")
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
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace results of another run in the output folder.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure what every layer of a checkpoint does, in one pass over the data.

    MODEL is a checkpoint folder, a Hub name, or the folder of a training run (checkpoint-100, checkpoint-200, ...),
    which gives a series. The result is one folder: `report.html` (open it in a browser), `results.parquet` (the table)
    and `results.json` (settings, headline). A run that was interrupted goes on where it stopped.

    Several processes: `torchrun --nproc-per-node 2 -m fulldepth measure MODEL --data text.txt --output out/`
    """
    DEBUG["on"] |= debug
    given = {
        "measures": _names(measures),
        "tokens": tokens,
        "words": _names(words),
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
        results = measure_into(model, data, output, resolved, overwrite=overwrite, watcher=watcher)
    if console.is_main():
        console.finish(results, report.write(output))


@app.command("train")
def train_command(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Name of a recipe (see --list), or a YAML file of settings.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Settings over the recipe's: steps=500 model.hidden_size=256."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Run folder; made if absent.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after the last whole checkpoint in the run folder.")
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(help="Train the recipe's model with: standard, jreg, cr, aligned, similarity. [default: its own]"),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the recipes and leave.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print parameters, FLOPs, memory, tokens and the time it will take, and leave."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train a model that uses its whole depth: JREG, tree residual with CR, LIME, Hyper-Connections, aligned.

    RECIPE holds every number; `key=value` changes some of them. The run folder gets checkpoints, `settings.yaml`,
    `results.parquet` (losses, penalties, displacement and jump rates at every evaluation) and `report.html`; look at
    the checkpoints with `fulldepth measure RUN --data text.txt --output out/`, and at several runs on one page with
    `fulldepth compare RUN RUN --output out/`.

    Example: `fulldepth train tiny-jreg steps=300 --output jreg-run/`

    Several processes: `torchrun --nproc-per-node 2 -m fulldepth train tiny-jreg --output jreg-run/`
    """
    DEBUG["on"] |= debug
    from fulldepth import recipes

    if listing:
        console.table([(name, recipes.read(name, "train").get("about", "")) for name in recipes.names("train")])
        return
    if recipe is None:
        raise FulldepthError(f"Which recipe? {', '.join(recipes.names('train'))}, or a YAML file.")
    from fulldepth import report
    from fulldepth.train import TrainSettings, dry_run_lines, train

    over = {"method": method} if method else {}
    resolved = recipes.layer(TrainSettings, recipes.read(recipe, "train"), over, recipes.assignments(settings or []))
    if dry_run:
        console.table(dry_run_lines(resolved))
        return
    if output is None:
        raise FulldepthError("Where to? Name a run folder: --output RUN.")
    with console.watching() as watcher:
        results = train(
            resolved,
            output,
            resume=resume,
            recipe=Path(recipe).stem,
            watcher=watcher,
            after_evaluation=report.write,
        )
    if console.is_main():
        console.finish(results, report.write(output))


@app.command("compare")
def compare_command(
    folders: Annotated[list[Path], typer.Argument(help="Two or more result folders; the first is the baseline.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Result folder; made if absent.")],
    names: Annotated[
        str | None, typer.Option(help="Comma-separated names of the models. [default: the folders' names]")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Name of the model that the others are compared with. [default: the first]")
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(
            help="layer: compare layer by layer; relative: by share of the depth. [default: layer if depths are equal]"
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results in the output folder.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Put measured models side by side, with their differences (redundancy change, JREG Eq. 7)."""
    DEBUG["on"] |= debug
    from fulldepth import report
    from fulldepth.compare import compare

    _refuse_existing(output, overwrite)
    results = compare(folders, names=_names(names), baseline=baseline or 0, depth=depth)
    results.save(output)
    console.finish(results, report.write(output))


@app.command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(help="A result folder.")],
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Rebuild the page of a result folder from its two data files."""
    DEBUG["on"] |= debug
    from fulldepth import report

    typer.echo(f"Page: {report.write(folder)}")


@app.command("demo")
def demo_command(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the runs and their results. [default: demo-run]")
    ] = Path("demo-run"),
    steps: Annotated[int, typer.Option(help="Training steps of each model. [default: 160]")] = 160,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train a small Llama with and without JREG, measure the checkpoints of both, and compare them on one page."""
    DEBUG["on"] |= debug
    from fulldepth.demo import COMPARISON, demo

    with console.watching() as watcher:
        results = demo(output, steps=steps, watcher=watcher)
    console.finish(results, output / COMPARISON / "report.html")


def _names(text: str | None) -> list[str] | None:
    """A comma-separated list."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _refuse_existing(folder: Path, overwrite: bool) -> None:
    """Earlier results are never overwritten unasked."""
    if not overwrite and (folder / "results.json").exists():
        raise FulldepthError(f"{folder} already holds results. Choose another --output, or replace with --overwrite.")


def main() -> None:
    """Run the command line; mistakes of the user end with exit code 2 and one message."""
    try:
        app(standalone_mode=True)
    except FulldepthError as error:
        _fail(str(error), error)
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _fail("Out of memory. Try a smaller --batch-size or --sequence-length, or --device-map auto.", error)
    except SystemExit as leaving:  # typer turns an interruption into this code and says nothing
        if leaving.code == 130:
            typer.echo("Interrupted; the same command goes on where it stopped.", err=True)
        raise


def _fail(message: str, error: BaseException) -> None:
    """Print one readable message and leave with 2; with `--debug` show where it came from."""
    if DEBUG["on"]:
        raise error
    console.error(message)
    sys.exit(2)
