"""Exit heads of a multi-exit model: a head for each of layers 1..L-1, as modules of the model.

The head of layer l is the model's own head, with its final norm, pooling and pooler, whose last linear layer has
another matrix `W_l: [C, D]` and no bias; C is the number of classes, or of tokens in a language model. L - 1 heads
therefore add `(L - 1) C D` parameters, as Table 1 of "Representation progression and aligned training" counts them; a
gain of a layer's own norm would be a part of `W_l`. Layer L keeps the model's own head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import reading
from fulldepth.hf.anatomy import Anatomy, anatomy_candidates
from fulldepth.hf.file_checks import locate
from fulldepth.hf.modes import device_of

HEADS = "exit_heads"
"""Module of the model that holds the heads: `exit_heads.LAYER.weight` in its state dict and in the file."""
EXIT_HEADS = "exit_heads.safetensors"
"""File beside `model.safetensors`; stock transformers does not read it."""
NAME = re.compile(rf"{HEADS}\.[1-9]\d{{0,3}}\.weight")
Output = tuple[nn.Module, str, nn.Linear]
"""Last module of a head, the path in it of its last linear layer (empty: the module itself), and that layer."""


class HeadOfLayer(nn.Module):
    """The last module of a head with another matrix, and no bias, in its last linear layer.

    Args:
        module: the head's last module.
        inner: path of the linear layer in it.
        replaced: `nn.Linear` without a bias.
    """

    def __init__(self, module: nn.Module, inner: str, replaced: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.inner = inner
        self.replaced = replaced

    def forward(self, states: Tensor) -> Tensor:
        """The logits for the module's input."""
        weight: Any = self.replaced.weight
        changed = {f"{self.inner}.weight": weight}
        if self.module.get_submodule(self.inner).bias is not None:
            changed[f"{self.inner}.bias"] = torch.zeros_like(weight[:, 0])
        inside: Tensor = functional_call(self.module, changed, (states,))
        return inside


def output_layer(anatomy: Anatomy) -> Output:
    """Return the last linear layer of the model's head, in whose place each exit head has a matrix of its own.

    If the head of a language model has not been searched for yet, this is the output layer that the class names.

    Raises:
        FulldepthError: if the head is unknown or does not end in an ordinary linear layer, or the model is a detector.
    """
    kind = type(anatomy.model).__name__
    head = anatomy.head
    named: Any = anatomy.model.get_output_embeddings() if head is None else None
    if type(named) is nn.Linear:
        return named, "", named
    if head is None:
        raise FulldepthError(f"{kind} has no known prediction head, so its layers cannot have exit heads.")
    if anatomy.task == "detection":
        raise FulldepthError(f"{kind} is a detector; exit heads are for classifiers and language models.")
    classes = None if head.pool == "token" else getattr(anatomy.model.config, "num_labels", None)
    module = anatomy.head_modules(head)[-1]
    layers = [(path, part) for path, part in module.named_modules() if type(part) is nn.Linear]
    if not layers or (classes is not None and layers[-1][1].out_features != classes):
        of_classes = f" of {classes} outputs" if classes else ""
        raise FulldepthError(f"The head of {kind} ({head.modules[-1]}) ends in no linear layer{of_classes}.")
    return module, *layers[-1]


def has_exit_heads(model: nn.Module) -> bool:
    """Return True if a model has exit heads."""
    return isinstance(getattr(model, HEADS, None), nn.ModuleDict)


def exit_heads_of(model: nn.Module) -> dict[int, nn.Module]:
    """1-based layer -> linear layer of its exit head, in the order of the layers; empty without exit heads."""
    heads: Any = getattr(model, HEADS) if has_exit_heads(model) else {}
    return {int(layer): head for layer, head in heads.items()}


def exit_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all exit heads."""
    return list(_named(model).values())


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name in the state dict and in the file -> weight of an exit head."""
    return {f"{HEADS}.{layer}.weight": head.weight for layer, head in exit_heads_of(model).items()}  # type: ignore[misc]


