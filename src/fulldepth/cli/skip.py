"""`fulldepth skip`: find blocks that do not pay, and ship the model without them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulldepth import console
from fulldepth.cli.door import DEBUG, Debug, app, whole_numbers

skip = typer.Typer(
    name="skip",
    help="Remove the attention blocks that do not pay (Hopscotch), heal with scalars, ship a checkpoint.\n\n"
    "First `skip search`, which writes a plan; then `skip apply`, which makes a checkpoint of it. `skip curve` shows "
    "how many blocks can go, `skip bench` what was won, `skip quantise` what quantisation adds.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(skip)

SEARCHING, DATA, HEALING, LOADING = "The search", "Data", "Healing", "Loading the model"

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or Hub name.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, or the folder that holds it.")]
Planned = Annotated[str, typer.Argument(metavar="MODEL", help="The checkpoint that the plan was made for.")]
Results = Annotated[Path, typer.Option("--output", "-o", help="Result folder; made if absent.")]
Granularity = Annotated[
    str | None, typer.Option(help="attention, mlp or layer. [default: attention]", rich_help_panel=SEARCHING)
]
Seed = Annotated[int | None, typer.Option(help="Of all that is drawn. [default: 0]", rich_help_panel=SEARCHING)]
Heldout = Annotated[
    str | None, typer.Option(help="Data that blocks are scored with. [default: a seeded fifth]", rich_help_panel=DATA)
]
SequenceLength = Annotated[
    int | None, typer.Option(help="Tokens in a window of plain text. [default: 256]", rich_help_panel=DATA)
]
Limit = Annotated[int | None, typer.Option(help="Read the first rows or windows only.", rich_help_panel=DATA)]
BatchSize = Annotated[int | None, typer.Option(help="Sequences run at once. [default: 8]", rich_help_panel=DATA)]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16. [default: the checkpoint's own]", rich_help_panel=LOADING)
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.", rich_help_panel=LOADING)]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map", help="auto: spread a large model over devices, CPU and disk.", rich_help_panel=LOADING
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder or name. [default: the checkpoint's]", rich_help_panel=LOADING)
]
Revision = Annotated[str | None, typer.Option(help="Of a Hub model.", rich_help_panel=LOADING)]
RemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code of the checkpoint.", rich_help_panel=LOADING)
]


@skip.command("search")
def search_command(
    model: Model,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Rows with prompt + response or messages (.jsonl, .parquet; the loss is on responses), plain text, a "
            "Hub data set, or corpus:builtin.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for plan.json; made if absent.")],
    blocks: Annotated[int | None, typer.Option(help="How many blocks to remove.", rich_help_panel=SEARCHING)] = None,
    search: Annotated[
        str | None,
        typer.Option(
            help="greedy, exact (greedy on all data), one-shot, cosine, taylor, random, last, given. [default: greedy]",
            rich_help_panel=SEARCHING,
        ),
    ] = None,
    criterion: Annotated[
        str | None,
        typer.Option(
            help="loss (candidates untrained), scaled (scalars refitted for each), kl (to the unmodified model). "
            "[default: loss]",
            rich_help_panel=SEARCHING,
        ),
    ] = None,
    granularity: Granularity = None,
    given: Annotated[
        str | None, typer.Option(help="The layers to remove, 1-based: 3,7.", rich_help_panel=SEARCHING)
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="The format of `skip apply` that the plan is for: refused at once if the model cannot have it.",
            rich_help_panel=SEARCHING,
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="FLOPs (2e15) or a time (90s, 10m, 2h).", rich_help_panel=SEARCHING)
    ] = None,
    seed: Seed = None,
    heldout: Heldout = None,
    generate_responses: Annotated[
        int | None,
        typer.Option(help="Let the model answer this many prompts first, as the paper does.", rich_help_panel=DATA),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of these answers; 0 = greedy.", rich_help_panel=DATA)] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Of an answer.", rich_help_panel=DATA)] = 256,
    sequence_length: SequenceLength = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    fit: Annotated[
        bool | None,
        typer.Option("--fit/--no-fit", help="Train the scalars that heal. [default: fit]", rich_help_panel=HEALING),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    device_map: DeviceMap = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    recipe: Annotated[
        str | None, typer.Option(help="YAML file of settings, or a shipped recipe: hopscotch, quick.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting as key=value: --set confidence=0.99 --set epochs=5.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted search stopped.")] = False,
    debug: Debug = False,
) -> None:
    """Find the blocks whose removal costs least on held-out data, and train scalars that heal the rest.

    Greedy: block after block, everything measured anew after each removal. The plan is one JSON file; `fulldepth skip
    apply` makes a checkpoint of it.

    Example: `fulldepth skip search MODEL --data pairs.jsonl --blocks 4 --output out/`

    Several processes share the candidates: `torchrun --nproc-per-node 2 -m fulldepth skip search ...`
    """
    DEBUG["on"] |= debug
    from fulldepth import recipes, report
    from fulldepth.skip import SearchSettings, lines, search_into

    over = {
        "blocks": blocks,
        "search": search or ("given" if given else None),
        "criterion": criterion,
        "granularity": granularity,
        "given": whole_numbers("--given", given),
        "format": format,
        "budget": budget,
        "seed": seed,
        "sequence_length": sequence_length,
        "limit": limit,
        "batch_size": batch_size,
        "fit": fit,
        "dtype": dtype,
        "device": device,
        "device_map": device_map,
        "tokenizer": tokenizer,
        "revision": revision,
        "trust_remote_code": trust_remote_code or None,
    }
    chosen = {name: value for name, value in over.items() if value is not None}
    resolved = recipes.layer(
        SearchSettings,
        recipes.read(recipe, "skip") if recipe else {},
        chosen,
        recipes.assignments(settings or []),
    )
    with console.watching() as watcher:
        plan = search_into(
            model,
            data,
            output,
            resolved,
            heldout=heldout,
            responses=generate_responses,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            resume=resume,
            watcher=watcher,
        )
    if console.is_main():
        console.table(lines(plan))
        typer.echo(f"Plan: {output / 'plan.json'}")
        typer.echo(f"Page: {report.write(output)}")


@skip.command("apply")
def apply_command(
    plan: PlanFile,
    model: Planned,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the new checkpoint; must not exist.")],
    format: Annotated[
        str,
        typer.Option(
            help="folded: an ordinary checkpoint of the same class, loads anywhere, no faster. fast: the blocks are "
            "gone from disk, memory and cache; carries its code. decilm: the same in the layout of vLLM and llama.cpp. "
            "layer: whole layers gone, for plans of that granularity."
        ),
    ] = "folded",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16. [default: as in the search]", rich_help_panel=LOADING)
    ] = None,
    device: Device = None,
    device_map: DeviceMap = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or name. [default: the search's]", rich_help_panel=LOADING)
    ] = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    shard_size: Annotated[str, typer.Option(help="Most bytes of one file of weights, as 2GB.")] = "5GB",
    debug: Debug = False,
) -> None:
    """Make a checkpoint of a plan, load it in a fresh process, compare its logits, and only then give it its name.

    Example: `fulldepth skip apply out/plan.json MODEL --format fast --output fast/`
    """
    DEBUG["on"] |= debug
    from fulldepth.skip import export

    made = export(
        plan,
        model,
        format,
        output,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
        shard_size=shard_size,
    )
    console.table(
        [
            ("format", made.format),
            ("parameters", f"{made.parameters:,}"),
            ("size", f"{made.bytes / 2**20:.1f} MiB"),
            ("logit error", f"{made.logit_error:.1e} (relative, loaded again in a fresh process)"),
        ]
    )
    for note in made.notes:
        typer.echo(f"Note: {note}")
    typer.echo(f"Checkpoint: {output}")
