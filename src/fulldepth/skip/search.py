"""`search`: finds the blocks to remove, their order and the losses, and returns a `Plan`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, NonNegativeInt
from transformers import PreTrainedModel

from fulldepth.core.distributed import Processes, processes
from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.execution.flops import Costs, Shape, Variant
from fulldepth.execution.latency import OtherLoad
from fulldepth.execution.scoring import BASE, DIVERGENCE, LOSS, SCALED
from fulldepth.hf import Block, check_depth, is_offloaded, learning
from fulldepth.results import DOCUMENT, PAGE, Results, versions
from fulldepth.settings import Settings, layer
from fulldepth.settings.keywords import takes_settings
from fulldepth.settings.search import SearchSettings, seconds_of
from fulldepth.skip.elimination import Round, chain, eliminate, exchange
from fulldepth.skip.exports.formats import export_obstacle
from fulldepth.skip.fit import fit, fit_options
from fulldepth.skip.goal import Goal, goal_of, time_shares
from fulldepth.skip.loss_cache import PROGRESS, LossCache
from fulldepth.skip.outcome import KIND, search_results
from fulldepth.skip.own_text import names_own, with_own_text
from fulldepth.skip.plan import FILE, SCHEMA_VERSION, Factors, Loss, Plan, listing, name_of
from fulldepth.skip.problem import SearchProblem, open_for_search, stand_in
from fulldepth.skip.rankings import rank_blocks
from fulldepth.skip.responses import FILE as RESPONSES
from fulldepth.skip.responses import Sampling, respond

SHARE = 0.25
"""Most FLOPs of the exchanges of a search with a target, relative to the search."""
RUN_SETTINGS = "settings.yaml"
"""File of a training run's folder, in which results have the same names."""


class StoredFit(Settings):
    """A `FitResult` as plain values."""

    scalars: Factors
    heldout_loss: Loss
    losses: list[FiniteFloat]
    epoch: NonNegativeInt
    train_losses: list[FiniteFloat]


@takes_settings(SearchSettings, positional={"blocks": 2})
def search(
    model: str | Path | PreTrainedModel,
    data: Any,
    *,
    settings: SearchSettings,
    watcher: Watcher,
    tokenizer: Any = None,
    heldout: Any = None,
    output: str | Path | None = None,
    responses: int | None = None,
    temperature: float = 0.0,
    max_new_tokens: int = 256,
    resume: bool = False,
) -> Plan:
    """Find the blocks whose removal costs least on held-out data, then train scalars; runs in parallel under torchrun.

    Args:
        model: checkpoint folder, Hub name, or a loaded model (unchanged on return).
        data: any data that `read_examples` reads (pairs, chats, plain text, `corpus:builtin`), or `Examples`; with
            `responses`, rows with prompts to respond to. `own` is text that the unmodified model writes first (see
            `fulldepth.skip.own_text`), and several sources may be mixed: `own=0.7,file.jsonl=0.3`.
        settings: fields of `SearchSettings` as keywords, or an instance.
        watcher: receives progress and messages.
        tokenizer: required for a loaded model, unless data are `Examples`; None = the one saved with the checkpoint.
        heldout: data of which all rows score, of the same kinds; None = a random fifth of `data`. Without scalars
            (`fit=False`) nothing else is read of `data`, which may then be None.
        output: folder for `plan.json`, the results of `outcome`, `responses.jsonl` or `own.jsonl`, and `progress.json`
            while the search runs.
        responses: number of prompts that the unmodified model responds to first; None = the data hold responses.
        temperature: of these responses, 0 = greedy.
        max_new_tokens: most tokens of a response.
        resume: continue an interrupted search; the plan is the same as without interruption.

    Returns:
        The blocks in the order of their removal, with scalars and held-out losses; `export` writes its model.

    Raises:
        FulldepthError: if the model, data or options are not valid, or the output folder holds other files.
    """
    folder = None if output is None else Path(output)
    if responses is not None and (responses < 1 or folder is None):
        raise FulldepthError(f"Responses need an output folder and a number of at least 1, got {responses}.")
    if responses is not None and data is None:
        raise FulldepthError("The prompts to respond to are those of --data, which is missing.")
    if responses is not None and names_own(data):
        raise FulldepthError("The model's own text has its own answers; leave out --generate-responses.")
    drawn = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    sampling = layer(Sampling, {**drawn, "seed": settings.seed, "batch_size": settings.batch_size})
    sampling.check_effect(generate_responses=responses)
    with learning(), processes() as process, process.holding(folder):
        if folder is not None:
            process.first(partial(check_folder, folder, KIND, resume))
        with open_for_search(model, settings, process, tokenizer) as subject:
            check_depth(subject.anatomy)  # no export could hold the plan
            tried = process.is_main and not is_offloaded(subject.model) and subject.anatomy.not_serial is None
            if tried:
                obstacle = export_obstacle(subject.model, settings.granularity, fit=settings.fit)
                if obstacle is not None:
                    watcher.say(obstacle)
            if responses is not None or names_own(data):
                with SearchProblem.prepare(subject, stand_in(subject), settings):
                    pass  # what the search cannot do is refused before the model writes, which takes long
            generation = None
            if responses is not None and folder is not None:
                answer = partial(respond, subject, data, responses, folder, sampling, watcher, chat=settings.chat)
                generation = process.first(answer)
                data = str(folder / RESPONSES)
            read = data
            if names_own(data):
                read = process.first(partial(with_own_text, data, subject, settings, folder, watcher, heldout))
            with SearchProblem.prepare(subject, read, settings, heldout=heldout) as problem:
                plan = search_with(problem, process, watcher, output=folder, resume=resume, responses=generation)
            complete = folder is not None and all((folder / name).exists() for name in (DOCUMENT, PAGE))
            if folder is not None and process.is_main and not complete:
                search_results(plan, problem, folder, data).save(folder, watcher=watcher)
        process.wait()
    return plan


