"""`across_documents=false`: documents are kept apart under every attention, or the run is refused."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaModel
from transformers import modeling_flash_attention_utils as flash

import fulldepth.architectures  # noqa: F401  registers depth_llama
from fulldepth.training import run as room
from fulldepth.training.text import require_separate_documents
from fulldepth.training.trainer import window_collator
from refusals import refused
from training.conftest import settings, train_by

NEWER = "cache" in inspect.signature(LlamaModel.forward).parameters
"""Whether this is transformers 5.24 or newer, whose Falcon keeps packed documents apart with ALiBi, too."""
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
SMALL |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
KINDS = {
    "llama": {"intermediate_size": 48},
    "depth_llama": {"intermediate_size": 48, "residual": "hyper", "memory": "none"},
    "gpt2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {},
    "falcon": {"alibi": True},
}


@pytest.mark.parametrize(
    ("kind", "attention", "refusal"),
    [
        ("llama", "sdpa", None),
        ("llama", "flash_attention_2", None),
        ("depth_llama", "flash_attention_2", None),
        ("gpt2", "flash_attention_2", None),
        ("opt", "sdpa", "reads the one before"),
        ("falcon", "eager", None if NEWER else "reads the one before"),
        ("bloom", "sdpa", "takes no position_ids"),
    ],
)
def test_a_model_that_mixes_documents_is_refused(kind, attention, refusal):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SMALL | KINDS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.train()
    model.config._attn_implementation = attention
    if refusal is None:
        require_separate_documents(model)
    else:
        with refused(refusal):
            require_separate_documents(model)
    assert model.config._attn_implementation == attention
    assert model.training


def plain_flash(query, key, value, causal=False, softmax_scale=None, **_):
    """`flash_attn_func` in plain torch: [B, T, H, D]."""
    states = (s.transpose(1, 2) for s in (query, key, value))
    found = scaled_dot_product_attention(*states, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return found.transpose(1, 2)


def plain_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, **options):
    """`flash_attn_varlen_func` in plain torch: [tokens, H, D]."""
    cuts = cu_seqlens_q.tolist()
    parts = [plain_flash(*(s[None, a:b] for s in (query, key, value)), **options)[0] for a, b in pairwise(cuts)]
    return torch.cat(parts)


def test_flash_attention_trains_like_sdpa(recipe, tmp_path, monkeypatch):
    """transformers' own path, with flash-attn's two functions replaced by plain ones."""
    changes = {"data": {"across_documents": False}, "objective": {"jump": 0.5}, "steps": 4, "save_every": 4}
    expected = train_by(recipe(**changes), tmp_path / "sdpa")

    def flash_functions(*_, **__):
        return plain_flash, plain_varlen, None, None, None

    build = room.build_model

    def build_flash(config, chosen):
        model = build(config, chosen.model_copy(update={"attention": "sdpa"}))
        model.config._attn_implementation = "flash_attention_2"
        return model

    monkeypatch.setattr(flash, "_lazy_imports", flash_functions)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr(room, "build_model", build_flash)
    found = train_by(recipe(**changes, attention="flash_attention_2", micro_batch_size=2), tmp_path / "flash")
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    assert values(found) == pytest.approx(values(expected), rel=2e-4)
    columns = ["measure", "step", "layer"]
    counts = [r.table[r.table.measure.isin(["validation_loss", "displacement"])] for r in (found, expected)]
    assert counts[0][[*columns, "count"]].equals(counts[1][[*columns, "count"]])


def values(results):
    wanted = ("validation_loss", "displacement", "train_loss", "penalty")
    return results.table[results.table.measure.isin(wanted)].value.tolist()


@pytest.mark.parametrize("term", ["coherence", "orthogonality"])
def test_penalties_of_whole_sequences_are_refused_in_a_row(term, recipe):
    path = recipe(data={"across_documents": False}, attention="flash_attention_2", objective={term: 0.1})
    with refused(f"{term} needs each sequence in a row of its own"):
        window_collator(settings(path))
    window_collator(settings(recipe(attention="sdpa")))
