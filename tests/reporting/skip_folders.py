"""Result folders of `fulldepth skip` as real runs leave them, made from closed forms."""

from __future__ import annotations

import math
from functools import partial

import pandas as pd

from fulldepth.results import Results, tabulate
from reporting.synthetic import VERSIONS, findings, of_model, row

HASH, DATA = "sha256:" + "1a" * 32, "sha256:" + "2b" * 32
BLOCKS = (7, 8, 3, 11)
FARTHER = (*BLOCKS, 5, 10, 2, 9)
MACHINE = {"device": "cpu", "name": "x86_64", "threads": 4}
CELLS = ((1, 128), (1, 512), (4, 128), (4, 512))


def losses_of(count):
    """Cheap at first, the first one better than nothing, dear in the end."""
    return [2.9 + (-0.004 if n == 1 else 0.0) + 0.006 * n + 0.0009 * n**3 for n in range(count + 1)]


def plan(blocks=BLOCKS, layers=12, healed=True, granularity="attention", **more):
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


def document(kind, planned, layers=12, **more):
    """What all `results.json` of searches and curves have."""
    return {
        "schema_version": 1, "kind": kind, "created": "2026-11-21T08:00:00Z", "complete": True,
        "settings": {"blocks": len(planned["blocks"]), "search": "greedy", "dtype": "auto", "learning_rate": 3e-3},
        "model": {**planned["model"], **({"num_layers": layers} if layers else {})}, "data": planned["data"],
        "versions": VERSIONS, "seed": 0, "plan": planned, "warnings": [], **more,
    }  # fmt: skip


def search(layers=12, blocks=BLOCKS, healed=True, **entries):
    """Kind `skip`."""
    planned, count = plan(blocks, layers, healed, **entries), len(blocks)
    losses, loss = planned["losses"], partial(row, "loss", site="model", count=10400, unit="nats")
    found = [
        (loss(layer, value), removed, "skipped" if removed else "original")
        for removed, (layer, value) in enumerate(zip([None, *blocks], losses, strict=True))
    ]
    if healed:
        found.append((loss(blocks[-1], planned["healed_loss"]), count, "healed"))
        found.append((loss(None, planned["control_loss"]["scalars_only"]), 0, "scalars_only"))
    rows, removed, states = map(list, zip(*found, strict=True))
    table = tabulate(rows, removed=removed, state=states).astype({"removed": "Int64", "state": "str"})
    added = losses[-1] - losses[0]
    headline = findings(
        loss_added=(added, "nats", f"Removing {count} blocks adds {added:.4f} nats."),
        loss_healed=(3.0, "nats", "Held-out loss with scalars: 3.0000."),
    )
    return Results(table, document("skip", planned, layers, headline=headline))


def another():
    """Kind `skip`: other blocks, not healed."""
    return search(blocks=(7, 8, 4, 11), healed=False)


def ranked(blocks=("attention 3", "mlp 5", "attention 4"), layers=6):
    """Kind `skip`: a ranking of attention blocks and MLPs, without losses."""
    scores = {f"{part} {layer}": score_of(part, layer) for part in ("attention", "mlp") for layer in range(1, 7)}
    cost = {"forwards": 4, "scores": scores}
    planned = plan(blocks[:0], layers, healed=False) | {"blocks": [*blocks], "losses": [], "cost": cost}
    planned |= {"search": "cosine", "granularity": "any"}
    pairs = [(name.split(), score) for name, score in scores.items()]
    rows = [row("influence", int(layer), score, site=part, count=10400) for (part, layer), score in pairs]
    table = tabulate(rows, removed=0, state="original").astype({"removed": "Int64", "state": "str"})
    sentence = "Removed by the ranking cosine. Losses were not computed."
    return Results(table, document("skip", planned, layers, headline=findings(loss_added=(None, "nats", sentence))))


def score_of(part, layer):
    """What `ranked` ranks a block by."""
    return (0.02 if part == "attention" else 0.03) + 0.01 * abs(layer - (3 if part == "attention" else 5))


def curve(blocks=FARTHER, at=5, layers=None, **entries):
    """Kind `curve`; the document does not say how deep the model is unless `layers` does."""
    planned = plan(blocks, 12, healed=False, **entries)
    base, tables = planned["losses"][0], []
    for removed, loss in enumerate(planned["losses"]):
        readings = {"loss": (loss, 0.2), "kl": (0.01 * removed**1.4, 0.002 * removed),
                    "greedy_agreement": (1 - 0.03 * removed, 0.004 * removed),
                    "loss_added": (loss - base, 0.003 * removed)}  # fmt: skip
        layer = blocks[removed - 1] if removed else None
        rows = [
            row(name, layer, value + sign * wide, statistic, "model", None, 10400, "1" if "agree" in name else "nats")
            for name, (value, wide) in readings.items()
            for statistic, sign in (("mean", 0), ("low", -1), ("high", 1))
        ]
        tables.append(tabulate(rows, removed=removed))
    if at is not None:
        answer = (("value", at), ("low", at - 1), ("high", at + 1))
        rows = [of_model("break_point", value, "layers", name, 200) for name, value in answer]
        tables.append(tabulate(rows, removed=at))
    table = pd.concat(tables, ignore_index=True).astype({"removed": "Int64"})
    headline = findings(
        break_point=(at, "layers", f"Up to {at} blocks the loss grows slowly."),
        loss_added=(0.5, "nats", f"{len(blocks)} blocks add much."),
    )
    return Results(table, document("curve", planned, layers, headline=headline))


