"""Result folders of `fulldepth skip` as real runs leave them, made from closed forms."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from fulldepth.results import COLUMNS, Results, tabulate

HASH, DATA = "sha256:" + "1a" * 32, "sha256:" + "2b" * 32
BLOCKS = (7, 8, 3, 11)
FARTHER = (*BLOCKS, 5, 10, 2, 9)
VERSIONS = {"fulldepth": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.9"}
CELLS = ((1, 128), (1, 512), (4, 128), (4, 512))
CORNERS = {
    "original": (2.9, 1.0, 1.0, 1.0), "skipped": (2.94, 0.9, 0.88, 0.93), "quantised": (2.905, 0.3, 1.25, 0.7),
    "quantised, then skipped": (2.95, 0.27, 1.1, 0.66), "skipped, then quantised": (2.955, 0.27, 1.12, 0.65),
}  # fmt: skip
"""Name -> loss; bytes, prefill and decode as multiples of the original's."""


def losses_of(count: int) -> list[float]:
    """Cheap at first, the first one better than nothing, dear in the end."""
    return [2.9 + (-0.004 if n == 1 else 0.0) + 0.006 * n + 0.0009 * n**3 for n in range(count + 1)]


def plan(
    blocks: tuple[int, ...] = BLOCKS, layers: int = 12, healed: bool = True, granularity: str = "attention", **more: Any
) -> dict[str, Any]:
    """A document as `plan.json` holds it."""
    losses = losses_of(len(blocks))
    names = {"attention": ("b_mlp", "s_mlp"), "mlp": ("b_att", "s_att"), "layer": ()}[granularity]
    every = ("b_att", "s_att", "b_mlp", "s_mlp")
    scalars = {
        str(layer): {name: 1 + 0.1 * math.sin(layer + at) for at, name in enumerate(every) if name in kept}
        for layer in range(1, layers + 1)
        if (kept := names if layer in blocks else every)
    }
    return {
        "schema_version": 1,
        "model": {"name": "runs/llama-12x256", "class": "LlamaForCausalLM", "hash": HASH},
        "granularity": granularity, "criterion": "loss", "search": "greedy", "blocks": list(blocks), "losses": losses,
        "healed_loss": losses[-1] - 0.02 if healed else None,
        "control_loss": {"scalars_only": losses[0] - 0.01} if healed else None,
        "scalars": scalars if healed else {},
        "data": {
            "hash": DATA, "name": "pairs.jsonl", "kind": "pairs",
            "train": {"examples": 800, "documents": 800, "tokens": 90000, "predicted": 41000},
            "heldout": {
                "name": "a seeded fifth of pairs.jsonl", "kind": "pairs", "examples": 200, "documents": 200,
                "tokens": 22000, "predicted": 10400,
            },
            "seed": 0, "warnings": [],
        },
        "seed": 0, "versions": VERSIONS,
        "cost": {"forwards": 375, "flops": 1.36e13, "seconds": 93.4, "share_of_plain": 0.24,
                 "fit": {"healed": {"epoch": 4}}},
        **more,
    }  # fmt: skip


def document(kind: str, planned: dict[str, Any], layers: int | None = 12, **more: Any) -> dict[str, Any]:
    """What all `results.json` of searches and curves have."""
    return {
        "schema_version": 1, "kind": kind, "created": "2026-11-21T08:00:00Z", "complete": True,
        "settings": {"blocks": len(planned["blocks"]), "search": "greedy", "dtype": "auto", "learning_rate": 3e-3},
        "model": {**planned["model"], **({"num_layers": layers} if layers else {})}, "data": planned["data"],
        "versions": VERSIONS, "seed": 0, "plan": planned, "warnings": [], **more,
    }  # fmt: skip


