"""The head of the page: title, the few big numbers, the sentences, what was measured on what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from fulldepth.report import training
from fulldepth.report.phrases import HEADLINES, data_line, figure_of, model_line, plus_minus, seconds, short, size

Headline = Mapping[str, Mapping[str, Any]]


def title(meta: Mapping[str, Any]) -> str:
    """Name of what the page is about."""
    if meta.get("models"):
        first, *others = [short(entry.get("label", "?"), 60) for entry in meta["models"]]
        return f"{first} against {', '.join(others[:3])}" + (" and others" if len(others) > 3 else "")
    run = meta.get("recipe") if meta.get("kind") == "training" else None
    name = str(run or (meta.get("model") or {}).get("name") or "Unnamed model")
    if name.startswith("/"):  # of a long path the end says most; the whole stands under "What was measured"
        name = "/".join(PurePosixPath(name).parts[-2:]).lstrip("/") or name
    return short(name, 160)


def cards(headline: Headline, layers: object = None) -> list[dict[str, str]]:
    """The numbers, in the fixed order; names that we do not know come last under their own name."""
    order = [name for name in HEADLINES if name in headline] + [name for name in headline if name not in HEADLINES]
    made = []
    for name in order:
        digits, unit = figure_of(headline[name], layers)
        caption, symbol = HEADLINES.get(name, (short(name, 60), ""))
        error = plus_minus(headline[name])
        made.append({"name": caption, "symbol": symbol, "digits": digits, "unit": unit, "error": error})
    return made


def sentences(headline: Headline) -> list[str]:
    """The sentences, in the order of the cards."""
    order = [name for name in HEADLINES if name in headline] + [name for name in headline if name not in HEADLINES]
    return [short(headline[name]["sentence"], 600) for name in order if headline[name].get("sentence")]


def sentences_of_comparison(headline: Headline) -> tuple[list[str], list[str]]:
    """What the table of models does not say, first; then the table in words. All is first if the table says it all."""
    told = {name: entry for name, entry in headline.items() if name.split(":")[0] in HEADLINES}
    news = {name: entry for name, entry in headline.items() if name not in told}
    return (sentences(news), sentences(told)) if news else (sentences(told), [])


def side_by_side(meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """The numbers of several models as a table: one column a model, the baseline marked."""
    models = meta.get("models") or []
    known = [name for name in HEADLINES if any(name in (entry.get("headline") or {}) for entry in models)]
    if not known:
        return None
    rows = []
    for name in known:
        cells = [_number(entry, name) for entry in models]
        rows.append([HEADLINES[name][0], *cells])
    columns = [short(entry.get("label", "?"), 60) + _baseline(entry) for entry in models]
    return {"columns": columns, "rows": rows}


def _baseline(entry: Mapping[str, Any]) -> str:
    return " (baseline)" if entry.get("baseline") and entry.get("label") != "baseline" else ""


def _number(entry: Mapping[str, Any], name: str) -> str:
    """A model's number with its standard error and unit."""
    stated = (entry.get("headline") or {}).get(name, {})
    digits, unit = figure_of(stated, (entry.get("model") or {}).get("num_layers"))
    return " ".join(filter(None, (digits, plus_minus(stated), unit)))


def byline(meta: Mapping[str, Any]) -> str:
    """What stands under the title: the model, or the models' data, in one line."""
    if meta.get("models"):
        depth = "by relative depth" if meta.get("depth") == "relative" else "layer by layer"
        if meta.get("of") == "training":
            return f"{len(meta['models'])} training runs, compared at step {meta['step']:,}, {depth}"
        return f"{len(meta['models'])} models, compared {depth}"
    data, verb = (meta.get("data") or {}).get("name"), "trained" if meta.get("kind") == "training" else "measured"
    return model_line(meta.get("model") or {}) + (f" · {verb} on {short(data, 100)}" if data else "")


def about(meta: Mapping[str, Any]) -> list[list[str]]:
    """[what, text] pairs on the models, the data and the run; only what the document says."""
    pairs: list[tuple[str, str]] = []
    if meta.get("of") == "training":
        pairs += training.shared(meta)
    elif meta.get("models"):
        subjects = [(short(entry.get("label", "?"), 60), dict(_subject(entry))) for entry in meta["models"]]
        for what in subjects[0][1]:
            texts = {subject[what] for _, subject in subjects}
            shared = len(texts) == 1
            pairs += (
                [(what, texts.pop())]
                if shared
                else [(f"{what} of {name}", subject[what]) for name, subject in subjects]
            )
    else:
        pairs += training.about(meta) if meta.get("kind") == "training" else _subject(meta)
    pairs += run(meta)
    return [[what, text] for what, text in pairs if text]


def _subject(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, data, policy = (meta.get(key) or {} for key in ("model", "data", "token_policy"))
    named = [short(model["name"], 160)] if model.get("name") else []
    source = [short(data["name"], 160)] if data.get("name") else []
    revision = f"revision {short(model['revision'], 60)}" if model.get("revision") else ""
    return [
        ("Model", " · ".join(filter(None, [*named, model_line(model), revision]))),
        ("Data", " · ".join(filter(None, [*source, data_line(data)]))),
        ("Tokens", short(policy.get("sentence") or policy.get("name") or "", 400)),
        ("Fingerprints", " · ".join(_hashes(model, data))),
    ]


def _hashes(model: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    stated = (("config", model.get("config_hash")), ("data", data.get("hash")))
    return [f"{what} {short(value, 23)}" for what, value in stated if value]


def run(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, text) pairs on how, when and with what it was run; an empty text where the document does not say."""
    sampling, versions = meta.get("sampling") or {}, meta.get("versions") or {}
    timings, memory = meta.get("timings") or {}, meta.get("memory") or {}
    spent = [
        ("loading", timings.get("load")),
        ("forward passes", timings.get("forward")),
        ("in all", timings.get("total")),
    ]
    return [
        (
            "Sampling",
            " · ".join(f"{short(k, 40).replace('_', ' ')} {_plain(v)}" for k, v in sampling.items() if v is not None),
        ),
        ("Seed", short(meta["seed"], 20) if meta.get("seed") is not None else ""),
        ("Time", " · ".join(f"{seconds(value)} {what}" for what, value in spent if value is not None)),
        ("Memory", " · ".join(f"{size(v)} {short(k, 30)}" for k, v in memory.items() if v is not None)),
        ("Versions", " · ".join(f"{short(k, 30)} {short(v, 30)}" for k, v in versions.items())),
        (
            "Written" if "training" in (meta.get("kind"), meta.get("of")) else "Measured",
            short(meta.get("created") or "", 40),
        ),
    ]


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else short(value, 60)


def remarks(meta: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Measures that were left out, with the reason; warnings."""
    warnings = [short(text, 600) for text in meta.get("warnings") or []]
    if meta.get("complete") is False:
        warnings.insert(0, "The run that wrote these results did not finish; what is here is complete in itself.")
    if meta.get("models"):
        for entry in meta["models"]:
            warnings += [
                f"{short(entry.get('label', '?'), 60)}: {short(text, 600)}" for text in entry.get("warnings") or []
            ]
    return {"left_out": left_out(meta), "warnings": warnings}


def left_out(meta: Mapping[str, Any]) -> list[list[str]]:
    """[measure, reason] of every measure that was left out."""
    return [[short(e.get("measure", "?"), 60), short(e.get("reason", ""), 600)] for e in meta.get("left_out") or []]
