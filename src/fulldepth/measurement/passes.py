"""Forward pass over the data, which updates every measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fulldepth.data import Batch
from fulldepth.distributed import Processes
from fulldepth.errors import FulldepthError
from fulldepth.execution import COEFFICIENTS, Activations, Verified, body_inputs, capture, feed_projections
from fulldepth.execution.batching import model_inputs
from fulldepth.hf import Classifier, DetectionHeads
from fulldepth.measurement.plan import Plan
from fulldepth.measurement.reading import LensReader
from fulldepth.measurement.subject import Subject
from fulldepth.measurement.tokens import POOLED, counted
from fulldepth.metrics import Detections, Observation, Readout, SpectralNorm
from fulldepth.settings.measure import MeasureSettings

SIMILARITY = {"displacement", "jump_rate", "cosine"}
LENS = {"lens_accuracy", "lens_loss", "saturation", "effective_depth"}
"""Measures that share a computation, whose time is reported under one name."""


@dataclass
class Clock:
    """Seconds by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time spent inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass
class Pass:
    """Results of one pass over the data besides the accumulators."""

    clock: Clock
    grid: dict[str, object] | None = None
    lens_error: dict[str, float] | None = None
    """Error of the lens's products; None if they have the model's precision."""
    router_tokens: dict[str, object] | None = None
    """Nearest tokens of dynamic routers; from the weights, not from the data."""


