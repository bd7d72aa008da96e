"""The Trainer callback of a run, with its record: progress, evaluation, result rows, checkpoints, a clean stop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pandas as pd
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fulldepth.distributed import any_process, current
from fulldepth.errors import one_line
from fulldepth.execution.latency import OtherLoad
from fulldepth.execution.memory import reset_peak, run_peak
from fulldepth.hf import ModelCard, begin_checkpoint, drop_checkpoints, seal
from fulldepth.losses import TERMS, Tally
from fulldepth.metrics.jump_rate import describe_jump
from fulldepth.progress import Watcher
from fulldepth.results import Finding, Results, finite, tabulate
from fulldepth.settings.train import TrainSettings
from fulldepth.training.evaluation import Evaluation, tracked
from fulldepth.training.folder import RECORD, RunNotes, step_of

OF_MODEL = {"ce": ("train_loss", "model"), "auxiliary": ("auxiliary_loss", "model")}
"""Part of the model's own loss -> measure and site; other parts are penalties."""

FINDINGS = {
    "validation_loss": ("validation_loss", ""),
    "validation_accuracy": (
        "validation_accuracy",
        "{value:.1%} of the validation rows are classified correctly at step {step:,}.",
    ),
    "validation_ap50": (
        "average_precision",
        "The last layer's average precision at an IoU of 0.5 is {value:.1%} at step {step:,}.",
    ),
    "train_loss": ("train_loss", ""),
    "zeta_L": ("jump_rate", ""),
    "throughput": ("throughput", "Training runs at {value:,.0f} {unit}."),
    "elapsed": ("elapsed", ""),
    "peak_memory": ("peak_memory", ""),
}
"""Name of a finding -> its measure, and what is said of it."""
LOADING = """\
from transformers import {auto}, {processing}
{registering}
model = {auto}.from_pretrained("PATH")
{name} = {processing}.from_pretrained("PATH")"""
AUTO = {"image-classification": "AutoModelForImageClassification", "detection": "AutoModelForObjectDetection"}
AUTO |= {"text-classification": "AutoModelForSequenceClassification"}
REGISTERING = "\nimport fulldepth.architectures  # registers depth_llama\n"
NAMES = {
    "validation_loss": "Validation loss",
    "validation_accuracy": "Validation accuracy",
    "zeta_L": "Jump rate of the last layer",
    "train_loss": "Training loss",
}


@dataclass
class RunRecord:
    """Result rows of a run by step, and the metadata of its results."""

    folder: Path
    meta: dict[str, Any]
    table: pd.DataFrame = field(default_factory=lambda: tabulate([], step=0))
    complete: bool = False
    """Whether the run has finished."""

    @classmethod
    def reopen(cls, folder: Path, meta: dict[str, Any], checkpoint: Path) -> RunRecord:
        """The record of an interrupted run as of a checkpoint."""
        rows = pd.read_parquet(checkpoint / RECORD)
        return cls(folder, meta, rows[rows.step <= step_of(checkpoint)].reset_index(drop=True))

    def keep_in(self, checkpoint: Path) -> None:
        """Write the rows and a model card into a checkpoint that is being saved."""
        self.table.to_parquet(checkpoint / RECORD, index=False)
        card_of(self.meta, headline(self.table), step_of(checkpoint)).write(checkpoint)

    def add(
        self,
        step: int,
        evaluation: Evaluation,
        means: Mapping[str, list[float]],
        facts: Sequence[tuple[str, str, float, str]],
    ) -> None:
        """Add the rows of one evaluation.

        Args:
            step: optimiser steps taken.
            evaluation: on the held-out data.
            means: part of the loss -> [sum, count] over the micro-batches since the last evaluation.
            facts: measure, statistic, value and unit of numbers of the run.
        """
        rows: list[Any] = [*evaluation.rows]
        for name, (total, count) in means.items():
            measure, site = OF_MODEL.get(name, ("penalty", name))
            unit = evaluation.rows[0].unit if name in ("ce", "aligned") else TERMS[name].unit if name in TERMS else "1"
            rows.append((measure, site, None, None, "mean", total / count, round(count), unit))
        for measure, statistic, value, unit in facts:
            rows.append((measure, "model", None, None, statistic, value, None, unit))
        new = tabulate(rows, step=step)
        self.table = new if self.table.empty else pd.concat([self.table, new], ignore_index=True)

    def results(self) -> Results:
        """The results so far."""
        return Results(self.table, finite({**self.meta, "complete": self.complete, "headline": headline(self.table)}))


