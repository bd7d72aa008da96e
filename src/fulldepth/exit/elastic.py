"""`export_layers`: an ordinary checkpoint with the first layers of a model ("train once, fit all devices").

Source: "Representation progression and aligned training", Sec. 1 and 4.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.number_format import in_percent
from fulldepth.core.progress import Watcher
from fulldepth.execution.readers import prove_export
from fulldepth.exit.readings import no_advice, read_exits, sampling
from fulldepth.hf import (
    Anatomy,
    ModelCard,
    exit_heads_of,
    few_layers,
    first_layers,
    sample_inputs,
    save_exit_heads,
    silent,
    truncated,
)
from fulldepth.hf.asked_outputs import asked_outputs, make_plain, restore_outputs
from fulldepth.hf.checkpoint_folder import (
    LARGE,
    check_disk_space,
    check_output_path,
    copy_files,
    count_parameters,
    folder_to_be,
    generation_settings,
    publish_older_names,
    publish_older_tokenizer,
    save_tokenizer,
    size_of,
    strip_foreign_code,
    trial,
)
from fulldepth.hf.file_checks import PROCESSOR_FILES
from fulldepth.hf.promises import withdraw_promises
from fulldepth.hf.publishing import PIPELINES, loading_code
from fulldepth.hf.rounding import TOLERANCE
from fulldepth.settings.exit import LayersSettings
from fulldepth.settings.keywords import takes_settings
from fulldepth.subject import Subject, chosen_tokenizer

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayersExport:
    """A finished checkpoint with the first layers of a model."""

    path: Path
    layers: int
    """E."""
    num_layers: int
    """L of the original."""
    parameters: int
    """Numbers in the weights on disk."""
    bytes: int
    """Size of the folder."""
    logit_error: float
    """Largest difference of a logit after loading it in a fresh process, relative to the largest."""
    notes: tuple[str, ...]

    @property
    def size(self) -> str:
        """The size in words."""
        return f"{self.bytes / 1e6:.1f} MB"


@takes_settings(LayersSettings)
def export_layers(
    model: str | Path | PreTrainedModel,
    output: str | Path,
    *,
    settings: LayersSettings,
    watcher: Watcher,
    data: Any = None,
    tokenizer: Any = None,
) -> LayersExport:
    """Write a checkpoint of the same class with the first E layers, the final norm and the head.

    One of the settings `layers` and `effective_depth` chooses E. The checkpoint is loaded in a fresh process, by
    transformers alone, and its logits are compared before the folder is renamed to `output`. It holds the tokenizer or
    the image processor, the generation settings and a model card.

    Args:
        model: checkpoint folder, Hub name, or a loaded model.
        output: folder to create.
        settings: fields of `LayersSettings` as keywords, or an instance.
        watcher: receives messages and progress.
        data: for `effective_depth`; as for `sweep`.
        tokenizer: tokenizer to save, or its folder or Hub name; None = the checkpoint's.

    Returns:
        Path, size and parameters of the checkpoint, and the largest difference of its logits.

    Raises:
        FulldepthError: if `output` exists, E is out of range, the model cannot be cut (`hf.truncated`), or the
            checkpoint computes other logits when it is loaded again.
    """
    target = Path(output)
    if settings.effective_depth is not None and data is None:
        raise FulldepthError("--effective-depth measures the accuracy of every layer, and needs --data.")
    if settings.effective_depth is None and data is not None:
        raise FulldepthError("--data has no effect without --effective-depth.")
    check_output_path(target)
    with Subject.open(model, None, settings) as subject:
        saved = chosen_tokenizer(settings, tokenizer)
        if settings.effective_depth is not None or size_of(subject.model) >= LARGE:
            _rehearse(subject, target, settings, saved)
        layers, reason = _choose(subject, settings, data, tokenizer, watcher)
        return _export(subject, truncated(subject.anatomy, layers), target, settings, saved, reason)


def _rehearse(subject: Subject, target: Path, settings: LayersSettings, tokenizer: Any) -> None:
    """Export a few layers beside `target`, load and compare them, and remove them, before the work.

    Nothing is tried if the model cannot be cut there, or its own layers cannot be compared.

    Raises:
        FulldepthError: what the export refuses.
    """
    with trial(target) as place:
        try:
            cut = first_layers(subject.anatomy, few_layers(subject.anatomy))
            cut(**sample_inputs(subject.anatomy))
        except Exception as error:  # of any class of transformers; other layers may do
            LOGGER.debug("no first layers to try the export on: %s", error)
            return
        _export(subject, cut, place, settings, tokenizer, "")


def _export(
    subject: Subject,
    cut: PreTrainedModel,
    target: Path,
    settings: LayersSettings,
    tokenizer: Any,
    reason: str,
) -> LayersExport:
    """Write the checkpoint of a model that was cut, and verify it."""
    checkpoint = subject.checkpoint
    anatomy = subject.anatomy
    make_plain(cut.config)
    withdrawn = withdraw_promises(cut.config, cut.state_dict())
    stock = type(cut).__module__.startswith("transformers.")
    notes = [reason, *withdrawn, *checkpoint.warnings]
    check_disk_space(target, size_of(cut))
    with folder_to_be(target) as folder:
        with generation_settings(cut, folder), silent():
            cut.save_pretrained(folder)
        save_exit_heads(cut, folder)
        publish_older_names(folder)
        notes += restore_outputs(asked_outputs(checkpoint.model), folder)
        if anatomy.family.modality == "images":
            if not copy_files(PROCESSOR_FILES, checkpoint.name, folder, settings.revision):
                notes.append("No image processor was found with the checkpoint.")
        else:
            notes += save_tokenizer(
                tokenizer,
                [(name, settings.revision) for name in (checkpoint.name, checkpoint.model.name_or_path)],
                folder,
                trust_remote_code=settings.trust_remote_code,
            )
            publish_older_tokenizer(folder)
        strip_foreign_code(folder, carries_code=not stock)
        error = _prove(folder, anatomy, cut, "stock" if stock else "carried")
        parameters = count_parameters(folder)
        layers = replace(anatomy, model=cut).num_layers
        report = LayersExport(target, layers, anatomy.num_layers, parameters, 0, error, tuple(notes))
        _card(subject, report).write(folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return replace(report, bytes=size)


def _choose(
    subject: Subject,
    settings: LayersSettings,
    data: Any,
    tokenizer: Any,
    watcher: Watcher,
) -> tuple[int, str]:
    """E, and a sentence on how it was chosen.

    Raises:
        FulldepthError: if it is out of range, or nothing is advised.
    """
    num_layers = subject.anatomy.num_layers
    share = 1 - (settings.effective_depth or 0)
    if (layers := settings.layers) is not None:
        if layers > num_layers:
            raise FulldepthError(f"{subject.kind} has {num_layers} layers, so its first {layers} cannot be exported.")
        return layers, f"The first {layers} of {num_layers} layers."
    check_cut(subject.anatomy)
    needs = {"head", "targets"}
    with Subject.open(subject.checkpoint, data, settings, needs=needs, tokenizer=tokenizer) as measured:
        readings = read_exits(measured, (), settings, watcher)
    if reason := no_advice(measured, readings):
        raise FulldepthError(f"{reason} Give other data, or choose the layers with --layers.")
    plain, low, layers = readings.depth(share)
    cut, full = (readings.accuracy(readings.all_at(layer)) for layer in (layers, num_layers))
    sampled = sampling(measured, readings)["sentence"]
    return layers, (
        f"The first {layers} of {num_layers} layers: the fewest shown to keep at least {in_percent(share)} of the full "
        f"model's accuracy on {measured.sequences.name} ({in_percent(cut)} and {in_percent(full)}; by the estimates "
        f"alone {plain}, 95 % interval {low} to {layers})." + (f" {sampled}" if sampled else "")
    )


def check_cut(anatomy: Anatomy) -> None:
    """Refuse a model that can be cut neither behind half of its layers nor before the last one, before it is measured.

    Raises:
        FulldepthError: as `hf.truncated`.
    """
    last = anatomy.num_layers - 1
    try:
        truncated(anatomy, max(1, last))
    except FulldepthError:
        truncated(anatomy, max(1, last // 2))


@torch.no_grad()
def _prove(folder: Path, anatomy: Anatomy, cut: PreTrainedModel, reader: str) -> float:
    """The error of the logits that a fresh process computes from the folder, relative to the largest.

    Raises:
        FulldepthError: if the checkpoint does not load there, or computes other logits.
    """
    inputs = sample_inputs(anatomy)
    output = cut(**inputs)
    names = ("logits", "prediction_logits", "last_hidden_state")
    expected = next(output[name] for name in names if name in output)
    given = inputs["input_ids"] if anatomy.task == "causal-lm" else inputs
    return prove_export(folder, given, expected, TOLERANCE[expected.dtype], reader)


def _card(subject: Subject, report: LayersExport) -> ModelCard:
    """The model card."""
    name = one_line(subject.checkpoint.name, 200)
    kind: Any = type(subject.model)
    stock = kind.__module__.startswith("transformers.")
    exit_head = exit_heads_of(subject.model).get(report.layers)
    head = "its head" if exit_head is None else f"layer {report.layers}'s own head"
    layers = f"first {report.layers} of {report.num_layers} layers"
    return ModelCard(
        title=f"{name}: the {layers}",
        method=(
            f"`{name}` with its {layers}, its final norm and {head}; all weights are the original's. Inference of "
            "the original that stops after this layer gives the same outputs. Made with fulldepth."
        ),
        numbers={
            "Layers": f"{report.layers} of {report.num_layers}",
            "Parameters": f"{report.parameters:,}",
            "Largest difference of a logit after loading": f"{report.logit_error:.1e} of the largest logit",
        },
        loading=loading_code(kind.__name__ if stock else kind._auto_class or "AutoModel", carried=not stock),
        source=subject.checkpoint.name,
        tags=["early-exit", "pruning"],
        notes=["\n".join(f"- {note}" for note in report.notes)],
        pipeline=PIPELINES.get(subject.anatomy.task, "feature-extraction"),
    )
