"""The tree of residual paths: the builder's mapping by hand, and what each layer reads in closed form."""

from __future__ import annotations

import pytest
import torch

from architectures.combinations import build, tokens
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


@pytest.mark.parametrize("memory", ["none", "dynamic"])
@pytest.mark.parametrize("case", CASES)
def test_every_layer_reads_the_two_states_that_the_mapping_names(case, memory):
    """Each layer's output is replaced by a unit vector of its own, which RMSNorm turns into sqrt(D) times itself."""
    layers, tree = CASES[case]
    changes = {"num_hidden_layers": layers, "memory": memory, "rms_norm_eps": 1e-30}
    model = build("tree", tree={str(layer): list(pair) for layer, pair in tree.items()}, **changes)
    width = model.config.hidden_size
    unit = torch.eye(width, dtype=torch.float64)
    read = {}

    def replace(index):
        def hook(module, args, output):
            state = (output[0] if isinstance(output, tuple) else output) * 0 + unit[index + 1]
            return (state, *output[1:]) if isinstance(output, tuple) else state

        return hook

    def remember(index):
        def hook(module, args):
            read[index] = args[0]

        return hook

    model.model.embed_tokens.register_forward_hook(replace(-1))
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(replace(index))
        layer.input_layernorm.register_forward_pre_hook(remember(index))
    with torch.no_grad():
        model(tokens())
    for index, layer in enumerate(model.model.layers):
        expected = unit[index]
        if index in tree:
            gains = [norm.weight for norm in layer.tree_norms]
            expected = sum(g * unit[s + 1] * width**0.5 for g, s in zip(gains, tree[index], strict=True))
        torch.testing.assert_close(read[index], expected.expand_as(read[index]), rtol=1e-12, atol=1e-12)
