"""Numbers of one trained model, by the public commands of fulldepth: what `experiments/run.py` stores of every run."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fulldepth
from fulldepth.core.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.execution.latency import OtherLoad, order
from fulldepth.exit import Decoder, sweep
from fulldepth.exit.served import SpeedUp
from fulldepth.settings import layer
from fulldepth.settings.train import TrainSettings
from fulldepth.skip import Scalars, search, skipping

ACCURACY_DROP = 0.01
"""Loss of accuracy at which early exit is read."""
REMOVED = 3
"""Attention blocks or layers that a search removes."""
DRAFT_LENGTH = 4
"""Tokens of a draft."""
EFFECTS = {
    "effect_on_prediction": ("layer_effect", "layer", "divergence_all"),
    "effect_on_later": ("layer_effect", "layer", "later_future"),
}
"""Number by layer of `layer_effect`: measure, site, statistic."""
ROUNDS = 9
"""Timed generations of each decoder, in turn."""


@dataclass(frozen=True)
class Subject:
    """A trained model, and how it is measured."""

    arm: str
    control: str
    """The arm that others are compared with."""
    model: Any
    """The loaded model; a classifier's checkpoint, which may hold a head for every layer."""
    tokenizer: Any
    """None of a model of images."""
    data: Mapping[str, str]
    """`heldout`, and `choosing` for searches."""
    measures: Mapping[str, tuple[str, str, str]]
    """Number by layer: its measure, site and statistic."""
    common: Mapping[str, Any]
    """`device`, and `sequence_length` of text."""
    sequences: Mapping[str, int]
    """Sequences or rows of each part of the data."""
    chosen: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """What searches chose: part and method -> layers."""

    def options(self, part: str = "heldout") -> dict[str, Any]:
        """Arguments of a command that measures this model on a part of the data."""
        return {
            **self.common,
            "tokenizer": self.tokenizer,
            "data": self.data[part],
            "max_sequences": self.sequences[part],
            "progress": False,
        }

    @property
    def prompts(self) -> list[torch.Tensor]:
        """The middle of each held-out document: a quarter of a window."""
        length = self.common["sequence_length"] // 4
        texts = [path.read_text("utf-8") for path in sorted(Path(self.data["heldout"]).glob("*.txt"))]
        tokens = [self.tokenizer.encode(text[len(text) // 2 :][:1000])[:length] for text in texts]
        return [torch.tensor([ids], device=self.common["device"]) for ids in tokens]


def measured(subject: Subject) -> dict[str, Any]:
    """Numbers by layer (those of states and the lens from layer 0 on), jump rates and depths."""
    names = sorted({measure for measure, _, _ in subject.measures.values()})
    names += ["jump_rate", "effective_depth", "saturation"]
    results = fulldepth.measure(subject.model, measures=names, lens_tokens=None, **subject.options())
    table = results.table
    depth = results.meta["model"]["num_layers"]
    numbers: dict[str, Any] = by_layer(results, subject.measures)
    losses = numbers["lens_loss"]
    numbers["near_final"] = next(number for number, loss in enumerate(losses) if loss <= 1.05 * losses[-1])
    for name in ("effective_depth", "median_saturation"):
        numbers[name] = results.headline.get(name, {}).get("value")
    jumps = table[(table.measure == "jump_rate") & (table.statistic == "value")].set_index("layer").value
    return numbers | {f"zeta_{back}": float(jumps[depth - back]) for back in range(3)}


def by_layer(results: fulldepth.Results, measures: Mapping[str, tuple[str, str, str]]) -> dict[str, list[float | None]]:
    """Numbers by layer: name -> values; of a measure of pairs, those with the last layer."""
    table = results.table
    numbers = {}
    for name, (measure, site, statistic) in measures.items():
        rows = table[(table.measure == measure) & (table.site == site) & (table.statistic == statistic)]
        rows = rows[rows.layer.notna() & (rows.other.isna() | (rows.other == results.meta["model"]["num_layers"]))]
        values = rows.sort_values("layer").value.tolist()
        numbers[name] = [None if math.isnan(value) else value for value in values]
    return numbers


def effective(subject: Subject) -> dict[str, Any]:
    """What removing each layer alone changes: predictions, in nats, and later layers at later tokens (none of the last
    layer).
    """
    results = fulldepth.measure(subject.model, measures=["layer_effect"], **subject.options())
    return by_layer(results, EFFECTS)


def transferred(subject: Subject) -> dict[str, Any]:
    """Accuracy on the digits of new linear heads on the frozen features of every layer, from layer 0 on."""
    settings = {
        "task": "image-classification",
        "method": "frozen-features",
        "model": {"checkpoint": subject.model},
        "data": {"name": "digits:builtin/train", "validation": "digits:builtin/test"},
        "steps": 400,
        "global_batch_size": 64,
        "learning_rate": 0.05,
        "weight_decay": 0.0,
        "eval_every": 400,
        "save_every": 400,
        "device": subject.common["device"],
    }
    with tempfile.TemporaryDirectory() as folder:
        table = fulldepth.train(layer(TrainSettings, settings), folder, progress=False).table
    rows = table[(table.measure == "lens_accuracy") & (table.step == settings["steps"])]
    return {"transfer_accuracy": rows.sort_values("layer").value.tolist()}


def pruned(subject: Subject) -> dict[str, Any]:
    """Nats that pruning the routers of LIME adds; the model stays pruned."""
    if subject.arm != "lime":
        return {}
    losses = []
    for share in (1.0, 0.9):
        subject.model.prune_routers(p=share)
        results = fulldepth.measure(subject.model, measures=["lens_loss"], lens_tokens=None, **subject.options())
        losses.append(results.values("lens_loss", "mean").iloc[-1])
    return {"pruning_added": float(losses[1] - losses[0])}


def swept(subject: Subject, repeats: int, prompts: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sweep's row of the threshold that loses at most 1 % of the accuracy, and its whole document."""
    lens = {"lens_tokens": None} if subject.tokenizer is not None else {}
    times = {"repeats": repeats, "prompts": prompts}
    results = sweep(subject.model, target_accuracy_drop=ACCURACY_DROP, **times, **lens, **subject.options())
    [chosen] = [entry for entry in results.meta["exits"] if entry["calibrated"] and entry["split"] == "report"]
    return chosen, results.meta


def left_early(subject: Subject) -> dict[str, Any]:
    """Early exit at a loss of accuracy of 1 %: share of samples that leave before the last layer, layers saved."""
    chosen, _ = swept(subject, repeats=0, prompts=0)
    leaving = 1 - chosen["exits"][-1] / chosen["samples"]
    return {"exit_share": leaving, "exit_speedup": chosen["theoretical_speedup"], "exit_drop": chosen["drop"]}


def removed(subject: Subject, part: str, method: str = "greedy") -> dict[str, Any]:
    """Nats that removing three attention blocks or layers adds; they are chosen on other documents."""

    def searched(data: str, **options: Any) -> Any:
        chosen = subject.options(data)
        chosen["heldout"] = chosen.pop("data")
        return search(subject.model, None, granularity=part, fit=False, **options, **chosen)

    chosen = searched("choosing", blocks=REMOVED, search=method).blocks
    losses = searched("heldout", search="given", given=chosen).losses
    subject.chosen[part, method] = chosen
    return {f"removed_{part}" + ("" if method == "greedy" else f"_{method}"): losses[-1] - losses[0]}


def rescaled(subject: Subject) -> dict[str, Any]:
    """What scalars regain of the removed attention blocks, less what they gain without a removal, and what they change
    of the states' distance (MMD) to those of the whole model, on average over layers; for the control.
    """
    if subject.arm != subject.control:
        return {}
    options = subject.options()
    options["heldout"] = options.pop("data")
    chosen = subject.chosen["attention", "greedy"]
    plan = search(subject.model, subject.data["choosing"], search="given", given=chosen, fit=True, **options)
    gained = plan.losses[-1] - plan.healed_loss
    gained_whole = plan.losses[0] - plan.control_loss.scalars_only
    anatomy = find_anatomy(subject.model)
    distances = []
    for scalars in (None, Scalars.from_dict(plan.scalars, anatomy.num_layers)):
        with skipping(anatomy, chosen, scalars=scalars):
            reference = {"measures": ["mmd"], "reference": subject.model.name_or_path}
            results = fulldepth.measure(subject.model, **reference, **subject.options())
        distances.append(results.values("mmd", "value").mean())
    return {
        "scalars_regain": gained - gained_whole,
        "scalars_gain_whole": gained_whole,
        "scalars_change_mmd": float(distances[1] - distances[0]),
    }


def selected(subject: Subject) -> dict[str, Any]:
    """Nats that attention blocks add which other searches choose, for the control alone."""
    methods = ("one-shot", "cosine", "random") if subject.arm == subject.control else ()
    return {name: value for method in methods for name, value in removed(subject, "attention", method).items()}


def drafting_layers(subject: Subject) -> int:
    """A third of the layers, which draft."""
    return round(subject.model.config.num_hidden_layers / 3)


def speculated(subject: Subject) -> dict[str, Any]:
    """Drafts of the first third of the layers that the others accept, of four a round; share of texts equal to plain
    ones.
    """
    decoder = Decoder(subject.model)
    tokens = subject.common["sequence_length"] // 8
    same = []
    accepted = 0
    rounds = 0
    for ids in subject.prompts:
        plain = decoder.generate(ids, max_new_tokens=tokens)
        early = drafting_layers(subject)
        drafted = decoder.generate(ids, speculate_from=early, draft_length=DRAFT_LENGTH, max_new_tokens=tokens)
        same.append(torch.equal(drafted.sequences, plain.sequences))
        accepted += drafted.stats.accepted
        rounds += drafted.stats.rounds
    return {"accepted_a_round": accepted / rounds, "same_text": sum(same) / len(same)}


def timed_speculation(subject: Subject) -> dict[str, Any]:
    """Measured speed-up of self-speculation: the median over rounds of plain decoding's time divided by its own, in
    changing order.

    Raises:
        RuntimeError: if other programs used the processor meanwhile.
    """
    decoder = Decoder(subject.model)
    prompts = subject.prompts[:4]
    tokens = subject.common["sequence_length"] // 4

    def seconds(**options: Any) -> float:
        started = time.perf_counter()
        for ids in prompts:
            decoder.generate(ids, max_new_tokens=tokens, **options)
        return time.perf_counter() - started

    runs: list[dict[str, Any]] = [{}, {"speculate_from": drafting_layers(subject)}]  # the length of the drafts adapts
    times: list[list[float]] = [[], []]
    load = OtherLoad()
    for number in range(ROUNDS):
        for run in order(len(runs), number, seed=0):
            times[run].append(seconds(**runs[run]))
    speedup = SpeedUp.of(times[0], times[1], load.share())
    if speedup.verdict == "busy":
        raise RuntimeError("other programs used the processor while self-speculation was timed; run it again alone")
    return {"speculation_speedup": speedup.ratio.value}


def timed_exit(subject: Subject) -> dict[str, Any]:
    """Measured speed-up of generation with early exit, at a loss of accuracy of 1 %; 1 where no token may leave.

    Raises:
        FulldepthError: if the model cannot leave early in generation.
        RuntimeError: if other programs used the processor meanwhile.
    """
    chosen, document = swept(subject, repeats=ROUNDS, prompts=4)
    if "generation" not in document:
        raise FulldepthError("The model's layers cannot be run one by one, so that no text is generated early.")
    if chosen["threshold"] == 1:
        return {"exit_measured_speedup": 1.0}
    if any(entry["timing"] == "busy" for entry in document["generation"]):
        raise RuntimeError("other programs used the processor while early exit was timed; run it again alone")
    served = {entry["threshold"]: entry["measured_speedup"] for entry in document["generation"]}
    return {"exit_measured_speedup": served[chosen["threshold"]]}


PROBES: dict[str, Callable[[Subject], dict[str, Any]]] = {
    "measure": measured,
    "exit": left_early,
    "attention": partial(removed, part="attention"),
    "layer": partial(removed, part="layer"),
    "selection": selected,
    "scalars": rescaled,
    "speculation": speculated,
    "effect": effective,
    "pruning": pruned,
    "transfer": transferred,
    "timed speculation": timed_speculation,
    "timed exit": timed_exit,
}
