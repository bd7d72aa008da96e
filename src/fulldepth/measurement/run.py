"""`fulldepth measure`: what every layer of a checkpoint, or of a series of checkpoints, does."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch

from fulldepth.core import launch
from fulldepth.core.distributed import Processes, processes
from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import check_outside
from fulldepth.core.progress import Watcher
from fulldepth.data import MASKED_SHARE, Sequences
from fulldepth.data.columns import list_of_texts
from fulldepth.data.corpus import CORPUS
from fulldepth.execution import Verified
from fulldepth.execution.memory import reset_peak, run_peak
from fulldepth.hf import Checkpoint, find_checkpoints, known_stream_scale, packaged, refuse_without_tokens, task_of
from fulldepth.hf.finder import stacks, towers
from fulldepth.measurement import tokens
from fulldepth.measurement.caveats import EMPTY, NO_TARGET, caveats, gaps, sampling, zero_weights
from fulldepth.measurement.effects import EffectPass
from fulldepth.measurement.generated import continued, steps_of
from fulldepth.measurement.headline import Clusters, headline
from fulldepth.measurement.linear_lens import LinearLens, fit_linear_lens, fitting_text
from fulldepth.measurement.passes import Clock, StepProgress, add_spectral_norms, run_pass
from fulldepth.measurement.plan import MeasurePlan, check_memory, make_plan, weights_of
from fulldepth.measurement.series import (
    SeriesPoint,
    digest,
    extends,
    fingerprints,
    hash_contents,
    measure_series,
    series_points,
)
from fulldepth.measurement.towers import Extra, measure_each, measure_towers
from fulldepth.measurement.weights import nearest_tokens, num_projections
from fulldepth.metrics.cosine import SITE
from fulldepth.metrics.separability import Separability
from fulldepth.results import (
    DOCUMENT,
    PAGE,
    Results,
    TableMismatchError,
    check_free,
    claimed,
    finite,
    gathered,
    groups_entry,
    provenance,
    tabulate,
)
from fulldepth.settings.keywords import takes_settings
from fulldepth.settings.measure import (
    FITTING,
    LINEAR_LENS,
    MOST_SAMPLES,
    MOST_SHOWN,
    LensSettings,
    MeasureSettings,
)
from fulldepth.settings.train import settings_of_run
from fulldepth.subject import Subject
from fulldepth.subject.open import read_source

OF_LENS = ["lens_accuracy", "lens_loss", "saturation"]
"""Measures of `lens`, beside its grid."""
DESCRIBED = {"head": {"head"}, "branches": {"attention", "mlp"}}
"""Part of a model -> entries of the setting `anatomy`; where one of them describes the part, it must be proven."""


@takes_settings(MeasureSettings, recipes="measure")
def measure(
    model: str | Path | torch.nn.Module,
    data: Any,
    *,
    settings: MeasureSettings,
    watcher: Watcher,
    output: str | Path | None = None,
    recipe: str | Path | None = None,
    tokenizer: Any = None,
    series: bool = True,
    overwrite: bool = False,
) -> Results:
    """Measure what every layer of a model does, as `fulldepth measure`.

    All measures share one forward pass over the data. Layers are numbered 1..L, 0 is the embedding output; the last
    layer is read before the final norm (and after it, at the site `final_normed`). The folder of a training run gives a
    series: one measurement of every `checkpoint-N`, with the column `step`.

    ```python
    results = fulldepth.measure("path/to/checkpoint", "text.txt", max_sequences=64)
    series = fulldepth.measure("path/to/run", "corpus:builtin", output="out/")  # resumes; writes the page
    results = fulldepth.measure(model, ["some text", "more text"], tokenizer=tokenizer)
    ```

    Args:
        model: checkpoint folder, folder of a training run, GGUF file, Hub name, or a loaded model (left as it is).
        data: path (text, table, images), Hub data set, `corpus:builtin`, a list of texts or of mappings, a
            `datasets.Dataset`, or prepared `fulldepth.data.Sequences`.
        output: result folder, which also gets the page. An interrupted series resumes there; results of the same model,
            data and settings are read, not measured again. None = nothing is written.
        settings: fields of `MeasureSettings` as keywords, or an instance.
        watcher: receives messages and progress.
        recipe: name of a recipe (`quick`, `full`) or a YAML file; the other arguments override it.
        tokenizer: required with a loaded model; otherwise the one saved with the checkpoint.
        series: False = of a folder with checkpoints and a model, measure the model alone.
        overwrite: measure again, and replace results in `output`.

    Returns:
        `.table` (tidy rows), `.headline`, `.values(...)`, `.figures()`, `.show()`, `.save(dir)`.

    Raises:
        FulldepthError: if model, data or settings are invalid, the anatomy is not proven, or `output` is taken.
    """
    by_name = isinstance(model, str | Path)
    is_run = isinstance(model, str | Path) and series and bool(find_checkpoints(model))
    if is_run and tokenizer is not None:
        raise FulldepthError("A series takes a tokenizer by its folder or Hub name, not as an object.")
    if by_name and tokenizer is None and (is_run or output is not None):
        with TemporaryDirectory() if output is None else nullcontext(output) as folder:
            return measure_into(str(model), data, folder, settings, overwrite=overwrite, series=series, watcher=watcher)
    check_outside(output, data, settings.fit)
    with claimed(output, overwrite):
        with processes(settings.device) as process:
            results = measure_model(model, data, settings, process, watcher, tokenizer=tokenizer)
            results.meta["data"] |= _place(data)
        if output is not None and launch.is_main():
            results.save(output, overwrite=overwrite, watcher=watcher)
    return results


@takes_settings(LensSettings)
def lens(
    model: str | Path | torch.nn.Module,
    text: str | Sequence[str],
    *,
    settings: LensSettings,
    watcher: Watcher,
    tokenizer: Any = None,
    output: str | Path | None = None,
    overwrite: bool = False,
) -> Results:
    """The logit lens of texts: what a model would predict after every layer, as `fulldepth lens`.

    The final norm and the head are applied to the state after every layer, at every token of a text.

    ```python
    table = fulldepth.lens("path/to/checkpoint", "The capital of France is").lens()
    ```

    Args:
        model: as for `measure`; a model that predicts tokens.
        text: one or several.
        settings: fields of `LensSettings` as keywords, or an instance.
        watcher: receives messages and progress.
        tokenizer: required with a loaded model; otherwise the one saved with the checkpoint.
        output: result folder, which also gets the page. None = nothing is written.
        overwrite: replace results in `output`.

    Returns:
        `.lens()` is the table; the rest is that of a measurement of these texts.

    Raises:
        FulldepthError: as for `measure`, and if the model predicts no tokens.
    """
    texts = list_of_texts(text, "Text")
    if not texts:
        raise FulldepthError("The lens needs at least one text.")
    if len(texts) > MOST_SAMPLES:
        raise FulldepthError(f"The lens shows at most {MOST_SAMPLES:,} texts, got {len(texts):,}.")
    if blank := [number for number, given in enumerate(texts, start=1) if not given.strip()]:
        which = f"Text {blank[0]} is" if len(texts) > 1 else "The text is"
        raise FulldepthError(f"{which} blank. Give the lens a text to read, for example 'The capital of France is'.")
    loading = settings.model_dump(exclude={"generate", "top_k", "sequence_length", "linear", *FITTING})
    fitting: dict[str, Any] = {}
    if settings.linear:
        fitting = {"fit": settings.fit or CORPUS, "fit_sequences": settings.fit_sequences}
    measure_settings = MeasureSettings(
        **loading,
        **fitting,
        measures=[*LINEAR_LENS] if settings.linear else OF_LENS,
        lens_tokens=None,
        one_per_row=True,
        order="first",
        max_sequences=len(texts),
        batch_size=len(texts),
        grid_samples=len(texts),
        grid_top=settings.top_k,
        sequence_length=None if settings.sequence_length is None else min(settings.sequence_length, MOST_SHOWN),
        grid_positions=MOST_SHOWN,
    )
    results: Results
    if settings.generate:
        results = _lens_of_steps(
            model, texts, measure_settings, settings.generate, watcher, tokenizer, output, overwrite
        )
    else:
        results = measure(
            model, texts, settings=measure_settings, watcher=watcher, tokenizer=tokenizer, output=output,
            series=False, overwrite=overwrite,
        )  # fmt: skip
    if not results.meta.get("lens_grid"):
        raise FulldepthError("The lens reads models that predict tokens; this one predicts none.")
    if masked := results.meta["data"].get("masked_share"):
        watcher.say(f"{100 * masked:.0f} % of the tokens are replaced by the mask token, and predicted in its place.")
    for line in results.meta["warnings"]:
        if "standard error" not in line and NO_TARGET not in line:  # the lens states no errors and needs no targets
            watcher.say(line)
    return results


def _lens_of_steps(
    model: str | Path | torch.nn.Module,
    texts: Sequence[str],
    settings: MeasureSettings,
    steps: int,
    watcher: Watcher,
    tokenizer: Any,
    output: str | Path | None,
    overwrite: bool,
) -> Results:
    """The lens of texts that the model continues; the grid has the steps that predicted the new tokens."""
    with claimed(output, overwrite):
        needs = {"language", "tokenizer"}
        with Subject.open(model, None, settings, needs=needs, tokenizer=tokenizer) as subject:
            data = continued(subject, texts, steps, settings.sequence_length, settings.grid_positions, watcher)
            with processes(settings.device) as process:
                results = measure_model(
                    subject.checkpoint, data, settings, process, watcher, tokenizer=subject.tokenizer
                )
        new = {f"Sequence {number}": example.predicted for number, example in enumerate(data.examples, start=1)}
        grid = results.meta.get("lens_grid") or {"samples": []}
        steps_only = [steps_of(sample, new[sample["title"]]) for sample in grid["samples"]]
        results.meta["lens_grid"] = {**grid, "samples": steps_only}
        if output is not None and launch.is_main():
            results.save(output, overwrite=overwrite, watcher=watcher)
    return results


def measure_into(
    model: str | Path,
    data: Any,
    output: str | Path,
    settings: MeasureSettings | None = None,
    *,
    overwrite: bool = False,
    series: bool = True,
    watcher: Watcher | None = None,
) -> Results:
    """Measure a checkpoint, or every `checkpoint-N` of a training run, into a result folder.

    Results of the same model, data and settings are read, not measured again: the place of the model, the name of the
    data and the contents of both are compared, and no times. An interrupted series resumes after its last finished
    checkpoint, and new checkpoints of a longer training run extend it. Results whose writing was interrupted are
    measured again. The folder is locked meanwhile. With several processes, each takes its share of the data and the
    first one writes.

    Args:
        model: checkpoint folder, Hub name, or a folder of `checkpoint-N`. A final model at the root of such a folder is
            the last point of the series, if its `trainer_state.json` says which step it is.
        data: as for `measure`.
        output: the result folder; created if absent.
        settings: what to measure.
        overwrite: measure everything again and replace existing results.
        series: False = if a folder holds checkpoints and a model, measure the model alone.
        watcher: receives messages and progress.

    Returns:
        The results in the folder.

    Raises:
        FulldepthError: if the folder holds results of another run, belongs to another command, is held by another
            process, cannot be written, or the measurement fails.
    """
    settings = settings or MeasureSettings()
    watcher = watcher or Watcher()
    folder = Path(output)
    check_outside(folder, data, settings.fit)
    with processes(settings.device) as process, process.holding(folder):
        read = data if isinstance(data, Sequences) else read_source(data, settings)
        points, remarks = series_points(model, read, settings) if series and find_checkpoints(model) else ([], [])
        prints = [point.fingerprint for point in points] or fingerprints([hash_contents(model)], read, settings)
        print_of_run = digest(prints)
        for remark in remarks:
            watcher.say(remark)
        if process.first(lambda: _is_there(folder, print_of_run, points, overwrite, watcher)):
            watcher.say(f"{folder} already holds this measurement; nothing to do.")
            results = Results.load(folder)
            if process.is_main and not (folder / PAGE).exists():  # interrupted before it was written
                results.save_page(folder)
            process.wait()
            return results
        if points:
            results = measure_series(
                points,
                folder,
                lambda place, watcher: measure_model(place, read, settings, process, watcher),
                process,
                watcher,
                overwrite=overwrite,
            )
            results.meta["warnings"] = [*results.meta["warnings"], *remarks]
        else:
            results = measure_model(model, read, settings, process, watcher)
        results.meta["fingerprint"] = print_of_run
        results.meta["data"] |= _place(data)
        if process.is_main:
            results.save(folder, overwrite=overwrite, watcher=watcher)
        process.wait()
        return results


def _is_there(folder: Path, print_of_run: str, points: list[SeriesPoint], overwrite: bool, watcher: Watcher) -> bool:
    """Return True if the folder holds finished results of this run; False if it holds none, or a part of this series.

    Raises:
        FulldepthError: if it holds results of another run, or belongs to another command.
    """
    check_free(folder, overwrite=True)
    if overwrite or not (folder / DOCUMENT).exists():
        return False
    try:
        meta = Results.load(folder).meta
        complete = True
    except TableMismatchError as error:
        meta = error.meta
        complete = False
    except FulldepthError as error:
        raise FulldepthError(f"{error} Choose another --output, or replace it with --overwrite.") from error
    if meta.get("fingerprint") == print_of_run:
        if not complete:
            watcher.say(f"{folder} was interrupted while this measurement was written; it is measured again.")
        return complete
    if extends(points, meta):
        return False
    model, data = (one_line((meta.get(key) or {}).get("name") or "?", 200) for key in ("model", "data"))
    raise FulldepthError(
        f"{folder} holds the results of another run (model {model}, data {data}), or its model, data or "
        "settings have changed. "
        "Choose another --output, or replace it with --overwrite."
    )


def _place(data: Any) -> dict[str, str]:
    """Where the data are, as the user wrote it, which the advice on the next command repeats; empty for objects."""
    return {"path": str(data)} if isinstance(data, str | Path) else {}


def measure_model(
    model: str | Path | torch.nn.Module | Checkpoint,
    data: Any,
    settings: MeasureSettings,
    process: Processes,
    watcher: Watcher,
    *,
    tokenizer: Any = None,
) -> Results:
    """Measure a checkpoint or a model of transformers, each of its stacks if it has several; nothing is written."""
    start = time.perf_counter()
    reset_peak()
    with Subject.open(model, None, settings, device=process.device(settings.device)) as whole:
        if _is_lens(settings):
            refuse_without_tokens(whole.model)

        def measured(
            data: Any, settings: MeasureSettings, extra: Extra | None = None, start: float | None = None
        ) -> tuple[Results, Subject]:
            described = {name for name, part in (settings.anatomy or {}).items() if part is not None}
            needs = {part for part, names in DESCRIBED.items() if names & described}
            with Subject.open(
                whole.checkpoint, data, settings, needs=needs, tokenizer=tokenizer,
                tower=settings.tower, anatomy=settings.anatomy, words=settings.words,
            ) as subject:  # fmt: skip
                return measure_subject(subject, settings, process, watcher, start=start, extra=extra), subject

        if settings.tower is None and settings.anatomy is None and not isinstance(data, Sequences):
            data = read_source(data, settings)
            if data.captioned and towers(whole.model):
                return measure_towers(whole.checkpoint, data, settings, measured)
            names = stacks(whole.model)
            if names and not task_of(whole.model).endswith("-classification"):
                return measure_each(names, data, settings, measured)
        return measured(data, settings, start=start)[0]


def _is_lens(settings: MeasureSettings) -> bool:
    """Return True for the settings with which `lens` measures its texts."""
    return settings.measures in (OF_LENS, [*LINEAR_LENS]) and settings.one_per_row and settings.lens_tokens is None


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
    clock = Clock()
    counting = tokens.Counting.of(subject, settings.token_policy)
    subject.data = replace(subject.sequences, weights=weights_of(subject, counting, settings))
    reference = None
    scales = None
    if settings.reference is not None:
        reference, scales = _reference(subject, settings.reference, settings, process)
    clock.seconds["load"] = time.perf_counter() - start
    shows_all = _is_lens(settings) and settings.grid_samples >= len(subject.sequences)
    plan = make_plan(subject, counting, settings, stream_scale=scales, shows_all=shows_all)
    setup = plan.setup
    if extra is not None and (further := extra(subject, counting, setup)) is not None:
        plan.measures[SITE] = further
    watcher.say(check_memory(plan, subject, settings.batch_size))
    for entry in plan.left_out:
        watcher.say(f"Left out: {entry['measure']}, because {entry['reason']}.")
    if "spectral_norm" in plan.measures:  # before the batches, after which the rest of the time is estimated
        watcher.begin("Computing the norms of weights", num_projections(subject.anatomy))
        add_spectral_norms(subject, plan, process, clock, watcher.advance)
    fitting = None
    if not plan.measures.keys().isdisjoint(LINEAR_LENS):  # found out before the passes of `layer_effect`
        fitting = fitting_text(subject, settings)
    if "layer_effect" in plan.measures:
        with clock("layer_effect"):
            EffectPass(subject, plan, settings, process, watcher).run()
    linear_lens = None
    if fitting is not None:
        with clock("linear lens (fit)"):
            linear_lens = fit_linear_lens(subject, fitting, settings, process, watcher, setup.device)
    maps = None if linear_lens is None else linear_lens.maps
    grid = run_pass(subject, plan, settings, process, clock, reference=reference, maps=maps, watcher=watcher)
    watcher.begin("Computing statistics and their errors", sum(measure.steps for measure in plan.measures.values()))
    rows = []
    influences = []
    for name, accumulator in plan.measures.items():
        steps = StepProgress(watcher, accumulator.steps)
        accumulator.advance = steps.advance
        with clock(name), warnings.catch_warnings():
            # a process may have had no batches; the results of the others are merged in
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
            measured = accumulator.rows()
            influences += accumulator.influences() if measured else []
        steps.finish()
        rows += measured
        if not measured:
            reason = EMPTY.get(name, "there are too few tokens or occurrences in the data")
            if name in settings.named_measures:
                plan.unmeasured.append(f"{name} was asked for but cannot be measured: {reason}.")
            plan.left_out.append({"measure": name, "reason": reason})
    if plan.unmeasured and not rows:
        raise FulldepthError(" ".join(plan.unmeasured))
    table = tabulate(rows)
    only_shown = shows_all and not subject.sequences.num_targets  # the lens of a text of one token
    if not only_shown and not np.isfinite(table.value.to_numpy(np.float64)).any():
        why = " ".join([zero_weights(subject.model), *gaps(table, setup.num_layers)]).strip()
        raise FulldepthError(
            f"Nothing that was measured of {subject.checkpoint.name} is a finite number. {why}".strip()[:950]
        )
    described = subject.verified.describe(subject.checkpoint)
    if not shows_all:  # a lens answers at once, and to hash a large model takes longer than to read a few texts
        described["hash"] = subject.hash
    clock.seconds["total"] = time.perf_counter() - start
    return Results(
        table,
        _document(
            subject,
            described,
            settings,
            plan,
            clock,
            table,
            grid,
            nearest_tokens(subject) if process.is_main else None,
            linear_lens,
        ),
        None if subject.sequences.no_error else gathered(influences, setup.groups),
    )


def _reference(
    subject: Subject, model: str, settings: MeasureSettings, process: Processes
) -> tuple[Verified, dict[str, tuple[float, ...]]]:
    """The second model of MMD, verified on the same data, and the scales of both models' streams (`Setup`)."""
    with Subject.open(
        model, subject.sequences, settings, device=process.device(settings.device),
        tower=settings.tower, anatomy=settings.anatomy,
    ) as reference:  # fmt: skip
        verified = reference.verified
        subject.data = reference.data
        reference_checkpoint = reference.checkpoint
    anatomy = subject.anatomy
    other = verified.anatomy
    if (anatomy.num_layers, subject.verified.width) != (other.num_layers, verified.width):
        raise FulldepthError(
            f"The reference has {other.num_layers} layers of width {verified.width}, the model {anatomy.num_layers} of "
            f"{subject.verified.width}; MMD compares layer by layer and needs both equal. A plan of "
            "whole layers is compared in place (fulldepth.skip.skipping), or exported with --format folded."
        )
    scales = {
        site: known_stream_scale(Path(packaged(checkpoint.name)), checkpoint.model.config, anatomy.num_layers)
        for site, checkpoint in (("residual", subject.checkpoint), ("reference", reference_checkpoint))
    }
    return verified, scales


