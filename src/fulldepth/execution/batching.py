"""Batching that does not change results: whether a model's batches may hold padding or several sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from fulldepth.core.errors import FulldepthError
from fulldepth.data import Sequences
from fulldepth.data.batches import Batching
from fulldepth.execution.hooks import capture
from fulldepth.hf import Anatomy, Classifier
from fulldepth.hf.rounding import TOLERANCE, relative_error

STRICTNESS: tuple[Batching, ...] = get_args(Batching)


def model_inputs(inputs: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """A batch's inputs on the model's device, images in the model's precision."""
    return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in inputs.items()}


@torch.no_grad()
def batched(anatomy: Anatomy, sequences: Sequences, device: torch.device) -> tuple[Sequences, str | None]:
    """The sequences, batched so that this model's results do not change, and a note if batching is restricted.

    The states of a sequence run alone, and the logits of a head that pools them itself, are compared with those in a
    batch with another one, with and without padding. Restrictions required by one model do not affect the results of
    another, so they accumulate over several calls.

    FNet mixes padding into the tokens, and so do ConvBERT's convolutions; capacity limits of experts mix sequences;
    XLNet's head reads the last position, whether it is padding or not.

    Args:
        anatomy: a verified model in evaluation mode.
        sequences: the data; its shortest and longest sequences are tried.
        device: device of the model's inputs.

    Raises:
        FulldepthError: if two passes over the same batch differ: the model draws random numbers.
    """
    kind = type(anatomy.model).__name__
    lengths = sequences.lengths
    # all sequences, or the images of the most frequent shape: a batch holds no others
    alike = max(replace(sequences, batching="padded").groups(len(sequences)), key=len)
    shortest, longest = (extreme(alike, key=lengths.__getitem__) for extreme in (min, max))
    alone = _results(anatomy, sequences, [shortest], device)

    def change(*others: int) -> float:
        """The relative change of the states in a batch with others; refuses a model that draws numbers."""
        difference = max(map(_difference, _results(anatomy, sequences, [shortest, *others], device), alone))
        if difference and (not others or change()):
            raise FulldepthError(
                f"Two passes of {kind} over the same input differ (by {difference:.1e}, relative): it draws random "
                "numbers also in evaluation mode, as models that mask their input do. Switch that off in its "
                "configuration."
            )
        return difference

    equal_length = [index for index in alike if lengths[index] == lengths[shortest] and index != shortest]
    batching: Batching = "padded"
    sentence = None
    if equal_length and (difference := change(equal_length[0])):
        batching = "single"
        sentence = (
            f"The results of {kind} depend on the other sequences of a batch (by {difference:.1e}, relative), so each "
            "sequence is run alone."
        )
    elif lengths[longest] != lengths[shortest] and (difference := change(longest)):
        batching = "equal"
        sentence = (
            f"The results of {kind} change when a sequence is padded (by {difference:.1e}, relative), so a batch holds "
            "sequences of one length only."
        )
    elif not equal_length and lengths[longest] == lengths[shortest]:  # a single sequence
        change()
    return replace(sequences, batching=max(batching, sequences.batching, key=STRICTNESS.index)), sentence


def _results(anatomy: Anatomy, sequences: Sequences, indices: Sequence[int], device: torch.device) -> list[Tensor]:
    """Run these sequences in one batch, and return the results of the first: its residual stream `[L+1, T, D]`, and the
    logits `[1, 1, C]` of a head that pools inside.
    """
    batch = sequences.collate(indices)
    with capture(anatomy, ["residual"]) as activations:
        anatomy.run(model_inputs(batch.inputs, device, anatomy.model.dtype))
        states = activations.stack("residual")  # [L+1, B, T, D]
    mask = batch.mask(states.shape[2], states.device)
    logits = []
    if anatomy.head is not None and anatomy.head.pool == "inside":
        logits = [Classifier(anatomy).sequences(states[-1], mask)[None, :1]]
    return [states[:, 0, mask[0]], *logits]


def _difference(actual: Tensor, expected: Tensor) -> float:
    """The relative error of the states; 0 if rounding explains it.

    In full precision it is the largest error. In half precision, rounding can route single tokens to other experts,
    so it is the median over positions.
    """
    tolerance = TOLERANCE[expected.dtype]
    if expected.dtype in (torch.float32, torch.float64):
        errors = torch.tensor([relative_error(first, other) for first, other in zip(actual, expected, strict=True)])
        error = float(errors.max())
    else:
        actual = actual.double()
        expected = expected.double()
        norms = expected.norm(dim=-1).clamp(min=1e-30)
        error = float(((actual - expected).norm(dim=-1) / norms).median(dim=-1).values.max())
    return 0.0 if error <= tolerance else error
