"""Plan of a measurement: which measures can run, which sites they need, and whether memory suffices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fulldepth.core.errors import FulldepthError, unknown
from fulldepth.data import Sequences
from fulldepth.execution import Verified
from fulldepth.execution.verify import READS_LATER
from fulldepth.hf import Anatomy, Classifier, available_memory, unread_prediction
from fulldepth.hf.surgery import obstacle_to_removing
from fulldepth.measurement import tokens
from fulldepth.measurement.caveats import NO_TARGET
from fulldepth.measurement.weights import projection_names, shares_of_heads
from fulldepth.metrics import METRICS, Measure, Setup
from fulldepth.metrics.layer_effect import STRIDE
from fulldepth.metrics.mmd import mmd_bytes
from fulldepth.metrics.separability import FOLDS
from fulldepth.settings.measure import DEFAULT, MeasureSettings
from fulldepth.subject import Subject

UNUSUAL = {"routing", "boxes", "classes"}
"""Features of some models; for other models, measures of these features are left out silently."""


@dataclass
class MeasurePlan:
    """The measures that will run, and the reasons why others will not."""

    setup: Setup
    counting: tokens.Counting
    measures: dict[str, Measure] = field(default_factory=dict)
    sites: set[str] = field(default_factory=set)
    """Activation sites to capture."""
    left_out: list[dict[str, str]] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)
    """A sentence for each measure that was asked for by name and turned out to have no number after the passes."""
    masked_pass: bool = False
    """Whether measures of predictions use a separate forward pass over masked text."""

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held by the accumulators and the shared reservoirs, independent of the size of the data."""
        return {
            "accumulators": sum(measure.nbytes for measure in self.measures.values()),
            "reservoirs": sum(reservoir.nbytes for reservoir in self.setup.reservoirs.values()),
        }


def weights_of(subject: Subject, counting: tokens.Counting, settings: MeasureSettings) -> dict[str, list[int]]:
    """Return how many of the tokens that the chosen measures are means over each sequence holds (`Sequences.weights`).

    Measures of predictions weigh by targets, the others by the tokens that the policy counts. Effects of removal do
    both, and read single tokens also where other measures read means over tokens.
    """
    sequences = subject.sequences
    chosen = {
        name: measure
        for name, measure in METRICS.items()
        if name in settings.named_measures or (settings.default_measures and not measure.optional)
    }
    removes = "layer_effect" in chosen
    of_predictions = {name for name, measure in chosen.items() if "targets" in measure.needs}
    weights: dict[str, list[int]] = {}
    if removes or chosen.keys() - of_predictions:
        policy = "all" if removes and counting.policy in tokens.POOLED else counting.policy
        lengths = sequences.lengths
        weights["tokens"] = tokens.how_many(policy, lengths, counting.leading) if any(lengths) else [1] * len(lengths)
    if (removes or of_predictions) and not _no_targets(subject, shows_all=False) and any(sequences.targets):
        weights["predicted tokens"] = sequences.targets
    return weights


def make_setup(subject: Subject, counting: tokens.Counting, settings: MeasureSettings) -> Setup:
    """Sizes of model and data, known before the first batch."""
    anatomy = subject.anatomy
    sequences = subject.sequences
    verified = subject.verified
    lengths = sequences.lengths
    if not any(lengths):
        lengths = [verified.positions] * len(sequences)
    num_tokens = sum(tokens.how_many(counting.policy, lengths, counting.leading))
    # effects are of single tokens, also where the other measures read means over tokens
    effect_population = sum(lengths) if counting.policy in tokens.POOLED else num_tokens
    if not num_tokens:
        raise FulldepthError(f"--token-policy {counting.policy} leaves no token: every sequence is a single one.")
    device = subject.device if subject.device.type != "mps" else torch.device("cpu")  # MPS has no float64
    return Setup(
        num_layers=anatomy.num_layers,
        width=verified.width,
        value_width=verified.value_width,
        chained=verified.chained,
        num_classes=_num_classes(subject),
        parallel=anatomy.family.design == "parallel",
        routed_heads=verified.routed_heads,
        head_shares=shares_of_heads(anatomy),
        sequence_length=max(lengths),
        num_sequences=len(sequences),
        clusters=(0,) * len(sequences) if sequences.no_error else tuple(sequences.clusters),
        num_tokens=num_tokens,
        first_tokens=counting.policy == "all",
        reservoir_tokens=min(settings.reservoir_tokens or num_tokens, num_tokens),
        entropy_sequences=settings.entropy_sequences or len(sequences),
        words=tuple(settings.words),
        projections=projection_names(anatomy),
        effect_parts=tuple(dict.fromkeys(settings.effect_parts)),
        effect_positions=settings.effect_positions,
        effect_tokens=min(settings.reservoir_tokens or effect_population, effect_population),
        effect_population=effect_population,
        double=subject.model.dtype == torch.float64,
        seed=settings.seed,
        device=device,
    )


