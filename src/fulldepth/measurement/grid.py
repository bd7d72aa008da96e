"""Lens grid of a few samples: the top token of every layer at every position, as plain data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulldepth.data import Batch, decode_ids
from fulldepth.execution import top_tokens
from fulldepth.measurement.subject import Subject
from fulldepth.metrics import saturation_layer

POSITIONS = 48
"""Maximum number of positions of a sample."""
LONGEST = 40
"""Maximum number of characters of a token."""


def lens_grid(
    subject: Subject, batch: Batch, attention_mask: Tensor, states: Tensor, samples: int
) -> dict[str, Any] | None:
    """Lens grid of the first sequences of a batch; None for models whose head does not predict tokens.

    Args:
        subject: model and data.
        batch: the sequences; for a masked language model, the masked ones.
        attention_mask: `[B, T]` bool, False = padding.
        states: `[L+1, B, T, D]` residual stream that the lens reads.
        samples: maximum number of sequences.
    """
    classifier = subject.verified.classifier
    text = batch.token_ids is not None and batch.targets is not None
    if classifier is None or not classifier.per_token or subject.anatomy.task not in ("causal-lm", "masked-lm"):
        return None
    if not text or subject.sequences.task != subject.anatomy.task:
        return None
    entries = []
    for index in range(min(samples, len(batch))):
        length = min(POSITIONS, int(attention_mask[index].sum()))
        start = int(attention_mask[index].int().argmax())
        shown = slice(start, start + length)
        top = top_tokens(classifier, states[:, index, shown])
        layers = saturation_layer(top.token[1:])
        entries.append(_entry(subject, batch, index, shown, top.token, top.probability, layers))
    return {"samples": entries}


def _entry(
    subject: Subject, batch: Batch, index: int, shown: slice, top: Tensor, probability: Tensor, layers: Tensor
) -> dict[str, Any]:
    """One sample as plain data."""
    assert batch.targets is not None
    inputs = batch.inputs if batch.masked_inputs is None else batch.masked_inputs
    ids = inputs["input_ids"][index, shown]
    targets = batch.targets[index, shown]
    rounded = torch.round(probability.double(), decimals=4).tolist()
    return {
        "title": f"Sequence {int(batch.sequence[index]) + 1}",
        "tokens": [show(subject.tokenizer, token) for token in ids.tolist()],
        "targets": ["" if token == -100 else show(subject.tokenizer, token) for token in targets.tolist()],
        "saturation": layers.tolist(),
        "grid": [
            [[show(subject.tokenizer, token), p] for token, p in zip(row, chances, strict=True)]
            for row, chances in zip(top.tolist(), rounded, strict=True)
        ],
    }


def show(tokenizer: Any, token: int) -> str:
    """A token as text, at most `LONGEST` characters; its id if there is no tokenizer."""
    if tokenizer is None:
        return f"#{token}"
    text = decode_ids(tokenizer, [token])
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
