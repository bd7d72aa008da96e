"""`across_documents=false`: documents are kept apart, or the run is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import fulldepth.architectures  # noqa: F401  registers depth_llama
from fulldepth.errors import FulldepthError
from fulldepth.training import train
from fulldepth.training.text import require_separate_documents
from training.conftest import settings

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
        ("gpt2", "sdpa", None),
        ("depth_llama", "sdpa", None),
        ("opt", "sdpa", "sees the one before"),
        ("falcon", "eager", "sees the one before"),
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
        with pytest.raises(FulldepthError, match=refusal):
            require_separate_documents(model)
    assert model.config._attn_implementation == attention
    assert model.training


def test_flash_attention_is_refused(recipe, tmp_path):
    path = recipe(data={"across_documents": False}, attention="flash_attention_2")
    with pytest.raises(FulldepthError, match="across_documents=false needs attention=sdpa"):
        train(settings(path), tmp_path / "run")
