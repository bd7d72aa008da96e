"""The Trainer callback of a run, with its record: progress, evaluation, result rows, checkpoints, a clean stop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState

from fulldepth.core.distributed import any_process, current
from fulldepth.core.errors import one_line
from fulldepth.core.progress import Watcher
from fulldepth.execution.latency import OtherLoad
from fulldepth.execution.memory import reset_peak, run_peak
from fulldepth.hf import ModelCard, begin_checkpoint, drop_checkpoints, seal
from fulldepth.hf.publishing import PIPELINES, loading_code
from fulldepth.losses import TERMS, Tally
from fulldepth.metrics import Row
from fulldepth.metrics.jump_rate import describe_jump
from fulldepth.results import Finding, Results, finite, tabulate
from fulldepth.settings.train import TrainSettings
from fulldepth.training.evaluation import tracked
from fulldepth.training.folder import RECORD, RunNotes, step_of
from fulldepth.training.model import HEADS

OF_MODEL = {"ce": ("train_loss", "model"), "auxiliary": ("auxiliary_loss", "model")}
"""Part of the model's loss -> measure and site; other parts are penalties."""

FINDINGS = {
    "validation_loss": "",
    "validation_accuracy": "{value:.1%} of the validation rows are classified correctly at step {step:,}.",
    "validation_ap50": "The last layer's average precision at an IoU of 0.5 is {value:.1%} at step {step:,}.",
    "train_loss": "",
    "zeta_L": "",
    "throughput": "Training runs at {value:,.0f} {unit}.",
    "elapsed": "",
    "peak_memory": "",
}
"""Name of a finding -> its sentence; empty for a sentence of another form, or none."""
MEASURES = {"validation_ap50": "average_precision", "zeta_L": "jump_rate"}
"""Name of a finding -> name of its measure, if they differ."""
NAMES = {
    "validation_loss": "Validation loss",
    "validation_accuracy": "Validation accuracy",
    "zeta_L": "Jump rate of the last layer",
    "train_loss": "Training loss",
}


