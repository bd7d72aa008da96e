"""Measurements and comparisons on a page: findings, model and data, tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from fulldepth.reporting.phrases import (
    figure_of,
    quantity,
    short,
    spread_of,
    visible,
)
from fulldepth.reporting.source import PageSource
from fulldepth.reporting.tables import Meta, Table, across, page_texts

WITHOUT_CARD = ("cosine_cka_order", "score ", "earliest_exit ")
"""Prefixes of the names of findings without a card. (Scores of tasks are in a table.)"""


@dataclass(frozen=True)
class PageFinding:
    """A finding as a page shows it."""

    entry: Meta
    card: tuple[str, str, str, str] | None = None
    """Name, symbol, digits and unit on its card; None if it has no card."""
    prefix: str = ""
    """Subject of the sentence if the page shows several."""


def findings_of_measurement(entry: Meta, source: PageSource) -> list[PageFinding]:
    """Findings of a measurement, a training run or a step: known ones in the order of the cards, then others."""
    model = entry.get("model") or source.meta.get("model") or {}
    stacks = {str(stack["name"]): stack.get("num_layers") for stack in source.meta.get("stacks") or []}
    headline = entry.get("headline") or {}
    known = page_texts()["headlines"]
    findings = []
    for name in dict.fromkeys([*(name for name in known if name in headline), *headline]):
        depth = stacks.get(name.partition(":")[0], model.get("num_layers"))
        card = None if name.startswith(WITHOUT_CARD) else (*_titled(name), *figure_of(headline[name], depth))
        findings.append(PageFinding(headline[name], card))
    return findings


def _titled(name: str) -> tuple[str, str]:
    """Title and symbol of a card.

    `STACK:NAME` is the number `NAME` of one stack. `NAME_SUFFIX` is the number `NAME` of what the suffix names, such as
    a rule.
    """
    headlines = page_texts()["headlines"]
    stack, _, number_name = name.rpartition(":")
    if number_name in headlines:
        title, symbol = headlines[number_name]
        return (f"{short(stack, 30).capitalize()}: {title[0].lower()}{title[1:]}" if stack else title), symbol
    base = next((known for known in headlines if name.startswith(f"{known}_")), None)
    if base is None:
        return short(name, 60).replace("_", " "), ""
    return headlines[base][0], short(name.removeprefix(f"{base}_"), 60)


def sentences(findings: Sequence[PageFinding]) -> list[str]:
    """The sentences of findings."""
    return [
        finding.prefix + short(finding.entry["sentence"], 600) for finding in findings if finding.entry.get("sentence")
    ]


def title(meta: Meta) -> str:
    """Title of the page."""
    if meta.get("models"):
        first, *other_labels = [short(entry.get("label", "?"), 60) for entry in meta["models"]]
        return f"{first} against {', '.join(other_labels[:3])}" + (" and others" if len(other_labels) > 3 else "")
    run = meta.get("recipe") if meta.get("kind") == "training" else None
    name = str(run or (meta.get("model") or {}).get("name") or "Unnamed model")
    if name.startswith("/"):  # keep the end of a long path; "What was measured" shows all of it
        name = "/".join(PurePosixPath(name).parts[-2:]).lstrip("/") or name
    return short(name, 160)


def comparison_findings(entry: Meta, _: PageSource) -> list[PageFinding]:
    """Findings of a comparison, without cards; numbers that the table of models also shows come last."""
    headline = entry.get("headline") or {}
    in_table = page_texts()["headlines"]
    return [PageFinding(headline[name]) for name in sorted(headline, key=lambda name: name.split(":")[0] in in_table)]


def comparison_table(source: PageSource) -> Table:
    """Headline numbers of several models: one column per model."""
    models = []
    for entry in source.meta.get("models") or []:
        headline = entry.get("headline") or {}
        depth = (entry.get("model") or {}).get("num_layers")
        cells = {}
        for name, (title, _) in page_texts()["headlines"].items():
            number = headline.get(name, {})
            digits, unit = figure_of(number, depth)
            spread = spread_of(number)
            parts = (digits, unit, spread) if number.get("interval") else (digits, spread, unit)
            cells[title] = " ".join(filter(None, parts))
        models.append((entry, cells))
    return across("Models side by side", models)


def document_warnings(meta: Meta) -> list[str]:
    """The document's warnings, then those of each model under its label."""
    lines = [short(text, 600) for text in meta.get("warnings") or []]
    if meta.get("complete") is False:
        lines.insert(0, "The run was interrupted; the numbers are of the part that finished.")
    for entry in meta.get("models") or []:
        label = short(entry.get("label", "?"), 60)
        lines += [f"{label}: {short(text, 600)}" for text in entry.get("warnings") or []]
    return lines


def left_out(meta: Meta) -> list[tuple[str, str]]:
    """(measure, reason) of every measure that was left out."""
    return [(short(e.get("measure", "?"), 60), short(e.get("reason", ""), 600)) for e in meta.get("left_out") or []]


def router_tables(source: PageSource) -> dict[str, list[Table]]:
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
    note = f"""The {len(rows)} of {known.get("of", len(rows)):,} routers with the nearest tokens. A router gives state m
    more weight for tokens whose state resembles the router’s vector. The table lists the tokens whose embeddings are
    nearest to that vector, and the largest cosine."""
    columns = ["Nearest tokens", "Cosine"]
    return {"memory": [Table("Tokens of dynamic routers", columns, rows, "Router", note, folded=True, text=True)]}
