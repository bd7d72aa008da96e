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
