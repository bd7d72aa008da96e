"""`fulldepth train`: trains by settings into a run folder; resumable, with the same batches on one process or many."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from fulldepth import launch
from fulldepth.errors import StoppedError
from fulldepth.execution import find_anatomy
from fulldepth.hf import sealed_checkpoints, silent
from fulldepth.progress import Watcher
from fulldepth.results import Results, versions
from fulldepth.settings.keywords import takes_settings
from fulldepth.settings.train import TrainSettings
from fulldepth.training.arguments import batch_note, resolved, training_arguments
from fulldepth.training.callback import Conductor, stopping
from fulldepth.training.detection import DetectionEvaluator, detection_trainer
from fulldepth.training.evaluation import Evaluator
from fulldepth.training.export import explaining_full_disk
from fulldepth.training.folder import KIND, holding, open_run
from fulldepth.training.heads import start_exit_heads
from fulldepth.training.labelled import image_trainer, text_trainer
from fulldepth.training.record import Record
from fulldepth.training.resume import RunNotes, check_origin, origin_of, step_of
from fulldepth.training.sft import conversation_trainer
from fulldepth.training.text import packed_trainer

TRAINERS = {
    "causal-lm": packed_trainer,
    "image-classification": image_trainer,
    "text-classification": text_trainer,
    "detection": detection_trainer,
}
"""Task -> function that makes its trainer, and facts about its data."""
EVALUATION_BATCH = {True: 8, False: 32}
"""Whether the task is causal-lm -> sequences or images in a forward pass of an evaluation."""


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

    The folder holds `settings.yaml`, `checkpoint-N` (weights, tokenizer, optimiser, everything that resuming needs),
    `results.parquet` and `results.json` (losses, penalties, displacement, jump rates at every evaluation). Under
    torchrun every process trains on its share of each batch, and the first one writes.

    ```python
    run = fulldepth.train("tiny-jreg", "jreg-run/", steps=300, objective={"jump": {"alpha": 0.3}})
    run.values("validation_loss", "mean")  # step -> nats
    fulldepth.measure("jreg-run/", "corpus:builtin").show()
    ```

    Args:
        recipe: name of a recipe (`fulldepth train --list`), a YAML file, a mapping of settings, or `TrainSettings`.
        output: the run folder; made if absent.
        settings: fields of `TrainSettings` as keywords, which override the recipe; mappings are merged key by key.
        watcher: receives progress and messages.
        resume: resume from the last complete checkpoint; without one, start at the beginning.

    Raises:
        FulldepthError: if the folder holds another run, the settings are inconsistent, or the loss is not finite.
    """
    settings, folder = resolved(settings), Path(output)
    name = Path(recipe).stem if isinstance(recipe, str | Path) else "settings"
    if launch.rank() == 0:
        open_run(folder, settings, resume)
    with silent(logging.ERROR), explaining_full_disk(lambda: _last_good(folder)):
        arguments = training_arguments(settings, folder)  # joins the other processes
        with holding(folder, settings, resume) as (checkpoint, notes, renamed):
            for path in renamed:
                watcher.say(f"A checkpoint that is not whole is now called {path.name}.")
            trainer, conductor = _prepare(settings, arguments, folder, checkpoint, notes, name, watcher)
            return conduct(trainer, conductor, checkpoint)


def _prepare(
    settings: TrainSettings,
    arguments: TrainingArguments,
    folder: Path,
    checkpoint: Path | None,
    notes: RunNotes,
    recipe: str,
    watcher: Watcher,
) -> tuple[Any, Conductor]:
    """The trainer of a run, and the callback that controls it."""
    make = conversation_trainer if settings.stage == "sft" else TRAINERS[settings.task]
    trainer, facts = make(settings, folder, arguments, watcher)
    model, held_out = trainer.model, trainer.eval_dataset
    warnings = [*facts.pop("warnings", []), *batch_note(settings, arguments.per_device_train_batch_size)]
    if settings.model.checkpoint is not None:
        warnings += start_exit_heads(trainer.plain_model, settings.model.checkpoint, settings.method)
    for line in warnings:
        watcher.say(line)
    detects = settings.task == "detection"
    layers = find_anatomy(model).num_layers if detects else model.config.get_text_config().num_hidden_layers
    meta = {
        "kind": KIND,
        "recipe": recipe,
        "settings": settings.model_dump(mode="json"),
        "model": {
            "name": recipe,
            "class": type(model).__name__,
            "model_type": model.config.model_type,
            "parameters": sum(p.numel() for p in model.parameters()),
            "num_layers": int(layers),
        },
        "data": {"name": settings.data.name, **facts, "validation_sequences": len(held_out)},
        "versions": versions(),
        "warnings": warnings,
    }
    origin = origin_of(settings, facts["hash"], model.config, trainer.args)
    check_origin(origin, None if checkpoint is None else notes.origin, checkpoint)
    evaluator = DetectionEvaluator if detects else Evaluator
    conductor = Conductor(
        settings,
        Record.reopen(folder, meta, checkpoint) if checkpoint else Record(folder, meta),
        evaluator(held_out, trainer.data_collator, EVALUATION_BATCH[settings.task == "causal-lm"]),
        watcher,
        notes.model_copy(update={"origin": origin}),
    )
    return trainer, conductor


def conduct(trainer: Any, conductor: Conductor, checkpoint: Path | None) -> Results:
    """Run a trainer until it finishes or is stopped.

    Raises:
        FulldepthError: if it was stopped (SIGTERM); the message names the last complete checkpoint.
    """
    settings, record, watcher = conductor.settings, conductor.record, conductor.watcher
    model = record.meta["model"]
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ in ("PrinterCallback", "ProgressCallback"):
            trainer.remove_callback(callback)
    conductor.join(trainer)
    number = settings.steps * settings.units_per_step
    amount = f"{number / 1e6:.2f} M" if settings.task == "causal-lm" else f"{number:,}"
    watcher.say(
        f"{model['class']}: {model['parameters'] / 1e6:.1f} M parameters, {amount} {settings.unit} in {settings.steps} "
        f"steps, validated on {settings.data.validation or 'held-out data'}"
        + (f"; going on after {checkpoint.name}." if checkpoint else ".")
    )
    if checkpoint is None or step_of(checkpoint) < settings.steps:
        with stopping(conductor):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if conductor.stop_asked and trainer.state.global_step < settings.steps:
        raise StoppedError(f"Stopped after step {trainer.state.global_step}. {_last_good(record.folder)}")
    record.complete = True
    if trainer.args.should_save:
        record.save()
        Results.load(record.folder).save_page(record.folder)  # it says that the run is complete
    return record.results()


def _last_good(folder: Path) -> str:
    checkpoints = sealed_checkpoints(folder)
    if not checkpoints:
        return "There is no whole checkpoint yet; --resume starts at the beginning."
    return f"The last whole checkpoint is {checkpoints[-1][1]}; --resume goes on from it."
