"""One row with position ids gives what a batch of rows gives: loss, gradients, penalties; flash attention's cuts."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, default_data_collator
from transformers import modeling_flash_attention_utils as flash

import fulldepth.architectures  # noqa: F401  registers depth_llama
import tiny_models
from fulldepth.data import flatten_windows
from fulldepth.losses import Objective
from refusals import refused
from tiny_models import gradients, seeded

SIZES = {**tiny_models.SIZES, "num_key_value_heads": 2}
KINDS = {
    "llama": SIZES,
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0},
    "depth_llama": {**SIZES, "memory": "dynamic"},
}
"""gpt2 has 16 absolute positions: fewer than the row has tokens, as many as a window."""
T, V = 12, 50


def windows():
    """Windows of T random tokens; each tuple says where its documents begin."""
    items = []
    for number, begins in enumerate(((0, 5), (0,), (0, 1, 2, 11), (0, 6))):
        ids = torch.randint(1, V, (T,), generator=seeded(number))
        positions = torch.cat([torch.arange(b - a) for a, b in zip(begins, (*begins[1:], T), strict=True)])
        items.append({"input_ids": ids, "labels": ids.clone(), "position_ids": positions})
    return items


def step(model, batch, **terms):
    """Parts of the loss and the gradients."""
    objective = Objective(**terms).attach(model)
    model.zero_grad()
    loss, parts = objective(model(**batch, use_cache=False), batch)
    loss.backward()
    objective.detach()
    return {"loss": loss.item(), **{name: float(value) for name, value in parts.items()}}, gradients(model)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_trains_like_its_windows(kind, attention):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](vocab_size=V, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    for terms in ({"jump": 0.7, "similarity": 0.3}, {"aligned": {"schedule": "always"}}):
        rows, expected = step(model, default_data_collator(windows()), **terms)
        row, same = step(model, flatten_windows(windows()), **terms)
        exact = {"sdpa": 1e-9, "eager": 1e-6}[attention]  # transformers' eager softmax is float32
        assert row == pytest.approx(rows, rel=exact)
        assert_close(same, expected, rtol=10 * exact, atol=exact / 100)


def test_flash_attention_cuts_the_row_at_windows_and_documents():
    batch = flatten_windows(windows())
    assert flash._is_packed_sequence(batch["position_ids"], 1)
    (cuts, keys), (longest, _) = flash.prepare_fa_kwargs_from_position_ids(batch["position_ids"])
    assert cuts.tolist() == keys.tolist() == [0, 5, 12, 24, 25, 26, 35, 36, 42, 48]
    assert int(longest) == 12
    whole = default_data_collator(windows())["position_ids"]
    assert not flash._is_packed_sequence(whole, len(whole))  # the reason for the row
    alone = flatten_windows(windows()[1:2])["position_ids"]
    assert not flash._is_packed_sequence(alone, 1)  # one document is one plain causal sequence


def test_targets_are_those_of_the_windows():
    items = windows()
    assert int((flatten_windows(items)["labels"][..., 1:] != -100).sum()) == 4 * (T - 1)
    assert torch.equal(items[0]["labels"], items[0]["input_ids"])  # the data set's own windows are as they were
    with refused("position_ids"):
        flatten_windows([{"input_ids": torch.ones(4), "labels": torch.ones(4)}])
