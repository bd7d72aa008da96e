"""Plan of a measurement: which measures can run, which sites they need, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fulldepth.data import Sequences
from fulldepth.errors import FulldepthError, unknown
from fulldepth.execution import Verified
from fulldepth.metrics import METRICS, Measure, Setup

UNUSUAL = {"routing", "streams", "boxes"}
"""Features of some models; for other models, measures of these features are left out silently."""


NO_INNER_STREAM = {
    "parallel": "attention and MLP are added to the stream together, so there is none between them",
    "post": "the norms are on the stream, so what follows attention is not what the final norm and head read",
}
"""Design of a family -> why the lens cannot read between attention and MLP."""


@dataclass
class Plan:
    """The measures that will run, and the reasons why others will not."""

    setup: Setup
    measures: dict[str, Measure] = field(default_factory=dict)
    sites: set[str] = field(default_factory=set)
    """Activation sites to capture."""
    left_out: list[dict[str, str]] = field(default_factory=list)
    masked_pass: bool = False
    """Whether measures of predictions use a separate forward pass over masked text."""

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held by the accumulators and the shared reservoirs, independent of the size of the data."""
        return {
            "accumulators": sum(measure.nbytes for measure in self.measures.values()),
            "reservoirs": sum(reservoir.nbytes for reservoir in self.setup.reservoirs.values()),
        }


def make_plan(
    names: Sequence[str] | None, setup: Setup, verified: Verified, sequences: Sequences, *, has_reference: bool
) -> Plan:
    """Choose the measures.

    Args:
        names: requested measures; None = all that can run.
        setup: sizes.
        verified: the model and its verified anatomy.
        sequences: the prepared data.
        has_reference: whether there is a second model for MMD.

    Raises:
        FulldepthError: for an unknown measure, or a requested one that cannot run, with the reason.
    """
    for name in names or ():
        if name not in METRICS:
            raise unknown("measure", name, METRICS)
    plan = Plan(setup)
    reasons = missing(setup, verified, sequences, has_reference)
    for name, measure in METRICS.items():
        if names is not None and name not in names:
            continue
        needs = sorted(measure.needs & reasons.keys())
        why = "; ".join(reasons[need] for need in needs)
        if why and names is not None:
            raise FulldepthError(f"{name} was asked for but cannot be measured: {why}.")
        if why:
            plan.left_out += [] if UNUSUAL & set(needs) else [{"measure": name, "reason": why}]
            continue
        plan.measures[name] = measure(setup)
        plan.sites |= {site for site in measure.sites if _available(site, verified)}
        plan.left_out += [
            {"measure": f"{name} ({site})", "reason": reason}
            for site in measure.sites
            if (reason := _unavailable(site, verified)) is not None
        ]
    if "attention_output" in setup.lens_sites:
        _add_inner_lens(plan, verified, reasons)
    plan.masked_pass = sequences.masked and any("targets" in measure.needs for measure in plan.measures.values())
    if not plan.measures:
        raise FulldepthError(
            "Nothing is left to measure: " + "; ".join(f"{w['measure']}: {w['reason']}" for w in plan.left_out)
        )
    return plan


def _add_inner_lens(plan: Plan, verified: Verified, reasons: dict[str, str]) -> None:
    """Capture the stream after attention for the lens.

    Raises:
        FulldepthError: if no measure reads predictions, or the layers have no such stream.
    """
    anatomy = verified.anatomy
    reason = _unavailable("attention_output", verified)
    if not any("targets" in measure.needs for measure in plan.measures.values()):
        reason = reasons.get("targets", "none of the measures reads predictions")
    elif reason is None and anatomy.has_streams:
        reason = f"the layers of {type(anatomy.model).__name__} hold {verified.num_streams} streams"
    elif reason is None and anatomy.family.design != "pre":
        reason = NO_INNER_STREAM[anatomy.family.design]
    if reason is not None:
        raise FulldepthError(f"--lens-sites attention_output cannot be read: {reason}.")
    plan.sites.add("attention_output")


def missing(setup: Setup, verified: Verified, sequences: Sequences, has_reference: bool) -> dict[str, str]:
    """Missing requirement of measures -> reason."""
    reasons = _missing_in_model(setup, verified)
    targets = _no_targets(verified, sequences)
    if targets is not None:
        reasons["targets"] = targets
    if (sequences.num_classes or 0) < 2:
        reasons["labels"] = "the data have no labels of two or more classes"
    if not setup.words:
        reasons["words"] = "no words were named (--words is,are,was,were)"
    elif sequences.kind in ("images", "objects"):
        reasons["words"] = "images have no words"
    if not sequences.equal_lengths or setup.sequence_length < 2:
        reasons["equal_lengths"] = "it needs sequences of one length, two tokens at least, without padding"
    if len(sequences) < 2:
        reasons["several_sequences"] = "it averages over sequences, and there is only one"
    if verified.anatomy.task != "detection":
        reasons["boxes"] = f"{type(verified.anatomy.model).__name__} predicts no boxes"
    elif sequences.kind != "objects" or not sequences.num_targets:
        reasons["objects"] = "the data hold no boxes of objects"
    if not has_reference:
        reasons["reference"] = "no reference model was named (--reference MODEL)"
    return reasons


def _no_targets(verified: Verified, sequences: Sequences) -> str | None:
    """The reason why there are no targets, or None."""
    anatomy, classifier = verified.anatomy, verified.classifier
    if classifier is None and "head" in verified.unproven:
        return f"the head of {type(anatomy.model).__name__} is not known: {verified.unproven['head']}"
    if classifier is None:
        return f"{type(anatomy.model).__name__} has no language-model or classification head known here"
    if anatomy.task == "detection":
        return "the queries of a detector have no target each: average_precision reads them"
    if anatomy.task == "representation":
        return "the head's targets are not in this data"
    if sequences.task != anatomy.task:
        return f"the data were prepared for the task {sequences.task}, and the model's is {anatomy.task}"
    if not classifier.per_token and not sequences.num_classes:
        return "the data have no labels"
    if classifier.per_token and not sequences.num_targets:
        return sequences.no_targets or "no position has a target"
    return None


def _missing_in_model(setup: Setup, verified: Verified) -> dict[str, str]:
    """Missing feature of the model -> reason."""
    kind = type(verified.anatomy.model).__name__
    reasons = {}
    if not setup.routed_heads:
        reasons["routing"] = f"{kind} has no memory of earlier layers"
    elif not setup.head_shares:
        reasons["head_shares"] = "the output projections of its attention cannot be read"
    if setup.num_streams < 2:
        reasons["streams"] = f"{kind} has a single residual stream"
    return reasons


def _unavailable(site: str, verified: Verified) -> str | None:
    """The reason why a site of this model cannot be captured, or None."""
    anatomy = verified.anatomy
    if site == "attention_output" and not verified.branches:
        return f"attention and MLP are not known ({verified.unproven.get('branches', 'this family names none')})"
    if site == "value" and not anatomy.has("value"):
        return verified.unproven.get("value", "this family's value projection is not known")
    if site == "final_normed" and anatomy.final_norm is None:
        return "the model has no final norm"
    return None


def _available(site: str, verified: Verified) -> bool:
    """Whether a site is captured from the measured model (`reference` comes from the other one)."""
    if site == "attention_input" and (verified.chained or not verified.branches):
        return False  # it equals the previous layer, or nothing inside the layer is measured
    return site != "reference" and _unavailable(site, verified) is None
