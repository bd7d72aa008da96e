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
