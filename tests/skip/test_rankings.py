"""Published choices by their formulas: stock hidden states in float64, one sequence at a time, nothing of ours."""

from __future__ import annotations

import copy

import pytest
import torch

import tiny_models as tm
from fulldepth.errors import FulldepthError
from fulldepth.skip.search import search
from skip import plain

EXAMPLES = plain.examples(heldout=22)
"""12 to 28 tokens, so that batches of four are padded."""


def picked(model, name, blocks, granularity):
    options = {"search": name, "granularity": granularity, "fit": False, "batch_size": 4}
    return search(model, EXAMPLES, blocks, **options).blocks


@torch.no_grad()
def streams(model):
    """For each sequence, `[2 L + 1, T, D]` float64: the stream before, between and after attention and MLP."""
    model, branches = copy.deepcopy(model).double(), []
    model.base_model.norm = torch.nn.Identity()  # the last hidden state is that of the last layer
    for block in plain.blocks_of(model):
        block.get_submodule(plain.branches_of(model)[0]).register_forward_hook(
            lambda module, args, output: branches.append(output[0] if isinstance(output, tuple) else output)
        )
    for example in EXAMPLES.heldout:
        branches.clear()
        states = model(input_ids=example.input_ids[None], output_hidden_states=True).hidden_states
        between = [x + a for x, a in zip(states, branches, strict=False)]
        yield torch.cat([*(s for pair in zip(states, between, strict=False) for s in pair), states[-1]])


def cosine(before, after):
    return (before * after).sum(-1) / (before.norm(dim=-1) * after.norm(dim=-1))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request):
    return plain.trained(5, 32, 200) if request.param == "llama" else tm.build("gemma3").eval()


PARTS = {"attention": (slice(0, -1, 2), slice(1, None, 2)), "mlp": (slice(1, -1, 2), slice(2, None, 2))}
PARTS["layer"] = slice(0, -1, 2), slice(2, None, 2)


@pytest.mark.parametrize("granularity", PARTS)
def test_block_influence(model, granularity):
    """ShortGPT (arXiv 2403.03853), eq. 1, for layers; LLM-Drop (arXiv 2406.15786) for attention and MLPs."""
    before, after = PARTS[granularity]
    scores = sum((1 - cosine(h[before], h[after])).sum(-1) for h in streams(model)).tolist()
    expected = sorted(range(1, len(scores) + 1), key=lambda layer: scores[layer - 1])
    assert picked(model, "cosine", len(scores), granularity) == expected


def test_groups_are_the_runs_of_smallest_angle(model):
    """Gromov et al. (arXiv 2403.17887), eq. 7, over all tokens."""
    states, firsts = [h[::2] for h in streams(model)], []
    for run in range(1, model.config.num_hidden_layers + 1):
        angles = sum(cosine(h[:-run], h[run:]).arccos().sum(-1) for h in states)
        firsts.append(int(angles.argmin()) + 1)
        assert picked(model, "groups", run, "layer") == [*range(firsts[-1] + run - 1, firsts[-1] - 1, -1)]
    assert len(set(firsts)) > 1


@pytest.mark.parametrize("granularity", ["attention", "mlp"])
def test_groups_are_of_layers(model, granularity):
    with pytest.raises(FulldepthError, match=f"layers, not of {granularity}"):
        picked(model, "groups", 2, granularity)
