"""Decoders whose layers lack attention or MLP are read like the stock decoder in which those branches give zeros."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import tiny_models
from architectures.test_skipped import FAMILIES, skipped, tokens, zeroed
from fulldepth.execution import capture, verify
from fulldepth.hf import anatomy_candidates
from refusals import refused

SITES = ["residual", "attention_input", "attention_output", "attention_branch", "mlp_branch", "mlp_input"]


@pytest.mark.parametrize("removed", [{"attention": (1, 3)}, {"attention": (1, 2, 3)}, {"mlp": (2,)}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_is_that_of_the_zeroed_model(family, removed):
    stock = tiny_models.build(family)
    found = []
    for model in (skipped(stock, **removed), zeroed(stock, **removed)):
        batch = dict(zip(("input_ids", "attention_mask"), tokens(), strict=True))
        anatomy = verify(anatomy_candidates(model), batch).anatomy
        with capture(anatomy, SITES) as activations, torch.no_grad():
            model(**batch, use_cache=False)
            found.append({site: activations.stack(site) for site in SITES})
    for site in SITES:
        assert_close(found[0][site], found[1][site], rtol=1e-5, atol=1e-6, msg=site)


def test_a_stock_model_without_a_branch_is_still_refused():
    model = tiny_models.build("llama")
    del model.model.layers[1].self_attn
    anatomy = anatomy_candidates(model)[0]
    with refused(r"Layer 2 .* has no known attention_branch"), capture(anatomy, SITES):
        pass
