"""Published choices by their formulas: stock hidden states in float64, one sequence at a time, nothing of ours."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import tiny_models as tm
from fulldepth.results import Results
from fulldepth.skip.search import search
from refusals import refused
from skip import plain

EXAMPLES = plain.examples(heldout=22)
"""12 to 28 tokens, so that batches of four are padded."""


def picked(model, name, granularity, **goal):
    options = {"search": name, "granularity": granularity, "fit": False, "batch_size": 4}
    return search(model, EXAMPLES, **goal, **options).blocks


@torch.no_grad()
def streams(model):
    """For each sequence, `[2 L + 1, T, D]` float64: the stream before, between and after attention and MLP."""
    model, branches = copy.deepcopy(model).double(), []
    model.base_model.norm = nn.Identity()  # the last hidden state is that of the last layer
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


def last_global(model):
    """The one layer of a Gemma 3 that attends to all tokens; none of a model without windows."""
    kinds = getattr(model.config, "layer_types", None) or []
    found = [n for n, kind in enumerate(kinds, start=1) if kind == "full_attention"]
    return found if len(found) < len(kinds) else []


@pytest.mark.parametrize("granularity", ["attention", "mlp", "layer", "any"])
def test_block_influence(model, granularity):
    """ShortGPT (arXiv 2403.03853), eq. 1: layers. LLM-Drop (arXiv 2406.15786): attention, MLPs, both in one ranking."""
    half, whole = (sum((1 - cosine(h[:-n], h[n:])).sum(-1) for h in streams(model)).tolist() for n in (1, 2))
    scores = {"attention": half[::2], "mlp": half[1::2], "layer": whole[::2]}
    parts = ["attention", "mlp"] if granularity == "any" else [granularity]
    names = {part: f"{part} " if granularity == "any" else "" for part in parts}
    scored = {f"{names[part]}{n}": score for part in parts for n, score in enumerate(scores[part], start=1)}
    for n in last_global(model) if granularity != "mlp" else ():  # stays where all others are removed
        del scored[f"{names[parts[0]]}{n}"]
    got = picked(model, "cosine", granularity, blocks=len(scored))
    assert list(map(str, got)) == sorted(scored, key=scored.__getitem__)


def run_of(states, length, without=()):
    """The run of this many layers with the smallest angle: Gromov et al. (arXiv 2403.17887), eq. 7, of all tokens."""
    angles = sum(cosine(h[:-length], h[length:]).arccos().sum(-1) for h in states)
    runs = [range(first, first + length) for first in range(1, len(angles) + 1)]
    return list(min((run for run in runs if not {*run} & {*without}), key=lambda run: angles[run[0] - 1]))[::-1]


def test_groups_are_the_runs_of_smallest_angle(model):
    states, depth = [h[::2] for h in streams(model)], model.config.num_hidden_layers
    stays = last_global(model)
    lengths = range(1, 2 if stays else depth + 1)
    runs = [run_of(states, length, stays) for length in lengths]
    assert [picked(model, "groups", "layer", blocks=length) for length in lengths] == runs
    closest = runs[0][0]
    assert picked(model, "groups", "layer", blocks=1, keep=[closest]) == run_of(states, 1, [closest, *stays])
    if stays:
        with refused("No run of neighbouring"):
            picked(model, "groups", "layer", blocks=2)
        return
    assert len({run[-1] for run in runs}) > 1

    weights = [sum(w.numel() for w in block.parameters()) for block in plain.blocks_of(model)]
    share = 1 - 1.5 * weights[0] / sum(w.numel() for w in model.parameters())  # two equal layers reach it, one does not
    assert picked(model, "groups", "layer", target_bytes=share) == runs[1]


def test_groups_without_losses_save_the_angle_of_every_run(tmp_path):
    model = plain.trained(5, 32, 200)
    options = {"search": "groups", "granularity": "layer", "blocks": 2, "fit": False, "output": tmp_path / "plan"}
    search(model, EXAMPLES, **options)
    angles = [cosine(h[::2][:-2], h[::2][2:]).arccos() for h in streams(model)]
    expected = torch.cat(angles, dim=1).mean(1) / math.pi
    rows = Results.load(tmp_path / "plan").table
    assert (rows.measure.tolist(), rows.layer.tolist()) == (["angle"] * 4, [1, 2, 3, 4])
    assert rows.value.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert "Angle of a run" in (tmp_path / "plan" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("removes whole layers, got --granularity attention", {"granularity": "attention", "blocks": 2}),
        ("removes whole layers, got --granularity any", {"granularity": "any", "blocks": 2}),
        ("No run of neighbouring", {"granularity": "layer", "blocks": 2, "keep": [2, 4]}),
    ],
)
def test_groups_that_cannot_be_chosen(words, options):
    with refused(words):
        picked(plain.fresh(5, 32).eval(), "groups", **options)
