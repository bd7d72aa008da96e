"""`Classifier`, `DetectionHeads`: apply a model's heads to the states of any layer, also when FSDP2 shards them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.func import functional_call

from fulldepth.core.errors import FulldepthError
from fulldepth.hf.anatomy import Anatomy, text_config
from fulldepth.hf.exit_heads import layer_heads
from fulldepth.hf.families import Pool

MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names that configurations give to a factor, a divisor and a soft cap of the logits of tokens."""


def uses_fsdp(model: nn.Module) -> bool:
    """Return True if `fully_shard` was applied to a model or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


class GatheredModule:
    """A module with its present weights, unsharded on every process, and without its hooks.

    FSDP2 shards modules in groups, and a group's hooks expect one forward pass of all its modules. An additional call
    of a module makes them reduce the group's gradients too early; later gradients, for instance of a tied embedding,
    are lost without an error. This object can be called any number of times between the model's forward and backward
    passes, and in recomputation.

    Gradients of all calls add up in float32 and reach the module's own parameters. Where a parameter is whole (its
    group stays gathered after the forward pass), FSDP2 reduces it with the group's other gradients at the end of the
    backward pass. Where it is sharded, it is gathered here, and its gradient is the mean over the processes, as is
    FSDP2's.

    Args:
        module: a module with one positional input.
    """

    def __init__(self, module: nn.Module) -> None:
        self._plain = _WithoutHooks(module)
        full = {name: _gathered(parameter) for name, parameter in self._plain.named_parameters()}
        self._dtypes = {name: weight.dtype for name, weight in full.items()}
        self._weights = {name: w.to(torch.promote_types(w.dtype, torch.float32)) for name, w in full.items()}

    def __call__(self, states: Tensor) -> Tensor:
        """Return the module's output for `states`."""
        weights = {name: weight.to(self._dtypes[name]) for name, weight in self._weights.items()}
        result: Tensor = functional_call(self._plain, weights, (states,))
        return result

    def parameters(self) -> Iterator[Tensor]:
        """The weights that `__call__` uses."""
        return iter(self._weights.values())


class _WithoutHooks(nn.Module):
    """Wrapper whose call runs a module's forward pass without the module's hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, states: Tensor) -> Tensor:
        """Run the module's forward pass without the hooks that calling it would run."""
        result: Tensor = self.module.forward(states)
        return result


def _gathered(parameter: nn.Parameter) -> Tensor:
    """Return the unsharded parameter; the gradient of its shard is the mean over the processes."""
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = parameter.device_mesh
    full: Tensor = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())
    return full


