"""Some of a model's layers, cut out, saved and loaded by transformers, against the whole model that skips the others.

For every text configuration of the installed transformers: the cut is right, or refused.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from torch.testing import assert_close

from families import verdicts, zoo
from fulldepth.core.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.hf import truncated, without_layers
from refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore")
DEPTH = 6
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
ONE_LENGTH = ("gpt_neo", "granitemoehybrid", "lfm2_moe", "lfm3", "nemotron_h", "qwen4_exp_text", "zamba", "zamba2")
"""Types whose configuration in the zoo is for three layers."""
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 3}
CASES = {
    **{name: {} for name in verdicts.LISTS["causal-lm"]},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "qwen3_moe": {"mlp_only_layers": [1, 4], "decoder_sparse_step": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 2, 4, 2, 2, 4]},
    "ernie4_5_moe": {"moe_layer_start_index": 2, "moe_layer_end_index": 4},
    "kimi_linear": HYBRID,
    "qwen3_next": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "deepseek_v3": {"first_k_dense_replace": 3},
    "rwkv": {"rescale_every": 0},  # as `load_checkpoint` sets it; see tests/hf/test_halving.py
    "glm_moe_dsa": {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse", "dense"]},
}
"""Model type -> entries of its configuration, some of them by layer."""
CUT = (
    "deepseek_v3",
    "ernie4_5_moe",
    "gemma4_text",
    "glm_moe_dsa",
    "laguna",
    "llama4_text",
    "mistral",
    "qwen3_moe",
    "zaya",
)
"""Types whose layers can be cut in every way; a layer of Zaya hands its router's state to the next."""


def build(model_type, **fields):
    known = zoo.CONFIG_MAPPING[model_type]().to_dict()
    depths = {name: DEPTH for name in DEPTHS if name in known and model_type not in ONE_LENGTH}
    return zoo.build(model_type, "causal-lm", **depths | fields)


@torch.no_grad()
def logits(model):
    return verdicts.stock_output(model, zoo.inputs(model, seed=3)).logits


def skipping(model, remaining):
    """A copy whose other blocks give the state that they are given."""
    whole = copy.deepcopy(model)
    for number, block in enumerate(find_anatomy(whole).block_list, start=1):
        if number not in remaining:
            block.forward = verdicts.passing(block)
    return whole


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in CUT else pytest.mark.thorough) for name in CASES]
)
def test_a_cut_model_computes_the_same_after_loading_or_is_refused(model_type, tmp_path):
    model = build(model_type, **CASES[model_type])
    verdict, _, first_two = verdicts.stated("causal-lm", model_type)  # as docs/families.md says
    try:
        anatomy = find_anatomy(model)
    except FulldepthError:
        assert verdict == "refused"
        return
    cuts = []
    before, last = model.config.to_dict(), anatomy.num_layers
    for remaining in ([1, 2], [1, *range(3, last + 1)], [*range(2, last + 1)], [*range(1, last - 1), last]):
        try:
            first = remaining == [1, 2]
            cut = truncated(anatomy, 2) if first else without_layers(anatomy, remaining)
        except FulldepthError:
            continue
        cuts.append(remaining)
        cut.save_pretrained(tmp_path / f"{remaining}")
        again = type(model).from_pretrained(tmp_path / f"{remaining}").eval()
        expected = logits(skipping(model, remaining))
        assert_close(logits(again), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert model.config.to_dict() == before
    assert len(cuts) == 4 or model_type not in CUT
    assert ([1, 2] in cuts) is (first_two == "yes") or CASES[model_type]


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("gemma4_text", {}, r"embed_tokens_per_layer.weight has the shape \(96, 48\)"),
        (
            "gemma4_text",
            {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2},
            "last 2 layers read the keys and values of earlier ones .num_kv_shared_layers",
        ),
        ("jamba", {}, "follows from its number .attn_layer_period, expert_layer_period"),
    ],
)
def test_a_refusal_names_the_entry(model_type, fields, reason):
    with refused(reason):
        without_layers(find_anatomy(build(model_type, **fields)), [1, 3, 5, 6])


def test_every_text_class_of_transformers_is_in_the_table():
    """A class that a new version adds needs a row, or a sentence why it is not tested."""
    classes = {zoo.class_name(name, "causal-lm") for name in zoo.HEADS["causal-lm"]}
    rows = {zoo.class_name(name, task) for task, name in verdicts.CASES}
    assert classes - rows - {zoo.class_name(name, "causal-lm") for name in verdicts.NOT_TESTED} == set()
    assert all(hasattr(tf, name) for name in rows)