class RunCallback(TrainerCallback):
    """Controls a run: evaluates, records, requests and seals checkpoints, and stops on SIGTERM.

    Args:
        trainer: the Trainer that this callback is added to.
        folder: the run folder.
        meta: metadata of the run's results.
        evaluate: function that evaluates a model on the held-out items.
        watcher: receives progress and messages.
        notes: notes of the checkpoint to resume from (defaults at the start), with the run's origin.
        checkpoint: the checkpoint to resume from; None at the start.
    """

    def __init__(
        self,
        trainer: Any,
        folder: Path,
        meta: dict[str, Any],
        evaluate: Callable[[Any], tuple[list[Row], list[str]]],
        watcher: Watcher,
        notes: RunNotes,
        checkpoint: Path | None,
    ) -> None:
        self.trainer = trainer
        self.folder = folder
        self.meta = meta
        self.evaluate = evaluate
        self.watcher = watcher
        self.settings: TrainSettings = trainer.settings
        self.table = tabulate([], step=0)
        """Result rows of every evaluation."""
        if checkpoint is not None:
            rows = pd.read_parquet(checkpoint / RECORD)
            self.table = rows[rows.step <= step_of(checkpoint)].reset_index(drop=True)
        world = current().world  # `_means` divides the sums of this run's processes by it
        restored = {name: (total * world, count * world) for name, (total, count) in notes.tally.items()}
        self.tally = trainer.tallies["record"] = Tally(restored if current().is_main else None)
        self.elapsed = notes.elapsed
        is_elapsed = self.table.measure == "elapsed"
        self._elapsed_before = float(self.table.value[is_elapsed].max()) if is_elapsed.any() else 0.0
        self.other_load = OtherLoad()
        reset_peak()
        self.stop_asked = False
        self._notes = notes
        self._evaluated = notes.evaluated
        self._rate = self._since = 0.0
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def results(self, complete: bool = False) -> Results:
        """Return the results so far."""
        return Results(self.table, finite({**self.meta, "complete": complete, "headline": _headline(self.table)}))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluate a new run before its first step."""
        self.watcher.begin("Training", self.settings.steps)
        self.watcher.advance(state.global_step)
        if state.global_step == 0:
            self._evaluate(0)
        self._since = time.perf_counter()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Store the learning rate of this step, before the scheduler changes it."""
        self._rate = self.trainer._get_learning_rate()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluate and request a checkpoint when due; both are excluded from the time of training."""
        step = state.global_step
        last = step >= self.settings.steps
        self.elapsed += time.perf_counter() - self._since
        self.watcher.advance(1)
        if step % self.settings.eval_every == 0 or last:
            self._evaluate(step)
        if current().world > 1:  # all processes stop after the same step
            flag = torch.tensor(float(self.stop_asked), device=args.device)
            self.stop_asked = bool(any_process(flag))
        control.should_training_stop |= self.stop_asked
        control.should_save = step % self.settings.save_every == 0 or last or self.stop_asked
        if control.should_save and args.should_save:
            begin_checkpoint(self.folder / f"checkpoint-{step}")
        self._since = time.perf_counter()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the rows and a model card to the checkpoint, seal it, and remove the oldest beyond `keep_checkpoints`."""
        means = self._means()
        current().wait()  # until every process has written its part
        if args.should_save:
            checkpoint = self.folder / f"checkpoint-{state.global_step}"
            self.table.to_parquet(checkpoint / RECORD, index=False)
            _card_of(self.meta, self.settings, _headline(self.table), state.global_step).write(checkpoint)
            changes = {"elapsed": self.elapsed, "tally": means, "evaluated": self._evaluated}
            seal(checkpoint, self._notes.model_copy(update=changes).model_dump())
            if self.settings.keep_checkpoints:
                drop_checkpoints(self.folder, self.settings.keep_checkpoints)
        self._since = time.perf_counter()

    def _evaluate(self, step: int) -> None:
        """Evaluate, and add the rows to the results, the console's line and the trackers."""
        measured, further = self.evaluate(self.trainer.accelerator.unwrap_model(self.trainer.model))
        means = self._means()
        self.tally.take()
        seconds = self.elapsed - self._elapsed_before
        steps = step - self._evaluated
        self._elapsed_before = self.elapsed
        self._evaluated = step
        parts = [f"{'train' if name == 'ce' else name} {total / n:.4f}" for name, (total, n) in means.items()]
        line = [f"step {step}: validation {measured[0].value:.4f}", *parts, *further]
        rows: list[Any] = [*measured]
        for name, (total, count) in means.items():
            measure, site = OF_MODEL.get(name, ("penalty", name))
            unit = measured[0].unit if name in ("ce", "aligned") else TERMS[name].unit if name in TERMS else "1"
            rows.append((measure, site, None, None, "mean", total / count, round(count), unit))
        facts = [("learning_rate", "value", self._rate, "1")] if step else []
        if steps and seconds > 0:
            speed = steps * self.settings.units_per_step / seconds
            unit = f"{self.settings.unit}/s"
            facts.append(("throughput", "mean", speed, unit))
            line.append(f"{speed:,.0f} {unit}")
        facts += [
            ("elapsed", "value", self.elapsed, "s"),
            ("peak_memory", "value", run_peak() / 2**20, "MiB"),
            ("other_load", "value", self.other_load.share(), "1"),
        ]
        rows += [(measure, "model", None, None, kind, value, None, unit) for measure, kind, value, unit in facts]
        if self.trainer.args.should_save:
            new = tabulate(rows, step=step)
            self.table = new if self.table.empty else pd.concat([self.table, new], ignore_index=True)
            self.results().save(self.folder)
        if self.settings.report_to:
            losses_are_due = self.trainer.control.should_log
            self.trainer.log(tracked(measured, means))
            self.trainer.control.should_log = losses_are_due  # `log` resets it
        self.watcher.say("  ".join(line))

    def _means(self) -> dict[str, list[float]]:
        """Part of the loss -> [sum, number of steps] since the last evaluation, also before a resumption.

        The portions of a step add up to one in each process on average, so the sums are divided by their number.
        """
        totals: dict[str, list[float]] = {}
        for sums in current().gather(self.tally.read()):
            for name, (total, count) in sums.items():
                entry = totals.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += count
        return {name: [total / current().world, count / current().world] for name, (total, count) in totals.items()}