def make_plan(
    subject: Subject,
    counting: tokens.Counting,
    settings: MeasureSettings,
    *,
    stream_scale: Mapping[str, tuple[float, ...]] | None = None,
    shows_all: bool = False,
) -> MeasurePlan:
    """Choose the measures.

    Args:
        subject: model and data.
        counting: which positions count.
        settings: name the measures; the default ones are all that can run.
        stream_scale: `residual`, `reference` -> c_0..c_L of the two models of MMD; None = there is no second model.
        shows_all: whether the lens grid shows every sequence, so that predictions are of use without targets.

    Raises:
        FulldepthError: for an unknown measure, or a requested one that cannot run, with the reason.
    """
    named = settings.named_measures
    verified = subject.verified
    sequences = subject.sequences
    setup = replace(make_setup(subject, counting, settings), stream_scale=stream_scale or {})
    for name in sorted(named - METRICS.keys()):
        raise unknown("measure", name, [DEFAULT, *METRICS])
    plan = MeasurePlan(setup, counting)
    reasons = missing(setup, subject, stream_scale is not None, shows_all)
    for name, measure in METRICS.items():
        if name not in named and (measure.optional or not settings.default_measures):
            continue
        needs = sorted(measure.needs & reasons.keys())
        why = "; ".join(reasons[need] for need in needs)
        if why and name in named:
            raise FulldepthError(f"{name} was asked for but cannot be measured: {why}.")
        if why:
            plan.left_out += [] if UNUSUAL & set(needs) else [{"measure": name, "reason": why}]
            continue
        plan.measures[name] = measure(setup)
        for site in measure.sites:
            if (reason := _unavailable(site, verified)) is not None:
                plan.left_out.append({"measure": f"{name} ({site})", "reason": reason})
            else:
                plan.sites.add(site)
    if "contribution" in plan.measures and verified.branches:
        plan.sites |= _branch_sites(subject.anatomy)
    reads_predictions = any("targets" in measure.needs for measure in plan.measures.values())
    plan.sites.discard("reference")  # which comes from the other model
    if verified.chained or not verified.branches:
        plan.sites.discard("attention_input")  # it equals the previous layer, or nothing inside the layer is measured
    if "layer_effect" in plan.measures:
        plan.left_out += _parts_of_effects(subject, setup, counting.policy, settings.effect_first)
    plan.masked_pass = sequences.masked and reads_predictions
    if not plan.measures:
        raise FulldepthError(
            "Nothing is left to measure: " + "; ".join(f"{w['measure']}: {w['reason']}" for w in plan.left_out)
        )
    return plan


def _parts_of_effects(subject: Subject, setup: Setup, policy: str, first: bool) -> list[dict[str, str]]:
    """The entries of `left_out` for effects that this model, these data and these settings do not allow.

    Args:
        subject: model and data.
        setup: of the measures.
        policy: the token policy.
        first: whether parts are removed at the first token of a sequence, too.
    """
    classifier = token_head(subject)
    alone = "the token policy cls counts the first token alone"
    reasons = {
        "all": (policy == "cls" and not first, f"{alone}, at which no part is removed; set effect_first=true"),
        "future": (
            policy == "cls" or setup.sequence_length <= STRIDE,
            f"{alone}, and no token precedes it" if policy == "cls" else f"no sequence is longer than {STRIDE} tokens",
        ),
        "predictions": (classifier is None, f"{subject.kind} has no head known here that predicts at every position"),
        "loss_added": (classifier is not None and not subject.sequences.num_targets, NO_TARGET),
    }
    return [
        {"measure": f"layer_effect ({name})", "reason": reason} for name, (lacks, reason) in reasons.items() if lacks
    ]