def time_rows(phase, ratio, seconds=None, first=False):
    """A time, if it is given, and unless the model is the first one its ratio with an interval, of nine rounds."""
    time = [] if seconds is None else [row(f"{phase}_time", None, seconds, "median", phase, count=9, unit="s")]
    ends = (("median", 1.0), ("low", 0.97), ("high", 1.02))[: 0 if first else 3]
    return time + [row("time_ratio", None, ratio * by, name, phase, count=9) for name, by in ends]


def bench(planned=None, cells=CELLS, **more):
    """Kind `bench`: a folded export, a fast one, and a checkpoint of which nothing is known."""
    planned = planned or plan()
    models = {"base": (1.0, None), "folded": (1.01, []), "fast": (0.8, sorted(planned["blocks"])), "other": (0.7, None)}
    tables = []
    for label, (factor, _) in models.items():
        size = of_model("parameter_bytes", 4e7 * (0.9 if label == "fast" else 1), "bytes")
        whole = [one for phase in ("prefill", "decode") for one in time_rows(phase, factor, first=label == "base")]
        tables.append(tabulate([size, *whole], model=label, batch=None, context=None))
        for batch, context in cells:
            held = 3072.0 * (2 / 3 if label == "fast" else 1)
            rows = [
                of_model("peak_memory", 5e7 + 1e4 * batch * context, "bytes"),
                of_model("kv_bytes_per_token", held, "bytes"),
            ]
            ratio = factor * (1 + 0.02 * math.sin(batch + context))
            for phase, second in (("prefill", 1e-5 * batch * context), ("decode", 2e-3 * batch)):
                rows += time_rows(phase, ratio, second * factor, label == "base")
            tables.append(tabulate(rows, model=label, batch=batch, context=context))
    table = pd.concat([one.astype({"batch": "Int64", "context": "Int64"}) for one in tables], ignore_index=True)
    headline = findings(
        **{
            f"{phase}_time_ratio {label}": (factor, "1", f"{label}, {phase} time: {factor:.3f} times the original's.")
            for label, (factor, _) in list(models.items())[1:]
            for phase in ("prefill", "decode")
        }
    )
    entries = [
        {
            "label": label, "baseline": label == "base", "granularity": None if missing is None else "attention",
            "model": {"name": f"/models/{label}", "class": "LlamaForCausalLM", "num_layers": 12,
                      "parameters": 9_412_352, "dtype": "float32", "hash": HASH if label == "base" else None},
            "format": label if missing is not None else None,
            **{key: planned[key] if missing is not None else None for key in ("blocks", "losses", "healed_loss")},
        }
        for label, (_, missing) in models.items()
    ]  # fmt: skip
    meta = {
        "schema_version": 1, "kind": "bench", "created": "2026-11-21T09:00:00Z", "complete": True, "baseline": "base",
        "settings": {"batches": [1, 4], "contexts": [128, 512], "max_new_tokens": 16, "repeats": 9, "warmup": 1,
                     "dtype": "auto"},
        "model": entries[0]["model"], "models": entries, "versions": VERSIONS, "seed": 0,
        "machine": MACHINE,
        "warnings": ["The machine was busy."], "headline": headline, **more,
    }  # fmt: skip
    return Results(table, meta)


def served():
    """Kind `bench`, under load: what saves cache pays with many clients, what saves computation with one."""
    names = ("full.gguf", "no-attention.gguf", "no-mlp.gguf")
    tables = []
    for name in names:
        sizes = {"parameter_bytes": 1e8 if name == names[0] else 9.3e7, "kv_bytes_per_token": 23040.0}
        sized = [of_model(measure, size, "bytes") for measure, size in sizes.items()]
        tables.append(tabulate(sized, model=name, batch=None, context=None))
        for clients in (1, 8, 32):
            gain = {
                names[0]: 1.0,
                names[1]: 1.02 + 0.05 * math.log2(clients),
                names[2]: 1.16 - 0.01 * math.log2(clients),
            }
            rate, first = gain[name] * 40 * clients**0.7, 0.02 * clients / gain[name]
            rows = [
                row("output_rate", None, rate, "median", "server", count=9, unit="tokens/s"),
                row("first_token_time", None, first, "median", "server", count=18 * clients, unit="s"),
                row("first_token_time", None, 1.8 * first, "p95", "server", count=18 * clients, unit="s"),
            ]
            if name != names[0]:
                for end, by in (("median", 1.0), ("low", 0.97), ("high", 1.02)):
                    rows.append(row("rate_ratio", None, gain[name] * by, end, "server", count=9))
                    rows.append(row("first_token_ratio", None, by / gain[name], end, "server", count=9))
            tables.append(tabulate(rows, model=name, batch=clients, context=128))
    table = pd.concat([one.astype({"batch": "Int64", "context": "Int64"}) for one in tables], ignore_index=True)
    most = "Most tokens per second in llama.cpp: at 1 client no-mlp.gguf, 1.14 (1.12 to 1.15) times no-attention.gguf."
    entries = [
        {"label": name, "program": "llama.cpp", "baseline": name == names[0], "format": None,
         "model": {"name": f"/models/{name}", "class": "llama", "num_layers": 30, "hash": HASH}}
        for name in names
    ]  # fmt: skip
    meta = {
        "schema_version": 1, "kind": "bench", "created": "2026-11-21T09:00:00Z", "complete": True, "baseline": names[0],
        "settings": {"concurrency": [1, 8, 32], "contexts": [128], "max_new_tokens": 16, "repeats": 9},
        "model": entries[0]["model"], "models": entries, "versions": VERSIONS, "seed": 0, "machine": MACHINE,
        "warnings": [], "headline": findings(**{"most_tokens llama.cpp": (None, "1", most)}),
    }  # fmt: skip
    return Results(table, meta)
