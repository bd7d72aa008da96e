"""Quantised models as checkpoints that transformers loads again.

`quantised` is the measured model. `skipped, then quantised` and `quantised, then skipped` are measured with blocks
skipped in place and scalars outside the weights; an int8 checkpoint holds them folded: a row of a matrix is `w = s q`,
so that a factor of the matrix multiplies the factors `s` of its rows, and the integers `q` do not change.

Every checkpoint is loaded in a fresh process, and its logits are compared with those of the measured model, before its
folder is renamed to its final name.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from fulldepth.errors import FulldepthError
from fulldepth.execution.readers import prove
from fulldepth.execution.stream import TOLERANCE, relative_error
from fulldepth.hf import Anatomy, find_output_weights, silent
from fulldepth.hf.checkpoint_folder import (
    check_target,
    folder_to_be,
    generation_settings,
    publish_older_tokenizer,
    save_tokenizer,
    strip_foreign_code,
)
from fulldepth.skip.assessment.quantisers import packed_as_torchao
from fulldepth.skip.exports.card import quantised_card
from fulldepth.skip.exports.fold import (
    MOST,
    branch_factors,
    check_foldable,
    logits,
    probes,
    scaled_logits,
)
from fulldepth.skip.exports.formats import FORMATS, as_stock
from fulldepth.skip.exports.possible import Outline, check_format
from fulldepth.skip.plan import Plan

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "quant*.json")
"""Files to copy from a checkpoint of GPTQModel; its tokenizer is a placeholder and is not copied."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint of one of the models."""

    model: str
    """Label of the model."""
    path: str
    logit_error: float
    """Largest difference of a logit from the measured model's, relative to the largest, loaded in a fresh process."""
    bytes: int
    """Size of the folder."""


@dataclass
class Saver:
    """Writes quantised models below one folder, which must not exist."""

    folder: Path
    method: str
    original: Anatomy
    tokenizer: Any
    """A tokenizer, or its folder or Hub name; None = the first one found in `places`."""
    places: Sequence[Any]
    """Folders or Hub names that may hold a tokenizer."""
    hub: dict[str, Any]
    """`revision` and `trust_remote_code`, of the tokenizer."""
    saved: list[Saved] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Messages on models that are not saved, with the reason."""
    only_whole: bool = False
    """Whether models with skipped blocks cannot be saved."""

    def check(self, plan: Plan) -> None:
        """Refuse a model that cannot be saved, and note if those with skipped blocks cannot.

        Args:
            plan: of the models with skipped blocks.

        Raises:
            FulldepthError: if the folder exists, or the quantised model has no class of transformers that loads it.
        """
        check_target(self.folder)
        model = self.original.model
        transposed = any(isinstance(module, Conv1D) for module in model.modules())
        if self.method == "int8" and transposed:
            raise FulldepthError(
                f"A {type(model).__name__} in int8 cannot be saved: its matrices are transposed, torchao packs linear "
                "layers only, and no class of transformers has them. Leave --save out."
            )
        if as_stock(model) is not model or not type(model).__module__.startswith("transformers."):
            raise FulldepthError(
                f"A quantised {type(model).__name__} cannot be saved: it is no class of transformers. Leave --save out."
            )
        if why := self._obstacle(plan):
            self.only_whole = True
            self.notes.append(f"Only the quantised model is saved, not those with skipped blocks: {why}")

    def _obstacle(self, plan: Plan) -> str | None:
        """The reason why models with skipped blocks cannot be saved."""
        if self.method != "int8":
            return f"neither zeros nor scalars can be put into weights that {self.method} has packed."
        try:
            check_format(self.original.model, Outline.of(plan), FORMATS["folded"])
            check_foldable(self.original, plan)
        except FulldepthError as error:
            return str(error)
        return None

    def try_to_save(self, label: str, measured: Anatomy, plan: Plan) -> None:
        """Save a model with skipped blocks, or note the error, so that measurements are not lost."""
        if self.only_whole:
            return
        try:
            self.save(label, measured, plan)
        except FulldepthError as error:
            self.notes.append(f"The model {label!r} is not saved. {error}")

    def save(self, label: str, measured: Anatomy, plan: Plan | None = None, source: Path | None = None) -> None:
        """Save one model, load it in a fresh process, and compare the logits.

        Args:
            label: of the model.
            measured: the quantised model, nothing skipped.
            plan: blocks skipped in its measurement; None = none.
            source: the checkpoint that it was loaded from, if the method writes one.

        Raises:
            FulldepthError: if it cannot be written, does not load, or gives other logits.
        """
        ids, target = probes(measured), self.folder / label.replace(", ", "-").replace(" ", "-")
        expected = logits(measured, ids) if plan is None else scaled_logits(measured, plan, ids)
        written = measured if plan is None else folded_int8(measured, self.original, plan, ids)
        moved = 0.0 if plan is None else relative_error(logits(written, ids), expected)
        if not moved <= MOST[expected.dtype]:
            raise FulldepthError(f"{label}: folded, its logits miss the measured ones by {moved:.1e} of the largest.")
        with folder_to_be(target) as part:
            if source is None:
                with generation_settings(written.model, part), silent(), packed_as_torchao(written.model):
                    written.model.save_pretrained(part)
            else:
                for path in sorted(path for pattern in WEIGHTS for path in source.glob(pattern)):
                    shutil.copy2(path, part)
            self.notes += [f"{label}: {n}" for n in save_tokenizer(self.tokenizer, self.places, part, **self.hub)]
            publish_older_tokenizer(part)
            strip_foreign_code(part, carries_code=False)
            error = prove(part, ids, expected, TOLERANCE[expected.dtype] + moved, "stock")
            name = self.original.model.name_or_path or type(self.original.model).__name__
            quantised_card(label, self.method, name, plan, error).write(part)
            size = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
        self.saved.append(Saved(label, str(target), error, size))


@torch.no_grad()
def folded_int8(measured: Anatomy, original: Anatomy, plan: Plan, ids: torch.Tensor) -> Anatomy:
    """A copy of an int8 model with a plan's skipped branches at zero and its scalars in the weights.

    Args:
        measured: the model in int8; not changed.
        original: the model before quantisation; determines which weights change in the copy.
        plan: skipped blocks and scalars.
        ids: [B, T] tokens to run.

    Raises:
        FulldepthError: as `fold`.
    """
    check_foldable(original, plan)
    folded = replace(measured, model=copy.deepcopy(measured.model))
    factors, _ = branch_factors(plan, original.num_layers, parallel=original.family.design == "parallel")
    branches = [branch for branch, factor in factors.items() if factor != 1.0]
    paths = {module: path for path, module in original.model.named_modules()}
    for (layer, role), weights in find_output_weights(original, branches, ids).items():
        branch, factor = folded.model.get_submodule(paths[weights.branch]), factors[layer, role]
        for name, values in weights.times(factor).items():
            parameter: Any = branch.get_parameter(name)
            if not hasattr(parameter, "__tensor_flatten__"):
                parameter.copy_(values)
            elif factor == 0.0:
                parameter.qdata.zero_()
            else:
                parameter.scale.copy_(parameter.scale.double() * factor)
    return folded
