"""`refit`: heals a model without training, by least squares on the weights of the branches that stay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.progress import Watcher
from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples, units
from fulldepth.execution import find_anatomy
from fulldepth.execution.heldout import HeldoutLosses, heldout_losses
from fulldepth.execution.layer_runner import LayerRunner
from fulldepth.execution.scoring import AGREEMENT, DIVERGENCE, LOSS, ScoredBatch, make_batches
from fulldepth.execution.verify import prove
from fulldepth.hf import (
    Anatomy,
    OutputWeights,
    device_of,
    find_output_weights,
    is_offloaded,
    load_tokenizer,
    open_model,
)
from fulldepth.hf.checkpoint_folder import check_disk_space, check_output_path
from fulldepth.hf.modes import hooked, state_in
from fulldepth.hf.scalars import ROLES
from fulldepth.hf.surgery import obstacle_to_removing
from fulldepth.settings import layer as layered
from fulldepth.settings.heal import OF_SEARCH, HealSettings, ResolvedHealSettings
from fulldepth.settings.keywords import takes_settings
from fulldepth.settings.search import ExportSettings
from fulldepth.skip.exports.export import rehearse
from fulldepth.skip.exports.fold import check_foldable, fold, probes
from fulldepth.skip.exports.formats import FORMATS, check_format, format_for, known_format
from fulldepth.skip.exports.formats.gguf import Gguf
from fulldepth.skip.own_text import names_own, with_own_text
from fulldepth.skip.plan import UNHEALED, Plan, decided, document_of, is_listed, listed_rows, row_of, share_of_rows
from fulldepth.skip.problem import read_data
from fulldepth.subject import Subject, chosen_tokenizer

STRENGTHS = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
"""Multiples for lambda."""
READINGS = (LOSS, DIVERGENCE, AGREEMENT)
FIFTH = 5
Branch = tuple[int, str]
"""1-based layer, and `attention` or `mlp`."""


class Refit(NamedTuple):
    """Outcome of the refit for one branch."""

    branch: str
    """Such as `mlp of layer 3`."""
    end: str
    """The branch behind which the stream is matched: the last removed one that follows, or itself."""
    strength: float | None = None
    """lambda over the mean eigenvalue; None if the branch stays as it is."""
    left: float | None = None
    """Share of the sum of squares that is left on the rows that chose the strength."""
    reason: str = ""
    """Why it stays as it is."""


@dataclass(frozen=True)
class Healing:
    """A model healed in closed form."""

    original: PreTrainedModel
    model: PreTrainedModel
    """Removed branches add zeros; scalars are in the weights, which are refitted."""
    plan: Plan
    """Of `model`, for `export`."""
    settings: ResolvedHealSettings
    examples: Examples
    """`heldout`: rows that neither choice nor healing has seen; `train`: all others."""
    fitting: list[Example]
    """Rows that weights were fitted on."""
    choosing: list[Example]
    """Rows that chose the strength of each ridge."""
    refits: list[Refit]
    readings: dict[str, HeldoutLosses]
    """`loss`, `kl` to the original and `greedy_agreement` with it -> sums of the models `original`, `removed` (scalars
    included) and `refitted`, on the held-out rows."""


@takes_settings(HealSettings)
def refit(
    plan: Plan | str | Path,
    model: str | Path | PreTrainedModel,
    data: Any,
    *,
    settings: HealSettings,
    watcher: Watcher,
    tokenizer: Any = None,
    heldout: Any = None,
    output: str | Path | None = None,
    folder: Path | None = None,
    first: Callable[[PreTrainedModel, ResolvedHealSettings], None] | None = None,
) -> Healing:
    r"""Heal the model of a plan by least squares on its own weights.

    From the last branch before the first removed one on, every attention and MLP that stays is refitted, in the order
    of the stream, each in the model as refitted so far. Its last projection `W` reads `A`, so that it adds `A W` to the
    residual stream, which is `S` behind it; in the original the stream is `X` there, or behind the removed branches
    that follow. The weights of ridge regression, shrunk towards `W`,

        W' = argmin sum w |S - A W + A W' - X|^2 + lambda |W' - W|^2 = W + (A' w A + lambda I)^-1 A' w (X - S)

    over all tokens of the calibration text replace `W`: the model gets no new weights. `w = 1 / |S|^2`, so that tokens
    of a large stream do not dominate. `lambda` is the multiple of the mean eigenvalue of `A' w A` that leaves the
    smallest sum on rows that were not fitted; where none lowers that of `W`, the branch stays as it is.

    Data are split by rows or documents. The held-out fifth of `search`, which chose the blocks, chooses the ridges; a
    fourth of the others is held out to measure on, and the weights are fitted on the rest. Where the plan states the
    length, number and seed of its sequences, they are the defaults.

    Args:
        plan: the plan, or its file. Its scalars are folded into the weights first.
        model: the checkpoint that it was made for, or the loaded model, which does not change (a copy is healed).
        data: as for `search`.
        settings: fields of `HealSettings` as keywords, or an instance.
        watcher: receives progress.
        tokenizer: as for `search`; None = the one that the search was given, or the checkpoint's own.
        heldout: data to measure on instead, with no row that chose the blocks.
        output: folder that the healed model will be written to; exports are tried there before the work (`rehearse`).
        folder: for text that the unmodified model writes itself, if `own` is among the data.
        first: called with the original and the settings after everything is checked, and before the work.

    Returns:
        The healed model in memory with its plan, the refit of each branch, and the losses of the original, the removed
        and the refitted model.

    Raises:
        FulldepthError: if the plan is for another model, the model's branches cannot be healed (offloaded or quantised
            weights, norms after the sums, layers that read more than the one before), no format can hold the healed
            model, or the data cannot be split.

    Source: ReplaceMe (arXiv 2505.02819), which replaces contiguous layers by `W' = W T` in the one branch before them.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    settings = resolved(plan, settings)
    tokenizer = tokenizer_of(plan, settings, tokenizer)
    with Subject.open(model, None, settings, needs={"language", "plain"}, tokenizer=tokenizer) as subject:
        original = subject.model
        _check_healing(plan, subject, settings, output, tokenizer)
        if heldout is not None and names_own(data):  # before the model writes, which takes long
            check_unseen(plan, read_data(subject, None, settings, heldout=heldout).heldout)
        read = with_own_text(data, subject, settings, folder, watcher, heldout)
        examples = read_data(subject, read, settings, heldout=heldout)
        fitting, choosing, unseen = split_rows(plan, examples, heldout is not None, settings.seed)
        if first is not None:
            first(original, settings)
        healed = copy.deepcopy(original)
        scales = fold(healed, plan).stream_scale
        models = {"original": original, "removed": healed}
        readings = heldout_losses(models, unseen, settings.batch_size, watcher, READINGS)
        refits = _heal(original, healed, plan, scales, (fitting, choosing), settings.batch_size, watcher)
        healing = Healing(
            original,
            healed,
            plan.of_weights(healed, **UNHEALED),
            settings,
            Examples([*fitting, *choosing], unseen, examples.meta),
            fitting,
            choosing,
            refits,
            readings,
        )
        return with_model(healing, "refitted", healed, watcher)


