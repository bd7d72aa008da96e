"""`fulldepth skip curve`, `bench` and `quantise`: costs and benefits of removing blocks."""

from __future__ import annotations

from typing import Annotated

import typer

from fulldepth import console
from fulldepth.cli.options import Model, Output, Overwrite, command
from fulldepth.cli.skip import DATA, Data, Heldout, PlanFile, Planned, skip
from fulldepth.settings.bench import BenchSettings, QuantiseSettings
from fulldepth.settings.search import CurveSettings


@command(skip, "curve", CurveSettings, headline=True)
def curve_command(
    model: Model,
    data: Data,
    output: Output,
    settings: CurveSettings,
    heldout: Heldout = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted curve.")] = False,
) -> None:
    """Remove blocks one by one and show the cost of each: loss, divergence, changed predictions, break point.

    The break point is the number of blocks up to which the loss grows in a straight line that ends in a kink, with its
    confidence; a curve that bends smoothly has none. It does not depend on --blocks.

    Example: `fulldepth skip curve MODEL --data text.txt --blocks 12 --output curve/`
    """
    console.loading()
    from fulldepth.results import PAGE
    from fulldepth.skip import curve

    measured = curve(model, data, output=output, heldout=heldout, resume=resume, settings=settings, progress=True)
    if console.is_main():
        console.finish(measured.results, output / PAGE)


@command(skip, "bench", BenchSettings, headline=True)
def bench_command(
    original: Annotated[str, typer.Argument(metavar="ORIGINAL", help="The checkpoint before blocks were removed.")],
    exports: Annotated[list[str], typer.Argument(metavar="EXPORT...", help="Checkpoints made by `skip apply`.")],
    output: Output,
    settings: BenchSettings,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="Also measure each model's held-out loss, with the data of `skip search` on the same held-out tokens.",
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

    Example: `fulldepth skip bench MODEL folded/ fast/ --data pairs.jsonl --output bench/`
    """
    from fulldepth.results import PAGE, check_free

    check_free(output, overwrite)  # before torch is imported
    console.loading()
    from fulldepth.skip import bench

    results = bench(
        original, exports, output, overwrite=overwrite, data=data, heldout=heldout, settings=settings, progress=True
    )
    console.finish(results, output / PAGE)


@command(skip, "quantise", QuantiseSettings, headline=True, alias="quantize")
def quantise_command(
    model: Planned,
    plan: PlanFile,
    data: Data,
    output: Output,
    settings: QuantiseSettings,
    heldout: Heldout = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted second search.")] = False,
) -> None:
    """Quantise a model to int8 before and after its blocks are removed; list loss, size and speed of all in one table.

    Skip, then quantise: the plan's model, quantised. Quantise, then skip: a new search on the quantised model, with the
    plan's settings.

    Example: `fulldepth skip quantise MODEL plan/plan.json --data pairs.jsonl --output int8/`
    """
    console.loading()
    from fulldepth.results import PAGE
    from fulldepth.skip import quantise

    results = quantise(
        model, plan, data, output=output, heldout=heldout, resume=resume, settings=settings, progress=True
    )
    console.finish(results, output / PAGE)
