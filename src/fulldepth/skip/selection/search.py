"""`search`: finds the blocks to remove, their order and the losses, and returns a `Plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, NonNegativeInt
from transformers import PreTrainedModel

from fulldepth.distributed import Processes, processes
from fulldepth.errors import FulldepthError
from fulldepth.execution.flops import Variant
from fulldepth.execution.scoring import BASE
from fulldepth.progress import Watcher
from fulldepth.settings import Settings
from fulldepth.settings import layer as layered
from fulldepth.settings.search import SearchSettings, parse_budget
from fulldepth.skip.exports.possible import announce
from fulldepth.skip.plan import FILE, Factors, Loss, Plan
from fulldepth.skip.selection.elimination import Round, chain, eliminate
from fulldepth.skip.selection.estimate import Estimate, budget_of, check_budget, estimate_search
from fulldepth.skip.selection.exact import exact
from fulldepth.skip.selection.fit import fit, fit_options
from fulldepth.skip.selection.loss_cache import LossCache
from fulldepth.skip.selection.problem import SearchProblem, prepared
from fulldepth.skip.selection.rankings import rank
from fulldepth.skip.selection.record import document_of
from fulldepth.skip.selection.stored import PROGRESS, damaged

Limit = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
"""FLOPs that a search may spend."""


class StoredFit(Settings):
    """A `FitResult` as plain values."""

    scalars: Factors
    heldout_loss: Loss
    losses: list[FiniteFloat]
    epoch: NonNegativeInt
    train_losses: list[FiniteFloat]
    divergences: list[FiniteFloat]
    forwards: NonNegativeInt
    flops: Loss


def search(
    model: str | Path | PreTrainedModel,
    data: Any,
    blocks: int | None = None,
    *,
    tokenizer: Any = None,
    heldout: Any = None,
    criterion: str = "loss",
    search: str = "greedy",
    granularity: str = "attention",
    given: Sequence[int] | None = None,
    fit: bool = True,
    batch_size: int = 8,
    seed: int = 0,
    output: str | Path | None = None,
    resume: bool = False,
    responses: Mapping[str, Any] | None = None,
    watcher: Watcher | None = None,
    **options: Any,
) -> Plan:
    """Find the blocks whose removal costs least on held-out data, then train scalars; runs in parallel under torchrun.

    Args:
        model: checkpoint folder, Hub name, or a loaded model (unchanged on return).
        data: any data that `read_examples` reads (pairs, chats, plain text, `corpus:builtin`), or `Examples`.
        blocks: k, the number to remove; None = the number of layers in `given`.
        tokenizer: required for a loaded model, unless data are `Examples`; None = the one saved with the checkpoint.
        heldout: data to score with, of the same kinds; None = a random fifth of `data`.
        criterion: `loss`, `scaled` or `kl`.
        search: `greedy`, `exact`, `one-shot`, `cosine`, `taylor`, `random`, `last`, or `given` (with the layers).
        granularity: `attention`, `mlp` or `layer`.
        given: 1-based layers in the order of their removal.
        fit: train scalars, and the control "scalars only".
        batch_size: sequences per batch.
        seed: of all random choices.
        output: folder for `plan.json`, and for `progress.json` while the search runs.
        resume: continue an interrupted search; the plan is the same as without interruption.
        responses: settings of the generated responses, for the plan's `data`.
        watcher: receives progress and messages.
        **options: any other field of `SearchSettings`.

    Raises:
        FulldepthError: if the model, data or options are not valid, or the output folder holds other files.
    """
    fields = {
        "blocks": blocks,
        "criterion": criterion,
        "search": search,
        "granularity": granularity,
        "given": given,
        "fit": fit,
        "batch_size": batch_size,
        "seed": seed,
        **options,
    }
    settings = layered(SearchSettings, fields)
    opened = {"tokenizer": tokenizer, "heldout": heldout}
    with processes() as process, process.holding(output), prepared(model, data, settings, process, **opened) as problem:
        return search_with(problem, process, watcher or Watcher(), output=output, resume=resume, responses=responses)


def search_with(
    problem: SearchProblem,
    process: Processes,
    watcher: Watcher,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    responses: Mapping[str, Any] | None = None,
) -> Plan:
    """`search` of a prepared problem, in an output folder that the caller has locked; the model is restored."""
    folder, settings = None if output is None else Path(output), problem.settings
    finished = _finished(folder, problem, resume, process)
    if finished is not None:
        return finished
    watcher.say(announce(problem.checkpoint.model, settings, problem.blocks))
    expected = estimate_search(problem, process)
    watcher.say(expected.sentence)
    loss_cache = LossCache(
        problem.scorer,
        problem.chunks,
        process,
        criterion=settings.criterion,
        path=None if folder is None else folder / PROGRESS,
        fingerprint={"model": problem.hash, "data": problem.examples.meta["hash"], **problem.noted_settings},
        resume=resume,
        watcher=watcher,
        refit=problem.refit,
    )
    budget = _agreed_budget(loss_cache, problem, expected, process)
    picks, rounds = _pick(loss_cache, problem, budget)
    loss_cache.need_everywhere("Losses on all data", chain(picks), loss_cache.unhealed)
    searched = dict(loss_cache.spent)
    fits = _fits(loss_cache, problem, picks, watcher) if settings.fit else []
    problem.scorer.plain()
    plan = Plan.of(document_of(problem, loss_cache, picks, rounds, searched, fits, responses))
    if folder is not None and process.is_main:
        plan.save(folder)
        (folder / PROGRESS).unlink(missing_ok=True)
    process.wait()
    return plan


def estimate(
    model: str | Path | PreTrainedModel,
    data: Any,
    blocks: int | None = None,
    *,
    tokenizer: Any = None,
    heldout: Any = None,
    **options: Any,
) -> Estimate:
    """Upper bounds of the cost of `search` with these arguments: forward passes, FLOPs, seconds by a timed batch."""
    settings = layered(SearchSettings, {"blocks": blocks, **options})
    opened = {"tokenizer": tokenizer, "heldout": heldout}
    with processes() as process, prepared(model, data, settings, process, **opened) as problem:
        return estimate_search(problem, process)


def _agreed_budget(
    loss_cache: LossCache, problem: SearchProblem, expected: Estimate, process: Processes
) -> float | None:
    """FLOPs that the search may spend; a budget in time is converted once and stays the same after a restart."""
    budget = budget_of(problem.settings, expected.pace * process.world)
    (limit,) = loss_cache.task({"budget": lambda: budget}, lambda _: (0, 0.0), Limit)
    timed = parse_budget(problem.settings.budget)[1] is not None
    if limit != budget and not (timed and limit is not None) and loss_cache.path is not None:
        raise damaged(loss_cache.path, f"tasks: the budget is {limit}, and the search has {budget}")
    check_budget(problem, expected, limit)
    return limit


def _pick(loss_cache: LossCache, problem: SearchProblem, budget: float | None) -> tuple[list[int], list[Round]]:
    """Layers in the order of removal, and the record of each choice."""
    settings, blocks = problem.settings, problem.blocks
    if settings.search == "greedy":
        return eliminate(loss_cache, blocks, confidence=settings.confidence, budget=budget)
    if settings.search == "exact":
        return exact(loss_cache, blocks, confidence=settings.confidence)
    picks = rank(loss_cache, settings.search, blocks, seed=settings.seed, given=settings.given)
    return picks, []


def _fits(loss_cache: LossCache, problem: SearchProblem, picks: Sequence[int], watcher: Watcher) -> list[Any]:
    """The scalars of the plan, and of the model with nothing skipped."""
    options = fit_options(problem.settings)

    def fitted(variant: Variant) -> dict[str, Any]:
        result = fit(problem.scorer, variant, problem.examples.train, problem.batches, options, watcher)
        names = [name for name in StoredFit.model_fields if name != "scalars"]
        return {"scalars": result.scalars.as_dict(), **{name: getattr(result, name) for name in names}}

    work = {"fit healed": lambda: fitted(Variant(picks)), "fit control": lambda: fitted(BASE)}
    return loss_cache.task(work, lambda result: (result["forwards"], result["flops"]), StoredFit)


def _finished(folder: Path | None, problem: SearchProblem, resume: bool, process: Processes) -> Plan | None:
    """The plan in the folder, if this search has already finished."""
    if folder is None or not process.agree((folder / FILE).exists()):
        return None
    if not resume:
        raise FulldepthError(f"{folder} already holds a {FILE}. Choose another output folder.")
    plan = Plan.load(folder)
    expected = problem.hash, problem.examples.meta["hash"], problem.noted_settings
    if (plan.model.hash, plan.data["hash"], plan.cost.get("settings")) != expected:
        raise FulldepthError(f"{folder} holds the plan of another search. Choose another output folder.")
    if process.is_main:
        (folder / PROGRESS).unlink(missing_ok=True)
    return plan
