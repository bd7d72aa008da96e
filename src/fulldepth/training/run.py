"""`fulldepth train`: trains by settings into a run folder; resumable, with the same batches on one process or many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainingArguments

from fulldepth import launch
from fulldepth.errors import StoppedError, unknown
from fulldepth.execution import find_anatomy
from fulldepth.hf import sealed_checkpoints, silent
from fulldepth.losses import DepthTrainer, Objective
from fulldepth.progress import Watcher
from fulldepth.results import Results, versions
from fulldepth.training.arguments import batch_note, training_arguments
from fulldepth.training.callback import Conductor, stopping
from fulldepth.training.detection import detection_trainer
from fulldepth.training.detection_evaluation import DetectionEvaluator
from fulldepth.training.evaluation import Evaluator
from fulldepth.training.export import explaining_full_disk, put_together
from fulldepth.training.folder import KIND, TOKENIZER, holding, open_run
from fulldepth.training.heads import start_exit_heads
from fulldepth.training.labelled import image_trainer, text_trainer
from fulldepth.training.loading import LoadingMixin, window_collator
from fulldepth.training.methods import make_objective, resolved
from fulldepth.training.model import build_config, build_model, special_tokens
from fulldepth.training.nodes import resuming
from fulldepth.training.optimiser import GroupsMixin
from fulldepth.training.origin import check_origin, origin_of
from fulldepth.training.record import Record
from fulldepth.training.resume import ResumeMixin, RunNotes, step_of
from fulldepth.training.separate_documents import require_separate_documents
from fulldepth.training.settings import TrainSettings
from fulldepth.training.sft import rows_hash, sft_arguments, sft_data, sft_trainer
from fulldepth.training.sharding import ShardsMixin
from fulldepth.training.text import packed_text, run_tokenizer

EVALUATION_BATCH = {True: 8, False: 32}
"""Whether the task is causal-lm -> sequences or images in a forward pass of an evaluation."""
EVALUATORS = {"detection": DetectionEvaluator}
"""Task -> class that evaluates it, where the loss and the displacement are not all."""
Prepared = tuple[Any, dict[str, Any]]
"""A trainer, and facts about its data."""


class PackedTrainer(ResumeMixin, ShardsMixin, LoadingMixin, GroupsMixin, DepthTrainer):
    """Trainer for packed text."""


def train(
    settings: TrainSettings,
    output: str | Path,
    *,
    resume: bool = False,
    recipe: str = "settings",
    watcher: Watcher | None = None,
    after_evaluation: Callable[[Path], object] | None = None,
) -> Results:
    """Train a model by the settings, into a run folder.

    The folder holds `settings.yaml`, `checkpoint-N` (weights, tokenizer, optimiser, everything that resuming needs),
    `results.parquet` and `results.json` (losses, penalties, displacement, jump rates at every evaluation). Under
    torchrun every process trains on its share of each batch, and the first one writes.

    Args:
        settings: the run's settings.
        output: the run folder; made if absent.
        resume: resume from the last complete checkpoint; without one, start at the beginning.
        recipe: name of the recipe, for the record.
        watcher: receives progress and messages.
        after_evaluation: called with the folder whenever its results have changed.

    Raises:
        FulldepthError: if the folder holds another run, the settings are inconsistent, or the loss is not finite.
    """
    settings, watcher, folder = resolved(settings), watcher or Watcher(), Path(output)
    if launch.rank() == 0:  # other processes may not see the first one's folder
        open_run(folder, settings, resume)
    with silent(logging.ERROR), explaining_full_disk(lambda: _last_good(folder)):
        arguments = training_arguments(settings, folder)  # joins the other processes
        with holding(folder, settings, resume, is_main=arguments.should_save) as renamed:
            for path in renamed:
                watcher.say(f"A checkpoint that is not whole is now called {path.name}.")
            with resuming(folder, settings) as (checkpoint, notes):
                return _train(settings, arguments, folder, checkpoint, notes, recipe, watcher, after_evaluation)


def _train(
    settings: TrainSettings,
    arguments: TrainingArguments,
    folder: Path,
    checkpoint: Path | None,
    notes: RunNotes,
    recipe: str,
    watcher: Watcher,
    after_evaluation: Callable[[Path], object] | None,
) -> Results:
    trainer, facts = _prepare(settings)(settings, folder, arguments, watcher)
    held_out, warnings = trainer.eval_dataset, facts.pop("warnings", [])
    warnings = [*warnings, *batch_note(settings, arguments.per_device_train_batch_size)]
    if settings.model.checkpoint is not None:
        start = start_exit_heads(trainer.plain_model, settings.model.checkpoint, settings.method)
        warnings = [*warnings, *start]
    meta = _meta(settings, recipe, trainer.model, {**facts, "validation_sequences": len(held_out)})
    for line in warnings:
        watcher.say(line)
        meta["warnings"].append(line)
    origin = origin_of(settings, facts["hash"], trainer.args)
    for line in check_origin(origin, notes.origin, trainer.model.config, settings, checkpoint):
        watcher.say(line)
        meta["warnings"].append(line)
    conductor = Conductor(
        settings,
        Record.reopen(folder, meta, checkpoint) if checkpoint else Record(folder, meta),
        EVALUATORS.get(settings.task, Evaluator)(
            held_out, trainer.data_collator, EVALUATION_BATCH[settings.task == "causal-lm"]
        ),
        watcher,
        notes.model_copy(update={"origin": origin}),
        after_evaluation,
    )
    return conduct(trainer, conductor, checkpoint)


def conduct(trainer: Any, conductor: Conductor, checkpoint: Path | None) -> Results:
    """Run a trainer until it finishes or is stopped.

    Raises:
        FulldepthError: if it was stopped (SIGTERM); the message names the last complete checkpoint.
    """
    settings, record, watcher = conductor.settings, conductor.record, conductor.watcher
    meta = record.meta
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ in ("PrinterCallback", "ProgressCallback"):
            trainer.remove_callback(callback)
    conductor.join(trainer)
    watcher.say(
        f"{meta['model']['class']}: {meta['model']['parameters'] / 1e6:.1f} M parameters, "
        f"{_amount(settings)} {settings.unit} in {settings.steps} steps, "
        f"validated on {settings.data.validation or 'held-out data'}"
        + (f"; going on after {checkpoint.name}." if checkpoint else ".")
    )
    if checkpoint is None or step_of(checkpoint) < settings.steps:
        try:
            with stopping(conductor):
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except BaseException:
            conductor.rescue()
            raise
    if conductor.stop_asked and trainer.state.global_step < settings.steps:
        raise StoppedError(f"Stopped after step {trainer.state.global_step}. {_last_good(record.folder)}")
    record.complete = True
    if trainer.args.should_save:
        record.save()
        if conductor.after_evaluation is not None:
            conductor.after_evaluation(record.folder)  # the page says that the run is complete
        if checkpoints := sealed_checkpoints(record.folder):
            put_together(checkpoints[-1][1], watcher)
    return record.results()


def _tokenizer(
    settings: TrainSettings,
    folder: Path,
    arguments: TrainingArguments,
    watcher: Watcher,
    texts: Iterable[str] | None = None,
) -> Any:
    """The tokenizer of the run; a newly trained one is saved in the run folder."""
    with arguments.main_process_first(desc="tokenizer"):
        return run_tokenizer(settings, folder / TOKENIZER, watcher, texts)


def _prepare(settings: TrainSettings) -> Callable[[TrainSettings, Path, Any, Watcher], Prepared]:
    """The function that makes the trainer of a run, and facts about its data, by task."""
    by_task = {
        "causal-lm": _conversations if settings.stage == "sft" else _packed,
        "image-classification": _images,
        "text-classification": _texts,
        "detection": _detection,
    }
    if settings.task not in by_task:
        raise unknown("task", settings.task, by_task)
    return by_task[settings.task]


def _language(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> tuple[Any, Any]:
    """The tokenizer and the configuration of a language model."""
    tokenizer = _tokenizer(settings, folder, arguments, watcher)
    config = build_config(
        settings.model,
        vocab_size=len(tokenizer),
        positions=settings.sequence_length,
        special_tokens=special_tokens(tokenizer),
    )
    return tokenizer, config


def _images(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> Prepared:
    return image_trainer(settings, folder, arguments, watcher, lambda config: _built(config, settings))


def _texts(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> Prepared:
    def tokenizer(texts: Iterable[str]) -> Any:
        return _tokenizer(settings, folder, arguments, watcher, texts)

    return text_trainer(settings, arguments, watcher, lambda config: _built(config, settings), tokenizer)


def _detection(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> Prepared:
    return detection_trainer(settings, folder, arguments, watcher, lambda config: _built(config, settings))


def _built(config: Any, settings: TrainSettings) -> tuple[PreTrainedModel, Objective]:
    return build_model(config, settings), make_objective(settings)


def _packed(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> Prepared:
    """The trainer of packed text, and facts about its data; all processes share in tokenising what is missing."""
    tokenizer, config = _language(settings, folder, arguments, watcher)
    packed = packed_text(settings, tokenizer, config.vocab_size, watcher)
    packed.require_documents(arguments.world_size)
    collator, model = window_collator(settings), build_model(config, settings)
    if not settings.data.across_documents:
        require_separate_documents(model)
    trainer = PackedTrainer(
        model,
        arguments,
        objective=make_objective(settings),
        settings=settings,
        train_dataset=packed.train,
        eval_dataset=packed.validation,
        data_collator=collator,
        processing_class=tokenizer,
    )
    facts = {"hash": packed.hash, "tokens": packed.tokens, "documents": packed.documents}
    return trainer, {**facts, "train_sequences": len(packed.train)}


def _conversations(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> Prepared:
    """The trainer of conversations, and facts about its data."""
    tokenizer, config = _language(settings, folder, arguments, watcher)
    data, facts = sft_data(settings, tokenizer)
    trainer = sft_trainer(
        build_model(config, settings),
        sft_arguments(settings, folder),
        data,
        tokenizer,
        settings,
        make_objective(settings),
    )
    digest = rows_hash(trainer.train_dataset, trainer.eval_dataset)
    return trainer, {**facts, "hash": digest, "train_sequences": len(trainer.train_dataset)}


def _meta(settings: TrainSettings, recipe: str, model: PreTrainedModel, data: dict[str, Any]) -> dict[str, Any]:
    config = model.config
    return {
        "kind": KIND,
        "recipe": recipe,
        "settings": settings.model_dump(mode="json"),
        "model": {
            "name": recipe,
            "class": type(model).__name__,
            "model_type": config.model_type,
            "parameters": sum(p.numel() for p in model.parameters()),
            "num_layers": _depth(settings, model),
        },
        "data": {"name": settings.data.name, **data},
        "versions": versions(),
        "warnings": [],
    }


def _depth(settings: TrainSettings, model: PreTrainedModel) -> int:
    """L; of a detector its decoder's."""
    if settings.task == "detection":
        return find_anatomy(model).num_layers
    return int(model.config.get_text_config().num_hidden_layers)


def _amount(settings: TrainSettings) -> str:
    number = settings.steps * settings.units_per_step
    return f"{number / 1e6:.2f} M" if settings.task == "causal-lm" else f"{number:,}"


def _last_good(folder: Path) -> str:
    checkpoints = sealed_checkpoints(folder)
    if not checkpoints:
        return "There is no whole checkpoint yet; --resume starts at the beginning."
    return f"The last whole checkpoint is {checkpoints[-1][1]}; --resume goes on from it."
