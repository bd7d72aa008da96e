"""Layer-wise linear probes: fitted to the measured data, scored on another set, with the model frozen."""

from __future__ import annotations

import torch
from torch import Tensor

from fulldepth.data import Sequences
from fulldepth.errors import FulldepthError
from fulldepth.execution import body_inputs, capture
from fulldepth.execution.batching import batched, model_inputs
from fulldepth.execution.subject import sequences_for
from fulldepth.measurement.subject import MeasuredSubject
from fulldepth.measurement.tokens import counted
from fulldepth.metrics.base import Row
from fulldepth.metrics.separability import probe_accuracy
from fulldepth.settings.measure import MeasureSettings
from fulldepth.targets import IGNORE

MEASURE = "probe_accuracy"


def probe_rows(subject: MeasuredSubject, settings: MeasureSettings) -> list[Row]:
    """Accuracy of a linear probe on layers 0..L and its standard error; see `fulldepth.metrics.probe_accuracy`.

    A sample's feature is the mean of the residual stream over the tokens that count: as a rule one token ([CLS]) of a
    classifier.

    Args:
        subject: model and data; the probes are fitted to these data.
        settings: `probe_data` is the set on which they are scored.

    Raises:
        FulldepthError: if either set has no labels, or they have other classes.
    """
    other = sequences_for(subject.checkpoint, subject.anatomy, settings.probe_data, subject.tokenizer, settings)
    other, _ = batched(subject.anatomy, other, subject.device)
    own = subject.sequences
    for sequences in (own, other):
        if sequences.num_classes is None:
            raise FulldepthError(f"{sequences.name} has no labels; a linear probe needs them in both sets.")
    if own.class_names != other.class_names:
        raise FulldepthError(
            f"{own.name} and {other.name} have other classes ({', '.join(own.class_names[:6])} and "
            f"{', '.join(other.class_names[:6])}); a probe is fitted and scored on the same ones."
        )
    features, labels = _features(subject, own, settings)
    test_features, test_labels = _features(subject, other, settings)
    rows = []
    for layer in range(subject.anatomy.num_layers + 1):
        try:
            value, error = probe_accuracy(
                features[layer], labels, test_features[layer], test_labels, seed=settings.seed
            )
        except ValueError as problem:
            raise FulldepthError(
                f"No probe can be fitted to {own.name} and scored on {other.name}: {problem}."
            ) from None
        count = len(test_labels)
        rows.append(Row(MEASURE, "residual", layer, None, "mean", value, count, "1"))
        rows.append(Row(MEASURE, "residual", layer, None, "standard_error", error, count, "1"))
    return rows


@torch.no_grad()
def _features(subject: MeasuredSubject, sequences: Sequences, settings: MeasureSettings) -> tuple[Tensor, Tensor]:
    """[L+1, N, D] float32 features of the labelled samples, and their classes `[N]`; on the CPU."""
    features, labels = [], []
    with capture(subject.anatomy, ["residual"]) as activations:
        for batch in sequences.batches(settings.batch_size):
            if batch.labels is None:
                continue
            inputs = model_inputs(batch.inputs, subject.device, subject.checkpoint.model.dtype)
            subject.anatomy.body(**body_inputs(subject.anatomy, inputs))
            states = torch.stack([state.float().cpu() for state in activations["residual"]])  # [L+1, B, T, D]
            activations.clear()
            mask = batch.mask(states.shape[2])
            chosen = counted(subject.policy, mask, batch.token_ids, subject.eos, subject.leading)[..., None].float()
            labelled = batch.labels != IGNORE
            mean = (states * chosen).sum(2) / chosen.sum(1).clamp(min=1)
            features.append(mean[:, labelled])
            labels.append(batch.labels[labelled])
    return torch.cat(features, dim=1), torch.cat(labels)
