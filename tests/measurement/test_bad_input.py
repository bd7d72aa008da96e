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

import fulldepth.measurement.folder
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


def test_missing_folder(wrong, tmp_path):
    wrong(model=tmp_path / "absent", says=["absent", "No such folder"])


def test_no_config(wrong, model):
    (model / "config.json").unlink()
    wrong(says=["no config.json", "model.safetensors"])


def test_config_is_not_json(wrong, model):
    (model / "config.json").write_text("{broken")
    wrong(says=["config.json", "valid JSON"])


def test_config_of_another_size(wrong, model, rewrite):
    rewrite(model, hidden_size=64)
    wrong(says=[str(model)])


def test_config_with_more_layers_than_weights(wrong, model, rewrite):
    rewrite(model, num_hidden_layers=5)
    wrong(says=["lacks", "model.layers.3"])


def test_config_names_no_class(wrong, model, rewrite):
    rewrite(model, architectures=None)
    wrong(says=["architectures"])


@pytest.mark.parametrize("keep", [0, 4, 400, -1000])
def test_truncated_weights(wrong, model, keep):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    wrong(says=[str(model), "broken or cut short"])


def test_weights_are_not_safetensors(wrong, model):
    (model / "model.safetensors").write_bytes(os.urandom(5000))
    wrong(says=["broken or cut short"])


def test_pickled_weights_only(wrong, model):
    (model / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(3)}, model / "pytorch_model.bin")
    wrong(says=["pytorch_model.bin", "safetensors", "code"])


def test_no_weights(wrong, model):
    (model / "model.safetensors").unlink()
    wrong(says=["no weights", "safetensors"])


