r"""`merge_maps`: heals a model without training, by a linear map for each run of removed blocks.

The last branch before the removed ones that stays, their host, adds `M` to the residual stream. After the removed
blocks the stream was `X` in the original model, and is `S = Y + M` now. The map of ridge regression, shrunk towards the
identity,

    T = argmin_T sum w |Y + M T - X'|^2 + lambda |T - I|^2 = I + (M' w M + lambda I)^-1 M' w (X' - S)

over all tokens of the calibration text replaces `M` by `M T`: it is multiplied into the host's last projection, so the
model gets no new weights. Two objectives are tried. `squares`: `w = 1`, `X' = X`. `cosine`, which large tokens do not
dominate: `w = 1 / |S|^2` and `X' = S + |S| (X / |X| - cos(S, X) S / |S|)`, one step from `T = I` along the gradient of
the sum of `cos(Y + M T, X)`. `lambda` is a multiple of the mean eigenvalue of `M' w M`. Objective and multiple have the
lowest next-token loss on rows that no map was fitted on; where none is below that of `T = I`, the host stays as it is.
Runs of removed blocks are healed from the first to the last, each in the model as healed so far.

Source: ReplaceMe (arXiv 2505.02819), for contiguous layers; here for any removed attention and MLP, with a choice of
lambda by the model's loss.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.execution.layer_runner import LayerRunner
from fulldepth.execution.scoring import AGREEMENT, DIVERGENCE, LOSS, ScoredBatch
from fulldepth.execution.verify import check_task, prove
from fulldepth.hf import (
    Anatomy,
    Classifier,
    OutputWeights,
    device_of,
    evaluating,
    find_output_weights,
    is_offloaded,
    open_model,
)
from fulldepth.hf.checkpoint_folder import check_target
from fulldepth.hf.model_hash import model_hash
from fulldepth.losses import aligned_loss
from fulldepth.progress import Watcher
from fulldepth.settings import layer as layered
from fulldepth.settings.heal import HealSettings
from fulldepth.settings.keywords import takes_settings
from fulldepth.settings.search import PLACES, HeldoutSettings
from fulldepth.skip.bench import HeldoutLosses, heldout_losses
from fulldepth.skip.exports.fold import fold, probes
from fulldepth.skip.exports.formats import FORMATS, check_format, known_format
from fulldepth.skip.exports.formats.gguf import Gguf, check_gguf
from fulldepth.skip.fit import make_batches
from fulldepth.skip.plan import Plan, decided, listed_rows, row_of
from fulldepth.skip.problem import read_data

ROLES = ("attention", "mlp")
OBJECTIVES = ("squares", "cosine")
STRENGTHS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.001, 1e-4)
"""Multiples for lambda, tried from the strongest until the loss rises."""
READINGS = (LOSS, DIVERGENCE, AGREEMENT)
FIFTH = 5
Branch = tuple[int, str]
"""1-based layer, and `attention` or `mlp`."""


class HealingMap(NamedTuple):
    """The map of one run of removed blocks."""

    host: str
    """The branch that it is merged into: `mlp of layer 3`."""
    end: str
    """The last removed branch."""
    objective: str | None = None
    """`squares` or `cosine`; None if no map lowers the loss, or none can be merged."""
    strength: float | None = None
    """lambda over the mean eigenvalue."""
    before: float | None = None
    """Loss without the map on the rows that chose it, in nats per token."""
    after: float | None = None
    """Loss with it."""
    reason: str = ""
    """Why there is none."""


@dataclass(frozen=True)
class Healing:
    """A model healed in closed form."""

    original: PreTrainedModel
    model: PreTrainedModel
    """Removed branches add zeros; scalars and maps are in the weights."""
    plan: Plan
    """Of `model`, for `export`."""
    settings: HealSettings
    examples: Examples
    """`heldout`: rows that neither choice nor healing has seen; `train`: all others."""
    fitting: list[Example]
    """Rows that maps were fitted on."""
    choosing: list[Example]
    """Rows that chose them."""
    maps: list[HealingMap]
    readings: dict[str, HeldoutLosses]
    """`loss`, `kl` to the original and `greedy_agreement` with it -> sums of the models `original`, `removed` (scalars
    included) and `maps`, on the held-out rows."""


@takes_settings(HealSettings)
def merge_maps(
    plan: Plan | str | Path,
    model: str | Path | PreTrainedModel,
    data: Any,
    *,
    settings: HealSettings,
    watcher: Watcher,
    tokenizer: Any = None,
    heldout: Any = None,
) -> Healing:
    """Heal the model of a plan by linear maps in its own weights; see the docstring of this module.

    Data are split by rows or documents. The held-out fifth of `search`, which chose the blocks, chooses the maps; a
    fourth of the others is held out to measure on, and the maps are fitted on the rest. Where the plan states the
    length, number and seed of its sequences, they are the defaults.

    Args:
        plan: the plan, or its file. Its scalars are folded into the weights first.
        model: the checkpoint that it was made for, or the loaded model, which does not change (a copy is healed).
        data: as for `search`.
        settings: fields of `HealSettings` as keywords, or an instance.
        watcher: receives progress.
        tokenizer: as for `search`.
        heldout: data to measure on instead, with no row that chose the blocks.

    Raises:
        FulldepthError: if the plan is for another model, the model's branches cannot be healed (offloaded or quantised
            weights, norms after the sums), or the data cannot be split.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    settings = settings_of(plan, settings)
    loading = settings.model_dump(include={"dtype", "device", "revision", "trust_remote_code"})
    checkpoint = open_model(model, **loading)
    original = checkpoint.model
    if is_offloaded(original):
        raise FulldepthError("Offloaded weights cannot be healed. Load the model without a device map.")
    plan.check_model(original)
    for format in filter(None, (settings.format, settings.gguf and "gguf")):
        check_format(original, plan.kind, len(plan.blocks), FORMATS[known_format(format)])
    if settings.gguf is not None:
        check_target(Path(settings.gguf), Gguf.suffix)
        check_gguf(original, plan)
    with evaluating(original):
        anatomy = check_task(find_anatomy(original))
        examples = read_data(checkpoint, anatomy, data, settings, tokenizer=tokenizer, heldout=heldout)
        fitting, choosing, unseen = split_rows(plan, examples, heldout is not None, settings.seed)
        healed = copy.deepcopy(original)
        scales = fold(healed, plan).stream_scale
        before = heldout_losses(
            {"original": original, "removed": healed}, unseen, settings.batch_size, watcher, READINGS
        )
        maps = _heal(original, healed, plan, scales, (fitting, choosing), settings.batch_size, watcher)
        after = heldout_losses({"original": original, "maps": healed}, unseen, settings.batch_size, watcher, READINGS)
    planned = {**plan.document()["model"], "hash": model_hash(healed)}
    return Healing(
        original,
        healed,
        plan.changed(model=planned, scalars={}, healed_loss=None, control_loss=None),
        settings,
        Examples([*fitting, *choosing], unseen, examples.meta),
        fitting,
        choosing,
        maps,
        {kind: replace(own, sums={**own.sums, **after[kind].sums}) for kind, own in before.items()},
    )


