"""The model card of a checkpoint of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulldepth.errors import one_line
from fulldepth.hf import ModelCard
from fulldepth.results import Finding

LOADING = """\
from transformers import AutoModelForCausalLM, AutoTokenizer
{registering}
model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")"""
REGISTERING = "\nimport fulldepth.architectures  # registers depth_llama\n"
NAMES = {"validation_loss": "Validation loss", "zeta_L": "Jump rate of the last layer", "train_loss": "Training loss"}


def card_of(meta: Mapping[str, Any], findings: Mapping[str, Finding], step: int) -> ModelCard:
    """The card of a checkpoint: recipe, method, data, and the findings of the last evaluation.

    Args:
        meta: metadata of the run's results.
        findings: by name.
        step: optimiser steps taken.
    """
    settings, model = meta["settings"], meta["model"]
    recipe, start = meta.get("recipe") or "settings of its own", settings["model"].get("checkpoint")
    tokens = step * settings["global_batch_size"] * settings["sequence_length"]
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
        "Tokens": f"{tokens:,}",
        "Seed": str(settings["seed"]),
    }
    return ModelCard(
        title=f"{one_line(recipe, 100)}, step {step:,}",
        method=method.strip(),
        numbers=numbers,
        loading=LOADING.format(registering=REGISTERING if "Depth" in model["class"] else ""),
        source=start,
        tags=[settings["method"]],
        notes=["Losses and the jump rate are those of the last evaluation on held-out text."] if findings else [],
    )
