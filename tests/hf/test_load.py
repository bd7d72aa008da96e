"""Checkpoints, tokenizers and image processors come back as they were saved."""

import re

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import gguf_files
import tiny_models
from families import zoo
from fulldepth.hf import Checkpoint, available_memory, load_checkpoint, load_processor, load_tokenizer, pick_dtype
from fulldepth.hf import file_checks as module
from json_files import change_json
from refusals import refused

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "clip", "detr"])
def test_a_round_trip_keeps_class_weights_and_hash(name, tmp_path):
    model = tiny_models.build(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if name == "llama" else "5GB")
    loaded = load_checkpoint(tmp_path, device="cpu")
    assert type(loaded.model) is type(model)
    assert (loaded.name, loaded.warnings, loaded.model.training) == (str(tmp_path), (), False)
    assert tiny_models.same_weights(loaded.model, model)
    in_memory = Checkpoint(model if name != "detr" else loaded.model, "in memory")
    hashes = {each.config_hash for each in (loaded, in_memory, load_checkpoint(tmp_path, dtype="bfloat16"))}
    assert len(hashes) == 1
    assert re.fullmatch("sha256:[0-9a-f]{64}", hashes.pop())
    path = tmp_path / "config.json"
    change_json(path, initializer_range=0.5)
    assert load_checkpoint(tmp_path).config_hash != loaded.config_hash


def test_tables_of_integers_load_under_modules_that_transformers_renames(tmp_path):
    """DeepSeek-V4 stores `ffn.gate.tid2eid`, and its model has `mlp.gate.tid2eid`."""
    model = zoo.build("deepseek_v4", "causal-lm")
    model.save_pretrained(tmp_path)
    again = load_checkpoint(str(tmp_path)).model
    assert any(tensor.dtype == torch.int64 for tensor in again.state_dict().values())
    assert tiny_models.same_weights(again, model)


def test_precision_is_the_checkpoints_own_unless_asked(tmp_path):
    model = tiny_models.build("gpt2", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    for asked in ("auto", None, "float64", torch.float32):
        loaded = load_checkpoint(tmp_path, dtype=asked).model
        given = torch.bfloat16 if asked in ("auto", None) else pick_dtype(asked)
        assert {p.dtype for p in loaded.parameters()} == {given}
        assert torch.equal(loaded.transformer.ln_f.weight, model.transformer.ln_f.weight.to(given))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next", "llama"])
def test_a_mixture_computes_in_float64(model_type, tmp_path):
    zoo.build(model_type, "causal-lm").save_pretrained(tmp_path)
    ids = tiny_models.token_ids(1, 8)
    with torch.no_grad():
        exact, single = (load_checkpoint(tmp_path, dtype=d).model(input_ids=ids).logits for d in ("float64", "float32"))
    assert exact.dtype == torch.float64
    assert_close(exact, single.double(), rtol=1e-3, atol=1e-4 * float(exact.abs().max()))


def test_weights_that_nothing_uses_are_told_of_without_a_word_of_the_library(broken, capfd):
    tensors = load_file(broken / WEIGHTS) | {"zebra.weight": torch.ones(2)}
    save_file(tensors, broken / WEIGHTS, metadata={"format": "pt"})
    (broken / "pytorch_model.bin").write_bytes(b"no pickle at all")
    shown = tf.logging.get_verbosity(), tf.logging.is_progress_bar_enabled()
    (warning,) = load_checkpoint(broken, device_map={"": "cpu"}).warnings
    assert "zebra.weight" in warning
    (broken / WEIGHTS).write_bytes(b"")
    with refused():
        load_checkpoint(broken)
    assert (tf.logging.get_verbosity(), tf.logging.is_progress_bar_enabled()) == shown
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


@pytest.mark.parametrize(("dtype", "width"), [("auto", 2), ("float32", 4)])
def test_a_checkpoint_that_does_not_fit(tmp_path, monkeypatch, dtype, width):
    tiny_models.build("llama").bfloat16().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    numbers = sum(tensor.numel() for tensor in load_file(path).values())
    needed = numbers * width
    monkeypatch.setattr(module, "available_memory", lambda device: needed - 1)
    with refused(rf"\({needed:,} bytes\), .*\({needed - 1:,} bytes\)"):
        load_checkpoint(tmp_path, dtype=dtype, device="cpu")
    monkeypatch.setattr(module, "available_memory", lambda device: needed)
    assert load_checkpoint(tmp_path, dtype=dtype, device="cpu").model.num_parameters() == numbers


def test_gguf_files_count_as_they_are_dequantised(tmp_path, monkeypatch):
    model = tiny_models.tf.LlamaForCausalLM(
        tiny_models.tf.LlamaConfig(**tiny_models.DECODER | {"vocab_size": 300, "intermediate_size": 64})
    )
    path = gguf_files.write(tmp_path / "tiny.gguf", model, quantise=gguf_files.gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setattr(module, "available_memory", lambda device: 1000)
    with refused(rf"\({4 * model.num_parameters():,} bytes\)"):
        load_checkpoint(path, device="cpu")


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    free = available_memory(torch.device("cpu"))
    monkeypatch.setattr(module, "CONTAINER", tmp_path)
    assert available_memory(torch.device("cpu")) == pytest.approx(free, rel=0.5)
    (tmp_path / "memory.max").write_text("5000")
    (tmp_path / "memory.current").write_text("2000")
    (tmp_path / "memory.stat").write_text("anon 900\ninactive_file 400\nactive_file 50\nfile 470\nslab_reclaimable 6\n")
    assert available_memory(torch.device("cpu")) == 3456  # the file cache can be dropped, but for shared memory
    (tmp_path / "memory.max").write_text("max")
    assert available_memory(torch.device("cpu")) == pytest.approx(free, rel=0.5)


# Tokenizers and image processors


def test_the_tokenizer_is_the_one_of_the_file_whatever_class_the_model_type_has(tmp_path):
    """transformers has a byte-level BPE of its own for qwen2; with these files it knows no word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({"once": 0, "upon": 1, "?": 2}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    tf.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?").save_pretrained(tmp_path)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("upon once never").ids
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer("upon once never")["input_ids"] == ids == [1, 0, 2]
    assert tokenizer.unk_token_id == 2


def picture(size):
    from PIL import Image

    return Image.new("RGB", (size, size), (255, 0, 127))


def test_a_saved_image_processor_is_used(tmp_path, monkeypatch):
    saved = tf.ViTImageProcessorPil(size={"height": 8, "width": 8}, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    saved.save_pretrained(tmp_path)
    monkeypatch.setattr("fulldepth.hf.load.packaged", {"package:some-model": str(tmp_path)}.get)
    processor = load_processor("package:some-model", tiny_models.build("vit").config)
    pixels = processor(picture(16), return_tensors="pt").pixel_values
    assert pixels.shape[-2:] == (8, 8)
    assert_close(pixels[0, :, 0, 0], torch.tensor([1.0, 0.0, 127 / 255]))


def test_without_a_saved_one_pictures_get_the_models_size_and_the_range_of_one(tmp_path):
    config = tiny_models.build("vit").config
    pixels = load_processor(tmp_path, config)(picture(40), return_tensors="pt").pixel_values
    assert pixels.shape == (1, 3, config.image_size, config.image_size)
    assert_close(pixels[0, :, 5, 5], torch.tensor([1.0, -1.0, 2 * 127 / 255 - 1]))
