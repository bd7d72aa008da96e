"""Exit heads of a multi-exit model: a head for each of layers 1..L-1, as modules of the model.

The head of layer l is the model's own head, with its final norm, pooling and pooler, whose last linear layer has
another matrix `W_l: [C, D]` and no bias; C is the number of classes, or of tokens in a language model. L - 1 heads
therefore add `(L - 1) C D` parameters, as Table 1 of "Representation progression and aligned training" counts them; a
gain of a layer's own norm would be a part of `W_l`. In a detector the last linear layer of the box head has another
matrix, too. Layer L keeps the model's own head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError
from fulldepth.hf.anatomy import Anatomy

CLASSES, BOXES = "exit_heads", "exit_box_heads"
"""Modules of the model that hold the heads: `exit_heads.LAYER.weight` in its state dict and in the file."""
LANGUAGE = ("causal-lm", "masked-lm")
"""Tasks whose head may be tied to the embeddings."""
Weights = dict[str, dict[int, Tensor]]
"""`CLASSES` (and `BOXES`) -> 1-based layer -> matrix."""
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
        self.module, self.inner, self.replaced = module, inner, replaced

    def forward(self, states: Tensor) -> Tensor:
        """The logits for the module's input."""
        weight: Any = self.replaced.weight
        changed = {f"{self.inner}.weight": weight}
        if self.module.get_submodule(self.inner).bias is not None:
            changed[f"{self.inner}.bias"] = torch.zeros_like(weight[:, 0])
        inside: Tensor = functional_call(self.module, changed, (states,))
        return inside


def output_layers(anatomy: Anatomy) -> dict[str, Output]:
    """Name of the module that holds the heads of layers -> the model's own output in their place.

    Where the head of a language model has not been searched for yet, its output is what the class names so.

    Raises:
        FulldepthError: if the model has no head that is known, or one that ends in no ordinary linear layer.
    """
    kind, head = type(anatomy.model).__name__, anatomy.head
    named: Any = anatomy.model.get_output_embeddings() if head is None else None
    if type(named) is nn.Linear:
        return {CLASSES: (named, "", named)}
    if head is None:
        raise FulldepthError(f"{kind} has no head that is known, so layers can have none of their own.")
    classes = getattr(anatomy.model.config, "num_labels", None)
    if anatomy.family.box_head is not None and classes is not None:
        classes += 1  # "no object"
    elif head.pool == "token":
        classes = None
    found = {CLASSES: _output(kind, head.modules[-1], anatomy.head_modules(head)[-1], classes)}
    if anatomy.family.box_head is not None:
        box_head = anatomy.model.get_submodule(anatomy.family.box_head)
        found[BOXES] = _output(kind, anatomy.family.box_head, box_head, 4)
    return found


def _is_known(anatomy: Anatomy) -> bool:
    return anatomy.head is not None or type(anatomy.model.get_output_embeddings()) is nn.Linear


def _output(kind: str, name: str, module: nn.Module, width: int | None) -> Output:
    layers = [(path, part) for path, part in module.named_modules() if type(part) is nn.Linear]
    if not layers or (width is not None and layers[-1][1].out_features != width):
        raise FulldepthError(
            f"The head of {kind} ({name}) ends in no linear layer{f' of {width} outputs' if width else ''}."
        )
    return module, *layers[-1]


def has_exit_heads(model: nn.Module) -> bool:
    """Whether a model holds a head for every layer."""
    return isinstance(getattr(model, CLASSES, None), nn.ModuleDict)


def exit_heads_of(model: nn.Module, kind: str = CLASSES) -> dict[int, nn.Module]:
    """1-based layer -> its own linear layer, in the order of the layers; empty without exit heads.

    Args:
        model: the model.
        kind: `CLASSES` or `BOXES`.
    """
    heads: Any = getattr(model, kind, None) if has_exit_heads(model) else None
    return {int(layer): head for layer, head in (heads or {}).items()}


