"""A plan as a result folder.

Rows, with the columns `removed` (blocks) and `state` (`original`, `skipped`, `healed`, `scalars_only`): `loss` after
every removal, healed, and of the control; `influence` (`cosine`), `angle` (`groups`) or `sensitivity` (`taylor`) of
every candidate, by which a ranking chose. These alone where losses were not computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from fulldepth.core import shell
from fulldepth.core.errors import FulldepthError
from fulldepth.core.thresholds import BUSY
from fulldepth.core.uncertainty import FEWEST_DOCUMENTS, SIGNIFICANT
from fulldepth.data.examples import units
from fulldepth.hf.surgery import obstacle_to_removing
from fulldepth.results import Finding, Results, finite, provenance, stacked, tabulate
from fulldepth.skip.exports.fold import check_foldable
from fulldepth.skip.exports.formats import FORMATS, as_stock, check_format, format_for, holding_formats
from fulldepth.skip.exports.formats.checkpoint import carries_code
from fulldepth.skip.exports.formats.fast import Fast
from fulldepth.skip.goal import REACHED, fastest
from fulldepth.skip.plan import Plan, in_sample
from fulldepth.skip.problem import SearchProblem

KIND = "skip"
SCORES = {"cosine": ("influence", "1"), "groups": ("angle", "1"), "taylor": ("sensitivity", "nats")}
"""Search -> the measure of the scores that it ranks by, and its unit."""
FIFTH = 5
"""Rows of the data for each row that is held out."""
UNKNOWN = "A plan keeps no losses of single documents; fulldepth skip bench --heldout states the error."


def search_results(plan: Plan, problem: SearchProblem, folder: Path | None = None, data: Any = None) -> Results:
    """A plan as results.

    Args:
        plan: found by the search.
        problem: has the held-out data that it was scored with.
        folder: where the plan is.
        data: what the search was given; the advice on the next command repeats it where it is a name. Data that were
            only scored on are not repeated: healing is measured on rows that did not choose.
    """
    counts = plan.counts
    tokens = sum(example.predicted for example in problem.examples.heldout)
    control = plan.control_loss
    depth = problem.scorer.costs.num_layers
    chain: Sequence[float | None] = plan.losses or [None] * len(counts)
    losses: list[tuple[int | None, float | None, int, str]] = [
        (None, chain[0], 0, "original"),
        *((min(pick).layer, chain[at], counts[at], "skipped") for at, pick in enumerate(plan.picks, start=1)),
        (min(plan.picks[-1]).layer, plan.healed_loss, counts[-1], "healed"),
        (None, None if control is None else control.scalars_only, 0, "scalars_only"),
    ]
    tables = [
        tabulate([("loss", "model", layer, None, "mean", loss, tokens, "nats")], removed=removed, state=state)
        for layer, loss, removed, state in losses
        if loss is not None
    ]
    tables += scores_of(plan, tokens)
    warnings = list(plan.data.get("warnings", []))
    stopped = plan.cost.get("stopped_by_budget", [])
    warnings += [f"{line.capitalize()}; a higher budget may change its pick." for line in stopped]
    document = {
        **provenance(KIND, problem.settings.model_dump(), seed=plan.seed),
        **plan.about(problem.scorer.anatomy),
        "warnings": warnings,
        "headline": search_headline(plan, depth),
    }
    if folder is not None:
        known = data if data is None or isinstance(data, str | Path) else plan.data.get("name")
        if (command := _next_command(plan, problem, folder, str(known or "text.jsonl"))) is not None:
            document["next"] = command
    return Results(stacked(tables, removed="Int64", state="str"), dict(finite(document)))


def _next_command(plan: Plan, problem: SearchProblem, folder: Path, data: str) -> dict[str, str] | None:
    """The command that writes a checkpoint of a plan, healed if it can be, with the reason for it; None if none can.

    Args:
        plan: the plan.
        problem: the search's.
        folder: where the plan is.
        data: to heal on.
    """
    anatomy = problem.scorer.anatomy
    model = anatomy.model
    settings = problem.settings.model_dump()
    place = shell.arguments([folder, plan.model.name]) + shell.same_model(settings)
    text = shell.same_text(settings)
    is_foldable = False
    with suppress(FulldepthError):
        check_foldable(anatomy, plan)
        is_foldable = True
    if is_foldable and not problem.scorer.costs.zeroes and obstacle_to_removing(anatomy) is None:
        with suppress(FulldepthError):
            check_format(model, plan, FORMATS[format_for(plan, model)])
            command = f"fulldepth skip heal {place} --data {shell.word(data)}{text} --output healed/"
            return {"why": "heal what is left, and write a checkpoint:", "command": command}
    holding = []
    with suppress(FulldepthError):
        holding = holding_formats(model if carries_code(model) else as_stock(model), plan)
    if not is_foldable:
        holding = [name for name in holding if name == Fast.name and Fast().keeps_scalars(model)]
    written = next((name for name in ("layer", "folded", "fast") if name in holding), None)
    if written is None:
        return None
    command = f"fulldepth skip apply {place} --format {written} --output {written}/"
    return {"why": "write a checkpoint:", "command": command}


def scores_of(plan: Plan, tokens: int) -> list[Any]:
    """The table of the scores that a ranking chose by; empty for other searches."""
    scores = plan.cost.get("scores")
    if not isinstance(scores, dict):
        return []
    measure, unit = SCORES[plan.search]
    pairs = [(name.split(), score) for name, score in scores.items()]
    rows = [(measure, part, int(layer), None, "mean", score, tokens, unit) for (part, layer), score in pairs]
    return [tabulate(rows, removed=0, state="original")]


def search_headline(plan: Plan, depth: int) -> dict[str, Finding]:
    """The findings of a plan for a model of `depth` layers, by name."""
    order = ", ".join(map(str, plan.blocks))
    if not plan.losses:
        sentence = (
            f"{plan.what[0].upper()}{plan.what[1:]} (in the order {order}; the model has {depth} layers): removed by "
            f"the ranking {plan.search}. Losses were not computed; --losses computes them, and `fulldepth skip bench "
            "--heldout` measures exports."
        )
        unhealed = Finding(None, "nats", "No scalars were fitted: the model is not healed.")
        return {**target(plan), "loss_added": Finding(None, "nats", sentence), "loss_healed": unhealed}
    base = plan.losses[0]
    last = plan.losses[-1]
    sentence = (
        f"Removing {plan.what} (in the order {order}; the model has {depth} layers) changes the held-out loss by "
        f"{last - base:+.4f} nats, from {base:.4f} to {last:.4f}, not healed."
    )
    if caveat := in_sample(plan):
        sentence += f" {caveat}"
    findings = {**target(plan), "loss_added": Finding(last - base, "nats", sentence, no_standard_error=UNKNOWN)}
    if advice := more_data(plan):
        findings["sure_rounds"] = advice
    if plan.healed_loss is None or plan.control_loss is None:
        findings["loss_healed"] = Finding(None, "nats", "No scalars were fitted: the model is not healed.")
    else:  # no differences: a plan has no errors of them
        unhelped = "" if plan.healed_loss < last else " No epoch of training them lowered it."
        sentence = (
            f"Held-out loss with scalars: {plan.healed_loss:.4f}, without: {last:.4f}.{unhelped} Control, the same "
            f"training without removal: {plan.control_loss.scalars_only:.4f}, without scalars: {base:.4f}. "
            "Differences without a standard error are not interpreted; `fulldepth skip bench --heldout` measures "
            "exports with one."
        )
        findings["loss_healed"] = Finding(plan.healed_loss, "nats", sentence)
    return findings


def target(plan: Plan) -> dict[str, Finding]:
    """Findings of a search with a target, by the name of the target's setting; empty for a number of blocks."""
    stated = plan.cost.get("target")
    if not isinstance(stated, dict):
        return {}
    name = stated["of"]
    needed = stated["needed"]
    reached = stated["reached"]
    verdict = "" if needed is None else "Target reached: " if reached >= needed - REACHED else "Target missed: "
    if name in ("target_bytes", "target_cache"):
        what = "weights" if name == "target_bytes" else "cache"
        sentence = f"{verdict}{1 - reached:.1%} of the {what}' bytes are left; asked were {1 - needed:.1%}."
        return {name: Finding(100 * (1 - reached), "%", sentence)}
    speedup = fastest(reached)
    gone = f"the removed parts took {reached:.1%} of the time"
    if needed is None:
        sentence = f"By the times of its parts the model is {speedup:.3f} times as fast: {gone}."
    else:
        sentence = (
            f"{verdict}by the times of its parts the model is {speedup:.3f} times as fast; asked was "
            f"{1 / (1 - needed):.3f} ({gone}, {needed:.1%} were needed)."
        )
    if (other := stated.get("other_load", 0.0)) > BUSY:
        sentence += (
            f" Other programs used {other:.0%} of the processor while the parts were timed: search again on a quiet "
            "machine, or time the finished model with `fulldepth skip bench`."
        )
    return {name: Finding(speedup, "1", sentence)}


