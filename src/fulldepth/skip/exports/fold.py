"""`fold`: the scalars of a plan, multiplied into the model's own weights.

A pre-norm layer reads the residual stream only through norms, which are invariant to its scale. The folded model's
stream is therefore `x / c`, with a running factor c that starts at 1:

    x' = b_att A + s_att x     c' = s_att c    A's last weights  *= b_att / c'
    y  = b_mlp M + s_mlp x'    c  = s_mlp c'   M's last weights  *= b_mlp / c

A skipped branch has b = 0 and s = 1. Parallel residuals, `y = s_mlp (b_att A + s_att x) + b_mlp M`, have one factor:
`c = s_mlp s_att c`, A's weights times `s_mlp b_att / c`, M's times `b_mlp / c`. The final norm removes the last c.
The only inexact term is the norms' eps, which is now added to `x^2 / c^2`.

Source: SPEC section 4 ("Beyond the paper"), for Hopscotch (arXiv 2506.03303).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError, first_reason
from fulldepth.execution import find_anatomy
from fulldepth.hf import (
    Anatomy,
    OutputWeights,
    device_of,
    evaluating,
    find_output_weights,
    in_memory,
    is_offloaded,
    scale_obstacle,
)
from fulldepth.hf.modes import hooked, state_in, with_state
from fulldepth.hf.rounding import relative_error
from fulldepth.hf.scalars import FACTORS, Scalars
from fulldepth.hf.stream_scale import stream_scale, write_stream_scale
from fulldepth.hf.surgery import skipping
from fulldepth.skip.plan import Plan

MOST = {torch.float64: 1e-2, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.1}
"""Largest relative logit error of a folded model; errors of rounding and eps are far smaller."""
PROBES = 4
PROBE_LENGTH = 32
"""Number of sequences that logits are compared on, and the largest number of tokens in one."""


@dataclass(frozen=True)
class Change:
    """The change that folding makes to one branch: its output weights are multiplied by a factor."""

    where: str
    """For messages: `attention of layer 3`."""
    weights: OutputWeights
    factor: float

    def weight(self, name: str, weight: Tensor) -> Tensor:
        """The new value of one of the weights, in its own type.

        Raises:
            FulldepthError: if a value overflows.
        """
        values = self.weights.multiplied(weight, self.factor)
        if not bool(torch.isfinite(values).all()):
            raise FulldepthError(
                f"Folding makes {name} of the {self.where} too large for {weight.dtype}: its factor is "
                f"{self.factor:.3g}. Load the model in float32."
            )
        return values


@dataclass(frozen=True)
class Folding:
    """The changes that folding makes to a model, and their measured error."""

    logit_error: float
    """Largest difference of a logit from the model with its scalars outside, relative to the largest logit."""
    stream_scale: tuple[float, ...]
    """c where norms read the stream x / c: before attention and MLP of each layer, and at the end."""
    note: str
    """A sentence that states the error and its cause."""
    changes: Mapping[str, Change] = field(default_factory=dict, repr=False)
    """Name of a weight in the model's state dict -> its change."""

    @classmethod
    def unscaled(cls, anatomy: Anatomy, note: str) -> Self:
        """A folding that changes no weights."""
        return cls(0.0, (1.0,) * (2 * anatomy.num_layers + 1), note)

    def state_scale(self, anatomy: Anatomy) -> list[float]:
        """c_0..c_L of the folded model's states h_0..h_L, times the scale that its configuration states already."""
        before = stream_scale(anatomy.model.config, anatomy.num_layers)
        return [factor * stated for factor, stated in zip(self.stream_scale[::2], before, strict=True)]

    def weight(self, name: str, weight: Tensor) -> Tensor:
        """The weight of the folded model, computed from the model's own weight of that name."""
        return self.changes[name].weight(name, weight) if name in self.changes else weight


def fold(model: PreTrainedModel, plan: Plan) -> Folding:
    """Multiply a plan's scalars into the model's own weights in place, and zero the skipped branches.

    The model's configuration gets the scale c of the stream (`hf.stream_scale`), by which MMD compares its states. The
    error is measured before any weight changes.

    Args:
        model: the model that the plan was made for, as loaded.
        plan: skipped blocks and scalars.

    Returns:
        The folding with its logit error on a few sequences of random tokens: exact up to the norms' eps, which is
        added to a stream of another scale. In float32 4e-6 to 4e-5 on trained models with scalars within 10 % of 1.

    Raises:
        FulldepthError: if the plan is for another model, the family's streams cannot be rescaled exactly, a factor of
            the stream is not positive, or weights are quantised or offloaded. The
            model is unchanged then.
    """
    if is_offloaded(model):
        raise FulldepthError(
            "Weights that are offloaded cannot be changed in place. Load the model without a device map, or export the "
            "plan in the format folded, which reads them one after the other."
        )
    plan.check_model(model)
    anatomy = find_anatomy(model)
    folding = prepare_folding(anatomy, plan)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for parameter, name in {parameters[name]: name for name in folding.changes}.items():
            parameter.copy_(folding.weight(name, parameter))
    write_stream_scale(model.config, folding.state_scale(anatomy))
    return folding