def _num_classes(subject: Subject) -> int:
    """Number of classes of a head that predicts one class of a sequence, or of the data if it is larger; else 0."""
    classifier = subject.verified.classifier
    if classifier is None or classifier.per_token or not subject.anatomy.task.endswith("-classification"):
        return 0
    return max(getattr(subject.model.config, "num_labels", 0), subject.sequences.num_classes or 0)


def _branch_sites(anatomy: Anatomy) -> set[str]:
    """Sites of the branches and of the streams that they are added to; empty if they follow from x, x' and y."""
    if anatomy.family.design != "post" and not anatomy.has_streams:
        return set()
    return {"attention_branch", "mlp_branch", "mlp_input"} | ({"attention_carried"} if anatomy.has_streams else set())


def missing(setup: Setup, subject: Subject, has_reference: bool, shows_all: bool) -> dict[str, str]:
    """Missing requirement of measures -> reason."""
    kind = subject.kind
    sequences = subject.sequences
    without_boxes = subject.anatomy.task != "detection"
    no_targets = _no_targets(subject, shows_all)
    checks = {
        "targets": (bool(no_targets), no_targets),
        "routing": (not setup.routed_heads, f"{kind} has no memory of earlier layers"),
        "head_shares": (
            bool(setup.routed_heads) and not setup.head_shares,
            "the output projections of its attention cannot be read",
        ),
        "labels": ((sequences.num_classes or 0) < 2, "the data have no labels of two or more classes"),
        "classes": (not setup.num_classes, f"{kind} does not predict one class of a sequence"),
        "words": (bool(no_words := _no_words(setup.words, sequences)), no_words),
        "equal_lengths": (
            not sequences.equal_lengths or setup.sequence_length < 2,
            "it needs sequences of one length, two tokens at least, without padding",
        ),
        "several_sequences": (len(sequences) < 2, "it averages over sequences, and there is only one"),
        "boxes": (without_boxes, f"{kind} predicts no boxes"),
        "objects": (
            not without_boxes and (sequences.kind != "objects" or not sequences.num_targets),
            "the data hold no boxes of objects",
        ),
        "interventions": (bool(no_removal := _no_removal(subject, setup.effect_parts)), no_removal),
        "fitted_maps": (
            subject.verified.classifier is not None and not subject.verified.classifier.per_token,
            f"the linear lens reads models that predict tokens, and {kind} predicts one class",
        ),
        "reference": (not has_reference, "no reference model was named (--reference MODEL)"),
    }
    return {name: reason for name, (lacks, reason) in checks.items() if lacks}


def _no_words(words: Sequence[str], sequences: Sequences) -> str:
    """The reason why the separability of words cannot be measured; empty if it can."""
    if not words:
        return "no words were named (--words is,are,was,were)"
    if sequences.kind in ("images", "objects"):
        return "images have no words"
    if len(words) < 2:
        return "it compares words, and only one was named"
    marks = [example.words[example.words >= 0] for example in sequences.examples if example.words is not None]
    occurrences = torch.cat([*marks, torch.zeros(0, dtype=torch.int64)]).bincount(minlength=len(words))
    rarest = int(occurrences.argmin())
    if occurrences[rarest] >= FOLDS:
        return ""
    times = "once" if occurrences[rarest] == 1 else f"{occurrences[rarest]} times"
    return f"the word {words[rarest]!r} occurs {times} in the sequences, and it takes {FOLDS} occurrences of each"


