"""`fulldepth.measure`: reads the data once, and gives a table of what every layer does."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.data import MASKED_SHARE, Batch, Sequences
from fulldepth.distributed import Processes, processes
from fulldepth.errors import FulldepthError
from fulldepth.execution import COEFFICIENTS, Verified, body_inputs, capture, feed_projections, projection_names
from fulldepth.execution.batching import batched, model_inputs
from fulldepth.execution.memory import reset_peak, run_peak
from fulldepth.hf import DetectionHeads, StagedAnatomy, anatomy_candidates, evaluating, task_of, unwrapped
from fulldepth.hf.finder import stacks, towers
from fulldepth.measurement import tokens
from fulldepth.measurement.caveats import EMPTY, caveats, refuse_nothing, sampling
from fulldepth.measurement.headline import Clusters, headline
from fulldepth.measurement.lens_reader import LensReader
from fulldepth.measurement.plan import MeasurePlan, check_memory, make_plan
from fulldepth.measurement.probe import probe_rows
from fulldepth.measurement.routers import nearest_tokens, shares_of_heads
from fulldepth.measurement.stages import prepare_stages, rows_that_fit
from fulldepth.measurement.subject import MeasuredSubject, prepare_subject
from fulldepth.measurement.towers import Extra, measure_each, measure_towers
from fulldepth.metrics import Detections, Observation, Readout, Setup, SpectralNorm
from fulldepth.metrics.cosine import SITE
from fulldepth.progress import Watcher
from fulldepth.results import Results, finite, gathered, groups_entry, provenance, tabulate
from fulldepth.settings.measure import MeasureSettings
from fulldepth.subjects import open_checkpoint, prove, read_source, small_batch

SIMILARITY = {"displacement", "jump_rate", "cosine"}
LENS = {"lens_accuracy", "lens_loss", "saturation", "effective_depth"}
"""Measures that share a computation, whose time is reported under one name."""


def measure_once(
    model: str | Path | torch.nn.Module,
    data: Any,
    settings: MeasureSettings,
    watcher: Watcher,
    *,
    tokenizer: Any = None,
    stages: Sequence[torch.nn.Module | str] | None = None,
    head: torch.nn.Module | str | None = None,
) -> Results:
    """Measure one model; nothing is written. The arguments are those of `measure`."""
    with processes(settings.device) as process:
        if stages is None and head is None:
            return measure_with(model, data, settings, process, watcher, tokenizer=tokenizer)
        if stages is None or not isinstance(model, torch.nn.Module):
            raise FulldepthError("stages and head describe a loaded module: pass the module, and name its stages.")
        with evaluating(model):
            subject = prepare_stages(model, data, settings, stages=stages, head=head)
            return measure_subject(subject, settings, process, watcher)


def measure_with(
    model: str | Path | torch.nn.Module,
    data: Any,
    settings: MeasureSettings,
    process: Processes,
    watcher: Watcher,
    *,
    tokenizer: Any = None,
) -> Results:
    """Measure a checkpoint or a model of transformers, with the process group joined."""
    start = time.perf_counter()
    reset_peak()
    if isinstance(model, torch.nn.Module):
        model = unwrapped(model)
    device = process.device(settings.device)
    with evaluating(model) if isinstance(model, PreTrainedModel) else nullcontext():
        checkpoint = open_checkpoint(model, settings, device, settings.device_map)

        def measured(
            data: Any, settings: MeasureSettings, extra: Extra | None = None, start: float | None = None
        ) -> tuple[Results, MeasuredSubject]:
            subject = prepare_subject(checkpoint, data, settings, tokenizer=tokenizer, device=device)
            return measure_subject(subject, settings, process, watcher, start=start, extra=extra), subject

        if settings.tower is None and settings.anatomy is None and not isinstance(data, Sequences):
            data = read_source(data, settings)
            if data.captioned and towers(checkpoint.model):
                return measure_towers(checkpoint, data, settings, measured)
            names = stacks(checkpoint.model)
            if names and not task_of(checkpoint.model).endswith("-classification"):
                return measure_each(names, data, settings, measured)
        return measured(data, settings, start=start)[0]


def measure_subject(
    subject: MeasuredSubject,
    settings: MeasureSettings,
    process: Processes,
    watcher: Watcher,
    *,
    start: float | None = None,
    extra: Extra | None = None,
) -> Results:
    """Measure a verified model, in evaluation mode, on its data.

    Args:
        subject: model and data.
        settings: what to measure.
        process: this process.
        watcher: receives messages and progress.
        start: when loading began; None = now.
        extra: makes a measure beside those of the settings.
    """
    start = time.perf_counter() if start is None else start
    clock = Clock()
    reference = None if settings.reference is None else _reference(subject, settings.reference, settings, process)
    clock.seconds["load"] = time.perf_counter() - start
    setup = make_setup(subject, settings)
    plan = make_plan(settings.measures, setup, subject.verified, subject.sequences, has_reference=bool(reference))
    if extra is not None and (further := extra(subject, setup)) is not None:
        plan.measures[SITE] = further
    watcher.say(check_memory(plan, subject, settings.batch_size))
    for entry in plan.left_out:
        watcher.say(f"Left out: {entry['measure']}, because {entry['reason']}.")
    share = subject.sequences.share(settings.batch_size, process.rank, process.world)
    watcher.begin(f"Measuring {Path(subject.checkpoint.name).name}", sum(map(len, share)))
    grid = run_pass(subject, plan, settings, process, clock, reference=reference, advance=watcher.advance)
    weigh(subject, plan, process, clock)

    rows, influences = [], []
    for name, accumulator in plan.measures.items():
        with clock(name), warnings.catch_warnings():
            # a process may have had no batches; the results of the others are merged in
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
            measured = accumulator.rows()
            influences += accumulator.influences() if measured else []
        rows += measured
        if not measured:
            reason = EMPTY.get(name, "there are too few tokens or occurrences in the data")
            if settings.measures is not None:
                raise FulldepthError(f"{name} was asked for but cannot be measured: {reason}.")
            plan.left_out.append({"measure": name, "reason": reason})
    if settings.probe_data is not None:
        with clock("probe_accuracy"):
            rows += process.first(lambda: probe_rows(subject, settings))  # fitting them is no work to share
    table = tabulate(rows)
    if isinstance(subject.anatomy, StagedAnatomy):
        table, unfit = rows_that_fit(table, subject.anatomy.widths)
        plan.left_out += unfit
    refuse_nothing(table, subject, setup)
    clock.seconds["total"] = time.perf_counter() - start
    return Results(
        table,
        _document(subject, settings, plan, clock, table, grid, nearest_tokens(subject) if process.is_main else None),
        None if subject.sequences.no_error else gathered(influences, setup.groups),
    )


def make_setup(subject: MeasuredSubject, settings: MeasureSettings) -> Setup:
    """Sizes of model and data, known before the first batch."""
    anatomy, sequences, verified = subject.anatomy, subject.sequences, subject.verified
    lengths = sequences.lengths
    if not any(lengths):
        lengths = [verified.positions] * len(sequences)
    num_tokens = tokens.how_many(subject.policy, lengths, subject.leading)
    if not num_tokens:
        raise FulldepthError(f"--token-policy {subject.policy} leaves no token: every sequence is a single one.")
    device = subject.device if subject.device.type != "mps" else torch.device("cpu")  # MPS has no float64
    return Setup(
        num_layers=anatomy.num_layers,
        width=verified.width,
        value_width=verified.value_width,
        chained=verified.chained,
        routed_heads=verified.routed_heads,
        head_shares=shares_of_heads(anatomy),
        num_streams=verified.num_streams,
        sequence_length=max(lengths),
        num_sequences=len(sequences),
        clusters=(0,) * len(sequences) if sequences.no_error else tuple(sequences.clusters),
        num_tokens=num_tokens,
        first_tokens=subject.policy == "all",
        reservoir_tokens=min(settings.reservoir_tokens or num_tokens, num_tokens),
        lens_sites=tuple(dict.fromkeys(["residual", *settings.lens_sites])),
        entropy_sequences=settings.entropy_sequences or len(sequences),
        words=tuple(settings.words),
        projections=projection_names(anatomy),
        seed=settings.seed,
        device=device,
    )


def _reference(subject: MeasuredSubject, model: str, settings: MeasureSettings, process: Processes) -> Verified:
    """The second model of MMD, verified on the same data."""
    checkpoint = open_checkpoint(model, settings, process.device(settings.device), settings.device_map)
    candidates = anatomy_candidates(checkpoint.model, tower=settings.tower, override=settings.anatomy)
    batch = small_batch(subject.sequences)
    verified = prove(candidates, batch, subject.device, checkpoint.model.dtype, optional=("head", "branches"))
    subject.sequences, _ = batched(verified.anatomy, subject.sequences, subject.device)
    own, other = subject.anatomy, verified.anatomy
    if (own.num_layers, subject.verified.width) != (other.num_layers, verified.width):
        raise FulldepthError(
            f"The reference has {other.num_layers} layers of width {verified.width}, the model {own.num_layers} of "
            f"{subject.verified.width}; MMD compares layer by layer and needs both equal."
        )
    return verified


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
    subject: MeasuredSubject,
    plan: MeasurePlan,
    settings: MeasureSettings,
    process: Processes,
    clock: Clock,
    *,
    reference: Verified | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, Any] | None:
    """Run this process's share of the batches through the model and every accumulator.

    Args:
        subject: model and data.
        plan: the measures, updated in place.
        settings: batch size, lens sampling, grid.
        process: this process.
        clock: adds the time of every part.
        reference: the second model of MMD.
        advance: called with the number of sequences completed, for a progress bar.

    Returns:
        The lens grid, if there is one.

    Raises:
        FulldepthError: if an activation is NaN or infinite.
    """
    reader = LensReader(subject, settings, process) if plan.measures.keys() & LENS else None
    sites, device, dtype = plan.sites | {"residual"}, plan.setup.device, subject.checkpoint.model.dtype
    with ExitStack() as stack:
        activations = stack.enter_context(capture(subject.anatomy, sites, stacked=device))
        other = stack.enter_context(capture(reference.anatomy, ["residual"], stacked=device)) if reference else None
        for batch in subject.sequences.batches(settings.batch_size, process.rank, process.world):
            inputs = model_inputs(batch.inputs, subject.device, dtype)
            with clock("forward"):
                subject.anatomy.runner(**body_inputs(subject.anatomy, inputs))
            with clock("states"):
                states = {site: activations.stack(site, device) for site in sites - COEFFICIENTS.keys()}
                coefficients = {site: activations.coefficients(site) for site in sites & COEFFICIENTS.keys()}
            activations.clear(keep_stacks=batch.masked_inputs is None)
            if reference is not None and other is not None:
                with clock("forward (reference)"):
                    reference.anatomy.runner(**body_inputs(reference.anatomy, inputs))
                states["reference"] = other.stack("residual", device)
                other.clear()
            read = [states[site] for site in plan.setup.lens_sites] if batch.masked_inputs is None else []
            if batch.masked_inputs is not None and plan.masked_pass:
                inputs = model_inputs(batch.masked_inputs, subject.device, dtype)
                with clock("forward (masked)"):
                    subject.anatomy.runner(**body_inputs(subject.anatomy, inputs))
                read = [activations.stack(site, device) for site in plan.setup.lens_sites]
                activations.clear(keep_stacks=False)
            observation = observe(subject, batch, states, read, reader)
            observation.coefficients = coefficients
            feed(plan, observation, clock)
            observation.__dict__.clear()  # measures keep the object to recognise it, which would keep its tensors
            advance(len(batch))
    return None if reader is None else reader.grid


def observe(
    subject: MeasuredSubject, batch: Batch, states: dict[str, Tensor], read: Sequence[Tensor], reader: LensReader | None
) -> Observation:
    """The observation that accumulators receive for one batch.

    Args:
        subject: model and data.
        batch: the sequences.
        states: site -> activations of the unmasked text.
        read: what the lens reads: `[L+1, B, T, D]` residual stream, perhaps `[L, B, T, D]` stream after attention;
            empty = no lens.
        reader: applies the lens; None = no lens.

    Raises:
        FulldepthError: if an activation is NaN or infinite.
    """
    residual, classifier = states["residual"], subject.verified.classifier
    for values in [residual] if batch.masked_inputs is None else [residual, *read]:
        if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
            raise FulldepthError(
                f"Activations are NaN or infinite in sequences {int(batch.sequence[0])}..{int(batch.sequence[-1])}; "
                "the weights are broken or the precision is too low (try --dtype float32)."
            )
    device, mask = residual.device, batch.attention_mask
    mask = torch.ones(residual.shape[1:3], dtype=torch.bool, device=device) if mask is None else mask.to(device)
    observation = Observation(
        states=states,
        attention_mask=mask,
        counted=tokens.counted(subject.policy, mask, batch.token_ids, subject.eos, subject.leading),
        pooled=subject.policy in tokens.POOLED,
        sequence=batch.sequence.to(device),
        labels=batch.labels,
        words=batch.words,
    )
    if subject.anatomy.task == "detection" and classifier is not None:
        heads, where = DetectionHeads(classifier), classifier.device or device
        read_layers = [heads.read(state.to(where), layer) for layer, state in enumerate(residual[1:], start=1)]
        logits, boxes = (torch.stack(parts) for parts in zip(*read_layers, strict=True))
        observation.detections = Detections(logits, boxes, batch.objects)
    targets = batch.targets if classifier is not None and classifier.per_token else batch.labels
    if classifier is not None and targets is not None and read and reader is not None:

        def readout() -> Readout:
            return reader.read(classifier, batch, targets.to(device), mask, *read)

        observation.readout = readout
    return observation


def feed(plan: MeasurePlan, observation: Observation, clock: Clock) -> None:
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


def weigh(subject: MeasuredSubject, plan: MeasurePlan, process: Processes, clock: Clock) -> None:
    """Compute the spectral norms; the matrices are divided among the processes."""
    if isinstance(norms := plan.measures.get("spectral_norm"), SpectralNorm):
        with clock("spectral_norm"):
            unreadable = feed_projections(norms, subject.anatomy, process.rank, process.world)
        if unreadable:
            reason = f"{len(unreadable)} weights are offloaded, packed or of unknown form (first: {unreadable[0]})"
            plan.left_out.append({"measure": "spectral_norm (in part)", "reason": reason})


def _document(
    subject: MeasuredSubject,
    settings: MeasureSettings,
    plan: MeasurePlan,
    clock: Clock,
    table: pd.DataFrame,
    grid: dict[str, Any] | None,
    routers: dict[str, Any] | None,
) -> dict[str, Any]:
    """Content of `results.json`."""
    sequences, setup, clusters = subject.sequences, plan.setup, subject.sequences.clusters
    data = sequences.describe()
    seconds = {name: round(value, 4) for name, value in clock.seconds.items()}
    # without clusters, the numbers of sequences identify groups within one text only
    text = "" if clusters else sequences.text_hash or sequences.hash
    groups = groups_entry(clusters or range(len(sequences)), sequences.unit, text)
    document = {
        **provenance("measure", settings.model_dump(), seed=settings.seed),
        "model": subject.verified.describe(subject.checkpoint),
        "groups": None if sequences.no_error else groups,
        "data": data
        | {
            "tokens": data["tokens"] or setup.num_sequences * setup.sequence_length,  # of images, those the model makes
            "sequence_length": setup.sequence_length,
            "masked_share": MASKED_SHARE if plan.masked_pass else None,
        },
        "token_policy": subject.describe_tokens(plan.masked_pass),
        "timings": {
            "load": seconds.pop("load"),
            "forward": seconds.pop("forward", 0.0),
            "total": seconds.pop("total"),
            "measures": seconds,
        },
        "memory": {**plan.memory, "peak": run_peak(subject.device)},
        "sampling": sampling(subject, settings, setup, table),
        "left_out": plan.left_out,
        "warnings": caveats(subject, setup, table),
        "headline": headline(table, setup.num_layers, Clusters.of(sequences)),
        "lens_grid": grid,
        "router_tokens": routers,
    }
    return finite(document)
