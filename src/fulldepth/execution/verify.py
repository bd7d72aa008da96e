"""Self-tests at load: parts that do not reproduce states and logits are left out, or the model is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.execution.branches import with_branches
from fulldepth.execution.hooks import ROLE_OF_SITE, capture
from fulldepth.execution.stream import Trace, find_head, follow, predict, prove_end, prove_stream, reason_of, run
from fulldepth.hf import (
    Anatomy,
    Checkpoint,
    Classifier,
    anatomy_candidates,
    body_inputs,
    check_exit_heads,
    device_of,
    evaluating,
    instead_of_language,
    logits_of,
    no_single_class,
    rows_of,
    sample_inputs,
)
from fulldepth.hf.finder import towers
from fulldepth.hf.modes import state_in
from fulldepth.hf.rounding import TOLERANCE, check_close, is_close, relative_error
from fulldepth.hf.surgery import obstacle_to_skipping

READS_LATER = "the model reads later tokens too"
"""Beginning of the reason why a head is not proven."""
MOST_REASONS = 3
"""Reasons that a refusal lists."""
DESCRIBE = (
    ". `fulldepth measure` can be told where its parts are (--set anatomy.blocks=PATH, and anatomy.attention, "
    "anatomy.mlp, anatomy.head where they are known; without these the residual stream alone is measured). A network "
    "of several stages has no single residual stream, and cannot be measured; fulldepth.metrics has the measures as "
    "functions of states."
)


class NotFiniteError(FulldepthError):
    """The model's last hidden state holds NaN or infinite values."""


