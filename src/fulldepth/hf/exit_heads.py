"""Exit heads of a multi-exit model: a head for each of layers 1..L-1, as modules of the model.

The head of layer l is the model's own head, with its final norm, pooling and pooler, whose last linear layer has
another matrix `W_l: [C, D]` and no bias; C is the number of classes, or of tokens in a language model. L - 1 heads
therefore add `(L - 1) C D` parameters, as Table 1 of "Representation progression and aligned training" counts them; a
gain of a layer's own norm would be a part of `W_l`. In a detector the last linear layer of the box head has another
matrix, too. Layer L keeps the model's own head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from fulldepth.hf.file_checks import stored_file

CLASSES, BOXES = "exit_heads", "exit_box_heads"
"""Modules of the model that hold the heads: `exit_heads.LAYER.weight` in its state dict and in the file."""
EXIT_HEADS = "exit_heads.safetensors"
"""File beside `model.safetensors`; stock transformers does not read it."""
NAME = re.compile(rf"({CLASSES}|{BOXES})\.[1-9]\d{{0,3}}\.weight")
"""Kind and layer."""
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
    return list(_named(model).values())


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a model's heads by their names in its state dict and in the file."""
    return {
        f"{kind}.{layer}.weight": head.weight  # type: ignore[misc]
        for kind in (CLASSES, BOXES)
        for layer, head in exit_heads_of(model, kind).items()
    }


def layer_heads(anatomy: Anatomy, kind: str = CLASSES) -> dict[int, nn.Module]:
    """1-based layer -> module in place of the last one of the model's head; empty without exit heads.

    Raises:
        FulldepthError: if the exit heads do not fit the model.
    """
    if not (heads := exit_heads_of(anatomy.model, kind)):
        return {}
    check_exit_heads(anatomy)
    module, inner, own = output_layers(anatomy)[kind]
    if not own.weight.is_meta:
        for head in heads.values():
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
    known = anatomy.head is not None or type(model.get_output_embeddings()) is nn.Linear
    outputs: dict[str, Any] = {CLASSES: (None, "", None)} | (output_layers(anatomy) if known else {})
    for kind, (_, _, output) in outputs.items():
        heads = exit_heads_of(model, kind)
        if list(heads) != [*range(1, last + 1)]:
            return f"layers 1 to {last} need {kind}, and these are for {list(heads)}."
        for layer, head in heads.items() if output is not None else ():
            found, wanted = (list(module.weight.shape) for module in (head, output))  # type: ignore[arg-type]
            if found != wanted:
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
    weights: dict[str, Tensor] = {}
    for kind, (_, _, output) in outputs.items():
        for layer in range(1, anatomy.num_layers):
            shape = output.out_features, output.in_features
            weights[f"{kind}.{layer}.weight"] = (
                torch.empty(shape, device="meta")
                if output.weight.is_meta
                else torch.randn(shape, generator=generator, device="cpu") * (std if isinstance(std, float) else 0.02)
            )
    own = outputs[CLASSES][2].weight
    _attach(anatomy.model, weights, own.device, own.dtype)
    for weight in exit_weights(anatomy.model):
        weight.requires_grad_(own.requires_grad)


