"""`export` writes a plan's model as a checkpoint that a fresh process has loaded and checked; `load` reads it."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import convert_file_size_to_int

from fulldepth.errors import FulldepthError, one_line, unknown
from fulldepth.execution import find_anatomy
from fulldepth.execution.readers import prove
from fulldepth.files import read_document, read_json
from fulldepth.hf import (
    Anatomy,
    check_publishing,
    is_offloaded,
    load_checkpoint,
    publish,
    silent,
)
from fulldepth.hf.checkpoint_folder import (
    check_target,
    count_parameters,
    folder_to_be,
    generation_settings,
    publish_older_names,
    publish_older_tokenizer,
    save_tokenizer,
    strip_foreign_code,
)
from fulldepth.results import versions
from fulldepth.settings.search import known_format
from fulldepth.skip.exports.card import card_of
from fulldepth.skip.exports.fold import probes, rounding_error, scaled_logits
from fulldepth.skip.exports.formats import FORMATS, SHARD_SIZE, Draft, Format
from fulldepth.skip.exports.possible import Outline, check_format
from fulldepth.skip.plan import MOST_BYTES, PER_CHANNEL, Plan

NOTES = "fulldepth_skip.json"
"""File of an export with its format, error, notes and plan."""
SCHEMA_VERSION = 1
ALLOWANCE, MOST_NOISE = 1.5, 0.2
"""Multiple of the error of rounding in half precision that an export may have, and an upper limit."""


@dataclass(frozen=True)
class Export:
    """A finished export."""

    format: str
    path: Path
    logit_error: float
    """Largest difference of a logit from the healed model's, relative to the largest, after loading it again."""
    parameters: int
    """Numbers in the weights on disk."""
    bytes: int
    """Size of the folder."""
    verified: bool
    """Whether the program that the format targets has loaded it and computed these logits."""
    notes: tuple[str, ...]
    published: str | None = None
    """Address on the Hub, if it was uploaded."""


def export(
    plan: Plan | str | Path,
    model: PreTrainedModel | str | Path,
    format: str,
    output: str | Path,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    shard_size: int | str = SHARD_SIZE,
    push_to_hub: str | None = None,
) -> Export:
    """Write a plan's model as a checkpoint, and verify its logits in a fresh process.

    The folder is renamed to `output` after the check. It holds the tokenizer, the generation settings, a model card,
    and `fulldepth_skip.json` with the plan. Weights are written file by file: at most `shard_size` bytes, or one
    layer's weights, are in memory in addition to the model. A model that is loaded here is freed before the check.

    Args:
        plan: the plan, or its file.
        model: the checkpoint that the plan was made for, or the model as loaded from it, which does not change.
        format: `folded` (an ordinary checkpoint, skipped blocks zero), `fast` (without the skipped blocks; carries its
            code), `decilm` (without them, in the layout of vLLM and llama.cpp), or `layer` (without whole layers).
        output: folder to create.
        tokenizer: tokenizer to save, or its folder or Hub name; None = the one that the search used.
        dtype: precision to load the model in; None = that of the search.
        device: device to load the model on; None = the first accelerator, else the CPU. A loaded model is not moved.
        device_map: `auto` or a map of modules, for models larger than one device; the fresh process uses `auto` then.
        revision: branch, tag or commit of a Hub model and its tokenizer.
        trust_remote_code: run code that the checkpoint or its tokenizer carries.
        shard_size: largest size of a weight file in bytes, or as `2GB`.
        push_to_hub: name (`user/model`) to upload the folder to; a new repository is private.

    Raises:
        FulldepthError: if `output` exists, the plan is for another model, has scalars per channel, or is of a
            granularity that the format does not hold, folding is refused, the disk is full, the export computes other
            logits than the plan's model, both `device` and `device_map` are set, or the upload fails.
    """
    check_publishing(push_to_hub)
    file_format, most_bytes, target = FORMATS[known_format(format)], _bytes(shard_size), Path(output)
    check_target(target)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    check_exportable(plan)
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    loaded, source = _opened(model, device, device_map, dtype=dtype or plan.dtype, **hub)
    plan.check_model(loaded)
    stock = check_format(loaded, Outline.of(plan), file_format)
    reader_map = "auto" if device_map is not None or is_offloaded(loaded) else None
    with folder_to_be(target) as folder:
        anatomy = stock if stock.model is loaded else find_anatomy(loaded)
        written = _write(plan, anatomy, stock, file_format, folder, most_bytes, reader_map)
        del loaded, anatomy, stock
        gc.collect()  # a model that was passed in is held by its owner
        places = (plan.data.get("tokenizer"), source, plan.model.name)
        written.notes.extend(save_tokenizer(tokenizer, places, folder, **hub))
        report = _checked(plan, file_format, target, written)
    return replace(report, published=publish(target, push_to_hub))


@dataclass(frozen=True)
class _Written:
    """A checkpoint on disk, and the logits expected from it."""

    folder: Path
    ids: Tensor
    """[B, T] tokens."""
    logits: Tensor
    """[B, T, V] of the healed model."""
    tolerance: float
    """Largest error of a logit, relative to the largest logit."""
    device_map: str | None
    """`auto` if the fresh process distributes the model over devices and disk."""
    notes: list[str]

    def error_by(self, reader: str) -> float:
        """The error of the logits that a reader computes, relative to the largest."""
        return prove(self.folder, self.ids, self.logits, self.tolerance, reader, self.device_map)


