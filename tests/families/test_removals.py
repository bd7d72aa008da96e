"""Searches that remove a part or a layer, against stock models of transformers without it, for every text class."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch.nn.functional import cross_entropy

import tiny_models as tm
from families import verdicts, zoo
from fulldepth.core.errors import FulldepthError
from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.execution import find_anatomy
from fulldepth.hf.modes import state_in, with_state
from fulldepth.skip import search

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH = 17
QUICK = ("bloom", "dots3_note_text", "falcon_h1", "gemma4_text", "git", "gpt_neo", "llama", "mamba", "openai-gpt")


@torch.no_grad()
def stock_loss(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits.double()
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


def without(model, granularity, layer):
    """A copy whose block passes its input on, or whose branch is followed by zeros."""
    whole = copy.deepcopy(model)
    anatomy = find_anatomy(whole)
    if granularity == "layer":
        block = anatomy.block_list[layer - 1]
        block.forward = verdicts.passing(block)
    else:
        branch = anatomy.part(layer, f"{granularity}_branch")
        branch.register_forward_hook(lambda *call: with_state(call[2], torch.zeros_like(state_in(call[2]))))
    return whole


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in verdicts.LISTS["causal-lm"]],
)
def test_a_search_computes_the_stock_model_without_the_part_or_refuses_it(model_type):
    model = zoo.build(model_type, "causal-lm")
    verdict, branches, _ = verdicts.stated("causal-lm", model_type)  # as docs/families.md says
    ids = tm.token_ids(12, LENGTH, seed=4, most=min(96, model.config.get_text_config().vocab_size))
    rows = [Example.of(row.tolist(), 1, LENGTH, document=number) for number, row in enumerate(ids)]
    data = Examples(rows[:6], rows[6:], {"hash": "sha256:" + "1" * 64, "name": "texts", "kind": "text"})
    for granularity in ("layer", "attention", "mlp"):
        parts = branches == "yes" and model_type not in verdicts.ONLY_LAYERS
        expected = verdict == "right" and (granularity == "layer" or parts)
        anatomy = find_anatomy(model) if expected else None
        layer = anatomy.layers_with(granularity)[-1] if expected and granularity != "layer" else 2
        options = {"search": "given", "given": [layer], "fit": False, "progress": False}
        if not expected:
            with pytest.raises(FulldepthError) as refusal:
                search(model, data, granularity=granularity, **options)
            assert verdict != "right" or "Skip whole layers: --granularity layer" in str(refusal.value)
            continue
        plan = search(model, data, granularity=granularity, **options)
        stock = [stock_loss(each, ids[6:]) for each in (model, without(model, granularity, layer))]
        assert plan.losses == pytest.approx(stock, abs=3e-6)
        assert abs(stock[0] - stock[1]) > 1e-5


def test_the_page_names_the_types_of_which_only_layers_are_removed():
    """The test above holds each name and each absence of one."""
    (paragraph,) = re.findall(r"removes whole layers only\..*?\n\n", verdicts.PAGE.read_text(), re.DOTALL)
    assert re.findall(r"`([\w-]+)`", paragraph) == [*verdicts.ONLY_LAYERS]