def resolved(plan: Plan, settings: HealSettings) -> ResolvedHealSettings:
    """The settings of a healing, with those of the plan's search where they are not given."""
    stored = {name: value for name, value in plan.cost.get("settings", {}).items() if name in OF_SEARCH}
    given = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return layered(ResolvedHealSettings, stored, given)


def tokenizer_of(plan: Plan, settings: HealSettings, tokenizer: Any = None) -> Any:
    """The tokenizer that was passed in or named, or else the one that the search was given; None = the checkpoint's.

    Raises:
        FulldepthError: if the search's tokenizer is not there any more.
    """
    stated_tokenizer = chosen_tokenizer(settings, tokenizer)
    searched_with: Any = plan.data.get("tokenizer")
    if stated_tokenizer is not None or searched_with is None:
        return stated_tokenizer
    try:
        load_tokenizer(searched_with, trust_remote_code=settings.trust_remote_code)
    except FulldepthError as error:
        raise FulldepthError(
            f"The search of this plan read text with the tokenizer {one_line(searched_with, 200)}, which cannot be "
            f"opened. Name its place with --tokenizer. {one_line(error)}"
        ) from error
    return searched_with


def _check_healing(
    plan: Plan, subject: Subject, settings: HealSettings, output: str | Path | None, tokenizer: Any
) -> None:
    """Refuse what cannot be healed or exported, and try the exports, before the work.

    Raises:
        FulldepthError: see `refit`.
    """
    original = subject.model
    if is_offloaded(original):
        raise FulldepthError("Offloaded weights cannot be healed. Load the model without a device map.")
    plan.check_model(original)
    if reason := subject.anatomy.not_serial:
        raise FulldepthError(
            f"{subject.kind} cannot be healed: {reason}. Least squares compare one stream layer by layer, "
            "and training would bring the removed branches back, which stay in the model with weights of zero. "
            "`fulldepth skip apply --format folded` writes the plan's checkpoint."
        )
    if reason := obstacle_to_removing(subject.anatomy):
        raise FulldepthError(
            f"{subject.kind} cannot be healed: {reason}, and healing needs the places where removed attention and MLP "
            "are added. `fulldepth skip apply --format layer` writes the plan's checkpoint, which can be trained on."
        )
    check_foldable(subject.anatomy, plan)
    format_used = format_for(plan, original)
    formats = [settings.format or format_used] + [format_used] * bool(settings.steps) + ["gguf"] * bool(settings.gguf)
    for format in formats:
        stock = check_format(original, plan, FORMATS[known_format(format)])
    if settings.gguf is not None:
        check_output_path(Path(settings.gguf), Gguf.suffix)
        check_disk_space(Path(settings.gguf), FORMATS[Gguf.name].least_bytes(stock, plan, settings.gguf_type))
    if output is not None:
        _rehearse(plan.changed(**UNHEALED), original, dict.fromkeys(formats), Path(output), settings, tokenizer)


