"""The whole tool in one command: train a small Llama on the built-in corpus, then measure its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers import logging as transformers_logging

from fulldepth.data import builtin_texts, open_source, prepare, train_tokenizer
from fulldepth.errors import FulldepthError
from fulldepth.measure import MeasureSettings, Watcher, measure_into
from fulldepth.results import Results

LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH, BATCH = 12, 192, 6, 512, 4096, 128, 16
"""Small enough for two cores and a few minutes, deep enough that layers have something to share out."""
MOMENTS = (0.04, 0.12, 0.3, 0.6, 1.0)
"""Shares of the training after which a checkpoint is kept: close together where most changes."""
MODEL, RESULTS = "model", "results"
"""Sub-folders of the output: the training run, and what was measured."""


def demo(output: str | Path, *, steps: int = 200, seed: int = 0, watcher: Watcher | None = None) -> Results:
    """Train, keep five checkpoints, measure them all on text that was not trained on.

    A demo that was interrupted goes on where it stopped.

    Args:
        output: folder for `model/checkpoint-N` and `results/`.
        steps: optimiser steps of 16 x 128 tokens.
        seed: of the weights and the order of the data.
        watcher: told what happens.

    Raises:
        FulldepthError: if `steps` is too small for five checkpoints, or the folder holds another run.
    """
    if steps < 25:
        raise FulldepthError(f"The demo keeps {len(MOMENTS)} checkpoints and needs at least 25 steps, got {steps}.")
    watcher = watcher or Watcher()
    run = Path(output) / MODEL
    train(run, steps, seed, watcher)
    settings = MeasureSettings(
        max_sequences=96,
        sequence_length=LENGTH,
        batch_size=BATCH,
        entropy_sequences=16,
        words=["is", "are", "was", "were"],
        seed=seed,
    )
    return measure_into(run, "corpus:builtin", Path(output) / RESULTS, settings, watcher=watcher)


def train(run: Path, steps: int, seed: int, watcher: Watcher) -> None:
    """Train the small Llama, unless its last checkpoint is there already."""
    moments = sorted({max(1, round(share * steps)) for share in MOMENTS})
    kept = {step: run / f"checkpoint-{step}" for step in moments}
    if (kept[moments[-1]] / "trainer_state.json").is_file():  # what the Trainer writes last
        watcher.say(f"{run} is trained already.")
        return
    others = [p.name for p in run.glob("checkpoint-*") if p not in kept.values()]
    if others:
        raise FulldepthError(f"{run} holds checkpoints of another run ({others[0]}); choose another --output.")
    done = [step for step, folder in kept.items() if (folder / "trainer_state.json").is_file()]
    tokenizer = train_tokenizer(builtin_texts("train"), vocab_size=VOCABULARY)
    source = open_source("corpus:builtin/train")
    windows = prepare(
        source, task="causal-lm", tokenizer=tokenizer, max_sequences=steps * BATCH, sequence_length=LENGTH
    )
    rows = [{"input_ids": ids, "labels": ids} for batch in windows.batches(BATCH) for ids in batch.inputs["input_ids"]]
    set_seed(seed)
    model = LlamaForCausalLM(_config(tokenizer))
    watcher.say(
        f"Training a Llama of {LAYERS} layers, {model.num_parameters() / 1e6:.1f} M parameters, on "
        f"{len(rows) * LENGTH / 1e6:.2f} M tokens."
    )
    watcher.begin("Training", steps)
    watcher.advance(max(done, default=0))
    with _quiet_library():
        trainer = Trainer(
            model,
            _arguments(run, steps, seed),
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[Moments(moments, watcher)],
        )
        trainer.pop_callback(_printer(trainer))
        trainer.train(resume_from_checkpoint=str(kept[max(done)]) if done else None)


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Silence the Trainer's own logs and bars; the demo has a bar of its own."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


class Moments(TrainerCallback):
    """Keeps a checkpoint at the chosen steps, and moves the progress bar."""

    def __init__(self, moments: list[int], watcher: Watcher) -> None:
        self.moments, self.watcher = moments, watcher

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """After each optimiser step."""
        self.watcher.advance(1)
        control.should_save = state.global_step in self.moments
        return control


def _printer(trainer: Trainer) -> type:
    """The callback that prints logs; the progress bar says enough."""
    names = {type(callback).__name__: type(callback) for callback in trainer.callback_handler.callbacks}
    return names["PrinterCallback"]


def _config(tokenizer: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _arguments(run: Path, steps: int, seed: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(run),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 15),
        weight_decay=0.1,
        adam_beta2=0.95,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
    )
