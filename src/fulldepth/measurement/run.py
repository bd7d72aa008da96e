"""`fulldepth.measure`: reads the data once, and gives a table of what every layer does."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel

from fulldepth.data import MASKED_SHARE, Sequences
from fulldepth.distributed import Processes, processes
from fulldepth.errors import FulldepthError
from fulldepth.execution import Verified, projection_names
from fulldepth.execution.batching import batched
from fulldepth.execution.memory import reset_peak, run_peak
from fulldepth.hf import anatomy_candidates, evaluating, task_of, unwrapped
from fulldepth.hf.finder import stacks, towers
from fulldepth.measurement import tokens
from fulldepth.measurement.caveats import EMPTY, caveats, refuse_nothing
from fulldepth.measurement.headline import Clusters, headline
from fulldepth.measurement.memory import check_memory
from fulldepth.measurement.passes import Pass, run_pass, weigh
from fulldepth.measurement.plan import Plan, make_plan
from fulldepth.measurement.probe import probe_rows
from fulldepth.measurement.routers import nearest_tokens, shares_of_heads
from fulldepth.measurement.sampling import sampling
from fulldepth.measurement.stages import prepare_stages
from fulldepth.measurement.subject import Subject, prepare_subject
from fulldepth.measurement.towers import Extra, measure_each, measure_towers
from fulldepth.metrics import Setup
from fulldepth.metrics.cross import SITE
from fulldepth.progress import Watcher
from fulldepth.results import Results, finite, gathered, groups_entry, provenance, tabulate
from fulldepth.settings import layer as layered
from fulldepth.settings.measure import MeasureSettings
from fulldepth.subjects import open_checkpoint, prove, read_source, small_batch


def measure(
    model: str | Path | torch.nn.Module,
    data: Any,
    *,
    measures: str | list[str] | None = None,
    tokenizer: Any = None,
    max_sequences: int = 256,
    sequence_length: int | None = None,
    batch_size: int = 8,
    token_policy: str = "auto",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    watcher: Watcher | None = None,
    stages: Sequence[torch.nn.Module | str] | None = None,
    head: torch.nn.Module | str | None = None,
    **options: Any,
) -> Results:
    """Measure what every layer of a model does.

    Measures share a forward pass; the lens of a masked model and a reference model take one each. Layers are numbered
    1..L, 0 is the embedding output; the last is read before the final norm (and after it, at site `final_normed`).

    Args:
        model: checkpoint folder, Hub name, or a loaded model (left on its device, in its mode).
        data: path, Hub data set, `corpus:builtin`, a list of texts or of mappings, a `datasets.Dataset`, or prepared
            `fulldepth.data.Sequences`.
        measures: names from `fulldepth.metrics.METRICS`, or one name; None = all that model and data allow.
        tokenizer: required with a loaded model; otherwise the one saved with the checkpoint.
        max_sequences: maximum number of sequences.
        sequence_length: tokens per sequence; None = 256, or the model's maximum if smaller.
        batch_size: sequences per forward pass; it does not affect the results.
        token_policy: as `MeasureSettings.tokens`; padding never counts.
        device: None = the first accelerator, else the CPU.
        dtype: `auto` = the checkpoint's own.
        watcher: receives messages and progress.
        stages: parts of any other module whose outputs are layers 1..L; `data` as for `fulldepth.data.prepare_arrays`.
        head: gives the class scores from the last stage's output; None = no predictions.
        **options: any other field of `MeasureSettings` (`words`, `reference`, `seed`, `exact`, `tower`, ...).

    Returns:
        `.table` (tidy rows), `.headline`, `.figures()`, `.save(dir)`.

    Raises:
        FulldepthError: if model, data or options are invalid, or the model's anatomy cannot be verified.
    """
    given = {
        "measures": measures,
        "max_sequences": max_sequences,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "tokens": token_policy,
        "device": None if device is None else str(device),
        "dtype": str(dtype).removeprefix("torch."),
        **options,
    }
    settings = layered(MeasureSettings, given)
    with processes(settings.device) as process:
        if stages is not None or head is not None:
            return _measure_stages(model, data, settings, process, watcher or Watcher(), stages=stages, head=head)
        return measure_with(model, data, settings, process, watcher or Watcher(), tokenizer=tokenizer)


def _measure_stages(
    model: Any, data: Any, settings: MeasureSettings, process: Processes, watcher: Watcher, *, stages: Any, head: Any
) -> Results:
    """Measure a module by its stages."""
    if stages is None or not isinstance(model, torch.nn.Module):
        raise FulldepthError("stages and head describe a loaded module: pass the module itself, and name its stages.")
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
    """`measure` with its settings resolved and its process group joined."""
    start = time.perf_counter()
    reset_peak()
    if isinstance(model, torch.nn.Module):
        model = unwrapped(model)
    device = process.device(settings.device)
    with evaluating(model) if isinstance(model, PreTrainedModel) else nullcontext():
        checkpoint = open_checkpoint(model, settings, device, settings.device_map)

        def measured(
            data: Any, settings: MeasureSettings, extra: Extra | None = None, start: float | None = None
        ) -> tuple[Results, Subject]:
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
    subject: Subject,
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
    reference = _reference(subject, settings, process)
    loaded = time.perf_counter() - start
    setup = make_setup(subject, settings)
    plan = make_plan(settings.measures, setup, subject.verified, subject.sequences, has_reference=bool(reference))
    if extra is not None and (further := extra(subject, setup)) is not None:
        plan.measures[SITE] = further
    watcher.say(check_memory(plan, subject, settings.batch_size))
    for entry in plan.left_out:
        watcher.say(f"Left out: {entry['measure']}, because {entry['reason']}.")
    watcher.begin(f"Measuring {Path(subject.checkpoint.name).name}", share(subject, settings, process))
    data_pass = run_pass(subject, plan, settings, process, reference=reference, advance=watcher.advance)
    weigh(subject, plan, process, data_pass.clock)
    if process.is_main:
        data_pass.router_tokens = nearest_tokens(subject)
    table, influences = _tables(plan, data_pass, by_name=settings.measures is not None)
    table, unfit = subject.fitting(table)
    plan.left_out += unfit
    if settings.probe_data is not None:
        with data_pass.clock("probe_accuracy"):
            probes = process.first(lambda: probe_rows(subject, settings))  # fitting them is no work to share
            table = pd.concat([table, tabulate(probes)], ignore_index=True)
    refuse_nothing(table, subject, setup)
    data_pass.clock.seconds["load"] = loaded
    data_pass.clock.seconds["total"] = time.perf_counter() - start
    return Results(
        table, _document(subject, settings, plan, data_pass, table), None if subject.sequences.no_error else influences
    )


def share(subject: Subject, settings: MeasureSettings, process: Processes) -> int:
    """Number of sequences in this process's share of the batches."""
    return sum(map(len, subject.sequences.share(settings.batch_size, process.rank, process.world)))


