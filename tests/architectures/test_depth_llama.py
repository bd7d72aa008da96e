"""What transformers, its Trainer and torch expect of a model class, beyond the numbers of `test_oracle`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from torch.testing import assert_close
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from architectures.combinations import KINDS, build, configuration, llama_configuration, padded, randomise, tokens
from fulldepth.architectures import DepthLlamaForCausalLM
from marks import thorough
from tiny_models import gradients


@pytest.fixture
def twins():
    """A Llama and a serial model of the same weights."""
    llama = randomise(tf.LlamaForCausalLM._from_config(llama_configuration(), attn_implementation="eager")).eval()
    model = DepthLlamaForCausalLM._from_config(configuration(), attn_implementation="eager").eval()
    model.load_state_dict(llama.state_dict())
    return llama, model


@pytest.mark.parametrize("selected", [True, [0, -1]])
def test_hidden_states_and_attentions_are_llamas(twins, selected):
    batch = padded()
    expected, found = (m(**batch, output_hidden_states=selected, output_attentions=True) for m in twins)
    assert list(found) == list(expected)
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
        assert torch.equal(ours, theirs)
    as_tuple = twins[1](**batch, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], expected.logits)


def test_the_loss_is_llamas_with_the_trainers_count_of_targets(twins):
    ids = tokens(3, 8)
    labels = ids.masked_fill(torch.arange(8) % 3 == 0, -100)
    for count in (None, torch.tensor(29)):
        theirs, ours = (m(input_ids=ids, labels=labels, num_items_in_batch=count).loss for m in twins)
        assert torch.equal(ours, theirs)
    logits = twins[1](ids).logits[:, :-1].double()
    total = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    assert ours.item() == pytest.approx(total.item() / 29, rel=1e-6)


@KINDS
def test_any_attention_function_gets_routed_keys_and_values_ungrouped(name):
    """As flash attention does: H query heads, H_kv key/value heads, the scale and the layer's module."""
    seen = []

    def spy(module, query, key, value, attention_mask, **options):
        seen.append((module.layer_idx, query.shape[1], key.shape[1], value.shape[1], options["scaling"]))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    ALL_ATTENTION_FUNCTIONS.register("spy", spy)
    ALL_MASK_ATTENTION_FUNCTIONS.register("spy", sdpa_mask)
    batch = padded()
    torch.manual_seed(0)
    spied = build(name, attention="spy")
    plain = build(name)
    plain.load_state_dict(spied.state_dict())
    assert_close(spied(**batch).logits, plain(**batch).logits, rtol=0, atol=0)
    assert seen == [(index, 4, 2, 2, 6**-0.5) for index in range(5)]


def test_switches_thrown_while_loading_are_checked_like_others(tmp_path):
    build("serial", dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not defined with"):
        DepthLlamaForCausalLM.from_pretrained(tmp_path, residual="hyper", memory="kv")
    with pytest.raises(ValueError, match="serial"):
        DepthLlamaForCausalLM.from_pretrained(tmp_path, residual="cereal")
    tree = DepthLlamaForCausalLM.from_pretrained(tmp_path, residual="tree")
    assert tree.config.tree == {1: [-1, 0]}
    assert tree.model.layers[1].tree_norms is not None


class Adapted(nn.Module):
    """A projection with a low-rank addition, wrapped around it as peft does."""

    def __init__(self, base, update):
        super().__init__()
        self.base_layer, self.update = base, nn.Parameter(update)
        self.weight, self.bias, self.out_features = base.weight, base.bias, base.out_features

    def forward(self, x):
        return self.base_layer(x) + x @ self.update.T


@pytest.mark.parametrize("name", ["static-bias", "dynamic-raw", "dynamic-pruned"])
def test_adapters_on_projections_count_although_routing_folds_their_weights(name, generator):
    """An addition to k_proj and v_proj acts as if it had been merged into their weights, in outputs and gradients."""
    torch.manual_seed(0)
    merged, ids = build(name).train(), tokens()
    adapted = copy.deepcopy(merged)
    for one, other in zip(merged.model.layers, adapted.model.layers, strict=True):
        for key in ("k_proj", "v_proj"):
            weight = getattr(one.self_attn, key).weight
            update = torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 0.1
            weight.data += update
            setattr(other.self_attn, key, Adapted(getattr(other.self_attn, key), update))
    found, expected = (model(ids, use_cache=False).logits for model in (adapted, merged))
    assert_close(found, expected, rtol=1e-10, atol=1e-10)
    found.square().sum().backward()
    expected.square().sum().backward()
    found = dict(adapted.named_parameters())
    for key, parameter in merged.named_parameters():
        twin = key.replace(".weight", ".update") if "k_proj.w" in key or "v_proj.w" in key else key
        twin = twin if twin in found else key.replace("_proj.", "_proj.base_layer.")
        assert_close(found[twin].grad, parameter.grad, rtol=1e-8, atol=1e-8, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(thorough(n) for n in ("tree-dynamic", "hyper")), "kv"])
def test_a_compiled_model_gives_the_same_loss_and_gradients(name):
    changes = {"tree": {1: (-1, 0)}} if name.startswith("tree") else {}
    model, ids = build(name, num_hidden_layers=3, **changes).train(), tokens()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)
