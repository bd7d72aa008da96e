"""The tree of residual paths: the builder's mapping by hand, and what each layer reads in the plain form."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from architectures import oracle
from architectures.combinations import build, frequencies, tokens
from fulldepth.architectures import DepthLlamaConfig, build_tree

PAPER = {1: (-1, 0), 2: (0, 1), 4: (0, 3), 6: (1, 5), 8: (1, 7)}
FOURTH_ROW = {10: 2, 12: 2, 14: 4, 16: 4, 18: 6, 20: 6, 22: 8, 24: 8}
"""Layer -> parent, for a tree of four rows."""
BY_HAND = {
    2: {1: (-1, 0)},
    6: {1: (-1, 0)},
    9: {1: (-1, 0)},
    10: PAPER,
    12: PAPER,
    16: PAPER,
    24: PAPER,
    25: PAPER,
    26: PAPER | {layer: (parent, layer - 1) for layer, parent in FOURTH_ROW.items()},
    32: PAPER | {layer: (parent, layer - 1) for layer, parent in FOURTH_ROW.items()},
}


@pytest.mark.parametrize("layers", BY_HAND)
def test_the_builder_by_hand(layers):
    assert build_tree(layers) == BY_HAND[layers]
    config = DepthLlamaConfig(num_hidden_layers=layers, residual="tree")
    assert config.tree == {layer: list(sources) for layer, sources in BY_HAND[layers].items()}


def test_every_tree_fits_with_a_buffer_after_its_last_leaf():
    for layers in range(10, 140):
        tree = build_tree(layers)
        rows = (len(tree) + 3).bit_length() - 1
        assert len(tree) + 2 == 2**rows - 1
        assert max(tree) + 1 < layers
        assert 2 ** (rows + 2) - 6 > layers, "a higher tree would fit"


@pytest.mark.parametrize("layers", [1, 0])
def test_no_tree_of_fewer_than_two_layers(layers):
    with pytest.raises(ValueError, match=f"2 layers, got {layers}"):
        build_tree(layers)


CASES = {
    "paper": (12, PAPER),
    "skipping the layer before": (6, {2: (-1, 0), 4: (0, 1), 5: (4, 2)}),
    "twice the same": (4, {1: (0, 0), 3: (-1, -1)}),
    "first layer": (3, {0: (-1, -1)}),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_layer_reads_the_two_states_that_the_mapping_names(case):
    layers, tree = CASES[case]
    model = build("tree", tree=tree, num_hidden_layers=layers, memory="dynamic")
    expected = oracle.run(model.state_dict(), model.config, tokens(), frequencies=frequencies(model))
    states = []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    assert_close(model(tokens()).logits, expected.logits, rtol=1e-10, atol=1e-10)
    for index, parents in tree.items():
        gains = (norm.weight for norm in model.model.layers[index].tree_norms)
        ends = [oracle.rms_norm(expected.states[at + 1], gain, 1e-5) for at, gain in zip(parents, gains, strict=True)]
        assert_close(states[index], sum(ends), rtol=1e-10, atol=1e-10)
