"""`export_layers`: an ordinary checkpoint with the first layers of a model ("train once, fit all devices").

Source: "Representation progression and aligned training", Sec. 1 and 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fulldepth.early_exit import no_advice, open_checkpoint, prepare_subject
from fulldepth.early_exit import read as read_layers
from fulldepth.errors import FulldepthError, one_line
from fulldepth.execution import find_anatomy
from fulldepth.execution.readers import prove, read
from fulldepth.execution.stream import TOLERANCE, relative_error
from fulldepth.exit.record import qualities
from fulldepth.hf import (
    Anatomy,
    Checkpoint,
    ModelCard,
    check_publishing,
    evaluating,
    exit_heads_of,
    outputs_by_layer,
    publish,
    sample_inputs,
    save_exit_heads,
    silent,
    truncated,
    unwrapped,
)
from fulldepth.hf.checkpoint_folder import (
    check_target,
    copy_processor,
    count_parameters,
    folder_to_be,
    generation_settings,
    publish_older_names,
    publish_older_tokenizer,
    save_tokenizer,
    strip_foreign_code,
)
from fulldepth.progress import Watcher
from fulldepth.settings import layer as layered
from fulldepth.settings.exit import ExitSettings, file_size

PIPELINES = {
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "text-classification": "text-classification",
    "image-classification": "image-classification",
    "detection": "object-detection",
}
"""Task -> the Hub's name for it; others are `feature-extraction`."""


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
    published: str | None = None
    """Address on the Hub, if it was uploaded."""


def export_layers(
    model: str | Path | PreTrainedModel,
    output: str | Path,
    *,
    data: Any = None,
    tokenizer: Any = None,
    push_to_hub: str | None = None,
    watcher: Watcher | None = None,
    **options: Any,
) -> LayersExport:
    """Write a checkpoint of the same class with the first E layers, the final norm and the head.

    One of `export_layers`, `memory_budget` and `effective_depth` among the options chooses E. The checkpoint is loaded
    in a fresh process, by transformers alone, and its logits are compared before the folder is renamed to `output`. It
    holds the tokenizer or the image processor, the generation settings and a model card.

    Args:
        model: checkpoint folder, Hub name, or a loaded model.
        output: folder to create.
        data: for `effective_depth`; as for `sweep`.
        tokenizer: tokenizer to save, or its folder or Hub name; None = the checkpoint's.
        push_to_hub: name (`user/model`) to upload the folder to; a new repository is private.
        watcher: receives messages and progress.
        **options: fields of `ExitSettings`.

    Raises:
        FulldepthError: if `output` exists, E is out of range, no layer fits into the memory, the model cannot be cut
            (`hf.truncated`), or the checkpoint computes other logits when it is loaded again.
    """
    settings, watcher, target = layered(ExitSettings, options), watcher or Watcher(), Path(output)
    if not settings.exports:
        raise FulldepthError("Set export_layers, memory_budget or effective_depth, which choose the number of layers.")
    check_publishing(push_to_hub)
    check_target(target)
    if isinstance(model, torch.nn.Module):
        model = unwrapped(model)
    checkpoint = open_checkpoint(model, settings)
    with evaluating(checkpoint.model):
        anatomy = find_anatomy(checkpoint.model)
        layers, reason = _choose(checkpoint, anatomy, settings, data, tokenizer, watcher)
        with folder_to_be(target) as folder:
            report = _write(checkpoint, anatomy, layers, folder, tokenizer, settings)
            report = replace(report, path=target, notes=(reason, *report.notes))
            _card(checkpoint, anatomy, report).write(folder)
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return replace(report, bytes=size, published=publish(target, push_to_hub))


def _choose(
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    settings: ExitSettings,
    data: Any,
    tokenizer: Any,
    watcher: Watcher,
) -> tuple[int, str]:
    """E, and a sentence on how it was chosen.

    Raises:
        FulldepthError: if it is out of range, no layer fits into the memory, or data are missing.
    """
    num_layers = anatomy.num_layers
    if settings.export_layers is not None:
        if settings.export_layers > num_layers:
            raise FulldepthError(
                f"{type(checkpoint.model).__name__} has {num_layers} layers, so its first {settings.export_layers} "
                "cannot be exported."
            )
        return settings.export_layers, f"The first {settings.export_layers} of {num_layers} layers."
    if settings.memory_budget is not None:
        budget = file_size(settings.memory_budget)
        sizes = weight_bytes(anatomy)
        fitting = [layers for layers, size in enumerate(sizes, start=1) if size <= budget]
        if not fitting:
            raise FulldepthError(
                f"One layer with embeddings and head takes {sizes[0] / 1e6:.1f} MB of weights in "
                f"{str(checkpoint.model.dtype).removeprefix('torch.')}, more than {settings.memory_budget}. Load the "
                "model in another precision (--dtype), or raise the budget."
            )
        layers = fitting[-1]
        return layers, (
            f"The first {layers} of {num_layers} layers: the most whose weights ({sizes[layers - 1] / 1e6:.1f} MB) fit "
            f"into {settings.memory_budget}. Their quality was not measured."
        )
    if data is None or settings.effective_depth is None:
        raise FulldepthError("effective_depth measures the accuracy of every layer, and needs data.")
    subject = prepare_subject(checkpoint, data, settings, tokenizer)
    watcher.begin(f"Reading the layers of {Path(checkpoint.name).name}", len(subject.sequences))
    readings = read_layers(subject, (), tokens=settings.lens_tokens, seed=settings.seed, advance=watcher.advance)
    quality = qualities(readings)
    if reason := no_advice(subject, readings):
        raise FulldepthError(f"{reason} Give other data, or choose the layers with --export-layers.")
    plain, low, layers = readings.depth(1 - settings.effective_depth)
    return layers, (
        f"The first {layers} of {num_layers} layers: the fewest shown to keep at least "
        f"{1 - settings.effective_depth:.0%} of the full model's accuracy on {subject.sequences.name} "
        f"({quality[layers - 1]:.1%} and {quality[-1]:.1%}; by the estimates alone {plain}, 95 % interval {low} to "
        f"{layers})."
    )


