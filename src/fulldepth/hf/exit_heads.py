"""Exit heads of a multi-exit model: a head for each of layers 1..L-1, in a file beside an ordinary checkpoint.

The head of layer l is the model's own head, with its final norm, pooling and pooler, whose last linear layer has
another matrix `W_l: [C, D]` and no bias; C is the number of classes, or of tokens in a language model. L - 1 heads
therefore add `(L - 1) C D` parameters, as Table 1 of "Representation progression and aligned training" counts them; a
gain of a layer's own norm would be a part of `W_l`. In a detector the last linear layer of the box head has another
matrix, too. Layer L keeps the model's own head.
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
CLASSES, BOXES = "exit_heads", "exit_box_heads"
"""Modules of the model that hold the heads: `exit_heads.LAYER.weight` in its state dict and in the file."""
LANGUAGE = ("causal-lm", "masked-lm")
"""Tasks of heads that may be tied to the embeddings."""
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

    Of a family whose head is found by following tensors, before that: the likely last layer. It gives the shape of the
    heads; `layer_heads` checks it against the head that was found.

    Raises:
        FulldepthError: if the model has no head, or one that ends in no ordinary linear layer.
    """
    kind, head = type(anatomy.model).__name__, anatomy.head
    if head is None and (guess := _likely_output(anatomy)) is not None:
        return {CLASSES: guess}
    if head is None:
        raise FulldepthError(f"{kind} has no head that is known, so layers can have none of their own.")
    classes = getattr(anatomy.model.config, "num_labels", None)
    if anatomy.family.box_head is not None and classes is not None:
        classes += 1  # "no object"
    elif head.pool == "token":
        classes = anatomy.vocab_size
    found = {CLASSES: _output(kind, head.modules[-1], anatomy.head_modules(head)[-1], classes)}
    if anatomy.family.box_head is not None:
        box_head = anatomy.model.get_submodule(anatomy.family.box_head)
        found[BOXES] = _output(kind, anatomy.family.box_head, box_head, 4)
    return found


def _likely_output(anatomy: Anatomy) -> Output | None:
    """The last linear layer outside the blocks that is as wide as the output; None for a model without a head."""
    model = anatomy.model
    if not anatomy.searches_head:
        return None
    if anatomy.task in LANGUAGE:
        own: Any = model.get_output_embeddings()
        return (own, "", own) if type(own) is nn.Linear else None
    inside = {part for block in anatomy.blocks for part in block.modules()}
    linear = [part for part in model.modules() if type(part) is nn.Linear and part not in inside]
    wide = [part for part in linear if part.out_features == getattr(model.config, "num_labels", None)]
    return (wide[-1], "", wide[-1]) if wide else None


def _output(kind: str, name: str, module: nn.Module, width: int | None) -> Output:
    layers = [(path, part) for path, part in module.named_modules() if type(part) is nn.Linear]
    if not layers or (width is not None and layers[-1][1].out_features != width):
        raise FulldepthError(f"The head of {kind} ({name}) ends in no linear layer with its {width or ''} outputs.")
    return module, *layers[-1]


def has_exit_heads(model: nn.Module) -> bool:
    """Whether a model holds a head for every layer."""
    return isinstance(getattr(model, CLASSES, None), nn.ModuleDict)


def exit_heads_of(model: nn.Module, kind: str = CLASSES) -> dict[int, nn.Module]:
    """1-based layer -> its own linear layer, in the order of the layers; empty without exit heads.

    Args:
        model: the model.
        kind: `CLASSES` or `BOXES`.

    Raises:
        FulldepthError: if the vocabulary of a language model was resized after it got its heads.
    """
    heads: Any = getattr(model, kind, None) if has_exit_heads(model) else None
    found = {int(layer): head for layer, head in (heads or {}).items()}
    if found and kind == CLASSES and isinstance(model, PreTrainedModel):
        output: Any = model.get_output_embeddings()
        if isinstance(output, nn.Linear):
            _check_shapes(model, found, output)
    return found


def _check_shapes(model: nn.Module, heads: dict[int, Any], output: nn.Linear) -> None:
    """Check that heads have the shape of the model's own output."""
    shape = [output.out_features, output.in_features]
    for layer, head in heads.items():
        if (found := [head.out_features, head.in_features]) != shape:
            raise FulldepthError(
                f"The exit head of layer {layer} is {found}, and the output of {type(model).__name__} {shape}: the "
                "model was changed after it got its exit heads (its vocabulary resized?). Change it before."
            )


