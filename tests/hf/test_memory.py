"""A checkpoint larger than the free memory is refused before a weight is read, with both numbers of bytes."""

import pytest
import torch
from safetensors.torch import load_file

import gguf_files
import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.hf import available_memory, load_checkpoint
from fulldepth.hf import memory as module


@pytest.mark.parametrize(("dtype", "width"), [("auto", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_a_checkpoint_that_does_not_fit(tmp_path, monkeypatch, dtype, width):
    tiny_models.build("llama").bfloat16().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    numbers = sum(tensor.numel() for tensor in load_file(path).values())
    needed = numbers * width
    monkeypatch.setattr(module, "available_memory", lambda device: needed - 1)
    with pytest.raises(
        FulldepthError, match=rf"\({needed:,} bytes\), but only .*\({needed - 1:,} bytes\) are free on cpu"
    ):
        load_checkpoint(tmp_path, dtype=dtype, device="cpu")
    monkeypatch.setattr(module, "available_memory", lambda device: needed)
    assert load_checkpoint(tmp_path, dtype=dtype, device="cpu").model.num_parameters() == numbers


def test_gguf_files_count_as_they_are_dequantised(tmp_path, monkeypatch):
    model = tiny_models.tf.LlamaForCausalLM(
        tiny_models.tf.LlamaConfig(**tiny_models.DECODER | {"vocab_size": 300, "intermediate_size": 64})
    )
    path = gguf_files.write(tmp_path / "tiny.gguf", model, quantise=gguf_files.gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setattr(module, "available_memory", lambda device: 1000)
    with pytest.raises(FulldepthError, match=rf"\({4 * model.num_parameters():,} bytes\)"):
        load_checkpoint(path, device="cpu")


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    free = available_memory(torch.device("cpu"))
    monkeypatch.setattr(module, "CONTAINER", tmp_path)
    assert available_memory(torch.device("cpu")) == pytest.approx(free, rel=0.5)
    (tmp_path / "memory.max").write_text("5000")
    (tmp_path / "memory.current").write_text("2000")
    (tmp_path / "memory.stat").write_text("anon 900\ninactive_file 400\n")
    assert available_memory(torch.device("cpu")) == 3400  # the file cache can be dropped
    (tmp_path / "memory.max").write_text("max")
    assert available_memory(torch.device("cpu")) == pytest.approx(free, rel=0.5)


def test_auto_follows_the_configuration(tmp_path, monkeypatch):
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"float64"'))
    monkeypatch.setattr(module, "available_memory", lambda device: 1000)
    with pytest.raises(FulldepthError, match=rf"\({8 * model.num_parameters():,} bytes\)"):
        load_checkpoint(tmp_path, device="cpu")
