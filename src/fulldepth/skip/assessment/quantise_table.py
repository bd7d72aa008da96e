"""Measurements of combinations of quantisation and removal, as tidy rows and findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from fulldepth.execution.latency import PHASES
from fulldepth.execution.memory import parameter_bytes
from fulldepth.hf import Anatomy, skipping
from fulldepth.hf.scalars import Scalars
from fulldepth.results import Finding, tabulate
from fulldepth.skip.assessment.outcome_headline import PARTS, nats
from fulldepth.skip.assessment.tables import busy, compared, joined, ratio_rows, spread, with_differences
from fulldepth.skip.plan import Plan, plan_scalars
from fulldepth.skip.selection.elimination import Difference, compare
from fulldepth.uncertainty import median_ratio

ORIGINAL, SKIPPED, QUANTISED = "original", "skipped", "quantised"
FIRST, SECOND = "quantised, then skipped", "skipped, then quantised"
NAMES = (ORIGINAL, SKIPPED, QUANTISED, FIRST, SECOND)


@dataclass
class Combination:
    """One of the five models."""

    name: str
    anatomy: Anatomy
    plan: Plan | None
    """Its skipped blocks; None = none."""
    sums: np.ndarray
    """[N] summed loss of each held-out sequence, in nats; the same sequences for all."""
    tokens: np.ndarray
    """[N] tokens that count."""
    documents: np.ndarray
    """[N] the document of each sequence."""
    times: dict[str, list[float]] = field(default_factory=dict)
    """Phase -> seconds of each round."""
    other_load: float = 0.0
    """Share of the processor that other programs used during the rounds."""

    def document(self) -> dict[str, Any]:
        """Its entry in `results.json`."""
        model, plan = self.anatomy.model, self.plan
        return {
            "label": self.name,
            "baseline": self.name == ORIGINAL,
            "model": {
                "class": type(model).__name__,
                "num_layers": self.anatomy.num_layers,
                "dtype": str(model.dtype).removeprefix("torch."),
                "quantised": self.name not in (ORIGINAL, SKIPPED),
            },
            "granularity": None if plan is None else plan.granularity,
            "blocks": None if plan is None else plan.blocks,
            "healed": plan is not None and plan.healed_loss is not None,
        }

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.sums.sum() / self.tokens.sum())

    def against(self, other: Combination) -> Difference:
        """Its loss minus that of another model, on the same tokens."""
        return compare(self.sums - other.sums, self.tokens, self.documents, len(self.tokens))

    @property
    def scalars(self) -> Scalars | None:
        """Its factors; None if it has none."""
        return plan_scalars(self.plan, self.anatomy)

    def switched(self) -> AbstractContextManager[Any]:
        """Its blocks skipped, inside `with`."""
        if self.plan is None:
            return nullcontext()
        return skipping(self.anatomy, self.plan.blocks, self.plan.granularity, self.scalars)

    @property
    def bytes(self) -> int:
        """Bytes in memory of all weights that are not skipped, and of the scalars."""
        scalars = self.scalars
        extra = 0 if scalars is None else parameter_bytes(scalars)
        return parameter_bytes(self.anatomy.model) - removed_bytes(self.anatomy, self.plan) + extra


def removed_bytes(anatomy: Anatomy, plan: Plan | None) -> int:
    """Bytes of the weights that a plan skips: those that `export` in the format `fast` omits."""
    removed = nn.ModuleList()
    if plan is None:
        return 0
    for layer in plan.blocks:
        if plan.granularity == "layer":
            removed.append(anatomy.blocks[layer - 1])
            continue
        shared = {anatomy.part(layer, f"{part}_norm") for part in PARTS if part != plan.granularity}
        parts = (anatomy.part(layer, role) for role in PARTS[plan.granularity])
        removed.extend(module for module in parts if module is not None and module not in shared)
    return parameter_bytes(removed)


def table_of(combinations: Sequence[Combination]) -> pd.DataFrame:
    """Rows with the columns `model` and `difference` (to the original, in the row's unit)."""
    tables = []
    for combination in combinations:
        rows: list[tuple[Any, ...]] = [
            ("loss", "model", None, None, "mean", combination.loss, int(combination.tokens.sum()), "nats"),
            ("parameter_bytes", "model", None, None, "value", combination.bytes, None, "bytes"),
        ]
        for phase in PHASES:
            rows += spread(f"{phase}_time", phase, combination.times[phase], "s")
            if combination.name != ORIGINAL and busy(combination.other_load) is None:
                ratio = median_ratio(combination.times[phase], combinations[0].times[phase])
                rows += ratio_rows(phase, ratio, len(combination.times[phase]))
        if combination.name == ORIGINAL:
            rows.append(("other_load", "model", None, None, "value", combination.other_load, None, "1"))
        tables.append(tabulate(rows, model=combination.name))
    return with_differences(joined(tables, model="str"), ORIGINAL)


def headline(combinations: Sequence[Combination]) -> dict[str, Finding]:
    """Findings: the difference between the orders, and cost and savings of every combination."""
    by_name = {combination.name: combination for combination in combinations}
    not_compared = busy(combinations[0].other_load)
    times = {} if not_compared is None else {"times": not_compared}
    return {"order": _order(by_name), **times} | {name: _cost(by_name[name], by_name[ORIGINAL]) for name in NAMES[1:]}


def _order(by_name: dict[str, Combination]) -> Finding:
    """The loss of one order minus that of the other."""
    first, second = by_name[FIRST], by_name[SECOND]
    assert first.plan is not None
    assert second.plan is not None
    gap = first.against(second)
    if set(first.plan.blocks) == set(second.plan.blocks):
        which = f"both remove layers {_listed(sorted(first.plan.blocks))}"
    else:
        which = f"they remove layers {_listed(first.plan.blocks)} and {_listed(second.plan.blocks)}"
    verdict = f"{_unclear(gap)} between the orders"
    if gap.measurable:
        verdict = f"Quantising {'first' if gap.mean < 0 else 'last'} is better by {_size(gap)}"
    sentence = (
        f"{verdict}: quantise, then skip ends at {first.loss:.4f} nats, skip, then quantise at {second.loss:.4f}; "
        f"{which}."
    )
    return _finding(gap, sentence)


def _finding(gap: Difference, sentence: str) -> Finding:
    """A difference of losses with its error."""
    if math.isfinite(gap.free_error):
        return Finding(gap.mean, "nats", sentence, gap.free_error)
    return Finding(gap.mean, "nats", sentence, no_standard_error=f"{gap.documents} held-out documents")


def _size(gap: Difference) -> str:
    """`0.0213 nats ± 0.0041`, with the standard error."""
    return f"{nats(abs(gap.mean))} ± {gap.free_error:.4f}"


def _unclear(gap: Difference) -> str:
    """`No measurable difference (at most 0.0180 nats)`."""
    if math.isinf(gap.reach):
        return f"No verdict from {gap.documents} held-out document{'' if gap.documents == 1 else 's'} on the difference"
    return f"No measurable difference (at most {nats(abs(gap.mean) + gap.reach)})"


def _cost(combination: Combination, original: Combination) -> Finding:
    """Loss, size and times compared with the original's."""
    added, plan = combination.against(original), combination.plan
    healed = "" if plan is None else ", healed" if plan.healed_loss is not None else ", not healed"
    loss = f"{_size(added)} {'more' if added.mean > 0 else 'less'} loss than the original"
    loss = loss if added.measurable else f"{_unclear(added).lower()} in loss to the original"
    times = ""
    for phase in PHASES if busy(original.other_load) is None else ():
        ratio = median_ratio(combination.times[phase], original.times[phase])
        times += f"; {phase} time: {compared(ratio, len(original.times[phase]))}"
    sentence = (
        f"{combination.name[0].upper()}{combination.name[1:]}: {loss} ({combination.loss:.4f}{healed}), "
        f"{combination.bytes / original.bytes:.1%} of its parameter bytes{times}."
    )
    return _finding(added, sentence)


def _listed(blocks: Sequence[int]) -> str:
    return ", ".join(map(str, blocks))
