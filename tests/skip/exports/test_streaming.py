"""Exports file by file: what is held beside the model, shards, and models whose weights are on disk."""

from __future__ import annotations

import weakref

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny_models
from families import zoo
from fulldepth.execution.memory import AllocationTracker
from fulldepth.hf import is_offloaded
from fulldepth.skip.exports import export as exporting
from fulldepth.skip.exports.export import export, load
from fulldepth.skip.exports.fold import fold
from fulldepth.subject import open_checkpoint
from json_files import read_json
from skip import plain, planned
from skip.exports.test_export import ids, logits


def weights(folder):
    """Name -> weight in any of the files of a checkpoint."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        own = load_file(path)
        assert not found.keys() & own.keys()
        found |= own
    return found


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("format", ["folded", "decilm"])
def test_an_export_holds_one_file_of_weights_beside_the_model(format, tmp_path):
    model = plain.fresh(16, 128)
    plan = planned.plan(model, [2, 5])
    size = sum(parameter.nbytes for parameter in model.parameters())
    shard = size // 8
    with AllocationTracker([*model.parameters(), *model.buffers()]) as tracker:
        export(plan, model, format, tmp_path / "out", shard_size=shard)
    assert tracker.peak <= shard
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) > 0.8 * size


def test_a_model_that_the_export_loaded_is_dropped_before_the_check(tmp_path, monkeypatch):
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path / "model")
    loaded, alive = [], []

    def watched(*arguments, **options):
        checkpoint = open_checkpoint(*arguments, **options)
        loaded.append(weakref.ref(checkpoint.model))
        return checkpoint

    monkeypatch.setattr(exporting, "open_checkpoint", watched)
    monkeypatch.setattr(exporting, "prove_export", lambda *_: alive.append(loaded[0]()) or 0.0)
    export(planned.plan(model), tmp_path / "model", "decilm", tmp_path / "out")
    assert alive[0] is None


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_shards_hold_what_transformers_saves(family, tmp_path):
    """Of the model folded in place; several names in a file stand for a part of one weight in memory."""
    model = zoo.build(family, "causal-lm")
    plan = planned.plan(model, values=None)
    made = export(plan, model, "folded", tmp_path / "out", shard_size="40KB").path
    files = list(made.glob("model-*.safetensors"))
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert len(files) > 2
    assert all(path.stat().st_size < max(40_000, largest) + 8_000 for path in files)  # with its header
    index = read_json(made / "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights(made).values())
    fold(model, plan)
    model.save_pretrained(tmp_path / "stock")
    expected, got = weights(tmp_path / "stock"), weights(made)
    assert index["weight_map"].keys() == expected.keys()
    assert tiny_models.same_weights(got, expected)
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(made).eval()(input_ids=ids()).logits
        assert torch.equal(again, model(input_ids=ids()).logits)


ENDS = dict.fromkeys(("model.embed_tokens", "lm_head", "model.norm", "model.rotary_emb"), "cpu")
MAPS = {
    "all": {"": "disk"},
    "within blocks": ENDS
    | {f"model.layers.{i}.{part}": "cpu" for i in range(3) for part in ("input_layernorm", "post_attention_layernorm")}
    | {f"model.layers.{i}.self_attn": ("cpu", "disk")[i % 2] for i in range(3)}
    | {f"model.layers.{i}.mlp": ("disk", "cpu")[i % 2] for i in range(3)},
}


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize(
    ("name", "format", "map_name"),
    [("llama", "fast", "all"), ("qwen2", "decilm", "within blocks"), ("gemma3", "folded", "all")],
)
def test_an_export_of_an_offloaded_model_is_that_of_the_model_in_memory(name, format, map_name, tmp_path):
    model = tiny_models.build(name)
    plan = planned.plan(model)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    expected = export(plan, tmp_path / "model", format, tmp_path / "expected", device="cpu").path
    made = export(plan, tmp_path / "model", format, tmp_path / "out", device_map=MAPS[map_name], shard_size="30KB").path
    first, second = weights(made), weights(expected)
    assert first.keys() == second.keys()
    assert all(
        weight.dtype == second[name].dtype and torch.equal(weight, second[name]) for name, weight in first.items()
    )
    assert (made / "config.json").read_text() == (expected / "config.json").read_text()
    again = load(made, device_map={"": "disk"})
    assert is_offloaded(again)
    assert torch.equal(logits(again), logits(load(expected, device="cpu")))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_fresh_process_spreads_an_export_of_a_spread_model(tmp_path):
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path / "model")
    made = export(planned.plan(model), tmp_path / "model", "fast", tmp_path / "out", device_map={"": "disk"})
    assert made.verified