def _rehearse(
    plan: Plan,
    model: PreTrainedModel,
    formats: Iterable[str],
    output: Path,
    settings: HealSettings,
    tokenizer: Any,
) -> None:
    """Try the exports of a healing with few layers; in a GGUF file the weights that it changes are rounded."""
    for format in formats:
        if format == Gguf.name and settings.gguf is not None:
            change = partial(_as_if_healed, every=bool(settings.steps and not settings.rank))
            rounding = ExportSettings(gguf_type=settings.gguf_type)
            rehearse(plan, model, format, settings.gguf, rounding, change=change)
        else:
            rehearse(plan, model, format, output, ExportSettings(), tokenizer)


@torch.no_grad()
def _as_if_healed(model: PreTrainedModel, *, every: bool) -> None:
    """Change a little what healing changes: all weights, or those of the projections."""
    anatomy = find_anatomy(model)
    branches = [(layer, role) for role in ROLES for layer in anatomy.layers_with(role)]
    outputs = () if every else find_output_weights(anatomy, branches, probes(anatomy)).values()
    projections = [module for weights in outputs if (module := _projection(model, weights)) is not None]
    for weight in model.parameters() if every else [module.get_parameter("weight") for module in projections]:
        weight.mul_(1.01)


def with_model(healing: Healing, label: str, model: PreTrainedModel | Path, watcher: Watcher) -> Healing:
    """The healing with the losses of a further model or checkpoint on the held-out rows."""
    original = healing.original
    opened = open_model(model, device=original.device, dtype=original.dtype).model.eval()
    models = {"original": original, label: opened}
    losses = heldout_losses(models, healing.examples.heldout, healing.settings.batch_size, watcher, READINGS)
    readings = {
        kind: replace(before, sums={**before.sums, **losses[kind].sums}) for kind, before in healing.readings.items()
    }
    return replace(healing, readings=readings)


