"""The forward passes of a measurement: every batch through the model, the lens and every accumulator."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulldepth.core.distributed import Processes
from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.data import Batch
from fulldepth.execution import COEFFICIENTS, Verified, capture
from fulldepth.hf import DetectionHeads, all_finite
from fulldepth.measurement import tokens
from fulldepth.measurement.lens_reader import LensReader
from fulldepth.measurement.plan import MeasurePlan
from fulldepth.measurement.weights import feed_projections
from fulldepth.metrics import Detections, LinearMaps, Observation, SpectralNorm
from fulldepth.settings.measure import LINEAR_LENS, PLAIN_LENS, MeasureSettings
from fulldepth.subject import Subject

SIMILARITY = {"displacement", "jump_rate", "cosine"}
LENS = {*PLAIN_LENS, *LINEAR_LENS, "lens_f1"}
"""Measures that share a computation, whose time is reported under one name."""


ESTIMATED = 15.0
"""Seconds from which the time after the first batch is stated."""


class Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time spent inside."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


@torch.inference_mode()
def run_pass(
    subject: Subject,
    plan: MeasurePlan,
    settings: MeasureSettings,
    process: Processes,
    clock: Clock,
    *,
    reference: Verified | None = None,
    maps: LinearMaps | None = None,
    watcher: Watcher,
) -> dict[str, Any] | None:
    """Run this process's share of the batches through the model and every accumulator.

    Args:
        subject: model and data.
        plan: the measures, updated in place.
        settings: batch size, lens sampling, grid.
        process: this process.
        clock: adds the time of every part.
        reference: the second model of MMD.
        maps: of the linear lens; None = it is not measured.
        watcher: receives progress, in layers of sequences, and after the first batch an estimate of the time until all
            is written.

    Returns:
        The lens grid, if there is one.

    Raises:
        FulldepthError: if an activation is NaN or infinite.
    """
    share = subject.sequences.groups(settings.batch_size)[process.rank :: process.world]
    layers = subject.anatomy.num_layers + 1
    sequences = sum(map(len, share))
    watcher.begin(f"Measuring {Path(subject.checkpoint.name).name}, layers of sequences", layers * sequences)
    start = time.perf_counter()
    reader = LensReader(subject, settings, process, maps) if plan.measures.keys() & LENS else None
    sites = plan.sites | {"residual"}
    device = plan.setup.device
    with ExitStack() as stack:
        activations = stack.enter_context(capture(subject.anatomy, sites, stacked=device))
        other = stack.enter_context(capture(reference.anatomy, ["residual"], stacked=device)) if reference else None
        for number, batch in enumerate(subject.sequences.batches(settings.batch_size, process.rank, process.world)):
            progress = StepProgress(watcher, layers, len(batch))
            inputs = subject.inputs(batch.inputs)
            with clock("forward"):
                subject.anatomy.run(inputs)
            with clock("states"):
                states = {site: activations.stack(site, device) for site in sites - COEFFICIENTS.keys()}
                coefficients = {site: activations.coefficients(site) for site in sites & COEFFICIENTS.keys()}
            activations.clear(keep_stacks=batch.masked_inputs is None)
            if reference is not None and other is not None:
                with clock("forward (reference)"):
                    reference.anatomy.run(inputs)
                states["reference"] = other.stack("residual", device)
                other.clear()
            read = states["residual"] if batch.masked_inputs is None else None
            if batch.masked_inputs is not None and plan.masked_pass:
                inputs = subject.inputs(batch.masked_inputs)
                with clock("forward (masked)"):
                    subject.anatomy.run(inputs)
                read = activations.stack("residual", device)
                activations.clear(keep_stacks=False)
            observation = observe(subject, plan.counting, batch, states, read, reader, progress.advance)
            observation.coefficients = coefficients
            feed(plan, observation, clock)
            observation.__dict__.clear()  # measures keep the object to recognise it, which would keep its tensors
            progress.finish()
            if number == 0:
                left = (time.perf_counter() - start) * (sequences / len(batch) - 1)
                left += sum(measure.forecast() for measure in plan.measures.values())
                if left >= ESTIMATED:
                    rest = sequences - len(batch)
                    span = timedelta(seconds=round(left))
                    then = f"the other {rest:,} of {sequences:,} sequences, the statistics and the page"
                    watcher.say(f"About {span} to the end: {then if rest else 'the statistics and the page'}.")
    return None if reader is None else reader.grid()


@dataclass
class StepProgress:
    """Progress of a part of the work in steps, which it may report: layers that the lens reads, parts of CKA."""

    watcher: Watcher
    left: int
    """Steps that are not done yet."""
    size: int = 1
    """What each counts on the bar, such as the sequences of a batch."""

    def advance(self, steps: int = 1) -> None:
        """Some steps are done."""
        self.left -= steps
        self.watcher.advance(self.size * steps)

    def finish(self) -> None:
        """The part is done, also where it has reported nothing."""
        if self.left:
            self.advance(self.left)


def observe(
    subject: Subject,
    counting: tokens.Counting,
    batch: Batch,
    states: dict[str, Tensor],
    read: Tensor | None,
    reader: LensReader | None,
    advance: Callable[[], None],
) -> Observation:
    """The observation that accumulators receive for one batch.

    Args:
        subject: model and data.
        counting: which positions count.
        batch: the sequences.
        states: site -> activations of the unmasked text.
        read: `[L+1, B, T, D]` residual stream that the lens reads; None = no lens.
        reader: applies the lens; None = no lens.
        advance: called after each layer that the lens has read.

    Raises:
        FulldepthError: if an activation is NaN or infinite.
    """
    residual = states["residual"]
    classifier = subject.verified.classifier
    check_finite([residual] if read is None or read is residual else [residual, read], batch)
    device = residual.device
    mask = batch.mask(residual.shape[2], device)
    observation = Observation(
        states=states,
        attention_mask=mask,
        counted=tokens.counted_positions(counting.policy, mask, batch.token_ids, counting.eos, counting.leading),
        pooled=counting.policy in tokens.POOLED,
        sequence=batch.sequence.to(device),
        labels=batch.labels,
        words=batch.words,
    )
    if subject.anatomy.task == "detection" and classifier is not None:
        heads = DetectionHeads(classifier)
        where = classifier.device or device
        read_layers = [heads.read(state.to(where), layer) for layer, state in enumerate(residual[1:], start=1)]
        logits, boxes = (torch.stack(parts) for parts in zip(*read_layers, strict=True))
        observation.detections = Detections(logits, boxes, batch.objects)
    targets = batch.targets if classifier is not None and classifier.per_token else batch.labels
    if classifier is not None and targets is not None and read is not None and reader is not None:
        targets = targets.to(device)
        observation.readout = partial(reader.read, classifier, batch, targets, mask, read, advance)
        if reader.maps is not None:
            observation.linear_readout = partial(reader.read_linear, classifier, batch, targets, read)
    return observation


def check_finite(states: Sequence[Tensor], batch: Batch) -> None:
    """Refuse states of a batch that are NaN or infinite."""
    for values in states:
        if not all_finite(values):
            raise FulldepthError(
                f"Activations are NaN or infinite in sequences {int(batch.sequence[0])}..{int(batch.sequence[-1])}; "
                "the weights are broken or the precision is too low (try --dtype float32)."
            )


def feed(plan: MeasurePlan, observation: Observation, clock: Clock) -> None:
    """Update every accumulator; shared computations run first and are timed under their own name."""
    names = plan.measures.keys()
    if names & SIMILARITY:
        with clock("similarity (shared)"):
            _ = observation.cosines
    if names & LENS:
        with clock("lens (shared)"):
            _ = observation.lens
    if names & {*LINEAR_LENS}:
        with clock("linear lens (shared)"):
            _ = observation.linear_lens
    for name, measure in plan.measures.items():
        if not {"weights", "interventions"} & measure.needs:
            with clock(name):
                measure.update(observation)


def add_spectral_norms(
    subject: Subject, plan: MeasurePlan, process: Processes, clock: Clock, advance: Callable[[int], None]
) -> None:
    """Compute the spectral norms; the matrices are divided among the processes. `advance` counts matrices."""
    if isinstance(norms := plan.measures.get("spectral_norm"), SpectralNorm):
        with clock("spectral_norm"):
            unreadable = feed_projections(norms, subject.anatomy, process.rank, process.world, advance)
        if unreadable:
            reason = f"{len(unreadable)} weights are offloaded, packed or of unknown form (first: {unreadable[0]})"
            plan.left_out.append({"measure": "spectral_norm (in part)", "reason": reason})
