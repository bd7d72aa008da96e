"""Formats numbers and strings for display."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from markupsafe import Markup, escape

from fulldepth.core import shell
from fulldepth.core.errors import shortened
from fulldepth.core.number_format import plus_minus, rounded
from fulldepth.core.uncertainty import counted
from fulldepth.reporting.source import number
from fulldepth.reporting.style import is_invisible, minus

NOTHING = "–"
"""Shown instead of an unknown number."""
TERMS = {
    "jump": "Jump penalty",
    "coherence": "Coherence penalty",
    "orthogonality": "Orthogonality penalty",
    "aligned": "Aligned loss",
    "multi_exit": "Loss of each layer’s own head",
    "distillation": "Divergence from the teacher",
    "similarity": "Similarity penalty",
}
"""Term of the objective -> its name."""
PARTS = {"attention": "attention block", "mlp": "MLP", "layer": "layer"}
"""Granularity -> name of one removed part."""
LONGEST = 800
"""Characters of a model's name with the options that load it; a page shows no command with a longer one."""
_VISIBLE = {chr(code): chr(0x2400 + code) for code in range(32)} | {" ": "·", "\n": "⏎", "\t": "⇥", "\x7f": "␡"}


def short(text: object, limit: int = 200) -> str:
    """`text` in at most `limit` characters; control and direction characters become visible."""
    return visible(shortened(str(text), limit), keep=" ")


def visible(text: str, keep: str = "") -> str:
    """`text` with whitespace and invisible characters written as marks, except those in `keep`."""
    marks = {c: f"⟨U+{ord(c):04X}⟩" for c in set(text) if is_invisible(c)} | _VISIBLE
    return "".join(c if c in keep else marks.get(c, c) for c in text)


def place_of(meta: Mapping[str, Any]) -> str:
    """A model's folder or Hub name with its revision and its tokenizer if that was named, as arguments of a command.

    Empty for a model without a name, for one in memory, whose name is that of its class, and for names that a page
    cannot show in full.

    Args:
        meta: the document of the results, with `model` and `settings`.
    """
    model = meta.get("model") or {}
    name = model.get("name")
    if not name or name == model.get("class"):
        return ""
    settings = meta.get("settings") or {}
    place = shell.word(name) + shell.same_model({**settings, "revision": model.get("revision")})
    return place if place == short(place, LONGEST) else ""


def figure_of(entry: Mapping[str, Any], layers: object = None) -> tuple[str, str]:
    """A headline's number as (digits, unit): `("12.3", "%")`, `("0.082", "")`, `("9", "of 12")`."""
    value = entry.get("value")
    unit = str(entry.get("unit", ""))
    if not isinstance(value, int | float) or not math.isfinite(value):
        return NOTHING, ""
    if unit == "%":
        return minus(value, f".{max(1, _decimals(entry))}f"), "%"
    if unit in ("layers", "tokens"):
        digits = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
        return digits, f"of {layers}" if unit == "layers" and isinstance(layers, int) else unit
    if unit == "tokens/s":  # the caption says what is counted
        return scaled(value), ""
    if unit in SCALES:
        digits, _, unit_text = SCALES[unit](value).partition(" ")
        return digits, unit_text
    decimals = max(4 if 0 < abs(value) < 0.01 else 3, _decimals(entry))
    digits = minus(value, ".4g" if decimals == 3 and 0.9995 <= abs(value) < 1 else f".{decimals}f")
    return digits, "" if unit == "1" else short(unit, 16)


def _decimals(entry: Mapping[str, Any]) -> int:
    """Decimal place of the first significant digit of a number's standard error: 3 for 0.0056; 0 if there is none."""
    error = number(entry.get("standard_error"))
    return -math.floor(math.log10(error)) if error is not None and 0 < error < 1 else 0