def settings_of(plan: Plan, given: HealSettings) -> HealSettings:
    """The given settings; the search's are the defaults of how data are read, so that the same rows are held out."""
    known = HeldoutSettings.model_fields.keys() - PLACES
    stored = {name: value for name, value in plan.cost.get("settings", {}).items() if name in known}
    return layered(HealSettings, stored, given.model_dump(mode="json", exclude_unset=True))


def split_rows(
    plan: Plan, examples: Examples, separate: bool, seed: int
) -> tuple[list[Example], list[Example], list[Example]]:
    """Rows to fit maps on, to choose them by, and to measure on.

    Args:
        plan: lists the rows that chose its blocks.
        examples: of the data.
        separate: whether their held-out part was named by the user, to measure on.
        seed: of the documents that are drawn.

    Raises:
        FulldepthError: if there are too few documents, or rows to measure on chose the blocks.
    """
    documents = sorted({example.document for example in examples.train})
    share = round(len(documents) / (FIFTH - (not separate)))
    drawn = set(np.random.default_rng(seed).permutation(documents)[: max(1, share)].tolist())
    rest, fifth = ([e for e in examples.train if (e.document in drawn) == part] for part in (False, True))
    choosing, unseen = (fifth, examples.heldout) if separate else (examples.heldout, fifth)
    known = listed_rows(plan) or set()
    shared, decision = sum(row_of(example) in known for example in unseen), decided(plan)
    if separate and shared and decision:
        raise FulldepthError(
            f"{shared} of {len(unseen)} held-out rows also {decision}; healing is measured on others. Give other "
            "held-out data, or none: rows of the data are kept apart then."
        )
    unseen = [example for example in unseen if row_of(example) not in known]
    for rows, use in ((rest, "fit maps on"), (choosing, "choose maps by"), (unseen, "measure healing on")):
        if not any(example.predicted for example in rows):
            raise FulldepthError(
                f"The data leave no rows to {use}: there are {len(documents)} documents besides the held-out ones. "
                "Give more data, or --heldout."
            )
    return rest, choosing, unseen