def check_folder(folder: Path, kind: str, resume: bool) -> None:
    """Refuse a folder with files of anything but a search or curve (`kind` of results) to resume."""
    for name in (RUN_SETTINGS,) if resume else (FILE, DOCUMENT, RUN_SETTINGS):
        if (folder / name).exists():
            raise FulldepthError(f"{folder} already holds a {name}. Choose another output folder.")
    results = folder / DOCUMENT
    if results.exists() and (Results.load(folder).meta.get("kind") != kind or not (folder / FILE).exists()):
        raise FulldepthError(f"{folder} holds other results. Choose another output folder.")


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
    folder = None if output is None else Path(output)
    settings = problem.settings
    scorer = problem.scorer
    identity = problem.subject.identity
    if folder is not None and process.agree((folder / FILE).exists()):
        return _finished(folder, problem, process)

    def fitted(variant: Variant, *, candidate: bool = False) -> tuple[dict[str, Any], int, float]:
        fitting = fit_options(settings, candidate=candidate)
        heldout = () if candidate else problem.batches
        result = fit(scorer, variant, problem.examples.train, heldout, fitting, None if candidate else watcher)
        names = () if candidate else ("heldout_loss", "losses", "epoch", "train_losses")
        values = {"scalars": result.scalars.as_dict(), **{name: getattr(result, name) for name in names}}
        return values, result.forwards, result.flops

    loss_cache = LossCache(
        scorer,
        problem.chunks,
        process,
        criterion=settings.criterion,
        path=None if folder is None else folder / PROGRESS,
        fingerprint={**identity, "data": problem.examples.meta["hash"], **problem.noted_settings},
        resume=resume,
        watcher=watcher,
        refit=partial(fitted, candidate=True),
    )

    def timed() -> tuple[dict[str, float], float]:
        kind = Annotated[dict[str, FiniteFloat], Field(min_length=1)]
        load = OtherLoad()
        (shares,) = loss_cache.task({"time shares": lambda: (time_shares(scorer, settings, watcher), 0, 0.0)}, kind)
        other = load.share()  # asked here, by all processes, because one of them has timed
        (used,) = loss_cache.task({"other load": lambda: (other, 0, 0.0)}, float)
        return shares, used

    say_costs(problem, watcher)
    goal = goal_of(loss_cache, settings, timed)
    scores: dict[Block, float] = {}
    picks, rounds, exchanges = _choose(loss_cache, goal, settings, scores)
    scored = {"scores": {f"{part} {number}": score for (number, part), score in scores.items()}} if scores else {}
    if not picks:
        limit = "" if settings.max_loss is None else f" within {settings.max_loss:g} nats"
        loss_cache.discard()
        raise FulldepthError(f"No block can be removed{limit}.")
    removed = chain(picks)[-1]
    if settings.target != "max_loss" and goal.left(removed):
        watcher.say(f"The search ended at {goal.progress(removed)}: no candidate is left.")
    measured_chain = chain(picks) if settings.computes_losses else []
    loss_cache.need_everywhere("Losses on all data", measured_chain, loss_cache.unhealed)
    searched = dict(loss_cache.spent)
    work = {"fit healed": partial(fitted, removed), "fit control": partial(fitted, BASE)}
    fits = loss_cache.task(work, StoredFit) if settings.fit else []
    healed, control = fits or (None, None)
    scorer.plain()
    plan = Plan.of(
        {
            "schema_version": SCHEMA_VERSION,
            "model": {
                "name": problem.subject.checkpoint.name,
                "class": problem.subject.kind,
                "hash": problem.subject.hash,
            },
            "granularity": settings.granularity,
            "criterion": settings.criterion,
            "search": settings.search,
            "blocks": [name_of(pick, settings.granularity) for pick in picks],
            "losses": [loss_cache.mean(variant, LOSS) for variant in measured_chain],
            "healed_loss": healed and healed["heldout_loss"],
            "control_loss": control and {"scalars_only": control["heldout_loss"]},
            "scalars": healed["scalars"] if healed else {},
            "data": {
                **problem.examples.meta,
                **listing(problem.examples.heldout),
                **({"tokenizer": settings.tokenizer} if settings.tokenizer else {}),
                **({"responses": dict(responses)} if responses else {}),
            },
            "seed": settings.seed,
            "versions": versions(),
            "cost": _cost(problem, loss_cache, goal, picks, rounds, exchanges, searched, fits) | scored,
        }
    )
    if folder is not None and process.is_main:
        plan.save(folder)
    loss_cache.discard()
    process.wait()
    return plan