def sentences_of(findings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The sentences of a headline's entries; entries without one are left out."""
    return [short(entry["sentence"], 600) for entry in findings if entry.get("sentence")]


def spread_of(entry: Mapping[str, Any]) -> str:
    """The standard error of a headline's number, `± 0.0043`, or its interval, `(24 to 30)`; empty if there is none."""
    if interval := entry.get("interval"):
        return "({} to {})".format(*(rounded(end, ".4g") for end in interval))
    return plus_minus(number(entry.get("standard_error")))


def quantity(value: Any, unit: str) -> str:
    """A number with its unit in one string: `3.412 nats`, `4.2 %`, `9.41 M`; "–" if unknown."""
    if unit == "1" and isinstance(value, int) and value >= 1000:
        return scaled(value)
    if unit.endswith("s/s") and isinstance(value, int | float):  # tokens/s, images/s
        return f"{scaled(value)} {unit}"
    return " ".join(figure_of({"value": value, "unit": unit})).strip()


def scaled(value: Any) -> str:
    """A count or rate, a large one with a suffix: `3.4`, `8,192`, `9.4 M`, `1.2 B`; "?" if unknown."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "?"
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}"
    return f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:.1f}"


def amount_of_text(data: Mapping[str, Any]) -> str:
    """The amount of data in words: `40 rows`, `1 document in 24 pieces of text`.

    Empty if it is unknown, as in results of earlier versions, which counted pieces as documents and lack `clusters`.
    """
    documents, clusters, unit = (data.get(key) for key in ("documents", "clusters", "unit"))
    if not documents or not clusters or not unit:
        return ""
    of_text = counted(documents, "document")
    if clusters == documents:  # each piece is a document of its own
        return counted(clusters, short(unit, 40)) if unit in ("row", "image", "sequence") else of_text
    return f"{of_text} in {counted(clusters, short(unit, 40))}"


def places_of(blocks: Iterable[int | str], granularity: str) -> list[tuple[int, str]]:
    """1-based layer and part of blocks as a plan names them: layer numbers, or `mlp 12` for granularity `any`."""
    pairs = [block.partition(" ") if isinstance(block, str) else (granularity, "", block) for block in blocks]
    return [(int(layer), part) for part, _, layer in pairs]


def blocks_in_words(places: Iterable[tuple[int, str]]) -> str:
    """Blocks by part, in words: `the attention blocks of layers 2, 5 and layer 7`."""
    named = []
    places = list(places)
    for part, name in PARTS.items():
        layers = sorted(layer for layer, part_of_block in places if part_of_block == part)
        if layers:
            plural = "s" * (len(layers) > 1)
            of = "" if part == "layer" else f"the {name}{plural} of "
            named.append(f"{of}layer{plural} {', '.join(map(str, layers))}")
    return " and ".join(named)


def skipped_in_words(skipped: Mapping[str, Any] | None) -> str:
    """The blocks that an evaluation skipped, and whether with the plan's trained scalars; empty if there are none."""
    entry = skipped or {}
    words = blocks_in_words(places_of(entry.get("blocks") or [], str(entry.get("granularity"))))
    return f"{words} skipped{' and trained scalars' * bool(entry.get('healed'))}" if words else ""


def size(value: Any) -> str:
    """Bytes as B, KiB, MiB or GiB; "?" if unknown."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "?"
    if value < 2**20:
        return f"{value:,.0f} B" if value < 2**14 else f"{value / 2**10:,.0f} KiB"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:,.1f} MiB"


def seconds(value: Any) -> str:
    """A duration: `3.4 s`, `12 min`; "?" if unknown."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "?"
    if 0 < value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def percent(share: float | None, form: str = ".1f") -> str:
    """A share in per cent: `91.2 %`; "–" if unknown."""
    return NOTHING if share is None else f"{minus(100 * share, form)} %"


def dotted(parts: Iterable[Any]) -> Markup:
    """The non-empty parts as text, each cut to 160 characters, joined with dots; markup stays markup."""
    return Markup(" · ").join(part if isinstance(part, Markup) else short(part, 160) for part in parts if part)


def plain_text(value: Any) -> str:
    """Any value as text; integers with thousands separators."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else short(value, 160)


def with_commands(sentence: str) -> Markup:
    """A sentence as HTML, with the commands of fulldepth that it names between backticks as code."""
    return Markup(re.sub(r"`(fulldepth [^`]+)`", r"<code>\1</code>", str(escape(sentence))))


SCALES: dict[str, Callable[[float], str]] = {"s": seconds, "MiB": lambda value: size(value * 2**20)}
"""Unit -> formatter of numbers in that unit."""
