"""What a measurement refuses: exit code 2, one message that names it, nothing written.

Every room below tests its own table of bad files, models and settings.
"""

from __future__ import annotations

import json
import shutil

import pytest
import transformers as tf

import fulldepth
from fulldepth.core.progress import Watcher
from fulldepth.data import train_tokenizer
from refusals import refused

FEW = ["--max-sequences", "4", "--sequence-length", "12"]


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def model(checkpoint, tmp_path):
    """A copy of a good checkpoint, to break."""
    shutil.copytree(checkpoint("llama"), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def wrong(main, model, text_file, output):
    """Measures the broken copy (or other data): one readable message with these words, code 2, and nothing left."""

    def run(*flags, says, model=model, data=text_file, few=FEW):
        code, _, error = main("measure", model, "--data", data, "--output", output, *few, *flags)
        assert code == 2, error
        assert "Traceback" not in error
        assert sum(line.startswith("Error") for line in error.splitlines()) == 1, error
        assert all(words in error for words in says), error
        assert not list(output.rglob("[!.]*")), "a refused run leaves nothing behind"

    return run


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("token_policy=patches", "patches"),
        ("measures=[displacement,cosin]", "'cosin'"),
        ("measures=[defaults,displacement]", "'defaults'. Did you mean 'default'?"),
        ("measures=[]", "measures: got [] (list), expected at least 1 item"),
        *(
            (f"measures=[{names}]", f"{names.split(',')[-1]} was asked for but cannot be measured")
            for names in ("nc1", "mmd", "separability", "retrieval_weight", "default,separability")
        ),
    ],
)
def test_wrong_settings(wrong, setting, says):
    wrong("--set", setting, says=[says])


