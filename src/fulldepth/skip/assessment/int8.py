"""Int8 weights by torchao: quantised copies of a model, and their checkpoints.

`quantised` is the measured model. `skipped, then quantised` and `quantised, then skipped` are measured with blocks
skipped in place and scalars outside the weights; their checkpoints hold them folded: a row of a matrix is `w = s q`, so
that a factor of the matrix multiplies the factors `s` of its rows, and the integers `q` do not change.

Every checkpoint is loaded in a fresh process, and its logits are compared with those of the measured model, before its
folder is renamed to its final name.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TorchAoConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

from fulldepth.errors import FulldepthError, one_line
from fulldepth.execution.readers import prove
from fulldepth.execution.stream import TOLERANCE, relative_error
from fulldepth.hf import Anatomy, ModelCard, find_output_weights, silent
from fulldepth.hf.checkpoint_folder import (
    check_target,
    folder_to_be,
    generation_settings,
    publish_older_tokenizer,
    save_tokenizer,
    strip_foreign_code,
)
from fulldepth.skip.exports.export import STOCK
from fulldepth.skip.exports.fold import MOST, branch_factors, check_foldable, logits, probes, scaled_logits
from fulldepth.skip.exports.formats import FORMATS, as_stock
from fulldepth.skip.exports.possible import check_format
from fulldepth.skip.plan import Plan

METHOD = "int8"


def check_torchao() -> None:
    """Refuse to quantise without torchao.

    Raises:
        FulldepthError: if it is not installed.
    """
    if find_spec("torchao") is None:
        raise FulldepthError("Quantisation needs torchao, not installed here: pip install 'fulldepth[quantise]'.")


def int8(anatomy: Anatomy) -> Anatomy:
    r"""A copy with the linear layers of all blocks in int8, weight-only, by torchao.

    A row of a matrix is stored as integers `q` in [-128, 127] and one factor `s` in the model's precision:
    `w ~ s q`, `q = round(w / s)`, symmetric about 0. Activations are not quantised; products use `q` in the model's
    precision. Embeddings, norms and the head are not quantised either, as with transformers' `TorchAoConfig`: a head
    that is tied to the embeddings would be stored twice.

    Args:
        anatomy: the verified model; not changed.

    Returns:
        The copy, on the same device, in evaluation mode.

    Raises:
        FulldepthError: if torchao cannot be imported, a layer of the model does not run with packed weights, or the
            matrices of experts are stored as one parameter.
    """
    quantize, config = _torchao()
    if stacked := sum(weight.numel() for _, _, weight in anatomy.expert_projections() if weight is not None):
        share = stacked / sum(weight.numel() for block in anatomy.block_list for weight in block.parameters())
        raise FulldepthError(
            f"int8 cannot quantise this {type(anatomy.model).__name__}: torchao packs linear layers, and {share:.0%} "
            "of the weights of its blocks are experts that are stored as one parameter for all."
        )
    quantised, targets = replace(anatomy, model=copy.deepcopy(anatomy.model).eval()), set()
    for block in quantised.blocks:
        for name, module in list(block.named_modules()):
            if isinstance(module, Conv1D):  # GPT-2's transposed matrices, which torchao does not know
                inputs, outputs = module.weight.shape
                linear = nn.Linear(inputs, outputs, device=module.weight.device, dtype=module.weight.dtype)
                linear.weight = nn.Parameter(module.weight.detach().T.contiguous())
                linear.bias = nn.Parameter(module.bias.detach())
                block.set_submodule(name, linear)
        targets |= {module for module in block.modules() if isinstance(module, nn.Linear)}
    with _quiet():
        quantize(quantised.model, config, filter_fn=lambda module, name: module in targets)
    for module in targets:
        _check_runs(module)
    return quantised


@torch.no_grad()
def _check_runs(module: nn.Linear) -> None:
    """Refuse a linear layer of a custom class, such as Falcon's, that does not run with packed weights."""
    if type(module).forward is nn.Linear.forward:
        return
    try:
        module(torch.zeros(1, module.in_features, device=module.weight.device, dtype=module.weight.dtype))
    except NotImplementedError as error:
        raise FulldepthError(
            f"int8 cannot quantise this model: torchao packs linear layers, and its {type(module).__name__} multiplies "
            "in a way that packed weights do not know."
        ) from error


