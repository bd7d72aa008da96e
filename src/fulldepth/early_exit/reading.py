"""One pass over the data: the last layer's classifier at every layer, for all rules and thresholds at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fulldepth.data import Batch, Sequences
from fulldepth.early_exit.readings import Readings
from fulldepth.early_exit.subject import Subject
from fulldepth.errors import FulldepthError
from fulldepth.execution import body_inputs, capture
from fulldepth.execution.decoding import certainty
from fulldepth.hf import Classifier
from fulldepth.metrics.reservoir import priority
from fulldepth.settings.exit import Rule
from fulldepth.targets import IGNORE

CHUNK_ELEMENTS = 1 << 23
"""Logits that exist at once."""


@torch.no_grad()
def read(
    subject: Subject,
    rules: Sequence[Rule],
    *,
    tokens: int | None,
    seed: int,
    advance: Callable[[int], None] = lambda done: None,
) -> Readings:
    """Run the data through the model once, and apply its classifier to all layers.

    Args:
        subject: model and data.
        rules: whose values are computed.
        tokens: most positions of a language model, a seeded sample; None = all.
        seed: of the sample.
        advance: called with the number of sequences completed.

    Raises:
        FulldepthError: if states are NaN or infinite.
    """
    highest = None if subject.classifies else sample_limit(subject.sequences, tokens, seed)
    parts: list[Readings] = []
    with capture(subject.anatomy, ["residual"]) as activations:
        for batch in subject.sequences.batches(subject.batch_size):
            inputs = subject.inputs(batch.inputs if batch.masked_inputs is None else batch.masked_inputs)
            subject.anatomy.body(**body_inputs(subject.anatomy, inputs))
            states = activations["residual"]
            if not all(bool(torch.isfinite(state.sum())) for state in states):
                raise FulldepthError(
                    "Activations are NaN or infinite; the weights are broken or the precision is too low (try --dtype "
                    "float32)."
                )
            parts.append(_read_batch(subject, batch, states, rules, highest, seed))
            activations.clear()
            advance(len(batch))
    return Readings.joined(parts)


def _read_batch(
    subject: Subject, batch: Batch, states: Sequence[Tensor], rules: Sequence[Rule], highest: int | None, seed: int
) -> Readings:
    """The readings of one batch of texts, or of labelled texts or images."""
    classifier = subject.classifier
    targets = batch.labels if subject.classifies else batch.targets
    assert targets is not None  # there are targets in the data
    chosen = targets != IGNORE
    if highest is not None:
        chosen &= priority(keys(targets, batch.sequence), seed) <= highest
    rows = chosen.nonzero()[:, 0]
    target = targets[chosen]
    mask = batch.attention_mask
    if mask is None:
        mask = torch.ones(states[0].shape[:2], dtype=torch.bool)
    mask = classifier.sample_mask(batch.inputs, mask)
    layers = []
    for layer, state in enumerate(states):
        where = chosen.to(state.device)
        if subject.classifies:
            logits = classifier.at(layer).sequences(state[where], mask[chosen].to(state.device))
            layers.append(_read_logits(logits, target, rules))
        else:
            head = classifier.at(layer)
            layers.append(_read_tokens(head, head.prepare(state[where]), target, rules))
    predictions, losses, values = zip(*layers, strict=True)
    columns = {rule: torch.stack([value[rule] for value in values]) for rule in values[0]}
    sequence = batch.sequence[rows]
    cluster = _clusters(subject.sequences, sequence)
    return Readings(torch.stack(predictions), columns, sequence, cluster, torch.stack(losses), target)


def _clusters(sequences: Sequences, sequence: Tensor) -> Tensor:
    """[N] cluster of each sample; that of its sequence where none is known."""
    return torch.tensor(sequences.clusters, dtype=torch.int64)[sequence] if sequences.clusters else sequence


_Read = tuple[Tensor, Tensor, dict[Rule, Tensor]]
"""Predictions, losses, and the values of the rules."""


def _read_tokens(classifier: Classifier, prepared: Tensor, target: Tensor, rules: Sequence[Rule]) -> _Read:
    """`_read_logits` of prepared states `[N, D']`, a part at a time."""
    if not len(prepared):
        empty = torch.zeros(0, dtype=torch.float64)
        return target, empty, {rule: empty for rule in rules if rule != "patience"}
    classes = classifier.logits(prepared[:1]).shape[-1]
    size = max(1, CHUNK_ELEMENTS // classes)
    parts = [
        _read_logits(classifier.logits(prepared[start : start + size]), target[start : start + size], rules)
        for start in range(0, len(prepared), size)
    ]
    return (
        torch.cat([part[0] for part in parts]),
        torch.cat([part[1] for part in parts]),
        {rule: torch.cat([part[2][rule] for part in parts]) for rule in parts[0][2]},
    )


def _read_logits(logits: Tensor, target: Tensor, rules: Sequence[Rule]) -> _Read:
    """Predictions, losses and certainties of logits `[N, C]`; on the CPU."""
    prediction = logits.argmax(-1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    picked = logits.gather(-1, target.to(logits.device)[:, None])[:, 0]
    loss = (logits.logsumexp(-1) - picked).double().cpu()
    values: dict[Rule, Tensor] = {rule: certainty(logits, rule).double().cpu() for rule in rules if rule != "patience"}
    return prediction.cpu(), loss, values


def sample_limit(sequences: Sequences, limit: int | None, seed: int) -> int | None:
    """Largest priority of the sampled positions; None = all positions with a target are read."""
    if limit is None or sequences.num_targets <= limit:
        return None
    smallest = torch.empty(0, dtype=torch.int64)
    for batch in sequences.batches(64):
        if batch.targets is not None:
            ranks = priority(keys(batch.targets, batch.sequence), seed)[batch.targets != IGNORE]
            smallest = torch.cat([smallest, ranks]).sort().values[:limit]
    return int(smallest[-1])


def keys(targets: Tensor, sequence: Tensor) -> Tensor:
    """[B, T] key of every position, unique over the data."""
    return (sequence.to(targets.device)[:, None] << 24) | torch.arange(targets.shape[1], device=targets.device)
