"""The Trainer callback of a run: progress, evaluation, record, checkpoints and their seals, and a clean stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fulldepth.distributed import any_process, current
from fulldepth.execution.latency import OtherLoad
from fulldepth.execution.memory import reset_peak, run_peak
from fulldepth.hf import begin_checkpoint, drop_checkpoints, seal
from fulldepth.losses import Tally
from fulldepth.progress import Watcher
from fulldepth.settings.train import TrainSettings
from fulldepth.training.evaluation import Evaluation, tracked
from fulldepth.training.record import RunRecord, Stopwatch
from fulldepth.training.resume import RunNotes


class Conductor(TrainerCallback):
    """Controls a run: evaluates, records, requests and seals checkpoints, and stops on SIGTERM.

    Args:
        trainer: gets this callback.
        record: receives the rows.
        evaluate: evaluates a model on the held-out items.
        watcher: receives progress and messages.
        notes: notes of the checkpoint to resume from, default ones at the start; with the run's origin.
    """

    def __init__(
        self,
        trainer: Any,
        record: RunRecord,
        evaluate: Callable[[Any], Evaluation],
        watcher: Watcher,
        notes: RunNotes,
    ) -> None:
        self.trainer, self.record, self.evaluate, self.watcher = trainer, record, evaluate, watcher
        self.settings: TrainSettings = trainer.settings
        self.tally = trainer.tallies["record"] = Tally()
        self.carried: dict[str, list[float]] = dict(notes.tally) if current().is_main else {}
        self.clock = Stopwatch(notes.elapsed)
        self.other_load = OtherLoad()
        reset_peak()
        self.stop_asked = False
        self._notes, self._evaluated = notes, notes.evaluated
        self._rate = 0.0
        for callback in list(trainer.callback_handler.callbacks):
            if type(callback).__name__ in ("PrinterCallback", "ProgressCallback"):
                trainer.remove_callback(callback)
        trainer.add_callback(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Evaluate a new run before its first step."""
        self.clock.stop()
        self.watcher.begin("Training", self.settings.steps)
        self.watcher.advance(state.global_step)
        if state.global_step == 0:
            self._evaluate(0)
        self.clock.start()
        return control

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Note the learning rate of this step, before the scheduler changes it."""
        self._rate = self.trainer._get_learning_rate()
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Evaluate and request a checkpoint when due."""
        step, last = state.global_step, state.global_step >= self.settings.steps
        self.clock.stop()
        self.watcher.advance(1)
        if step % self.settings.eval_every == 0 or last:
            self._evaluate(step)
        if current().world > 1:  # all processes stop after the same step
            flag = torch.tensor(float(self.stop_asked), device=self.trainer.args.device)
            self.stop_asked = bool(any_process(flag))
        control.should_training_stop |= self.stop_asked
        control.should_save = step % self.settings.save_every == 0 or last or self.stop_asked
        if not control.should_save:
            self.clock.start()
            return control
        if args.should_save:
            begin_checkpoint(self.record.folder / f"checkpoint-{step}")
        return control

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Seal the checkpoint, and remove those that are no longer kept."""
        sums = self._gathered(self._means(reset=False))
        current().wait()  # until every process has written its part
        if args.should_save:
            checkpoint = self.record.folder / f"checkpoint-{state.global_step}"
            self.record.keep_in(checkpoint)
            changes = {"elapsed": self.clock.elapsed, "tally": sums, "evaluated": self._evaluated}
            seal(checkpoint, self._notes.model_copy(update=changes).model_dump())
            if self.settings.keep_checkpoints is not None:
                drop_checkpoints(self.record.folder, self.settings.keep_checkpoints)
        self.clock.start()
        return control

    def _evaluate(self, step: int) -> None:
        evaluation = self.evaluate(self.trainer.accelerator.unwrap_model(self.trainer.model))
        means = self._gathered(self._means(reset=True))
        seconds, steps = self.clock.lap(), step - self._evaluated
        self._evaluated = step
        line = [f"step {step}: validation {evaluation.loss:.4f}"]
        line += [f"{'train' if name == 'ce' else name} {total / n:.4f}" for name, (total, n) in means.items()]
        line += evaluation.shown
        facts: list[tuple[str, str, float, str]] = []
        if step:
            facts.append(("learning_rate", "value", self._rate, "1"))
        if steps and seconds > 0:
            speed, unit = steps * self.settings.units_per_step / seconds, f"{self.settings.unit}/s"
            facts.append(("throughput", "mean", speed, unit))
            line.append(f"{speed:,.0f} {unit}")
        facts.append(("elapsed", "value", self.clock.elapsed, "s"))
        facts.append(("peak_memory", "value", run_peak() / 2**20, "MiB"))
        facts.append(("other_load", "value", self.other_load.share(), "1"))
        if self.trainer.args.should_save:
            self.record.add(step, evaluation, means, facts)
            self.record.results().save(self.record.folder)
        if self.settings.report_to:
            due = self.trainer.control.should_log
            self.trainer.log(tracked(evaluation, means))
            self.trainer.control.should_log = due  # of this step's losses; a log resets it
        self.watcher.say("  ".join(line))

    def _means(self, reset: bool) -> dict[str, list[float]]:
        """Part of the loss -> [sum, count] since the last evaluation, including the time before a resumption."""
        for name, (total, count) in self.tally.take().items():
            before = self.carried.get(name, [0.0, 0.0])
            self.carried[name] = [before[0] + total, before[1] + count]
        means = self.carried
        if reset:
            self.carried = {}
        return means

    def _gathered(self, means: dict[str, list[float]]) -> dict[str, list[float]]:
        """Sum `means` over all processes."""
        everyone = current().gather(means)
        names = list(dict.fromkeys(name for part in everyone for name in part))
        return {n: [sum(part.get(n, [0.0, 0.0])[i] for part in everyone) for i in (0, 1)] for n in names}


@contextmanager
def stopping(conductor: Conductor) -> Iterator[None]:
    """On SIGTERM, end the run after the current step."""

    def ask(number: int, frame: FrameType | None) -> None:
        conductor.stop_asked = True

    try:
        before = signal.signal(signal.SIGTERM, ask)
    except ValueError:  # only the main thread can set signal handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
