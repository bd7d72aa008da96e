"""Combines the measurements of a model's stacks (two towers, or encoder and decoder) into one result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fulldepth.results import Results, joined

RESIDUAL = "residual"


@dataclass(frozen=True)
class Stack:
    """One stack: its name in the table and its own results."""

    name: str
    """`image`, `text`, `encoder` or `decoder`."""
    results: Results


def site_of(stack: str, site: str | None) -> str:
    """Site of a stack in the common table: the stream has the stack's own name, others are `STACK:SITE`."""
    return stack if site is None or site == RESIDUAL else f"{stack}:{site}"


def combine_stacks(stacks: Sequence[Stack], further: pd.DataFrame | None = None) -> Results:
    """One table and document: sites and findings carry the stacks' names; times are summed.

    Influences are kept where all stacks have the same clusters.

    Args:
        stacks: in the order of the model's description.
        further: rows across stacks.
    """
    tables: list[Any] = [_named(stack, stack.results.table) for stack in stacks]
    table = pd.concat([*tables, *([] if further is None else [further])], ignore_index=True)
    metas = {stack.name: stack.results.meta for stack in stacks}
    influences = joined((stack.results.meta, _named(stack, stack.results.influences)) for stack in stacks)
    return Results(table, _document(metas), influences)


def _named(stack: Stack, rows: pd.DataFrame | None) -> pd.DataFrame | None:
    """Rows with the sites that they have in the common table."""
    return None if rows is None else rows.assign(site=[site_of(stack.name, site) for site in rows["site"]])


def _document(metas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The last stack's document, with the parts of all."""
    last = dict(list(metas.values())[-1])
    described = [{"stack": name, **meta["model"]} for name, meta in metas.items()]
    deepest = max(entry["num_layers"] for entry in described)
    spent = [meta["timings"] for meta in metas.values()]
    timings: dict[str, Any] = {key: round(sum(t[key] for t in spent), 4) for key in ("load", "forward", "total")}
    timings["measures"] = {
        f"{name}: {measure}": seconds
        for name, meta in metas.items()
        for measure, seconds in meta["timings"]["measures"].items()
    }
    grids = [meta["lens_grid"] for meta in metas.values() if meta["lens_grid"]]
    policies = {name: meta["token_policy"] for name, meta in metas.items()}
    keys = ("num_layers", "width", "family", "task")
    return {
        **last,
        "model": {**last["model"], "num_layers": deepest},
        "stacks": [{"name": entry["stack"], **{key: entry[key] for key in keys}} for entry in described],
        "token_policy": {
            "name": ", ".join(f"{name}: {policy['name']}" for name, policy in policies.items()),
            "sentence": " ".join(f"{_title(name)}: {policy['sentence']}" for name, policy in policies.items()),
            "begin_with_bos": None,
        },
        "timings": timings,
        "left_out": [
            {**entry, "measure": f"{name}: {entry['measure']}"}
            for name, meta in metas.items()
            for entry in meta["left_out"]
        ],
        "warnings": list(
            dict.fromkeys(f"{_title(n)}: {line}" for n, meta in metas.items() for line in meta["warnings"])
        ),
        "headline": {
            f"{name}:{key}": {**finding, "sentence": f"{_title(name)}: {finding['sentence']}"}
            for name, meta in metas.items()
            for key, finding in meta["headline"].items()
        },
        "lens_grid": grids[-1] if grids else None,
    }


def _title(stack: str) -> str:
    return stack.capitalize()
