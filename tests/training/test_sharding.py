"""`fulldepth train fsdp=true` in processes that shard gives what one process gives."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fulldepth.errors import FulldepthError
from fulldepth.hf import notes_of, seal
from fulldepth.results import Results
from fulldepth.settings import layer, read
from fulldepth.training import TrainSettings, export_run, train
from fulldepth.training.model import build_config, build_model
from training.conftest import MODEL as LLAMA

sys.path.insert(0, str(Path(__file__).parent))
from sharded_train import alone, launch

FOUR_STEPS = {
    "model": LLAMA,
    "steps": 4,
    "global_batch_size": 4,
    "sequence_length": 24,
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "eval_every": 2,
    "save_every": 2,
}
TIED = {"model": {**LLAMA, "tie_word_embeddings": True}}
RECIPES: dict[str, dict[str, Any]] = {
    "standard": {},
    "tree": {
        "model": {**LLAMA, "type": "depth_llama", "residual": "tree", "tree": {1: [-1, 0], 2: [0, 1]}},
        "objective": {"coherence": {"weight": 0.5, "layers": [1, 2]}, "orthogonality": {"weight": 0.5, "layers": [3]}},
    },
    "lime": {
        "model": {**LLAMA, "type": "depth_llama", "memory": "dynamic"},
        "router_learning_rate": 1e-2,
        "objective": {"aligned": {"schedule": "always"}, "similarity": 0.2},
    },
    "tied": {**TIED, "objective": {"aligned": 1.0, "jump": 0.5}, "micro_batch_size": 1, "gradient_checkpointing": True},
    "autocast": {**TIED, "objective": {"aligned": 1.0, "jump": 0.5}, "precision": "autocast"},
    "bfloat16": {**TIED, "objective": {"aligned": {"schedule": "always"}}, "precision": "bfloat16"},
}
RANDOM = {"rng_state.pth", "rng_state_0.pth", "rng_state_1.pth"}
EXACT = ("standard", "tree", "lime", "tied")


def numbers(results: Results, *measures: str) -> list[float]:
    wanted = measures or ("validation_loss", "train_loss", "penalty", "displacement", "learning_rate")
    return results.table[results.table.measure.isin(wanted)].value.tolist()


@pytest.fixture(scope="module")
def runs(sources: tuple[Path, Path], made_once: Any) -> Any:
    """A folder with every recipe trained by two processes that shard (NAME-sharded) and by one (NAME-whole)."""
    return made_once("sharding", lambda folder: train_all(folder, *map(str, sources)))


def train_all(folder: Path, text: str, tokenizer: str) -> None:
    shared = {"data": {"name": text, "validation_share": 0.2, "validation_sequences": 6}, "tokenizer": tokenizer}
    for name, changes in RECIPES.items():
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**FOUR_STEPS, **shared, **changes}), encoding="utf-8")
    done = launch(folder)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in RECIPES:
        train(alone(folder / f"{name}.yaml"), folder / f"{name}-whole")


def assert_same_weights(one: Path, two: Path) -> None:
    """The same files and the same model in both checkpoints."""
    assert {path.name for path in one.iterdir()} ^ {path.name for path in two.iterdir()} <= RANDOM
    found, expected = (load_file(checkpoint / "model.safetensors") for checkpoint in (one, two))
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_sharded_processes_train_like_one(name: str, runs: Path) -> None:
    whole, sharded = (Results.load(runs / f"{name}-{kind}") for kind in ("whole", "sharded"))
    assert numbers(sharded) == pytest.approx(numbers(whole), rel=1e-5, abs=1e-6)
    assert_same_weights(runs / f"{name}-sharded" / "checkpoint-4", runs / f"{name}-whole" / "checkpoint-4")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autocast", "bfloat16", "standard"])
def test_losses_and_reductions_are_float32(name: str, runs: Path) -> None:
    found = json.loads((runs / "dtypes-0.json").read_text())[name]
    assert (found["losses"], found["reductions"]) == (["torch.float32"], ["torch.float32"])
    states = torch.load(runs / f"{name}-sharded" / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"]
    dtypes = {state[key].dtype for state in states.values() for key in ("exp_avg", "exp_avg_sq")}
    assert dtypes == {torch.bfloat16 if name == "bfloat16" else torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_only_the_first_process_draws_the_weights(name: str, runs: Path) -> None:
    first, second = (json.loads((runs / f"dtypes-{rank}.json").read_text())[name]["loaded"] for rank in (0, 1))
    assert (len(first), second) == (1, [])


def test_a_model_without_values_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident memory of a second process that shards, against the bytes of a model's weights."""
    model = {
        **LLAMA,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "tie_word_embeddings": True,
    }
    settings = layer(TrainSettings, {"model": model, "fsdp": True})
    config = build_config(settings.model, vocab_size=400, positions=24)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    build_model(config, layer(TrainSettings, {"model": LLAMA}))  # imports
    monkeypatch.setenv("RANK", "1")
    before = resident()
    empty = build_model(config, settings)
    size = sum(p.numel() * p.element_size() for p in empty.parameters())
    assert size > 2**28
    assert resident() - before < size / 4
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    inverse = empty.model.rotary_emb.inv_freq
    torch.testing.assert_close(inverse, 10_000.0 ** (-torch.arange(len(inverse)) / len(inverse)))
    for whole in ({"data": {"across_documents": False}}, {"fsdp": False}, {"objective": {"multi_exit": 1.0}}):
        small = layer(TrainSettings, {"model": LLAMA, "fsdp": True, **whole})
        built = build_model(build_config(small.model, vocab_size=400, positions=24), small)
        assert bool(built.model.embed_tokens.weight.any())


