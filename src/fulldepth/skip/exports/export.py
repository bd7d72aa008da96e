"""`export`: a plan and its model as a checkpoint that was loaded again, elsewhere, before it got its name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pydantic
import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from fulldepth.architectures import DeciLMForCausalLM
from fulldepth.capture import find_anatomy
from fulldepth.capture.stream import TOLERANCE
from fulldepth.errors import FulldepthError, one_line, unknown
from fulldepth.files import atomic_folder, read_document, read_json, remove_leftovers
from fulldepth.hf import Anatomy, load_checkpoint, load_tokenizer, pick_device
from fulldepth.skip.exports.fold import Folding, folded, heals, probes, scaled_logits
from fulldepth.skip.exports.formats import CARRY_CODE, FORMATS, Draft, in_forward, without_bars
from fulldepth.skip.exports.older_names import copy_tokenizer, publish_older_names, publish_older_tokenizer
from fulldepth.skip.exports.possible import Outline, check_format
from fulldepth.skip.exports.readers import NotLoadedError, prove
from fulldepth.skip.plan import MOST_BYTES, PER_CHANNEL, Plan
from fulldepth.skip.subject import tokenizer_folder

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
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Export:
    """Write a plan's model as a checkpoint, load it in a fresh process, compare logits, and only then name it.

    The folder appears whole or not at all: it is written beside `output` under another name. It carries the tokenizer,
    the generation settings, and `fulldepth_skip.json` with the plan.

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
        revision: branch, tag or commit of a Hub model and its tokenizer.
        trust_remote_code: run code that the checkpoint or its tokenizer carries.

    Raises:
        FulldepthError: if `output` exists, the plan is for another model, has scalars per channel, or is of a
            granularity that the format does not know, folding is refused, the disk is full, or the export loads as
            anything but the plan's model.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    target = Path(output)
    check_target(target)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    check_exportable(plan)
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    loaded = _opened(plan, model, dtype=dtype or plan.dtype, device=device, **hub)
    anatomy = check_format(loaded, Outline.of(plan), format)
    whole = anatomy if anatomy.model is loaded else find_anatomy(loaded)
    source = model.name_or_path if isinstance(model, PreTrainedModel) else model
    places = (plan.data.get("tokenizer"), source, plan.model.name)
    return _made(plan, whole, anatomy, format, target, lambda folder: save_tokenizer(tokenizer, places, folder, **hub))