def weight_bytes(anatomy: Anatomy) -> list[int]:
    """[L] bytes of the weights of a model with the first 1..L layers; tied and shared weights count once.

    In a multi-exit model the head of layer E takes the place of the model's own, and the heads before it count too.
    """
    model = anatomy.model
    heads = outputs_by_layer(anatomy) or [[]] * anatomy.num_layers
    inside = {module for part in (*anatomy.blocks, *chain(*heads)) for module in part.modules()}
    counted = _bytes(module for module in model.modules() if module not in inside)
    sizes = []
    for block, own in zip(anatomy.blocks, heads, strict=True):
        counted |= _bytes((*block.modules(), *own))
        sizes.append(sum(counted.values()))
    biases = [linear.bias for linear in (heads[-1] if len(sizes) > 1 else []) if linear.bias is not None]
    extra = sum(bias.nbytes for bias in biases)  # of the model's own head, whose bias a cut model has as zeros
    return [*(size + extra for size in sizes[:-1]), sizes[-1]]


def _bytes(modules: Iterable[nn.Module]) -> dict[int, int]:
    """Identity of each weight that the modules hold themselves -> its bytes."""
    return {id(p): p.nbytes for module in modules for p in module.parameters(recurse=False)}


def _write(
    checkpoint: Checkpoint, anatomy: Anatomy, layers: int, folder: Path, tokenizer: Any, settings: ExitSettings
) -> LayersExport:
    """Write the checkpoint, and compare its logits in a fresh process."""
    cut = truncated(anatomy, layers)
    stock = type(cut).__module__.startswith("transformers.")
    with generation_settings(cut, folder), silent():
        cut.save_pretrained(folder)
    save_exit_heads(cut, folder)
    publish_older_names(folder)
    notes: list[str] = []
    if anatomy.family.modality == "images":
        if not copy_processor(checkpoint.name, folder, settings.revision):
            notes.append("No image processor was found with the checkpoint.")
    else:
        hub: dict[str, Any] = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
        own = settings.tokenizer if tokenizer is None else tokenizer
        notes += save_tokenizer(own, (checkpoint.name, checkpoint.model.name_or_path), folder, **hub)
        publish_older_tokenizer(folder)
    strip_foreign_code(folder, carries_code=not stock)
    error = _prove(folder, anatomy, cut, "stock" if stock else "carried")
    return LayersExport(folder, layers, anatomy.num_layers, count_parameters(folder), 0, error, tuple(notes))


@torch.no_grad()
def _prove(folder: Path, anatomy: Anatomy, cut: PreTrainedModel, reader: str) -> float:
    """The error of the logits that a fresh process computes from the folder, relative to the largest.

    Raises:
        FulldepthError: if the checkpoint does not load there, or computes other logits.
    """
    inputs = sample_inputs(anatomy)
    expected = output_of(cut(**inputs))
    if anatomy.task == "causal-lm":
        return prove(folder, inputs["input_ids"], expected, TOLERANCE[expected.dtype], reader)
    got, report = read(folder, inputs, reader)
    error = relative_error(got, expected)
    if not error <= TOLERANCE[expected.dtype]:
        raise FulldepthError(
            f"The export is dropped: loaded again as {report.class_name}, its logits miss the model's by {error:.1e} "
            "of the largest."
        )
    return error


def output_of(output: Mapping[str, Any]) -> Tensor:
    """The logits of a model's output (of a detector with the boxes, joined), or its last hidden state.

    Raises:
        FulldepthError: if it has neither.
    """
    if "pred_boxes" in output:
        return torch.cat([output["logits"], output["pred_boxes"]], -1)  # as in the program of `readers`
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        if isinstance(value := output.get(name), Tensor):
            return value
    raise FulldepthError(f"The model gives neither logits nor a last hidden state, only {', '.join(output)}.")


def _card(checkpoint: Checkpoint, anatomy: Anatomy, report: LayersExport) -> ModelCard:
    """The model card."""
    name, kind = one_line(checkpoint.name, 200), type(checkpoint.model).__name__
    own = exit_heads_of(checkpoint.model).get(report.layers)
    head = "its head" if own is None else f"layer {report.layers}'s own head"
    layers = f"first {report.layers} of {report.num_layers} {'decoder ' * (anatomy.task == 'detection')}layers"
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
        loading=f'from transformers import {kind}\n\nmodel = {kind}.from_pretrained("PATH")',
        source=checkpoint.name,
        tags=["early-exit", "pruning"],
        notes=["\n".join(f"- {note}" for note in report.notes)],
        pipeline=PIPELINES.get(anatomy.task, "feature-extraction"),
    )