def _first_entry(config: Any, names: Iterable[str]) -> Any:
    """Return the first entry of a configuration by these names; None if it has none."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def logit_factor(config: Any) -> float:
    """Return the factor of the logits of tokens that a configuration states, by any of its names; 1 without one."""
    multiplier = _first_entry(config, MULTIPLIERS)
    if multiplier is not None:
        return float(multiplier)
    divisor = _first_entry(config, DIVISORS)
    return 1 / float(divisor) if divisor else 1.0


class Classifier:
    """Applies a model's final norm and head to residual states of any layer.

    Args:
        anatomy: the model, which must have a head.
        exit_heads: whether each layer of a multi-exit model is read by its own head.

    Raises:
        FulldepthError: if the model has no head, or exit heads that do not fit it.
    """

    def __init__(self, anatomy: Anatomy, *, exit_heads: bool = True) -> None:
        if anatomy.head is None:
            kind = type(anatomy.model).__name__
            raise FulldepthError(
                f"The head of {kind} cannot be applied to its layers: no chain of modules leads from the last block to "
                "the model's logits (part of the head is not a module)."
                if anatomy.searches_head
                else f"{kind} has no prediction head."
            )
        self.anatomy = anatomy
        self.head = anatomy.head
        try:
            self.modules: list[Any] = [*anatomy.head_modules(self.head)]
        except AttributeError as error:
            raise FulldepthError(f"{type(anatomy.model).__name__} has no head where expected: {error}.") from error
        config = text_config(anatomy.model.config, decoder=True)
        self.softcap = _first_entry(config, SOFT_CAPS) if self.head.capped else None
        self.scale = logit_factor(config) if self.head.scale is None else self.head.scale
        if self.head.scaled_if is not None and getattr(config, self.head.scaled_if, False):
            self.scale *= float(config.d_model) ** -0.5
        if not self.per_token:  # scale and soft cap belong to language heads only
            self.softcap = None
            self.scale = 1.0
        self.norm: Callable[[Tensor], Tensor] | None = None
        """Function that replaces the final norm's module; None = the module."""
        self.exits: dict[int, Any] = layer_heads(anatomy) if exit_heads else {}
        """1-based layer -> last module of its exit head, in a multi-exit model."""

    def at(self, layer: int) -> Self:
        """Return the classifier of a 1-based layer: its exit head in a multi-exit model, else the model's own head."""
        if layer not in self.exits:
            return self
        return self._with(modules=[*self.modules[:-1], self.exits[layer]])

    def shared(self) -> Self:
        """Return a classifier that reads every layer by the model's own head, also in a multi-exit model."""
        return self._with(exits={})

    def _with(self, **changes: Any) -> Self:
        """Return a copy with other attributes."""
        changed = copy.copy(self)
        vars(changed).update(changes)
        return changed

    def after_forward(self) -> Self:
        """Return a classifier for use between the model's forward and backward pass, with gradients.

        For an unsharded model this object itself is returned. For a sharded model a new one is returned that holds this
        step's weights (`GatheredModule`); for that one the method returns it unchanged.
        """
        if not uses_fsdp(self.anatomy.model) or isinstance(self.modules[-1], GatheredModule):
            return self
        norm = self.anatomy.final_norm
        return self._with(
            modules=[GatheredModule(module) for module in self.modules],
            exits={layer: GatheredModule(module) for layer, module in self.exits.items()},
            norm=None if norm is None else GatheredModule(norm),
        )

    @property
    def per_token(self) -> bool:
        """True if the head predicts at every position, False if once a sequence."""
        return self.head.pool == "token"

    @property
    def device(self) -> torch.device | None:
        """Device of the head's input; None if its weights are offloaded."""
        device = next((p.device for p in self.modules[-1].parameters()), None)
        return None if device is None or device.type == "meta" else device

    @property
    def classes(self) -> int | None:
        """V, the number of logits, if the head ends in an ordinary linear layer that `tile` can split; else None."""
        last = self.modules[-1]
        if type(last) is not nn.Linear or type(last.weight) is not nn.Parameter or hasattr(last, "_hf_hook"):
            return None
        return len(last.weight) if self.device is not None else None

    def tile(self, classes: slice) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function that computes the logits of some classes only; `self.classes` must not be None.

        It takes prepared states `[N, D']` and a flat buffer, into which the product `[N, C]` is written. Reusing one
        buffer keeps the logits in cache: new memory costs a fifth of the product itself.
        """
        last = self.modules[-1]
        weight = last.weight[classes]
        bias = None if last.bias is None else last.bias[classes]

        def logits(prepared: Tensor, out: Tensor) -> Tensor:
            product = out[: len(prepared) * len(weight)].view(len(prepared), len(weight))
            torch.mm(prepared, weight.T, out=product)
            if bias is not None:
                product += bias
            return self.capped(product)

        return logits

    def prepare(self, states: Tensor) -> Tensor:
        """Return the input `[..., D']` of the head's last module: states after the norm and the modules before it."""
        return self._before_last(self._normed(states))

    def _normed(self, states: Tensor) -> Tensor:
        """Apply the final norm if the head reads normed states."""
        return self.anatomy.normalise(states, self.norm) if self.head.normed else states

    def _before_last(self, states: Tensor) -> Tensor:
        """Apply all modules of the head but the last."""
        for module in self.modules[:-1]:
            states = module(states)
        return states

    def logits(self, prepared: Tensor) -> Tensor:
        """Return the logits `[..., V]` of prepared states."""
        logits: Tensor = self.modules[-1](prepared)
        return self.capped(logits)

    def capped(self, logits: Tensor) -> Tensor:
        """Apply the head's scale and soft cap to the output of its last layer; returns a new tensor if it has any."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def tokens(self, states: Tensor) -> Tensor:
        """Return the logits `[N, V]` of `states: [N, D]` (token heads only)."""
        return self.logits(self.prepare(states))

    def sequences(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits `[B, C]` of `states: [B, T, D]` with `attention_mask: [B, T]` (sequence heads only)."""
        logits = self.logits(self._before_last(self.pool(states, attention_mask)))
        return pool(logits, attention_mask, "mean") if self.head.pool == "mean-of-logits" else logits

    def pool(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the input `[B, D]` of a sequence head for `states: [B, T, D]`: normed, then selected or averaged.

        A norm works on single positions, so only selected positions are normed. Heads that pool inside or average
        logits read all states.
        """
        if self.head.pool in ("first", "last"):
            return self._normed(pool(states, attention_mask, self.head.pool))
        return pool(self._normed(states), attention_mask, self.head.pool, self.head.leading)

    def feature(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the features `[B, D]` of samples: the states that the head selects or averages in `[B, T, D]`."""
        return pool(states, attention_mask, self.head.feature, self.head.leading)

    def sample_mask(self, inputs: Mapping[str, Any], attention_mask: Tensor) -> Tensor:
        """Return the mask `[B, T]` (True = counts) by which a head that reads the last position finds it.

        Classes of transformers look for the last id that is not `pad_token_id`, whatever the attention mask says: text
        that ends with the padding token, as with GPT-2's end of text, is read before it.

        Args:
            inputs: arguments of the model's forward pass.
            attention_mask: `[B, T]`; returned for all other heads, and without token ids or a padding id.
        """
        ids = inputs.get("input_ids")
        padding = getattr(text_config(self.anatomy.model.config), "pad_token_id", None)
        if self.head.pool != "last" or padding is None or not isinstance(ids, Tensor):
            return attention_mask
        return (ids != padding).to(attention_mask.device)


def pool(states: Tensor, attention_mask: Tensor | None, way: Pool, leading: int = 1) -> Tensor:
    """Pool `states: [B, T, D]` to the input `[B, D]` of a sequence head; unchanged for heads that pool inside.

    Args:
        states: after the final norm, if the head has one.
        attention_mask: `[B, T]`, 0 = padding; None = no padding.
        way: the pooling, a value of `Head.pool`.
        leading: number of positions before the first patch, see `Head.leading`.
    """
    if way == "first":
        return states[:, 0]
    if way == "mean-patches":
        return states[:, leading:].mean(1)
    if way == "first-and-mean":
        return torch.cat([states[:, 0], states[:, leading:].mean(1)], dim=-1)
    if way not in ("last", "mean"):
        return states
    mask = states.new_ones(states.shape[:2]) if attention_mask is None else attention_mask.to(states.device)
    if way == "mean":
        weights = mask[..., None].to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1)
    last = (torch.arange(mask.shape[1], device=states.device) * mask).argmax(-1)
    return states[torch.arange(len(states), device=states.device), last]


