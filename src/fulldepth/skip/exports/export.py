"""`export` writes a plan's model as a checkpoint that a fresh process has loaded and checked; `load` reads it."""

from __future__ import annotations

import gc
import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch
import transformers
from packaging.version import Version
from pydantic import AfterValidator
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fulldepth.architectures import SKIPPED, TESTED_TRANSFORMERS, DeciLMForCausalLM
from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import read_document, read_json
from fulldepth.execution import find_anatomy
from fulldepth.execution.readers import LOWEST, prove_export
from fulldepth.hf import (
    Anatomy,
    Checkpoint,
    ModelCard,
    few_layers,
    is_offloaded,
    load_checkpoint,
    load_tokenizer,
    silent,
)
from fulldepth.hf.asked_outputs import asked_outputs, restore_outputs
from fulldepth.hf.checkpoint_folder import (
    LARGE,
    check_disk_space,
    check_output_path,
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
from fulldepth.hf.gguf import load_gguf_config, load_gguf_model, read_header
from fulldepth.hf.publishing import loading_code
from fulldepth.hf.rounding import relative_error
from fulldepth.hf.scalars import factor_names
from fulldepth.hf.stream_scale import EXPORT_NOTES
from fulldepth.results import versions
from fulldepth.settings import Settings
from fulldepth.settings.exit import file_size
from fulldepth.settings.keywords import takes_settings
from fulldepth.settings.search import ExportSettings
from fulldepth.skip.exports.fold import original_logits, probes, rounding_error, scaled_logits
from fulldepth.skip.exports.formats import FORMATS, Draft, Format, check_format, known_format
from fulldepth.skip.exports.formats.format import WARNING
from fulldepth.skip.exports.formats.gguf import source_of
from fulldepth.skip.exports.formats.mergekit import Mergekit, check_source, parameters_left
from fulldepth.skip.plan import MOST_BYTES, UNHEALED, Plan, in_sample
from fulldepth.subject import chosen_tokenizer, open_checkpoint

NOTES = EXPORT_NOTES
SCHEMA_VERSION = 1
CODE = "modeling_skipped.py"
"""File of an export with the code of its class."""
ALLOWANCE = 1.5
MOST_NOISE = 0.2
"""Multiple of the error of rounding in half precision that an export may have, and an upper limit."""
ROUGH = 0.05
"""Change of logits by rounding to the types of a GGUF file above which its note names a finer type."""
LOGGER = logging.getLogger(__name__)
BY_FULLDEPTH = """\
from fulldepth.skip import load

model = load("PATH")

# Without fulldepth, run the code that the checkpoint carries, also for the tokenizer:
"""


@dataclass(frozen=True)
class Export:
    """A finished export."""

    format: str
    path: Path
    logit_error: float | None
    """Largest difference of a logit from the healed model's, relative to the largest, after loading it again; for a
    GGUF file of a log-probability, None if no program to load it is installed; None for a recipe, which is not run."""
    parameters: int
    """Numbers in the weights on disk; of a recipe, in the weights that it makes."""
    bytes: int
    """Size of the folder or file."""
    verified: bool
    """Whether the program that the format targets has loaded it and computed these logits."""
    notes: tuple[str, ...]
    source_bytes: int | None = None
    """Size of the GGUF file that a GGUF file was made from; None for other formats."""

    @property
    def size(self) -> str:
        """The size in words, of a GGUF file beside that of its source."""
        if self.source_bytes is None:
            return f"{self.bytes / 1e6:.1f} MB" if self.bytes >= 1e5 else f"{self.bytes / 1e3:.1f} kB"
        change = self.bytes / self.source_bytes - 1
        direction = f"{abs(change):.1%} {'larger' if change > 0 else 'smaller'} than"
        return f"{self.bytes / 1e6:.1f} MB, {direction} the original's {self.source_bytes / 1e6:.1f} MB"


@takes_settings(ExportSettings)
def export(
    plan: Plan | str | Path,
    model: PreTrainedModel | str | Path,
    format: str,
    output: str | Path,
    *,
    settings: ExportSettings,
    tokenizer: Any = None,
) -> Export:
    """Write a plan's model as a checkpoint, and verify its logits in a fresh process.

    The folder is renamed to `output` after the check. It holds the tokenizer, the generation settings, a model card,
    and `fulldepth_skip.json` with the plan. Weights are written file by file: at most `shard_size` bytes, or one
    layer's weights, are in memory in addition to the model. A model that is loaded here is freed before the check.

    Args:
        plan: the plan, or its file.
        model: the checkpoint that the plan was made for, or the model as loaded from it, which does not change and is
            not moved.
        format: `folded` (an ordinary checkpoint, skipped blocks zero), `fast` (without the skipped blocks; carries its
            code), `decilm` (without them, in the layout of vLLM and mlx-lm), `layer` (without whole layers),
            `gguf` (one file for llama.cpp, of a model loaded from one; see `formats.gguf`), or `mergekit` (a recipe
            by which mergekit writes what `layer` holds).
        output: folder to create; for `gguf` and `mergekit` the file.
        settings: fields of `ExportSettings` as keywords, or an instance.
        tokenizer: tokenizer to save, or its folder or Hub name; None = the one that the search used.

    Returns:
        Path, size and parameters of the export, and the largest difference of its logits from the model's.

    Raises:
        FulldepthError: if `output` exists or is misnamed, the plan is for another model or of a granularity that the
            format does not hold, folding is refused, the disk is full, the export computes other logits than the plan's
            model, or a setting has no effect with the format.
    """
    return _export(plan, model, format, Path(output), settings, tokenizer)


def rehearse(
    plan: Plan,
    model: PreTrainedModel,
    format: str,
    output: str | Path,
    settings: ExportSettings,
    tokenizer: Any = None,
    change: Callable[[PreTrainedModel], None] | None = None,
) -> None:
    """Export a copy with the first layers of a model beside `output`, load and compare it, and remove it.

    What the export refuses for another reason than its size is refused in seconds, before the work. The whole model
    computes nothing; the copy has its weights (of a GGUF file, the bytes). Nothing is tried where the class has no
    such copy that the format holds.

    Args:
        plan: of `model`; the copy lacks the last parts of the kinds that it removes.
        model: as loaded.
        format: as for `export`.
        output: as for `export`.
        settings: of the export.
        tokenizer: as for `export`.
        change: changes weights of the copy in place as the work will; for GGUF only, other copies share the weights.

    Raises:
        FulldepthError: as `export`.
    """
    file_format = FORMATS[known_format(format)]
    with trial(Path(output)) as place:
        try:
            anatomy = find_anatomy(model)
            copy = file_format.first_layers(anatomy, few_layers(anatomy), place.with_name("source"))
            if change is not None:
                change(copy)
            plan_of_copy = _plan_of_few_layers(plan, find_anatomy(copy))
            stock = check_format(copy, plan_of_copy, file_format)
            file_format.folding(stock, plan_of_copy)
            scaled_logits(stock, plan_of_copy, probes(stock))
        except Exception as error:  # of any class of transformers; whether the model itself can be exported is unknown
            LOGGER.debug("no copy with few layers to try the format %s on: %s", format, error)
            return
        _export(plan_of_copy, copy, format, place, settings, tokenizer, is_trial=True)


def _plan_of_few_layers(plan: Plan, copy: Anatomy) -> Plan:
    """A plan that removes the last parts of a model, of the kinds that `plan` removes, with the scalars of `plan`."""
    if plan.kind == "layer":
        blocks = [f"layer {copy.num_layers}"]
    else:
        mlp = max(copy.layers_with("mlp")) if plan.lacking("mlp") else 0
        attention = max({*copy.layers_with("attention")} - {mlp}) if plan.lacking("attention") else 0
        blocks = [f"{part} {layer}" for part, layer in (("attention", attention), ("mlp", mlp)) if layer]
    document = plan.document()
    bare = plan.of_weights(
        copy.model,
        granularity="any",
        blocks=blocks,
        losses=plan.losses[:1] * (len(blocks) + 1),
        **UNHEALED,
    )
    if not plan.scalars:
        return bare
    names = {str(layer): factor_names(bare.removed, layer) for layer in copy.layers}
    scalars = {
        layer: {name: document["scalars"].get(layer, {}).get(name, 1.0) for name in factors}
        for layer, factors in names.items()
        if factors
    }
    return bare.changed(scalars=scalars, **{name: document[name] for name in ("healed_loss", "control_loss")})


def _export(
    plan: Plan | str | Path,
    model: PreTrainedModel | str | Path,
    format: str,
    target: Path,
    settings: ExportSettings,
    tokenizer: Any,
    is_trial: bool = False,
) -> Export:
    """`export`, which tries a large model with few layers first if this is no such trial."""
    file_format = FORMATS[known_format(format)]
    single = file_format.suffix is not None
    most_bytes = settings.shard_size if isinstance(settings.shard_size, int) else file_size(settings.shard_size)
    check_output_path(target, file_format.suffix)
    settings.check_effect(format=format)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    _refuse_adapter(model)
    opened = open_checkpoint(model, settings, dtype=settings.dtype or plan.dtype, plain=True)
    loaded: Any = opened.model
    source = model.name_or_path if isinstance(model, PreTrainedModel) else str(model)
    plan.check_model(loaded)
    stock = check_format(loaded, plan, file_format, by_list=settings.by_list)
    counted = f"Removed (layers counted from 0, as in transformers): {', '.join(plan.module_names(stock))}."
    if isinstance(file_format, Mergekit):
        if stock.model is not loaded:
            raise FulldepthError(f"mergekit cannot read a {type(loaded).__name__}. Use --format layer.")
        unread = check_source(model, plan, settings) if isinstance(model, PreTrainedModel) else []
        with folder_to_be(target, file=True) as part:
            notes = [
                *file_format.write(Draft(stock, plan, file_format.folding(stock, plan), part, most_bytes)),
                *unread,
                counted,
            ]
            size = part.stat().st_size
        return Export(format, target, None, parameters_left(stock, plan), size, file_format.verified, tuple(notes))
    saved_tokenizer = chosen_tokenizer(settings, tokenizer)
    check_disk_space(target, file_format.least_bytes(stock, plan, settings.gguf_type))
    if not single and isinstance(saved_tokenizer, str | Path):
        # a wrong name is refused before the weights are written
        load_tokenizer(saved_tokenizer, trust_remote_code=settings.trust_remote_code)
    if not is_trial and size_of(loaded) >= LARGE:
        rehearse(plan, loaded, format, target, settings, tokenizer)
    reader = file_format.reader_of(stock.model)
    reader_map = "auto" if settings.device_map is not None or is_offloaded(loaded) else None
    with folder_to_be(target, file=single) as part:
        anatomy = stock if stock.model is loaded else find_anatomy(loaded)
        folding = file_format.folding(stock, plan)
        ids = probes(anatomy)
        expected = scaled_logits(anatomy, plan, ids)
        noise = min(ALLOWANCE * rounding_error(anatomy, plan, ids, expected, file_format.precision), MOST_NOISE)
        allowed = max(file_format.tolerance(folding, expected.dtype), MOST_NOISE if is_trial else noise)
        draft = Draft(stock, plan, folding, part, most_bytes, settings.gguf_type)
        before = source_of(loaded).stat().st_size if single else None
        with nullcontext() if single else generation_settings(stock.model, part), silent():
            notes = [*file_format.write(draft), counted, *draft.notes, *opened.warnings]
        if draft.stored:
            exact = expected
            expected = scaled_logits(stock, plan, ids, draft.stored)
            change = relative_error(expected, exact)
            finer = "; --gguf-type q8_0 rounds less" * (change > ROUGH)
            notes.append(f"Rounding of changed weights changes logits by {change:.1e} of the largest{finer}.")
        if anatomy.config is not anatomy.model.config and stock.config is stock.model.config:
            notes.append(f"This is the language model of a {type(anatomy.model).__name__} alone; it reads no images.")
        asked = asked_outputs(loaded)
        del opened, loaded, anatomy, stock, folding, draft
        gc.collect()  # a model that was passed in is held by its owner
        if single:
            logit_error, verified = prove_file(part, ids, expected, allowed)
            parameters = read_header(part).weights.elements
            size = part.stat().st_size
            if not verified:
                notes.append("UNVERIFIED: llama.cpp has not loaded it, which needs `pip install xllamacpp`.")
            return Export(format, target, logit_error, parameters, size, verified, tuple(notes), before)
        publish_older_names(part)
        if file_format.reader == "carried":
            notes.append(f"The code in this folder was tested with transformers {', '.join(TESTED_TRANSFORMERS)}.")
        notes += restore_outputs(asked, part)
        searched_with = (plan.data.get("tokenizer"), None)
        models = [(name, settings.revision) for name in (source, plan.model.name)]
        trusted = settings.trust_remote_code
        notes += save_tokenizer(saved_tokenizer, [searched_with, *models], part, trust_remote_code=trusted)
        publish_older_tokenizer(part)
        strip_foreign_code(part, carries_code=reader == "carried")
        logit_error = prove_export(part, ids, expected, allowed, reader, reader_map)
        parameters = count_parameters(part)
        document = {
            "schema_version": SCHEMA_VERSION,
            "format": format,
            "logit_error": logit_error,
            "parameters": parameters,
            "verified": file_format.verified,
            "notes": notes,
            "versions": versions(),
            "plan": plan.document(),
        }
        (part / NOTES).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        card_of(plan, file_format, logit_error, parameters, notes, reader=reader).write(part)
        size = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
    return Export(format, target, logit_error, parameters, size, file_format.verified, tuple(notes))


def _refuse_adapter(model: Any) -> None:
    """Refuse a model with an adapter that is not merged."""
    if hasattr(model, "peft_config"):
        raise FulldepthError(
            "The model holds an adapter, which has no place in an export. Merge it (PeftModel.merge_and_unload()) "
            "and search again."
        )


def prove_file(path: Path, ids: Tensor, expected: Tensor, allowed: float) -> tuple[float | None, bool]:
    """Compare what llama.cpp computes from a GGUF file; where it is not installed, what transformers computes.

    Args:
        path: of the file.
        ids: `[B, T]` tokens.
        expected: `[B, T, V]` logits of the healed model.
        allowed: largest error, relative to the largest log-probability or logit.

    Returns:
        The error, None if neither can read the file, and whether llama.cpp did.

    Raises:
        FulldepthError: if the error is larger, or the file does not load.
    """
    if find_spec("xllamacpp") is not None:
        after = expected[:, -1].float().log_softmax(-1).clamp(min=LOWEST)
        return prove_export(path, ids, after, allowed, "llama.cpp"), True
    if read_header(path).architecture == "deci":
        return None, False
    model, _ = load_gguf_model(path, load_gguf_config(path), AutoModelForCausalLM, dtype=expected.dtype)
    error = relative_error(original_logits(find_anatomy(model), ids), expected)
    if not error <= allowed:
        raise FulldepthError(f"The export is dropped: read again, its logits miss the plan's by {error:.1e}.")
    return error, False


def card_of(
    plan: Plan,
    format: Format,
    logit_error: float,
    parameters: int,
    notes: Sequence[str],
    healed: Mapping[str, str] | None = None,
    reader: str | None = None,
) -> ModelCard:
    """The card of an export: what was removed, held-out losses, how far the logits are from the plan's.

    Args:
        plan: of the export.
        format: of the export.
        logit_error: see `Export`.
        parameters: see `Export`.
        notes: see `Export`.
        healed: what is known of a model that was healed after the plan, name -> value, in place of the plan's losses.
        reader: of the export; None = the format's.
    """
    name = one_line(plan.model.name, 200)
    title = f"{name} without {plan.what}"
    change = "" if plan.healed_loss is None else ", and scalars fitted on the remaining blocks compensate for them"
    names = ("Held-out loss of the original", "without the blocks")
    losses = dict(zip(names, (plan.losses[0], plan.losses[-1]), strict=True)) if plan.losses else {}
    if plan.healed_loss is not None:
        losses["without the blocks, with scalars"] = plan.healed_loss
    numbers = {key: f"{loss:.4f} nats a token" for key, loss in losses.items()}
    heldout = plan.data.get("heldout")
    text = heldout.get("name") if isinstance(heldout, dict) else None
    described = text if isinstance(text, str) else f"examples with the hash {plan.data['hash']}"
    numbers["Held-out text"] = one_line(described, 200).replace("|", r"\|")
    numbers |= {"In-sample": sentence} if (sentence := in_sample(plan)) else {}
    if healed is not None:
        change = ", and the weights that stay were healed"
        numbers = dict(healed)
    carried = (reader or format.reader) == "carried"
    loading = BY_FULLDEPTH * carried + loading_code("AutoModelForCausalLM", "AutoTokenizer", carried=carried)
    warning = "".join(f"**{note}**\n\n" for note in notes if note.startswith(WARNING))
    return ModelCard(
        title=title,
        method=f"{warning}{title} (layers are counted from 1). The blocks were chosen by {plan.search} search{change}: "
        "[Hopscotch](https://arxiv.org/abs/2506.03303), with fulldepth.",
        numbers=numbers
        | {
            "Parameters": f"{parameters:,}",
            "Largest difference of a logit from the plan's model": f"{logit_error:.1e} of the largest logit",
            "Format": f"`{format.name}`",
        },
        loading=loading,
        source=plan.model.name,
        tags=["hopscotch", "pruning"],
        notes=["\n".join(f"- {note}" for note in notes if not note.startswith(WARNING))],
    )


def load(
    directory: str | Path,
    *,
    dtype: str | torch.dtype | None = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
) -> PreTrainedModel:
    """The model of an export of any format, in evaluation mode, without running code from the folder.

    The code that is run is fulldepth's own. Warns if the folder carries code that was not tested with the installed
    transformers, which `trust_remote_code=True` would run.

    An export of the format `fast` or `decilm` that was saved again (`save_pretrained`), for example after fine-tuning,
    has no notes; its configuration names the class.

    Args:
        directory: of the export.
        dtype: `auto` keeps the export's own precision. Rotary frequencies and scalars stay in float32.
        device: where to put the model; cuda unless named, if there is one, else the CPU. Ignored with `device_map`.
        device_map: `auto`, or a map of modules to devices, for models larger than one device.

    Returns:
        The model of the export.

    Raises:
        FulldepthError: if the folder is no export, or is broken.
    """
    return load_export(directory, dtype=dtype, device=device, device_map=device_map).model


def load_export(
    directory: str | Path,
    *,
    dtype: str | torch.dtype | None = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
) -> Checkpoint:
    """The model of an export with the warnings of loading it; arguments and errors are those of `load`."""
    folder = Path(directory)
    path = Path(directory) / "config.json"
    config = read_json(path) if path.is_file() else None
    names = config.get("architectures") if isinstance(config, dict) else None
    is_decilm = names == [DeciLMForCausalLM.__name__]
    is_ours = is_decilm or names in [[kind.__name__] for kind in SKIPPED.values()]
    if not is_ours or (folder / NOTES).exists():
        read_notes(folder)
    # DeciLM's model type is not registered with the Auto classes.
    kind = DeciLMForCausalLM if is_decilm else None
    checkpoint = load_checkpoint(folder, dtype=dtype, device=device, device_map=device_map, model_class=kind)
    if is_decilm and checkpoint.warnings:  # weights that the class does not use
        raise FulldepthError(f"Cannot load a model from {folder}. {checkpoint.warnings[0]}")
    if is_ours and (message := warning_of_older_code(folder)) is not None:
        warnings.warn(message, stacklevel=3)
    return checkpoint


def warning_of_older_code(folder: Path) -> str | None:
    """Return a message if the code in an export is older than the installed transformers; None if it is not.

    Code that names no versions is older than transformers 5.24, whose name of the cache it ignores.
    """
    code = folder / CODE
    if not code.is_file():
        return None
    stated = re.search(r"^TESTED_TRANSFORMERS = \(([^)]*)\)", code.read_text(encoding="utf-8"), re.MULTILINE)
    tested = re.findall(r'"([^"]+)"', stated[1]) if stated else ["5.23.0"]
    newest = max(map(Version, tested))
    installed = Version(transformers.__version__)
    if installed.release[:2] <= newest.release[:2]:
        return None
    return (
        f"The code that {folder} carries was tested with transformers up to {newest}, not with {installed}. "
        "fulldepth.skip.load runs fulldepth's own code instead. With trust_remote_code=True the folder's code runs, "
        "which can give other text; `fulldepth skip apply` writes the folder again, with newer code."
    )


class Notes(Settings):
    """The entries of `fulldepth_skip.json`."""

    schema_version: Literal[1]
    format: Annotated[str, AfterValidator(known_format)]
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
    notes = read_document(path, Notes, most=MOST_BYTES)
    plan = Plan.of(notes.plan, f"The plan in {path}")
    return {**notes.model_dump(), "plan": plan.document()}
