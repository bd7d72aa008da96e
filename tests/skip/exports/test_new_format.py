"""A format that a contributor adds: one class, its line in the registry, and its phrase for `--help`."""

from __future__ import annotations

import copy

import pytest
import torch
from typer.testing import CliRunner

import tiny_models
from fulldepth.cli.program import app
from fulldepth.errors import FulldepthError
from fulldepth.settings import search as search_settings
from fulldepth.skip import export, load, search
from fulldepth.skip.exports.formats import FORMATS, Format
from skip import planned
from skip.word_tokenizer import tokenizer, words

PAIRS = [{"prompt": words(n, n + 1), "response": " " + words(*((7 * n + i) % 80 for i in range(4)))} for n in range(10)]


class Rounded(Format):
    """Weights rounded to bfloat16, of Llamas."""

    name = "rounded"
    granularities = ("attention",)

    def check(self, model, skipped):
        if model.config.model_type != "llama":
            raise FulldepthError("Only a llama is rounded.")

    def write(self, draft):
        model = copy.deepcopy(draft.model)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(draft.folding.weight(name, weight).bfloat16())
        model.save_pretrained(draft.folder)
        return ["Its weights are rounded."]

    def tolerance(self, folding, dtype):
        return 0.05

    def load(self, folder, **options):
        model = super().load(folder, **options)
        model.read_as = self.name
        return model


def test_formats_have_their_phrase_and_are_in_the_help():
    assert list(search_settings.FORMATS) == list(FORMATS)
    assert all(format.name == name for name, format in FORMATS.items())
    shown = CliRunner().invoke(app, ["skip", "apply", "--help"]).output
    text = " ".join(shown.replace("│", " ").split())
    for name, phrase in search_settings.FORMATS.items():
        assert f"{name}: {phrase}." in text


@pytest.mark.slow
@torch.no_grad()
def test_a_format_is_added_by_one_class_and_its_lines_in_the_registries(tmp_path, monkeypatch):
    model = tiny_models.build("llama")
    options = {"tokenizer": tokenizer(), "fit": False}
    with pytest.raises(FulldepthError, match="Unknown format 'rounded'"):
        search(model, PAIRS, 1, format="rounded", **options)
    monkeypatch.setitem(FORMATS, "rounded", Rounded())
    monkeypatch.setitem(search_settings.FORMATS, "rounded", "weights in bfloat16")
    with pytest.raises(FulldepthError, match="Only a llama is rounded"):
        search(tiny_models.build("qwen3"), PAIRS, 1, format="rounded", **options)
    with pytest.raises(FulldepthError, match="holds plans of granularity attention, this one skips by mlp"):
        search(model, PAIRS, 1, format="rounded", granularity="mlp", **options)
    plan = search(model, PAIRS, 1, format="rounded", **options)
    report = export(plan, model, "rounded", tmp_path / "out")
    made, (block,) = load(tmp_path / "out"), plan.blocks
    assert (report.format, made.read_as) == ("rounded", "rounded")
    assert report.notes[0] == "Its weights are rounded."
    assert 1e-4 < report.logit_error < 0.05  # more than any other format may have
    for name, weight in model.state_dict().items():
        ended = name == f"model.layers.{block - 1}.self_attn.o_proj.weight"
        assert torch.equal(made.state_dict()[name], weight.bfloat16().float() * (0 if ended else 1))
    ids = torch.arange(24).view(2, 12) + 3
    expected = planned.scaled(model, plan)(input_ids=ids).logits
    assert float((made(input_ids=ids).logits - expected).abs().max() / expected.abs().max()) < 0.05