def _document(
    subject: Subject,
    described: dict[str, Any],
    settings: MeasureSettings,
    plan: MeasurePlan,
    clock: Clock,
    table: pd.DataFrame,
    grid: dict[str, Any] | None,
    routers: dict[str, Any] | None,
    linear_lens: LinearLens | None,
) -> dict[str, Any]:
    """Content of `results.json`; `described` is the model's entry."""
    sequences = subject.sequences
    setup = plan.setup
    clusters = subject.sequences.clusters
    counting = plan.counting
    data = sequences.describe()
    seconds = {name: round(value, 4) for name, value in clock.seconds.items()}
    # without clusters, the numbers of sequences identify groups within one text only
    text = "" if clusters else sequences.text_hash or sequences.hash
    groups = groups_entry(clusters or range(len(sequences)), sequences.unit, text)
    first = (subject.anatomy.family.modality, counting.class_token) if counting.policy == "cls" else None
    counts = tokens.FIRST.get(first, tokens.SENTENCES[counting.policy])
    sentences = (counts, counting.openings, tokens.MASKED if plan.masked_pass else "")
    document = {
        **provenance("measure", settings.model_dump(), seed=settings.seed),
        "model": described,
        "training": settings_of_run(subject.checkpoint.name),
        "groups": None if sequences.no_error else groups,
        "data": data
        | {
            "tokens": data["tokens"] or setup.num_sequences * setup.sequence_length,  # of images, those the model makes
            "sequence_length": setup.sequence_length,
            "masked_share": MASKED_SHARE if plan.masked_pass else None,
        },
        "token_policy": {
            "name": counting.policy,
            "sentence": " ".join(filter(None, sentences)),
            "begin_with_bos": counting.begin_with_bos,
        },
        "timings": {
            "load": seconds.pop("load"),
            "forward": seconds.pop("forward", 0.0),
            "total": seconds.pop("total"),
            "measures": seconds,
        },
        "memory": {**plan.memory, "peak": run_peak(subject.device)},
        "sampling": sampling(subject, settings, setup, table),
        "left_out": plan.left_out,
        "warnings": [
            *caveats(subject, counting, setup, table),
            *plan.unmeasured,
            *(linear_lens.warnings if linear_lens is not None else ()),
        ],
        "headline": headline(table, setup.num_layers, Clusters.of(sequences)),
        "lens_grid": grid,
        "router_tokens": routers,
        "word_maps": words.maps if isinstance(words := plan.measures.get("separability"), Separability) else None,
        "linear_lens": None if linear_lens is None else linear_lens.document(),
    }
    return finite(document)
