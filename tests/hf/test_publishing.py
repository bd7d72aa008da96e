"""Model cards as the Hub's own client reads them, and uploads to a stand-in for the Hub."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest
from huggingface_hub import HfApi
from huggingface_hub import ModelCard as HubCard

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.hf import ModelCard, publishing
from fulldepth.skip.exports.export import export
from skip import planned


@pytest.fixture
def hub(monkeypatch):
    """The Hub's client without a Hub; it accepts only calls that the real one accepts."""
    client = create_autospec(HfApi, instance=True)
    client.create_repo.return_value = "https://hub.invalid/me/small"
    monkeypatch.setattr(publishing, "HfApi", lambda: client)
    monkeypatch.setattr(publishing, "get_token", lambda: "token")
    return client


def test_an_export_is_published_with_its_losses_and_the_licence_of_the_original(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("fulldepth.skip.exports.export.prove", lambda *_: 2.5e-7)
    model = tiny_models.build("llama")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en, de]\n---\n# Base\n")
    plan = planned.plan(model, [2, 3])
    entries = {"losses": [2.0, 2.25, 2.5], "healed_loss": 2.125, "model": plan.document()["model"]}
    entries["model"]["name"] = str(tmp_path / "base")
    made = export(plan.changed(**entries), model, "fast", tmp_path / "out", push_to_hub="me/small")
    assert made.published == "https://hub.invalid/me/small"
    assert hub.upload_folder.call_args.kwargs["folder_path"] == made.path
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


def test_a_folder_is_uploaded_as_a_private_model(hub, tmp_path):
    assert publishing.publish(tmp_path, "me/small") == "https://hub.invalid/me/small"
    hub.create_repo.assert_called_once_with("me/small", private=True, exist_ok=True)
    hub.upload_folder.side_effect = RuntimeError("403 Forbidden")
    with pytest.raises(FulldepthError, match=r"is complete, but its upload to me/small failed: 403 Forbidden"):
        publishing.publish(tmp_path, "me/small")


def test_an_upload_that_cannot_work_is_refused_first(hub, tmp_path, monkeypatch):
    publishing.check_publishing("me/small")
    for name in ("small", "me/small/er", "../me", "me/", ""):
        with pytest.raises(FulldepthError, match="user/model"):
            publishing.check_publishing(name)
    monkeypatch.setattr(publishing, "get_token", lambda: None)
    with pytest.raises(FulldepthError, match="hf auth login"):
        export(tmp_path / "no plan", tmp_path / "no model", "fast", tmp_path / "out", push_to_hub="me/small")
