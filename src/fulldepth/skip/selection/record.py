"""A search in the words of `plan.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fulldepth.execution.flops import Variant
from fulldepth.execution.scoring import DIVERGENCE
from fulldepth.results import versions
from fulldepth.skip.plan import SCHEMA_VERSION
from fulldepth.skip.selection.elimination import Round
from fulldepth.skip.selection.estimate import plain_flops, plain_forwards
from fulldepth.skip.selection.loss_cache import LossCache
from fulldepth.skip.selection.problem import SearchProblem


def cost_of(
    loss_cache: LossCache,
    problem: SearchProblem,
    picks: Sequence[int],
    rounds: Sequence[Round],
    searched: Mapping[str, float],
    healed: dict[str, Any] | None,
    control: dict[str, Any] | None,
) -> dict[str, Any]:
    """What the plan says of its making; FLOPs and forwards as one process would spend them."""
    shapes = [batch.shape for chunk in problem.chunks for batch in chunk]
    plain = plain_flops(loss_cache.costs, picks, shapes)
    cost: dict[str, Any] = {
        "forwards": int(searched["forwards"]),
        "flops": searched["flops"],
        "seconds": round(searched["seconds"], 3),
        "plain_forwards": plain_forwards(loss_cache.costs, len(picks)) * len(shapes),
        "plain_flops": plain,
        "share_of_plain": searched["flops"] / plain,
        "batch_size": problem.settings.batch_size,
        "chunks": len(problem.chunks),
    }
    if problem.settings.search in ("greedy", "exact"):
        cost["confidence"] = problem.settings.confidence
        cost["unsure_rounds"] = [number for number, found in enumerate(rounds, start=1) if not found.sure]
        cost["rounds"] = [found.document() for found in rounds]
        cost["stopped_by_budget"] = [f"round {n}: {r.stopped}" for n, r in enumerate(rounds, start=1) if r.stopped]
    if problem.settings.criterion == DIVERGENCE:
        cost["divergences"] = [loss_cache.mean(DIVERGENCE, Variant(picks[:n])) for n in range(len(picks) + 1)]
    if healed is not None and control is not None:
        spent = {name: loss_cache.spent[name] - searched[name] for name in searched}
        kept = ("losses", "epoch", "train_losses", "divergences")
        cost["fit"] = {
            "forwards": int(spent["forwards"]),
            "flops": spent["flops"],
            "seconds": round(spent["seconds"], 3),
            "healed": {name: healed[name] for name in kept},
            "control": {name: control[name] for name in kept},
        }
    return cost


def document_of(
    problem: SearchProblem,
    of: Mapping[str, Any],
    picks: Sequence[int],
    losses: Sequence[float],
    healed: dict[str, Any] | None,
    control: dict[str, Any] | None,
    cost: dict[str, Any],
    responses: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The entries of `plan.json`."""
    settings = problem.settings
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
        "losses": list(losses),
        "healed_loss": None if healed is None else healed["heldout_loss"],
        "control_loss": None if control is None else {"scalars_only": control["heldout_loss"]},
        "scalars": {} if healed is None else healed["scalars"],
        "data": {
            **problem.examples.meta,
            **({"tokenizer": settings.tokenizer} if settings.tokenizer else {}),
            **({"responses": dict(responses)} if responses else {}),
        },
        "seed": settings.seed,
        "versions": versions(),
        "cost": {**cost, "settings": {k: v for k, v in of.items() if k not in ("model", "data")}},
    }