def test_data_and_models_that_do_not_fit(wrong, checkpoint, tokenizer, picture_folder, model, tmp_path, corpus):
    wrong(data=picture_folder, says=["LlamaForCausalLM"])
    wrong(model=checkpoint("vit"), says=["ViTForImageClassification"])
    flags = ("--words", "is,are", "--measures", "separability")
    wrong(*flags, model=checkpoint("vit"), data=picture_folder, says=["separability", "images"])
    wrong("--measures", "separability", "--words", "zebra,xylophone", says=["separability"])
    wrong("--measures", "lens_loss", model=checkpoint("bert-bare"), says=["lens_loss", "BertModel"])
    wrong("--measures", "coherence", "--set", "max_sequences=1", says=["coherence"])
    rows = tmp_path / "rows.tsv"
    rows.write_text("sentence\tlabel\n" + "".join(f"word {n}\t{n}\n" for n in range(4)))
    wrong(model=checkpoint("bert-classifier"), data=rows, says=["3 classes"])
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": corpus[:90], "response": corpus[90:200]}) + "\n")
    wrong(data=pairs, says=["longer than 16 tokens"], few=["--sequence-length", "16"])
    tf.LlamaForCausalLM(tf.LlamaConfig.from_pretrained(model, num_hidden_layers=4)).save_pretrained(tmp_path / "deeper")
    wrong("--reference", tmp_path / "deeper", says=["4 layers"])
    shutil.copytree(checkpoint("bert"), tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")  # which cannot mask
    wrong("--measures", "lens_loss", model=tmp_path / "bert", says=["lens_loss"])
    train_tokenizer([corpus], vocab_size=600).save_pretrained(model)
    wrong(says=["tokenizer"], few=[])


def test_results_among_the_data(main, model, text_file, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(text_file, data)
    for output in (tmp_path / "model" / ".." / "data", data / "out"):
        for command in (["measure"], ["exit"], ["skip", "search", "--blocks", "1"]):
            code, _, error = main(*command, model, "--data", data, "--output", output)
            assert (code, [path.name for path in data.iterdir()]) == (2, [text_file.name]), error
            assert "lies in the folder of the data" in error
    with refused("lies in the folder of the data"):
        fulldepth.measure(str(model), data, output=data / "out")
    lens = {"measures": ["linear_lens_loss"], "fit": str(data)}
    with refused("lies in the folder of the data"):
        fulldepth.measure(str(model), str(text_file), output=data / "out", **lens)
    with refused("lies in the folder of the data"):
        fulldepth.train("tiny-llama", data / "out", data={"name": str(data)})


def test_activations_that_overflow(wrong, overflowing):
    few = ["--batch-size", "1", "--max-sequences", "6", "--sequence-length", "16", "--set", "order=first"]
    wrong(model=overflowing, few=few, says=["sequences 5..5"])
    wrong(model=overflowing, few=few[:-2], says=["Error: GPT2LMHeadModel gives", "infinite", "first sequences"])


def test_more_memory_than_there_is_is_refused_before_the_start(wrong, monkeypatch):
    monkeypatch.setattr("fulldepth.measurement.plan.available_memory", lambda device: 1000)
    wrong(says=["before the start", "reservoir_tokens"])


def test_the_distances_of_mmd_count_as_memory(checkpoint, text_file, monkeypatch):
    """Of 64 tokens of both models: three matrices of 128 x 128 in float64, more than all else that MMD holds."""
    options = {"max_sequences": 4, "sequence_length": 16, "measures": ["mmd"], "reference": str(checkpoint("llama", 1))}
    monkeypatch.setattr("fulldepth.measurement.plan.available_memory", lambda device: 3 * 128**2 * 8)
    with refused("Out of memory before the start.*distances of MMD 0.4 MiB"):
        fulldepth.measure(checkpoint("llama"), text_file, **options)
    monkeypatch.setattr("fulldepth.measurement.plan.available_memory", lambda device: 6 * 128**2 * 8)
    assert "mmd" in set(fulldepth.measure(checkpoint("llama"), text_file, **options).table.measure)


def test_the_memory_line_tells_that_cka_has_a_sample_of_its_own(checkpoint, text_file):
    said = []
    options = {"max_sequences": 4, "sequence_length": 16, "measures": ["cka", "cosine"], "reservoir_tokens": 8}
    fulldepth.measure(checkpoint("llama"), text_file, watcher=Watcher(say=said.append), **options)
    assert any("sample of 8 of 64 tokens and a larger one for CKA" in line for line in said)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"reference": "there"}, "--reference has no effect without mmd among --measures"),
        ({"words": ["the", "and"]}, "--words has no effect without separability among --measures"),
    ],
)
def test_settings_of_a_measure_that_is_not_computed(setting, says):
    with refused(says):
        fulldepth.measure("nowhere", ["text"], measures=["displacement"], **setting)


@pytest.mark.parametrize(("words", "says"), [("the,zebra", "the word 'zebra' occurs 0 times"), ("the", "only one")])
def test_words_that_are_too_rare_are_refused_before_the_passes(trained, corpus, monkeypatch, words, says):
    monkeypatch.setattr("fulldepth.measurement.run.run_pass", lambda *_, **__: pytest.fail("the passes began"))
    with refused(f"separability was asked for but cannot be measured: .*{says}"):
        fulldepth.measure(trained, [corpus[:4000]], measures=["default", "separability"], words=words)


def test_a_measure_that_turns_out_empty_costs_no_other_number(trained, corpus, monkeypatch):
    """Constant states have no coherence, which is found out after the passes."""
    monkeypatch.setattr("fulldepth.metrics.Coherence.rows", lambda self: [])
    options = {"max_sequences": 4, "sequence_length": 16}
    found = fulldepth.measure(trained, [corpus[:4000]], measures=["displacement", "coherence"], **options)
    assert set(found.table.measure) == {"displacement"}
    reason = "the states do not vary along the sequence at any layer"
    assert {"measure": "coherence", "reason": reason} in found.meta["left_out"]
    assert f"coherence was asked for but cannot be measured: {reason}." in found.meta["warnings"]
    with refused("coherence was asked for but cannot be measured"):
        fulldepth.measure(trained, [corpus[:4000]], measures=["coherence"], **options)