def hosts(anatomy: Anatomy, removed: frozenset[Branch]) -> dict[Branch, Branch]:
    """Host -> last branch of the run of removed branches behind it, in the order of the stream.

    Branches of a parallel block are added to the same stream, so that one that stays is the host of one that is
    removed. Branches before the first that stays have no host.
    """
    parallel, host, runs = anatomy.family.design == "parallel", None, {}
    for layer in range(1, anatomy.num_layers + 1):
        own = [(layer, role) for role in ROLES if anatomy.part(layer, role) is not None]
        for branch in sorted(own, key=lambda branch: parallel and branch in removed):
            if branch not in removed:
                host = branch
            elif host is not None:
                runs[host] = branch
    return runs


class Walk:
    """The residual streams of batches in one model, carried on from layer to layer.

    Args:
        anatomy: of the model.
        batches: on its device.
        gone: layers that need not run, because both branches add zeros.
    """

    def __init__(self, anatomy: Anatomy, batches: Sequence[ScoredBatch], gone: Sequence[int] = ()) -> None:
        self.runner, self.batches, self.layer = LayerRunner(anatomy, batches[0].inputs), batches, 0
        self.gone = frozenset(gone)
        self.states = [self.runner.begin(batch.inputs) for batch in batches]
        """[B, T, D] of each batch, after `layer` layers."""

    def advance(self, layer: int, *modules: nn.Module) -> list[list[Tensor]]:
        """Run all batches through the layers up to `layer`; returns the outputs of modules, for each batch."""
        kept = []
        for number, batch in enumerate(self.batches):
            self.states[number], outputs = self.run(batch, self.states[number], layer, *modules)
            kept.append(outputs)
        self.layer = layer
        return kept

    def run(self, batch: ScoredBatch, states: Tensor, last: int, *modules: nn.Module) -> tuple[Tensor, list[Tensor]]:
        """Run one batch from `self.layer` to layer `last`, without moving there."""
        outputs: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs[module] = (output[0] if isinstance(output, tuple) else output).view_as(states)

        self.runner.begin(batch.inputs)
        with ExitStack() as hooks:
            for module in modules:
                hooks.callback(module.register_forward_hook(keep).remove)
            states = self.runner.run([n for n in range(self.layer + 1, last + 1) if n not in self.gone], states)
        return states, [outputs[module] for module in modules]


class Gap:
    """The streams at one run of removed branches.

    Args:
        walk: of the model as healed so far, behind the run; the first batches are those to fit on.
        added: [B, T, D] M of each of its batches.
        wanted: [B, T, D] X of each batch to fit on.
        classifier: of the model.
    """

    def __init__(self, walk: Walk, added: Sequence[Tensor], wanted: Sequence[Tensor], classifier: Classifier) -> None:
        self.walk, self.added, self.wanted, self.classifier = walk, added, wanted, classifier

    def changes(self, objective: str) -> Iterator[tuple[float, Tensor]]:
        """(strength, `T - I` as `[D, D]` float64) from the strongest."""
        width = self.added[0].shape[-1]
        gram, cross = (torch.zeros(width, width, dtype=torch.float64, device=self.added[0].device) for _ in range(2))
        for batch, own, added, wanted in zip(
            self.walk.batches, self.walk.states, self.added, self.wanted, strict=False
        ):
            real = batch.inputs["attention_mask"].bool()
            s, m, x = (states[real].double() for states in (own, added, wanted))  # [R, D]
            if objective == "cosine":
                size = s.norm(dim=-1, keepdim=True)
                direction, aim = s / size, functional.normalize(x, dim=-1)
                miss = aim - (direction * aim).sum(-1, keepdim=True) * direction
                gram, cross = gram + (m / size).T @ (m / size), cross + (m / size).T @ miss
            else:
                gram, cross = gram + m.T @ m, cross + m.T @ (x - s)
        values, vectors = torch.linalg.eigh(gram)
        cross = vectors.T @ cross
        for strength in STRENGTHS:
            ridge = strength * values.mean()
            yield strength, vectors @ (cross / (values + ridge).clamp(min=1e-300)[:, None])

    def loss(self, change: Tensor | None = None) -> float:
        """Loss in nats per token with a map on the rows that choose it; None = without."""
        walk, first, total, tokens = self.walk, len(self.wanted), 0.0, 0
        last = walk.runner.anatomy.num_layers
        for batch, own, added in zip(walk.batches[first:], walk.states[first:], self.added[first:], strict=True):
            states, _ = walk.run(batch, own if change is None else own + added @ change.to(added), last)
            rows = states[batch.where]  # [R, D]
            total += len(rows) * float(aligned_loss([rows], self.classifier.tokens, batch.targets))
            tokens += len(rows)
        return total / tokens

    def best(self, unhealed: HealingMap) -> tuple[HealingMap, Tensor | None]:
        """The best map, and its `T - I`; None where none lowers the loss."""
        before = self.loss()
        found = unhealed._replace(before=before, after=before, reason="no map lowers the loss")
        best, least = None, before
        for objective in OBJECTIVES:
            last = math.inf
            for strength, change in self.changes(objective):
                loss = self.loss(change)
                if loss < least:
                    least, best = loss, change
                    found = found._replace(objective=objective, strength=strength, after=loss, reason="")
                if loss > last:
                    break
                last = loss
        return found, best


