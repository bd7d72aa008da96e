"""Findings on the page: cards with numbers, and the opening sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulldepth.reporting.phrases import figure_of, plus_minus, short

Entry = Mapping[str, Any]
"""A `Finding` as stored in the document."""
HEADLINES = {
    "validation_loss": ("Validation loss", "at the last evaluation"),
    "train_loss": ("Training loss", "since the evaluation before"),
    "zeta_L": ("Jump of the last layer", "ζ of layer L"),
    "zeta_L-1": ("Jump over the last two layers", "ζ of layer L − 1"),
    "zeta_L-2": ("Jump over the last three layers", "ζ of layer L − 2"),
    "last_layer_displacement": ("Displacement of the last layer", "Ψ of layer L"),
    "mean_coherence": ("Mean coherence", "over layers"),
    "median_saturation": ("Median saturation layer", "half of all have settled"),
    "effective_depth": ("Effective depth", "layers needed"),
    "matched_cosine": ("Cosine of matched pairs", "an image and its own text"),
    "average_precision": ("Average precision", "at the last layer"),
    "time_per_step": ("Time per step", ""),
    "throughput": ("Tokens per second", "since the evaluation before"),
    "elapsed": ("Training time", ""),
    "peak_memory": ("Peak memory", ""),
    "chosen_threshold": ("Chosen threshold", "on other data"),
    "best_threshold": ("Best threshold", "of those given"),
    "speedup": ("Speed-up", "over the full model"),
    "acceptance": ("Accepted drafts", "share of drafted tokens"),
    "tokens": ("New tokens", ""),
    "tokens_per_second": ("Tokens per second", "after the prompt"),
    "theoretical_speedup": ("Speed-up in theory", "by computed layers"),
}
"""Name in `results.json` -> title and symbol (or subtitle) of the card; in the order of the cards."""


@dataclass(frozen=True)
class Shown:
    """A finding as a page shows it."""

    entry: Entry
    card: tuple[str, str, str, str] | None = None
    """Name, symbol, digits and unit on its card; None if it has no card."""
    later: bool = False
    """Whether its sentence is folded, after the opening sentences."""
    prefix: str = ""
    """Subject of the sentence if the page shows several."""


WITHOUT_CARD = ("cosine_cka_order", "score ", "earliest_exit ")
"""Beginnings of the names of findings without a card; of tasks, a table has the numbers."""


def with_cards(
    headline: Mapping[str, Entry], layers: object = None, stacks: Mapping[str, object] | None = None
) -> list[Shown]:
    """All findings in the order of the cards; unknown names come last and are shown as they are.

    `layers` is L of the model, `stacks` that of each stack by name.
    """
    shown = []
    for name in dict.fromkeys([*(known for known in HEADLINES if known in headline), *headline]):
        depth = (stacks or {}).get(name.partition(":")[0], layers)
        card = None if name.startswith(WITHOUT_CARD) else (*_titled(name), *figure_of(headline[name], depth))
        shown.append(Shown(headline[name], card))
    return shown


def _titled(name: str) -> tuple[str, str]:
    """Title and symbol of a card.

    `NAME_OTHER` is the number `NAME` of something else, such as a rule, and `STACK:NAME` that of one stack.
    """
    stack, _, own = name.rpartition(":")
    if own in HEADLINES:
        title, symbol = HEADLINES[own]
        return (f"{short(stack, 30).capitalize()}: {title[0].lower()}{title[1:]}" if stack else title), symbol
    base = next((known for known in HEADLINES if name.startswith(f"{known}_")), None)
    if base is None:
        return short(name, 60).replace("_", " "), ""
    return HEADLINES[base][0], short(name.removeprefix(f"{base}_"), 60)


def cards(findings: Sequence[Shown]) -> list[dict[str, str]]:
    """`name`, `symbol`, `digits`, `unit` and `error` of each card."""
    return [
        dict(zip(("name", "symbol", "digits", "unit", "error"), (*shown.card, plus_minus(shown.entry)), strict=True))
        for shown in findings
        if shown.card
    ]


def sentences(findings: Sequence[Shown]) -> tuple[list[str], list[str]]:
    """The opening sentences and the folded ones; none is folded if all are marked as later."""
    marked = [
        (shown.later, shown.prefix + short(shown.entry["sentence"], 600))
        for shown in findings
        if shown.entry.get("sentence")
    ]
    texts = [text for _, text in marked]
    first = [text for later, text in marked if not later] or texts
    return first, [text for text in texts if text not in first]
