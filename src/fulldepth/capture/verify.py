"""Self-tests at load: a model whose parts do not add up is refused, never measured wrongly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulldepth.capture.hooks import ROLES, capture
from fulldepth.errors import FulldepthError
from fulldepth.hf import Anatomy, Classifier

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest error accepted, relative to the largest entry: rounding in each precision, and no more."""


@dataclass(frozen=True)
class Verified:
    """An anatomy that stood the tests, and what they found."""

    anatomy: Anatomy
    chained: bool
    """Each block reads exactly what the block before gave."""
    branches: bool
    """Attention and MLP branches are known and add up to the block's output."""
    classifier: Classifier | None
    """The head, proven to give the model's own logits at the last layer; None without a head."""
    positions: int
    """Positions of the residual stream in the batch that was tried (for pictures: in every batch)."""
    value_width: int
    """Channels of the value states; 0 where they are not known."""
    routed_heads: int = 0
    """Heads of the memory routers (key/value heads); 0 without a memory."""
    num_streams: int = 1
    """Residual streams between blocks."""


@torch.no_grad()
def verify(candidates: Sequence[Anatomy], inputs: Mapping[str, Any]) -> Verified:
    """The first candidate whose pieces give the model back, on a small real batch.

    Two things are checked. The captured branches, put together as the family's design says, equal every block's
    output. The classifier applied to `h_L` equals the model's own logits (soft-cap, scale and bias included).

    Args:
        candidates: anatomies to try, best guess first.
        inputs: a small batch for the whole model, as keyword arguments.

    Raises:
        FulldepthError: if the model gives NaN, or no candidate stands the tests; says which failed and by how much.
    """
    failures = []
    for anatomy in candidates:
        try:
            return _verify(anatomy, inputs)
        except FulldepthError as error:
            failures.append(f"{anatomy.family.name}, {anatomy.family.design} design: {error}")
    raise FulldepthError(
        f"{type(candidates[0].model).__name__} is refused, because its anatomy could not be proven. "
        + " | ".join(dict.fromkeys(failures))
        + ". Describe it in the settings (anatomy.blocks=..., anatomy.attention=..., anatomy.mlp=...); attention=null "
        "and mlp=null measure the residual stream alone."
    )


def _verify(anatomy: Anatomy, inputs: Mapping[str, Any]) -> Verified:
    family = anatomy.family
    known = family.attention is not None and family.mlp is not None
    sites = ["residual", "attention_input"] + (["value"] if anatomy.has("value") else [])
    sites += ["attention_output", "attention_branch", "attention_carried", "mlp_branch", "mlp_input"] if known else []
    weights = [site for site, role in ROLES.items() if anatomy.layers_with(role)]
    with capture(anatomy, [*sites, *weights]) as tape:
        anatomy.body(**body_inputs(anatomy, inputs))
        states = {site: tape[site] for site in sites}
        coefficients = {site: tape.coefficients(site) for site in weights}
    last = states["residual"][-1]
    if last.ndim != 3:
        raise FulldepthError(f"blocks give states of shape {tuple(last.shape)}, expected [B, T, D]")
    if not bool(torch.isfinite(last).all()):
        raise FulldepthError("the model gives NaN or infinite activations")
    if known:
        _check_branches(anatomy, states)
    chained = all(
        torch.equal(x.to(h.device), h) for x, h in zip(states["attention_input"], states["residual"][:-1], strict=True)
    )
    return Verified(
        anatomy,
        chained,
        known,
        _check_classifier(anatomy, inputs, last),
        last.shape[1],
        value_width=states["value"][0].shape[-1] if "value" in states else 0,
        routed_heads=check_routing(coefficients.get("routing", {})),
        num_streams=next((weights.shape[-2] for weights in coefficients.get("mlp_mixing", {}).values()), 1),
    )


