"""The model card of a checkpoint of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulldepth.errors import one_line
from fulldepth.hf import ModelCard
from fulldepth.results import Finding

LOADING = """\
from transformers import {auto}, {processing}
{registering}
model = {auto}.from_pretrained("PATH")
{name} = {processing}.from_pretrained("PATH")"""
AUTO = {"image-classification": "AutoModelForImageClassification", "detection": "AutoModelForObjectDetection"}
AUTO |= {"text-classification": "AutoModelForSequenceClassification"}
REGISTERING = "\nimport fulldepth.architectures  # registers depth_llama\n"
NAMES = {
    "validation_loss": "Validation loss",
    "validation_accuracy": "Validation accuracy",
    "zeta_L": "Jump rate of the last layer",
    "train_loss": "Training loss",
}


def card_of(meta: Mapping[str, Any], findings: Mapping[str, Finding], step: int) -> ModelCard:
    """The card of a checkpoint: recipe, method, data, and the findings of the last evaluation.

    Args:
        meta: metadata of the run's results.
        findings: by name.
        step: optimiser steps taken.
    """
    settings, model = meta["settings"], meta["model"]
    recipe, start = meta.get("recipe") or "settings of its own", settings["model"].get("checkpoint")
    task = settings.get("task", "causal-lm")
    items = step * settings["global_batch_size"]
    amount = ("Tokens", items * settings["sequence_length"]) if task == "causal-lm" else ("Examples", items)
    processing = "AutoTokenizer" if task in ("causal-lm", "text-classification") else "AutoImageProcessor"
    beginning = f"fine-tuned from `{one_line(start, 200)}`" if start else "trained from scratch"
    method = (
        f"A {model['class']} {beginning} with the method `{settings['method']}` of fulldepth (recipe: "
        f"{one_line(recipe, 100)}) on `{one_line(settings['data']['name'], 200)}`. {one_line(settings['about'], 400)}"
    )
    numbers = {
        NAMES[name]: f"{finding.value:.4g} {finding.unit}" for name, finding in findings.items() if name in NAMES
    }
    numbers |= {
        "Parameters": f"{model['parameters']:,}",
        "Optimiser steps": f"{step:,} of {settings['steps']:,}",
        amount[0]: f"{amount[1]:,}",
        "Seed": str(settings["seed"]),
    }
    data = settings["data"]
    held_out = one_line(data.get("validation") or f"a held-out part of {data['name']}", 200)
    return ModelCard(
        title=f"{one_line(recipe, 100)}, step {step:,}",
        method=method.strip(),
        numbers=numbers,
        loading=LOADING.format(
            registering=REGISTERING if "Depth" in model["class"] else "",
            auto=AUTO.get(task, "AutoModelForCausalLM"),
            processing=processing,
            name="tokenizer" if processing == "AutoTokenizer" else "processor",
        ),
        source=start,
        tags=[settings["method"]],
        notes=[f"Losses and the jump rate are those of the last evaluation, on {held_out}."] if findings else [],
    )
