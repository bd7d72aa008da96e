"""Which tokens a model's dynamic routers answer to, as a table of the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulldepth.report.phrases import quantity, short, visible
from fulldepth.report.training import Table, table

TOKEN_LIMIT = 40
"""Characters of a token that are kept."""


def tables(meta: Mapping[str, Any]) -> dict[str, list[Table]]:
    """Id of a section -> tables that stand in it; empty where the document names no routers."""
    found = meta.get("router_tokens") or {}
    rows = [
        [
            f"Layer {entry['layer']}, state {entry['source']}, head {entry['head']}",
            " ".join(visible(short(token, TOKEN_LIMIT)) for token, _ in entry["tokens"]),
            quantity(entry["tokens"][0][1], "1"),
        ]
        for entry in found.get("routers") or []
        if entry["tokens"]
    ]
    if not rows:
        return {}
    of = found.get("of")
    cut = f"The {len(rows)} of {of:,} routers" if isinstance(of, int) and of > len(rows) else "All routers"
    note = (
        f"{cut}, those with the nearest tokens first. A router reads state m the more, the more a token’s state looks "
        "like the router’s vector. Listed are the tokens whose embeddings are nearest to it, and the largest cosine."
    )
    title, columns = "Tokens of dynamic routers", ["Nearest tokens", "Cosine"]
    return {"memory": [table(title, columns, rows, corner="Router", text=True, note=note, folded=True)]}