def test_a_file_instead_of_a_folder(wrong, model):
    wrong(model=model / "model.safetensors", says=["is a file", "folder"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights(wrong, model, value):
    broken = tf.LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 4] = value
    broken.save_pretrained(model)
    wrong(says=["NaN or infinite weights", "layers.1.mlp.up_proj"])


def test_activations_that_overflow(refused, overflowing, text_file, output):
    command = ["measure", overflowing, "--data", text_file, "--output", output, "--batch-size", "1"]
    command += ["--max-sequences", "6", "--sequence-length", "16", "--order", "first"]
    refused(*command, says=["NaN or infinite", "sequences 5..5", "--dtype float32"])
    assert not list(output.rglob("[!.]*"))


def test_vocabulary_mismatch(wrong, model, corpus):
    train_tokenizer([corpus], vocab_size=600).save_pretrained(model)
    wrong(says=["tokenizer", "600", "320"], few=False)


def test_no_tokenizer(wrong, model):
    for path in model.glob("tokenizer*"):
        path.unlink()
    wrong(says=["tokenizer", "--tokenizer"])


def test_broken_tokenizer(wrong, model):
    (model / "tokenizer.json").write_text("{")
    wrong(says=["tokenizer"])


def test_lens_of_a_masked_model_with_a_tokenizer_that_cannot_mask(wrong, checkpoint, tokenizer, tmp_path):
    shutil.copytree(checkpoint("bert"), tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    wrong("--measures", "lens_loss", model=tmp_path / "bert", says=["lens_loss", "mask token"])


def test_missing_data(wrong, tmp_path):
    wrong(data=tmp_path / "absent.txt", says=["absent.txt", ".jsonl"])


def test_a_hub_name_offline(wrong):
    wrong(data="nobody/nothing", says=["nobody/nothing"])


@pytest.mark.parametrize("content", [b"", b"   \n\n \t"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".tsv"])
def test_empty_data(wrong, tmp_path, content, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(content)
    wrong(data=path, says=["data" + suffix])


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".tsv", ".parquet"])
def test_binary_data(wrong, tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(np.random.default_rng(0).bytes(5000))
    wrong(data=path, says=["data" + suffix])


def test_a_kind_of_file_that_is_not_read(wrong, tmp_path):
    (tmp_path / "data.docx").write_bytes(b"PK")
    wrong(data=tmp_path / "data.docx", says=[".docx", ".jsonl"])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ('{"txt": "a"}\n', ["'txt'", "text"]),
        ('{"text": "a"}\n{"text": 3}\n', ["2", "'text'"]),
        ('{"text": "a"}\n{broken\n', ["2", "JSON"]),
        ('{"text": "a"}\n["b"]\n', ["2"]),
    ],
)
def test_rows_that_do_not_fit(wrong, tmp_path, rows, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(rows)
    wrong(data=path, says=["rows.jsonl", *words])


def test_pictures_for_a_language_model_and_text_for_a_vision_model(wrong, checkpoint, picture_folder):
    wrong(data=picture_folder, says=["images", "LlamaForCausalLM", "text"])
    wrong(model=checkpoint("vit"), says=["text", "ViTForImageClassification", "images"])


def test_words_for_pictures_by_name(wrong, checkpoint, picture_folder):
    flags = ("--words", "is,are", "--measures", "separability")
    wrong(*flags, model=checkpoint("vit"), data=picture_folder, says=["separability", "images have no words"])


def test_an_empty_folder(wrong, tmp_path):
    (tmp_path / "nothing").mkdir()
    wrong(data=tmp_path / "nothing", says=["nothing", "images"])


def test_a_broken_picture(wrong, checkpoint, tmp_path):
    (tmp_path / "pictures").mkdir()
    for name in "ab":
        pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{name}.png")
    path = tmp_path / "pictures" / "b.png"
    path.write_bytes(path.read_bytes()[:400])
    wrong(model=checkpoint("vit"), data=tmp_path / "pictures", says=["b.png"])


def test_more_classes_than_the_model_has(wrong, checkpoint, tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("sentence\tlabel\n" + "".join(f"word {n}\t{n}\n" for n in range(4)))
    wrong(model=checkpoint("bert-classifier"), data=path, says=["its label (3)", "3 classes"])


def test_longer_than_the_positions(wrong):
    wrong("--sequence-length", "65", says=["65", "64", "positions"], few=False)


def test_pairs_that_are_too_long(wrong, main, model, output, tmp_path, corpus):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": corpus[:90], "response": corpus[90:200]}) + "\n")
    wrong("--sequence-length", "16", data=path, says=["16", "longer"], few=False)
    command = ["measure", model, "--data", path, "--output", output]
    outcome = main(*command, "--sequence-length", "64", "--truncate", "--max-sequences", 2)
    assert outcome.code == 0, outcome.err


def test_one_sequence_and_coherence_by_name(wrong, main, model, text_file, output):
    one = ["--max-sequences", "1", "--sequence-length", "12"]
    wrong(*one, "--measures", "displacement,coherence", says=["coherence", "only one"], few=False)
    outcome = main("measure", model, "--data", text_file, "--output", output, *one)
    assert outcome.code == 0, outcome.err
    line = next(line for line in outcome.err.splitlines() if line.startswith("Left out: coherence"))
    assert "only one" in line
    left_out = json.loads((output / "results.json").read_text())["left_out"]
    assert [entry for entry in left_out if entry["measure"] == "coherence" and "only one" in entry["reason"]]


@pytest.mark.parametrize(
    ("name", "words"),
    [("nc1", "label"), ("mmd", "--reference"), ("separability", "--words")],
)
def test_a_measure_by_name_that_needs_what_is_not_there(wrong, name, words):
    wrong("--measures", name, says=[name, words])


def test_words_that_never_occur_by_name(wrong):
    wrong("--measures", "separability", "--words", "zebra,xylophone", says=["separability", "zebra"])


def test_lens_by_name_without_a_head(wrong, checkpoint):
    wrong("--measures", "lens_loss", model=checkpoint("bert-bare"), says=["lens_loss", "BertModel", "head"])


def test_unknown_measure(wrong):
    wrong("--measures", "displacement,cosin", says=["'cosin'", "Did you mean 'cosine'", "jump_rate"])


def test_no_measure_at_all(wrong):
    wrong("--measures", "", says=["measure"])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("max_sequence=3", ["max_sequence", "Did you mean", "'max_sequences'"]),
        ("seed=abc", ["seed", '"abc"', "integer"]),
        ("seed", ["key=value"]),
        ("anatomy.blocs=x", ["blocs"]),
        ("reservoir_tokens=0", ["reservoir_tokens", "0"]),
        ("tower=sound", ["tower", "sound", "vision"]),
    ],
)
def test_wrong_settings(wrong, setting, words):
    wrong("--set", setting, says=words)