@dataclass(frozen=True)
class Verified:
    """An anatomy that passed the tests, and the properties found by them."""

    anatomy: Anatomy
    width: int
    """D, channels of the residual stream."""
    chained: bool
    """Whether each block reads exactly the previous block's output; else trees or DETR's norms are between them."""
    branches: bool
    """Whether attention and MLP branches are known and add up to the block's output."""
    classifier: Classifier | None
    """The head, verified to give the model's own logits at the last layer; None without a verified head."""
    positions: int
    """Positions of the residual stream in the tested batch (for images: in every batch)."""
    value_width: int
    """Channels of the value states; 0 if unknown."""
    routed_heads: int = 0
    """Heads of the memory routers (key/value heads); 0 without a memory."""
    unproven: Mapping[str, str] = field(default_factory=dict)
    """`branches`, `head`, `value` -> why this part of the model could not be verified and is left out."""

    @property
    def unknown_branches(self) -> str:
        """The clause that says why attention and MLP are not known."""
        return f"attention and MLP are not known ({self.unproven.get('branches', 'this family names none')})"

    def finds(self, granularity: str) -> bool:
        """Return True if the places of blocks of this granularity are proven, so that they can be left out."""
        whole = granularity == "layer" and self.anatomy.not_serial is None
        return self.chained if whole else self.branches

    def describe(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The model's entry in `results.json`."""
        anatomy = self.anatomy
        parts = [part for part in ("attention", "layer") if obstacle_to_skipping(anatomy, part) is None]
        return {
            **checkpoint.describe(),
            "family": anatomy.family.name,
            "task": anatomy.task,
            "num_layers": anatomy.num_layers,
            "width": self.width,
            "config_hash": checkpoint.config_hash,
            "skips": [part for part in parts if self.finds(part)],
            **({"exit_heads": len(self.classifier.exits)} if self.classifier and self.classifier.exits else {}),
        }


@torch.no_grad()
def verify(candidates: Sequence[Anatomy], inputs: Mapping[str, Any], *, optional: Collection[str] = ()) -> Verified:
    """The first candidate whose parts reproduce the model's states and logits on a small batch.

    Four things are checked, in this order. The blocks are the residual stream: each runs and reads the previous
    block's output, and the last one (through the final norm) gives the body's last hidden state. The classifier applied
    to `h_L` equals the model's own logits (soft-cap, scale and bias included); for families that are not in the table,
    it is found here by following the tensors from `h_L` to the logits. The captured branches, combined by the family's
    design, equal every block's output; for families that are not in the table, they are found by these sums
    (`with_branches`). A second pass, of the body alone, gives the same last state.

    Args:
        candidates: anatomies to try, best guess first.
        inputs: a small batch for the whole model, as keyword arguments.
        optional: parts that may fail, out of `branches` and `head`: a verified stream without them is accepted if no
            candidate has them, and `unproven` gives the reason.

    Returns:
        The proven anatomy and classifier, and the reason for each optional part that is missing.

    Raises:
        FulldepthError: if the model fails or gives NaN, no candidate passes the tests, with the reasons, or exit heads
            do not fit it.
    """
    check_exit_heads(*candidates)
    try:
        trace = follow(candidates[0], inputs)
    except FulldepthError as error:
        options = " or ".join(f"tower={name}" for name in towers(candidates[0].model))
        if not options or candidates[0].family.tower:
            raise
        raise FulldepthError(f"{error}. `fulldepth measure` reads its towers alone (--set {options}).") from error
    failures: dict[str, str] = {}
    incomplete: list[Verified] = []
    for anatomy in candidates:
        try:
            verified = _verify(anatomy, trace, inputs, optional)
        except NotFiniteError:
            raise  # no other description of the parts would help
        except Exception as error:
            reason = reason_of(error)
            failures.setdefault(reason, f"{anatomy.family.name}, {anatomy.family.design} design: {reason}")
            continue
        if not verified.unproven:
            return verified
        incomplete.append(verified)
    if incomplete:
        return max(incomplete, key=lambda v: (v.branches, "head" not in v.unproven, "value" not in v.unproven))
    reasons = [one_line(reason, 220) for reason in failures.values()]
    more = [f"and {len(reasons) - MOST_REASONS} more"] if len(reasons) > MOST_REASONS else []
    raise FulldepthError(
        f"{type(candidates[0].model).__name__} is refused, because its anatomy could not be proven. "
        + " | ".join(reasons[:MOST_REASONS] + more)
        + DESCRIBE
    )


@torch.no_grad()
def find_anatomy(model: PreTrainedModel, tower: str | None = None) -> Anatomy:
    """The anatomy of a model: from the table or, for other families, verified on a small artificial batch.

    Args:
        model: possibly inside a wrapper.
        tower: as for `anatomy_candidates`.

    Returns:
        The model and the paths of its parts.

    Raises:
        FulldepthError: if a family that is not in the table cannot be verified, or a tower has to be chosen.
    """
    candidates = anatomy_candidates(model, tower=tower)
    guess = candidates[0]
    model = guess.model  # without wrappers
    if rows_of(model.config.model_type) is not None and not guess.searches_head:
        return guess
    with evaluating(model):
        return verify(candidates, sample_inputs(guess), optional=("head", "branches")).anatomy


def _verify(anatomy: Anatomy, trace: Trace, inputs: Mapping[str, Any], optional: Collection[str]) -> Verified:
    """Verify one candidate; raises an error if a required part cannot be verified."""
    anatomy, last = prove_stream(anatomy, trace)
    last = anatomy.stream(last)
    if not bool(torch.isfinite(last).all()):
        name = type(anatomy.model).__name__
        raise NotFiniteError(f"{name} gives NaN or infinite activations on the first sequences.")
    anatomy = prove_end(anatomy, trace, last)
    unproven: dict[str, str] = {}
    try:
        anatomy, classifier = _prove_head(anatomy, trace, inputs, last)
    except FulldepthError as error:
        if "head" not in optional:
            raise
        unproven["head"] = str(error)
        classifier = None
    if anatomy.family.is_proposed and anatomy.family.attention is None and anatomy.family.mlp is None:
        try:
            anatomy = with_branches(anatomy, inputs)
        except FulldepthError as error:
            unproven["branches"] = str(error)
    try:
        verified = _prove_parts(anatomy, inputs, last)
    except FulldepthError as error:
        if "branches" not in optional:
            raise
        unproven["branches"] = str(error)
        anatomy = replace(anatomy, family=replace(anatomy.family, attention=None, mlp=None))
        verified = _prove_parts(anatomy, inputs, last)
    unproven |= verified.unproven
    return replace(verified, classifier=classifier, unproven=unproven)


def _prove_head(
    anatomy: Anatomy, trace: Trace, inputs: Mapping[str, Any], last: Tensor
) -> tuple[Anatomy, Classifier | None]:
    """The head of the family, or the one found by following the tensors, checked against the model's logits."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    if anatomy.head is None and anatomy.searches_head and trace.logits is not None:
        head = find_head(anatomy, trace, last, mask)
        if head is None:
            raise FulldepthError(
                "no chain of modules leads from the last block to the model's logits (a part of the head is no module)"
            )
        anatomy = replace(anatomy, family=replace(anatomy.family, heads={type(anatomy.model).__name__: head}))
    if anatomy.head is None:
        return anatomy, None
    if trace.logits is None:
        raise FulldepthError("the model gives no logits")
    if anatomy.task.endswith("-classification") and (reason := no_single_class(anatomy.model.config)):
        raise FulldepthError(f"the model {reason}, and the lens is read as classes")
    if anatomy.task == "causal-lm":
        _check_causal(anatomy, trace.logits, inputs)
    classifier = Classifier(anatomy)
    if mask is not None:
        mask = classifier.sample_mask(inputs, mask)
    logits = predict(classifier, last, mask)
    if logits.shape != trace.logits.shape:
        raise FulldepthError(
            f"the head gives logits of shape {tuple(logits.shape)}, the model {tuple(trace.logits.shape)}"
        )
    check_close("the head applied to h_L misses the model's own logits", logits, trace.logits, last.dtype)
    return anatomy, classifier


def _check_causal(anatomy: Anatomy, expected: Tensor, inputs: Mapping[str, Any]) -> None:
    """Check that the model is causal: changing the second half of a text must not change the logits of the first.

    In a model with small weights later tokens have little influence, so in full precision a tenth of the usual
    tolerance is allowed.
    """
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    counted = torch.ones_like(ids[0], dtype=torch.bool) if mask is None else mask[0].bool()
    positions = counted.nonzero()[:, 0]
    first, second = positions.tensor_split(2)
    if not len(first):
        return
    changed = ids.clone()
    changed[0, second] = (changed[0, second] + 1) % (anatomy.vocab_size or 2)
    logits = logits_of(run(anatomy.model, body_inputs(anatomy, {**inputs, "input_ids": changed})))
    if logits is None:
        return
    error = relative_error(logits[0, first], expected[0, first])
    full = logits.dtype in (torch.float32, torch.float64)
    if not error <= TOLERANCE.get(logits.dtype, TOLERANCE[torch.float32]) / (10 if full else 1):
        raise FulldepthError(
            f"{READS_LATER}, so what it says of the next one is no prediction (an encoder, or a decoder whose "
            "configuration lacks is_decoder)"
        )


def _prove_parts(anatomy: Anatomy, inputs: Mapping[str, Any], expected: Tensor) -> Verified:
    """Capture and check branches, values and routers of every layer, as in measurements.

    Measurements run the body alone, which must give the same h_L as the whole model.
    """
    family = anatomy.family
    unproven = {}
    has_branches = family.attention is not None and family.mlp is not None
    sites = ["residual", "attention_input"] + (["value"] if anatomy.has("value") else [])
    sites += (
        ["attention_output", "attention_branch", "attention_carried", "mlp_branch", "mlp_input"] if has_branches else []
    )
    weights = [site for site, role in ROLE_OF_SITE.items() if anatomy.layers_with(role)]
    with capture(anatomy, [*sites, *weights]) as activations:
        anatomy.run(inputs)
        if "value" in sites and not activations.has_run("value"):  # the layer's attention is skipped in place
            unproven["value"] = "the attention of some layers did not run"
            anatomy = replace(anatomy, family=replace(family, value=None))
            sites.remove("value")
        states = {site: activations[site] for site in sites}
        coefficients = {site: activations.coefficients(site) for site in weights}
    last = states["residual"][-1]
    if not is_close(last, expected):
        raise FulldepthError(
            "a second pass, of the body alone, gives other states: the model draws random numbers, or hands its body "
            "more than these inputs"
        )
    if has_branches:
        _check_branches(anatomy, states)
    values = states.get("value", [])
    if any(value.shape[:-1] != last.shape[:-1] or value.shape != values[0].shape for value in values):
        unproven["value"] = f"value states have shape {tuple(values[0].shape)}, the stream {tuple(last.shape)}"
        anatomy = replace(anatomy, family=replace(family, value=None))
        values = []
    chained = all(
        torch.equal(x.to(h.device), h) for x, h in zip(states["attention_input"], states["residual"][:-1], strict=True)
    )
    return Verified(
        anatomy,
        last.shape[-1],
        chained,
        has_branches,
        None,
        last.shape[1],
        value_width=values[0].shape[-1] if values else 0,
        routed_heads=check_routing(coefficients.get("routing", {})),
        unproven=unproven,
    )


def _check_branches(anatomy: Anatomy, states: Mapping[str, list[Tensor]]) -> None:
    """Check that every block's output is the combination of its input and its branches."""
    design = anatomy.family.design
    for layer in anatomy.layers:
        x, after, a, m, before_mlp = (
            states[site][layer - 1]
            for site in ("attention_carried", "attention_output", "attention_branch", "mlp_branch", "mlp_input")
        )
        y = states["residual"][layer]
        for name, branch in {"attention": a, "mlp": m}.items():
            if branch.shape != x.shape:
                raise FulldepthError(
                    f"in layer {layer}, the {name} branch has shape {tuple(branch.shape)}, the stream {tuple(x.shape)}"
                )
        if anatomy.has_streams:
            pairs = {"mixed streams + attention": (x + a, after), "mixed streams + mlp": (before_mlp + m, y)}
        elif design == "parallel":
            pairs = {"x + attention + mlp": (x + a + m, y)}
        elif design == "pre":
            pairs = {"x + attention": (x + a, after), "x' + mlp": (after + m, y)}
        else:
            first = anatomy.part(layer, "attention_norm")
            second = anatomy.part(layer, "mlp_norm")
            if first is None or second is None:
                raise FulldepthError("a post-norm block needs attention_norm and mlp_norm")
            pairs = {
                "norm(x + attention)": (state_in(first(x + a)), after),
                "norm(m + mlp)": (state_in(second(before_mlp + m)), y),
            }
        for name, (actual, expected) in pairs.items():
            check_close(f"in layer {layer}, {name} misses the block's own state", actual, expected)


def check_routing(routing: Mapping[int, Tensor]) -> int:
    """Number of heads of the routers; checks that the router of layer l has l sources."""
    heads = {weights.shape[0] if weights.ndim == 3 else weights.shape[-2] for weights in routing.values()}
    for layer, weights in routing.items():
        sources = weights.shape[1] if weights.ndim == 3 else weights.shape[-1]
        if sources != layer or len(heads) > 1:
            raise FulldepthError(
                f"the router of layer {layer} gives weights of shape {tuple(weights.shape)}; expected {layer} sources "
                "and as many heads in every layer"
            )
    return max(heads, default=0)


def prove(
    model: PreTrainedModel | Anatomy, inputs: Mapping[str, Tensor], *, optional: Collection[str] = ()
) -> tuple[Anatomy, Classifier]:
    """The anatomy of a language model, verified on a batch, and its head.

    Args:
        model: in evaluation mode.
        inputs: `input_ids` and `attention_mask`, `[B, T]`; the first two sequences are used.
        optional: as for `verify`.

    Raises:
        FulldepthError: if it is not a causal language model, or its anatomy cannot be verified.
    """
    candidates = [model] if isinstance(model, Anatomy) else anatomy_candidates(model)
    owner = candidates[0].model
    check_language(owner, candidates[0].task)
    inputs = {name: tensor[:2].to(device_of(owner)) for name, tensor in inputs.items()}
    verified = verify(candidates, inputs, optional=optional)
    if verified.classifier is None:
        raise FulldepthError(f"{type(owner).__name__} has no prediction head.")
    return verified.anatomy, verified.classifier


def check_language(model: PreTrainedModel, task: str) -> None:
    """Refuse a model whose task is not that of a causal language model.

    Raises:
        FulldepthError: for other models.
    """
    if task != "causal-lm":
        raise FulldepthError(
            f"{one_line(type(model).__name__, 100)} is no causal language model: it does not predict the next token at "
            f"every position. {instead_of_language(model)}"
        )
