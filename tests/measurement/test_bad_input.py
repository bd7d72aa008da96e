"""Everything that can be wrong with what a person gives: exit code 2, one readable message, nothing written."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image

from fulldepth.data import train_tokenizer

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
def wrong(refused, model, text_file, output):
    """Measures the broken copy (or other data): must be refused with these words, and leave nothing behind."""

    def run(*flags, says, model=model, data=text_file, few=True):
        outcome = refused(
            "measure", model, "--data", data, "--output", output, *(FEW if few else []), *flags, says=says
        )
        left = [str(path.relative_to(output)) for path in output.rglob("[!.]*")] if output.is_dir() else []
        assert not left, "a refused run leaves nothing behind"
        return outcome

    return run


def pickled_only(model):
    (model / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(3)}, model / "pytorch_model.bin")


def set_weight(value):
    def change(model):
        broken = tf.LlamaForCausalLM.from_pretrained(model)
        with torch.no_grad():
            broken.model.layers[1].mlp.up_proj.weight[3, 4] = value
        broken.save_pretrained(model)

    return change


def configured(**entries):
    def change(model):
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


BROKEN_MODELS = {
    "no folder": (shutil.rmtree, ["model"]),
    "no config": (lambda model: (model / "config.json").unlink(), ["config.json"]),
    "config is no JSON": (lambda model: (model / "config.json").write_text("{broken"), ["config.json"]),
    "config of another size": (configured(hidden_size=64), ["model"]),
    "more layers than weights": (configured(num_hidden_layers=5), ["model.layers.3"]),
    "config without a class": (configured(architectures=None), ["architectures"]),
    "empty weights": (lambda model: (model / "model.safetensors").write_bytes(b""), ["model"]),
    "cut weights": (lambda model: os.truncate(model / "model.safetensors", 4000), ["model"]),
    "random weights": (lambda model: (model / "model.safetensors").write_bytes(os.urandom(5000)), ["model"]),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), ["safetensors"]),
    "pickled weights": (pickled_only, ["pytorch_model.bin"]),
    "NaN": (set_weight(float("nan")), ["layers.1.mlp.up_proj"]),
    "infinite": (set_weight(float("inf")), ["layers.1.mlp.up_proj"]),
    "no tokenizer": (lambda model: [path.unlink() for path in model.glob("tokenizer*")], ["--tokenizer"]),
    "broken tokenizer": (lambda model: (model / "tokenizer.json").write_text("{"), ["tokenizer"]),
}


@pytest.mark.parametrize("case", BROKEN_MODELS)
def test_broken_models(wrong, model, case):
    change, says = BROKEN_MODELS[case]
    change(model)
    wrong(says=says)


BROKEN_DATA = {
    "absent.txt": (None, []),
    "empty.txt": (b"", []),
    "blank.jsonl": (b"   \n\n \t", []),
    "noise.txt": (np.random.default_rng(0).bytes(5000), []),
    "noise.parquet": (np.random.default_rng(0).bytes(5000), []),
    "noise.zip": (np.random.default_rng(0).bytes(5000), []),
    "data.docx": (b"PK", []),
    "other_column.jsonl": (b'{"txt": "a"}\n', ["'txt'"]),
    "number.jsonl": (b'{"text": "a"}\n{"text": 3}\n', ["2", "'text'"]),
    "broken.jsonl": (b'{"text": "a"}\n{broken\n', ["2"]),
    "list.jsonl": (b'{"text": "a"}\n["b"]\n', ["2"]),
}


@pytest.mark.parametrize("name", BROKEN_DATA)
def test_broken_data(wrong, tmp_path, name):
    content, says = BROKEN_DATA[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    wrong(data=tmp_path / name, says=[name, *says])


OPTIONS = {
    "max_sequence=3": "max_sequence",
    "max_sequences=99999999999999999999": "max_sequences",
    "sequence_length=65": "65",
    "sequence_length=99999999999": "sequence_length",
    "batch_size=0": "batch_size",
    "seed=abc": "seed",
    "seed": "key=value",
    "anatomy.blocs=x": "blocs",
    "anatomy.blocks=model.layer": "model.layer",
    "reservoir_tokens=0": "reservoir_tokens",
    "grid_samples=1001": "grid_samples",
    "tower=sound": "sound",
    "token_policy=some": "some",
    "token_policy=patches": "patches",
    "dtype=float12": "float12",
    "device=abacus": "abacus",
    "reference=/absent/model": "/absent/model",
    "measures=[displacement,cosin]": "'cosin'",
    "measures=[nc1]": "nc1",
    "measures=[mmd]": "mmd",
    "measures=[separability]": "separability",
    "measures=[retrieval_weight]": "retrieval_weight",
    "measures=[stream_mixing]": "stream_mixing",
    "lens_sites=[elsewhere]": "lens_sites",
}


@pytest.mark.parametrize("setting", OPTIONS)
def test_wrong_settings(wrong, setting):
    wrong("--set", setting, says=[OPTIONS[setting]], few="sequence" not in setting)


def test_data_and_models_that_do_not_fit(wrong, checkpoint, tokenizer, picture_folder, model, tmp_path, corpus):
    wrong(data=picture_folder, says=["LlamaForCausalLM"])
    wrong(model=checkpoint("vit"), says=["ViTForImageClassification"])
    flags = ("--words", "is,are", "--measures", "separability")
    wrong(*flags, model=checkpoint("vit"), data=picture_folder, says=["separability", "images"])
    wrong("--measures", "separability", "--words", "zebra,xylophone", says=["separability"])
    wrong("--measures", "lens_loss", model=checkpoint("bert-bare"), says=["lens_loss", "BertModel"])
    wrong("--measures", "coherence", "--set", "max_sequences=1", says=["coherence"])
    wrong("--recipe", "quik", says=["'quick'"])
    rows = tmp_path / "rows.tsv"
    rows.write_text("sentence\tlabel\n" + "".join(f"word {n}\t{n}\n" for n in range(4)))
    wrong(model=checkpoint("bert-classifier"), data=rows, says=["3 classes"])
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": corpus[:90], "response": corpus[90:200]}) + "\n")
    wrong("--sequence-length", "16", data=pairs, says=["16"], few=False)
    deeper = tf.LlamaConfig.from_pretrained(model, num_hidden_layers=4)
    tf.LlamaForCausalLM(deeper).save_pretrained(tmp_path / "deeper")
    wrong("--reference", tmp_path / "deeper", says=["4 layers"])
    shutil.copytree(checkpoint("bert"), tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")  # which cannot mask
    wrong("--measures", "lens_loss", model=tmp_path / "bert", says=["lens_loss"])
    train_tokenizer([corpus], vocab_size=600).save_pretrained(model)
    wrong(says=["tokenizer"], few=False)


def test_a_broken_picture(wrong, checkpoint, tmp_path):
    (tmp_path / "pictures").mkdir()
    for name in "ab":
        pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{name}.png")
    os.truncate(tmp_path / "pictures" / "b.png", 400)
    wrong(model=checkpoint("vit"), data=tmp_path / "pictures", says=["b.png"])


def test_activations_that_overflow(refused, overflowing, text_file, output):
    command = ["measure", overflowing, "--data", text_file, "--output", output, "--batch-size", "1"]
    command += ["--max-sequences", "6", "--sequence-length", "16", "--set", "order=first"]
    refused(*command, says=["sequences 5..5"])
    assert not list(output.rglob("[!.]*"))


def test_outputs_that_cannot_be_taken(main, refused, model, checkpoint, text_file, output, tmp_path):
    data = ("--data", text_file)
    (tmp_path / "file").write_text("mine")
    refused("measure", model, *data, "--output", tmp_path / "file", *FEW, says=["file"])
    refused("measure", model, *data, "--output", tmp_path / "file" / "out", *FEW, says=["file"])
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "results.json").write_text("{half")
    refused("measure", model, *data, "--output", tmp_path / "half", *FEW, says=["half"])
    assert (tmp_path / "half" / "results.json").read_text() == "{half"
    assert main("measure", model, *data, "--output", output, *FEW).code == 0
    before = {path: path.read_bytes() for path in output.iterdir()}
    refused("measure", checkpoint("gpt2"), *data, "--output", output, *FEW, says=["--overwrite"])
    assert {path: path.read_bytes() for path in output.iterdir()} == before


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried to allocate"),
        MemoryError(),
        OSError(28, "No space left on device"),
    ],
)
def test_no_memory_or_disk(wrong, monkeypatch, error):
    def full(*_, **__):
        raise error

    where = "pandas.DataFrame.to_parquet" if isinstance(error, OSError) else "fulldepth.measurement.run.run_pass"
    monkeypatch.setattr(where, full)
    wrong(says=["No space left" if isinstance(error, OSError) else "Out of memory"])


def test_more_than_there_is_is_said_before_the_start(wrong, monkeypatch):
    monkeypatch.setattr("fulldepth.measurement.plan.available_memory", lambda device: 1000)
    wrong(says=["before the start", "--reservoir-tokens"])


def test_interrupted(main, model, text_file, output, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fulldepth.measurement.run.run_pass", stop)
    outcome = main("measure", model, "--data", text_file, "--output", output, *FEW)
    assert outcome.code == 130
    assert "Start again with: fulldepth measure" in outcome.err
