"""A step that is not finite never reaches the weights or a checkpoint, whether its flags are read at once or late.

CPUs do not run behind the host, so the late reading is switched on by hand (`guard.late`): everything but the stream's
event is what an accelerator does. The fused AdamW of CPUs skips a step by the same flag as that of accelerators.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fulldepth.errors import FulldepthError
from fulldepth.losses import Objective
from losses.trained_step import OneStep, arguments, build, collate, examples

MARK = 95
"""A sequence that begins with this token breaks the model."""


def fragile(where: str) -> Any:
    """A model whose layer 2 gives NaN, or a NaN gradient, for marked sequences."""
    model, marked = build("llama"), []

    def look(_: Any, args: Any, kwargs: Any) -> None:
        marked[:] = [bool(kwargs["input_ids"][0, 0] == MARK)]

    def spoil(_: Any, args: Any, output: Any) -> Any:
        state = output[0] if isinstance(output, tuple) else output
        if marked[0] and where == "loss":
            return state * torch.nan
        if marked[0] and state.requires_grad:
            state.register_hook(lambda gradient: gradient * torch.nan)
        return None

    model.register_forward_pre_hook(look, with_kwargs=True)
    model.model.layers[1].register_forward_hook(spoil)
    return model


def trainer(folder: Path, model: Any, steps: int, broken: int | None, fused: bool = True, **options: Any) -> OneStep:
    rows = examples("llama", 8)
    for row, example in enumerate(rows):
        example["input_ids"][0] = MARK if row + 1 == broken else 7
    kind = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    fixed = {"max_steps": steps, "per_device_train_batch_size": 1, "max_grad_norm": 1.0}
    return OneStep(
        model,
        arguments(str(folder), **{**fixed, **options}),
        train_dataset=rows,
        eval_dataset=rows[:2],
        data_collator=collate,
        objective=Objective(jump=1.0),
        optimizers=(kind, torch.optim.lr_scheduler.LambdaLR(kind, lambda _: 1.0)),
    )


@pytest.mark.parametrize(
    ("where", "late", "fused"),
    [("loss", False, True), ("loss", True, False), ("gradient", True, True)],
)
def test_the_weights_stay_those_before_the_broken_step(where: str, late: bool, fused: bool, tmp_path: Path) -> None:
    good = trainer(tmp_path / "good", fragile(where), 2, None, fused)
    good.train()
    model = fragile(where)
    broken = trainer(tmp_path / "bad", model, 6, 3, fused, save_strategy="steps", save_steps=2)
    broken.guard.late = late
    message = {
        "loss": r"Step 3: the loss is not finite. Terms: ce, jump. The first state .* layer 2\. The step was not taken",
        "gradient": r"Step 3: the loss is finite, but its gradient is not\. .* The step was not taken",
    }[where]
    with pytest.raises(FulldepthError, match=message):
        broken.train()
    assert broken.state.global_step == (3 if late and fused else 2)  # found while the next step ran
    for name, weight in good.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
    assert sorted(path.name for path in (tmp_path / "bad").glob("checkpoint-*")) == ["checkpoint-2"]
    broken.depth_objective.detach()
    again = trainer(tmp_path / "again", model, 1, None, fused)
    again.train()  # nothing is left on the model that would skip its steps
    assert not torch.equal(good.model.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("due", ["end", "save", "evaluation", "log"])
def test_nothing_is_done_with_a_step_that_is_not_known_to_be_finite(due: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "end": {"max_steps": 3},
        "save": {"save_strategy": "steps", "save_steps": 3},
        "evaluation": {"eval_strategy": "steps", "eval_steps": 3},
        "log": {"logging_strategy": "steps", "logging_steps": 3},
    }[due]
    broken = trainer(tmp_path, fragile("loss"), 6, 3, **options)
    broken.guard.late = True
    done: list[str] = []
    broken.evaluation_loop = lambda *_, **__: done.append("evaluated")  # type: ignore[method-assign, assignment]
    with pytest.raises(FulldepthError, match=r"Step 3: .* The step was not taken"):
        broken.train()
    assert broken.state.global_step == 3
    assert not done
    assert not list(tmp_path.glob("checkpoint-*"))
    assert not [line for line in broken.state.log_history if "loss" in line]
    assert not hasattr(broken.optimizer.optimizer, "found_inf")


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads out of tensors; on an accelerator each waits for the device.

    Those by which transformers chooses the kind of mask are its own."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += not any(frame.filename.endswith("masking_utils.py") for frame in traceback.extract_stack())
        return function(*args, **(kwargs or {}))


def test_a_step_reads_no_number(tmp_path: Path) -> None:
    counts = []
    for steps in (2, 4):
        run = trainer(tmp_path, build("llama"), steps, None, gradient_accumulation_steps=2)
        run.guard.late = True
        with Reads() as reads:
            run.train()
        counts.append(reads.count)
        assert run.state.global_step == steps
    assert counts[0] == counts[1]