class Stopwatch:
    """Measures training time between `start` and `stop`, added to the time of earlier processes."""

    def __init__(self, elapsed: float = 0.0) -> None:
        self.elapsed, self._lap = elapsed, elapsed
        self._since: float | None = None

    def stop(self) -> None:
        """Stop before an evaluation or a checkpoint."""
        if self._since is not None:
            self.elapsed += time.perf_counter() - self._since
            self._since = None

    def start(self) -> None:
        """Start when training begins or continues."""
        if self._since is None:
            self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds of training since the last lap; call it while stopped."""
        lap, self._lap = self.elapsed - self._lap, self.elapsed
        return lap


def headline(table: pd.DataFrame) -> dict[str, Finding]:
    """The findings of a run by name, as of the last evaluation."""
    if table.empty:
        return {}
    step = int(table.step.max())
    rows = table[(table.measure != "average_precision") | (table.statistic == "ap50")]
    last = {row.measure: row for row in rows[rows.step == step].sort_values("layer").itertuples()}  # deepest layers
    losses = table[table.measure == "validation_loss"].set_index("step")["value"].dropna()
    found: dict[str, Finding] = {}
    for name, (measure, sentence) in FINDINGS.items():
        row: Any = last.get(measure)
        if row is None or not math.isfinite(row.value):
            continue
        words = sentence.format(value=row.value, unit=row.unit, step=step)
        if name == "validation_loss":
            words = " ".join(f"The validation loss is {row.value:.3f} {row.unit.strip('1')} at step {step:,}".split())
            if step and 0 in losses:
                words += f", {losses[0]:.3f} before training"
            best = int(losses.index[int(losses.argmin())])
            words += f"; it was lowest at step {best:,} ({losses[best]:.3f})." if best != step else "."
        found[name] = Finding(float(row.value), row.unit, describe_jump(row.value) if name == "zeta_L" else words)
    return found


def card_of(meta: Mapping[str, Any], findings: Mapping[str, Finding], step: int) -> ModelCard:
    """The card of a checkpoint: recipe, method, data, and the findings of the last evaluation.

    Args:
        meta: metadata of the run's results.
        findings: by name.
        step: optimiser steps taken.
    """
    settings, model = meta["settings"], meta["model"]
    recipe, start = meta.get("recipe") or "settings of its own", settings["model"].get("checkpoint")
    task = settings.get("task", "causal-lm")
    items = step * settings["global_batch_size"]
    amount = ("Tokens", items * settings["sequence_length"]) if task == "causal-lm" else ("Examples", items)
    processing = "AutoTokenizer" if task in ("causal-lm", "text-classification") else "AutoImageProcessor"
    beginning = f"fine-tuned from `{one_line(start, 200)}`" if start else "trained from scratch"
    method = (
        f"A {model['class']} {beginning} with the method `{settings['method']}` of fulldepth (recipe: "
        f"{one_line(recipe, 100)}) on `{one_line(settings['data']['name'], 200)}`. {one_line(settings['about'], 400)}"
    )
    numbers = {
        NAMES[name]: f"{finding.value:.4g} {finding.unit}" for name, finding in findings.items() if name in NAMES
    }
    numbers |= {
        "Parameters": f"{model['parameters']:,}",
        "Optimiser steps": f"{step:,} of {settings['steps']:,}",
        amount[0]: f"{amount[1]:,}",
        "Seed": str(settings["seed"]),
    }
    data = settings["data"]
    held_out = one_line(data.get("validation") or f"a held-out part of {data['name']}", 200)
    return ModelCard(
        title=f"{one_line(recipe, 100)}, step {step:,}",
        method=method.strip(),
        numbers=numbers,
        loading=LOADING.format(
            registering=REGISTERING if "Depth" in model["class"] else "",
            auto=AUTO.get(task, "AutoModelForCausalLM"),
            processing=processing,
            name="tokenizer" if processing == "AutoTokenizer" else "processor",
        ),
        source=start,
        tags=[settings["method"]],
        notes=[f"Losses and the jump rate are those of the last evaluation, on {held_out}."] if findings else [],
    )


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
