"""Counts of computed layer positions, against hooks on the last product of every block."""

from __future__ import annotations

import pytest

from execution import decoders
from fulldepth.execution.decoding import Decoder

NEW = 12
MODES = {
    "plain": {},
    "early-exit": {"threshold": 0.03},
    "late-exit": {"threshold": 0.9},
    "exit-layer": {"threshold": 1e-9, "min_layer": 2},
    "speculation": {"speculate_from": 1, "draft_length": 3},
}


@pytest.mark.parametrize(("rows", "sampled"), [(1, False), (3, True)])
@pytest.mark.parametrize("mode", MODES)
def test_positions_are_those_that_passed_through_the_blocks(mode, sampled, rows):
    """Prompts of several lengths; sequences end at different steps."""
    model = decoders.build("llama", late=0.4)
    prompts, decoder, ran = decoders.prompts(1 if mode == "speculation" else rows), Decoder(model), [0, 0, 0]
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