def layer_heads(anatomy: Anatomy) -> dict[int, nn.Module]:
    """1-based layer -> module that replaces the last one of the model's head; empty without exit heads.

    Raises:
        FulldepthError: if the exit heads do not fit the model.
    """
    if not (heads := exit_heads_of(anatomy.model)):
        return {}
    check_exit_heads(anatomy)
    module, inner, output = output_layer(anatomy)
    for head in heads.values():
        if not head.weight.is_meta:
            head.to(device_of(output))
    return {layer: HeadOfLayer(module, inner, head) if inner else head for layer, head in heads.items()}


def check_exit_heads(*candidates: Anatomy) -> None:
    """Refuse exit heads that fit no anatomy of a model, for instance after its vocabulary was resized.

    Heads fit if each layer before the last has one, with the shape of the model's output layer as far as it is known.

    Raises:
        FulldepthError: with the reason of the first anatomy.
    """
    misfits = [_misfit(anatomy) for anatomy in candidates]
    if all(misfits):
        raise FulldepthError(f"Exit heads do not fit this {type(candidates[0].model).__name__}: {misfits[0]}")


def _misfit(anatomy: Anatomy) -> str | None:
    """The reason why exit heads do not fit; None if they do, or there are none."""
    model = anatomy.model
    last = anatomy.num_layers - 1
    if not has_exit_heads(model):
        return None
    heads = exit_heads_of(model)
    if list(heads) != [*range(1, last + 1)]:
        return f"expected {HEADS} of layers 1 to {last}, got those of {list(heads)}."
    if anatomy.head is None and type(model.get_output_embeddings()) is not nn.Linear:
        return None  # not searched for yet
    wanted = list(output_layer(anatomy)[2].weight.shape)
    for name, weight in _named(model).items():
        if list(weight.shape) != wanted:
            return f"{name} has the shape {list(weight.shape)}, the model's output layer {wanted}."
    return None


def add_exit_heads(anatomy: Anatomy, seed: int = 0) -> None:
    """Give each of layers 1..L-1 a head of its own, with small random weights, before the optimiser is made.

    The heads are modules of the model, so that they are moved, trained, distributed and counted with it, but
    `save_pretrained` leaves them out: use `save_exit_heads`. The global random state does not change.

    Args:
        anatomy: the model.
        seed: seed of the weights, which are normal with the configuration's `initializer_range` as standard deviation.

    Raises:
        FulldepthError: as `output_layer`; or if the model has one layer, or exit heads.
    """
    _, _, output = output_layer(anatomy)
    if has_exit_heads(anatomy.model):
        raise FulldepthError(f"This {type(anatomy.model).__name__} has exit heads already.")
    stated = getattr(anatomy.config, "initializer_range", None)
    std = stated if isinstance(stated, float) else 0.02
    generator = torch.Generator().manual_seed(seed)
    shape = output.out_features, output.in_features
    weights = {}
    for layer in range(1, anatomy.num_layers):
        if output.weight.is_meta:
            weight = torch.empty(shape, device="meta")
        else:
            weight = torch.randn(shape, generator=generator, device="cpu") * std
        weights[f"{HEADS}.{layer}.weight"] = weight
    _attach(anatomy.model, weights, output.weight.device, output.weight.dtype)
    for weight in exit_weights(anatomy.model):
        weight.requires_grad_(output.weight.requires_grad)