def exit_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all exit heads."""
    return [head.weight for kind in (CLASSES, BOXES) for head in exit_heads_of(model, kind).values()]  # type: ignore[misc]


def layer_heads(anatomy: Anatomy, kind: str = CLASSES) -> dict[int, nn.Module]:
    """1-based layer -> module in place of the last one of the model's head; empty without exit heads.

    Raises:
        FulldepthError: if the exit heads do not fit the model.
    """
    heads = exit_heads_of(anatomy.model, kind)
    if not heads:
        return {}
    check_exit_heads(anatomy)
    module, inner, own = output_layers(anatomy)[kind]
    for head in heads.values():
        if own.weight.device.type != "meta":
            head.to(own.weight.device)
    return {layer: HeadOfLayer(module, inner, head) if inner else head for layer, head in heads.items()}


def check_exit_heads(*candidates: Anatomy) -> None:
    """Refuse exit heads that fit no anatomy of a model, for instance after its vocabulary was resized.

    Heads fit if each layer before the last has one of the shape of the model's own output, as far as that is known.

    Raises:
        FulldepthError: with the reason of the first anatomy.
    """
    misfits = [_misfit(anatomy) for anatomy in candidates]
    if all(misfits):
        raise FulldepthError(f"Exit heads do not fit this {type(candidates[0].model).__name__}: {misfits[0]}")


def _misfit(anatomy: Anatomy) -> str | None:
    """Why exit heads do not fit; None if they do, or there are none."""
    model, last = anatomy.model, anatomy.num_layers - 1
    if not has_exit_heads(model):
        return None
    outputs = {kind: own for kind, (_, _, own) in output_layers(anatomy).items()} if _is_known(anatomy) else {}
    for kind in {CLASSES: None, **outputs}:
        if (layers := list(exit_heads_of(model, kind))) != [*range(1, last + 1)]:
            return f"layers 1 to {last} need {kind}, and these are for {layers}."
    for kind, output in outputs.items():
        wanted = [output.out_features, output.in_features]
        for layer, head in exit_heads_of(model, kind).items():
            if (found := list(head.weight.shape)) != wanted:  # type: ignore[arg-type]
                return f"{kind}.{layer}.weight is {found}, and the model's own output {wanted}."
    return None


def add_exit_heads(anatomy: Anatomy, seed: int = 0) -> None:
    """Give each of layers 1..L-1 a head of its own, with small random weights, before the optimiser is made.

    The heads are modules of the model, so that they are moved, trained, distributed and counted with it, but
    `save_pretrained` leaves them out: use `save_exit_heads`. The global random state does not change.

    Args:
        anatomy: the model.
        seed: of the weights, normal with the standard deviation `initializer_range` of the configuration.

    Raises:
        FulldepthError: as `output_layers`; or if the model has one layer, or exit heads.
    """
    outputs = output_layers(anatomy)
    if has_exit_heads(anatomy.model):
        raise FulldepthError(f"This {type(anatomy.model).__name__} has exit heads already.")
    std = getattr(anatomy.config, "initializer_range", None)
    generator = torch.Generator().manual_seed(seed)

    def drawn(own: nn.Linear) -> Tensor:
        shape = (own.out_features, own.in_features)
        if own.weight.is_meta:
            return torch.empty(shape, device="meta")
        return torch.randn(shape, generator=generator, device="cpu") * (std if isinstance(std, float) else 0.02)

    weights = {
        kind: {layer: drawn(own) for layer in range(1, anatomy.num_layers)} for kind, (_, _, own) in outputs.items()
    }
    own = outputs[CLASSES][2].weight
    attach_exit_heads(anatomy.model, weights, own.device, own.dtype)
    for weight in exit_weights(anatomy.model):
        weight.requires_grad_(own.requires_grad)


def attach_exit_heads(model: PreTrainedModel, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
    """Make heads modules of a model, in place of those that it has.

    Raises:
        FulldepthError: if there are none, because the model has one layer.
    """
    if not weights.get(CLASSES):
        raise FulldepthError(f"{type(model).__name__} has one layer, which keeps the model's own head.")
    remove_exit_heads(model)
    left_out = set(model._keys_to_ignore_on_save or ())
    for kind, of_layers in weights.items():
        heads = nn.ModuleDict()
        for layer, weight in sorted(of_layers.items()):
            head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            head.weight = nn.Parameter(weight.to(device, dtype))
            heads[str(layer)] = head
        setattr(model, kind, heads.train(model.training))
        left_out |= {f"{kind}.{name}" for name in heads.state_dict()}
    model._keys_to_ignore_on_save = left_out


def copy_to_exit_heads(anatomy: Anatomy) -> None:
    """Fill the exit heads that a model has with copies of its own outputs."""
    with torch.no_grad():
        for kind, (_, _, own) in output_layers(anatomy).items():
            for head in exit_heads_of(anatomy.model, kind).values():
                head.weight.copy_(own.weight)  # type: ignore[operator]


def remove_exit_heads(model: PreTrainedModel) -> None:
    """Take the heads away from a model; nothing happens without any."""
    if has_exit_heads(model):
        delattr(model, CLASSES)
        if hasattr(model, BOXES):
            delattr(model, BOXES)
        prefixes = (f"{CLASSES}.", f"{BOXES}.")
        kept = (name for name in model._keys_to_ignore_on_save or () if not name.startswith(prefixes))
        model._keys_to_ignore_on_save = set(kept)


def cut_exit_heads(anatomy: Anatomy, cut: Anatomy) -> None:
    """Give a model with the first E layers of another the head of layer E as its own, and the heads before it.

    Their weights are the original's tensors; the bias of the cut model's head becomes zero. A head that was tied to the
    embeddings is tied no longer. Nothing happens without exit heads.
    """
    if not has_exit_heads(anatomy.model):
        return
    check_exit_heads(anatomy)
    last = cut.num_layers
    kept: Weights = {}
    for kind, (_, _, output) in output_layers(cut).items():
        heads = {layer: head.weight for layer, head in exit_heads_of(anatomy.model, kind).items()}
        kept[kind] = {layer: heads[layer] for layer in range(1, last)}  # type: ignore[misc]
        if last in heads:
            output.weight = heads[last]  # type: ignore[assignment]
            if output.bias is not None:
                output.bias = nn.Parameter(torch.zeros_like(output.bias), requires_grad=output.bias.requires_grad)
    if last < anatomy.num_layers and anatomy.task in LANGUAGE:
        _untie(cut.model)
    if last > 1:
        weight = output.weight
        attach_exit_heads(cut.model, kept, weight.device, weight.dtype)


def _untie(model: PreTrainedModel) -> None:
    """Let a model's head and its embeddings be two matrices, in memory and in a checkpoint."""
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    ties = getattr(model, "all_tied_weights_keys", {}).items()
    model.all_tied_weights_keys = {
        name: source for name, source in ties if model.get_parameter(name) is model.get_parameter(source)
    }


__all__ = [
    "BOXES",
    "CLASSES",
    "add_exit_heads",
    "attach_exit_heads",
    "check_exit_heads",
    "copy_to_exit_heads",
    "cut_exit_heads",
    "exit_heads_of",
    "exit_weights",
    "has_exit_heads",
    "layer_heads",
    "output_layers",
    "remove_exit_heads",
]