def more_data(plan: Plan) -> Finding | None:
    """How many rounds of a search were sure of their pick, and the held-out rows that would make more of them sure.

    A round whose margin is m nats with a standard error e on n rows tells its best two candidates apart on
    `n (2 e / m)^2` rows, if the margin is what it seems, and at least on `2 n`: the search's own test, which made the
    round unsure, is stricter than 2 standard errors. The rows that do so in half of the unsure rounds are advised.
    None if all rounds were sure.
    """
    unsure = plan.cost.get("unsure_rounds")
    rounds = plan.cost.get("rounds")
    if not unsure:
        return None
    count = len(plan.blocks)
    numbers = "" if len(unsure) == count else f" (number {', '.join(map(str, unsure))})"
    heldout = plan.data.get("heldout")
    about = heldout if isinstance(heldout, dict) else {}
    rows = "windows" if about.get("kind") == "text" else "rows"
    seen = f"{about['examples']} held-out {rows}" if "examples" in about else f"The held-out {rows}"
    sentence = f"{seen} do not tell the best two candidates apart in {len(unsure)} of {count} rounds{numbers}."
    enough = []
    for number in unsure:
        how = rounds[number - 1] if isinstance(rounds, list) else {}
        margin = how.get("margin") or 0.0
        error = how.get("standard_error")
        if error is None or margin <= 0:
            enough.append(math.inf)
        else:
            enough.append(how["sequences"] * max(2.0, (SIGNIFICANT * error / margin) ** 2))
    needed = median(enough)
    if math.isfinite(needed):
        digits = 10 ** max(0, math.floor(math.log10(max(needed, 1))) - 1)
        least = max(FEWEST_DOCUMENTS, digits * math.ceil(needed / digits))
        fifth = str(about.get("name", "")).startswith("a seeded fifth")
        total = f" (`--max-sequences {FIFTH * least}`)" if fifth else ""
        sentence += f" Use at least {least:,} {rows}{total}, which would tell them apart in half of these rounds."
    else:
        sentence += f" Use more {rows}, at least {FEWEST_DOCUMENTS} {units(plan.data)}."
    return Finding(count - len(unsure), "rounds", sentence)