@torch.inference_mode()
def run_pass(
    subject: Subject,
    plan: Plan,
    settings: MeasureSettings,
    process: Processes,
    *,
    reference: Verified | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> Pass:
    """Run this process's share of the batches through the model and every accumulator.

    Args:
        subject: model and data.
        plan: the measures, updated in place.
        settings: batch size, lens sampling, grid.
        process: this process.
        reference: the second model of MMD.
        advance: called with the number of sequences completed, for a progress bar.

    Raises:
        FulldepthError: if an activation is NaN or infinite.
    """
    result = Pass(Clock())
    reader = LensReader(subject, settings, process) if plan.measures.keys() & LENS else None
    sites = plan.sites | {"residual"}
    with ExitStack() as stack:
        device = plan.setup.device
        activations = stack.enter_context(capture(subject.anatomy, sites, stacked=device))
        other = stack.enter_context(capture(reference.anatomy, ["residual"], stacked=device)) if reference else None
        for batch in subject.sequences.batches(settings.batch_size, process.rank, process.world):
            inputs = model_inputs(batch.inputs, subject.device, subject.checkpoint.model.dtype)
            with result.clock("forward"):
                subject.anatomy.runner(**body_inputs(subject.anatomy, inputs))
            with result.clock("states"):
                states = {site: activations.stack(site, device) for site in sites - COEFFICIENTS.keys()}
                coefficients = {site: activations.coefficients(site) for site in sites & COEFFICIENTS.keys()}
            activations.clear(keep_stacks=batch.masked_inputs is None)
            if reference is not None and other is not None:
                with result.clock("forward (reference)"):
                    reference.anatomy.runner(**body_inputs(reference.anatomy, inputs))
                states["reference"] = other.stack("residual", device)
                other.clear()
            read, inner = _read_by_lens(subject, plan, batch, states, activations, result.clock)
            observation = observe(subject, batch, states, read, reader, inner)
            observation.coefficients = coefficients
            feed(plan, observation, result.clock)
            observation.__dict__.clear()  # measures keep the object to recognise it, which would keep its tensors
            advance(len(batch))
    if reader is not None:
        result.grid, result.lens_error = reader.grid(), reader.measured_error()
    return result


def _read_by_lens(
    subject: Subject, plan: Plan, batch: Batch, states: dict[str, Tensor], activations: Activations, clock: Clock
) -> tuple[Tensor | None, Tensor | None]:
    """[L+1, B, T, D] residual stream that the lens reads, of the text or of a second pass over masked text, and
    [L, B, T, D] the stream after attention, None unless the lens reads it.

    Both None for a masked language model if no measure reads predictions.
    """
    sites = ("residual", *(site for site in plan.setup.lens_sites if site != "residual"))
    if batch.masked_inputs is None:
        return states["residual"], states["attention_output"] if len(sites) > 1 else None
    if not plan.masked_pass:
        return None, None
    inputs = model_inputs(batch.masked_inputs, subject.device, subject.checkpoint.model.dtype)
    with clock("forward (masked)"):
        subject.anatomy.runner(**body_inputs(subject.anatomy, inputs))
    read = [activations.stack(site, plan.setup.device) for site in sites]
    activations.clear(keep_stacks=False)
    return read[0], read[1] if len(read) > 1 else None


def observe(
    subject: Subject,
    batch: Batch,
    states: dict[str, Tensor],
    read: Tensor | None,
    reader: LensReader | None,
    inner: Tensor | None = None,
) -> Observation:
    """The observation that accumulators receive for one batch.

    Args:
        subject: model and data.
        batch: the sequences.
        states: site -> activations of the unmasked text.
        read: `[L+1, B, T, D]` residual stream that the lens reads; None = no lens.
        reader: applies the lens; None = no lens.
        inner: `[L, B, T, D]` stream after attention, if the lens reads it.

    Raises:
        FulldepthError: if an activation is NaN or infinite.
    """
    residual = states["residual"]
    _check_finite(batch, residual, read)
    device = residual.device
    if batch.attention_mask is None:
        mask = torch.ones(residual.shape[1:3], dtype=torch.bool, device=device)
    else:
        mask = batch.attention_mask.to(device)
    observation = Observation(
        states=states,
        attention_mask=mask,
        counted=counted(subject.policy, mask, batch.token_ids, subject.eos, subject.leading),
        pooled=subject.policy in POOLED,
        sequence=batch.sequence.to(device),
        labels=batch.labels,
        words=batch.words,
    )
    classifier = subject.verified.classifier
    if subject.anatomy.task == "detection" and classifier is not None:
        observation.detections = detections(classifier, residual, batch.objects)
    targets = batch.targets if classifier is not None and classifier.per_token else batch.labels
    if classifier is not None and targets is not None and read is not None and reader is not None:
        targets = targets.to(device)

        def readout() -> Readout:
            return reader.read(classifier, batch, read, targets, mask, inner)

        observation.readout = readout
    return observation


def detections(classifier: Classifier, residual: Tensor, objects: Sequence[Mapping[str, Tensor]] | None) -> Detections:
    """Classes and boxes of layers 1..L of a detector, from its residual stream `[L+1, B, Q, D]`."""
    heads = DetectionHeads(classifier)
    where = classifier.device or residual.device
    depth = len(residual) - 1
    read = [heads.read(residual[layer].to(where), layer) for layer in range(1, depth + 1)]
    return Detections(torch.stack([logits for logits, _ in read]), torch.stack([boxes for _, boxes in read]), objects)


def _check_finite(batch: Batch, *states: Tensor | None) -> None:
    """Raise if states of a batch are NaN or infinite."""
    for values in states:
        if values is None or bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all()):
            continue
        raise FulldepthError(
            f"Activations are NaN or infinite in sequences {int(batch.sequence[0])}..{int(batch.sequence[-1])}; "
            "the weights are broken or the precision is too low (try --dtype float32)."
        )


def feed(plan: Plan, observation: Observation, clock: Clock) -> None:
    """Update every accumulator; shared computations run first and are timed under their own name."""
    names = plan.measures.keys()
    if names & SIMILARITY:
        with clock("similarity (shared)"):
            _ = observation.cosines
    if names & LENS:
        with clock("lens (shared)"):
            _ = observation.lens
    for name, measure in plan.measures.items():
        if "weights" not in measure.needs:
            with clock(name):
                measure.update(observation)


def weigh(subject: Subject, plan: Plan, process: Processes, clock: Clock) -> None:
    """Compute the measures of weights; the matrices are divided among the processes."""
    for name, measure in plan.measures.items():
        if not isinstance(measure, SpectralNorm):
            continue
        with clock(name):
            unreadable = feed_projections(measure, subject.anatomy, process.rank, process.world)
        if unreadable:
            reason = f"{len(unreadable)} weights are offloaded, packed or of unknown form (first: {unreadable[0]})"
            plan.left_out.append({"measure": f"{name} (in part)", "reason": reason})