def _choose(
    loss_cache: LossCache, goal: Goal, settings: SearchSettings, scores: dict[Block, float]
) -> tuple[list[Variant], list[Round], list[dict[str, Any]]]:
    """Choose the blocks to remove, in order; with the rounds of an elimination and the exchanges after it.

    The scores of a ranking are put into `scores`.
    """
    if settings.search not in ("greedy", "exact"):
        given = settings.given
        return rank_blocks(loss_cache, settings.search, goal, seed=settings.seed, given=given, scores=scores), [], []
    picks, rounds = eliminate(
        loss_cache,
        goal,
        drop=settings.search == "greedy",
        confidence=settings.confidence,
        seconds=math.inf if settings.budget is None else seconds_of(settings.budget),
        pool=settings.pool,
    )
    share = settings.exchanges if settings.exchanges is not None else SHARE if settings.target else 0.0
    if not share or settings.criterion == SCALED:
        return picks, rounds, []
    flops = share * loss_cache.spent["flops"]
    picks, exchanges = exchange(loss_cache, goal, picks, flops=flops, confidence=settings.confidence)
    return picks, rounds, exchanges


def _finished(folder: Path, problem: SearchProblem, process: Processes) -> Plan:
    """The plan of this search, which has finished before."""
    plan = Plan.load(folder)
    identity = problem.subject.identity
    configuration = plan.cost.get("configuration", identity["configuration"])  # earlier versions do not state it
    expected = identity, problem.examples.meta["hash"], problem.noted_settings
    stored = {"model": plan.model.hash, "configuration": configuration}, plan.data["hash"], plan.cost.get("settings")
    if stored != expected:
        raise FulldepthError(f"{folder} holds the plan of another search. Choose another output folder.")
    if process.is_main:
        (folder / PROGRESS).unlink(missing_ok=True)
    return plan


