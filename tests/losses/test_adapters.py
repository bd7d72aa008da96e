"""Objectives on wrapped models: the adapters' gradients are those of the plain formula on the model inside."""

from __future__ import annotations

import copy
from functools import partial

import peft
import pytest
import torch
import transformers as tf
import trl
from datasets import Dataset

import fulldepth
from fulldepth.data import train_tokenizer
from fulldepth.losses import Objective, ObjectiveMixin
from losses.trained_step import WEIGHTS, collate, examples, gradients, plain_loss, same_step
from marks import thorough
from refusals import refused
from tiny_models import BUILDERS, DECODER

TEXT = "The quick brown fox jumps over the lazy dog while seven wizards mix five boxing potions. " * 40
LORA = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_dropout": 0.0}


def adapted(wrap=peft.get_peft_model, **options):
    """A tiny Llama in float64 with LoRA whose B is not zero."""
    torch.manual_seed(0)
    model = wrap(BUILDERS["llama"]().double(), peft.LoraConfig(task_type="CAUSAL_LM", **LORA, **options))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    return model.double().train()


@pytest.mark.parametrize("kind", ["LoRA", "the last layer alone", "mixed", thorough("compiled")])
def test_adapters_have_the_plain_gradient(kind):
    options = {"layers_to_transform": [2]} if kind == "the last layer alone" else {}
    wrap = partial(peft.get_peft_model, mixed=True) if kind == "mixed" else peft.get_peft_model
    model = adapted(wrap, **options)
    rows = examples("llama", 3)
    expected = plain_loss(model, "llama", rows, WEIGHTS)
    given = torch.compile(model, backend="eager") if kind == "compiled" else model
    same_step(given, expected, Objective(**WEIGHTS), collate(rows))  # the cross-entropy is float32
    assert all("lora" in name for name in gradients(model))
    if kind == "LoRA":
        merged = copy.deepcopy(model).merge_and_unload()
        again = plain_loss(merged, "llama", rows, WEIGHTS).detach()
        assert expected.item() == pytest.approx(float(again), rel=1e-6)


ADAPTERS = {
    "LoRA": peft.LoraConfig(**LORA),
    "DoRA": peft.LoraConfig(**LORA, use_dora=True),
    "LoHa": peft.LoHaConfig(r=2, target_modules=LORA["target_modules"]),
    "IA3": peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_measuring_an_adapted_model_is_measuring_the_merged_one(kind, tmp_path):
    """Behaviour and spectral norms of weights; adapters that are switched off leave the base model's."""
    tokenizer = train_tokenizer([TEXT], vocab_size=300)
    (tmp_path / "text.txt").write_text(TEXT)
    torch.manual_seed(0)
    base = tf.LlamaForCausalLM(tf.LlamaConfig(**{**DECODER, "vocab_size": len(tokenizer)}))
    plain, model = copy.deepcopy(base), peft.get_peft_model(base, ADAPTERS[kind])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and "magnitude" not in name:
                weight.normal_(std=0.3)
    merged = copy.deepcopy(model).merge_and_unload()
    options = {"measures": ["displacement", "spectral_norm"], "tokenizer": tokenizer, "sequence_length": 32}
    found, expected, before = (
        fulldepth.measure(m, tmp_path / "text.txt", **options).table.sort_values(
            ["measure", "site", "layer", "statistic"]
        )
        for m in (model.train(), merged, plain)
    )
    assert found.site.tolist() == expected.site.tolist()
    assert found.value.tolist() == pytest.approx(expected.value.tolist(), abs=1e-5)
    assert found.value.tolist() != pytest.approx(before.value.tolist(), abs=1e-2)
    assert model.training
    with model.disable_adapter():
        again = fulldepth.measure(model, tmp_path / "text.txt", **options).table
    norms = again[again.measure == "spectral_norm"].sort_values(["site", "layer", "statistic"])
    assert norms.value.tolist() == pytest.approx(before[before.measure == "spectral_norm"].value.tolist(), abs=1e-5)


def test_trl_makes_the_adapters_itself(tmp_path):
    class Trainer(ObjectiveMixin, trl.SFTTrainer):
        """TRL's SFTTrainer with an objective."""

    tokenizer = train_tokenizer([TEXT], vocab_size=300)
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**DECODER, "vocab_size": len(tokenizer)})).double()
    ids = [torch.tensor(tokenizer(TEXT[start:])["input_ids"][:16]) for start in (0, 3, 10, 20)]
    rows = [{"input_ids": one, "labels": one, "attention_mask": torch.ones_like(one)} for one in ids]
    both, ce = (
        float(plain_loss(model, "llama", rows, weights).detach())
        for weights in ({"jump": 1.0, "similarity": 0.0}, {"jump": 0.0, "similarity": 0.0})
    )
    fixed = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "bf16": False}
    trainer = Trainer(
        model,
        trl.SFTConfig(str(tmp_path), **fixed, max_steps=1, logging_steps=1, per_device_train_batch_size=4),
        objective=Objective(**WEIGHTS),
        train_dataset=Dataset.from_list([{"input_ids": one.tolist()} for one in ids]),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", **LORA),
    )
    trainer.train()
    (logged,) = (line for line in trainer.state.log_history if "loss_jump" in line)
    assert logged["loss_jump"] == pytest.approx(both - ce, rel=1e-5)  # LoRA begins at zero
    assert logged["loss_ce"] == pytest.approx(ce, rel=1e-5)


def test_virtual_tokens_are_refused():
    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        model = peft.get_peft_model(BUILDERS["llama"](), kind(task_type="CAUSAL_LM", num_virtual_tokens=4))
        for use in (Objective(jump=1.0).attach, lambda given: fulldepth.measure(given, "corpus:builtin")):
            with refused("_TUNING"):
                use(model)
