"""Model cards as the Hub's own client reads them."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard as HubCard

import tiny_models
from fulldepth.hf import ModelCard
from fulldepth.skip.exports.export import export
from skip import planned


def test_the_card_of_an_export_has_its_losses_and_the_licence_of_the_original(tmp_path, monkeypatch):
    monkeypatch.setattr("fulldepth.skip.exports.export.prove_export", lambda *_: 2.5e-7)
    model = tiny_models.build("llama")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en, de]\n---\n# Base\n")
    plan = planned.plan(model, [2, 3])
    entries = {"losses": [2.0, 2.25, 2.5], "healed_loss": 2.125, "model": plan.document()["model"]}
    entries["model"]["name"] = str(tmp_path / "base")
    made = export(plan.changed(**entries), model, "fast", tmp_path / "out")
    card = HubCard.load(made.path / "README.md")
    assert card.data.to_dict() == {
        "license": "apache-2.0",
        "language": ["en", "de"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["fulldepth", "hopscotch", "pruning"],
    }
    for words in ("attention of layers 2, 3", "2.0000 nats", "2.5000 nats", "2.1250 nats", "2.5e-07", "`fast`"):
        assert words in card.text
    assert "trust_remote_code=True" in card.text


@pytest.mark.parametrize(
    "original",
    ["---\nlicense: [1, 2]\nlanguage: {a: b}\n---\n", "---\n: : :\n\t-\n---\n", "no metadata"],
)
def test_a_broken_card_of_the_original_is_no_obstacle(original, tmp_path):
    (tmp_path / "README.md").write_text(original)
    text = ModelCard("---\nlicense: mit\n---", "A.", {"x": "1"}, "pass", source=str(tmp_path)).text()
    assert set(HubCard(text).data.to_dict()) == {"library_name", "pipeline_tag", "tags"}
