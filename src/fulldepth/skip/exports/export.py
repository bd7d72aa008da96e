"""`export`: a plan and its model as a checkpoint that was loaded again, elsewhere, before it got its name."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.hub import convert_file_size_to_int

from fulldepth.errors import FulldepthError, one_line, unknown
from fulldepth.execution import find_anatomy
from fulldepth.files import read_document, read_json
from fulldepth.hf import Anatomy, is_offloaded, load_checkpoint, load_tokenizer, tokenizer_folder
from fulldepth.results import versions
from fulldepth.settings.search import known_format
from fulldepth.skip.exports.fold import probes, scaled_logits
from fulldepth.skip.exports.folder import check_target, count_parameters, folder_to_be, strip_foreign_code
from fulldepth.skip.exports.formats import FORMATS, SHARD_SIZE, Draft, Format, without_bars
from fulldepth.skip.exports.older_names import copy_tokenizer, publish_older_names, publish_older_tokenizer
from fulldepth.skip.exports.possible import Outline, check_format
from fulldepth.skip.exports.readers import prove
from fulldepth.skip.plan import MOST_BYTES, PER_CHANNEL, Plan

NOTES = "fulldepth_skip.json"
"""What an export says of itself: format, error, notes, and the whole plan."""
SCHEMA_VERSION = 1


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
    """Whether the reader that the format is for has loaded it and given these logits."""
    notes: tuple[str, ...]


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
) -> Export:
    """Write a plan's model as a checkpoint, load it in a fresh process, compare logits, and only then name it.

    The folder appears whole or not at all: it is written beside `output` under another name. It carries the tokenizer,
    the generation settings, and `fulldepth_skip.json` with the plan. Weights are changed and written file by file:
    beside the model at most `shard_size` bytes are held, or one layer's weights while the folding is measured. A model
    that is loaded here is dropped before the fresh process starts.

    Args:
        plan: what is skipped, with the scalars; or its file.
        model: the checkpoint that the plan was made for, or the model as loaded from it, which stays as it is.
        format: `folded` (an ordinary checkpoint, skipped blocks zero), `fast` (without the skipped blocks; carries its
            code), `decilm` (without them, in the layout of vLLM and llama.cpp), or `layer` (whole layers gone).
        output: folder to be made.
        tokenizer: to be saved with it, or its folder or Hub name; None takes the one that the search read with: named
            there, or beside the checkpoint, or beside the one that the plan names.
        dtype: precision to load the model in; None = that of the search.
        device: where to; None = the first accelerator, else the CPU. A loaded model stays where it is.
        device_map: `auto` or a map of modules, for models larger than one device; the fresh process uses `auto` then.
        revision: branch, tag or commit of a Hub model and its tokenizer.
        trust_remote_code: run code that the checkpoint or its tokenizer carries.
        shard_size: most bytes of one file of weights, also as text such as `2GB`.

    Raises:
        FulldepthError: if `output` exists, the plan is for another model, has scalars per channel, or is of a
            granularity that the format does not know, folding is refused, the disk is full, or the export loads as
            anything but the plan's model; for a device and a device map at once.
    """
    chosen, most, target = FORMATS[known_format(format)], _bytes(shard_size), Path(output)
    check_target(target)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    check_exportable(plan)
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    loaded = _opened(plan, model, device, device_map, dtype=dtype or plan.dtype, **hub)
    anatomy = check_format(loaded, Outline.of(plan), chosen)
    reader_map = "auto" if device_map is not None or is_offloaded(loaded) else None
    source = model.name_or_path if isinstance(model, PreTrainedModel) else model
    with folder_to_be(target) as folder:
        whole = anatomy if anatomy.model is loaded else find_anatomy(loaded)
        written = _write(plan, whole, anatomy, chosen, folder, most)
        del loaded, whole, anatomy
        gc.collect()  # a model that was passed in is held by its owner
        places = (plan.data.get("tokenizer"), source, plan.model.name)
        written.notes.extend(save_tokenizer(tokenizer, places, folder, **hub))
        return _proven(plan, chosen, target, _Checked(folder, written, reader_map))


def _proven(plan: Plan, format: Format, target: Path, checked: _Checked) -> Export:
    """Load the checkpoint as others will, compare its logits, and write down what it is."""
    folder = checked.folder
    publish_older_tokenizer(folder)
    strip_foreign_code(folder, carries_code=format.reader == "carried")
    error = checked.by(format.reader)
    verified, said = format.verify(checked.by)
    notes = (*said, *checked.written.notes)
    report = Export(format.name, target, error, count_parameters(folder), 0, verified, notes)
    _describe(report, plan, folder)
    return replace(report, bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))


@dataclass(frozen=True)
class _Written:
    """What is known of an export besides its files."""

    ids: Tensor
    """[B, T] tokens to compare logits on."""
    logits: Tensor
    """[B, T, V] of the healed model."""
    allowed: float
    """Largest error of the export's, relative to the largest logit."""
    notes: list[str]


