"""What a search says of its exports beforehand is what `export` does afterwards."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3ForConditionalGeneration, LlavaForConditionalGeneration

import tiny_models
from families import zoo
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.progress import Watcher
from fulldepth.settings.search import SearchSettings
from fulldepth.skip import export, load, search, search_into
from fulldepth.skip.exports.fold import scaled_logits
from fulldepth.skip.exports.possible import possible_formats
from skip import planned
from skip.word_tokenizer import tokenizer, words

IMAGES = {"gemma3": Gemma3ForConditionalGeneration, "llava": LlavaForConditionalGeneration}
PAIRS = [{"prompt": words(n, n + 1), "response": " " + words(*((7 * n + i) % 80 for i in range(4)))} for n in range(10)]


@pytest.mark.parametrize(
    ("family", "healed", "expected"),
    [
        ("llama", True, {"folded", "fast", "decilm"}),
        ("stablelm", True, {"folded"}),
        ("olmo2", False, {"folded", "fast"}),
        ("olmo2", True, {"fast"}),
    ],
)
def test_formats_said_beforehand_are_those_that_export_writes(family, healed, expected, tmp_path):
    # decilm has no words for heads of another width, which zoo's have
    model = tiny_models.build("llama") if family == "llama" else zoo.build(family, "causal-lm")
    plan = planned.plan(model, [2], values="fitted" if healed else None)
    fitting, reasons = possible_formats(model, plan.granularity, 1, healed)
    assert set(fitting) == expected
    assert set(reasons) == {"folded", "fast", "decilm", "layer"} - expected
    for name, reason in reasons.items():
        with pytest.raises(FulldepthError) as refused:
            export(plan, model, name, tmp_path / name)
        assert str(refused.value) == reason


def test_a_search_says_its_formats_first_and_is_refused_for_one_that_the_model_cannot_have(tmp_path):
    said, begun = [], []
    heard = Watcher(say=said.append, begin=lambda title, total: begun.append(title))
    stablelm, options = zoo.build("stablelm", "causal-lm"), {"tokenizer": tokenizer(), "fit": False, "watcher": heard}
    with pytest.raises(FulldepthError, match="stablelm"):
        search(stablelm, PAIRS, 1, format="fast", **options)
    zoo.build("olmo2", "causal-lm").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    settings = SearchSettings(blocks=1, format="folded")
    for responses in (None, 2):
        with pytest.raises(FulldepthError, match="--no-fit"):
            search_into(tmp_path / "model", PAIRS, tmp_path / "out", settings, responses=responses, watcher=heard)
    assert begun == []
    search(stablelm, PAIRS, 1, **options)
    assert said[0].startswith("The plan can be exported as folded. Not fast: There is no class for stabl")


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("family", IMAGES)
@torch.no_grad()
def test_models_that_read_images_are_exported_whole_or_as_their_language_model_alone(family, tmp_path):
    model = IMAGES[family](zoo.config_for(family)).eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    plan = planned.plan(model, [2], values=planned.scalars([2], 3))
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
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
