"""`Format`: the interface of an export format: supported plans, writing and checking. `Folded` and `Layer`:
those whose exports are ordinary checkpoints of the same class.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.hf import Anatomy, cut_config, first_layers, is_offloaded, without_layers
from fulldepth.hf.gguf import SCALED_BY_WIDTH
from fulldepth.hf.rounding import TOLERANCE
from fulldepth.hf.scalars import GRANULARITIES, ROLES
from fulldepth.hf.stream_scale import write_stream_scale
from fulldepth.hf.surgery import obstacle_to_removing
from fulldepth.skip.exports.fold import Folding, heals, prepare_folding
from fulldepth.skip.exports.formats.checkpoint import Draft, carries_code, save
from fulldepth.skip.plan import Plan

BY_DEPTH = (*SCALED_BY_WIDTH, ("exaone4", 64))
"""(type of model, number of layers) for which llama.cpp computes attention otherwise: scaled, or with windows."""
WARNING = "WARNING: "
"""Start of a note that comes first wherever notes are shown."""


def code_note(config: PreTrainedConfig) -> str:
    """The note of an export that carries its code."""
    return (
        f"transformers knows {config.model_type} only with trust_remote_code=True; fulldepth.skip.load needs nothing."
    )


class Format(ABC):
    """An export format, registered in `formats.FORMATS`."""

    name: ClassVar[str]
    granularities: ClassVar[tuple[str, ...]]
    """Granularities of the plans that it can hold."""
    reader: ClassVar[Literal["stock", "carried"]] = "stock"
    """The program that loads every export before its folder is renamed: transformers alone (`stock`), or with the code
    in the folder (`carried`), for classes that transformers does not have."""
    keeps_class: ClassVar[bool] = False
    """Whether it also holds models that no stock class computes, in their own class (`carries_code`)."""
    verified: ClassVar[bool] = True
    """Whether that program is the one that the format is meant for."""
    text_only: ClassVar[bool] = False
    """Whether it holds only the language model of a model that also reads images."""
    precision: ClassVar[torch.dtype | None] = None
    """Precision that the program rounds to when it computes; None = that of the model."""
    keeps_removed: ClassVar[bool] = True
    """Whether removed branches stay, with output weights of zero."""
    suffix: ClassVar[str | None] = None
    """Ending of an export that is one file; None for folders."""

    def reader_of(self, model: PreTrainedModel) -> Literal["stock", "carried"]:
        """The reader of an export of this model."""
        return "carried" if carries_code(model) else self.reader

    def check(self, model: PreTrainedModel, plan: Plan) -> None:  # noqa: B027 (most models fit most formats)
        """Refuse a stock model, or a plan of it, that the format cannot hold; refuses none unless overridden.

        Raises:
            FulldepthError: with the reason.
        """

    def misread(self, anatomy: Anatomy, plan: Plan) -> str | None:
        """Why some programs would compute another model from the export without an error; None if none would."""
        return None

    def folding(self, anatomy: Anatomy, plan: Plan) -> Folding:
        """The folding, which is needed for scalars and for removed branches that stay.

        Raises:
            FulldepthError: if they cannot be folded.
        """
        if self.keeps_removed or heals(plan):
            return prepare_folding(anatomy, plan)
        return Folding.unscaled(anatomy, "There are no scalars to fold.")

    def least_bytes(self, anatomy: Anatomy, plan: Plan, gguf_type: str | None) -> int:
        """Bytes of the weights that an export holds at least."""
        removed = [
            part
            for role in ROLES
            for layer in plan.lacking(role)
            if not self.keeps_removed and (part := anatomy.part(layer, role)) is not None
        ]
        gone = {parameter for part in removed for parameter in part.parameters()}
        return sum(parameter.nbytes for parameter in anatomy.model.parameters() if parameter not in gone)

    def first_layers(self, anatomy: Anatomy, layers: int, folder: Path) -> PreTrainedModel:
        """A model of the first layers that can be exported in this format; `folder` may be made for its files.

        Raises:
            FulldepthError: as `hf.first_layers`.
        """
        copy = first_layers(anatomy, layers)
        copy.name_or_path = anatomy.model.name_or_path
        return copy

    @abstractmethod
    def write(self, draft: Draft) -> list[str]:
        """Write the checkpoint without tokenizer and notes; returns the notes."""

    def tolerance(self, folding: Folding, dtype: torch.dtype) -> float:
        """Largest error of a logit of the export, relative to the largest logit."""
        return TOLERANCE[dtype] + folding.logit_error


class Folded(Format):
    """Checkpoint of the same class with folded weights; skipped branches have output weights of zero."""

    name = "folded"
    granularities = GRANULARITIES
    keeps_class = True

    def check(self, model: PreTrainedModel, plan: Plan) -> None:
        """Refuse a model in which zeros cannot stand for a removed layer.

        Raises:
            FulldepthError: with the reason.
        """
        if reason := obstacle_to_removing(find_anatomy(model)):
            raise FulldepthError(
                f"The format {self.name} sets what removed attention and MLP add to zero, which a "
                f"{type(model).__name__} does not allow: {reason}. Use --format layer."
            )

    def write(self, draft: Draft) -> list[str]:
        """Write all weights."""
        model = draft.model
        conversions = getattr(model, "_weight_conversions", None)
        config = copy.deepcopy(model.config)
        write_stream_scale(config, draft.state_scale)
        save(draft, type(model), config, draft.weights(), conversions=conversions)
        notes = [draft.folding.note, "Skipped blocks are computed and give zeros: for less cost, use another format."]
        if carries_code(model):
            notes[1:] = ["Skipped blocks are computed and give zeros, which saves nothing.", code_note(model.config)]
        return notes


class Layer(Format):
    """A checkpoint of the remaining layers, renumbered."""

    name = "layer"
    granularities = ("layer",)
    keeps_removed = False

    def check(self, model: PreTrainedModel, plan: Plan) -> None:
        """Refuse a plan that skips all layers, and a model whose layers depend on their number.

        Raises:
            FulldepthError: with the reason.
        """
        num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        if len(plan.lacking("mlp")) >= num_layers:
            raise FulldepthError(f"The plan skips all {num_layers} layers; a checkpoint needs at least one.")
        anatomy = find_anatomy(model)
        if not is_offloaded(model):
            try:
                without_layers(anatomy, remaining(plan, anatomy))
            except FulldepthError as error:
                advice = "" if obstacle_to_removing(anatomy) else " Use --format folded."
                raise FulldepthError(f"{error}{advice}") from error

    def misread(self, anatomy: Anatomy, plan: Plan) -> str | None:
        """Return why some programs would compute another model from the remaining layers; None if none would."""
        return misread_without(anatomy, remaining(plan, anatomy))

    def write(self, draft: Draft) -> list[str]:
        """Write the remaining layers, and their entries of every list of the configuration with one entry per layer."""
        num_layers = draft.anatomy.num_layers
        remaining_layers = remaining(draft.plan, draft.anatomy)
        config, changed, _ = cut_config(draft.anatomy, remaining_layers)
        scale = draft.state_scale
        write_stream_scale(config, [scale[layer] for layer in (0, *remaining_layers)])
        weights = {}
        for name, weight in draft.weights().items():
            if name.startswith(f"{draft.anatomy.blocks_path}."):
                number, _, own_name = name.removeprefix(f"{draft.anatomy.blocks_path}.").partition(".")
                if int(number) + 1 not in remaining_layers:
                    continue
                name = f"{draft.anatomy.blocks_path}.{remaining_layers.index(int(number) + 1)}.{own_name}"
            weights[name] = weight
        with torch.device("meta"):
            needed = type(draft.model)(config).state_dict().keys()
        # Layers that share a block hold the adapters of all of them (Zamba2), of which those of removed layers go.
        save(draft, type(draft.model), config, {name: weights[name] for name in weights if name in needed})
        lists = f" Cut to them: {', '.join(changed)}." if changed else ""
        reason = self.misread(draft.anatomy, draft.plan)
        return [
            *([] if reason is None else [f"{WARNING}{reason}"]),
            draft.folding.note,
            f"Layers {', '.join(map(str, remaining_layers))} of {num_layers} are left, renumbered.{lists}",
        ]


def misread_without(anatomy: Anatomy, remaining_layers: Sequence[int]) -> str | None:
    """Why some programs would compute another model from a checkpoint of these 1-based layers; None if none would.

    They derive what a layer computes from its number, or the attention of all layers from the depth.
    """
    family = anatomy.config.model_type.removesuffix("_text")
    depths = (anatomy.num_layers, len(remaining_layers))
    if depths[0] != depths[1] and any((family, depth) in BY_DEPTH for depth in depths):
        return (
            f"llama.cpp takes from the number of layers of a {family} how its attention is computed, and would compute "
            f"another model from {depths[1]} instead of {depths[0]} layers without an error."
        )
    names = cut_config(anatomy, remaining_layers).by_list
    if not names:
        return None
    kinds = [*zip(*(getattr(anatomy.config, name) for name in names), strict=True)]
    period = period_of(kinds)
    neighbours = f", and any {period} neighbours" if period < len(kinds) else ""
    return (
        f"What a layer computes would no longer follow from its number, only from the list {', '.join(names)} of the "
        "configuration: transformers and vLLM read it, but llama.cpp and mlx-lm count with the original's period, and "
        f"would compute another model without an error. The last layers can be removed{neighbours}."
    )


def period_of(kinds: Sequence[Any]) -> int:
    """The number of layers after which their kinds repeat; the number of all if they do not."""
    steps = range(1, len(kinds) + 1)
    return next(step for step in steps if [*kinds[step:]] == [*kinds[: len(kinds) - step]])


def remaining(plan: Plan, anatomy: Anatomy) -> list[int]:
    """The 1-based layers that a plan of whole layers leaves."""
    return [layer for layer in anatomy.layers if layer not in plan.lacking("mlp")]
