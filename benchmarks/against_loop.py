"""`DepthTrainer` against a loop in plain PyTorch that does the same arithmetic, step by step in turn.

The loop takes its step inside of a callback of the Trainer, after each of the Trainer's own steps. A Trainer's step is
all that passes from the end of one callback to the begin of the next: data, step, logs.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, TrainingArguments, default_data_collator, get_scheduler

from fulldepth.losses import DepthTrainer, Objective
from meters import now, seconds
from steps import Size, stock

RATE, WARM_UP = 1e-3, 2


class Loop:
    """AdamW, clipping and a linear schedule by hand; one step at a time."""

    def __init__(self, size: Size, data: list[dict[str, Tensor]], steps: int, jump: float | None, device: str) -> None:
        self.model, self.device = stock(size, device), device
        self.objective = None if jump is None else Objective(jump=jump).attach(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
        self.schedule = get_scheduler("linear", self.optimizer, num_warmup_steps=0, num_training_steps=steps)
        self.batches = iter(DataLoader(data, batch_size=size.batch, collate_fn=default_data_collator))  # type: ignore[arg-type]

    def step(self) -> None:
        """One optimiser step."""
        batch = {name: tensor.to(self.device) for name, tensor in next(self.batches).items()}
        outputs = self.model(**batch)
        loss = outputs.loss if self.objective is None else self.objective(outputs, batch)[0]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


class Turns(TrainerCallback):
    """Times the Trainer's steps and lets the loop take its own after each."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.trainer: list[float] = []
        self.bare: list[float] = []
        self._since: float | None = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After the Trainer's step, before its logs."""
        end = now(self.loop.device)
        if self._since is not None:
            self.trainer.append(end - self._since)
        taken = seconds(self.loop.step, self.loop.device)
        if self._since is not None:
            self.bare.append(taken)
        self._since = now(self.loop.device)


def against_loop(size: Size, steps: int, jump: float | None, device: str) -> tuple[list[float], float]:
    """Step by step, the Trainer's time over the loop's; and the largest difference of their weights in the end.

    Args:
        size: of model and batch.
        steps: that count.
        jump: weight of JREG in both; None = cross-entropy alone.
        device: "cpu" or "cuda".
    """
    total = steps + WARM_UP
    rows = replace(size, batch=total * size.batch).tokens("cpu")["input_ids"]
    data = [{"input_ids": row, "labels": row} for row in rows]
    turns = Turns(Loop(size, data, total, jump, device))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=total,
            per_device_train_batch_size=size.batch,
            learning_rate=RATE,
            train_sampling_strategy="sequential",
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device == "cpu",
            bf16=False,
        )
        trainer = DepthTrainer(
            stock(size, device),
            arguments,
            train_dataset=data,  # type: ignore[arg-type]
            callbacks=[turns],
            objective=None if jump is None else Objective(jump=jump),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    pairs = zip(trainer.model.parameters(), turns.loop.model.parameters(), strict=True)  # type: ignore[union-attr]
    apart = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
    times = zip(turns.trainer[WARM_UP - 1 :], turns.bare[WARM_UP - 1 :], strict=True)
    return [ours / theirs for ours, theirs in times], apart
