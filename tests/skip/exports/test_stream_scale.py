"""MMD of folded checkpoints on the original's scale, against a plain MMD of states of the plan's definition."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import fulldepth
import tiny_models
from fulldepth.execution import find_anatomy
from fulldepth.hf import Scalars, first_layers, skipping
from fulldepth.hf.stream_scale import ENTRY, EXPORT_NOTES
from fulldepth.skip.exports.export import export
from fulldepth.skip.exports.fold import fold
from json_files import read_json, write_json
from metrics.oracle import mmd
from refusals import refused
from skip import planned
from skip.word_tokenizer import tokenizer

TEXTS = [" ".join(f"w{(i * j + j // 7) % 37}" for j in range(1, 33)) for i in range(1, 9)]
SETTINGS = {"measures": ["mmd"], "sequence_length": 32, "reservoir_tokens": None, "dtype": "float64"}


@pytest.fixture
def original(tmp_path):
    """A model beside whose stream eps is nothing, saved, and its plan with scalars from 0.7 to 1.4."""
    model = tiny_models.build("llama", dtype=torch.float64)
    model.get_input_embeddings().weight.data.mul_(8)
    model.save_pretrained(tmp_path / "original")
    tokenizer().save_pretrained(tmp_path / "original")
    return model, planned.plan(model, [2])


def values(model, reference):
    given = {"tokenizer": tokenizer()}
    return fulldepth.measure(model, TEXTS, reference=str(reference), **given, **SETTINGS).values("mmd", "value")


@torch.no_grad()
def states(model):
    """[L+1, N, D] of the same tokens, from hooks of the blocks alone."""
    seen = []
    hooks = [model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))]
    hooks += [
        block.register_forward_hook(lambda module, args, output: seen.append(output)) for block in model.model.layers
    ]
    ids = torch.tensor([tokenizer()(text).input_ids for text in TEXTS])
    model(input_ids=ids[:, :32])
    for hook in hooks:
        hook.remove()
    return [state.flatten(0, 1).double().numpy() for state in seen]


def running_factor(plan):
    """c_0..c_L: the product of the stream's factors, layer by layer."""
    factors = [1.0]
    for layer in ("1", "2", "3"):
        scalars = plan.scalars.get(layer, {})
        factors.append(factors[-1] * scalars.get("s_att", 1.0) * scalars.get("s_mlp", 1.0))
    return factors


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("format", ["folded", "fast", "decilm"])
def test_an_export_and_its_plan_in_place_are_equally_far_from_the_original(format, original, tmp_path):
    model, plan = original
    expected = [mmd(x, y) for x, y in zip(states(planned.scaled(model, plan)), states(model), strict=True)]
    assert max(expected) > 0.004
    folder = export(plan, model, format, tmp_path / format, tokenizer=tokenizer()).path
    stated = read_json(folder / "config.json")
    assert_allclose(stated.get(ENTRY) or stated["stream_scale"][::2], running_factor(plan), rtol=1e-6)
    loaded = fulldepth.skip.load(folder, dtype="float64")
    assert_allclose(values(loaded, tmp_path / "original"), expected, atol=1e-6)
    scalars = Scalars.from_dict(plan.scalars, 3)
    with skipping(find_anatomy(model), [2], scalars=scalars):
        assert_allclose(values(model, tmp_path / "original"), expected, atol=1e-6)
        if format == "folded":  # the reference may be the folded one
            assert_allclose(values(model, folder), 0, atol=1e-9)
    far = [
        mmd(x / c, y)
        for x, y, c in zip(states(planned.scaled(model, plan)), states(model), running_factor(plan), strict=True)
    ]
    assert np.abs(np.subtract(far, expected)).max() > 1e-3, "without c another number"


def test_a_model_whose_stream_alone_is_rescaled_is_at_no_distance(original, tmp_path):
    model, _ = original
    scaled = copy.deepcopy(model)
    scaled.get_input_embeddings().weight.data.mul_(0.8)
    for block in scaled.model.layers:
        block.self_attn.o_proj.weight.data.mul_(0.8)
        block.mlp.down_proj.weight.data.mul_(0.8)
    assert values(scaled, tmp_path / "original").max() > 0.005
    setattr(scaled.config, ENTRY, [1 / 0.8] * 4)
    found = fulldepth.measure(scaled, TEXTS, reference=str(tmp_path / "original"), tokenizer=tokenizer(), **SETTINGS)
    assert_allclose(found.values("mmd", "value"), 0, atol=1e-9)
    assert any(
        "those of the model are multiplied by the factors (1.25 to 1.25)" in line for line in found.meta["warnings"]
    )
    setattr(scaled.config, ENTRY, [1.0, -1.0, 1.0, 1.0])
    with refused("expected 4 numbers above 0"):
        values(scaled, tmp_path / "original")


@pytest.mark.usefixtures("unproven")
def test_the_scale_survives_stock_transformers_cuts_and_further_plans(original, tmp_path):
    model, plan = original
    factors = running_factor(plan)
    folder = export(plan, model, "folded", tmp_path / "folded").path
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "again")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float64)
    assert_allclose(getattr(again.config, ENTRY), factors, rtol=1e-6)
    assert_allclose(getattr(first_layers(find_anatomy(again), 2).config, ENTRY), factors[:3], rtol=1e-6)
    further = planned.plan(again, [3], values=planned.scalars([3], seed=1))
    product = np.multiply(factors, running_factor(further))
    twice = fulldepth.skip.load(export(further, again, "fast", tmp_path / "fast").path)
    assert_allclose(np.multiply(getattr(twice.config, ENTRY), twice.config.stream_scale[::2]), product, rtol=1e-6)
    fold(again, further)
    assert_allclose(getattr(again.config, ENTRY), product, rtol=1e-6)


@pytest.mark.usefixtures("unproven")
def test_an_export_that_does_not_state_its_scale_is_refused(original, tmp_path):
    model, plan = original
    folder = export(plan, model, "folded", tmp_path / "folded", tokenizer=tokenizer()).path
    assert (folder / EXPORT_NOTES).exists()
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {name: value for name, value in config.items() if name != ENTRY})
    with refused("does not state by how much.*Export the plan again"):
        values(model, folder)
    bare = export(planned.plan(model, [2], values=None), model, "folded", tmp_path / "bare", tokenizer=tokenizer()).path
    assert ENTRY not in read_json(bare / "config.json")
    assert values(model, bare).max() > 0


def test_a_measurement_inside_skipping_names_the_blocks_and_leaves_out_their_values(original):
    model, _ = original
    options = {"sequence_length": 32, "tokenizer": tokenizer()}
    for blocks, granularity, what in (([2], "attention", "the attention of layer 2"), ([3], "layer", "layer 3")):
        with skipping(find_anatomy(model), blocks, granularity):
            found = fulldepth.measure(model, TEXTS, measures=["displacement", "renyi_entropy"], **options)
        assert f"Measured with blocks skipped in place: {what}." in found.meta["warnings"]
        assert "renyi_entropy (value)" in [entry["measure"] for entry in found.meta["left_out"]]
        if granularity == "layer":
            assert found.values("displacement", "mean", "residual")[3] == pytest.approx(0, abs=1e-7)