def _made(
    plan: Plan,
    whole: Anatomy,
    anatomy: Anatomy,
    format: str,
    target: Path,
    save_tokenizer: Callable[[Path], list[str]],
) -> Export:
    """Write, load again, compare, name.

    Args:
        plan: for this model.
        whole: of the model.
        anatomy: of a stock class that computes the same of text.
        format: that can hold both.
        target: the folder to be.
        save_tokenizer: writes into a folder, and gives what is to be noted.
    """
    stock = anatomy.model
    with folder_to_be(target) as folder:
        ids = probes(whole)
        expected = scaled_logits(whole, plan, ids)
        with _scalars_inside(anatomy, plan, format) as folding, generation_settings(stock, folder), without_bars():
            notes = FORMATS[format].write(Draft(anatomy, plan, folding, folder))
        if whole.config is not whole.model.config and anatomy.config is anatomy.model.config:
            notes.append(f"This is the language model of a {type(whole.model).__name__} alone; it reads no images.")
        notes += save_tokenizer(folder)
        publish_older_names(folder)
        publish_older_tokenizer(folder)
        strip_foreign_code(folder, carries_code=format in CARRY_CODE)
        # The fast class follows the stream's scale in its eps, so nothing but rounding is left.
        allowed = TOLERANCE[expected.dtype] + (0.0 if format == "fast" else folding.logit_error)
        error = prove(folder, ids, expected, allowed, "carried" if format in CARRY_CODE else "stock")
        verified, said = _read_elsewhere(folder, ids, expected, allowed) if format == "decilm" else (True, [])
        report = Export(format, target, error, _parameters(folder), 0, verified, (*said, *notes))
        _describe(report, plan, folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return replace(report, bytes=size)


def _opened(plan: Plan, model: PreTrainedModel | str | Path, **options: Any) -> PreTrainedModel:
    """The plan's model, loaded with these options unless it is already.

    Raises:
        FulldepthError: if it is another model.
    """
    loaded = model if isinstance(model, PreTrainedModel) else load_checkpoint(model, **options).model
    plan.check_model(loaded)
    return loaded


def load(directory: str | Path, *, device: str | torch.device | None = None) -> PreTrainedModel:
    """The model of an export of any format, in evaluation mode; no foreign code runs.

    A `fast` export that was fine-tuned or saved again (`save_pretrained`) has no notes, and is loaded all the same.

    Raises:
        FulldepthError: if the folder is no export, or is broken.
    """
    folder = Path(directory)
    if _saved_again(folder) or read_notes(folder)["format"] != "decilm":
        return load_checkpoint(folder, device=device).model
    try:  # its model type is not ours to register
        with without_bars():
            found: Any = DeciLMForCausalLM.from_pretrained(
                folder, dtype="auto", output_loading_info=True, trust_remote_code=False
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise FulldepthError(f"Cannot load a model from {folder}: {' '.join(str(error).split())[:400]}") from error
    model, info = found
    if wrong := sorted(str(key) for keys in info.values() for key in keys):
        raise FulldepthError(f"The weights in {folder} do not fit its configuration (first: {wrong[0]}).")
    return model.to(pick_device(device)).eval()


def _saved_again(folder: Path) -> bool:
    """Whether a folder without notes holds a model of the `fast` format."""
    path = folder / "config.json"
    if (folder / NOTES).exists() or not path.is_file():
        return False
    config = read_json(path)
    return isinstance(config, dict) and str(config.get("model_type")).startswith("fulldepth_skipped_")


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


def _read_elsewhere(folder: Path, ids: Tensor, expected: Tensor, allowed: float) -> tuple[bool, list[str]]:
    """Whether a reader of the DeciLM layout (mlx-lm, the one that runs anywhere) has loaded it, and what to say."""
    if find_spec("mlx_lm") is None:
        why = "install mlx-lm (on Linux with mlx[cpu]) to have it checked."
    else:
        try:
            prove(folder, ids, expected, allowed, "mlx")
        except NotLoadedError as error:
            why = f"mlx-lm could not: {error}"
        else:
            return True, ["mlx-lm has loaded it and gives the plan's logits."]
    return False, [
        "UNVERIFIED: names and shapes are the published ones, and the code that this folder carries gives the plan's "
        f"logits, but no reader of the DeciLM layout has loaded it; {why}"
    ]


def check_target(target: Path) -> None:
    """Refuse what exists.

    Raises:
        FulldepthError: if there is something by that name.
    """
    if target.exists() or target.is_symlink():
        raise FulldepthError(f"{target} exists already; an export is never written over anything. Choose another name.")


def check_exportable(plan: Plan) -> None:
    """Refuse scalars that no format can hold, before a model is loaded.

    Raises:
        FulldepthError: for scalars per channel.
    """
    if any(isinstance(value, list) for own in plan.scalars.values() for value in own.values()):
        raise FulldepthError(f"{PER_CHANNEL} Search again with one scalar each.")


@contextmanager
def _scalars_inside(anatomy: Anatomy, plan: Plan, format: str) -> Iterator[Folding]:
    """The model with the scalars in its weights, as far as the format needs that."""
    if format == "layer" and not heals(plan):  # whole layers go, and nothing is left to fold: any family will do
        yield Folding(0.0, (1.0,) * (2 * anatomy.num_layers + 1), "There are no scalars to fold.")
        return
    if in_forward(anatomy.model, format) and heals(plan):
        yield Folding(0.0, (1.0,) * (2 * anatomy.num_layers + 1), "The scalars stay outside the weights.")
        return
    with folded(anatomy, plan, most=math.inf if format == "fast" else None) as folding:
        yield folding


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


@contextmanager
def folder_to_be(target: Path) -> Iterator[Path]:
    """A folder beside `target` that gets its name at the end; on an error it is gone, as if never begun.

    Raises:
        FulldepthError: if it cannot be written (disk full, no permission).
    """
    new = [parent for parent in target.absolute().parents if not parent.exists()]
    try:
        remove_leftovers(target.absolute().parent)
        with atomic_folder(target) as part:
            yield part
            check_target(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FulldepthError(f"Cannot write the export to {target}: {reason}.") from error
    finally:
        with suppress(OSError):  # up to the first that is not empty
            for parent in new:
                parent.rmdir()


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


def strip_foreign_code(folder: Path, *, carries_code: bool) -> None:
    """Remove `auto_map` from every configuration: it names code of the model's origin, which is not in the export.

    Args:
        folder: the export.
        carries_code: whether `config.json` names this package's own code, which stays.
    """
    for path in folder.glob("*.json"):
        if path.name == "config.json" and carries_code:
            continue
        text = path.read_text(encoding="utf-8")
        if "auto_map" not in text or path.name == "tokenizer.json":
            continue
        path.write_text(json.dumps(_without_code(json.loads(text)), indent=2, ensure_ascii=False) + "\n", "utf-8")


def _without_code(value: Any) -> Any:
    """Plain values without any key `auto_map`."""
    if isinstance(value, dict):
        return {key: _without_code(inner) for key, inner in value.items() if key != "auto_map"}
    return [_without_code(inner) for inner in value] if isinstance(value, list) else value


def _parameters(folder: Path) -> int:
    """Numbers in the weights on disk."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def _describe(report: Export, plan: Plan, folder: Path) -> None:
    """Write what the export is, for programs and for people."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "format": report.format,
        "logit_error": report.logit_error,
        "parameters": report.parameters,
        "verified": report.verified,
        "notes": list(report.notes),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
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
