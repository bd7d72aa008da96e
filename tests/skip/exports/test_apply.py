"""Exports: how the model is opened, where its tokenizer is found, and what is refused before that."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.skip.exports.export import export, load
from skip import planned
from skip.exports.test_export import ids, logits, relative, tokenizer


@pytest.fixture
def unproven(monkeypatch):
    """Exports without the fresh process, for tests of what is written."""
    monkeypatch.setattr("fulldepth.skip.exports.export.prove", lambda *_: 0.0)


EXPERTS = {
    "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts": 4, "moe_intermediate_size": 16},
    "deepseek_v3": {
        **{"first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 8},
        **{"moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "num_key_value_heads": 4},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
}


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("family", EXPERTS)
def test_layers_that_the_configuration_names_by_number_are_renumbered(family, tmp_path):
    options = tiny_models.DECODER | {"num_hidden_layers": 6, "num_experts_per_tok": 2} | EXPERTS[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).eval()
    shorter = copy.deepcopy(model)
    for layer in (4, 2):
        del planned.layers(shorter)[layer - 1]
    shorter.config.num_hidden_layers = 4
    with torch.no_grad():
        expected = shorter(input_ids=ids(), use_cache=False).logits
    made = load(export(planned.plan(model, [2, 4], "layer", values=None), model, "layer", tmp_path / "out").path)
    assert relative(logits(made), expected) < 1e-6
    assert made.generate(ids(), max_new_tokens=2, pad_token_id=0).shape[1] <= 14
    if family == "qwen3_moe":  # layers 1, 3, 5, 6 are left, with experts in 6 alone
        assert (made.config.decoder_sparse_step, made.config.mlp_only_layers) == (1, [0, 1, 2])
    else:
        assert made.config.first_k_dense_replace == 1


@pytest.mark.usefixtures("unproven")
def test_the_tokenizer_is_found_where_the_search_found_it(tmp_path):
    model = tiny_models.build("llama")
    source, words = tmp_path / "runs" / "checkpoint", tmp_path / "words"
    model.save_pretrained(source)
    tokenizer().save_pretrained(words)
    plan = planned.plan(model, [2])

    def copied(name, plan, **options):
        made = export(plan, source, "folded", tmp_path / name, **options)
        file = made.path / "tokenizer.json"
        return file.is_file() and file.read_bytes() == (words / "tokenizer.json").read_bytes()

    settings = {"top_k": 7, "do_sample": False}  # as in some published checkpoints; transformers would not save it
    (source / "generation_config.json").write_text(json.dumps(settings))
    assert not copied("none", plan)
    assert json.loads((tmp_path / "none" / "generation_config.json").read_text())["top_k"] == 7
    assert copied("named", plan, tokenizer=words)
    assert copied("noted", plan.changed(data=plan.data | {"tokenizer": str(words)}))
    tokenizer().save_pretrained(source.parent)
    assert copied("beside", plan)
    with pytest.raises(FulldepthError):
        copied("wrong", plan, tokenizer=str(tmp_path / "nothing"))


@pytest.mark.usefixtures("unproven")
def test_a_model_is_loaded_in_the_precision_of_the_search(tmp_path):
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path / "model")
    plan = planned.plan(model.to(torch.bfloat16), [2])
    plan = plan.changed(cost=plan.cost | {"settings": {"dtype": "bfloat16"}})
    made = export(plan, tmp_path / "model", "fast", tmp_path / "out")
    assert load(made.path).dtype == torch.bfloat16
    with pytest.raises(FulldepthError, match="the weights are not those"):
        export(plan, tmp_path / "model", "fast", tmp_path / "other", dtype="float32")


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("format", ["fast", "decilm"])
def test_a_model_that_was_saved_again_loads(format, tmp_path):
    model = tiny_models.build("llama")
    made = load(export(planned.plan(model, [2]), model, format, tmp_path / "out").path)
    with torch.no_grad():
        made.lm_head.weight.mul_(2.0)
    made.save_pretrained(tmp_path / "tuned")
    assert torch.equal(logits(load(tmp_path / "tuned")), logits(made))
    model.save_pretrained(tmp_path / "stock")
    with pytest.raises(FulldepthError, match="not an export"):
        load(tmp_path / "stock")
