"""Recipes for mergekit, read by an interpreter of their own: they name the weights of the `layer` export."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tiny_models
from fulldepth.skip.exports.export import export
from fulldepth.skip.exports.formats.mergekit import ranges, readable_source
from refusals import refused
from skip import planned

LAYERS = 6


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Llama of six layers as a checkpoint."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("source") / "llama"
    LlamaForCausalLM(LlamaConfig(**tiny_models.DECODER | {"num_hidden_layers": LAYERS})).save_pretrained(folder)
    return folder


def merged(recipe):
    """Name -> weight that a passthrough recipe makes: layers in the order of the slices, all else as it is."""
    assert recipe.keys() == {"merge_method", "slices", "dtype"}
    assert recipe["merge_method"] == "passthrough"
    weights, number = {}, 0
    for piece in recipe["slices"]:
        (only,) = piece["sources"]
        stored = load_file(f"{only['model']}/model.safetensors")
        first, end = only["layer_range"]
        for layer in range(first, end):
            for name, weight in stored.items():
                if name.startswith(f"model.layers.{layer}."):
                    weights[name.replace(f"layers.{layer}.", f"layers.{number}.", 1)] = weight
            number += 1
        weights |= {name: weight for name, weight in stored.items() if ".layers." not in name}
    return {name: weight.to(getattr(torch, recipe["dtype"])) for name, weight in weights.items()}


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("blocks", [[3, 4], [1, 4, 6], [6, 5]])
def test_a_recipe_makes_the_weights_of_the_layer_export(blocks, source, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(source)
    plan = planned.plan(model, blocks, "layer", values=None)
    monkeypatch.chdir(source.parent)  # a relative name, and a recipe elsewhere
    report = export(plan, "llama", "mergekit", tmp_path / "new" / "small.yaml")
    made = merged(yaml.safe_load(report.path.read_text("utf-8")))
    expected = load_file(export(plan, model, "layer", tmp_path / "layer").path / "model.safetensors")
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], weight) for name, weight in expected.items())
    assert report.parameters == sum(weight.numel() for weight in expected.values())
    assert (report.verified, report.logit_error, report.bytes) == (False, None, report.path.stat().st_size)
    assert "UNVERIFIED" in report.notes[0]
    named = ", ".join(f"model.layers.{layer - 1}" for layer in sorted(blocks))
    assert report.notes[1].endswith(f": {named}.")
    assert [path.name for path in report.path.parent.iterdir()] == ["small.yaml"]


@given(st.sets(st.integers(1, 12), min_size=1))
def test_ranges_are_the_layers_from_0_and_no_two_touch(layers):
    found = ranges(sorted(layers))
    assert [number for start, end in found for number in range(start, end)] == [layer - 1 for layer in sorted(layers)]
    assert all(end < start for (_, end), (start, _) in pairwise(found))


@pytest.mark.parametrize(
    ("name", "granularity", "values", "target", "words"),
    [
        ("llama", "attention", None, "new.yaml", "granularity layer, this one skips by attention"),
        ("llama", "layer", "fitted", "new.yaml", "scalars. Use --format layer.*--no-fit"),
        ("llama", "layer", None, "new", "must end with .yaml"),
        ("qwen2", "layer", None, "new.yaml", "also describes single layers .layer_types.*--format layer"),
        ("gemma2", "layer", None, "new.yaml", "layer_types"),
        ("depth_llama-scaled", "layer", None, "new.yaml", "cannot read a DepthLlamaForCausalLM"),
    ],
)
def test_what_mergekit_cannot_hold_is_refused(name, granularity, values, target, words, tmp_path):
    model = tiny_models.build(name)
    model.save_pretrained(tmp_path / "model")
    model = type(model).from_pretrained(tmp_path / "model").eval()
    plan = planned.plan(model, [2], granularity, values)
    with refused(words):
        export(plan, model, "mergekit", tmp_path / target)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_that_is_no_checkpoint_is_refused(tmp_path):
    model = tiny_models.build("llama")
    with refused("this model is neither"):
        export(planned.plan(model, [2], "layer", None), model, "mergekit", tmp_path / "new.yaml")
    model.name_or_path = "someone/model"
    assert readable_source(model) == "someone/model"
    model.config._commit_hash = "0" * 40  # transformers notes it for what is loaded from the Hub
    assert readable_source(model) == "someone/model@" + "0" * 40


def changed(model):
    """Change one weight in memory, as merging an adapter does."""
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0].add_(1.0)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recipe_names_a_source_with_the_weights_of_the_plan_alone(source, tmp_path, dtype):
    """The recipe that is written makes the plan's weights, and a model that was changed in memory gets none."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    report = export(planned.plan(model, [3], "layer", values=None), model, "mergekit", tmp_path / "same.yaml")
    assert not any("were not compared" in note for note in report.notes)
    made = merged(yaml.safe_load(report.path.read_text("utf-8")))
    assert torch.equal(made["model.layers.1.mlp.up_proj.weight"], model.model.layers[1].mlp.up_proj.weight)
    plan = planned.plan(changed(model), [3], "layer", values=None)
    with refused("changed in memory.*save_pretrained.*--format layer", str(source)):
        export(plan, model, "mergekit", tmp_path / "new.yaml")
    model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)
    report = export(plan, saved, "mergekit", tmp_path / "new.yaml")
    assert str(tmp_path / "saved") in report.path.read_text("utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.yaml", "same.yaml", "saved"]


def test_a_converted_model_has_the_weights_of_its_source(source, tmp_path):
    """Rounded to the precision that the recipe states, from which mergekit rounds as well."""
    model = AutoModelForCausalLM.from_pretrained(source).to(torch.bfloat16)
    report = export(planned.plan(model, [3], "layer", values=None), model, "mergekit", tmp_path / "new.yaml")
    made = merged(yaml.safe_load(report.path.read_text("utf-8")))
    assert torch.equal(made["model.layers.1.mlp.up_proj.weight"], model.model.layers[1].mlp.up_proj.weight)


def test_a_source_that_cannot_be_read_is_noted(source, tmp_path):
    """A name of the Hub that is not in the cache, and a folder whose weights are damaged."""
    model = AutoModelForCausalLM.from_pretrained(source)
    plan = planned.plan(model, [3], "layer", values=None)
    model.name_or_path = "someone/model-that-is-not-cached"
    report = export(plan, model, "mergekit", tmp_path / "hub.yaml")
    assert any("not compared with those of the plan, as they are not on this machine" in note for note in report.notes)
    model.save_pretrained(tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no weights")
    model.name_or_path = str(tmp_path / "damaged")
    report = export(plan, model, "mergekit", tmp_path / "damaged.yaml")
    assert any("not compared with those of the plan: " in note for note in report.notes)


def test_a_path_is_read_once(source, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(source)
    plan = planned.plan(model, [3], "layer", values=None)
    monkeypatch.setattr("fulldepth.skip.exports.formats.mergekit.open_checkpoint", None)  # calling it would fail
    export(plan, source, "mergekit", tmp_path / "new.yaml")
