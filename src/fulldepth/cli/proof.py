"""`fulldepth skip curve`, `bench` and `quantise`: what removing blocks costs, and what it wins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulldepth import console
from fulldepth.cli.door import DEBUG, Debug, listed, refuse_existing, whole_numbers
from fulldepth.cli.skip import (
    DATA,
    LOADING,
    SEARCHING,
    BatchSize,
    Device,
    DeviceMap,
    Dtype,
    Granularity,
    Heldout,
    Limit,
    Model,
    PlanFile,
    Planned,
    RemoteCode,
    Results,
    Revision,
    Seed,
    SequenceLength,
    Tokenizer,
    skip,
)

GRID = "What is timed"


@skip.command("curve")
def curve_command(
    model: Model,
    data: Annotated[str, typer.Option("--data", help="As for `skip search`.")],
    output: Results,
    max_blocks: Annotated[int, typer.Option(help="How many blocks to remove at most.", rich_help_panel=SEARCHING)] = 12,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Break point: nats above the first straight line that are accepted. [default: a kink outside the band "
            "that the spread of the sequences explains]",
            rich_help_panel=SEARCHING,
        ),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(help="How they are found, as for `skip search`. [default: greedy]", rich_help_panel=SEARCHING),
    ] = None,
    granularity: Granularity = None,
    seed: Seed = None,
    heldout: Heldout = None,
    sequence_length: SequenceLength = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    dtype: Dtype = None,
    device: Device = None,
    device_map: DeviceMap = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting of the search as key=value: --set criterion=kl.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted curve stopped.")] = False,
    debug: Debug = False,
) -> None:
    """Remove blocks one after another and show what each costs: loss, divergence, changed predictions, break point.

    The break point is the number of blocks up to which the loss grows in a straight line that ends in a kink, with its
    confidence; a curve that bends smoothly has none. It does not depend on --max-blocks.

    Example: `fulldepth skip curve MODEL --data text.txt --max-blocks 12 --output curve/`
    """
    DEBUG["on"] |= debug
    from fulldepth import recipes, report
    from fulldepth.skip import curve

    given = {
        "search": search,
        "granularity": granularity,
        "seed": seed,
        "sequence_length": sequence_length,
        "limit": limit,
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device,
        "device_map": device_map,
        "tokenizer": tokenizer,
        "revision": revision,
        "trust_remote_code": trust_remote_code or None,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if not resume:
        refuse_existing(output, False)
    with console.watching() as watcher:
        found = curve(
            model,
            data,
            max_blocks=max_blocks,
            tolerance=tolerance,
            output=output,
            heldout=heldout,
            resume=resume,
            watcher=watcher,
            **options | recipes.assignments(settings or []),
        )
    if console.is_main():
        console.finish(found.results, report.write(output))


@skip.command("bench")
def bench_command(
    original: Annotated[str, typer.Argument(metavar="ORIGINAL", help="The checkpoint before anything was removed.")],
    exports: Annotated[list[str], typer.Argument(metavar="EXPORT...", help="What `skip apply` made of it.")],
    output: Results,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="Read the held-out loss of every model; as for `skip search`, the same for the same held-out tokens.",
            rich_help_panel=DATA,
        ),
    ] = None,
    heldout: Annotated[
        str | None, typer.Option(help="Data whose rows are all read. [default: a seeded fifth]", rich_help_panel=DATA)
    ] = None,
    sequence_length: SequenceLength = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    batches: Annotated[str, typer.Option(help="Sequences at once, a list.", rich_help_panel=GRID)] = "1,4",
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the prompt, a list. [default: 128,512, or the model's positions if fewer]",
            rich_help_panel=GRID,
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens decoded after it.", rich_help_panel=GRID)] = 16,
    repeats: Annotated[int, typer.Option(help="Rounds; every model runs once in each.", rich_help_panel=GRID)] = 5,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-eval, by name or as YAML files, a list; needs fulldepth[evaluate].", rich_help_panel=GRID
        ),
    ] = None,
    task_limit: Annotated[
        int | None, typer.Option(help="The first so many examples of each task only.", rich_help_panel=GRID)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of tokens, order and the held-out fifth.", rich_help_panel=GRID)] = 0,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16; auto: each checkpoint's own.", rich_help_panel=LOADING)
    ] = "auto",
    device: Device = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results in the output folder.")] = False,
    debug: Debug = False,
) -> None:
    """Time exports beside their original: prefill and decode apart, memory, cache; measured and predicted.

    All models run in turn, in rounds, so that what the machine does besides falls on all of them. With data, the loss
    of every model is read on the same held-out tokens.

    Example: `fulldepth skip bench MODEL folded/ fast/ --data pairs.jsonl --output bench/`
    """
    DEBUG["on"] |= debug
    from fulldepth import report
    from fulldepth.skip import bench

    refuse_existing(output, overwrite)
    reading = {"sequence_length": sequence_length, "limit": limit, "batch_size": batch_size}
    with console.watching() as watcher:
        results = bench(
            original,
            exports,
            output,
            data=data,
            heldout=heldout,
            tokenizer=tokenizer,
            batches=whole_numbers("--batches", batches) or [],
            contexts=whole_numbers("--contexts", contexts),
            new_tokens=new_tokens,
            repeats=repeats,
            tasks=listed(tasks),
            task_limit=task_limit,
            seed=seed,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            watcher=watcher,
            **{name: value for name, value in reading.items() if value is not None},
        )
    console.finish(results, report.write(output))


@skip.command("quantise")
def quantise_command(
    model: Planned,
    plan: PlanFile,
    data: Annotated[str, typer.Option("--data", help="As for `skip search`; the same for the same held-out tokens.")],
    output: Results,
    method: Annotated[
        str,
        typer.Option(
            help="int8: weight-only, by torchao (fulldepth[quantise]). gptq, awq: 4 bits, calibrated (fulldepth[gptq], "
            "fulldepth[awq])."
        ),
    ] = "int8",
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            help="Folder for checkpoints of the quantised models; must not exist. Each is loaded in a fresh process, "
            "and its logits are compared. [default: no weights are written]",
        ),
    ] = None,
    heldout: Heldout = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.", rich_help_panel=GRID)] = 1,
    context: Annotated[int, typer.Option(help="Tokens of the prompt.", rich_help_panel=GRID)] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens decoded after it.", rich_help_panel=GRID)] = 16,
    repeats: Annotated[int, typer.Option(help="Rounds; every model runs once in each.", rich_help_panel=GRID)] = 5,
    trust_remote_code: RemoteCode = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the second search, where it is to differ.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted second search.")] = False,
    debug: Debug = False,
) -> None:
    """Quantise a model before and after its blocks are removed, and put loss, size and speed of all in one table.

    Skip, then quantise: the plan's model, quantised. Quantise, then skip: the blocks are searched anew on the quantised
    model, with the plan's settings.

    Example: `fulldepth skip quantise MODEL plan/plan.json --data pairs.jsonl --output int8/`
    """
    DEBUG["on"] |= debug
    from fulldepth import recipes, report
    from fulldepth.skip import quantise

    with console.watching() as watcher:
        results = quantise(
            model,
            plan,
            data,
            method=method,
            output=output,
            save=save,
            heldout=heldout,
            batch=batch,
            context=context,
            new_tokens=new_tokens,
            repeats=repeats,
            resume=resume,
            watcher=watcher,
            **({"trust_remote_code": True} if trust_remote_code else {}) | recipes.assignments(settings or []),
        )
    for one in results.meta["saved"]:
        typer.echo(f"Checkpoint: {one['path']} (logit error {one['logit_error']:.1e}, loaded again in a fresh process)")
    console.finish(results, report.write(output))
