"""`fulldepth skip heal`: heals the model of a plan in closed form and by training, and writes a checkpoint."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fulldepth.core import launch
from fulldepth.core.errors import FulldepthError, StoppedError, needing
from fulldepth.core.files import locked
from fulldepth.core.processor import has_bfloat16
from fulldepth.core.progress import Watcher
from fulldepth.data.mixture import Mixture
from fulldepth.hf import learning, open_model, pick_device
from fulldepth.hf.checkpoint_folder import check_disk_space, size_of
from fulldepth.results import Results
from fulldepth.settings.heal import HealSettings
from fulldepth.settings.keywords import takes_settings
from fulldepth.settings.train import DataSettings, LoraSettings, ModelSettings, ObjectiveSettings, TrainSettings
from fulldepth.skip.healed import (
    TRAIN,
    VALIDATION,
    finish_gguf,
    last_label,
    save_healed,
    with_weights,
    write_rows,
    write_start,
)
from fulldepth.skip.least_squares import Healing, refit, resolved, tokenizer_of, with_model
from fulldepth.skip.own_text import FILE as OWN_TEXT
from fulldepth.skip.plan import Plan
from fulldepth.skip.tasks import CONTROL, TaskComparison, check_tasks
from fulldepth.training import train

SLOW = ("*/checkpoint-*", "tasks-*/*", OWN_TEXT)
"""What takes long to make: a folder that holds any of these is kept for the next call."""
KEPT_SHARE = 0.5
"""Least share of a model's weights that a plan is taken to keep."""
MANY = 4
"""Passes over the same text up to which training hardly repeats itself (Muennighoff et al., 2023)."""


@takes_settings(HealSettings)
def heal(
    plan: Any,
    model: Any,
    data: Any,
    output: str | Path,
    *,
    settings: HealSettings,
    watcher: Watcher,
    tokenizer: Any = None,
    heldout: Any = None,
) -> Results:
    """Heal the model of a plan, and write an ordinary checkpoint with the results of healing.

    Weights that stay are refitted by least squares (`fulldepth.skip.refit`). Unless `steps` is 0, the model without the
    removed parts then learns from its text and from the original's predictions (distillation), in adapters that are
    merged. The control is the original, trained in the same way on the same tokens. Tasks, if there are any, are scored
    with the original first, and with the control and the healed model last.

    Args:
        plan: the plan, its file, or its folder.
        model: the checkpoint that the plan was made for, or the loaded model, which does not change.
        data: as for `fulldepth.skip.search`, `own` and mixtures included. Own text is stored as `own.jsonl` in the
            output folder.
        output: folder to create: the checkpoint, and `results.json`, `results.parquet` and `report.html`. Until it is
            complete, `OUTPUT-work` beside it holds what an interrupted healing goes on from when it is called again.
            Where only the GGUF file failed, the same call writes it from this folder.
        settings: fields of `HealSettings` as keywords, or an instance.
        watcher: receives progress.
        tokenizer: as for `search`; None = the one that the search was given, or the checkpoint's own.
        heldout: data to measure on; None = rows that did not choose the blocks are kept apart from `data`.

    Returns:
        Rows with the column `model` (`original`, `removed`, `refitted`, and after training `trained` and `control`),
        on the same held-out rows for every model: `loss` (`mean`: nats per token; `difference_stderr`: of the
        difference to the original, over `count` documents; `difference_groups`: those for Student's t), `kl` (`mean`:
        KL(original || model)) and `greedy_agreement` (`mean`: share of tokens for which both predict the same next
        token). With tasks, `task_score` (site: the task; statistic: its metric, and `difference_stderr`, of the
        difference to the original, paired by example) of the original, the healed model and the control.

    Raises:
        FulldepthError: as `fulldepth.skip.refit` and `export`; if `output` exists, or peft is needed and not installed.
    """
    if launch.world() > 1:
        raise FulldepthError("skip heal runs in one process; start it without torchrun.")
    target = Path(output)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    tokenizer = tokenizer_of(plan, settings, tokenizer)
    given = {"data": data, "heldout": heldout}
    given = {name: str(value) for name, value in given.items() if isinstance(value, str | Path)}
    if target.exists() and (results := finish_gguf(plan, model, target, settings, given)) is not None:
        shutil.rmtree(target.with_name(f"{target.name}-work"), ignore_errors=True)
        return results
    if target.exists():
        raise FulldepthError(f"{target} exists already; a checkpoint is never written over anything.")
    if settings.steps and (settings.revision is not None or not isinstance(model, str | Path)):
        raise FulldepthError("Training reads the original from its folder or by its name; give that, or steps=0.")
    if settings.steps and settings.rank:
        with needing("peft", "lora", "Training with adapters (rank)"):  # before the refit, which takes minutes
            import peft  # noqa: F401, PLC0415
    if settings.steps and settings.precision is None:
        cuda = pick_device(settings.device).type == "cuda"
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if cuda else has_bfloat16()
        settings = settings.model_copy(update={"precision": "autocast" if fast else "float32"})
    if settings.tasks:  # checked before the refit, which takes minutes
        check_tasks(resolved(plan, settings))
        if not isinstance(model, str | Path) and tokenizer is None:
            raise FulldepthError("Tasks of a loaded model need its tokenizer; give it, too.")
    work = target.with_name(f"{target.name}-work")
    check_disk_space(target, _bytes_of_work(model, settings))
    opened = {"tokenizer": tokenizer, "heldout": heldout, "watcher": watcher}
    with learning(), locked(work):
        try:
            saved = (model, settings.revision) if tokenizer is None else (tokenizer, None)
            tasks = TaskComparison(*saved, work, watcher)
            first = partial(tasks.read, "original") if settings.tasks else None
            healing = refit(plan, model, data, settings=settings, output=target, folder=work, first=first, **opened)
            if settings.steps:
                healing = _trained(healing, model, work, tokenizer, watcher)
            if settings.tasks:
                _read_tasks(tasks, healing, work)
            elif len(Mixture.of(data).sources) == 1:
                watcher.say(
                    "The model is healed on one kind of text, and losses on other text are unknown. Read tasks with "
                    "--tasks, or heal on a mixture: --data own,FILE."
                )
            results = save_healed(healing, plan, target, tokenizer, work, tasks, given)
        except StoppedError:
            raise
        except FulldepthError:
            if not any(slow_result for pattern in SLOW for slow_result in work.glob(pattern)):
                shutil.rmtree(work, ignore_errors=True)
            raise
    shutil.rmtree(work, ignore_errors=True)
    return results