def _cost(
    problem: SearchProblem,
    loss_cache: LossCache,
    goal: Goal,
    picks: Sequence[Variant],
    rounds: Sequence[Round],
    exchanges: Sequence[Mapping[str, Any]],
    searched: Mapping[str, float],
    fits: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The entry `cost` of `plan.json`: what the search (`searched`) and the fits took, and how blocks were chosen.

    Of a search with a target also what was asked and reached, and the gain of every block.
    """
    settings = problem.settings
    plain = plain_flops(loss_cache.costs, picks, [batch.shape for batch in problem.batches])
    cost: dict[str, Any] = {
        **_spent(searched),
        "plain_flops": plain,
        "share_of_plain": searched["flops"] / plain,
        "batch_size": settings.batch_size,
        "chunks": len(problem.chunks),
    }
    if rounds:
        cost["confidence"] = settings.confidence
        cost["unsure_rounds"] = [number for number, how in enumerate(rounds, start=1) if not how.sure]
        cost["rounds"] = [asdict(how) for how in rounds]
        cost["stopped_by_budget"] = [f"round {n}: {r.stopped}" for n, r in enumerate(rounds, start=1) if r.stopped]
    if settings.criterion == DIVERGENCE:
        cost["divergences"] = [loss_cache.mean(variant, DIVERGENCE) for variant in chain(picks)]
    if fits:
        cost["fit"] = _spent({name: loss_cache.spent[name] - amount for name, amount in searched.items()}) | {
            name: {key: record[key] for key in ("losses", "epoch", "train_losses")}
            for name, record in zip(("healed", "control"), fits, strict=True)
        }
    cost["settings"] = problem.noted_settings
    cost["configuration"] = problem.subject.identity["configuration"]
    if goal.target != "blocks":
        gains = [goal.gain(pick) for pick in picks]
        needed = None if math.isinf(goal.needed) else goal.needed
        cost["target"] = {"of": goal.target, "needed": needed, "reached": sum(gains), "gains": gains, **goal.notes}
    return cost | ({"exchanges": exchanges} if exchanges or "target" in cost else {})


def plain_flops(costs: Costs, picks: Sequence[Variant], shapes: Sequence[Shape]) -> float:
    """FLOPs of the loop that runs the model once for every candidate of every round, and once unmodified.

    Args:
        costs: of the model.
        picks: blocks in the order of removal; the plain loop does not compute skipped blocks either.
        shapes: of all batches.
    """
    variants = [BASE, *(v for before in chain(picks)[:-1] for v in costs.candidates(before))]
    return sum(costs.whole(variant, shape, every_position=True) for shape in shapes for variant in variants)


def say_costs(problem: SearchProblem, watcher: Watcher) -> None:
    """Say what is special about a search of layers that read more than the one before: its plan's use, and its cost.

    The cost is the most forward passes without exchanges; each runs one variant on one batch.
    """
    costs = problem.scorer.costs
    settings = problem.settings
    kind = problem.subject.kind
    if costs.zeroes:
        watcher.say(
            f"In a {kind} removed branches are set to zero: {problem.scorer.anatomy.not_serial}. The plan can be "
            "exported as folded only, which saves no time and no memory."
        )
    if costs.whole_passes:
        candidates = len(costs.candidates(BASE))
        removals = min(settings.num_blocks or len(costs.able), len(costs.able))
        rounds = {"greedy": removals, "exact": removals, "one-shot": 1}.get(settings.search, 0)
        scored = sum(candidates - removed for removed in range(rounds))
        watcher.say(
            f"The layers of a {kind} cannot be run one by one: every variant takes a forward pass of its own, at most "
            f"{len(problem.batches) * (scored + removals + 1):,} passes over batches of up to "
            f"{settings.batch_size} sequences."
        )


def _spent(amounts: Mapping[str, float]) -> dict[str, Any]:
    return {**amounts, "forwards": int(amounts["forwards"]), "seconds": round(amounts["seconds"], 3)}
