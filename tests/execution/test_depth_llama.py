"""Sites of the package's own model against the model written again in plain float64 loops."""

import pytest
import torch
from torch.testing import assert_close

from architectures import combinations
from architectures import oracle as plain
from fulldepth.execution import COEFFICIENTS, capture, verify
from fulldepth.execution.verify import check_routing
from fulldepth.hf import anatomy_candidates
from refusals import refused

EXACT = {"rtol": 1e-9, "atol": 1e-9}
STATES = ["embeddings", "residual", "attention_input", "attention_output", "value"]
BRANCHES = ["attention_carried", "attention_branch", "mlp_input", "mlp_branch"]


@torch.no_grad()
def read(name, sites):
    """The model, its verified anatomy, what was captured, and the oracle's trace of the same ids."""
    model = combinations.build(name)
    ids = combinations.tokens()
    found = verify(anatomy_candidates(model), {"input_ids": ids})
    with capture(found.anatomy, sites) as activations:
        model(ids)
        states = {site: activations.coefficients(site) if site in COEFFICIENTS else activations[site] for site in sites}
    frequencies = combinations.frequencies(model)
    return model, found, states, plain.run(model.state_dict(), model.config, ids, frequencies=frequencies)


def streams(trace, config):
    """[L+1] residual streams of the trace, several of them summed; the embedding is copied into each."""
    if config.residual != "hyper":
        return trace.states
    return [config.num_streams * trace.states[0], *(state.sum(2) for state in trace.states[1:])]


@combinations.EVERY
def test_states_and_branches(name):
    model, found, states, trace = read(name, [*STATES, *BRANCHES])
    expected = streams(trace, model.config)
    assert_close(states["residual"], expected, **EXACT)
    assert_close(states["embeddings"], expected[:1], **EXACT)
    assert_close(states["value"], [value.flatten(2) for value in trace.values], **EXACT)
    after, carried = states["attention_output"], states["attention_carried"]
    assert_close([c + a for c, a in zip(carried, states["attention_branch"], strict=True)], after)
    ends = [m + b for m, b in zip(states["mlp_input"], states["mlp_branch"], strict=True)]
    assert_close(ends, expected[1:], **EXACT)
    tree = model.config.tree or {}
    gains = [[norm.weight for norm in layer.tree_norms or ()] for layer in model.model.layers]
    for index, x in enumerate(states["attention_input"]):
        ends = [trace.states[source + 1] for source in tree.get(index, ())]
        parts = [plain.rms_norm(h, g, model.config.rms_norm_eps) for h, g in zip(ends, gains[index], strict=True)]
        assert_close(x, sum(parts) if parts else expected[index], **EXACT)
        if model.config.residual != "hyper":
            assert_close(states["attention_carried"][index], x, rtol=0, atol=0)
            assert_close(states["mlp_input"][index], after[index], rtol=0, atol=0)
    assert found.branches
    assert found.chained is not bool(tree)


@pytest.mark.parametrize(
    "name", [one for one in combinations.EVERY.args[1] if "memory" in combinations.SWITCHES[one.values[0]]]
)
def test_routing(name):
    model, found, states, trace = read(name, ["routing"])
    assert found.routed_heads == model.config.num_key_value_heads
    assert list(states["routing"]) == [2, 3, 4, 5]
    for layer, weights in states["routing"].items():
        assert_close(weights, trace.routing[layer - 1], **EXACT)


@pytest.mark.parametrize("shape", [(2, 2), (1, 9, 2, 4), (2, 4, 2), (3, 3)])
def test_a_router_of_other_sources_or_heads_is_refused(shape):
    with refused(r"the router of layer \d gives .* expected \d sources and as many heads"):
        check_routing({2: torch.ones(2, 2), 3: torch.ones(shape)})
    assert check_routing({2: torch.ones(2, 2), 3: torch.ones(1, 9, 2, 3), 4: torch.ones(2, 4, 2)}) == 2
