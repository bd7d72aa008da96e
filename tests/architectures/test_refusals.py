"""Configurations without a meaning are refused when they are made; the others survive being saved."""

from __future__ import annotations

import pytest
import transformers as tf

from architectures.combinations import SIZE, configuration, llama_configuration
from fulldepth.architectures import DepthLlamaConfig, DepthLlamaForCausalLM

TREES = {
    "forward": ({2: (3, 1)}, "2"),
    "itself": ({2: (0, 2)}, "2"),
    "no such layer": ({5: (0, 4)}, "5"),
    "below the first layer": ({-1: (-1, -1)}, "-1"),
    "before the embedding": ({2: (-2, 1)}, "-2"),
    "three sources": ({2: (0, 1, 1)}, "2"),
    "no pair": ({2: 1}, "2"),
    "no number": ({"two": (0, 1)}, "two"),
    "half a layer": ({2: (0.5, 1)}, "0.5"),
    "no mapping": ([(1, -1, 0)], "tree"),
}
REFUSED = {
    **{f"streams with {memory}": ({"residual": "hyper", "memory": memory}, "memory") for memory in ("static", "kv")},
    **{name: ({"residual": "tree", "tree": tree}, word) for name, (tree, word) in TREES.items()},
    "residual": ({"residual": "seriel"}, "serial"),
    "memory": ({"memory": "statik"}, "static"),
    "kv_init": ({"memory": "kv", "kv_init": "identty"}, "identity"),
    "router_input": ({"memory": "dynamic", "router_input": "norm"}, "normed"),
    "tree of a serial model": ({"tree": {1: (-1, 0)}}, "tree"),
    "scaled norms with memory": ({"norm_scaling": True, "memory": "kv"}, "memory"),
    "scaled norms by a number": ({"norm_scaling": 1}, "norm_scaling"),
    "no stream": ({"residual": "hyper", "num_streams": 0}, "num_streams"),
    "half a stream": ({"residual": "hyper", "num_streams": 2.5}, "num_streams"),
    "top-p of 0": ({"memory": "dynamic", "router_top_p": 0.0}, "router_top_p"),
    "top-p of NaN": ({"memory": "dynamic", "router_top_p": float("nan")}, "router_top_p"),
    "top-p without a router of tokens": ({"memory": "kv", "router_top_p": 0.9}, "router_top_p"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_combinations_without_a_meaning(case):
    switches, word = REFUSED[case]
    with pytest.raises(ValueError, match=word):
        DepthLlamaForCausalLM(DepthLlamaConfig(**{**SIZE, **switches}))


@pytest.mark.parametrize(
    ("name", "p", "word"),
    [("static", 1.01, "top-p"), ("dynamic", 0.0, "top-p"), ("serial", 0.9, "memory"), ("kv", 0.9, "linear|memory")],
)
def test_pruning_without_routers_or_by_no_share(name, p, word):
    with pytest.raises(ValueError, match=word):
        DepthLlamaForCausalLM(configuration(name)).prune_routers(p=p)


def test_one_layer_has_nothing_to_remember():
    """Layer 1 has no router: memory in a one-layer model is simply absent."""
    model = DepthLlamaForCausalLM(configuration("static", num_hidden_layers=1))
    assert not any("router" in name for name in model.state_dict())


def test_json_keys_of_a_tree_are_strings_and_come_back_as_numbers(tmp_path):
    config = DepthLlamaConfig(**SIZE, residual="tree", tree={"1": [-1, 0], "4": [0, 3]})
    as_numbers = DepthLlamaConfig(**SIZE, residual="tree", tree={1: (-1, 0), 4: (0, 3)})
    config.save_pretrained(tmp_path)
    again = DepthLlamaConfig.from_pretrained(tmp_path)
    assert again.tree == {1: [-1, 0], 4: [0, 3]}
    assert again.to_dict() == config.to_dict() == as_numbers.to_dict()


def test_a_configuration_made_from_llamas_keeps_every_field():
    rope = {"rope_type": "default", "rope_theta": 777.0}
    llama = llama_configuration(rope_parameters=rope, attention_bias=True, attn_implementation="eager")
    config = DepthLlamaConfig.from_llama(llama, memory="kv", kv_init="public")
    ours, theirs = config.to_dict(), llama.to_dict()
    for key in set(theirs) - {"model_type", "architectures", "_name_or_path", "transformers_version"}:
        assert ours[key] == theirs[key], key
    assert (config.model_type, config.memory, config.kv_init) == ("depth_llama", "kv", "public")
    assert (config.residual, config._attn_implementation) == ("serial", "eager")
    with pytest.raises(ValueError, match="memory"):
        DepthLlamaConfig.from_llama(llama, residual="hyper", memory="kv")
    with pytest.raises((ValueError, TypeError), match="memry"):
        DepthLlamaConfig.from_llama(llama, memry="kv")
    with pytest.raises(ValueError, match="qwen3"):
        DepthLlamaConfig.from_llama(tf.AutoConfig.for_model("qwen3"), memory="kv")