def split_rows(
    plan: Plan, examples: Examples, separate: bool, seed: int
) -> tuple[list[Example], list[Example], list[Example]]:
    """Rows to fit weights on, to choose ridges by, and to measure on; a row that is measured is in no other part, also
    where the data hold it twice, and of no document of which a part chose the blocks.

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
    if separate:
        check_unseen(plan, unseen)
    known = listed_rows(plan)
    chose = {example.document for example in unseen if is_listed(example, known)}
    unseen = [example for example in unseen if not is_listed(example, known)]
    measured = {name for example in unseen for name in (row_of(example), document_of(example)) if name is not None}
    rest, choosing = ([e for e in rows if not is_listed(e, measured)] for rows in (rest, choosing))
    for rows, use in ((rest, "fit weights on"), (choosing, "choose ridges by"), (unseen, "measure healing on")):
        if not any(example.predicted for example in rows):
            raise FulldepthError(
                f"The data leave no rows to {use}: there are {len(documents)} {units(examples.meta)} besides the "
                f"held-out ones{f', and {len(chose)} of them chose the blocks' if chose else ''}. Give more data, or "
                "--heldout."
            )
    return rest, choosing, unseen


def check_unseen(plan: Plan, heldout: Sequence[Example]) -> None:
    """Check that no row to measure on chose the plan's blocks.

    Raises:
        FulldepthError: if one did.
    """
    known = listed_rows(plan)
    shared = [example for example in heldout if is_listed(example, known)]
    decision = decided(plan)
    if shared and decision:
        raise FulldepthError(
            f"{share_of_rows(shared, heldout, known)} also {decision}; healing is measured on others. Give other "
            "held-out data, or none: rows of the data are kept apart then."
        )


def ends(anatomy: Anatomy, removed: frozenset[Branch]) -> dict[Branch, Branch]:
    """Branch that stays -> the last removed one of those that follow, or itself; in the order of the stream.

    The first is the last before a removed one. Branches of a parallel block are added to the same stream, so that only
    the last that stays is taken, and is followed by one that is removed.
    """
    parallel = anatomy.family.design == "parallel"
    host = None
    last_removed = dict[Branch, Branch]()
    first = min(removed, default=(anatomy.num_layers + 1, ""))
    for layer in anatomy.layers:
        present = [(layer, role) for role in ROLES if anatomy.part(layer, role) is not None]
        gone = [branch for branch in present if branch in removed]
        if parallel:
            present = [*[branch for branch in present if branch not in removed][-1:], *gone]
        for branch in present:
            host = host if branch in removed else branch
            if host is not None and first <= branch:
                last_removed[host] = branch
    return last_removed


class Walk:
    """The residual streams of batches in one model, carried on from layer to layer.

    Args:
        anatomy: of the model.
        batches: on its device.
        gone: layers that need not run, because both branches add zeros.
    """

    def __init__(self, anatomy: Anatomy, batches: Sequence[ScoredBatch], gone: Sequence[int] = ()) -> None:
        self.runner = LayerRunner(anatomy, batches[0].inputs)
        self.batches = batches
        self.layer = 0
        self.gone = frozenset(gone)
        self.states = [self.runner.begin(batch.inputs) for batch in batches]
        """[B, T, D] of each batch, after `layer` layers."""

    def advance(self, layer: int) -> None:
        """Run all batches through the layers up to `layer`."""
        self.states = [self.run(number, layer)[0] for number in range(len(self.batches))]
        self.layer = layer

    def run(self, number: int, last: int, *modules: nn.Module) -> tuple[Tensor, list[tuple[Any, Tensor]]]:
        """Run one batch from `self.layer` to layer `last`, without moving there.

        Returns:
            The states behind it; and the first input of each module (None if it is passed by name) and its output.
        """
        seen: dict[nn.Module, tuple[Any, Tensor]] = {}

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            seen[module] = inputs[0] if inputs else None, state_in(output)

        self.runner.begin(self.batches[number].inputs)
        with hooked(module.register_forward_hook(keep) for module in modules):
            layers = [n for n in range(self.layer + 1, last + 1) if n not in self.gone]
            states = self.runner.run(layers, self.states[number])
        return states, [seen[module] for module in modules]


class RidgeSums:
    """The sums over tokens that a ridge regression needs."""

    def __init__(self) -> None:
        self.gram: Any = 0.0
        """[K, K] A' w A."""
        self.cross: Any = 0.0
        """[K, D] A' w (X - S)."""
        self.gap: Any = 0.0
        """sum w |X - S|^2."""

    def add(self, inputs: Tensor, stream: Tensor, wanted: Tensor) -> None:
        """Add tokens: `[R, K]` A, and `[R, D]` S and X; one without a stream counts nothing."""
        root = (1 / stream.norm(dim=-1, keepdim=True)).nan_to_num(posinf=0.0)
        a = inputs * root
        gap = (wanted - stream) * root
        self.gram = self.gram + (a.T @ a).double()
        self.cross = self.cross + (a.T @ gap).double()
        self.gap += gap.double().square().sum()

    def change(self, strength: float) -> Tensor:
        """`W' - W`, `[K, D]`."""
        ridge = (strength * self.gram.diagonal().mean()).clamp(min=1e-300)  # inputs may all be 0
        return torch.linalg.solve(self.gram + ridge * torch.eye(len(self.gram)).to(self.gram), self.cross)

    def left(self, change: Tensor) -> float:
        """Share of the sum of squares that is left after a change."""
        return float(1 - (change * (2 * self.cross - self.gram @ change)).sum() / self.gap)