def _write(plan: Plan, whole: Anatomy, anatomy: Anatomy, format: Format, folder: Path, shard_size: int) -> _Written:
    """Write the checkpoint, without tokenizer and notes; the model stays as it is.

    Args:
        plan: for this model.
        whole: of the model.
        anatomy: of a stock class that computes the same of text.
        format: that can hold both.
        folder: where to.
        shard_size: most bytes of one file of weights.
    """
    folding = format.folding(anatomy, plan)
    ids = probes(whole)
    expected = scaled_logits(whole, plan, ids)
    with generation_settings(anatomy.model, folder), without_bars():
        notes = format.write(Draft(anatomy, plan, folding, folder, shard_size))
    if whole.config is not whole.model.config and anatomy.config is anatomy.model.config:
        notes.append(f"This is the language model of a {type(whole.model).__name__} alone; it reads no images.")
    publish_older_names(folder)
    return _Written(ids, expected, format.tolerance(folding, expected.dtype), notes)


@dataclass(frozen=True)
class _Checked:
    """An export to be loaded by fresh processes."""

    folder: Path
    written: _Written
    device_map: str | None

    def by(self, reader: str) -> float:
        """The error of its logits, as a reader loads it."""
        own = self.written
        return prove(self.folder, own.ids, own.logits, own.allowed, reader, self.device_map)


def _bytes(size: int | str) -> int:
    """A size such as `5GB` as a number of bytes.

    Raises:
        FulldepthError: if it is none, or not above 0.
    """
    try:
        number = convert_file_size_to_int(size)
    except ValueError:
        number = 0
    if number <= 0:
        raise FulldepthError(f"Expected the size of a file such as 5GB or 500MB, got {one_line(repr(size), 60)}.")
    return number


def _opened(
    plan: Plan, model: PreTrainedModel | str | Path, device: Any, device_map: Any, **options: Any
) -> PreTrainedModel:
    """The plan's model, loaded with these options unless it is already.

    Raises:
        FulldepthError: if it is another model; for a device and a device map at once.
    """
    if device is not None and device_map is not None:
        raise FulldepthError("Set a device or a device map, not both.")
    where = {"device": device, "device_map": device_map}
    loaded = model if isinstance(model, PreTrainedModel) else load_checkpoint(model, **where, **options).model
    plan.check_model(loaded)
    return loaded


def load(
    directory: str | Path,
    *,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
) -> PreTrainedModel:
    """The model of an export of any format, in evaluation mode; no foreign code runs.

    An export of the format `fast` or `decilm` that was fine-tuned or saved again (`save_pretrained`) has no notes, and
    is loaded all the same.

    Args:
        directory: of the export.
        device: where to put the model; the first accelerator unless named. Ignored with `device_map`.
        device_map: `auto`, or a map of modules to devices, for models larger than one device.

    Raises:
        FulldepthError: if the folder is no export, or is broken.
    """
    folder = Path(directory)
    return _format_of(folder).load(folder, device=device, device_map=device_map)


def _format_of(folder: Path) -> Format:
    """The format that an export's notes name; without notes, the one whose model its `config.json` describes.

    Raises:
        FulldepthError: if the folder is no export.
    """
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
    """What an export says of itself; its plan is a valid `Plan`.

    Raises:
        FulldepthError: if there is nothing, it does not fit the schema, or it was written by a newer version.
    """
    path = folder / NOTES
    if not path.exists():
        raise FulldepthError(
            f"{folder} is no export of a skip plan: it has no {NOTES}. `fulldepth skip apply` makes one."
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


@contextmanager
def generation_settings(model: PreTrainedModel, folder: Path) -> Iterator[None]:
    """Carry the generation settings as they are: some checkpoints have such as transformers loads but will not save."""
    settings = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings
    if settings is not None:
        settings.to_json_file(folder / "generation_config.json")


def save_tokenizer(
    tokenizer: Any, places: Iterable[Any], folder: Path, *, revision: str | None, trust_remote_code: bool
) -> list[str]:
    """Save the tokenizer given, or copy the files of the first place that has one.

    Raises:
        FulldepthError: if a name is given that has none.
    """
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        tokenizer.save_pretrained(folder)
        return []
    for place in (tokenizer,) if tokenizer is not None else places:
        name = str(tokenizer_folder(Path(place)) or place) if isinstance(place, str | Path) and str(place) else ""
        if name and copy_tokenizer(name, folder, revision):
            return []
    if tokenizer is not None:
        load_tokenizer(tokenizer, revision=revision, trust_remote_code=trust_remote_code).save_pretrained(folder)
        return []
    return ["No tokenizer was given, and none was found with the checkpoint."]


def _describe(report: Export, plan: Plan, folder: Path) -> None:
    """Write what the export is, for programs and for people."""
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
    blocks = ", ".join(map(str, sorted(plan.blocks)))
    lines = [
        f"# {plan.model.name} without the {plan.granularity} of layer{'s' * (len(plan.blocks) > 1)} {blocks}",
        "",
        f"Format `{report.format}` of `fulldepth skip`. Loaded in a fresh process without that package, its logits "
        f"differ from the plan's by {report.logit_error:.1e} of the largest.",
        "",
        *(f"- {note}" for note in report.notes),
        "",
        f"The plan is in `{NOTES}`.",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
