"""Before the first batch: which measures can run, what they need, and how much memory they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fulldepth.capture import Verified
from fulldepth.data import Sequences
from fulldepth.errors import FulldepthError, unknown
from fulldepth.metrics import METRICS, Measure, Setup


@dataclass
class Plan:
    """The measures that will run and why others will not."""

    setup: Setup
    measures: dict[str, Measure] = field(default_factory=dict)
    sites: set[str] = field(default_factory=set)
    """Activation sites that have to be captured."""
    left_out: list[dict[str, str]] = field(default_factory=list)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held by the accumulators and the shared reservoirs, whatever the size of the data."""
        return {
            "accumulators": sum(measure.memory(self.setup) for measure in self.measures.values()),
            "reservoirs": sum(reservoir.nbytes for reservoir in self.setup.reservoirs.values()),
        }


def make_plan(
    names: Sequence[str] | None, setup: Setup, verified: Verified, sequences: Sequences, *, has_reference: bool
) -> Plan:
    """Choose the measures.

    Args:
        names: measures asked for; None = all that can run.
        setup: sizes.
        verified: the model and what was proven about it.
        sequences: the prepared data.
        has_reference: whether there is a second model for MMD.

    Raises:
        FulldepthError: for an unknown measure, or one asked for by name that cannot run, with the reason.
    """
    for name in names or ():
        if name not in METRICS:
            raise unknown("measure", name, METRICS)
    plan = Plan(setup)
    reasons = missing(setup, verified, sequences, has_reference)
    for name, measure in METRICS.items():
        if names is not None and name not in names:
            continue
        why = [reasons[need] for need in sorted(measure.needs) if need in reasons]
        if why and names is not None:
            raise FulldepthError(f"{name} was asked for but cannot be measured: {'; '.join(why)}.")
        if why:
            plan.left_out.append({"measure": name, "reason": "; ".join(why)})
            continue
        plan.measures[name] = measure(setup)
        plan.sites |= {site for site in measure.sites if _available(site, verified, has_reference)}
        plan.left_out += [
            {"measure": f"{name} ({site})", "reason": reason}
            for site in measure.sites
            if (reason := _unavailable(site, verified)) is not None
        ]
    if not plan.measures:
        raise FulldepthError(
            "Nothing is left to measure: " + "; ".join(f"{w['measure']}: {w['reason']}" for w in plan.left_out)
        )
    return plan


def missing(setup: Setup, verified: Verified, sequences: Sequences, has_reference: bool) -> dict[str, str]:
    """What a measure may need and is not there -> why."""
    anatomy = verified.anatomy
    reasons = {}
    if verified.classifier is None:
        reasons["targets"] = f"{type(anatomy.model).__name__} has no language-model or classification head known here"
    elif anatomy.task == "representation":
        reasons["targets"] = "the head's targets are not in this data"
    elif not verified.classifier.per_token and not sequences.num_classes:
        reasons["targets"] = "the data have no labels"
    elif verified.classifier.per_token and not sequences.num_targets:
        reasons["targets"] = "no position has a target"
    if (sequences.num_classes or 0) < 2:
        reasons["labels"] = "the data have no labels of two or more classes"
    if not setup.words:
        reasons["words"] = "no words were named (--words is,are,was,were)"
    if not sequences.equal_lengths or setup.sequence_length < 2:
        reasons["equal_lengths"] = "it needs sequences of one length, two tokens at least, without padding"
    if len(sequences) < 2:
        reasons["several_sequences"] = "it averages over sequences, and there is only one"
    if not has_reference:
        reasons["reference"] = "no reference model was named (--reference MODEL)"
    return reasons


def _unavailable(site: str, verified: Verified) -> str | None:
    """Why this model cannot give a site, or None."""
    anatomy = verified.anatomy
    if site == "attention_output" and not verified.branches:
        return "attention and MLP of this family are not known"
    if site == "attention_output" and not verified.chained:
        return "blocks do not read exactly what the block before gave"
    if site == "value" and not anatomy.has("value"):
        return "this family's value projection is not known"
    if site == "final_normed" and anatomy.final_norm is None:
        return "the model has no final norm"
    return None


def _available(site: str, verified: Verified, has_reference: bool) -> bool:
    """Whether a site is to be captured from the measured model (`reference` comes from the other one)."""
    return site != "reference" and _unavailable(site, verified) is None
