"""Combinations without a meaning are refused when the configuration is made, in one sentence that helps."""

from __future__ import annotations

import json

import pytest

from architectures.combinations import SIZE, configuration, llama_configuration
from fulldepth.architectures import DepthLlamaConfig, DepthLlamaForCausalLM
from fulldepth.architectures.depth_llama.configuration_depth_llama import build_tree


def refused(*words, **switches):
    with pytest.raises(ValueError, match=r".") as error:
        DepthLlamaConfig(**{**SIZE, **switches})
    message = str(error.value)
    for word in words:
        assert str(word) in message, message
    return message


@pytest.mark.parametrize("memory", ["static", "dynamic", "kv"])
def test_streams_with_memory(memory):
    """With the reason, not only the fact."""
    message = refused("hyper", "memory", residual="hyper", memory=memory)
    assert len(message.split()) > 8


@pytest.mark.parametrize(
    ("field", "value", "near"),
    [
        ("residual", "seriel", "serial"),
        ("residual", "trees", "tree"),
        ("residual", "hyperconnections", "hyper"),
        ("memory", "statik", "static"),
        ("memory", "dynamik", "dynamic"),
        ("memory", "vk", "kv"),
        ("kv_init", "identty", "identity"),
        ("kv_init", "pubic", "public"),
        ("router_input", "norm", "normed"),
        ("router_input", "RAW", "raw"),
    ],
)
def test_unknown_names(field, value, near):
    owner = {"kv_init": {"memory": "kv"}, "router_input": {"memory": "dynamic"}}.get(field, {})
    refused(value, near, field.split("_")[0], **owner, **{field: value})


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({2: (3, 1)}, (2, 3)),  # forward
        ({2: (0, 4)}, (2, 4)),
        ({2: (2, 1)}, (2,)),  # itself
        ({2: (0, 2)}, (2,)),
        ({5: (0, 4)}, (5,)),  # the layers are 0..4
        ({-1: (-1, -1)}, (-1,)),
        ({2: (-2, 1)}, (-2,)),  # -1 is the embedding, nothing lies before
        ({2: (0,)}, (2,)),
        ({2: (0, 1, 1)}, (2,)),
        ({2: 1}, (2,)),
        ({"two": (0, 1)}, ("two",)),
        ({2: (0.5, 1)}, ("0.5",)),
    ],
)
def test_trees_that_cannot_be(tree, words):
    refused("tree", *words, residual="tree", tree=tree)


@pytest.mark.parametrize("tree", [[(1, -1, 0)], "1: [-1, 0]", 3])
def test_a_tree_that_is_no_mapping(tree):
    refused("tree", residual="tree", tree=tree)


@pytest.mark.parametrize("residual", ["serial", "hyper"])
def test_a_tree_without_the_trees_residual(residual):
    refused("tree", residual, residual=residual, tree={1: (-1, 0)})


@pytest.mark.parametrize("streams", [0, -1, 2.5, "four"])
def test_streams_that_cannot_be_counted(streams):
    refused("num_streams", streams, residual="hyper", num_streams=streams)


@pytest.mark.parametrize("p", [0.0, -0.1, 1.5, float("nan")])
def test_top_p_out_of_range(p):
    refused("router_top_p", residual="serial", memory="dynamic", router_top_p=p)


@pytest.mark.parametrize("chunk", [0, -2])
def test_no_heads_at_a_time(chunk):
    refused("memory_chunk", chunk, memory="static", memory_chunk=chunk)


def test_run_time_pruning_without_a_dynamic_router():
    """Weights that depend on no token are pruned in place, a linear mixture is no distribution."""
    for memory in ("none", "kv"):
        refused("router_top_p", memory, memory=memory, router_top_p=0.9)


def test_heads_that_do_not_divide():
    for memory in ("none", "static", "kv"):
        with pytest.raises(ValueError, match=r"4.*3|3.*4"):
            DepthLlamaForCausalLM(DepthLlamaConfig(**{**SIZE, "num_key_value_heads": 3}, memory=memory))


def test_one_layer_has_nothing_to_remember():
    """Layer 1 has no router: memory in a one-layer model is simply absent."""
    model = DepthLlamaForCausalLM(configuration("static", num_hidden_layers=1))
    assert not any("router" in name for name in model.state_dict())


@pytest.mark.parametrize("layers", [0, -3])
def test_no_tree_of_no_layers(layers):
    with pytest.raises(ValueError, match=str(layers)):
        build_tree(layers)


def test_json_keys_of_a_tree_are_strings_and_come_back_as_numbers(tmp_path):
    config = DepthLlamaConfig(**SIZE, residual="tree", tree={"1": [-1, 0], "4": [0, 3]})
    as_numbers = DepthLlamaConfig(**SIZE, residual="tree", tree={1: (-1, 0), 4: (0, 3)})
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "depth_llama"
    again = DepthLlamaConfig.from_pretrained(tmp_path)
    for one in (config, as_numbers, again):
        assert {int(layer): list(pair) for layer, pair in one.tree.items()} == {1: [-1, 0], 4: [0, 3]}
    assert again.to_dict() == config.to_dict() == as_numbers.to_dict()


def test_a_saved_configuration_that_was_spoilt_is_refused(tmp_path):
    configuration("static").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"residual": "hyper"}))
    with pytest.raises(ValueError, match="hyper"):
        DepthLlamaConfig.from_pretrained(tmp_path)


def test_a_configuration_made_from_llamas_keeps_every_field():
    llama = llama_configuration(rope_parameters={"rope_type": "default", "rope_theta": 777.0}, attention_bias=True)
    config = DepthLlamaConfig.from_llama(llama, memory="kv", kv_init="public")
    ours, theirs = config.to_dict(), llama.to_dict()
    for key in set(theirs) - {"model_type", "architectures", "_name_or_path", "transformers_version"}:
        assert ours[key] == theirs[key], key
    assert (config.model_type, config.memory, config.kv_init, config.residual) == (
        "depth_llama",
        "kv",
        "public",
        "serial",
    )
    with pytest.raises(ValueError, match="memory"):
        DepthLlamaConfig.from_llama(llama, residual="hyper", memory="kv")
    with pytest.raises((ValueError, TypeError), match="memry"):
        DepthLlamaConfig.from_llama(llama, memry="kv")


def test_defaults_are_plain_llama():
    config = DepthLlamaConfig(**SIZE)
    assert (config.residual, config.memory, config.tree) == ("serial", "none", None)
    assert (config.num_streams, config.hyper_dynamic, config.kv_init) == (4, True, "identity")
    assert (config.router_input, config.router_top_p) == ("normed", None)


@pytest.mark.parametrize("p", [0.0, 1.01, -1.0])
def test_pruning_by_a_share_out_of_range(p):
    with pytest.raises(ValueError, match="p"):
        DepthLlamaForCausalLM(configuration("static")).prune_routers(p=p)


@pytest.mark.parametrize("name", ["serial", "hyper", "tree"])
def test_pruning_a_model_without_routers(name):
    with pytest.raises(ValueError, match=r"router|memory"):
        DepthLlamaForCausalLM(configuration(name)).prune_routers()
