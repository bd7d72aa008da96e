"""Which formats can hold a plan, and what is left of models that read images."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    Gemma3ForConditionalGeneration,
    GotOcr2ForConditionalGeneration,
    LlavaForConditionalGeneration,
)

from families import zoo
from fulldepth.execution import find_anatomy
from fulldepth.skip import export, load, search
from fulldepth.skip.exports.fold import scaled_logits
from fulldepth.skip.exports.formats import export_obstacle
from fulldepth.skip.heal import heal
from refusals import refused
from skip import planned
from skip.word_tokenizer import tokenizer, words
from tiny_models import same_weights

IMAGES = {
    "gemma3": Gemma3ForConditionalGeneration,
    "got_ocr2": GotOcr2ForConditionalGeneration,  # the model ties its embeddings, its language model does not
    "llava": LlavaForConditionalGeneration,
}
PAIRS = [{"prompt": words(n, n + 1), "response": " " + words(*((7 * n + i) % 80 for i in range(4)))} for n in range(10)]


def test_a_family_without_a_class_of_its_own_is_refused(tmp_path):
    model = zoo.build("stablelm", "causal-lm")
    with refused("stablelm"):
        export(planned.plan(model), model, "fast", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("family", IMAGES)
@torch.no_grad()
def test_models_that_read_images_are_exported_whole_or_as_their_language_model_alone(family, tmp_path):
    model = IMAGES[family](zoo.config_for(family)).eval()
    before = copy.deepcopy(model.state_dict())
    plan = planned.plan(model, values=planned.scalars([2], 3))
    ids = torch.arange(24).view(2, 12) + 3
    expected = scaled_logits(find_anatomy(model), plan, ids)
    report = export(plan, model, "fast", tmp_path / "fast")
    made = load(tmp_path / "fast")
    assert not any("vision" in name for name, _ in made.named_modules())
    assert float((made(input_ids=ids).logits - expected).abs().max() / expected.abs().max()) < 1e-5
    assert any(f"language model of a {type(model).__name__} alone" in note for note in report.notes)
    found = search(model, PAIRS, 1, tokenizer=tokenizer(), fit=False, granularity="layer")
    again = type(model).from_pretrained(export(found, model, "layer", tmp_path / "layer").path).state_dict()
    vision = [name for name in before if "vision" in name]
    assert vision
    assert all(torch.equal(before[name], again[name]) for name in vision)
    assert same_weights(model, before)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "openai-gpt", "bloom"])
@torch.no_grad()
def test_whole_layers_are_left_out_where_attention_and_mlp_are_not_known_or_have_no_place_of_their_own(
    family, tmp_path
):
    """A state-space model, norms after the sums and no cache, and attention that adds the stream itself."""
    model = zoo.build(family, "causal-lm")
    plan = search(model, planned.texts(90), granularity="layer", search="given", given=[2], fit=False, progress=False)
    made = export(plan, model, "layer", tmp_path / "layer")
    assert made.logit_error == 0
    assert load(made.path).num_parameters() < model.num_parameters()
    if family == "bloom":  # zeros in the attention's output weights leave the stream that it adds
        assert export(plan, model, "folded", tmp_path / "folded").logit_error < 1e-6
        return
    with refused("folded sets what removed attention and MLP add to zero.* Use --format layer"):
        export(plan, model, "folded", tmp_path / "folded")
    with refused("cannot be healed: its .* --format layer` writes"):
        heal(plan, model, planned.texts(90), tmp_path / "healed", steps=0)
    with refused("takes no scalars: its .* Search with --no-fit"):
        search(model, planned.texts(90), granularity="layer", search="given", given=[2], progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("shared_blocks", [1, 2])
@torch.no_grad()
def test_a_block_that_several_layers_share_loses_the_adapters_of_a_removed_layer(shared_blocks, tmp_path):
    """Zamba2: every hybrid layer has adapters of its own in the shared block, numbered by hybrid layers. Without the
    last layer the others keep their number; without an earlier one they would read the adapters of another."""
    kinds = ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"]
    model = zoo.build("zamba2", "causal-lm", num_hidden_layers=6, layers_block_type=kinds, num_mem_blocks=shared_blocks)
    for name, weight in model.named_parameters():
        if "adapter" in name:
            weight.normal_(std=0.3)
    made = export(planned.plan(model, (6,), "layer", values=None), model, "layer", tmp_path / "layer")
    ids = torch.arange(12)[None]
    hook = model.model.layers[5].register_forward_hook(lambda layer, args, output: args[0])
    expected = model(input_ids=ids, use_cache=False).logits
    hook.remove()
    assert torch.equal(type(model).from_pretrained(made.path)(input_ids=ids, use_cache=False).logits, expected)
    with refused(r"cannot be cut to layers 1, 3, 4, 5, 6: (?!.*(merged|fast|folded))"):
        export(planned.plan(model, (2,), "layer", values=None), model, "layer", tmp_path / "other")
    with refused("only from the list layers_block_type(?!.*(fast|folded)).* --by-list` writes it nevertheless"):
        export(planned.plan(model, (1,), "layer", values=None), model, "layer", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@torch.no_grad()
def test_decoding_is_proved_as_generate_decodes(tmp_path):
    """Bamba, which counts positions wrongly unless it is given them."""
    model = zoo.build("bamba", "causal-lm")
    assert export(planned.plan(model, (2,), values=None), model, "folded", tmp_path / "folded").logit_error < 1e-6


def test_without_places_for_zeros_folded_is_not_advised():
    """Nemotron-H without its one layer that attends fails in transformers, and no zeros can stand for a layer."""
    obstacle = export_obstacle(zoo.build("nemotron_h", "causal-lm"), "layer")
    assert obstacle.startswith("Not every plan of whole layers can be exported. ")
    assert "folded" not in obstacle


def test_a_list_that_has_not_one_entry_per_layer_says_nothing_of_the_kinds_of_layers():
    """GPT-Neo's `attention_types` states counts."""
    model = zoo.build("gpt_neo", "causal-lm", num_layers=4, attention_types=[[["global", "local"], 2]])
    assert "only from the list attention_layers of the configuration" in export_obstacle(model, "layer")