def _no_removal(subject: Subject, parts: Collection[str]) -> str:
    """The reason why no part of a layer can be removed; empty if parts can.

    Encoders are refused: their tokens read later ones, so effects on later tokens alone are not defined. A whole layer
    of a language model can be removed whatever is in it: its output is then its input.
    """
    verified = subject.verified
    anatomy = verified.anatomy
    whole = {*parts} == {"layer"} and verified.chained and anatomy.task == "causal-lm"
    if READS_LATER in verified.unproven.get("head", ""):
        return f"{subject.kind} cannot skip blocks: {READS_LATER}, so effects on later tokens alone are not defined"
    if verified.anatomy.task == "seq2seq-lm":
        return f"{subject.kind} has an encoder beside its decoder; parts are removed from models of a single stack"
    if not (whole or verified.branches):
        return verified.unknown_branches
    reason = obstacle_to_removing(anatomy, whole)
    return f"{subject.kind} cannot skip blocks: {reason}" if reason else ""


def token_head(subject: Subject) -> Classifier | None:
    """The proven head, if it predicts at every position; else None."""
    classifier = subject.verified.classifier
    return classifier if classifier is not None and classifier.per_token else None


def _no_targets(subject: Subject, shows_all: bool) -> str:
    """The reason why there are no targets; empty if there are, or predictions are shown without (single tokens)."""
    verified = subject.verified
    sequences = subject.sequences
    anatomy = verified.anatomy
    classifier = verified.classifier
    if classifier is None and "head" in verified.unproven:
        return f"the head of {subject.kind} is not known: {verified.unproven['head']}"
    if classifier is None:
        return unread_prediction(subject.model)
    if anatomy.task == "detection":
        return "the queries of a detector have no target each: average_precision reads them"
    if anatomy.task == "representation":
        return "the head's targets are not in this data"
    if sequences.task != anatomy.task:
        return f"the data were prepared for the task {sequences.task}, and the model's is {anatomy.task}"
    if not classifier.per_token and not sequences.num_classes:
        return "the data have no labels"
    if classifier.per_token and not sequences.num_targets and (sequences.no_targets or not shows_all):
        return sequences.no_targets or NO_TARGET
    return ""


def _unavailable(site: str, verified: Verified) -> str | None:
    """The reason why a site of this model cannot be captured, or None."""
    anatomy = verified.anatomy
    if site == "attention_output" and not verified.branches:
        return verified.unknown_branches
    if site == "value" and not anatomy.has("value"):
        return verified.unproven.get("value", "this family's value projection is not known")
    if site == "final_normed" and anatomy.final_norm is None:
        return "the model has no final norm"
    return None


def check_memory(plan: MeasurePlan, subject: Subject, batch_size: int) -> str:
    """One line on the estimated memory of the run.

    Raises:
        FulldepthError: if the estimate exceeds the free memory.
    """
    held = plan.memory
    setup = plan.setup
    stack = setup.num_layers + 1
    layers = sum(stack if site == "residual" else setup.num_layers for site in plan.sites)
    layers += stack * (plan.masked_pass + ("mmd" in plan.measures))  # MMD also reads the states of the reference
    positions = min(batch_size, setup.num_sequences) * setup.sequence_length
    batch = layers * positions * setup.width * subject.model.dtype.itemsize
    distances = mmd_bytes(2 * setup.reservoir_tokens) if "mmd" in plan.measures else 0
    # after the passes, CKA converts its sample to float64, and MMD holds the distances of one layer
    total = held["accumulators"] + held["reservoirs"] + max(batch, 2 * held["reservoirs"] + distances)
    free = available_memory(setup.device)
    accumulators, reservoirs, activations, of_mmd, left = (
        f"{size / (1 << 20):,.1f} MiB" for size in (*held.values(), batch, distances, free)
    )
    of_cka = " and a larger one for CKA" if setup.reservoirs.keys() - {"residual", "reference"} else ""
    sentence = (
        f"Memory beside the model: accumulators {accumulators}, sample of {setup.reservoir_tokens} of "
        f"{setup.num_tokens} tokens{of_cka} {reservoirs}, activations of one batch {activations}"
        f"{f', distances of MMD {of_mmd}' if distances else ''}."
    )
    if total > free:
        raise FulldepthError(
            f"Out of memory before the start. {sentence} Free: {left}. Try a smaller --batch-size, "
            "--sequence-length or reservoir_tokens (which does not limit CKA), or fewer --measures."
        )
    return sentence
