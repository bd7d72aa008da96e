"""Models of ours read every argument or refuse it, and take their cache under both of its names."""

from __future__ import annotations

import inspect
import keyword
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import DynamicCache, LlamaModel

import tiny_models
from architectures.combinations import KINDS, build
from architectures.test_skipped import OWN
from families import zoo
from fulldepth.architectures import SKIPPED, DeciLMConfig, DeciLMForCausalLM
from fulldepth.architectures.depth_llama.arguments_depth_llama import HANDED_ON, LOSS_ARGUMENTS
from fulldepth.architectures.skipped import modeling_skipped
from fulldepth.hf.caches import CACHE, CACHE_NAMES

HANDED = {*CACHE_NAMES, *HANDED_ON, *LOSS_ARGUMENTS, *modeling_skipped.HANDED_ON}
NAMES = st.from_regex(r"[a-z][a-z_]{2,20}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
OTHERS = ("cach", "past_key_value", "cache_params", "layer_past", "seq_idx", "num_item_in_batch")
"""What another version, another model or a slip of the hand would pass."""
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def cut(stock):
    """The class without the attention of layer 2, with new weights."""
    kind = SKIPPED[stock.config.model_type]
    values = {name: value for name, value in stock.config.to_dict().items() if name not in OWN}
    return kind(kind.config_class(**values, skipped_attention=[2]))


@pytest.fixture(scope="module")
def every_model():
    """Every public class: with its switches, of every family, with and without head."""
    switches = ("serial", "hyper", "tree-static", "dynamic", "kv")
    models = {f"depth_llama {name}": build(name).float() for name in switches}
    for model_type in SKIPPED:
        models[f"skipped {model_type}"] = cut(zoo.build(model_type, "causal-lm"))
    llama = {name: value for name, value in tiny_models.build("llama").config.to_dict().items() if name not in OWN}
    blocks = [
        {"attention": {"no_op": layer == 1}, "ffn": {"no_op": False}} for layer in range(llama["num_hidden_layers"])
    ]
    models["decilm"] = DeciLMForCausalLM(DeciLMConfig(block_configs=blocks, **llama))
    for model in models.values():
        model.eval()
    return models | {f"{name}, no head": model.base_model for name, model in models.items()}


@given(st.one_of(st.sampled_from(OTHERS), NAMES))
@settings(max_examples=20)
def test_an_unknown_argument_is_refused_by_name(every_model, name):
    for kind, model in every_model.items():
        stack = model.get_decoder() if hasattr(model, "get_decoder") else model
        read = {part for module in (model, stack) for part in inspect.signature(module.forward).parameters}
        if name in read | HANDED:
            continue
        with pytest.raises(TypeError, match=f"no argument '{name}'"):
            print(kind, model(input_ids=IDS, **{name: None}))


def test_both_names_of_the_cache_are_one_argument(every_model):
    """The second half of the tokens after a cache of the first, under either name, is as without a cache."""
    for kind, model in every_model.items():
        if "head" in kind:
            continue
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers 5.24 calls the older name deprecated in stock classes
            expected = model(input_ids=IDS, use_cache=False).logits[:, 3:]
            for name in CACHE_NAMES:
                cache = model(input_ids=IDS[:, :3], use_cache=True)[CACHE]
                logits = model(input_ids=IDS[:, 3:], use_cache=True, **{name: cache}).logits
                assert_close(logits, expected, rtol=1e-4, atol=1e-5, msg=lambda text, at=(kind, name): f"{at}: {text}")


@KINDS
def test_two_caches_are_refused(name):
    model = build(name)
    caches = {name: DynamicCache(config=model.config) for name in CACHE_NAMES}
    with pytest.raises(ValueError, match="two names of one argument"):
        model(IDS, use_cache=True, **caches)


def test_an_argument_that_is_given_twice_or_has_no_place_is_refused():
    model = cut(tiny_models.build("llama")).eval()
    mask = torch.ones_like(IDS)
    with pytest.raises(TypeError, match=r"attention_mask|multiple values"):
        model(IDS, mask, attention_mask=mask)
    with pytest.raises(TypeError, match="attention_mask' twice"):
        model.model(IDS, mask, attention_mask=mask)
    with pytest.raises(TypeError, match="by position"):
        model.model(*[None] * 20)


def test_a_cache_under_a_third_name_is_refused_when_the_model_is_made(monkeypatch):
    """What the code of an export does where a later transformers renames the argument again."""

    class Renamed(LlamaModel):
        def forward(self, input_ids=None, attention_mask=None, states=None, **kwargs):
            raise AssertionError

    monkeypatch.setattr(modeling_skipped.SkippedLlamaModel, "forward", Renamed.forward)
    with pytest.raises(
        ValueError, match=r"by a name that this code does not know; it was tested with transformers 4\."
    ):
        cut(tiny_models.build("llama"))