def _bytes_of_work(model: Any, settings: HealSettings) -> float:
    """Bytes that the result needs at least; with training those of its start, the trained model and the control."""
    size = KEPT_SHARE * size_of(model, settings.revision)
    if not settings.steps:
        return size
    trained = size_of(model, settings.revision, 2 if settings.precision == "bfloat16" else 4)
    moments = 0 if settings.rank else 2 * trained
    checkpoints = min(settings.steps, 2)  # a new one is whole before the last one is removed
    checkpoints_and_model = KEPT_SHARE + checkpoints if settings.control else KEPT_SHARE * (1 + checkpoints)
    return size + checkpoints_and_model * (trained + moments)


def _trained(healing: Healing, model: str | Path, work: Path, tokenizer: Any, watcher: Watcher) -> Healing:
    """The healing after training, with its control if the settings ask for one."""
    settings = healing.settings
    passes = settings.steps * settings.global_batch_size / len(healing.fitting)
    if passes > MANY:
        watcher.say(
            f"Training passes {passes:.0f} times over {len(healing.fitting)} sequences, which it then "
            "knows by heart. Give more with --max-sequences, or fewer --steps."
        )
    start = write_start(healing, work / "start", tokenizer)
    write_rows(healing, work)
    sources = {"trained": start, **({CONTROL: model} if settings.control else {})}
    for label, source in sources.items():
        run = _training(healing, source, model, work)
        train(run, work / label, resume=(work / label).exists(), watcher=watcher)
    healing = with_weights(healing, work / "trained")
    healing = with_model(healing, "trained", healing.model, watcher)
    return with_model(healing, CONTROL, work / CONTROL, watcher) if settings.control else healing


def _read_tasks(tasks: TaskComparison, healing: Healing, work: Path) -> None:
    """Read the tasks of the control, if there is one, and of the healed model."""
    settings = healing.settings
    if settings.steps and settings.control:
        original = healing.original
        control = open_model(work / CONTROL, device=original.device, dtype=original.dtype).model
        tasks.read(CONTROL, control, settings)
    tasks.read(last_label(healing), healing.model, settings)


def _training(healing: Healing, source: str | Path, teacher: str | Path, work: Path) -> TrainSettings:
    """Settings of the training of the healed model, or of its control."""
    settings = healing.settings
    assert settings.precision is not None, "`heal` has chosen the precision"
    before = healing.original.state_dict()
    changed = {
        name.rpartition(".")[2]
        for name, module in healing.model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not torch.equal(module.weight, before[f"{name}.weight"])
    }
    return TrainSettings(
        model=ModelSettings(checkpoint=str(source)),
        tokenizer=str(work / "start"),
        data=DataSettings(
            tokens=str(work / TRAIN),
            validation=str(work / VALIDATION),
            end_of_text=False,  # rows are windows of a text, or answers that may be cut off
            validation_sequences=8,  # progress only: the result is measured on other rows
        ),
        objective=ObjectiveSettings.model_validate({"distillation": {"teacher": str(teacher)}}),
        lora=LoraSettings(rank=settings.rank, target_modules=sorted(changed) or None)
        if settings.rank
        else LoraSettings(),
        steps=settings.steps,
        global_batch_size=settings.global_batch_size,
        sequence_length=settings.sequence_length or healing.examples.meta.get("sequence_length") or 256,
        learning_rate=settings.learning_rate,
        precision=settings.precision,
        device=settings.device,
        seed=settings.seed,
        eval_every=settings.steps,
        save_every=max(1, settings.steps // 4),
        keep_checkpoints=1,
    )