def _check_branches(anatomy: Anatomy, states: Mapping[str, list[Tensor]]) -> None:
    """Every block's output from its input and its branches."""
    design = anatomy.family.design
    for layer in range(1, anatomy.num_layers + 1):
        x, after, a, m, before_mlp = (
            states[site][layer - 1]
            for site in ("attention_carried", "attention_output", "attention_branch", "mlp_branch", "mlp_input")
        )
        y = states["residual"][layer]
        for what, branch in {"attention": a, "mlp": m}.items():
            if branch.shape != x.shape:
                raise FulldepthError(
                    f"in layer {layer}, the {what} branch has shape {tuple(branch.shape)}, the stream {tuple(x.shape)}"
                )
        if anatomy.has_streams:
            pairs = {"mixed streams + attention": (x + a, after), "mixed streams + mlp": (before_mlp + m, y)}
        elif design == "parallel":
            pairs = {"x + attention + mlp": (x + a + m, y)}
        elif design == "pre":
            pairs = {"x + attention": (x + a, after), "x' + mlp": (after + m, y)}
        else:
            first, second = anatomy.part(layer, "attention_norm"), anatomy.part(layer, "mlp_norm")
            if first is None or second is None:
                raise FulldepthError("a post-norm block needs attention_norm and mlp_norm")
            pairs = {"norm(x + attention)": (first(x + a), after), "norm(m + mlp)": (second(before_mlp + m), y)}
        for what, (got, expected) in pairs.items():
            error = relative_error(got, expected)
            if not error <= TOLERANCE[expected.dtype]:  # NaN is no agreement
                raise FulldepthError(f"in layer {layer}, {what} misses the block's own state by {error:.1e} (relative)")


def check_routing(routing: Mapping[int, Tensor]) -> int:
    """How many heads the routers have; every layer reads one source for each layer up to it."""
    heads = {weights.shape[0] if weights.ndim == 3 else weights.shape[-2] for weights in routing.values()}
    for layer, weights in routing.items():
        sources = weights.shape[1] if weights.ndim == 3 else weights.shape[-1]
        if sources != layer or len(heads) > 1:
            raise FulldepthError(
                f"the router of layer {layer} gives weights of shape {tuple(weights.shape)}; expected {layer} sources "
                "and as many heads in every layer"
            )
    return max(heads, default=0)


def _check_classifier(anatomy: Anatomy, inputs: Mapping[str, Any], last: Tensor) -> Classifier | None:
    """The lens of the last layer against the model's logits."""
    if anatomy.head is None:
        return None
    classifier = Classifier(anatomy)
    expected = anatomy.model(**inputs)
    expected = expected.prediction_logits if "prediction_logits" in expected else expected.logits
    if classifier.per_token:
        got = classifier.tokens(last.flatten(0, 1)).view(*last.shape[:2], -1)
    else:
        mask = inputs.get("attention_mask")
        got = classifier.sequences(last, torch.ones(last.shape[:2], device=last.device) if mask is None else mask)
    if got.shape != expected.shape:
        raise FulldepthError(f"the head gives logits of shape {tuple(got.shape)}, the model {tuple(expected.shape)}")
    error = relative_error(got, expected)
    if not error <= TOLERANCE[last.dtype]:  # NaN is no agreement
        raise FulldepthError(f"the head applied to h_L misses the model's own logits by {error:.1e} (relative)")
    return classifier


def body_inputs(anatomy: Anatomy, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of the body: a decoder's cache would only cost memory here."""
    if anatomy.family.tower == "vision" and "pixel_values" in inputs:
        inputs = {"pixel_values": inputs["pixel_values"]}  # a whole CLIP takes text beside it
    decodes = anatomy.task == "causal-lm" or getattr(anatomy.config, "use_cache", None) is True
    return {**inputs, "use_cache": False} if decodes and anatomy.family.modality == "text" else dict(inputs)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, relative to the largest expected entry."""
    got, expected = got.double(), expected.to(got.device).double()
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
