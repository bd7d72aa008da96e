"""Floating-point operations of early exit, counted while a batch runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from fulldepth.early_exit.rules import Exit
from fulldepth.early_exit.running import EarlyExit
from fulldepth.hf import frozen


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Operations of an attention, from the shapes of its inputs."""
    return int(sdpa_flop_count(query, key, value))


def _grouped(states: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Operations of a grouped product `[S, m] x [E, m, n]`, in which each row meets one of E matrices."""
    return 2 * int(states[0]) * int(states[1]) * int(weights[-1])


KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._grouped_mm: _grouped,
}
"""Kernels that torch's counter leaves out: of attention, and of experts."""


@dataclass(frozen=True)
class SampleFlops:
    """Operations of one sample: matrix products and convolutions, a multiplication and an addition as two."""

    full: float
    """The model's own forward pass."""
    before: float
    """Everything before the first layer."""
    layers: tuple[float, ...]
    """Layers 1..L."""
    heads: tuple[float, ...]
    """The rule at layers 1..L: final norm and class head."""

    def share(self, exits: Tensor, exit: Exit) -> float:
        r"""Operations with early exit over those of the full model; above 1 if the heads cost more than is saved.

        .. math:: \frac{\sum_m n_m (F_0 + \sum_{l \le m} F_l + \sum_{e \le l \le m} H_l)}{F \sum_m n_m}

        :math:`n_m` samples leave after layer m, e is the first layer that may be left. 1 for the full model.

        Args:
            exits: `[L]` numbers of samples.
            exit: whose first layer is read.
        """
        if exit.is_full:
            return 1.0
        total, so_far = 0.0, self.before
        parts = zip(exits.tolist(), self.layers, self.heads, strict=True)
        for layer, (count, own, head) in enumerate(parts, start=1):
            so_far += own + (head if layer >= exit.min_layer or layer == len(self.layers) else 0.0)
            total += count * so_far
        return total / (float(exits.sum()) * self.full)


@torch.no_grad()
def flops_of(early: EarlyExit, inputs: dict[str, Tensor]) -> SampleFlops:
    """Count the operations of each part on a batch; padding counts as it is computed.

    Args:
        early: the model.
        inputs: a batch on the model's device.
    """
    with frozen(early.subject.anatomy.model):  # the counter marks the backward pass of parameters that modules read
        return _flops_of(early, inputs)


def _flops_of(early: EarlyExit, inputs: dict[str, Tensor]) -> SampleFlops:
    runner, anatomy = early.runner, early.subject.anatomy
    count = len(next(iter(inputs.values())))
    full, _ = _counted(partial(early.full, inputs))
    before, states = _counted(partial(runner.begin, inputs))
    layers, heads = [], []
    for layer in range(1, early.subject.num_layers + 1):
        own, output = _counted(partial(runner.run, layer, states))
        stream, states = anatomy.stream(output), anatomy.handed_on(output)
        head, _ = _counted(partial(early.logits, layer, stream, inputs))
        layers.append(own / count)
        heads.append(head / count)
    return SampleFlops(full / count, before / count, tuple(layers), tuple(heads))


def _counted(run: Callable[[], Any]) -> tuple[float, Any]:
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        result = run()
    return float(counter.get_total_flops()), result
