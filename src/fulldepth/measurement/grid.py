"""Lens grid of a few samples: the top token of every layer at every position, as plain data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulldepth.data import Batch, decode_ids
from fulldepth.execution import TopTokens
from fulldepth.measurement.subject import Subject
from fulldepth.metrics import saturation_layer

SAMPLES = 3
"""Sequences shown, unless `grid_samples` gives another number."""
POSITIONS = 48
"""Maximum number of positions of a sample."""
LONGEST = 40
"""Maximum number of characters of a token."""


def shown_positions(subject: Subject, attention_mask: Tensor, samples: int) -> Tensor:
    """[B, T] bool: the first positions of the first sequences of a batch, which the lens grid shows.

    Args:
        subject: model and data; no position is shown of a model whose head does not predict tokens of this data.
        attention_mask: `[B, T]` bool, False = padding.
        samples: maximum number of sequences.
    """
    task = subject.anatomy.task
    if task not in ("causal-lm", "masked-lm", "seq2seq-lm") or subject.sequences.task != task:
        samples = 0
    shown = attention_mask & (attention_mask.long().cumsum(1) <= POSITIONS)
    return shown & (torch.arange(len(shown), device=shown.device) < samples)[:, None]


def grid_of(subject: Subject, batch: Batch, shown: Tensor, top: TopTokens) -> dict[str, Any] | None:
    """Lens grid as plain data; None for data without token ids or targets.

    Args:
        subject: model and data.
        batch: the sequences; for a masked language model, the masked ones.
        shown: `[B, T]` bool, from `shown_positions`.
        top: top tokens at the shown positions, in the order of the batch.
    """
    if batch.token_ids is None or batch.targets is None:
        return None
    lengths = [length for length in shown.sum(1).tolist() if length]
    parts = zip(top.token.split(lengths, 1), top.probability.split(lengths, 1), strict=True)
    return {
        "samples": [
            _entry(subject, batch, index, shown[index].cpu(), token, probability, saturation_layer(token[1:]))
            for index, (token, probability) in enumerate(parts)
        ]
    }


def _entry(
    subject: Subject, batch: Batch, index: int, shown: Tensor, top: Tensor, probability: Tensor, layers: Tensor
) -> dict[str, Any]:
    """One sample as plain data."""
    assert batch.targets is not None
    ids = batch.token_ids if batch.masked_inputs is None else batch.masked_inputs["input_ids"]
    assert ids is not None
    ids = ids[index, shown]
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
