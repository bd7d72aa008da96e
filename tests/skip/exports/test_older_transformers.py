"""Exports give the same logits under transformers 4, in a process that has it instead of the installed version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny_models
from fulldepth.hf.checkpoint_folder import COPIED, copy_files
from fulldepth.skip.exports.export import export, load
from json_files import read_json
from marks import thorough
from skip import planned
from skip.exports.test_export import ids, relative
from skip.exports.test_family_exports import ZOO, logits_of
from skip.exports.test_family_exports import turning as turning_family
from skip.word_tokenizer import tokenizer

OLDER = Path(os.environ.get("FULLDEPTH_OLDER_TRANSFORMERS", Path(__file__).parents[3] / ".venv" / "older"))
READER = Path(__file__).with_name("older_reader.py")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = {
    "llama3": ("llama", LLAMA3),
    "qwen2": ("qwen2", {"rope_type": "default", "rope_theta": 1_000_000.0}),
    "gemma2": ("gemma2", {"rope_type": "default", "rope_theta": 300.0}),
    "gpt_neox": ("gpt_neox", {"rope_type": "default", "rope_theta": 200.0, "partial_rotary_factor": 0.5}),
}
EXPORTS = [
    *(("folded", "llama3"), ("fast", "llama3"), ("decilm", "qwen2"), ("fast", "gpt_neox"), ("fast", "gemma3")),
    *(("fast", family) for family in ("granite", "cohere", "gpt_oss", "olmo2", "opt")),
]
"""Format and kind of model."""
REST = [
    *((format, kind) for kind in KINDS for format in ("folded", "fast")),
    *(("decilm", "llama3"), ("fast", "gpt2")),
    *(("fast", family) for family in ZOO.split()),
]
SAVED_AGAIN = [("fast", "gpt_neox"), ("decilm", "qwen2"), ("fast", "llama3")]
"""Exports that are loaded and saved once more."""


def turning(name, rope):
    """A tiny model that reads positions: rotary, and attention that is far from uniform."""
    plain = tiny_models.build(name)
    config = type(plain.config).from_dict(plain.config.to_dict() | {"rope_parameters": rope})
    torch.manual_seed(1)
    model = type(plain)(config).eval()
    model.get_input_embeddings().weight.data.mul_(30.0)
    for weight_name, weight in model.named_parameters():
        if any(part in weight_name for part in ("q_proj", "k_proj", "query_key")):
            weight.data.mul_(12.0)
    return model


@pytest.mark.slow
@pytest.mark.skipif(not OLDER.is_dir() and "CI" not in os.environ, reason=f"no transformers 4 in {OLDER}: make test")
@pytest.mark.parametrize("exports", [EXPORTS, thorough(REST)], ids=["some", "rest"])
@pytest.mark.usefixtures("unproven")
def test_exports_load_as_the_same_models_under_transformers_4(exports, tmp_path):
    folders = []
    for format, kind in exports:
        if kind in ZOO.split():
            model = turning_family(kind)
        else:
            model = turning(*KINDS[kind]) if kind in KINDS else tiny_models.build(kind)
        plan = planned.plan(model, [2] if kind.startswith("llama") else [1, 3])
        folder = export(plan, model, format, tmp_path / f"{format}-{kind}", tokenizer=tokenizer()).path
        folders.append(folder)
        if (format, kind) in SAVED_AGAIN:  # by transformers 5, which writes one form of the positions
            again = tmp_path / f"{format}-{kind}-again"
            load(folder).save_pretrained(again)
            assert copy_files(COPIED, str(folder), again)
            assert "rope_theta" not in read_json(again / "config.json")
            folders.append(again)
    tokens = ids()
    tokens[1, :4] = 0
    torch.save(tokens, tmp_path / "ids.pt")
    environment = os.environ | {
        "PYTHONPATH": str(OLDER),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-W", "ignore", "-P", str(READER), str(tmp_path / "ids.pt"), *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("4.")
    for folder in folders:
        expected, found = logits_of(load(folder), tokens), torch.load(folder / "logits.pt", weights_only=True)
        assert relative(found[tokens != 0], expected[tokens != 0]) < 1e-5, folder.name
        assert read_json(folder / "tokens.json") == [15, 19]