def search(layers: int = 12, blocks: tuple[int, ...] = BLOCKS, healed: bool = True, **entries: Any) -> Results:
    """Kind `skip`."""
    planned = plan(blocks, layers, healed, **entries)
    count = len(blocks)
    found: list[tuple[Any, ...]] = []
    beside: list[tuple[int | None, str]] = []

    def add(row: tuple[Any, ...], removed: int | None, state: str) -> None:
        found.append(row)
        beside.append((removed, state))

    for removed, (layer, loss) in enumerate(zip([None, *blocks], planned["losses"], strict=True)):
        row = ("loss", "model", layer, None, "mean", loss, 10400, "nats")
        add(row, removed, "skipped" if removed else "original")
    if healed:
        add(("loss", "model", blocks[-1], None, "mean", planned["healed_loss"], 10400, "nats"), count, "healed")
        control = planned["control_loss"]["scalars_only"]
        add(("loss", "model", None, None, "mean", control, 10400, "nats"), 0, "scalars_only")
    for state, size in (("skipped", 1.0), *((("healed", 0.3),) if healed else ())):
        for layer in range(layers + 1):
            removed = sum(block <= layer for block in blocks)
            add(("mmd", "residual", layer, None, "value", size * 0.01 * removed**1.5, 2048, "1"), count, state)
    added = planned["losses"][-1] - planned["losses"][0]
    extra = pd.DataFrame(beside, columns=["removed", "state"]).astype({"removed": "Int64", "state": "str"})
    table = pd.concat([tabulate(found), extra], axis=1)
    headline = {
        "loss_added": {"value": added, "unit": "nats", "sentence": f"Removing {count} blocks adds {added:.4f} nats."},
        "loss_healed": {"value": 3.0, "unit": "nats", "sentence": "Held-out loss with scalars: 3.0000."},
        "mmd": {"value": 0.0061, "unit": "1", "sentence": "The last layer's states differ by 6.1e-03."},
    }
    return Results(table[[*COLUMNS, "removed", "state"]], document("skip", planned, layers, headline=headline))


def curve(blocks: tuple[int, ...] = FARTHER, at: int | None = 5, layers: int | None = None, **entries: Any) -> Results:
    """Kind `curve`; the document does not say how deep the model is unless `layers` does."""
    planned = plan(blocks, 12, healed=False, **entries)
    base, tables = planned["losses"][0], []
    for removed, loss in enumerate(planned["losses"]):
        readings = {"loss": (loss, 0.2), "kl": (0.01 * removed**1.4, 0.002 * removed),
                    "greedy_agreement": (1 - 0.03 * removed, 0.004 * removed),
                    "loss_added": (loss - base, 0.003 * removed)}  # fmt: skip
        layer = blocks[removed - 1] if removed else None
        rows = [
            (name, "model", layer, None, statistic, value + sign * wide, 10400, "1" if "agree" in name else "nats")
            for name, (value, wide) in readings.items()
            for statistic, sign in (("mean", 0), ("low", -1), ("high", 1))
        ]
        tables.append(tabulate(rows, removed=removed))
    if at is not None:
        answer = (("value", at), ("low", at - 1), ("high", at + 1))
        rows = [("break_point", "model", None, None, name, value, 200, "layers") for name, value in answer]
        tables.append(tabulate(rows, removed=at))
    table = pd.concat(tables, ignore_index=True).astype({"removed": "Int64"})
    headline = {
        "break_point": {"value": at, "unit": "layers", "sentence": f"Up to {at} blocks the loss grows slowly."},
        "loss_added": {"value": 0.5, "unit": "nats", "sentence": f"{len(blocks)} blocks add much."},
    }
    return Results(table[[*COLUMNS, "removed"]], document("curve", planned, layers, headline=headline))


def ratio_rows(phase: str, ratio: float) -> list[tuple[Any, ...]]:
    """The time over the original's with its interval, of nine rounds."""
    ends = (("median", 1.0), ("low", 0.97), ("high", 1.02))
    return [("time_ratio", phase, None, None, name, ratio * by, 9, "1") for name, by in ends]


