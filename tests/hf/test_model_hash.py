"""The hash of a model against hashlib over the tensors of its safetensors files."""

import copy
import hashlib

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from fulldepth.hf.model_hash import configuration_hash, model_hash
from tiny_models import build


def part(content):
    return len(content).to_bytes(8, "little") + content


def hash_of_files(folder):
    """The documented hash, from the safetensors files alone."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    stream = part(b"fulldepth model 1")
    renamed = {"embed_out.weight": "lm_head.weight"}  # GPT-NeoX in its files, and in transformers 5
    for name, tensor in sorted((renamed.get(name, name), tensor) for name, tensor in tensors.items()):
        values = np.asarray(tensor.float().numpy(), "<f4")
        stream += part(name.encode()) + part(str(list(values.shape)).encode()) + part(b"float32")
        stream += part(hashlib.sha256(values.tobytes()).digest())
    return "sha256:" + hashlib.sha256(stream).hexdigest()


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.bfloat16), ("gpt_neox", torch.float32)])
def test_hash_is_that_of_the_saved_files(tmp_path, name, dtype, monkeypatch):
    """Weights of GPT-2 are tied."""
    monkeypatch.setattr("fulldepth.hf.model_hash.CHUNK", 700)
    model = build(name, dtype=dtype)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = hash_of_files(tmp_path)
    assert model_hash(model) == expected
    for precision in ("auto", torch.float32, torch.float64):
        assert model_hash(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=precision)) == expected


def test_hash_is_not_moved_by_what_is_not_saved():
    model = build("llama")
    expected = model_hash(model)
    model.model.rotary_emb.inv_freq.mul_(2)  # a buffer that is not persistent
    model.config.rope_theta = 7.0
    model.train().requires_grad_(False)
    assert model_hash(model) == expected
    assert model_hash(copy.deepcopy(model)) == expected


def test_a_model_inside_another_has_no_precision_in_the_configurations_hash():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 32, "num_key_value_heads": 1, "head_dim": 8}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)

    def hashed(dtype):
        return configuration_hash(Gemma3ForConditionalGeneration._from_config(copy.deepcopy(config), dtype=dtype))

    expected = hashed(torch.float32)
    assert hashed(torch.bfloat16) == expected
    config.text_config.rms_norm_eps = 0.1
    assert hashed(torch.float32) != expected


def test_entries_that_are_named_do_not_count_wherever_they_are():
    """As the mark of removed branches, which a run adds to the configuration of what it starts from."""
    model = build("llama")
    expected = configuration_hash(model, "mark")
    model.config.mark = True
    model.config.inner = {"mark": 3}
    assert configuration_hash(model, "mark", "inner") == expected
    with_inner = configuration_hash(model, "mark")
    model.config.inner = {"mark": 4}
    assert configuration_hash(model, "mark") == with_inner != expected
    assert configuration_hash(model) != with_inner
    model.config.eos_token_id = 7
    assert configuration_hash(model, "mark") == with_inner


def test_hash_of_every_other_weight():
    """One number anywhere, by one unit in the last place: another hash."""
    model = build("gpt2")
    seen = {model_hash(model)}
    saved = model.state_dict()
    for value in {id(v): v for v in saved.values()}.values():
        old = value.flatten()[-1].item()
        value.view(-1)[-1] = float(np.nextafter(np.float32(old), np.float32(9)))
        seen.add(model_hash(model))
        value.view(-1)[-1] = old
    assert len(seen) == 1 + len({v.data_ptr() for v in saved.values()})


def test_hash_tells_precisions_apart_where_they_round():
    model = build("llama")
    rounded = copy.deepcopy(model).bfloat16()
    assert model_hash(rounded) != model_hash(model)
    assert model_hash(copy.deepcopy(rounded).float()) == model_hash(rounded)
    finer = copy.deepcopy(model).double()
    assert model_hash(finer) == model_hash(model)
    with torch.no_grad():
        finer.lm_head.weight[0, 0] += 1e-12
    assert model_hash(finer) != model_hash(model)


def test_hash_of_names_and_shapes():
    def module(**tensors):
        found = nn.Module()
        for name, tensor in tensors.items():
            found.register_buffer(name, tensor)
        return found

    numbers = torch.arange(6.0)
    hashes = [
        model_hash(module(a=numbers)),
        model_hash(module(b=numbers)),
        model_hash(module(a=numbers.view(2, 3))),
        model_hash(module(a=numbers.long())),
        model_hash(module(a=numbers[:3], b=numbers[3:])),
        model_hash(module(a=numbers.bool())),
        model_hash(module(a=torch.complex(numbers, numbers))),
        model_hash(module(a=torch.zeros(0))),
    ]
    assert len(set(hashes)) == len(hashes)
    turned = numbers.view(2, 3).T  # not contiguous
    assert model_hash(module(a=turned)) == model_hash(module(a=turned.contiguous()))


def test_hash_of_a_quantised_weight():
    """Subclasses that hold several tensors, as torchao's, count by what they hold."""
    one, other = torch.arange(4.0), torch.arange(4.0) + 1

    def linear(first, second):
        found = nn.Linear(4, 1, bias=False)
        found.weight = nn.Parameter(TwoTensor(first[None], second[None]), requires_grad=False)
        return model_hash(found)

    assert linear(one, one) == linear(one.clone(), one.clone())
    assert len({linear(one, one), linear(one, other), linear(other, one)}) == 3