@torch.no_grad()
def _heal(
    original: PreTrainedModel,
    healed: PreTrainedModel,
    plan: Plan,
    scales: Sequence[float],
    rows: tuple[Sequence[Example], Sequence[Example]],
    batch_size: int,
    watcher: Watcher,
) -> list[HealingMap]:
    """Merge maps into a model whose removed branches add zeros.

    Args:
        original: the model before the removal.
        healed: the model to heal.
        plan: what was removed.
        scales: c where the stream of `healed` is that of its plan over c (`Folding.stream_scale`).
        rows: to fit on, and to choose by.
        batch_size: sequences in a batch.
        watcher: receives progress after each run of removed branches.
    """
    fitted, chosen = ([b.to(device_of(original)) for b in make_batches(part, batch_size)] for part in rows)
    source, _ = prove(original, fitted[0].inputs)
    anatomy, classifier = prove(healed, fitted[0].inputs)
    if anatomy.family.design == "post":
        raise FulldepthError(f"A {type(healed).__name__} cannot be healed by maps: its norms come after the sums.")
    removed = frozenset((layer, role) for role in ROLES for layer in plan.lacking(role))
    runs = hosts(anatomy, removed)
    weights = find_output_weights(anatomy, runs, probes(anatomy))
    gone = [layer for layer in range(1, anatomy.num_layers + 1) if {(layer, role) for role in ROLES} <= removed]
    there, here = Walk(source, fitted), Walk(anatomy, [*fitted, *chosen], gone)
    maps: list[HealingMap] = []
    merged: dict[nn.Module, Tensor] = {}
    watcher.begin("Maps", len(runs))
    for host, end in runs.items():
        watcher.advance(1)
        unhealed = HealingMap(f"{host[1]} of layer {host[0]}", f"{end[1]} of layer {end[0]}")
        branch, projection = anatomy.part(host[0], f"{host[1]}_branch"), _projection(healed, weights[host])
        middle = end[1] == "attention" and anatomy.family.design != "parallel"
        outputs = here.advance(end[0] - middle, *([branch, projection] if branch and projection else []))
        if projection is None or not all(torch.equal(*both) for both in outputs):
            maps.append(unhealed._replace(reason="its output is not that of one linear layer of its own"))
            continue
        there.advance(end[0] - middle)
        wanted = there.states
        attention = source.part(end[0], "attention_branch")
        if middle and attention:  # the original's stream between the attention and the MLP of the layer
            passed = [there.run(batch, own, end[0], attention) for batch, own in zip(fitted, wanted, strict=True)]
            wanted = [own + source.branch_scale * out for own, (_, (out,)) in zip(wanted, passed, strict=True)]
        scale = scales[2 * end[0] - middle]
        added = [anatomy.branch_scale * out for out, _ in outputs]
        found, change = Gap(here, added, [own / scale for own in wanted], classifier).best(unhealed)
        maps.append(found)
        if change is not None:
            merged[projection] = change
            here.states = [own + out @ change.to(out) for own, out in zip(here.states, added, strict=True)]
    for projection, change in merged.items():
        for weight in projection.parameters(recurse=False):
            inputs_last = isinstance(projection, nn.Linear) and weight.ndim == 2  # [outputs, inputs]
            wide = weight.double().T if inputs_last else weight.double()
            wide = wide + wide @ change
            weight.copy_(wide.T if inputs_last else wide)
    return maps


def _projection(model: PreTrainedModel, weights: OutputWeights) -> nn.Module | None:
    """The linear layer whose weights alone the branch's output is proportional to; None if it is not one, or shared."""
    paths = {name.rpartition(".")[0] for name in weights.names}
    module = weights.branch.get_submodule(paths.pop()) if len(paths) == 1 else None
    if not isinstance(module, nn.Linear | Conv1D):
        return None
    uses = sum(weight is module.weight for _, weight in model.named_parameters(remove_duplicate=False))
    return module if uses == 1 else None