def _checked(plan: Plan, format: Format, target: Path, written: _Written) -> Export:
    """Compare the logits that fresh processes compute, and write the notes."""
    folder = written.folder
    publish_older_tokenizer(folder)
    strip_foreign_code(folder, carries_code=format.reader == "carried")
    error = written.error_by(format.reader)
    verified, notes = format.verify(written.error_by)
    notes = [*notes, *written.notes]
    report = Export(format.name, target, error, count_parameters(folder), 0, verified, tuple(notes))
    _describe(report, plan, folder)
    return replace(report, bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))


def _write(
    plan: Plan,
    anatomy: Anatomy,
    stock: Anatomy,
    format: Format,
    folder: Path,
    shard_size: int,
    device_map: str | None,
) -> _Written:
    """Write the checkpoint without its tokenizer; `stock` is the equivalent of `anatomy` in a stock class."""
    folding = format.folding(stock, plan)
    ids = probes(anatomy)
    expected = scaled_logits(anatomy, plan, ids)
    with generation_settings(stock.model, folder), silent():
        notes = format.write(Draft(stock, plan, folding, folder, shard_size))
    if anatomy.config is not anatomy.model.config and stock.config is stock.model.config:
        notes.append(f"This is the language model of a {type(anatomy.model).__name__} alone; it reads no images.")
    publish_older_names(folder)
    noise = min(ALLOWANCE * rounding_error(anatomy, plan, ids, expected), MOST_NOISE)
    return _Written(folder, ids, expected, max(format.tolerance(folding, expected.dtype), noise), device_map, notes)


def _opened(
    model: PreTrainedModel | str | Path, device: Any, device_map: Any, **options: Any
) -> tuple[PreTrainedModel, str | None]:
    """The model, loaded with these options unless it already is, and its folder or Hub name."""
    if device is not None and device_map is not None:
        raise FulldepthError("Set a device or a device map, not both.")
    if isinstance(model, PreTrainedModel):
        if hasattr(model, "peft_config"):
            raise FulldepthError(
                "The model holds an adapter, which has no place in an export. Merge it (PeftModel.merge_and_unload()) "
                "and search again."
            )
        return model, model.name_or_path
    return load_checkpoint(model, device=device, device_map=device_map, **options).model, str(model)


def _bytes(size: int | str) -> int:
    """A size such as `5GB` as a positive number of bytes."""
    try:
        number = convert_file_size_to_int(size)
    except ValueError:
        number = 0
    if number <= 0:
        raise FulldepthError(f"Expected a file size such as 5GB or 500MB, got {one_line(repr(size), 60)}.")
    return number


def load(
    directory: str | Path,
    *,
    dtype: str | torch.dtype | None = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
) -> PreTrainedModel:
    """The model of an export of any format, in evaluation mode, without running code from the folder.

    An export of the format `fast` or `decilm` that was saved again (`save_pretrained`), for example after fine-tuning,
    has no notes and is loaded by its configuration.

    Args:
        directory: of the export.
        dtype: `auto` keeps the export's own precision. Rotary frequencies and scalars stay in float32.
        device: where to put the model; the first accelerator unless named. Ignored with `device_map`.
        device_map: `auto`, or a map of modules to devices, for models larger than one device.

    Raises:
        FulldepthError: if the folder is no export, or is broken.
    """
    folder = Path(directory)
    return _format_of(folder).load(folder, dtype=dtype, device=device, device_map=device_map)


def _format_of(folder: Path) -> Format:
    """The format that an export's notes name; without notes, the one whose model its `config.json` describes."""
    path = folder / "config.json"
    if not (folder / NOTES).exists() and path.is_file() and isinstance(config := read_json(path), dict):
        for format in FORMATS.values():
            if format.is_saved_again(config):
                return format
    return FORMATS[read_notes(folder)["format"]]


class Notes(pydantic.BaseModel):
    """The entries of `fulldepth_skip.json`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    schema_version: int
    format: str
    logit_error: float
    parameters: int
    verified: bool
    notes: list[str]
    versions: dict[str, str]
    plan: dict[str, pydantic.JsonValue]


def read_notes(folder: Path) -> dict[str, Any]:
    """The entries of `fulldepth_skip.json`, with a valid plan.

    Raises:
        FulldepthError: if the file is missing, does not fit the schema, or was written by a newer version.
    """
    path = folder / NOTES
    if not path.exists():
        raise FulldepthError(
            f"{folder} is not an export of a skip plan: it has no {NOTES}. `fulldepth skip apply` makes exports."
        )
    document = read_json(path, most=MOST_BYTES)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise FulldepthError(
            f"{path} has schema version {one_line(repr(version), 60)}, this fulldepth reads {SCHEMA_VERSION}."
        )
    notes = read_document(path, Notes, most=MOST_BYTES)
    if notes.format not in FORMATS:
        raise FulldepthError(f"Cannot read {path}: {unknown('format', one_line(notes.format, 60), FORMATS)}")
    Plan.of(notes.plan, f"The plan in {path}")
    return notes.model_dump()


def check_exportable(plan: Plan) -> None:
    """Refuse scalars that no format can hold, before a model is loaded.

    Raises:
        FulldepthError: for scalars per channel.
    """
    if any(isinstance(value, list) for own in plan.scalars.values() for value in own.values()):
        raise FulldepthError(f"{PER_CHANNEL} Search again with one scalar each.")


def _describe(report: Export, plan: Plan, folder: Path) -> None:
    """Write `fulldepth_skip.json` and `README.md`."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "format": report.format,
        "logit_error": report.logit_error,
        "parameters": report.parameters,
        "verified": report.verified,
        "notes": list(report.notes),
        "versions": versions(),
        "plan": plan.document(),
    }
    (folder / NOTES).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    card = card_of(
        plan,
        format=report.format,
        carries_code=FORMATS[report.format].reader == "carried",
        logit_error=report.logit_error,
        parameters=report.parameters,
        notes=report.notes,
    )
    card.write(folder)
