"""`fulldepth train`: trains a model into a run folder; resumable, with the same batches on any number of processes."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fulldepth.core import launch
from fulldepth.core.distributed import current
from fulldepth.core.errors import FulldepthError, StoppedError
from fulldepth.core.files import check_outside
from fulldepth.core.progress import Watcher
from fulldepth.execution import find_anatomy
from fulldepth.hf import learning, silent
from fulldepth.losses import has_next_token_loss, sees_later_tokens, use_next_token_loss
from fulldepth.results import Results, versions
from fulldepth.settings.keywords import takes_settings
from fulldepth.settings.layers import recorded
from fulldepth.settings.train import TrainSettings
from fulldepth.training.callback import RunCallback, stopping
from fulldepth.training.evaluation import evaluate_held_out
from fulldepth.training.folder import (
    KIND,
    check_disk,
    check_origin,
    explaining_full_disk,
    holding,
    last_checkpoint,
    step_of,
)
from fulldepth.training.labelled import image_data, padding_warning, text_data
from fulldepth.training.model import build_model, built_once, start_exit_heads, tying_notes
from fulldepth.training.plan import plan
from fulldepth.training.text import conversation_data, packed_data, require_separate_documents
from fulldepth.training.trainer import RunData, RunTrainer, resolved, smaller_batch, training_arguments

DATA = {
    "causal-lm": packed_data,
    "sft": conversation_data,
    "image-classification": image_data,
    "detection": image_data,
    "text-classification": text_data,
}
"""Task, or stage sft -> function that opens its data."""


@takes_settings(TrainSettings, recipes="train")
def train(
    recipe: str | Path | Mapping[str, Any] | TrainSettings,
    output: str | Path,
    *,
    settings: TrainSettings,
    watcher: Watcher,
    resume: bool = False,
) -> Results:
    """Train a model, into a run folder.

    The folder holds `settings.yaml`, `checkpoint-N` (everything that resuming needs), `results.parquet` and
    `results.json`. Under torchrun every process trains on its share of each batch, and the first one writes.

    ```python
    run = fulldepth.train("tiny-jreg", "jreg-run/", steps=300, objective={"jump": {"alpha": 0.3}})
    run.values("validation_loss", "mean")  # step -> nats
    ```

    Args:
        recipe: name of a recipe, YAML file, mapping, or `TrainSettings`; keywords override it, mappings key by key.
        output: the run folder; made if absent.
        settings: fields of `TrainSettings` as keywords, or an instance.
        watcher: receives progress and messages.
        resume: resume from the last complete checkpoint; without one, start at the beginning.

    Returns:
        Losses, penalties, displacement and jump rates at every evaluation, with the column `step`.

    Raises:
        FulldepthError: if the folder holds another run, the settings are inconsistent, or the loss is not finite.
    """
    settings = resolved(settings)
    folder = Path(output)
    check_outside(folder, settings.data.name, settings.data.validation)
    name = Path(recipe).stem if isinstance(recipe, str | Path) else "settings"
    with learning(), silent(logging.ERROR), explaining_full_disk(lambda: _last_good(folder)):
        arguments = training_arguments(settings, folder)  # joins the other processes
        with holding(folder, settings, resume) as (checkpoint, notes, renamed):
            for path in renamed:
                watcher.say(f"An incomplete checkpoint was renamed to {path.name}.")
            data = DATA["sft" if settings.stage == "sft" else settings.task](settings, folder, arguments, watcher)
            model = build_model(data.config, settings)
            warnings = [*data.warnings, *tying_notes(data.config, settings), *smaller_batch(settings, launch.world())]
            num_layers = find_anatomy(model).num_layers  # refuses models whose layers are not known
            warnings += _check_rows(model, data, settings)
            trainer = RunTrainer(model, arguments, data, settings)
            teacher = _checked_teacher(trainer, data, settings)
            if settings.model.checkpoint is not None and not settings.freezes_features:
                warnings += start_exit_heads(trainer.plain_model, settings.model.checkpoint)
            for line in warnings:
                watcher.say(line)
            current().first(partial(check_disk, trainer.plain_model, settings, folder, checkpoint))
            known = (notes.origin, checkpoint, teacher)
            origin = check_origin(settings, data.facts["hash"], model, trainer.args, *known)
            meta: dict[str, Any] = {
                "kind": KIND,
                "recipe": name,
                "settings": recorded(settings),
                "model": {
                    "name": name,
                    "class": type(model).__name__,
                    "model_type": model.config.model_type,
                    "parameters": sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name),
                    "num_layers": num_layers,
                    "training_flops": _training_flops(settings, data),
                },
                "data": {"name": settings.data.name, **data.facts, "validation_sequences": len(data.validation)},
                "versions": versions(),
                "warnings": warnings,
            }
            usual = 8 if settings.task == "causal-lm" else 32
            batch_size = min(usual, arguments.per_device_train_batch_size)  # a size that fits into memory
            callback = RunCallback(
                trainer,
                folder,
                meta,
                partial(evaluate_held_out, **data.held_out, batch_size=batch_size),
                watcher,
                notes.model_copy(update={"origin": origin}),
                checkpoint,
            )
            watcher.say(
                f"{meta['model']['class']}: {meta['model']['parameters'] / 1e6:.1f} M parameters, "
                f"{settings.steps * settings.units_per_step:,} {settings.unit} in {settings.steps:,} steps"
                + (f"; going on after {checkpoint.name}." if checkpoint else "; starting at step 0." if resume else ".")
            )
            received: list[int] = []
            if checkpoint is None or step_of(checkpoint) < settings.steps:
                with stopping(callback) as received:
                    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            if callback.stop_asked and trainer.state.global_step < settings.steps:
                stopped = f"Stopped after step {trainer.state.global_step}. {_last_good(folder)}"
                if signal.SIGINT in received:
                    watcher.say(stopped)
                    raise KeyboardInterrupt
                raise StoppedError(stopped)
            results = callback.results(complete=True)
            if trainer.args.should_save:
                results.save(folder, watcher=watcher)  # the page says that the run is complete
            return results


def _check_rows(model: Any, data: RunData, settings: TrainSettings) -> list[str]:
    """Refuse a language model that reads the tokens that it should predict, or cannot separate the documents of a row
    if it has to, and give a decoder the loss of the next token if its class has another one; return what is said of the
    loss and of padded rows.
    """
    if settings.task == "causal-lm" and not settings.data.across_documents:
        require_separate_documents(model)
    length = min(16, settings.sequence_length)
    if settings.task == "causal-lm" and not built_once(model, settings):
        if sees_later_tokens(model, length):
            raise FulldepthError(f"{type(model).__name__} reads the tokens that it should predict. Use another task.")
        if has_next_token_loss(model, length):
            return []
        use_next_token_loss(model)
        return [
            f"The loss of {type(model).__name__} in transformers is not that of the next token. The model is trained "
            "with the cross-entropy of its logits instead."
        ]
    return padding_warning(model, data.train, data.collator) if settings.task == "text-classification" else []


def _checked_teacher(trainer: RunTrainer, data: RunData, settings: TrainSettings) -> PreTrainedModel | None:
    """The teacher, if there is one.

    Raises:
        FulldepthError: if it cannot read the rows of the run, or cannot separate their documents if it has to.
    """
    distillation: Any = trainer.depth_objective.terms.get("distillation")
    if distillation is None:
        return None
    sft = settings.stage == "sft"  # conversations may be shorter than the most that a row may hold
    distillation.check_length(max(map(len, data.train["input_ids"])) if sft else settings.sequence_length)
    if settings.task == "causal-lm" and not settings.data.across_documents:
        require_separate_documents(distillation.teacher_anatomy.model)
    teacher: PreTrainedModel = distillation.teacher_anatomy.model
    return teacher


def _training_flops(settings: TrainSettings, data: RunData) -> float | None:
    """Return the FLOPs of a run; of conversations, those of sequences of their mean length."""
    if settings.stage == "sft":
        lengths = [len(ids) for ids in data.train["input_ids"]]
        settings = settings.model_copy(update={"sequence_length": round(sum(lengths) / len(lengths))})
    return plan(settings, data.config, processes=launch.world()).run_flops


def _last_good(folder: Path) -> str:
    """Return a sentence on the checkpoint from which the run can go on."""
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        return "There is no complete checkpoint yet; the run would start again at step 0."
    return f"The last complete checkpoint is {checkpoint}; the same command (train: with --resume) goes on from it."
