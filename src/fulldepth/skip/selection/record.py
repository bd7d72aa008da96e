"""The entries of `plan.json` from a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fulldepth.execution.scoring import DIVERGENCE, LOSS
from fulldepth.results import versions
from fulldepth.skip.in_sample import ENTRY, rows_of
from fulldepth.skip.plan import SCHEMA_VERSION
from fulldepth.skip.selection.elimination import Round, chain
from fulldepth.skip.selection.estimate import plain_flops, plain_forwards
from fulldepth.skip.selection.loss_cache import LossCache
from fulldepth.skip.selection.problem import SearchProblem

NOTED = ("losses", "epoch", "train_losses", "divergences")
"""Entries of a fit that a plan's cost keeps."""


def document_of(
    problem: SearchProblem,
    loss_cache: LossCache,
    picks: Sequence[int],
    rounds: Sequence[Round],
    searched: Mapping[str, float],
    fits: Sequence[Mapping[str, Any]],
    responses: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The entries of `plan.json`.

    Args:
        problem: the search problem.
        loss_cache: holds the losses of the plan.
        picks: layers in the order of their removal.
        rounds: record of each choice.
        searched: cost of the search, without fits.
        fits: of the scalars, and of the control; empty if none were fitted.
        responses: how the data's responses were generated.
    """
    settings = problem.settings
    healed, control = fits or (None, None)
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {
            "name": problem.checkpoint.name,
            "class": type(problem.checkpoint.model).__name__,
            "hash": problem.hash,
        },
        "granularity": settings.granularity,
        "criterion": settings.criterion,
        "search": settings.search,
        "blocks": list(picks),
        "losses": [loss_cache.mean(variant, LOSS) for variant in chain(picks)],
        "healed_loss": None if healed is None else healed["heldout_loss"],
        "control_loss": None if control is None else {"scalars_only": control["heldout_loss"]},
        "scalars": {} if healed is None else healed["scalars"],
        "data": {
            **problem.examples.meta,
            ENTRY: rows_of(problem.examples.heldout),
            **({"tokenizer": settings.tokenizer} if settings.tokenizer else {}),
            **({"responses": dict(responses)} if responses else {}),
        },
        "seed": settings.seed,
        "versions": versions(),
        "cost": {
            **_cost(problem, loss_cache, picks, rounds, searched),
            **({"fit": _fit_cost(loss_cache, searched, *fits)} if fits else {}),
            "settings": problem.noted_settings,
        },
    }


def _cost(
    problem: SearchProblem,
    loss_cache: LossCache,
    picks: Sequence[int],
    rounds: Sequence[Round],
    searched: Mapping[str, float],
) -> dict[str, Any]:
    """Cost of the search; FLOPs and forwards as one process would spend them."""
    shapes = [batch.shape for batch in problem.batches]
    plain = plain_flops(loss_cache.costs, picks, shapes)
    cost: dict[str, Any] = {
        **_spent(searched),
        "plain_forwards": plain_forwards(loss_cache.costs, len(picks)) * len(shapes),
        "plain_flops": plain,
        "share_of_plain": searched["flops"] / plain,
        "batch_size": problem.settings.batch_size,
        "chunks": len(problem.chunks),
    }
    if problem.settings.search in ("greedy", "exact"):
        cost["confidence"] = problem.settings.confidence
        cost["unsure_rounds"] = [number for number, how in enumerate(rounds, start=1) if not how.sure]
        cost["rounds"] = [asdict(how) for how in rounds]
        cost["stopped_by_budget"] = [f"round {n}: {r.stopped}" for n, r in enumerate(rounds, start=1) if r.stopped]
    if problem.settings.criterion == DIVERGENCE:
        cost["divergences"] = [loss_cache.mean(variant, DIVERGENCE) for variant in chain(picks)]
    return cost


def _fit_cost(
    loss_cache: LossCache, searched: Mapping[str, float], healed: Mapping[str, Any], control: Mapping[str, Any]
) -> dict[str, Any]:
    spent = {name: loss_cache.spent[name] - searched[name] for name in searched}
    fits = {"healed": healed, "control": control}
    return {**_spent(spent), **{name: {key: fit[key] for key in NOTED} for name, fit in fits.items()}}


def _spent(amounts: Mapping[str, float]) -> dict[str, Any]:
    return {
        "forwards": int(amounts["forwards"]),
        "flops": amounts["flops"],
        "seconds": round(amounts["seconds"], 3),
    }