def make_setup(subject: Subject, settings: MeasureSettings) -> Setup:
    """Sizes of model and data, known before the first batch."""
    anatomy, sequences = subject.anatomy, subject.sequences
    lengths = sequences.lengths
    if not any(lengths):
        lengths = [subject.verified.positions] * len(sequences)
    num_tokens = tokens.how_many(subject.policy, lengths, subject.leading)
    if not num_tokens:
        raise FulldepthError(f"--tokens {subject.policy} leaves no token: every sequence is a single one.")
    device = subject.device if subject.device.type != "mps" else torch.device("cpu")  # MPS has no float64
    return Setup(
        num_layers=anatomy.num_layers,
        width=subject.verified.width,
        value_width=subject.verified.value_width,
        chained=subject.verified.chained,
        routed_heads=subject.verified.routed_heads,
        head_shares=shares_of_heads(anatomy),
        num_streams=subject.verified.num_streams,
        sequence_length=max(lengths),
        counted_length=tokens.how_many(subject.policy, [max(lengths)], subject.leading),
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


def _reference(subject: Subject, settings: MeasureSettings, process: Processes) -> Verified | None:
    """The second model of MMD, verified on the same data."""
    if settings.reference is None:
        return None
    checkpoint = open_checkpoint(settings.reference, settings, process.device(settings.device), settings.device_map)
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


def _tables(plan: Plan, data_pass: Pass, *, by_name: bool) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """The rows and influences of all accumulators; measures without rows are listed in `plan.left_out` with a reason.

    Raises:
        FulldepthError: if such a measure was requested by name.
    """
    rows, influences = [], []
    for name, accumulator in plan.measures.items():
        with data_pass.clock(name), warnings.catch_warnings():
            # a process may have had no batches; the results of the others are merged in
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
            measured = accumulator.rows()
            influences += accumulator.influences() if measured else []
        reason = EMPTY.get(name, "there are too few tokens or occurrences in the data")
        if not measured and by_name:
            words = f" (words: {', '.join(plan.setup.words)})" if "words" in accumulator.needs else ""
            raise FulldepthError(f"{name} was asked for but cannot be measured: {reason}{words}.")
        if not measured:
            plan.left_out.append({"measure": name, "reason": reason})
        rows += measured
    return tabulate(rows), gathered(influences, plan.setup.groups)


def _groups(sequences: Sequences) -> dict[str, Any]:
    """The entry `groups`; numbers of sequences identify clusters only within one text."""
    if sequences.clusters:
        return groups_entry(sequences.clusters, sequences.unit)
    return groups_entry(range(len(sequences)), sequences.unit, sequences.text_hash or sequences.hash)


def _document(
    subject: Subject, settings: MeasureSettings, plan: Plan, data_pass: Pass, table: pd.DataFrame
) -> dict[str, Any]:
    """Content of `results.json`."""
    sequences, setup = subject.sequences, plan.setup
    data = sequences.describe()
    seconds = {name: round(value, 4) for name, value in data_pass.clock.seconds.items()}
    document = {
        **provenance("measure", settings.model_dump(), seed=settings.seed),
        "model": subject.describe(),
        "groups": None if sequences.no_error else _groups(sequences),
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
        "sampling": sampling(subject, settings, setup, table, data_pass.lens_error),
        "left_out": plan.left_out,
        "warnings": caveats(subject, setup, table),
        "headline": headline(table, setup.num_layers, Clusters.of(subject.sequences)),
        "lens_grid": data_pass.grid,
        "router_tokens": data_pass.router_tokens,
    }
    return finite(document)