@contextmanager
def stopping(callback: RunCallback) -> Iterator[list[int]]:
    """Let SIGTERM and Ctrl-C end the run after the current step, with a checkpoint; a second Ctrl-C ends it at once.

    Yields:
        The signals that were received.
    """
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        callback.stop_asked = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
        before = {number: signal.signal(number, stop) for number in numbers}
    except ValueError:  # only the main thread can set signal handlers
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _headline(table: pd.DataFrame) -> dict[str, Finding]:
    """Name -> finding of a run, from its last evaluation."""
    if table.empty:
        return {}
    step = int(table.step.max())
    rows = table[(table.measure != "average_precision") | (table.statistic == "ap50")]
    last = {row.measure: row for row in rows[rows.step == step].sort_values("layer").itertuples()}  # deepest layers
    losses = table[table.measure == "validation_loss"].set_index("step")["value"].dropna()
    findings: dict[str, Finding] = {}
    for name, sentence in FINDINGS.items():
        row: Any = last.get(MEASURES.get(name, name))
        if row is None or not math.isfinite(row.value):
            continue
        words = sentence.format(value=row.value, unit=row.unit, step=step)
        if name == "validation_loss":
            words = " ".join(f"The validation loss is {row.value:.3f} {row.unit.strip('1')} at step {step:,}".split())
            if step and 0 in losses:
                words += f", {losses[0]:.3f} before training"
            best: Any = losses.idxmin()
            words += f"; it was lowest at step {best:,} ({losses[best]:.3f})." if best != step else "."
        words = describe_jump(row.value) if name == "zeta_L" else words
        findings[name] = Finding(float(row.value), row.unit, words)
    return findings


def _card_of(meta: Mapping[str, Any], settings: TrainSettings, findings: Mapping[str, Finding], step: int) -> ModelCard:
    """Make the model card of a checkpoint: recipe, method, data, and the findings of the last evaluation.

    Args:
        meta: metadata of the run's results.
        settings: the run's settings.
        findings: name -> finding.
        step: optimiser steps taken.
    """
    model = meta["model"]
    task = settings.task
    start = settings.model.checkpoint
    name = meta["data"]["name"]
    recipe = one_line(meta["recipe"], 100)
    beginning = f"fine-tuned from `{one_line(start, 200)}`" if start else "trained from scratch"
    method = (
        f"A {model['class']} {beginning} with the method `{settings.method}` of fulldepth (recipe: {recipe}) on "
        f"`{one_line(name, 200)}`. {one_line(settings.about, 400)}"
    )
    numbers = {
        **{NAMES[name]: f"{finding.value:.4g} {finding.unit}" for name, finding in findings.items() if name in NAMES},
        "Parameters": f"{model['parameters']:,}",
        "Optimiser steps": f"{step:,} of {settings.steps:,}",
        "Tokens" if settings.unit == "tokens" else "Examples": f"{step * settings.units_per_step:,}",
        "Seed": str(settings.seed),
    }
    held_out = one_line(settings.data.validation or f"a held-out part of {name}", 200)
    return ModelCard(
        title=f"{recipe}, step {step:,}",
        method=method.strip(),
        numbers=numbers,
        loading=loading_code(
            HEADS[task].auto.__name__,
            "AutoImageProcessor" if settings.unit == "images" else "AutoTokenizer",
            registered=model["class"].startswith(("Depth", "Skipped")),
        ),
        source=start,
        tags=[settings.method],
        notes=[f"Losses and the jump rate are those of the last evaluation, on {held_out}."] if findings else [],
        pipeline=PIPELINES[task],
    )
