"""`sweep`: what early exit of a model costs and saves, over rules and thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.core.number_format import in_percent
from fulldepth.core.progress import Watcher
from fulldepth.execution.decoding import Decoder, Generation
from fulldepth.execution.latency import OtherLoad, machine, order
from fulldepth.exit.readings import Exit, Readings, batch_size_of, calibrated, no_advice, read_exits, sampling, splits
from fulldepth.exit.served import SpeedUp, timed
from fulldepth.metrics.standard_errors import Mean
from fulldepth.results import Finding, Results, claimed, finite, provenance, tabulate
from fulldepth.settings.exit import ExitSettings
from fulldepth.settings.keywords import takes_settings
from fulldepth.subject import Subject, stated_depth

MOST_GENERATED = 3
"""Thresholds of each rule with which text is generated beside the sweep of a language model."""
RELATIVE = 0.05
"""Tolerance of the headline's effective depth, relative to the last layer's accuracy."""
CHEAP = 0.01
"""Loss of accuracy up to which a given threshold is advised."""
NO_ERROR = "it takes three sequences, which are not all answered alike"
"""Why an accuracy has no standard error: one of 0 says nothing of other data."""
UNTIMED = {"measured_speedup": None, "measured_speedup_interval": None, "timing": None, "seconds": None}


@dataclass(frozen=True)
class ExitRow:
    """A rule and threshold on some samples."""

    exit: Exit
    layers: Tensor
    """[N] layer after which each sample leaves."""
    scores: dict[str, Mean]
    """`accuracy`, `loss`, `agreement` (with the full model's predictions) and `drop` of accuracy (paired)."""
    split: str = "report"
    """`calibration` or `report`."""
    calibrated: bool = False
    """Whether the threshold was chosen for a target accuracy."""
    speedup: SpeedUp | None = None
    """The measured speed-up; None where it was not timed."""

    @classmethod
    def of(cls, readings: Readings, exit: Exit, split: str = "report", calibrated: bool = False) -> ExitRow:
        """Apply a rule and threshold to samples, of which there must be at least one."""
        layers = readings.layers(exit)
        return cls(exit, layers, readings.scores(layers), split, calibrated)

    @property
    def exits(self) -> Tensor:
        """[L] number of samples that leave after layers 1..L."""
        return self.layers.bincount(minlength=self.exit.num_layers + 1)[1:]

    @property
    def theory(self) -> float:
        r"""Layers of the full model over layers that are run, :math:`\sum_i L m_i / \sum_i i m_i`, in [1, L].

        :math:`m_i` samples leave after layer i. Source: "Representation progression and aligned training", Sec. 4.
        """
        return self.exit.num_layers / float(self.layers.double().mean())

    def document(self) -> dict[str, Any]:
        """The entry in `results.json`."""
        return {
            **self.exit.options,
            "split": self.split,
            "calibrated": self.calibrated,
            "samples": len(self.layers),
            "exits": self.exits.tolist(),
            **_stated(self.scores),
            "drop_interval": self.scores["drop"].interval,
            "theoretical_speedup": self.theory,
            **(UNTIMED if self.speedup is None else self.speedup.document()),
        }


@takes_settings(ExitSettings)
def sweep(
    model: str | Path | PreTrainedModel,
    data: Any,
    *,
    settings: ExitSettings,
    watcher: Watcher,
    output: str | Path | None = None,
    overwrite: bool = False,
    tokenizer: Any = None,
) -> Results:
    """Leave a model early, over rules and thresholds: accuracy, loss, agreement, exits per layer, and speed.

    One pass over the data applies the model's own final norm and head to every layer, which gives all rules and
    thresholds at once. Classifiers are then run with samples removed as they leave, and timed against
    their own forward pass. Language models are read at a sample of `lens_tokens` positions, with the
    true tokens before each.

    Args:
        model: checkpoint folder, Hub name, or a loaded model (left on its device, in its mode).
        data: labelled texts or images for classifiers, texts for language models; as for `measure`.
        settings: fields of `ExitSettings` as keywords, or an instance; rules are in `fulldepth.exit.readings`.
        watcher: receives messages and progress.
        output: result folder, which also gets the page; None = nothing is written.
        overwrite: replace results in the output folder.
        tokenizer: a tokenizer, its folder or Hub name; None = the checkpoint's.

    Returns:
        Results of the kind `exit`: `.meta["exits"]`, `.headline`, and `lens_loss` and `lens_accuracy` of every layer.

    Raises:
        FulldepthError: if model, data or options are invalid, the data have no labels for a classifier, or the
            model's layers cannot be run one by one, or the folder holds other results.
    """
    start = perf_counter()
    with ExitStack() as held:
        held.enter_context(claimed(output, overwrite))
        _check_min_layer(settings, stated_depth(model, settings))  # before weights are loaded
        needs = {"head", "targets"}
        subject = held.enter_context(Subject.open(model, data, settings, needs=needs, tokenizer=tokenizer))
        _check_min_layer(settings, subject.anatomy.num_layers)
        warnings = list(subject.warnings)
        if reason := subject.sequences.no_error:
            warnings.append(f"No standard errors: {reason}.")
        for warning in warnings:
            watcher.say(warning)
        loaded = perf_counter()
        readings = read_exits(subject, settings.rule, settings, watcher)
        read_at = perf_counter()
        rows, parts = _rows(readings, settings)
        report = parts["report"]
        seconds = None
        if subject.anatomy.classifies and settings.repeats:
            exits = {row.exit: row.layers for row in rows if row.split == "report"}
            speedups, seconds = timed(subject, exits, report, settings, watcher)
            rows = [replace(row, speedup=speedups[row.exit]) if row.split == "report" else row for row in rows]
        full = report.scores(report.all_at(report.num_layers))
        decoder = subject.anatomy.task == "causal-lm"
        content = {
            **provenance("exit", settings.model_dump(), seed=settings.seed, machine=machine(subject.device)),
            "model": subject.verified.describe(subject.checkpoint) | {"hash": subject.hash},
            "data": subject.sequences.describe() | {"samples": {name: len(p.sequence) for name, p in parts.items()}},
            "batch_size": batch_size_of(subject, settings),
            "sampling": sampling(subject, readings),
            "full": {
                **_stated({name: full[name] for name in ("accuracy", "loss")}),
                "seconds": seconds,
                "chance": float(report.frequent.mean()),
                "no_advice": no_advice(subject, report),
            },
            # The states are those that all layers computed.
            "exits": [row.document() for row in rows],
            "warnings": warnings,
            **(_generated(subject, rows, settings, watcher, warnings) if decoder else {}),
            "headline": _headline(subject, report, rows, settings),
        }
        content["timings"] = {"load": loaded - start, "forward": read_at - loaded, "total": perf_counter() - start}
        results = Results(tabulate(_table(readings)), finite(content))
        if output is not None:
            results.save(output, overwrite=overwrite, watcher=watcher)
    return results


def _check_min_layer(settings: ExitSettings, depth: int | None) -> None:
    """Refuse a `min_layer` beyond the model's layers; a depth of None is not known."""
    if depth is not None and settings.min_layer > depth:
        raise FulldepthError(f"min_layer is {settings.min_layer}, but the model has {depth} layers.")


def _rows(readings: Readings, settings: ExitSettings) -> tuple[list[ExitRow], dict[str, Readings]]:
    """Every rule with every threshold, and the calibrated ones; on both parts where a threshold is chosen."""
    target = settings.target_accuracy_drop
    parts = {"report": readings}
    if target is not None:
        parts = splits(readings, settings.calibration_share, settings.seed)
    rows = []
    for rule in settings.rule:
        thresholds = [(threshold, False) for threshold in sorted(set(settings.threshold))]
        if target is not None:
            best = calibrated(parts["calibration"], rule, settings.min_layer, settings.threshold, target)
            thresholds.append((best, True))
        for threshold, is_calibrated in thresholds:
            exit = Exit(rule, threshold, settings.min_layer, readings.num_layers)
            rows += [ExitRow.of(part, exit, split, is_calibrated) for split, part in parts.items()]
    return rows, parts


def _table(readings: Readings) -> list[tuple[Any, ...]]:
    """`lens_loss` and `lens_accuracy` of layers 0..L, as `measure` writes them."""
    rows: list[tuple[Any, ...]] = []
    for measure, values, unit in (("lens_loss", readings.loss, "nats"), ("lens_accuracy", readings.correct, "1")):
        for layer, of_layer in enumerate(values):
            mean = Mean.of(of_layer, readings.cluster)
            for statistic, value in (("mean", mean.value), ("standard_error", mean.error)):
                if value is not None:
                    rows.append((measure, "residual", layer, None, statistic, value, len(of_layer), unit))
    return sorted(rows, key=lambda row: row[2])


def _stated(scores: Mapping[str, Mean]) -> dict[str, float | None]:
    return {
        key: value
        for name, mean in scores.items()
        for key, value in ((name, mean.value), (f"{name}_stderr", mean.error))
    }


def _generated(
    subject: Subject, rows: Sequence[ExitRow], settings: ExitSettings, watcher: Watcher, warnings: Sequence[str]
) -> dict[str, Any]:
    """The entry `generation`, or `warnings` with one more if the decoder cannot be run token by token; empty if not
    asked for.

    Of each rule at most `MOST_GENERATED` thresholds below 1: the one for the target accuracy, and the highest.
    """
    if not settings.prompts:
        return {}
    exits: list[Exit] = []
    below = [row for row in rows if row.split == "report" and row.exit.threshold < 1]
    for rule in dict.fromkeys(settings.rule):
        ranked = sorted(below, key=lambda row: (not row.calibrated, -row.exit.threshold))
        exits += list(dict.fromkeys(row.exit for row in ranked if row.exit.rule == rule))[:MOST_GENERATED]
    exits.sort(key=lambda exit: (exit.rule, exit.threshold))
    try:
        return {"generation": generation_rows(subject, exits, settings, watcher)}
    except FulldepthError as error:
        message = f"Nothing was generated with early exit: {error}"
        watcher.say(message)
        return {"warnings": [*warnings, message]}


def generation_rows(
    subject: Subject, exits: Sequence[Exit], settings: ExitSettings, watcher: Watcher
) -> list[dict[str, Any]]:
    """One entry of `generation` in `results.json` for every rule and threshold.

    The beginnings of the first sequences are the prompts, of one length: at most half of a sequence. All runs are
    greedy and without end tokens, so that every run decodes the same number of tokens. Times are of the tokens after
    the first, in rounds of changing order.

    Raises:
        FulldepthError: if the model cannot be decoded layer by layer.
    """
    decoder = Decoder(subject.model)
    limit = subject.anatomy.max_positions
    batch = subject.sequences.collate(range(min(settings.prompts, len(subject.sequences))))
    width = int(batch.inputs["attention_mask"].sum(1).min()) // 2
    width = max(1, width if limit is None else min(width, limit - settings.max_new_tokens))
    prompts = batch.inputs["input_ids"][:, :width].to(subject.device)
    runs: list[dict[str, Any]] = [{}, *(exit.options for exit in exits)]  # run 0 is plain
    rounds = max(1, settings.repeats)
    load = OtherLoad()
    watcher.begin("Generating with early exit", rounds * len(runs))
    generations: dict[int, Generation] = {}
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        for run in order(len(runs), number, settings.seed):
            generations[run] = decoder.generate(
                prompts,
                torch.ones_like(prompts),
                max_new_tokens=settings.max_new_tokens,
                eos_token_id=subject.anatomy.vocab_size or 1 << 30,  # no token: nothing ends early
                pad_token_id=0,
                **runs[run],
            )
            seconds[run].append(generations[run].stats.seconds)
            watcher.advance(1)
    share = load.share()
    plain = generations[0].sequences[:, width:]
    entries = []
    for run, options in enumerate(runs[1:], start=1):
        stats = generations[run].stats
        speedup = SpeedUp.of(seconds[0], seconds[run], share) if settings.repeats else None
        entry = {
            "exits": stats.exits,
            "tokens": stats.tokens,
            "agreement": float((generations[run].sequences[:, width:] == plain).double().mean()),
            "layers_computed": stats.layers_computed,
            "theoretical_speedup": stats.theoretical_speedup,
        }
        entries.append({**options, **entry, **(UNTIMED if speedup is None else speedup.document())})
    return entries


def _headline(subject: Subject, readings: Readings, rows: Sequence[ExitRow], settings: ExitSettings) -> dict[str, Any]:
    """The findings: depth that the accuracy needs, the chosen thresholds or the best of those given, and its speed."""
    full = readings.full
    findings = {}
    if reason := no_advice(subject, readings):
        why = subject.sequences.no_error or NO_ERROR
        error: dict[str, Any] = {"standard_error": full.error} if full.error else {"no_standard_error": why}
        return {"accuracy": Finding(full.value, "1", reason, **error).document()}
    plain, low, depth = readings.depth(1 - RELATIVE)
    share = f"{in_percent(1 - RELATIVE)} of the full model's {full.value:.1%} accuracy"
    sentence = (
        f"No layer before the last is shown to keep {share}."
        if depth == readings.num_layers
        else f"Stopping every sample after layer {depth} of {readings.num_layers} keeps at least {share}: "
        f"{drop_sentence(readings.shortfall(depth))}."
    )
    estimate = f" By the estimates alone layer {plain} does." if plain != depth else ""
    sentence += f"{estimate} 95 % interval: layers {low} to {depth}."
    findings["effective_depth"] = Finding(depth, "layers", sentence)
    report = [row for row in rows if row.split == "report"]
    target = settings.target_accuracy_drop
    below = [row for row in report if row.exit.threshold < 1]
    calibrated_rows = [row for row in report if row.calibrated]
    for row in calibrated_rows:
        suffix = "" if len(calibrated_rows) == 1 else f"_{row.exit.rule}"
        rule = row.exit.rule
        points = f"{100 * (target or 0):g} points"
        sentence = f"No threshold below 1 of the rule {rule} loses at most {points} on the calibration part."
        if row.exit.threshold < 1:
            lead = f"{rule.capitalize()} {row.exit.threshold:.4g}, chosen for at most {points} on other data"
            sentence = _did(subject, row, lead)
            findings[f"{_named(row)}{suffix}"] = _speedup(subject, row)
        findings[f"chosen_threshold{suffix}"] = Finding(row.exit.threshold, "1", sentence)
    if target is None and below:
        good = [row for row in below if (ends := row.scores["drop"].interval) is not None and ends[1] <= CHEAP]
        row = max(good or below, key=lambda row: row.theory if good else -row.theory)
        lead = "The given threshold with the fewest layers among those shown to lose at most one point"
        if not good:
            lead = "No given threshold is shown to lose at most one point; the one with the most layers"
        sentence = _did(subject, row, f"{lead}: {row.exit.rule} {row.exit.threshold:g}", CHEAP)
        findings["best_threshold"] = Finding(row.exit.threshold if good else None, "1", sentence)
        findings[_named(row)] = _speedup(subject, row)
    return {name: finding.document() for name, finding in findings.items()}


def _did(subject: Subject, row: ExitRow, lead: str, tolerance: float = 0.0) -> str:
    """Return a sentence on what a threshold costs and saves."""
    layers = row.exit.num_layers
    what = "samples" if subject.anatomy.classifies else "tokens"
    return (
        f"{lead}. {drop_sentence(row.scores['drop'], tolerance)}, to {row.scores['accuracy'].value:.1%}; "
        f"{row.scores['agreement'].value:.1%} of the full model's predictions; {what} leave after "
        f"{layers / row.theory:.1f} of {layers} layers on average. {_speedup(subject, row).sentence}"
    )


def _named(row: ExitRow) -> str:
    """The name of the finding of `_speedup`."""
    return "theoretical_speedup" if row.speedup is None else "speedup"


def _speedup(subject: Subject, row: ExitRow) -> Finding:
    """The measured speed-up, or the counted one where nothing was timed."""
    if row.speedup is None:
        bound = "" if subject.anatomy.classifies else ", if later tokens needed none of the layers that were left out"
        return Finding(row.theory, "1", f"Counted, not timed: {row.theory:.2f} times fewer layers{bound}.")
    if row.speedup.verdict != "differs":
        return Finding(None, "1", row.speedup.sentence())
    allows = f"The number of layers allows {row.theory:.2f}."
    return Finding(row.speedup.ratio.value, "1", f"{row.speedup.sentence()} {allows}")


def drop_sentence(drop: Mean, tolerance: float = 0.0) -> str:
    """How much accuracy is lost, with its 95 % interval.

    "No measurable drop" needs an interval that holds 0; "no drop above" one that ends below the tolerance.

    Args:
        drop: of the full model's accuracy, paired.
        tolerance: above 0, the loss up to which early exit is said to cost nothing.
    """
    points = 100 * drop.value
    if drop.interval is None:
        return f"Accuracy drop {points:+.2g} points (the data give no interval)"
    low, high = (100 * end for end in drop.interval)
    ends = f"95 % interval {low:.1f} to {high:.1f}"
    if drop.interval[1] <= tolerance:
        return f"No drop of accuracy above {100 * tolerance:g} points ({ends})"
    if low <= 0 <= high:
        return f"No measurable drop of accuracy ({points:.1f} points, {ends})"
    return f"Accuracy drop {points:.1f} points ({ends})"
