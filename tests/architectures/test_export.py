"""A checkpoint carries the code that reads it, and that code needs nothing of ours."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_models
from architectures.combinations import build, tokens
from fulldepth import architectures
from fulldepth.architectures import SKIPPED, DepthLlamaConfig
from json_files import read_json
from marks import thorough

ROOM = Path(architectures.__file__).parent / "depth_llama"
SKIPPED_CODE = [path for path in (ROOM.parent / "skipped").glob("*.py") if path.stem != "__init__"]
CODE = {path.name for path in ROOM.glob("*_depth_llama.py")}
ELSEWHERE = """
import sys
sys.modules["fulldepth"] = None
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder, ids, kept = sys.argv[1:]
ids = torch.load(ids)
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
body = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
assert torch.equal(model.model(ids).last_hidden_state, body(ids).last_hidden_state)
fresh = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
assert {k: v.shape for k, v in fresh.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
model.train()(input_ids=ids, labels=ids).loss.backward()
assert all(p.grad is not None for p in model.parameters())
model.save_pretrained(kept)
"""


def run(program, cache, *arguments):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cache)}
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=cache.parent)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("path", [*ROOM.glob("*_depth_llama.py"), *SKIPPED_CODE], ids=lambda path: path.name)
def test_modelling_files_import_torch_transformers_and_each_other(path):
    siblings = {other.name for other in path.parent.glob("*.py")} - {"__init__.py"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            tops = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            tops = [f"{node.module}.py"] if node.level == 1 else [str(node.module).split(".")[0]]
            assert node.level < 2
        else:
            continue
        assert set(tops) <= sys.stdlib_module_names | {"torch", "transformers"} | siblings, f"{path}:{node.lineno}"


def test_a_skipped_checkpoint_loads_through_the_auto_classes(tmp_path):
    kind = SKIPPED["qwen3"]
    model = kind(kind.config_class(**tiny_models.DECODER, skipped_attention=[1])).eval()
    model.save_pretrained(tmp_path)
    code = {f"{part}_skipped.py" for part in ("configuration", "modeling")}
    assert {path.name for path in tmp_path.glob("*.py")} == code
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is kind
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tree-dynamic", thorough("hyper")])
def test_a_checkpoint_lives_on_without_this_package(name, tmp_path):
    """Loaded, trained and saved elsewhere under every Auto class, it comes back to us with equal outputs."""
    model, ids = build(name, dtype=torch.float32), tokens()
    folder, kept = tmp_path / "model", tmp_path / "kept"
    model.save_pretrained(folder)
    torch.save(ids, tmp_path / "ids.pt")
    run(ELSEWHERE, tmp_path / "modules", folder, tmp_path / "ids.pt", kept)
    for place in (folder, kept):
        assert {path.name for path in place.glob("*.py")} == CODE
        assert set(read_json(place / "config.json")["auto_map"]) == {
            "AutoConfig",
            "AutoModel",
            "AutoModelForCausalLM",
        }
    again = type(model).from_pretrained(kept).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_configuration_says_everything_that_differs_from_llama(tmp_path):
    """Also what was left to defaults: another default tomorrow must not change today's checkpoints."""
    DepthLlamaConfig(residual="tree", num_hidden_layers=12, memory="dynamic").save_pretrained(tmp_path)
    saved = read_json(tmp_path / "config.json")
    assert saved["tree"] == {"1": [-1, 0], "2": [0, 1], "4": [0, 3], "6": [1, 5], "8": [1, 7]}
    switches = ("residual", "memory", "num_streams", "hyper_dynamic", "kv_init", "router_input", "router_top_p")
    assert {key: saved[key] for key in switches} == {
        "residual": "tree",
        "memory": "dynamic",
        "num_streams": 4,
        "hyper_dynamic": True,
        "kv_init": "identity",
        "router_input": "normed",
        "router_top_p": None,
    }