def _torchao() -> tuple[Any, Any]:
    """The function of torchao and its configuration of int8 weights."""
    check_torchao()
    try:
        with _quiet():
            from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415
    except (ImportError, RuntimeError, OSError) as error:
        raise FulldepthError(f"torchao cannot be used with torch {torch.__version__}: {error}") from error
    return quantize_, Int8WeightOnlyConfig()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torchao's messages on kernels for other machines."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@dataclass
class Saver:
    """Writes quantised models below one folder, which must not exist.

    Raises:
        FulldepthError: if the folder exists, or the quantised model has no class of transformers that loads it.
    """

    folder: Path
    original: Anatomy
    plan: Plan
    """Of the models with skipped blocks."""
    tokenizer: Any
    """A tokenizer, or its folder or Hub name; None = the first one found in `places`."""
    places: Sequence[Any]
    """Folders or Hub names that may hold a tokenizer."""
    hub: dict[str, Any]
    """`revision` and `trust_remote_code`, of the tokenizer."""
    saved: list[dict[str, Any]] = field(default_factory=list)
    """For each checkpoint: label of the `model`, `path`, `bytes` of the folder, and `logit_error`: largest difference
    of a logit from the measured model's, relative to the largest, loaded in a fresh process."""
    notes: list[str] = field(default_factory=list)
    """Messages on models that are not saved, with the reason."""
    only_whole: bool = False
    """Whether models with skipped blocks cannot be saved."""

    def __post_init__(self) -> None:
        check_target(self.folder)
        model = self.original.model
        if any(isinstance(module, Conv1D) for module in model.modules()):
            raise FulldepthError(
                f"A {type(model).__name__} in int8 cannot be saved: its matrices are transposed, torchao packs linear "
                "layers only, and no class of transformers has them. Leave --save out."
            )
        if as_stock(model) is not model or not type(model).__module__.startswith("transformers."):
            raise FulldepthError(
                f"A quantised {type(model).__name__} cannot be saved: it is no class of transformers. Leave --save out."
            )
        try:
            check_format(model, self.plan.granularity, len(self.plan.blocks), FORMATS["folded"])
            check_foldable(self.original, self.plan)
        except FulldepthError as error:
            self.only_whole = True
            self.notes.append(f"Only the quantised model is saved, not those with skipped blocks: {error}")

    def save_skipped(self, label: str, measured: Anatomy, plan: Plan) -> None:
        """Save a model with skipped blocks, or note the error, so that measurements are not lost."""
        if self.only_whole:
            return
        try:
            self.save(label, measured, plan)
        except FulldepthError as error:
            self.notes.append(f"The model {label!r} is not saved. {error}")

    def save(self, label: str, measured: Anatomy, plan: Plan | None = None) -> None:
        """Save one model, load it in a fresh process, and compare the logits.

        Args:
            label: of the model.
            measured: the quantised model, nothing skipped.
            plan: blocks skipped in its measurement; None = none.

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
            config, model = TorchAoConfig(_torchao()[1]), written.model
            marked: Any = model
            marked.config.quantization_config = config
            marked.hf_quantizer = TorchAoHfQuantizer(config, pre_quantized=True)
            try:
                with generation_settings(model, part), silent():
                    model.save_pretrained(part)
            finally:
                del marked.config.quantization_config, marked.hf_quantizer
            self.notes += [f"{label}: {n}" for n in save_tokenizer(self.tokenizer, self.places, part, **self.hub)]
            publish_older_tokenizer(part)
            strip_foreign_code(part, carries_code=False)
            error = prove(part, ids, expected, TOLERANCE[expected.dtype] + moved, "stock")
            name = self.original.model.name_or_path or type(self.original.model).__name__
            blocks = "" if plan is None else ", ".join(map(str, sorted(plan.blocks)))
            skipped = "" if plan is None else f", without the {plan.granularity} of layers {blocks} (counted from 1)"
            ModelCard(
                title=f"{one_line(name, 200)}: {label}",
                method=f"`{one_line(name, 200)}` quantised by the method `{METHOD}`{skipped}, with fulldepth.",
                numbers={"Largest difference of a logit from the measured model": f"{error:.1e} of the largest logit"},
                loading=STOCK,
                source=name,
                tags=["quantized"],
            ).write(part)
            size = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
        self.saved.append({"model": label, "path": str(target), "logit_error": error, "bytes": size})


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
