"""Measurements and comparisons on a page: findings, model and data, tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from fulldepth.reporting.phrases import (
    figure_of,
    plus_minus,
    quantity,
    short,
    visible,
)
from fulldepth.reporting.source import PageSource
from fulldepth.reporting.tables import Meta, Table, across, texts

WITHOUT_CARD = ("cosine_cka_order", "score ", "earliest_exit ")
"""Beginnings of the names of findings without a card; of tasks, a table has the numbers."""


@dataclass(frozen=True)
class Shown:
    """A finding as a page shows it."""

    entry: Meta
    card: tuple[str, str, str, str] | None = None
    """Name, symbol, digits and unit on its card; None if it has no card."""
    prefix: str = ""
    """Subject of the sentence if the page shows several."""


def findings(entry: Meta, source: PageSource) -> list[Shown]:
    """The findings of a measurement, a run, or a step, in the order of the cards; unknown names come last."""
    model = entry.get("model") or source.meta.get("model") or {}
    stacks = {str(stack["name"]): stack.get("num_layers") for stack in source.meta.get("stacks") or []}
    headline = entry.get("headline") or {}
    known = texts()["headlines"]
    shown = []
    for name in dict.fromkeys([*(name for name in known if name in headline), *headline]):
        depth = stacks.get(name.partition(":")[0], model.get("num_layers"))
        card = None if name.startswith(WITHOUT_CARD) else (*_titled(name), *figure_of(headline[name], depth))
        shown.append(Shown(headline[name], card))
    return shown


def _titled(name: str) -> tuple[str, str]:
    """Title and symbol of a card.

    `NAME_OTHER` is the number `NAME` of something else, such as a rule, and `STACK:NAME` that of one stack.
    """
    headlines = texts()["headlines"]
    stack, _, own = name.rpartition(":")
    if own in headlines:
        title, symbol = headlines[own]
        return (f"{short(stack, 30).capitalize()}: {title[0].lower()}{title[1:]}" if stack else title), symbol
    base = next((known for known in headlines if name.startswith(f"{known}_")), None)
    if base is None:
        return short(name, 60).replace("_", " "), ""
    return headlines[base][0], short(name.removeprefix(f"{base}_"), 60)


def sentences(shown: Sequence[Shown]) -> list[str]:
    """The sentences of findings."""
    return [one.prefix + short(one.entry["sentence"], 600) for one in shown if one.entry.get("sentence")]


def title(meta: Meta) -> str:
    """Title of the page."""
    if meta.get("models"):
        first, *others = [short(entry.get("label", "?"), 60) for entry in meta["models"]]
        return f"{first} against {', '.join(others[:3])}" + (" and others" if len(others) > 3 else "")
    run = meta.get("recipe") if meta.get("kind") == "training" else None
    name = str(run or (meta.get("model") or {}).get("name") or "Unnamed model")
    if name.startswith("/"):  # keep the end of a long path; "What was measured" shows all of it
        name = "/".join(PurePosixPath(name).parts[-2:]).lstrip("/") or name
    return short(name, 160)


def differences(entry: Meta, _: PageSource) -> list[Shown]:
    """The findings of a comparison; those that the table of models shows come last."""
    headline = entry.get("headline") or {}
    in_table = texts()["headlines"]
    return [Shown(headline[name]) for name in sorted(headline, key=lambda name: name.split(":")[0] in in_table)]


def side_by_side(source: PageSource) -> Table:
    """The findings of several models as a table: one column per model."""
    models = []
    for entry in source.meta.get("models") or []:
        found = entry.get("headline") or {}
        depth = (entry.get("model") or {}).get("num_layers")
        cells = {}
        for name, (title, _) in texts()["headlines"].items():
            number = found.get(name, {})
            digits, unit = figure_of(number, depth)
            spread = plus_minus(number)
            parts = (digits, unit, f"({spread})") if number.get("interval") else (digits, spread, unit)
            cells[title] = " ".join(filter(None, parts))
        models.append((entry, cells))
    return across("Models side by side", models)


def warnings(meta: Meta) -> list[str]:
    """The document's warnings, then those of each model under its label."""
    found = [short(text, 600) for text in meta.get("warnings") or []]
    if meta.get("complete") is False:
        found.insert(0, "The run was interrupted; the numbers are of the part that finished.")
    for entry in meta.get("models") or []:
        label = short(entry.get("label", "?"), 60)
        found += [f"{label}: {short(text, 600)}" for text in entry.get("warnings") or []]
    return found


def left_out(meta: Meta) -> list[tuple[str, str]]:
    """(measure, reason) of every measure that was left out."""
    return [(short(e.get("measure", "?"), 60), short(e.get("reason", ""), 600)) for e in meta.get("left_out") or []]


def routers(source: PageSource) -> dict[str, list[Table]]:
    """Table of the nearest tokens of a model's dynamic routers; empty if the document lists no routers."""
    known = source.meta.get("router_tokens") or {}
    rows = [
        [
            f"Layer {entry['layer']}, state {entry['source']}, head {entry['head']}",
            " ".join(visible(short(token, 40)) for token, _ in entry["tokens"]),
            quantity(entry["tokens"][0][1], "1"),
        ]
        for entry in known.get("routers") or []
        if entry["tokens"]
    ]
    note = f"""The {len(rows)} of {known.get("of", len(rows)):,} routers with the nearest tokens. A router reads state m
    the more, the more a token’s state looks like the router’s vector. Listed are the tokens whose embeddings are
    nearest to it, and the largest cosine."""
    columns = ["Nearest tokens", "Cosine"]
    return {"memory": [Table("Tokens of dynamic routers", columns, rows, "Router", note, folded=True, text=True)]}
