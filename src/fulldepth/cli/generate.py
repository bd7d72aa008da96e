"""`fulldepth generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fulldepth import bars, console
from fulldepth.cli.options import command
from fulldepth.cli.program import app
from fulldepth.errors import FulldepthError
from fulldepth.settings.generate import GenerateSettings

TEXT = "Text"


@command(app, "generate", GenerateSettings, headline=True)
def generate_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A decoder: checkpoint folder, .gguf file, package:NAME (an installed one), Hub name."
        ),
    ],
    settings: GenerateSettings,
    prompt: Annotated[
        list[str], typer.Option("--prompt", help="Text to continue; may be given several times.", show_default=False)
    ],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt into the chat template, or continue it as it is. [default: chat template if the "
            "tokenizer has one]",
            rich_help_panel=TEXT,
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print text while it is generated; one prompt.", rich_help_panel=TEXT)
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="plan.json of `skip search`: the model without the plan's blocks drafts. [default: the first layers]",
            rich_help_panel="Speculation",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Result folder with texts, statistics and lens grid. [default: none]"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results in the output folder.")] = False,
) -> None:
    """Continue a text, drafting tokens with the model's own first layers or leaving layers out where it is sure.

    With --speculate-from, drafts of the first layers are confirmed by the others: greedy text is that of plain
    decoding, sampled text has the same distribution, and `auto` decodes plainly where drafts do not pay. With
    --threshold, tokens leave at the first layer that is sure of them. Text is printed on stdout, statistics on
    stderr.

    Example: `fulldepth generate MODEL --prompt "The capital of France is" --speculate-from auto`
    """
    if not prompt or any(not text.strip() for text in prompt):
        raise FulldepthError("The prompt is empty; give some text to continue.")
    if stream and len(prompt) > 1:
        raise FulldepthError("One prompt at a time can be streamed; leave out --stream, or the other prompts.")
    from fulldepth.results import PAGE, check_free

    if output is not None:
        check_free(output, overwrite)  # before torch is imported
    console.loading()
    from fulldepth.exit import generate_texts
    from fulldepth.skip import draft_plan

    settings = settings.model_copy(update={} if chat is None else {"chat": chat})
    with bars.watching() as watcher:
        written = generate_texts(
            model,
            prompt,
            output=output,
            overwrite=overwrite,
            plan=None if plan is None else draft_plan(plan),
            streams=stream,
            show=_show,
            watcher=watcher,
            settings=settings,
        )
    if not stream:
        for number, text in enumerate(written.texts, start=1):
            console.texts(text if len(written.texts) == 1 else f"[{number}] {text}")
    for line in _numbers(written.generation.stats):
        console.note(line)
    console.answer({"texts": written.texts, "stats": written.generation.stats.as_dict()})
    if output is not None:
        console.note(f"Page: {output / PAGE}")


def _show(text: str, last: bool) -> None:
    console.texts(text, end="\n" if last else "")


def _numbers(stats: Any) -> list[str]:
    """Statistics for readers, a line for each topic."""
    rate = "" if stats.tokens_per_second is None else f", {stats.tokens_per_second:.1f} tokens/s after the prompt"
    lines = [stats.reason, f"{stats.tokens:,} tokens in {stats.prompt_seconds + stats.seconds:.2f} s{rate}."]
    if stats.drafted:
        lines.append(
            f"{stats.accepted:,} of {stats.drafted:,} drafts accepted ({stats.acceptance:.0%}) in {stats.rounds:,} "
            f"rounds of {stats.tokens_per_round:.2f} tokens."
        )
    if stats.theoretical_speedup is not None:
        left = sum(stats.exits[:-1])
        lines.append(
            f"{left:,} of {sum(stats.exits):,} tokens left early. {stats.layers_computed:.1f} of {stats.num_layers} "
            "layers were computed for a position on average, prompts included."
        )
    first, last = stats.layer_positions[0], stats.layer_positions[-1]
    lines.append(f"Positions run after the prompts: {first:,} by the first layer, {last:,} by the last.")
    return lines
