"""Entries of `config.json` that ask for other outputs: of no concern to commands, and in every export as they were."""

from __future__ import annotations

import pytest
import transformers as tf

import fulldepth
from fulldepth import exit, skip
from fulldepth.hf import load_checkpoint
from fulldepth.skip.exports.export import export
from json_files import read_json, write_json
from refusals import refused
from skip import planned
from skip.word_tokenizer import checkpoint

TEXTS = [{"text": "w1 w2 w3 w4 w5 w6"}] * 4
ENTRIES = [("output_attentions", True), ("output_hidden_states", True), ("return_dict", False), ("torchscript", True)]


@pytest.fixture(params=ENTRIES, ids=[name for name, _ in ENTRIES])
def asking(request, tmp_path):
    """(folder, entry, value)."""
    path = checkpoint(tmp_path / "model") / "config.json"
    name, value = request.param
    write_json(path, read_json(path) | {name: value})
    return path.parent, name, value


def test_a_measurement_is_the_same(asking, tmp_path):
    options = {"measures": ["displacement", "lens_loss"]}
    plain = fulldepth.measure(checkpoint(tmp_path / "plain"), TEXTS, **options)
    assert fulldepth.measure(asking[0], TEXTS, **options).table.equals(plain.table)


def test_a_search_is_the_same(asking, tmp_path):
    rows = [{"text": f"w{n} w{n + 1} w{n + 2} w{n + 3}"} for n in range(20)]
    plain = skip.search(checkpoint(tmp_path / "plain"), rows, 1, max_sequences=10)
    assert skip.search(asking[0], rows, 1, max_sequences=10).losses == plain.losses


@pytest.mark.slow
@pytest.mark.parametrize("format", ["exit", "folded", "fast"])
def test_exports_have_the_entry_and_are_proven_with_it(asking, format, tmp_path):
    folder, name, value = asking
    if format == "exit":
        made = exit.export_layers(folder, tmp_path / "made", layers=2)
    else:
        plan = planned.plan(load_checkpoint(folder).model, [2], "attention", None)
        made = export(plan, folder, format, tmp_path / "made")
    if name == "return_dict":  # no model of transformers 5 runs with it
        assert any("return_dict" in note for note in made.notes)
        value = True
    assert read_json(made.path / "config.json").get(name, True) is value


def test_a_model_that_gives_tuples_is_refused_with_what_to_set(asking):
    folder, name, _ = asking
    if name == "return_dict":
        with refused("model.config.return_dict = True"):
            fulldepth.measure(tf.AutoModelForCausalLM.from_pretrained(folder), TEXTS)


@pytest.mark.parametrize("part", ["", "text_config"])
def test_an_entry_that_no_version_of_transformers_loads_is_named(part, tmp_path, capfd):
    """`use_return_dict` is `return_dict` under another name, which can be read and not set."""
    path = checkpoint(tmp_path / "model") / "config.json"
    values = read_json(path)
    if part:
        values = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], part: values}
    (values.get(part) or values)["use_return_dict"] = True
    write_json(path, values)
    with pytest.raises(AttributeError, match="no setter"):
        tf.AutoConfig.from_pretrained(path.parent)
    capfd.readouterr()
    with refused("the entry use_return_dict, which transformers computes", "Remove the entry."):
        fulldepth.measure(path.parent, TEXTS)
    assert "use_return_dict" not in capfd.readouterr().err
