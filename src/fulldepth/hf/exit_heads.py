"""Exit heads of a multi-exit model: a classifier for each of layers 1..L-1, in a file beside an ordinary checkpoint.

The head of layer l is the model's own head, with its final norm, pooling and pooler, whose last linear layer has
another matrix `W_l: [C, D]` and no bias. L - 1 heads therefore add `(L - 1) C D` parameters, as Table 1 of
"Representation progression and aligned training" counts them; a gain of a layer's own norm would be a part of `W_l`.
Layer L keeps the model's own head.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import reading
from fulldepth.hf.anatomy import Anatomy, anatomy_candidates
from fulldepth.hf.older_names import stored_file

EXIT_HEADS = "exit_heads.safetensors"
"""File beside `model.safetensors`; stock transformers does not read it."""
ATTRIBUTE = "exit_heads"
"""Module of the model that holds the heads: `exit_heads.LAYER.weight` in its state dict and in the file."""


class HeadOfLayer(nn.Module):
    """The last module of a head with another matrix, and no bias, in its last linear layer.

    Args:
        module: the head's last module.
        inner: path of the linear layer in it; empty if it is the module itself.
        replaced: `nn.Linear` without a bias.
    """

    def __init__(self, module: nn.Module, inner: str, replaced: nn.Module) -> None:
        super().__init__()
        self.module, self.inner, self.replaced = module, inner, replaced

    def forward(self, states: Tensor) -> Tensor:
        """The logits for the module's input."""
        if not self.inner:
            logits: Tensor = self.replaced(states)
            return logits
        weight: Any = self.replaced.weight
        changed = {f"{self.inner}.weight": weight}
        if self.module.get_submodule(self.inner).bias is not None:
            changed[f"{self.inner}.bias"] = torch.zeros_like(weight[:, 0])
        inside: Tensor = functional_call(self.module, changed, (states,))
        return inside


def output_layer(anatomy: Anatomy) -> tuple[nn.Module, str, nn.Linear]:
    """The head's last module, the path in it of the linear layer that gives the classes, and that layer.

    Raises:
        FulldepthError: if the model predicts no class of a sample, or its head ends in no ordinary linear layer.
    """
    kind, head = type(anatomy.model).__name__, anatomy.head
    if head is None:
        raise FulldepthError(f"{kind} has no head that is known, so layers can have none of their own.")
    if head.pool == "token":
        raise FulldepthError(
            f"{kind} predicts at every position: a head of its own for each layer would be as large as the vocabulary "
            "(in GPT-2, 11 heads of 38.6 million numbers). Exit heads are for classifiers of texts and images; the "
            "aligned method trains every layer with one head."
        )
    module = anatomy.head_modules(head)[-1]
    classes = getattr(anatomy.model.config, "num_labels", None)
    layers = [(name, part) for name, part in module.named_modules() if type(part) is nn.Linear]
    if not layers or (classes is not None and layers[-1][1].out_features != classes):
        raise FulldepthError(f"The head of {kind} ({head.modules[-1]}) ends in no linear layer with its classes.")
    return module, *layers[-1]


def has_exit_heads(model: nn.Module) -> bool:
    """Whether a model holds a head for every layer."""
    return isinstance(getattr(model, ATTRIBUTE, None), nn.ModuleDict)


def exit_heads_of(model: nn.Module) -> dict[int, nn.Module]:
    """1-based layer -> its own linear layer, in the order of the layers; empty without exit heads."""
    heads: Any = getattr(model, ATTRIBUTE) if has_exit_heads(model) else {}
    return {int(layer): head for layer, head in heads.items()}


def layer_heads(anatomy: Anatomy) -> dict[int, nn.Module]:
    """1-based layer -> module in place of the last one of the model's head; empty without exit heads."""
    if not has_exit_heads(anatomy.model):
        return {}
    module, inner, _ = output_layer(anatomy)
    return {layer: HeadOfLayer(module, inner, own) for layer, own in exit_heads_of(anatomy.model).items()}


def add_exit_heads(anatomy: Anatomy, seed: int = 0) -> None:
    """Give each of layers 1..L-1 a head of its own, with small random weights, before the optimiser is made.

    The heads are a module of the model, so that they are moved, trained, distributed and counted with it, but
    `save_pretrained` leaves them out: use `save_exit_heads`. The global random state does not change.

    Args:
        anatomy: the model.
        seed: of the weights, normal with the standard deviation `initializer_range` of the configuration.

    Raises:
        FulldepthError: as `output_layer`; or if the model has one layer, or exit heads.
    """
    _, _, last = output_layer(anatomy)
    if has_exit_heads(anatomy.model):
        raise FulldepthError(f"This {type(anatomy.model).__name__} has exit heads already.")
    std = getattr(anatomy.config, "initializer_range", None)
    generator = torch.Generator().manual_seed(seed)
    shape = (last.out_features, last.in_features)
    weights = {
        layer: torch.randn(shape, generator=generator, device="cpu") * (std if isinstance(std, float) else 0.02)
        for layer in range(1, anatomy.num_layers)
    }
    _attach(anatomy, weights)


def _attach(anatomy: Anatomy, weights: dict[int, Tensor]) -> None:
    """Make the heads a module of the model."""
    model, (_, _, last) = anatomy.model, output_layer(anatomy)
    if not weights:
        raise FulldepthError(f"{type(model).__name__} has one layer, which keeps the model's own head.")
    place = last.weight
    heads = nn.ModuleDict()
    for layer, weight in sorted(weights.items()):
        head = nn.Linear(last.in_features, last.out_features, bias=False, device="meta")
        head.weight = nn.Parameter(weight.to(place.device, place.dtype), requires_grad=place.requires_grad)
        heads[str(layer)] = head
    setattr(model, ATTRIBUTE, heads.train(model.training))
    left_out = {f"{ATTRIBUTE}.{name}" for name in heads.state_dict()}
    model._keys_to_ignore_on_save = {*(model._keys_to_ignore_on_save or ()), *left_out}