def bench(planned: dict[str, Any] | None = None, cells: tuple[tuple[int, int], ...] = CELLS, **more: Any) -> Results:
    """Kind `bench`: a folded export, a fast one, and a checkpoint of which nothing is known."""
    planned = planned or plan()
    models = {"base": (1.0, None), "folded": (1.01, []), "fast": (0.8, sorted(planned["blocks"])), "other": (0.7, None)}
    tables = []
    for label, (factor, _) in models.items():
        size = [("parameter_bytes", "model", None, None, "value", 4e7 * (0.9 if label == "fast" else 1), None, "bytes")]
        whole = [row for phase in ("prefill", "decode") if label != "base" for row in ratio_rows(phase, factor)]
        tables.append(tabulate([*size, *whole], model=label, batch=None, context=None))
        for batch, context in cells:
            held = 3072.0 * (2 / 3 if label == "fast" else 1)
            rows: list[tuple[Any, ...]] = [
                ("peak_memory", "model", None, None, "value", 5e7 + 1e4 * batch * context, None, "bytes"),
                ("kv_bytes_per_token", "model", None, None, "value", held, None, "bytes"),
            ]
            for phase, second in (("prefill", 1e-5 * batch * context), ("decode", 2e-3 * batch)):
                rows.append((f"{phase}_time", phase, None, None, "median", second * factor, 9, "s"))
                if label != "base":
                    rows += ratio_rows(phase, factor * (1 + 0.02 * math.sin(batch + context)))
            tables.append(tabulate(rows, model=label, batch=batch, context=context))
    table = pd.concat([one.astype({"batch": "Int64", "context": "Int64"}) for one in tables], ignore_index=True)
    headline = {
        f"{phase}_time_ratio {label}": {
            "value": factor, "unit": "1", "sentence": f"{label}, {phase} time: {factor:.3f} times the original's."
        }
        for label, (factor, _) in list(models.items())[1:]
        for phase in ("prefill", "decode")
    }  # fmt: skip
    entries = [
        {
            "label": label, "baseline": label == "base", "granularity": None if missing is None else "attention",
            "model": {"name": f"/models/{label}", "class": "LlamaForCausalLM", "num_layers": 12,
                      "parameters": 9_412_352, "dtype": "float32", "hash": HASH if label == "base" else None},
            "format": label if missing is not None else None, "not_computed": missing,
            **{key: planned[key] if missing is not None else None for key in ("blocks", "losses", "healed_loss")},
        }
        for label, (_, missing) in models.items()
    ]  # fmt: skip
    meta = {
        "schema_version": 1, "kind": "bench", "created": "2026-11-21T09:00:00Z", "complete": True, "baseline": "base",
        "settings": {"batches": [1, 4], "contexts": [128, 512], "max_new_tokens": 16, "repeats": 9, "warmup": 1,
                     "dtype": "auto"},
        "model": entries[0]["model"], "models": entries, "versions": VERSIONS, "seed": 0,
        "machine": {"device": "cpu", "name": "x86_64", "threads": 4},
        "warnings": ["The machine was busy."], "headline": headline, **more,
    }  # fmt: skip
    return Results(table[[*COLUMNS, "model", "batch", "context"]], meta)


def quantised() -> Results:
    """Kind `quantise`: all five corners."""
    tables, first = [], CORNERS["original"]
    for label, (loss, size, prefill, decode) in CORNERS.items():
        rows: list[tuple[Any, ...]] = [
            ("loss", "model", None, None, "mean", loss, 10400, "nats"),
            ("parameter_bytes", "model", None, None, "value", 4e7 * size, None, "bytes"),
        ]
        for phase, ratio in (("prefill", prefill), ("decode", decode)):
            rows.append((f"{phase}_time", phase, None, None, "median", 0.02 * ratio, 9, "s"))
            rows += ratio_rows(phase, ratio) if label != "original" else []
        tables.append(tabulate(rows, model=label))
    table = pd.concat(tables, ignore_index=True)
    planned, second_plan = plan(), plan((7, 8, 4, 11))
    headline = {
        "order": {"value": -0.005, "unit": "nats", "sentence": "Quantising first is better by 0.0050 nats."}
    } | {
        label: {"value": loss - first[0], "unit": "nats", "sentence": f"{label}: {loss:.4f}."}
        for label, (loss, *_) in list(CORNERS.items())[1:]
    }
    meta = document("quantise", planned, headline=headline)
    del meta["plan"]
    meta |= {
        "method": "int8", "baseline": "original", "machine": {"device": "cpu", "name": "x86_64", "threads": 4},
        "models": [{"label": label, "baseline": label == "original", "model": {"class": "LlamaForCausalLM"},
                    "blocks": None} for label in CORNERS],
        "plans": {"skipped": planned, "quantised, then skipped": second_plan},
    }  # fmt: skip
    return Results(table, meta)
