r"""`bench`: time, memory and cache of exports compared with the original model.

All models are in memory at once. After a warm-up they run in rounds, each once a round, in an order that changes from
round to round, so that other load on the machine affects all of them. The time of an export over the original's is

.. math:: r = \operatorname{median}_i\, t_{i,\text{export}} / t_{i,\text{original}}

over the rounds i, with a 95 % interval from the order statistics (`uncertainty.median_ratio`; none for fewer than 9
rounds). An interval that holds 1 is no measurable difference. Over the whole grid, t is the geometric mean over its
cells. If other programs used more than 10 % of the processor, times are not compared.

Rows, by `model`, `batch` and `context`: `prefill_time`, `decode_time` (of one token; median, s), `time_ratio` (sites
`prefill` and `decode`; median, low, high; without batch and context: over the grid), `other_load` (share of the
processor that other programs used), `peak_memory` (weights and all other live tensors), `parameter_bytes`,
`kv_bytes_per_token` (of the cache after the last token), and with data `loss` (`mean`: nats per token on the same
held-out sequences for every model, `count` tokens; `difference_stderr`: standard error of the difference to the
original over `count` documents).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fulldepth.data.examples import Examples
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.execution.latency import PHASES, Runner, check_positions, machine
from fulldepth.execution.memory import cache_bytes, parameter_bytes, peak_bytes
from fulldepth.execution.verify import check_task
from fulldepth.hf import Checkpoint, anatomy_candidates, evaluating, open_model
from fulldepth.hf.model_hash import model_hash
from fulldepth.progress import Watcher
from fulldepth.results import Finding, Results, claimed, finite, provenance
from fulldepth.settings.bench import BenchSettings
from fulldepth.settings.keywords import takes_settings
from fulldepth.skip.compared import Cell, Measured, gap_finding, heldout_losses, in_words, vocabulary
from fulldepth.skip.exports.export import NOTES, load, read_notes
from fulldepth.skip.plan import Plan, overlap
from fulldepth.skip.problem import read_data


@takes_settings(BenchSettings)
def bench(
    original: str | Path | PreTrainedModel,
    exports: Sequence[str | Path | PreTrainedModel],
    output: str | Path | None = None,
    *,
    settings: BenchSettings,
    watcher: Watcher,
    overwrite: bool = False,
    data: Any = None,
    heldout: Any = None,
    tokenizer: Any = None,
) -> Results:
    """Time exports against the original model, over batch sizes and contexts; see the docstring of this module.

    Args:
        original: the checkpoint (folder, Hub name) or the loaded model; a loaded model is not moved or changed.
        exports: folders that `export` wrote, other checkpoints, loaded models.
        output: result folder, which also gets the page; None = not saved.
        settings: fields of `BenchSettings` as keywords, or an instance.
        watcher: receives progress.
        overwrite: replace results in the output folder.
        data: as for `search`: losses of all models are computed on its held-out fifth, the one that a search with the
            same seed scores blocks with. None = no losses, unless `heldout` is set.
        heldout: held-out data, used entirely in place of that fifth.
        tokenizer: for data: a tokenizer, its folder or Hub name; None = the original's.

    Raises:
        FulldepthError: if there are no exports, a model cannot be loaded or is no language model, models are on
            different devices or have different vocabularies, a context with its new tokens exceeds their positions, or
            the data cannot be read (as `search`), or the folder holds other results.
    """
    if isinstance(exports, str | Path | PreTrainedModel) or not exports:
        raise FulldepthError("Expected one export or more to compare with the original.")
    with ExitStack() as stack:
        stack.enter_context(claimed(output, overwrite))
        entries = _opened([original, *exports], settings)
        for entry in entries:
            stack.enter_context(evaluating(entry.model))
        anatomy = check_task(anatomy_candidates(entries[0].model)[0])
        if "contexts" not in settings.model_fields_set and anatomy.max_positions is not None:
            longest = max(1, anatomy.max_positions - settings.max_new_tokens)
            shortened = list(dict.fromkeys(min(context, longest) for context in settings.contexts))
            settings = settings.model_copy(update={"contexts": shortened})
        check_positions(anatomy, max(settings.contexts), settings.max_new_tokens)
        for entry in entries[1:]:
            if entry.model.device != entries[0].model.device:
                raise FulldepthError(
                    f"{entry.label} is on {entry.model.device}, the original on {entries[0].model.device}."
                )
            if (size := vocabulary(entry.model)) != anatomy.vocab_size:
                raise FulldepthError(
                    f"{entry.label} has a vocabulary of {size}, the original of {anatomy.vocab_size}: not the same "
                    "model."
                )
        models, examples = {entry.label: entry.model for entry in entries}, None
        measured = Measured(list(models), {label: parameter_bytes(model) for label, model in models.items()})
        if data is not None or heldout is not None:
            checkpoint = Checkpoint(entries[0].model, entries[0].name)
            examples = read_data(checkpoint, anatomy, data, settings, tokenizer=tokenizer, heldout=heldout)
            measured.losses = heldout_losses(models, examples.heldout, settings.batch_size, watcher)
        runs = {label: (Runner(model), nullcontext) for label, model in models.items()}
        cells = [Cell(batch, context) for batch in settings.batches for context in settings.contexts]
        watcher.begin("Benchmark", len(cells) * len(runs) * (settings.repeats + settings.warmup))
        for cell in cells:
            ids = measured.take_times(cell, runs, anatomy, settings, watcher)
            for label, (runner, _) in runs.items():
                run = partial(runner.run, ids, cell.context)
                peak, cache = peak_bytes(runner.model, ids, run), cache_bytes(run().cache)
                measured.memory[label, cell] = peak, cache / ids.numel()
        results = Results(measured.table(), _document(entries, measured, settings, examples))
        if output is not None:
            results.save(output)
    return results


@dataclass(frozen=True)
class BenchedModel:
    """A model of the benchmark."""

    label: str
    model: PreTrainedModel
    name: str
    notes: dict[str, Any]
    """Notes of an export: `format`, `plan`, ...; empty for other models."""

    @property
    def plan(self) -> dict[str, Any]:
        """The plan that it was exported with; empty if there is none."""
        return self.notes.get("plan") or {}


def _opened(models: Sequence[str | Path | PreTrainedModel], settings: BenchSettings) -> list[BenchedModel]:
    """Every model loaded, with distinct labels: the last parts of the names if they differ, else numbered names."""
    opened: list[tuple[PreTrainedModel, str, dict[str, Any]]] = []
    options = settings.model_dump(include={"dtype", "device", "revision", "trust_remote_code"})
    for model in models:
        if isinstance(model, str | Path) and (Path(model) / NOTES).is_file():
            exported = load(model, dtype=settings.dtype, device=settings.device)
            opened.append((exported, str(model), read_notes(Path(model))))
        else:
            checkpoint = open_model(model, **options)
            opened.append((checkpoint.model, checkpoint.name, {}))
    labels = [Path(name).name or name for _, name, _ in opened]
    if len(set(labels)) < len(labels):
        labels = [name for _, name, _ in opened]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({labels[: at + 1].count(label)})" for at, label in enumerate(labels)]
    return [BenchedModel(label, *each) for label, each in zip(labels, opened, strict=True)]


def _document(
    entries: Sequence[BenchedModel], measured: Measured, settings: BenchSettings, examples: Examples | None
) -> dict[str, Any]:
    """The entries of `results.json`."""
    first, data, digest = entries[0], {} if examples is None else examples.meta, model_hash(entries[0].model)
    described, warnings = [], []
    for entry in entries:
        model, plan, original = entry.model, entry.plan, entry is first
        layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
        depth = find_anatomy(model).num_layers if original else layers if isinstance(layers, int) else None
        described.append(
            {
                "label": entry.label,
                "baseline": original,
                "model": {
                    "name": entry.name,
                    "class": type(model).__name__,
                    "num_layers": depth,
                    "parameters": sum(parameter.numel() for parameter in model.parameters()),
                    "dtype": str(model.dtype).removeprefix("torch."),
                    "hash": digest if original else None,
                },
                "format": entry.notes.get("format"),
                "granularity": plan.get("granularity"),
                "blocks": plan.get("blocks"),
                "losses": plan.get("losses"),
                "healed_loss": plan.get("healed_loss"),
            }
        )
        if original:
            continue
        if model.dtype != first.model.dtype:
            warnings.append(f"{entry.label} computes in {model.dtype}, the original in {first.model.dtype}.")
        elif settings.dtype == "auto" and plan.get("model", {}).get("hash", digest) != digest:
            warnings.append(f"{entry.label} was made from other weights than those of {first.label}.")
    document = {
        **provenance("bench", settings.model_dump(), seed=settings.seed, machine=machine(first.model.device)),
        "baseline": first.label,
        "model": described[0]["model"],
        "models": described,
        "data": data or None,
        "warnings": [*warnings, *data.get("warnings", [])],
        "headline": dict(_headline(entries, measured, examples)),
    }
    return dict(finite(document))


def _headline(
    entries: Sequence[BenchedModel], measured: Measured, examples: Examples | None
) -> Iterator[tuple[str, Finding]]:
    """Findings by name for each export: the added loss, and for each phase the ratio of times."""
    not_compared, cells = measured.busy(), len(measured.other_load)
    where = f" over {cells} combinations of batch and context" if cells > 1 else ""
    for entry in entries[1:]:
        label = entry.label
        if measured.losses is not None:
            losses, added = measured.losses, measured.losses.added(label)
            loss = f"held-out loss {losses.mean(label):.4f} nats, {in_words(added, entries[0].label)}"
            sentence = f"{label}: {loss}; {losses.count} tokens."
            if examples is not None and entry.plan and (remark := overlap(Plan.of(entry.plan), examples)):
                sentence += f" {remark}"
            yield f"loss_added {label}", gap_finding(added, sentence)
        for phase in PHASES if not_compared is None else ():
            sentence = f"{label}, {phase} time{where}: {measured.ratio_text(label, phase)}."
            yield f"{phase}_time_ratio {label}", Finding(measured.ratio(label, phase).value, "1", sentence)
    if not_compared is not None:
        yield "times", not_compared