def test_wrong_values_of_options(wrong):
    wrong("--tokens", "some", says=["tokens", "some", "no-first"])
    wrong("--dtype", "float12", says=["float12", "float16"])
    wrong("--device", "abacus", says=["abacus"])
    wrong("--recipe", "quik", says=["quik", "'quick'"])
    wrong("--reference", "/absent/model", says=["/absent/model"])
    wrong("--batch-size", "0", says=["batch_size", "0"])


def test_reference_of_another_depth(wrong, tmp_path, model):
    deeper = tf.LlamaConfig.from_pretrained(model, num_hidden_layers=4)
    tf.LlamaForCausalLM(deeper).save_pretrained(tmp_path / "deeper")
    wrong("--reference", tmp_path / "deeper", says=["4 layers", "3"])


def test_wrong_anatomy(wrong):
    wrong("--set", "anatomy.blocks=model.layer", says=["model.layer"])


def test_the_output_is_a_file(refused, model, text_file, output):
    output.write_text("mine")
    refused("measure", model, "--data", text_file, "--output", output, *FEW, says=[str(output)])
    assert output.read_text() == "mine"


def test_a_file_above_the_output(refused, model, text_file, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused("measure", model, "--data", text_file, "--output", tmp_path / "file" / "out", *FEW, says=["file"])


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="needs a file system that nobody can write to")
def test_a_file_system_that_cannot_be_written(refused, model, text_file):
    refused("measure", model, "--data", text_file, "--output", "/proc/out", *FEW, says=["/proc/out"])


def test_results_of_another_run(main, refused, model, checkpoint, text_file, output):
    assert main("measure", model, "--data", text_file, "--output", output, *FEW).code == 0
    before = {path: path.read_bytes() for path in output.iterdir()}
    command = ["measure", checkpoint("gpt2"), "--data", text_file, "--output", output, *FEW]
    refused(*command, says=["another", "--overwrite"])
    assert {path: path.read_bytes() for path in output.iterdir()} == before


def test_an_output_that_cannot_be_read(refused, model, text_file, output):
    output.mkdir()
    (output / "results.json").write_text("{half")
    refused("measure", model, "--data", text_file, "--output", output, *FEW, says=[str(output)])
    assert (output / "results.json").read_text() == "{half"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried to allocate"),
        MemoryError(),
    ],
)
def test_out_of_memory(wrong, monkeypatch, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr("fulldepth.measurement.run.run_pass", full)
    wrong(says=["Out of memory", "--batch-size", "--sequence-length"])


def test_out_of_memory_while_loading(wrong, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.")

    monkeypatch.setattr(tf.LlamaForCausalLM, "from_pretrained", full)
    wrong(says=["Out of memory"])


def test_more_than_there_is_is_said_before_the_start(wrong, monkeypatch):
    monkeypatch.setattr("fulldepth.measurement.memory.available_memory", lambda device: 1000)
    wrong(says=["before the start", "MiB", "--reservoir-tokens"])


def test_a_crash_while_saving_leaves_no_half_results(wrong, main, model, text_file, output, monkeypatch):
    def disk_full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pandas.DataFrame.to_parquet", disk_full)
        wrong(says=["No space left on device", str(output)])
    outcome = main("measure", model, "--data", text_file, "--output", output, *FEW)
    assert outcome.code == 0, outcome.err
    assert sorted(path.name for path in output.glob("[!.]*")) == [
        "report.html",
        "results.json",
        "results.parquet",
    ]


def test_debug_shows_where_an_error_came_from(main, model, tmp_path, output, monkeypatch, text_file):
    command = ["measure", model, "--data", tmp_path / "absent.txt", "--output", output]
    for arguments in (["--debug", *command], [*command, "--debug"]):
        with pytest.raises(ValueError, match=r"absent\.txt"):
            main(*arguments)

    def bug(*_, **__):
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(fulldepth.measurement.folder, "measure_with", bug)
    command = ["measure", model, "--data", text_file, "--output", output]
    assert "This is a bug in fulldepth: KeyError: 'a mistake of ours'" in main(*command).err
    with pytest.raises(KeyError, match="a mistake of ours"):
        main(*command, "--debug")


def test_interrupted(main, model, text_file, output, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fulldepth.measurement.run.run_pass", stop)
    outcome = main("measure", model, "--data", text_file, "--output", output, *FEW)
    assert outcome.code == 130
    assert "Start again with: fulldepth measure" in outcome.err
    assert "Traceback" not in outcome.err