class DetectionHeads:
    """Applies a detector's final norm, class head and box head to residual states of its decoder.

    The last layer is read as in the model. In a DETR with `auxiliary_loss`, the final norm also stands between layers,
    so the last layer has it twice; earlier layers have it once, as in the model's auxiliary losses.

    Args:
        classifier: the model's class head.

    Raises:
        FulldepthError: if the model has no known box head.
    """

    def __init__(self, classifier: Classifier) -> None:
        anatomy: Anatomy = classifier.anatomy
        if anatomy.family.box_head is None:
            raise FulldepthError(f"{type(anatomy.model).__name__} has no known box head.")
        self.anatomy = anatomy
        self.classifier = classifier
        self.box_head: Any = anatomy.model.get_submodule(anatomy.family.box_head)

    def after_forward(self) -> Self:
        """Return heads for use between the model's forward and backward pass, see `Classifier.after_forward`."""
        if uses_fsdp(self.anatomy.model):
            self.classifier = self.classifier.after_forward()
            self.box_head = GatheredModule(self.box_head)
        return self

    def read(self, state: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return logits `[..., Q, C+1]` and boxes `[..., Q, 4]` in [0, 1] of a layer's states `[..., Q, D]`.

        Args:
            state: output of a decoder layer, before the final norm.
            layer: number of that layer, 1..L.
        """
        last = layer == self.anatomy.num_layers
        normed = (self.anatomy.normalise if last else self.anatomy.normalise_once)(state, self.classifier.norm)
        return self.classifier.modules[-1](normed), self.box_head(normed).sigmoid()