def best_change(fitted: RidgeSums, held_out: RidgeSums) -> tuple[float | None, float, Tensor | None]:
    """The strength that leaves the smallest share on other rows, that share, and the change; None if none is below 1.

    All strengths are tried, because the share can have several minima where there are few tokens.
    """
    best: tuple[float | None, float, Tensor | None] = (None, 1.0, None)
    for strength in STRENGTHS:
        change = fitted.change(strength)
        if (left := held_out.left(change)) < best[1]:
            best = strength, left, change
    return best


@torch.no_grad()
def _heal(
    original: PreTrainedModel,
    healed: PreTrainedModel,
    plan: Plan,
    scales: Sequence[float],
    rows: tuple[Sequence[Example], Sequence[Example]],
    batch_size: int,
    watcher: Watcher,
) -> list[Refit]:
    """Refit a model whose removed branches add zeros.

    Args:
        original: the model before the removal.
        healed: the model to heal.
        plan: what was removed.
        scales: c where the stream of `healed` is that of its plan over c (`Folding.stream_scale`).
        rows: to fit on, and to choose ridges by.
        batch_size: sequences in a batch.
        watcher: receives progress after each branch.
    """
    fitted, choosing = (
        [batch.to(device_of(original)) for batch in make_batches(part, batch_size, original.config)] for part in rows
    )
    source, _ = prove(original, fitted[0].inputs)
    anatomy, _ = prove(healed, fitted[0].inputs)
    removed = frozenset((layer, role) for role in ROLES for layer in plan.lacking(role))
    pairs = ends(anatomy, removed)
    weights = find_output_weights(anatomy, pairs, probes(anatomy))
    gone = [layer for layer in anatomy.layers if {(layer, role) for role in ROLES} <= removed]
    original_walk = Walk(source, [*fitted, *choosing])
    walk = Walk(anatomy, [*fitted, *choosing], gone)
    done: list[Refit] = []
    watcher.begin("Refitting", len(pairs))
    for branch, end in pairs.items():
        watcher.advance(1)
        names = (f"{role} of layer {layer}" for layer, role in (branch, end))
        refit = Refit(next(names), next(names))
        module = anatomy.part(branch[0], f"{branch[1]}_branch")
        projection = _projection(healed, weights[branch])
        inside = end[1] == "attention" and anatomy.family.design != "parallel"  # between attention and MLP of a layer
        layer = end[0] - inside
        sums = RidgeSums(), RidgeSums()
        original_walk.advance(layer)
        for number, batch in enumerate(walk.batches):
            if module is None or projection is None:
                break
            stream, ((_, added), (inputs, output)) = walk.run(number, max(layer, branch[0]), module, projection)
            if inputs is None or not torch.equal(added.view_as(output), output):
                projection = None
                break
            if layer < branch[0]:  # behind the attention alone
                stream = walk.states[number] + anatomy.branch_scale * added
            wanted = original_walk.states[number]
            if inside and (attention := source.part(end[0], "attention_branch")) is not None:
                _, ((_, added),) = original_walk.run(number, end[0], attention)
                wanted = wanted + source.branch_scale * added
            real = batch.inputs["attention_mask"].bool().flatten()
            wide = torch.promote_types(stream.dtype, torch.float32)
            a, s, x = (values.reshape(len(real), -1)[real].to(wide) for values in (inputs, stream, wanted))
            sums[number >= len(fitted)].add(anatomy.branch_scale * a, s, x / scales[2 * end[0] - inside])
        if projection is None:
            done.append(refit._replace(reason="its output is not that of one linear layer of its own"))
        else:
            strength, left, change = best_change(*sums)
            reason = "" if strength else "no ridge leaves less of the difference"
            done.append(refit._replace(strength=strength, left=left, reason=reason))
            if change is not None:
                weight = projection.get_parameter("weight")
                weight.copy_(weight.double() + (change.T if isinstance(projection, nn.Linear) else change))
        walk.advance(max(layer, walk.layer))
    return done


def _projection(model: PreTrainedModel, weights: OutputWeights) -> nn.Module | None:
    """The linear layer whose weights alone the branch's output is proportional to; None if it is not one, or shared."""
    paths = {name.rpartition(".")[0] for name in weights.names}
    module = weights.branch.get_submodule(paths.pop()) if len(paths) == 1 else None
    if not isinstance(module, nn.Linear | Conv1D):
        return None
    uses = sum(weight is module.weight for _, weight in model.named_parameters(remove_duplicate=False))
    return module if uses == 1 else None