def exit_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all exit heads."""
    return [head.weight for kind in (CLASSES, BOXES) for head in exit_heads_of(model, kind).values()]  # type: ignore[misc]


def layer_heads(anatomy: Anatomy, kind: str = CLASSES) -> dict[int, nn.Module]:
    """1-based layer -> module in place of the last one of the model's head; empty without exit heads.

    Raises:
        FulldepthError: if their shape is not that of the model's own output.
    """
    heads: dict[int, Any] = exit_heads_of(anatomy.model, kind)
    if not heads:
        return {}
    module, inner, output = output_layers(anatomy)[kind]
    _check_shapes(anatomy.model, heads, output)
    return {layer: HeadOfLayer(module, inner, own) if inner else own for layer, own in heads.items()}


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

    layers = range(1, anatomy.num_layers)
    _attach(anatomy, {kind: {layer: drawn(own) for layer in layers} for kind, (_, _, own) in outputs.items()})


def _attach(anatomy: Anatomy, weights: dict[str, dict[int, Tensor]]) -> None:
    """Make the heads modules of the model."""
    model = anatomy.model
    if not weights[CLASSES]:
        raise FulldepthError(f"{type(model).__name__} has one layer, which keeps the model's own head.")
    left_out = set(model._keys_to_ignore_on_save or ())
    for kind, (_, _, own) in output_layers(anatomy).items():
        heads = nn.ModuleDict()
        for layer, weight in sorted(weights[kind].items()):
            head = nn.Linear(own.in_features, own.out_features, bias=False, device="meta")
            place = weight.to(own.weight.device, own.weight.dtype)
            head.weight = nn.Parameter(place, requires_grad=own.weight.requires_grad)
            heads[str(layer)] = head
        setattr(model, kind, heads.train(model.training))
        left_out |= {f"{kind}.{name}" for name in heads.state_dict()}
    model._keys_to_ignore_on_save = left_out


def add_stored_exit_heads(model: PreTrainedModel, stored: Iterable[str]) -> None:
    """Give a model heads if a checkpoint's names of weights include any; they are filled with its other weights."""
    if any(name.startswith(f"{CLASSES}.") for name in stored):
        add_exit_heads(anatomy_candidates(model)[0])


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


def save_exit_heads(model: nn.Module, folder: str | Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Write a model's heads beside its checkpoint; nothing is written without any.

    Args:
        model: the model.
        folder: of the checkpoint.
        tensors: name -> weight, where the model's own are sharded; None = the model's own.
    """
    own = {
        f"{kind}.{layer}.weight": head.weight
        for kind in (CLASSES, BOXES)
        for layer, head in exit_heads_of(model, kind).items()
    }
    if not own:
        return
    source: Any = own if tensors is None else tensors
    stored = {name: source[name].detach().to("cpu", copy=True).contiguous() for name in own}
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
            layers 1..L-1 (of a detector, two), or the model can have no exit heads.
    """
    weights = _read(anatomy, path)
    remove_exit_heads(anatomy.model)
    _attach(anatomy, weights)


def restore_exit_heads(anatomy: Anatomy, path: str | Path) -> None:
    """Fill the heads that a model has from a file, in place, so that its optimiser keeps them.

    Raises:
        FulldepthError: as `load_exit_heads`.
    """
    with torch.no_grad():
        for kind, weights in _read(anatomy, path).items():
            for layer, head in exit_heads_of(anatomy.model, kind).items():
                head.weight.copy_(weights[layer])  # type: ignore[operator]


def _read(anatomy: Anatomy, path: str | Path) -> dict[str, dict[int, Tensor]]:
    """Kind -> 1-based layer -> matrix in a file, checked against the model."""
    path = Path(path) / EXIT_HEADS if Path(path).is_dir() else Path(path)
    outputs, layers = output_layers(anatomy), range(1, anatomy.num_layers)
    expected = {f"{kind}.{layer}.weight": own for kind, (_, _, own) in outputs.items() for layer in layers}
    with reading(path), safe_open(str(path), framework="pt") as file:
        if wrong := sorted(set(file.keys()) ^ expected.keys()):
            state = "lacks" if wrong[0] in expected else "holds"
            raise FulldepthError(
                f"Cannot read {path}: it {state} {one_line(wrong[0], 80)}; expected a weight for each of layers 1 to "
                f"{anatomy.num_layers - 1} of {type(anatomy.model).__name__}."
            )
        tensors = {name: _tensor(file, name, own, f"Cannot read {path}") for name, own in expected.items()}
    return {kind: {layer: tensors[f"{kind}.{layer}.weight"] for layer in layers} for kind in outputs}


def _tensor(file: Any, name: str, own: nn.Linear, title: str) -> Tensor:
    """A finite matrix of the shape of the model's own."""
    shape = [own.out_features, own.in_features]
    if (found := file.get_slice(name).get_shape()) != shape:
        raise FulldepthError(f"{title}: {name} is {found}; the model needs {shape}.")
    weight: Tensor = file.get_tensor(name)
    if not weight.is_floating_point():
        raise FulldepthError(f"{title}: {name} holds {weight.dtype} values.")
    if not bool(torch.isfinite(weight).all()):
        raise FulldepthError(f"{title}: {name} holds NaN or infinity.")
    return weight


def cut_exit_heads(anatomy: Anatomy, cut: Anatomy) -> None:
    """Give a model with the first E layers of another the head of layer E as its own, and the heads before it.

    Their weights are the original's tensors; the bias of the cut model's head becomes zero. A head that was tied to the
    embeddings is tied no longer. Nothing happens without exit heads.
    """
    if not has_exit_heads(anatomy.model):
        return
    last = cut.num_layers
    kept: dict[str, dict[int, Tensor]] = {}
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
        _attach(cut, kept)


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
    "EXIT_HEADS",
    "add_exit_heads",
    "add_stored_exit_heads",
    "copy_to_exit_heads",
    "cut_exit_heads",
    "exit_heads_of",
    "exit_weights",
    "find_exit_heads",
    "has_exit_heads",
    "layer_heads",
    "load_exit_heads",
    "output_layers",
    "remove_exit_heads",
    "restore_exit_heads",
    "save_exit_heads",
]
