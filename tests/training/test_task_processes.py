"""Classifiers: two processes, which copy or shard the weights, train and evaluate like one.

The two have 33 rows to validate on, in batches of 32: the second process gets one row.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from fulldepth.results import Results
from fulldepth.training import train

sys.path.insert(0, str(Path(__file__).parent))
from sharded_train import alone, launch

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGES = {
    "task": "image-classification",
    "model": {"type": "vit", **SIZES, **NO_DROPOUT, "image_size": 8, "patch_size": 4},
    "data": {"name": "digits:builtin/train", "validation": "digits:builtin/test", "validation_sequences": 33},
}
TEXTS = {"task": "text-classification", "sequence_length": 24}
BERT = {**TEXTS, "model": {"type": "bert", **SIZES, **NO_DROPOUT}, "tokenizer": "wordpiece:300"}
GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
GPT2 = {
    **TEXTS,
    "model": {
        "type": "gpt2",
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 2,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
    "tokenizer": "bpe:300",
}
LANGUAGE = {
    "task": "causal-lm",
    "sequence_length": 24,
    "model": GPT2["model"],
    "tokenizer": "builtin:300",
    "data": {"name": "corpus:builtin/train", "validation_sequences": 33},
}
STEPS = {
    "steps": 4,
    "global_batch_size": 8,
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "adam_epsilon": 1e-3,  # with 1e-8 gradients that are zero but for rounding (biases of keys) move weights, too
    "eval_every": 2,
    "save_every": 2,
}
RECIPES: dict[str, dict[str, Any]] = {
    "vit-multi-exit": {**IMAGES, "method": "multi-exit", "micro_batch_size": 2},
    "bert-cos": {**BERT, "method": "cos-regularised", "objective": {"jump": 0.5}},
    "lm-multi-exit": {**LANGUAGE, "method": "multi-exit", "micro_batch_size": 2},
    "gpt2-aligned": {**GPT2, "method": "aligned", "objective": {"aligned": {"schedule": "always"}}},
}
COMPARED = (
    "train_loss",
    "validation_loss",
    "validation_accuracy",
    "lens_accuracy",
    "displacement",
    "learning_rate",
    "penalty",
)


def texts(path: Path, count: int, seed: int) -> str:
    """Sentences of two to seven words, whose class is that of their words."""
    words = {"bad": ["dull", "bleak", "cold", "sour"], "good": ["fine", "lovely", "bright", "warm"]}
    rng, rows = np.random.default_rng(seed), []
    for number in range(count):
        label = sorted(words)[number % 2]
        chosen = [str(word) for word in rng.choice(words[label], 2 + number % 5)]
        rows.append(json.dumps({"sentence": f"film {seed} {number} is {' '.join(chosen)}", "label": label}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(path)


def table(folder: Path) -> dict[tuple[Any, ...], float]:
    """What was recorded of losses, accuracies and precisions, with their numbers of validation rows."""
    rows = Results.load(folder).table.fillna({"layer": -1, "site": "", "statistic": "", "count": -1})
    rows = rows[rows.measure.isin(COMPARED)]
    keys = zip(rows.measure, rows.site, rows.statistic, rows.layer, rows.step, strict=True)
    values = dict(zip(keys, rows.value, strict=True))
    read = rows[rows.measure.isin(("validation_loss", "lens_accuracy"))]
    return values | {
        ("count", each.measure, each.layer, each.step): each._asdict()["count"] for each in read.itertuples()
    }


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The model's weights and those of its exit heads."""
    found: dict[str, torch.Tensor] = {}
    for path in (folder / f"checkpoint-{step}").glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.fixture(scope="module")
def runs(made_once: Any) -> Any:
    """A folder with every recipe trained by two processes that copy (NAME-copied) and shard (NAME-sharded), and by one
    (NAME-whole)."""
    return made_once("task-processes", train_all)


def train_all(folder: Path) -> None:
    sentences = {"name": texts(folder / "train.jsonl", 60, 0), "validation": texts(folder / "dev.jsonl", 33, 1)}
    for name, recipe in RECIPES.items():
        data = {"data": sentences} if recipe["task"] == TEXTS["task"] else {}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**STEPS, **recipe, **data}), encoding="utf-8")
    for kind in ("copied", "sharded"):
        done = launch(folder, shards=kind == "sharded")
        assert done.returncode == 0, done.stderr[-3000:]
    for name in RECIPES:
        train(alone(folder / f"{name}.yaml"), folder / f"{name}-whole")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["copied", "sharded"])
@pytest.mark.parametrize("name", RECIPES)
def test_two_processes_train_and_evaluate_like_one(runs: Path, name: str, kind: str) -> None:
    whole, two = (table(runs / f"{name}-{each}") for each in ("whole", kind))
    assert two.keys() == whole.keys()
    assert two == pytest.approx(whole, rel=2e-5, abs=1e-6, nan_ok=True)
    expected, found = (weights(runs / f"{name}-{each}", 4) for each in ("whole", kind))
    assert found.keys() == expected.keys()
    assert any("exit_heads" in key for key in found) == ("multi-exit" in name)
    for key, weight in found.items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=2e-6, msg=f"{name} {kind}: {key}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit-multi-exit"])
def test_a_multi_exit_run_is_resumed_with_its_heads(runs: Path, tmp_path: Path, name: str) -> None:
    """By two processes of the same kind, and the sharded checkpoint by one process."""
    for kind, by in (("copied", "copied"), ("sharded", "sharded"), ("sharded", "whole")):
        folder = tmp_path / f"{kind}-{by}"
        shutil.copytree(runs / f"{name}-{kind}", folder)
        shutil.rmtree(folder / "checkpoint-4")
        recipe = runs / f"{name}.yaml"
        if by == "whole":
            train(alone(recipe), folder, resume=True)
        else:
            changes = ["fsdp=true"] if kind == "sharded" else []
            done = launch("train", recipe, *changes, "--output", folder, "--resume", processes=2, shards=bool(changes))
            assert done.returncode == 0, done.stderr[-3000:]
        expected = weights(runs / f"{name}-whole", 4)
        for key, weight in weights(folder, 4).items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=2e-6, msg=f"{kind} by {by}: {key}")