@pytest.mark.slow
def test_sharded_autocast_is_close_to_one_process(runs: Path) -> None:
    # Near 6 nats bfloat16 has steps of 1/32: a loss in that type is off by up to 0.016.
    whole, sharded = (Results.load(runs / f"autocast-{kind}") for kind in ("whole", "sharded"))
    for measure in ("validation_loss", "train_loss"):
        assert numbers(sharded, measure) == pytest.approx(numbers(whole, measure), abs=2e-3)


def test_one_process_on_a_cpu_does_not_shard(recipe: Any, tmp_path: Path) -> None:
    settings = layer(TrainSettings, read(recipe(fsdp=True), "train"))
    with pytest.raises(FulldepthError, match="fsdp needs accelerators"):
        train(settings, tmp_path / "run")


def resumable(runs: Path, name: str, copy: Path) -> Path:
    """The run as it was when it was killed after its second step."""
    shutil.copytree(runs / name, copy)
    shutil.rmtree(copy / "checkpoint-4")
    return copy


@pytest.mark.slow
def test_a_run_is_resumed_to_the_same_bytes_and_by_other_processes(runs: Path, tmp_path: Path) -> None:
    """A checkpoint of sharded weights by two processes and by one; one of whole weights by two processes that shard."""
    recipe = runs / "tied.yaml"
    for kind in ("sharded", "whole"):
        folder = resumable(runs, f"tied-{kind}", tmp_path / kind)
        done = launch("train", recipe, "fsdp=true", "--output", folder, "--resume")
        assert done.returncode == 0, done.stderr[-3000:]
        assert_same_weights(folder / "checkpoint-4", runs / "tied-whole" / "checkpoint-4")
    again, before = (
        load_file(run / "checkpoint-4/model.safetensors") for run in (tmp_path / "sharded", runs / "tied-sharded")
    )
    assert all(torch.equal(again[name], weight) for name, weight in before.items())
    train(alone(recipe), resumable(runs, "tied-sharded", tmp_path / "alone"), resume=True)
    assert_same_weights(tmp_path / "alone" / "checkpoint-4", runs / "tied-whole" / "checkpoint-4")


@pytest.mark.slow
def test_damaged_states_of_a_sharded_run_are_refused(runs: Path, tmp_path: Path) -> None:
    folder = resumable(runs, "tied-sharded", tmp_path / "run")
    states = torch.load(folder / "checkpoint-2" / "optimizer.pt", weights_only=True)
    states["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(states, folder / "checkpoint-2" / "optimizer.pt")
    seal(folder / "checkpoint-2", notes_of(folder / "checkpoint-2"))
    done = launch("train", runs / "tied.yaml", "fsdp=true", "--output", folder, "--resume")
    assert done.returncode != 0
    assert "Cannot read" in done.stderr


def test_an_exported_model_loads_in_its_precision(recipe: Any, tmp_path: Path) -> None:
    train(layer(TrainSettings, read(recipe(steps=2, eval_every=2, save_every=1), "train")), tmp_path / "run")
    for dtype in (None, "bfloat16"):
        made = export_run(tmp_path / "run", tmp_path / str(dtype), step=1, dtype=dtype)
        model = AutoModelForCausalLM.from_pretrained(made)
        assert model.dtype == (torch.bfloat16 if dtype else torch.float32)
        AutoTokenizer.from_pretrained(made)
        assert not list(made.glob("optimizer*")) + list(made.glob("rng*"))
    for run, options, word in (
        (tmp_path / "run", {"output": tmp_path / "None"}, "already exists"),
        (tmp_path / "run", {"output": tmp_path / "new", "step": 5}, "checkpoint-5"),
        (tmp_path / "run", {"output": tmp_path / "new", "dtype": "int3"}, "dtype"),
        (tmp_path, {"output": tmp_path / "new"}, "no whole checkpoint"),
    ):
        with pytest.raises(FulldepthError, match=word):
            export_run(run, **options)
    assert not (tmp_path / "new").exists()


def test_weights_that_are_saved_under_other_names_are_resumed_too(recipe: Any, tmp_path: Path) -> None:
    chosen = layer(TrainSettings, read(recipe(model={"type": "mixtral"}, steps=4, eval_every=4, save_every=2), "train"))
    train(chosen, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-4")
    train(chosen, tmp_path / "again", resume=True)
    again, before = (load_file(tmp_path / run / "checkpoint-4/model.safetensors") for run in ("again", "whole"))
    assert all(torch.equal(again[name], weight) for name, weight in before.items())