def _attach(model: PreTrainedModel, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
    """Make exit heads modules of a model, in place of those that it has. Refuse a model of one layer."""
    if not weights:
        raise FulldepthError(
            f"{type(model).__name__} has one layer, which keeps the model's own head; exit heads need two layers."
        )
    _remove(model)
    heads = nn.ModuleDict()
    for name in sorted(weights, key=lambda name: int(name.split(".")[1])):
        head = nn.Linear(weights[name].shape[1], weights[name].shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(weights[name].to(device, dtype))
        heads[name.split(".")[1]] = head.train(model.training)
    setattr(model, HEADS, heads)
    model._keys_to_ignore_on_save = {*(model._keys_to_ignore_on_save or ()), *weights}


def _remove(model: PreTrainedModel) -> None:
    """Remove the exit heads of a model, if it has any."""
    model._keys_to_ignore_on_save = set(model._keys_to_ignore_on_save or ()) - _named(model).keys()
    model._modules.pop(HEADS, None)


def copy_to_exit_heads(anatomy: Anatomy) -> None:
    """Fill the exit heads of a model with copies of its output layer."""
    with torch.no_grad():
        for weight in exit_weights(anatomy.model):
            weight.copy_(output_layer(anatomy)[2].weight)


def cut_exit_heads(anatomy: Anatomy, cut: Anatomy) -> None:
    """Move exit heads to a model that was cut to the first E layers: the head of layer E becomes the model's own.

    The weights are the original's tensors; the bias of the cut model's head becomes zero. Nothing happens without
    exit heads.
    """
    if not has_exit_heads(anatomy.model):
        return
    check_exit_heads(anatomy)
    last = cut.num_layers
    weights = _named(anatomy.model)
    _, _, output = output_layer(cut)
    if last < anatomy.num_layers:
        output.weight = weights[f"{HEADS}.{last}.weight"]
        if output.bias is not None:
            output.bias = nn.Parameter(torch.zeros_like(output.bias), requires_grad=output.bias.requires_grad)
    if last > 1:
        names = [f"{HEADS}.{layer}.weight" for layer in range(1, last)]
        _attach(cut.model, {name: weights[name] for name in names}, output.weight.device, output.weight.dtype)


def save_exit_heads(model: nn.Module, folder: str | Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Write a model's exit heads beside its checkpoint; nothing is written without any.

    Args:
        model: the model.
        folder: the checkpoint's folder.
        tensors: name -> gathered weight, for a sharded model; None = the model's parameters.

    Raises:
        FulldepthError: if the heads do not fit the model.
    """
    if not (parameters := _named(model)):
        return
    if tensors is None:
        check_exit_heads(*anatomy_candidates(model))  # type: ignore[arg-type]
    source: Any = tensors or parameters
    stored = {name: source[name].detach().to("cpu", copy=True).contiguous() for name in parameters}
    # One entry only: safetensors writes several in random order, and equal heads must be equal files.
    save_file(stored, str(Path(folder) / EXIT_HEADS), metadata={"format": "pt"})


def find_exit_heads(name: str | Path, revision: str | None = None) -> Path | None:
    """Return the file of a checkpoint's exit heads, in its folder or downloaded from the Hub; None without one.

    Raises:
        FulldepthError: as `locate`.
    """
    return None if Path(name).is_file() else locate(str(name), EXIT_HEADS, revision)  # a GGUF file has none beside it


def load_exit_heads(model: PreTrainedModel, path: str | Path) -> None:
    """Give a loaded model the exit heads in a file, in place of those that it has.

    Args:
        model: the model.
        path: the file, or the checkpoint's folder.

    Raises:
        FulldepthError: if the file is damaged or holds anything but one finite matrix for each of layers 1..L-1, or
            they do not fit the model.
    """
    stored = _read(path)
    _attach(model, stored, device_of(model), model.dtype)
    try:
        check_exit_heads(*anatomy_candidates(model))
    except FulldepthError as error:
        _remove(model)
        raise FulldepthError(f"Cannot use {path}. {error}") from error


def restore_exit_heads(model: nn.Module, path: str | Path) -> None:
    """Fill the exit heads that a model has from a file, in place, so that its optimiser still updates them.

    Raises:
        FulldepthError: if the file is damaged, or holds other heads than the model has.
    """
    heads: Any = getattr(model, HEADS)
    try:
        heads.load_state_dict({name.removeprefix(f"{HEADS}."): weight for name, weight in _read(path).items()})
    except RuntimeError as error:  # names what is missing, unexpected or of another shape
        raise FulldepthError(f"Cannot use {path}: {one_line(error)}") from error


def _read(path: str | Path) -> dict[str, Tensor]:
    """Read a file of exit heads: name -> finite matrix."""
    path = Path(path) / EXIT_HEADS if Path(path).is_dir() else Path(path)
    with reading(path):
        stored = load_file(path)
    for name, weight in stored.items():
        if not NAME.fullmatch(name) or weight.ndim != 2 or not weight.is_floating_point():
            raise FulldepthError(
                f"Cannot read {path}: it holds {one_line(name, 80)}; expected matrices {HEADS}.LAYER.weight."
            )
        if not bool(torch.isfinite(weight).all()):
            raise FulldepthError(f"Cannot read {path}: {name} holds NaN or infinity.")
    if not stored:
        raise FulldepthError(f"Cannot read {path}: it holds no {HEADS}.LAYER.weight.")
    return stored