def add_stored_exit_heads(model: PreTrainedModel, stored: Iterable[str]) -> None:
    """Give a model heads if a checkpoint's names of weights include any; they are filled with its other weights."""
    if any(name.startswith(f"{ATTRIBUTE}.") for name in stored):
        add_exit_heads(anatomy_candidates(model)[0])


def remove_exit_heads(model: PreTrainedModel) -> None:
    """Take the heads away from a model; nothing happens without any."""
    if has_exit_heads(model):
        delattr(model, ATTRIBUTE)
        kept = (name for name in model._keys_to_ignore_on_save or () if not name.startswith(f"{ATTRIBUTE}."))
        model._keys_to_ignore_on_save = set(kept)


def save_exit_heads(model: nn.Module, folder: str | Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Write a model's heads beside its checkpoint; nothing is written without any.

    Args:
        model: the model.
        folder: of the checkpoint.
        tensors: name -> weight, where the model's own are sharded; None = the model's own.
    """
    if not has_exit_heads(model):
        return
    heads: Any = getattr(model, ATTRIBUTE)
    names = [f"{ATTRIBUTE}.{name}" for name in heads.state_dict()]
    source = heads.state_dict(prefix=f"{ATTRIBUTE}.") if tensors is None else tensors
    stored = {name: source[name].detach().to("cpu", copy=True).contiguous() for name in names}
    # One entry only: safetensors writes several in random order, and equal heads must be equal files.
    save_file(stored, str(Path(folder) / EXIT_HEADS), metadata={"format": "pt"})


def find_exit_heads(name: str | Path, revision: str | None = None) -> Path | None:
    """The file of exit heads of a checkpoint (a folder, or a Hub name in the local cache); None without one."""
    return stored_file(str(name), EXIT_HEADS, revision)


def load_exit_heads(anatomy: Anatomy, path: str | Path) -> None:
    """Give a loaded model the heads in a file, in place of those that it has.

    Args:
        anatomy: the model.
        path: the file, or the checkpoint's folder.

    Raises:
        FulldepthError: if the file is damaged or holds anything but one finite matrix of the right shape for each of
            layers 1..L-1, or the model can have no exit heads.
    """
    weights = _read(anatomy, path)
    remove_exit_heads(anatomy.model)
    _attach(anatomy, weights)


def restore_exit_heads(anatomy: Anatomy, path: str | Path) -> None:
    """Fill the heads that a model has from a file, in place, so that its optimiser keeps them.

    Raises:
        FulldepthError: as `load_exit_heads`.
    """
    weights = _read(anatomy, path)
    with torch.no_grad():
        for layer, head in exit_heads_of(anatomy.model).items():
            head.weight.copy_(weights[layer])  # type: ignore[operator]


def _read(anatomy: Anatomy, path: str | Path) -> dict[int, Tensor]:
    """1-based layer -> matrix in a file, checked against the model."""
    path = Path(path) / EXIT_HEADS if Path(path).is_dir() else Path(path)
    kind, (_, _, last) = type(anatomy.model).__name__, output_layer(anatomy)
    expected = {f"{ATTRIBUTE}.{layer}.weight": layer for layer in range(1, anatomy.num_layers)}
    shape, weights = [last.out_features, last.in_features], {}
    with reading(path), safe_open(str(path), framework="pt") as file:
        if wrong := sorted(set(file.keys()) ^ expected.keys()):
            state = "lacks" if wrong[0] in expected else "holds"
            raise FulldepthError(
                f"Cannot read {path}: it {state} {one_line(wrong[0], 80)}; expected a weight for each of layers 1 to "
                f"{anatomy.num_layers - 1} of {kind}."
            )
        for name, layer in expected.items():
            if (found := file.get_slice(name).get_shape()) != shape:
                raise FulldepthError(f"Cannot read {path}: {name} is {found}; {kind} needs {shape}.")
            weights[layer] = file.get_tensor(name)
    for layer, weight in weights.items():
        if not weight.is_floating_point() or not bool(torch.isfinite(weight).all()):
            found = "NaN or infinity" if weight.is_floating_point() else f"{weight.dtype} values"
            raise FulldepthError(f"Cannot read {path}: the head of layer {layer} holds {found}.")
    return weights


def cut_exit_heads(anatomy: Anatomy, cut: Anatomy) -> None:
    """Give a model with the first E layers of another the head of layer E as its own, and the heads before it.

    Their weights are the original's tensors; the bias of the cut model's head becomes zero. Nothing happens without
    exit heads.
    """
    heads, last = exit_heads_of(anatomy.model), cut.num_layers
    if last in heads:
        _, _, output = output_layer(cut)
        output.weight = heads[last].weight  # type: ignore[assignment]
        if output.bias is not None:
            output.bias = nn.Parameter(torch.zeros_like(output.bias), requires_grad=output.bias.requires_grad)
    if heads and last > 1:
        _attach(cut, {layer: heads[layer].weight for layer in range(1, last)})  # type: ignore[misc]


__all__ = [
    "EXIT_HEADS",
    "add_exit_heads",
    "add_stored_exit_heads",
    "cut_exit_heads",
    "exit_heads_of",
    "find_exit_heads",
    "has_exit_heads",
    "layer_heads",
    "load_exit_heads",
    "output_layer",
    "remove_exit_heads",
    "restore_exit_heads",
    "save_exit_heads",
]
