"""Pages of measurements and comparisons: title, findings, model and data, tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from fulldepth.figures.record import Source
from fulldepth.reporting.findings import HEADLINES, Shown, with_cards
from fulldepth.reporting.phrases import (
    data_line,
    dotted,
    figure_of,
    listed,
    model_line,
    plus_minus,
    quantity,
    seconds,
    short,
    size,
    stated,
    visible,
)
from fulldepth.reporting.tables import Table

Meta = Mapping[str, Any]
Pairs = list[tuple[str, str]]
"""(name, text) pairs; a text is empty if the document does not state it."""
STEPS = {"load": "loading", "forward": "forward passes", "total": "in all"}
"""Timing -> what took the time."""


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


def byline(meta: Meta, verb: str = "measured") -> str:
    """The model and its data in one line."""
    data = (meta.get("data") or {}).get("name")
    return model_line(meta.get("model") or {}) + (f" · {verb} on {short(data, 100)}" if data else "")


def compared(meta: Meta, subjects: str, at_step: str = "") -> str:
    """How many `subjects` are compared, and how their layers are aligned."""
    count = len(meta.get("models") or [])
    depth = "by relative depth" if meta.get("depth") == "relative" else "layer by layer"
    return f"{count} {subjects}, compared {at_step}{depth}" if count else ""


def findings(entry: Meta, source: Source) -> list[Shown]:
    """The findings of a measurement, a run, or a step."""
    model = entry.get("model") or source.meta.get("model") or {}
    stacks = {str(stack["name"]): stack.get("num_layers") for stack in source.meta.get("stacks") or []}
    return with_cards(entry.get("headline") or {}, model.get("num_layers"), stacks)


def differences(entry: Meta, _: Source) -> list[Shown]:
    """The findings of a comparison; sentences on numbers that the table of models shows are marked as later."""
    headline = entry.get("headline") or {}
    return [Shown(finding, later=name.split(":")[0] in HEADLINES) for name, finding in headline.items()]


def labelled(entry: Meta) -> str:
    """Label of one of several models; the baseline is marked."""
    label = short(entry.get("label", "?"), 60)
    return f"{label} (baseline)" if entry.get("baseline") and label != "baseline" else label


def side_by_side(source: Source) -> Table | None:
    """The findings of several models as a table: one column per model, the baseline marked."""

    def number(entry: Meta, name: str) -> str:
        finding = (entry.get("headline") or {}).get(name, {})
        digits, unit = figure_of(finding, (entry.get("model") or {}).get("num_layers"))
        return " ".join(filter(None, (digits, plus_minus(finding), unit)))

    models = source.meta.get("models") or []
    names = [name for name in HEADLINES if any(name in (entry.get("headline") or {}) for entry in models)]
    rows = [[HEADLINES[name][0], *(number(entry, name) for entry in models)] for name in names]
    return Table("Models side by side", [labelled(entry) for entry in models], rows) if rows else None


def about(meta: Meta) -> Pairs:
    """Pairs on the model, the data, the tokens and the run."""
    return [*_subject(meta), *run(meta)]


def about_models(meta: Meta) -> Pairs:
    """As `about` for several models; a text is given once if it is the same for all."""
    subjects = [(short(entry.get("label", "?"), 60), dict(_subject(entry))) for entry in meta.get("models") or []]
    pairs: Pairs = []
    for key in subjects[0][1] if subjects else ():
        texts = {subject[key] for _, subject in subjects}
        several = [(f"{key} of {name}", subject[key]) for name, subject in subjects]
        pairs += [(key, texts.pop())] if len(texts) == 1 else several
    return [*pairs, *run(meta)]


def _subject(meta: Meta) -> Pairs:
    model, data, policy = (meta.get(key) or {} for key in ("model", "data", "token_policy"))
    revision = stated(model, ("revision", "revision {}"))
    return [
        ("Model", dotted(stated(model, ("name", "{}")), model_line(model), revision)),
        ("Data", dotted(stated(data, ("name", "{}")), data_line(data))),
        ("Tokens", short(policy.get("sentence") or policy.get("name") or "", 400)),
        ("Fingerprints", fingerprints([("config", model.get("config_hash")), ("data", data.get("hash"))])),
    ]


def fingerprints(hashes: Iterable[tuple[str, Any]]) -> str:
    """Prefixes of the known hashes, without repetition."""
    return dotted(*dict.fromkeys(f"{kind} {short(value, 23)}" for kind, value in hashes if value))


def run(meta: Meta, written: str = "Measured") -> Pairs:
    """Pairs on sampling, time, memory and versions of the run."""
    timings, sampling = meta.get("timings") or {}, meta.get("sampling")
    return [
        ("Sampling", short(sampling.get("sentence") or "Nothing was sampled.", 900) if sampling else ""),
        ("Seed", short(meta["seed"], 20) if meta.get("seed") is not None else ""),
        ("Time", dotted(*(f"{seconds(timings[key])} {step}" for key, step in STEPS.items() if timings.get(key)))),
        ("Memory", listed(meta.get("memory") or {}, size)),
        ("Versions", listed(meta.get("versions") or {})),
        (written, short(meta.get("created") or "", 40)),
    ]


def warnings(meta: Meta) -> list[str]:
    """The document's warnings, then those of each model under its label."""
    texts = [short(text, 600) for text in meta.get("warnings") or []]
    if meta.get("complete") is False:
        texts.insert(0, "The run that wrote these results did not finish; what is here is complete in itself.")
    for entry in meta.get("models") or []:
        label = short(entry.get("label", "?"), 60)
        texts += [f"{label}: {short(text, 600)}" for text in entry.get("warnings") or []]
    return texts


def left_out(meta: Meta) -> list[list[str]]:
    """[measure, reason] of every measure that was left out."""
    return [[short(e.get("measure", "?"), 60), short(e.get("reason", ""), 600)] for e in meta.get("left_out") or []]


def routers(source: Source) -> dict[str, list[Table]]:
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