def prepare_folding(anatomy: Anatomy, plan: Plan, *, most: float | None = None) -> Folding:
    """Compute the changes of a folding and measure their error; the model itself does not change.

    A branch has its new weights only during its forward pass, so that those of one branch are in memory at a time.

    Args:
        anatomy: the model; whether the plan was made for it is not checked.
        plan: skipped blocks and scalars.
        most: largest accepted error in logits; None = `MOST` of the model's precision.

    Raises:
        FulldepthError: as `fold`, except for another model and for offloaded weights.
    """
    check_foldable(anatomy, plan)
    ids = probes(anatomy)
    factors, scales = branch_factors(plan, anatomy.num_layers, parallel=anatomy.family.design == "parallel")
    changes = _changes(anatomy, factors, ids)
    eps = f"The norms' eps is added to a stream of another scale; the rest is rounding in {anatomy.model.dtype}."
    kind, cause = ("healed", eps) if heals(plan) else ("skipping", "There are no scalars to fold.")
    with in_use(changes.values()):
        folded_logits = original_logits(anatomy, ids)
    expected = scaled_logits(anatomy, plan, ids)
    error = relative_error(folded_logits, expected)
    if not error <= (MOST[expected.dtype] if most is None else most):
        raise FulldepthError(
            f"Folding is refused: the logits of the folded {type(anatomy.model).__name__} miss those of the healed "
            f"one by {error:.1e} of the largest. {cause}"
        )
    note = f"Logits within {error:.1e} of the {kind} model's, relative. {cause}"
    return Folding(error, scales, note, changes)


def check_foldable(anatomy: Anatomy, plan: Plan) -> None:
    """Refuse a model or scalars that cannot be folded exactly.

    Raises:
        FulldepthError: with the reason.
    """
    if not heals(plan):  # zeros in a branch's output weights are exact whatever reads the stream
        return
    if reason := folding_obstacle(anatomy):
        raise FulldepthError(
            f"The scalars of a {type(anatomy.model).__name__} cannot be folded into its weights: {reason}. A plan "
            "without scalars (--no-fit) can be exported."
        )
    for layer, factors in plan.scalars.items():
        for name in ("s_att", "s_mlp"):
            if not factors.get(name, 1.0) > 0:
                raise FulldepthError(
                    f"{name} of layer {layer} is {factors[name]:g}, and folding needs factors of the stream above 0. "
                    "Fit the scalars again with a lower learning rate, or use the plan in place."
                )


def folding_obstacle(anatomy: Anatomy) -> str | None:
    """Return the reason why no scalars of a model can be folded into its weights; None if they can."""
    reasons = {
        "its norms come after the sums, so nothing takes a factor out of the stream": anatomy.family.design == "post",
        "it has no final norm to take the last factor out": anatomy.final_norm is None,
    }
    return anatomy.not_serial or first_reason(reasons) or scale_obstacle(anatomy, probes(anatomy))


def heals(plan: Plan) -> bool:
    """Return True if a plan has a scalar that is not 1."""
    return any(value != 1.0 for scalars in plan.scalars.values() for value in scalars.values())


def branch_factors(
    plan: Plan, num_layers: int, *, parallel: bool = False
) -> tuple[dict[tuple[int, str], float], tuple[float, ...]]:
    """The factor of each branch, and the scale c of the stream.

    Args:
        plan: scalars above 0 where they multiply the stream.
        num_layers: L.
        parallel: whether layers add both branches to one x.

    Returns:
        (1-based layer, `attention` or `mlp`) -> factor, 0 for a skipped branch; and the 2 L + 1 scales of
        `Folding.stream_scale`.
    """
    factors = {}
    scales = []
    scale = 1.0
    for layer in range(1, num_layers + 1):
        scalars = dict.fromkeys(FACTORS, 1.0) | plan.scalars.get(str(layer), {})
        for part, name in (("attention", "att"), ("mlp", "mlp")):
            if layer in plan.lacking(part):  # a skipped branch adds 0 to the stream as it is
                scalars |= {f"b_{name}": 0.0, f"s_{name}": 1.0}
        between = scale * scalars["s_att"]
        after = between * scalars["s_mlp"]
        factors[layer, "attention"] = (
            scalars["b_att"] * scalars["s_mlp"] / after if parallel else scalars["b_att"] / between
        )
        factors[layer, "mlp"] = scalars["b_mlp"] / after
        scales += [scale, scale if parallel else between]
        scale = after
    return factors, (*scales, scale)


