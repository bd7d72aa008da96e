"""Results as real runs give them, made from closed forms: measurements, training runs, and comparisons of both."""

from __future__ import annotations

import math
from functools import partial
from itertools import islice, product

import numpy as np
import pandas as pd

from fulldepth.reporting.page import payload
from fulldepth.results import Results, compare, tabulate

TOKENS = 16384
TEXT = (
    "It was the best of times , it was the worst of times , it was the age of wisdom ,\n it was the age of foolishness"
)
PROJECTIONS = ("self_attn.v_proj", "mlp.down_proj")
POLICY = {"name": "all", "sentence": "Every token counts; padding never does."}
VERSIONS = {"fulldepth": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.9"}
FACTORS = (("mean", 1), ("standard_error", 0.01), ("std", 0.3), ("p05", 0.55), ("p50", 0.95), ("p95", 1.6))
"""Statistic of the displacement -> its value over the mean."""


def versus(one, other, **options):
    """The comparison of `b` with `a`."""
    return compare([one, other], names=["a", "b"], **options)


def payload_of(results):
    """What the page of results is made of."""
    return payload(results.table, results.meta)


def row(measure, layer, value, statistic="mean", site="residual", other=None, count=TOKENS, unit="1"):
    """A row of a table of results, by default a mean over the tokens at the residual stream."""
    return measure, site, layer, other, statistic, value, count, unit


def of_model(measure, value, unit, statistic="value", count=None):
    """A row about the model as a whole."""
    return row(measure, None, value, statistic, "model", count=count, unit=unit)


def findings(**found):
    """The entry `headline` of a document, from value, unit and sentence of each name."""
    return {name: {"value": value, "unit": unit, "sentence": text} for name, (value, unit, text) in found.items()}


def profile(layers, jump):
    """Displacement of layers 1 to L: large at first, small in the middle, and a jump at the end."""
    return [
        0.16 * math.exp(-layer / 2) + 0.02 + 0.01 * math.sin(layer) + jump * math.exp(-(layers - layer) * 2.2)
        for layer in range(1, layers + 1)
    ]


def rates(means):
    """Layers and jump rates, the last layer first."""
    total = 0.0
    for layer in range(len(means), 1, -1):
        total += 100 * max(0.0, means[layer - 1] - means[layer - 2])
        yield layer, total


def displacement_rows(layers, jump):
    rows, means = [], profile(layers, jump)
    for suffix, shift, count in (("", 1.0, TOKENS), (":no-first", 0.8, TOKENS - 64)):
        for layer, mean in enumerate(means, start=1):
            rows += [
                row("displacement", layer, mean * factor * shift, name + suffix, count=count)
                for name, factor in FACTORS
            ]
        rows.append(row("displacement", layers, means[-1] * 0.7 * shift, "mean" + suffix, "final_normed", count=count))
    for layer, rate in rates(means):
        rows.append(row("jump_rate", layer, rate, "value", unit="%"))
        rows.append(row("jump_rate", layer, 0.1, "standard_error", unit="%"))
    return rows


def similarity(a, b, layers, jump):
    """Decays with distance; the embeddings and, with a jump, the last layer stand apart."""
    away = abs(a - b) / layers
    alike = math.exp(-2.2 * away) - (0.5 if (a == 0) != (b == 0) else 0)
    return alike - (1.6 * jump if (a == layers) != (b == layers) else 0)


def pair_rows(layers, jump):
    rows = []
    readings = (("cosine", "mean", 1.0), ("cosine", "mean_raw", 0.6), ("cka", "debiased", 0.9), ("cka", "biased", 0.5))
    quantiles = (("p05", -0.2), ("p25", -0.08), ("p50", 0.01), ("p75", 0.07), ("p95", 0.12))
    for a, b in product(range(layers + 1), repeat=2):
        alike, pair = similarity(a, b, layers, jump), partial(row, layer=a, other=b, count=2048)
        for measure, statistic, contrast in readings:
            for suffix, squeeze in (("", 1.0), (":no-first", 1.1)):
                value = max(-1.0 if measure == "cosine" else 0.0, 1 - contrast * squeeze * (1 - alike))
                rows.append(pair(measure, value=value, statistic=statistic + suffix))
        if b == layers:
            rows += [pair("cosine", value=min(1.0, alike + shift), statistic=name) for name, shift in quantiles]
    return rows


def lens_rows(layers, quality, classes=False):
    rows, lens = [], partial(row, count=16320)
    final = (0.92 if classes else 0.41) * quality
    for layer in range(layers + 1):
        grown = 1 / (1 + math.exp(-(layer - 0.62 * layers) * 9 / layers))
        rows += [
            lens("lens_accuracy", layer, final * grown),
            lens("lens_accuracy", layer, 0.005, "standard_error"),
            *([lens("lens_f1", layer, 0.9 * final * grown, "macro")] if classes else []),
            lens("lens_loss", layer, 0.05, "standard_error", unit="nats"),
            lens("lens_loss", layer, 9.2 - (9.2 - 6 * (1 - final)) * grown, unit="nats"),
        ]
        if not classes:
            known = 0.3 + 0.7 * grown
            rows += [
                lens("linear_lens_accuracy", layer, final * known),
                lens("linear_lens_loss", layer, 9.2 - (9.2 - 6 * (1 - final)) * known, unit="nats"),
            ]
    shares = np.array([math.exp(-(((layer - 0.75 * layers) / (0.2 * layers)) ** 2)) for layer in range(1, layers + 1)])
    shares /= shares.sum()
    for layer, (share, so_far) in enumerate(zip(shares, shares.cumsum(), strict=True), start=1):
        rows += [
            lens("saturation", layer, float(round(share * 16320)), "count", unit="tokens"),
            lens("saturation", layer, float(share), "share"),
            lens("saturation", layer, float(min(so_far, 1.0)), "cumulative"),
        ]
    middle = float(1 + np.argmax(shares.cumsum() >= 0.5))
    rows.append(lens("saturation", None, middle, "median", unit="layers"))
    deep = float(math.ceil(0.9 * layers))
    depths = [*((f"eps={eps}", float(layers)) for eps in (0.01, 0.05, 0.1, 0.2)), ("relative_eps=0.05", deep)]
    return rows + [lens("effective_depth", None, depth, name, unit="layers") for name, depth in depths]


def coherence_rows(layers):
    rows = []
    for site, shift in (("residual", 0.0), ("attention", 0.08)):
        for layer in range(1, layers + 1):
            mean = 0.62 + shift + 0.25 * math.sin(math.pi * layer / layers)
            weights = np.exp(-(((np.arange(10) + 0.5) / 10 - mean) ** 2) / 0.03)
            weights /= weights.sum()
            corrected = (64 * mean - 1) / 63
            values = {"mean": mean, "mean_corrected": corrected, "share_0.3_0.7": float(weights[3:7].sum())}
            values |= {f"bin_{index}": float(weight) for index, weight in enumerate(weights)}
            rows += [row("coherence", layer, value, name, site, count=64) for name, value in values.items()]
    return rows


def effect_rows(layers):
    """Removal of layers and of MLPs: early ones feed later tokens, late ones change the token itself."""
    rows = []
    for site, factor in (("layer", 1.0), ("mlp", 0.7)):
        part = partial(row, "layer_effect", site=site)
        for removed in range(1, layers + 1):
            fades = math.exp(-removed / 4)
            for scope, share in (("all", factor), ("future", factor * fades)):
                rows.append(part(removed, share * (0.1 + fades), f"divergence_{scope}", unit="nats"))
                rows.append(part(removed, 0.005, f"standard_error_of_divergence_{scope}", unit="nats"))
                rows.append(part(removed, min(1.0, share), f"output_change_{scope}"))
                if removed < layers:
                    rows.append(part(removed, share * 0.4, f"later_{scope}"))
                    rows.append(part(removed, 0.01, f"standard_error_of_later_{scope}"))
                for later in range(removed + 1, layers + 1):
                    change = share * math.exp(-(later - removed) / layers)
                    for statistic, over in (("mean", 0.5), ("q90", 0.9), ("max", 1.5)):
                        rows.append(part(removed, over * change, f"{statistic}_{scope}", other=later))
            rows.append(part(removed, factor * fades, "loss_added", unit="nats"))
            rows.append(part(removed, 0.01, "standard_error_of_loss_added", unit="nats"))
    return rows


def geometry_rows(layers, labels=False):
    rows, entropy = [], partial(row, "renyi_entropy", statistic="mean:plain:1", count=64, unit="nats")
    for layer in range(layers + 1):
        share = layer / layers
        if layer:
            for suffix, shift in (("", 1.0), (":no-first", 0.7)):
                ratio = shift * (0.4 + 9 * math.sin(math.pi * 0.8 * share))
                rows.append(row("norm_ratio", layer, ratio, "mean" + suffix))
                rows.append(row("norm_ratio", layer, 0.6 * ratio, "p05" + suffix))
                rows.append(row("norm_ratio", layer, 1.9 * ratio, "p95" + suffix))
            for index, part in enumerate(("layer", "attention", "mlp")):
                size = (1 + index) * math.exp(-2 * share)
                rows.append(row("contribution", layer, size, "relative_norm", part))
                rows.append(row("contribution", layer, 0.3 * share - 0.1 * index, "cosine", part))
                if part != "mlp":
                    rows.append(row("contribution", layer, 0.97 - 0.1 * share + 0.01 * index, "stream_cosine", part))
            rows.append(entropy(layer, 2.2 + 0.8 * share, site="value"))
            for index, name in enumerate(PROJECTIONS):
                norm = 2 + index * 0.6 + 1.5 * share * math.cos(index)
                rows.append(row("spectral_norm", layer, norm, "value", name, count=1))
        rows.append(entropy(layer, 3.6 - 1.6 * share))
        if labels:
            rows.append(row("nc1", layer, 40 * math.exp(-6 * share), "value", count=872))
        else:
            rows.append(row("separability", layer, 0.55 + 0.4 * share, count=400))
            rows.append(row("separability", layer, 0.04, "std", count=400))
    return rows


def lens_grid(layers, sharpness=1.0, samples=2):
    """Predictions that drift towards the text; every third position never gets there."""
    made = []
    words = [word if index == 0 else f" {word}" for index, word in enumerate(TEXT.split(" "))]
    for sample in range(samples):
        tokens = words[sample : sample + 24]
        targets = words[sample + 1 : sample + 25]
        settled = [1 + (position * 5 + sample) % layers for position in range(len(tokens))]
        grid = []
        for layer in range(layers + 1):
            line = []
            for position, target in enumerate(targets):
                final = target if position % 3 else " the"
                early = words[(position * 7 + layer) % len(words)]
                done = layer >= settled[position]
                probability = sharpness * (0.35 + 0.6 * layer / layers) if done else 0.05 + 0.3 * layer / layers
                line.append([final if done else early, min(0.999, probability)])
            grid.append(line)
        made.append(
            {"title": f"Sample {sample + 1}", "tokens": tokens, "targets": targets, "saturation": settled, "grid": grid}
        )
    return {"samples": made}


def headline(layers, jump):
    _, zeta = next(rates(profile(layers, jump)))
    return findings(
        zeta_L=(zeta, "%", f"The last layer jumps by {zeta:.1f} %, which is large."),
        mean_coherence=(0.78, "1", "Most layers do effective work."),
        median_saturation=(float(round(0.75 * layers)), "layers", "Half of all predictions have settled."),
        effective_depth=(float(layers), "layers", f"The model needs all {layers} layers."),
    )


def model(name, layers, task="causal-lm"):
    return {
        "name": name, "class": "LlamaForCausalLM", "family": "llama", "task": task, "num_layers": layers, "width": 256,
        "parameters": 9_412_352, "dtype": "float32", "config_hash": "sha256:" + "3f" * 32, "revision": None,
    }  # fmt: skip


def meta(name, layers, jump):
    return {
        "schema_version": 1, "kind": "measure", "created": "2026-11-21T08:00:00Z", "complete": True, "seed": 0,
        "settings": {"batch_size": 8, "sequence_length": 256},
        "model": model(name, layers),
        "data": {
            "name": "corpus:builtin", "kind": "text", "hash": "sha256:" + "ab" * 32, "sequences": 64, "tokens": TOKENS,
            "sequence_length": 256, "num_classes": None,
        },
        "token_policy": POLICY,
        "versions": VERSIONS,
        "timings": {"load": 1.2, "forward": 3.4, "measures": {"displacement": 0.1, "cka": 0.9}, "total": 6.0},
        "memory": {"accumulators": 7_000_000, "reservoirs": 27_000_000, "activations": 60_000_000, "peak": None},
        "sampling": {"reservoir_tokens": 2048, "counted_tokens": TOKENS},
        "left_out": [{"measure": "nc1", "reason": "it needs labelled data, and the data is plain text"}],
        "warnings": ["2,048 tokens are fewer than ten times the 256 channels: biased CKA is too high."],
        "headline": headline(layers, jump),
    }  # fmt: skip


def language_model(layers=12, jump=0.25, name="runs/llama-12x256/checkpoint-3000"):
    """Every measure of one language model, and its lens grid."""
    rows = displacement_rows(layers, jump) + pair_rows(layers, jump) + lens_rows(layers, 1 - jump / 2)
    rows += coherence_rows(layers) + geometry_rows(layers)
    return Results(tabulate(rows), {**meta(name, layers, jump), "lens_grid": lens_grid(layers)})


def removal(layers=12):
    """A language model of which layers and MLPs were removed in turn, too."""
    results = language_model(layers)
    return Results(pd.concat([results.table, tabulate(effect_rows(layers))], ignore_index=True), results.meta)


def series(layers=12, steps=(100, 500, 1000, 2000, 3000)):
    """Five checkpoints in which the jump grows."""
    tables, entries = [], []
    for index, step in enumerate(steps):
        jump, quality = 0.05 + 0.06 * index, 0.3 + 0.15 * index
        rows = displacement_rows(layers, jump) + pair_rows(layers, jump) + lens_rows(layers, quality)
        tables.append(tabulate(rows + coherence_rows(layers) + geometry_rows(layers), step=step))
        entries.append(
            {
                "step": step,
                "model": model(f"checkpoint-{step}", layers),
                "headline": headline(layers, jump),
                "lens_grid": lens_grid(layers, quality),
                "left_out": [],
            }
        )
    document = meta("runs/llama-12x256", layers, 0.05 + 0.06 * (len(steps) - 1))
    return Results(pd.concat(tables), {**document, "lens_grid": entries[-1]["lens_grid"], "steps": entries})


def classifier(layers=6):
    """A classifier: labels, no lens grid."""
    rows = displacement_rows(layers, 0.1) + pair_rows(layers, 0.1) + lens_rows(layers, 1.0, classes=True)
    document = meta("bert-tiny-sst2", layers, 0.1)
    document["model"] = {
        **model("bert-tiny-sst2", layers, "text-classification"),
        "class": "BertForSequenceClassification",
    }
    document["data"] |= {"name": "sst2/validation.tsv", "kind": "labelled-text", "num_classes": 2}
    document["token_policy"] = {"name": "cls", "sentence": "Only the first token ([CLS]) counts."}
    document["left_out"], document["warnings"] = [], []
    return Results(tabulate(rows + geometry_rows(layers, labels=True)), document)


def two_towers(image=4, text=6):
    """A model of images and texts, each with its stack of layers."""
    tables = []
    for name, layers, jump in (("image", image, 0.1), ("text", text, 0.3)):
        table = tabulate(displacement_rows(layers, jump) + coherence_rows(layers))
        sites = table["site"].astype(str)
        tables.append(table.assign(site=[name if site == "residual" else f"{name}:{site}" for site in sites]))
    document = meta("clip-tiny", text, 0.3)
    stacks = [{"name": "image", "num_layers": image}, {"name": "text", "num_layers": text}]
    document |= {"stacks": stacks, "lens_grid": None, "headline": {}}
    return Results(pd.concat(tables, ignore_index=True), document)


def comparison(depth="layer"):
    """Three models of 12, 12 and 6 layers; the difference is taken at the same layer."""
    tables, entries, first = [], [], None
    keys = ["measure", "site", "layer", "other", "statistic"]
    for label, layers, jump in (("baseline", 12, 0.25), ("jump-penalty", 12, 0.05), ("half-depth", 6, 0.15)):
        one = language_model(layers, jump, f"runs/{label}")
        beside = math.nan if first is None else one.table[keys].merge(first, "left", keys)["value"]
        tables.append(one.table.assign(model=label, difference=one.table["value"] - beside))
        first = one.table[[*keys, "value"]] if first is None else first
        kept = ("model", "data", "token_policy", "headline", "lens_grid")
        entries.append({"label": label, "baseline": label == "baseline", **{key: one.meta[key] for key in kept}})
    document = meta("", 12, 0.25)
    for key in ("model", "data", "token_policy"):
        del document[key]
    document |= {"kind": "comparison", "models": entries, "depth": depth, "baseline": "baseline", "warnings": []}
    document["left_out"] = []
    document["headline"] = findings(zeta_L=(-20.0, "%", "jump-penalty jumps 20 points less than baseline."))
    return Results(pd.concat(tables), document)


def training_rows(step, layers, jump, level, terms):
    """One evaluation: losses that fall like a power of the step, a jump that grows, a speed that wavers."""
    fallen = math.exp(-step / 60)
    loss, means = level + (7.6 - level) * fallen, profile(layers, jump * (1 - fallen))
    rows = [of_model("validation_loss", loss, "nats", "mean", 4064)]
    if step:
        rows.append(of_model("train_loss", loss - 0.05 + 0.3 * fallen, "nats", "mean", 101_600))
        for term, size in terms.items():
            value, unit = size * (1 - 0.6 * step / 300), "nats" if size > 1 else "1"
            rows.append(row("penalty", None, value, site=term, count=800, unit=unit))
        rows.append(of_model("learning_rate", 2e-3 * (0.1 + 0.9 * (1 - step / 300)), "1"))
    rows += [row("displacement", layer, mean, count=4096) for layer, mean in enumerate(means, start=1)]
    last = islice(rates(means), 3)
    return rows + [row("jump_rate", layer, rate, "value", count=4096, unit="%") for layer, rate in last]


def training(
    name="tiny-jreg",
    layers=12,
    steps=(0, 50, 100, 150, 200, 250, 300),
    jump=0.06,
    level=3.42,
    second=0.4,
    terms=None,
    **settings,
):
    """A training run of 2,048 tokens a step and `second` seconds a step, every other interval 5 % slower."""
    penalties = {"jump": 0.09} if terms is None else terms
    tables, clock = [], 0.0
    for index, step in enumerate(steps):
        rows = training_rows(step, layers, jump, level, penalties)
        if step:
            pace = second * (1.05 if index % 2 else 1.0)
            clock += pace * (step - steps[index - 1])
            rows.append(of_model("throughput", 2048 / pace, "tokens/s", "mean"))
        rows.append(of_model("elapsed", clock, "s"))
        rows.append(of_model("peak_memory", 900 + 700 * second, "MiB"))
        rows.append(of_model("other_load", 0.01, "1"))
        tables.append(tabulate(rows, step=step))
    objective = {"energy_warmup": 800, "aligned": None, **{term: {"weight": 1.0} for term in penalties}}
    document = {
        "schema_version": 1, "kind": "training", "recipe": name, "complete": True, "warnings": [],
        "settings": {
            "about": "tiny-llama with one thing changed.", "method": "jreg" if penalties else "standard",
            "model": {"type": "llama", "hidden_size": 128, "num_hidden_layers": layers}, "objective": objective,
            "data": {"name": "corpus:builtin/train", "validation_share": 0.05, "across_documents": True},
            "tokenizer": "builtin:2048", "steps": 300, "global_batch_size": 16, "sequence_length": 128, "seed": 0,
            "learning_rate": 2e-3, "min_learning_rate": 2e-4, "warmup_steps": 30, "weight_decay": 0.1, "clip": 1.0,
            "schedule": "cosine", "precision": "float32", "eval_every": 50, "report_to": [], **settings,
        },
        "model": {
            "name": name, "class": "LlamaForCausalLM", "model_type": "llama", "parameters": 197_376 * layers + 262_272,
            "num_layers": layers, "training_flops": 7.5e14 if penalties else 6e14,
        },
        "data": {
            "name": "corpus:builtin/train", "hash": "sha256:" + "cd" * 32, "tokens": 614_400, "documents": 1203,
            "train_sequences": 4768, "validation_sequences": 32,
        },
        "versions": VERSIONS,
        "headline": findings(
            validation_loss=(3.448, "nats", "The validation loss fell to 3.448 nats."),
            zeta_L=(5.3, "%", "The last layer jumps by 5.3 %: no large jump."),
            throughput=(5120.0, "tokens/s", ""), peak_memory=(1180.0, "MiB", ""),
        ),
    }  # fmt: skip
    return Results(pd.concat(tables, ignore_index=True), document)


def group(name, jump, level, terms, seeds=range(4), **changes):
    """Runs of one method that differ in the seed."""
    return [
        training(
            name, jump=jump * (1 + 0.2 * math.sin(7 * seed)), level=level + 0.01 * math.cos(5 * seed + len(name)),
            terms=terms, seed=seed, **changes,
        )
        for seed in seeds
    ]  # fmt: skip


def over_seeds(**options):
    """Two methods over four seeds: one suppresses the jump, and its losses are hardly higher."""
    jreg = group("tiny-jreg", 0.06, 3.42, {"jump": 0.09})
    return compare(jreg, against=group("tiny-llama", 0.3, 3.41, {}), names=["tiny-jreg", "tiny-llama"], **options)


def minimal():
    """Displacement and nothing else, with the shortest document that can be read."""
    rows = [row("displacement", layer, 0.1 * layer, count=10) for layer in (1, 2, 3)]
    return Results(tabulate(rows), {"schema_version": 1, "kind": "measure"})
