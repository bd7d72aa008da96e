"""Counts of computed layer positions, against hooks on the last product of every block."""

from __future__ import annotations

import pytest
import torch

from execution import decoders
from fulldepth.execution.decoding import Decoder, DraftPlan
from fulldepth.hf import surgery

NEW = 12
MODES = {
    "plain": {},
    "recompute": {"threshold": 0.03},
    "propagate": {"threshold": 0.03, "policy": "propagate"},
    "recompute-late": {"threshold": 0.9},
    "exit-layer": {"exit_layer": 2},
    "candidates": {"threshold": 0.03, "lens_candidates": 8},
    "speculation": {"speculate_from": 1, "draft_length": 3},
    "skipped layers": {"plan": DraftPlan([2], "layer"), "draft_length": 3},
    "skipped attention": {"plan": DraftPlan([2], "attention"), "draft_length": 3},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_positions_are_those_that_passed_through_the_blocks(mode, sampled, rows, monkeypatch):
    """Prompts of several lengths; sequences end at different steps. A drafting model without layer 2 leaves it out."""
    model = decoders.build("llama", late=0.4)
    prompts, decoder, ran = decoders.prompts(rows), Decoder(model), [0, 0, 0]
    wirings = surgery.wirings(decoder.anatomy)  # runs a block, to see how it is wired
    monkeypatch.setattr(surgery, "wirings", lambda anatomy: wirings)
    plain = decoder.generate(**prompts, max_new_tokens=NEW)
    model.generation_config.eos_token_id = int(plain.sequences[0, 9 + NEW // 2])

    def counting(layer):
        def hook(module, arguments, output):
            ran[layer] += output.shape[0] * output.shape[1]

        return hook

    hooks = [block.mlp.down_proj.register_forward_hook(counting(at)) for at, block in enumerate(model.model.layers)]
    options = {"do_sample": True, "seed": 3} if sampled else {}
    found = decoder.generate(**prompts, max_new_tokens=NEW, **MODES[mode], **options)
    for hook in hooks:
        hook.remove()
    stats = found.stats
    assert [sum(pair) for pair in zip(stats.prompt_positions, stats.layer_positions, strict=True)] == ran
    positions = sum(9 + count - 1 for count in stats.new_tokens)  # of plain decoding
    assert stats.layers_computed == pytest.approx(sum(ran) / positions)
    if stats.exits is not None:
        assert stats.theoretical_speedup == pytest.approx(3 * positions / sum(ran))
    if mode == "plain":
        assert stats.layers_computed == 3
    if mode == "exit-layer":
        assert stats.layers_computed == 2


@torch.no_grad()
def test_one_deep_token_makes_recomputation_run_nearly_everything():
    """Half of the layers by exits, nearly all of them by count: the last token needs all positions."""
    model = decoders.build("llama", late=0.4)
    model.generation_config.eos_token_id = None
    prompts, decoder = decoders.prompts(1), Decoder(model)
    for threshold in torch.linspace(0.01, 0.2, 40).tolist():
        stats = decoder.generate(**prompts, max_new_tokens=NEW, threshold=threshold).stats
        by_exits = 3 * sum(stats.exits) / sum(layer * count for layer, count in enumerate(stats.exits, start=1))
        last = stats.exit_layers[0][-1]
        if by_exits > 1.2 and last == 3:
            assert stats.theoretical_speedup == 1  # the last token ran through all layers, so all positions did
            return
    pytest.fail("no threshold at which tokens leave early and the last one does not")