def _attach(model: PreTrainedModel, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
    """Make heads modules of a model, in place of those that it has; refuses a model of one layer, which has none."""
    if not weights:
        raise FulldepthError(f"{type(model).__name__} has one layer, which keeps the model's own head.")
    _remove(model)
    for name in sorted(weights, key=lambda name: int(name.split(".")[1])):
        kind, layer, _ = name.split(".")
        if not hasattr(model, kind):
            setattr(model, kind, nn.ModuleDict())
        head = nn.Linear(weights[name].shape[1], weights[name].shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(weights[name].to(device, dtype))
        getattr(model, kind)[layer] = head.train(model.training)
    model._keys_to_ignore_on_save = {*(model._keys_to_ignore_on_save or ()), *weights}


def _remove(model: PreTrainedModel) -> None:
    """Take the heads away from a model; nothing happens without any."""
    model._keys_to_ignore_on_save = set(model._keys_to_ignore_on_save or ()) - _named(model).keys()
    for kind in {CLASSES, BOXES} & model._modules.keys():
        delattr(model, kind)


def copy_to_exit_heads(anatomy: Anatomy) -> None:
    """Fill the exit heads that a model has with copies of its own outputs."""
    with torch.no_grad():
        for kind, (_, _, own) in output_layers(anatomy).items():
            for head in exit_heads_of(anatomy.model, kind).values():
                head.weight.copy_(own.weight)  # type: ignore[operator]


def cut_exit_heads(anatomy: Anatomy, cut: Anatomy) -> None:
    """Give a model with the first E layers of another the head of layer E as its own, and the heads before it.

    Their weights are the original's tensors; the bias of the cut model's head becomes zero. A head that was tied to the
    embeddings is tied no longer. Nothing happens without exit heads.
    """
    if not has_exit_heads(anatomy.model):
        return
    check_exit_heads(anatomy)
    last, weights = cut.num_layers, _named(anatomy.model)
    kept: dict[str, Tensor] = {}
    for kind, (_, _, output) in output_layers(cut).items():
        kept |= {name: weights[name] for layer in range(1, last) if (name := f"{kind}.{layer}.weight") in weights}
        if (name := f"{kind}.{last}.weight") in weights:
            output.weight = weights[name]
            if output.bias is not None:
                output.bias = nn.Parameter(torch.zeros_like(output.bias), requires_grad=output.bias.requires_grad)
    if last < anatomy.num_layers and anatomy.task in ("causal-lm", "masked-lm"):
        for config in (cut.model.config, cut.model.config.get_text_config()):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False
        parameters = dict(cut.model.named_parameters(remove_duplicate=False))
        ties = getattr(cut.model, "all_tied_weights_keys", {}).items()
        cut.model.all_tied_weights_keys = {
            name: source for name, source in ties if parameters[name] is parameters[source]
        }
    if last > 1:
        _attach(cut.model, kept, output.weight.device, output.weight.dtype)


def save_exit_heads(model: nn.Module, folder: str | Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Write a model's heads beside its checkpoint; nothing is written without any.

    Args:
        model: the model.
        folder: of the checkpoint.
        tensors: name -> weight, where the model's own are sharded; None = the model's own.

    Raises:
        FulldepthError: if the heads do not fit the model.
    """
    if not (own := _named(model)):
        return
    if tensors is None:
        check_exit_heads(*anatomy_candidates(model))  # type: ignore[arg-type]
    source: Any = tensors or own
    stored = {name: source[name].detach().to("cpu", copy=True).contiguous() for name in own}
    # One entry only: safetensors writes several in random order, and equal heads must be equal files.
    save_file(stored, str(Path(folder) / EXIT_HEADS), metadata={"format": "pt"})


def find_exit_heads(name: str | Path, revision: str | None = None) -> Path | None:
    """The file of exit heads of a checkpoint (a folder, or a Hub name in the local cache); None without one."""
    return stored_file(str(name), EXIT_HEADS, revision)


def load_exit_heads(model: PreTrainedModel, path: str | Path) -> None:
    """Give a loaded model the heads in a file, in place of those that it has.

    Args:
        model: the model.
        path: the file, or the checkpoint's folder.

    Raises:
        FulldepthError: if the file is damaged or holds anything but one finite matrix for each of layers 1..L-1 (of a
            detector, two), or they do not fit the model.
    """
    stored = _read(path)
    _attach(model, stored, model.device, model.dtype)
    try:
        check_exit_heads(*anatomy_candidates(model))
    except FulldepthError as error:
        _remove(model)
        raise FulldepthError(f"Cannot use {path}. {error}") from error


def restore_exit_heads(model: nn.Module, path: str | Path) -> None:
    """Fill the heads that a model has from a file, in place, so that its optimiser keeps them.

    Raises:
        FulldepthError: if the file is damaged, or holds other heads than the model has.
    """
    stored, own = _read(path), _named(model)
    for name in sorted(stored.keys() | own.keys()):
        found, wanted = (list(group[name].shape) if name in group else "missing" for group in (stored, own))
        if found != wanted:
            raise FulldepthError(f"Cannot use {path}: {name} is {found} in it, and {wanted} in the model.")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(stored[name])


def _read(path: str | Path) -> dict[str, Tensor]:
    """Name -> finite matrix in a file."""
    path = Path(path) / EXIT_HEADS if Path(path).is_dir() else Path(path)
    stored: dict[str, Tensor] = {}
    with reading(path), safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            stored[name] = weight = file.get_tensor(name)
            if not NAME.fullmatch(name) or weight.ndim != 2 or not weight.is_floating_point():
                raise FulldepthError(
                    f"Cannot read {path}: it holds {one_line(name, 80)}; expected matrices {CLASSES}.LAYER.weight, and "
                    f"of a detector {BOXES}.LAYER.weight."
                )
            if not bool(torch.isfinite(weight).all()):
                raise FulldepthError(f"Cannot read {path}: {name} holds NaN or infinity.")
    if not any(name.startswith(f"{CLASSES}.") for name in stored):
        raise FulldepthError(f"Cannot read {path}: it holds no {CLASSES}.LAYER.weight.")
    return stored