def _changes(anatomy: Anatomy, factors: Mapping[tuple[int, str], float], ids: Tensor) -> dict[str, Change]:
    """Name of every weight that changes -> its change; refuses a weight that would need two different factors."""
    branches = [branch for branch, factor in factors.items() if factor != 1.0]
    output_weights = find_output_weights(anatomy, branches, ids)  # replaces the parameters of offloaded modules
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in anatomy.model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    changes: dict[str, Change] = {}
    for (layer, role), weights in output_weights.items():
        change = Change(f"{role} of layer {layer}", weights, factors[layer, role])
        for own_name in weights.names:
            for name in names[weights.branch.get_parameter(own_name)]:
                if changes.setdefault(name, change).factor != change.factor:
                    raise FulldepthError(
                        f"Folding is refused: {name} belongs to the {changes[name].where} and to the {change.where}, "
                        "which need different factors."
                    )
    return changes


@contextmanager
def in_use(changes: Iterable[Change]) -> Iterator[None]:
    """Give branches their new weights during each forward pass."""
    with ExitStack() as hooks, ExitStack() as swapped:

        def enter(change: Change, *_: Any) -> None:
            branch = change.weights.branch
            swapped.enter_context(in_memory(branch))
            for name in change.weights.names:
                parameter = branch.get_parameter(name)
                swapped.callback(setattr, parameter, "data", parameter.data)
                parameter.data = change.weight(name, parameter)

        def leave(*_: Any) -> None:
            swapped.close()

        for branch, change in {change.weights.branch: change for change in changes}.items():
            hooks.callback(branch.register_forward_pre_hook(partial(enter, change)).remove)
            hooks.callback(branch.register_forward_hook(leave, always_call=True).remove)
        yield


def probes(anatomy: Anatomy) -> Tensor:
    """[4, T] random tokens on which logits are compared, equal in every process; none is padding.

    The embedding of a padding token is often zero, and beside a stream of zeros any eps is large.
    """
    length = min(PROBE_LENGTH, anatomy.max_positions or PROBE_LENGTH)
    vocab_size = anatomy.vocab_size or 1
    padding = getattr(anatomy.config, "pad_token_id", None)
    ids = torch.randint(0, vocab_size, (PROBES, length), generator=torch.Generator().manual_seed(0))
    return ids if padding is None else ids.where(ids != padding, (padding + 1) % vocab_size)


@torch.no_grad()
def original_logits(anatomy: Anatomy, ids: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """[B, T, V] logits of the model in evaluation mode, on the CPU; nothing is padding.

    Args:
        anatomy: of the model, which does not change.
        ids: `[B, T]` tokens.
        weights: name -> value in place of the model's own.

    Raises:
        FulldepthError: if they are not finite.
    """
    model = anatomy.model
    ids = ids.to(device_of(model))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    replaced = {name: weight.to(ids.device) for name, weight in (weights or {}).items()}
    with evaluating(model):
        outputs: Tensor = functional_call(model, replaced, (), inputs).logits.cpu()
    if not bool(torch.isfinite(outputs).all()):
        raise FulldepthError(f"This {type(model).__name__} gives NaN or infinite logits, so nothing can be compared.")
    return outputs


def scaled_logits(anatomy: Anatomy, plan: Plan, ids: Tensor, folded: Mapping[str, Tensor] | None = None) -> Tensor:
    """[B, T, V] logits of the healed model: blocks skipped in place, scalars outside the weights or in those given."""
    scalars = None
    if plan.scalars and not folded:
        scalars = Scalars.from_dict(plan.scalars, anatomy.num_layers, plan.granularity).to(device_of(anatomy.model))
    with skipping(anatomy, plan.removed, plan.granularity, scalars=scalars):
        return original_logits(anatomy, ids, folded)


def rounding_error(
    anatomy: Anatomy, plan: Plan, ids: Tensor, expected: Tensor, dtype: torch.dtype | None = None
) -> float:
    """Change of the healed model's logits under different rounding of the blocks' outputs, relative to the largest.

    It estimates the difference between two correct computations in half precision: every block's output is multiplied
    by random factors within 1 +- eps. 0 for float32 and float64, whose rounding is far below every tolerance.

    Args:
        anatomy: of the model.
        plan: skipped blocks and scalars.
        ids: `[B, T]` tokens.
        expected: `[B, T, V]`, from `scaled_logits`.
        dtype: precision of the other computation; None = the model's.
    """
    dtype = dtype or expected.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return 0.0
    unit = torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(0)

    def reround(module: nn.Module, args: Any, output: Any) -> Any:
        state = state_in(output)
        change = torch.empty(state.shape).uniform_(-unit, unit, generator=generator).to(state.device)
        return with_state(output, (state.float() * (1 + change)).to(state.dtype))

    with hooked(block.register_forward_hook(reround) for block in anatomy.blocks):
        return relative_error(scaled_logits(anatomy, plan, ids), expected)
