"""What a contributor adds for a new penalty: one class and one entry of the registry, good for loops and recipes; the
mistakes that penalties refuse.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cli.conftest import main  # noqa: F401
from fulldepth.losses import (
    TERMS,
    Term,
    aligned_loss,
    coherence_penalty,
    jump_penalty,
    orthogonality_penalty,
    similarity_penalty,
)
from fulldepth.results import Results
from fulldepth.settings import assignments, layer
from fulldepth.training import TrainSettings
from fulldepth.training.trainer import make_objective, resolved
from refusals import refused
from training.conftest import recipe, sources  # noqa: F401


class Loudness(Term):
    """Mean power of the last state's channels."""

    name = "loudness"
    sites = ("residual",)
    exponent: float = 2.0

    def value(self, context):
        last = context.states["residual"][-1]
        return last.abs().pow(self.exponent).mean(-1)[context.task.counted(context.batch, last)].mean()


@pytest.fixture
def loudness(monkeypatch):
    monkeypatch.setitem(TERMS, "loudness", Loudness)


@pytest.mark.usefixtures("loudness")
def test_a_new_penalty_in_a_recipe(tmp_path, recipe, main):  # noqa: F811
    path = recipe(objective={"loudness": 0.1}, steps=2, eval_every=2, save_every=2)
    assert main("train", path, "--output", tmp_path / "run")[0] == 0
    results = Results.load(tmp_path / "run")
    assert results.table.query("measure == 'penalty' and site == 'loudness'").value.tolist()[0] > 0
    assert results.meta["settings"]["objective"] == {"energy_warmup": 800, "loudness": 0.1}
    assert "loudness (weight 0.1)" in (tmp_path / "run" / "report.html").read_text().lower()


def settings(*arguments):
    return layer(TrainSettings, assignments(arguments))


@pytest.mark.parametrize(
    ("argument", "word"),
    {
        "objective.jmup=1.0": "objective.jump",
        "objective.jmup=null": "objective.jump",
        "objective.jump.alhpa=1": "alpha",
        "method=jrge": "jreg",
        "objective.jump=true": "objective.jump",
        "objective.jump.alpha=x": "jump.alpha",
        "objective.coherence.layers=all": "coherence.layers",
        "objective.orthogonality.layers=3": "orthogonality.layers",
        "objective.coherence.target=-1": "coherence.target",
    }.items(),
)
def test_terms_in_settings_are_checked_when_they_are_read(argument, word):
    with refused(word):
        resolved(settings(argument))


def test_nothing_switches_off_what_the_method_has():
    chosen = settings("method=cr", "objective.orthogonality=null", "objective.coherence.target=0.5")
    assert resolved(chosen).objective.terms == {"coherence": {"weight": 0.01, "target": 0.5}}
    assert list(make_objective(resolved(chosen)).terms) == ["coherence"]
    assert resolved(resolved(chosen).model_copy(update={"method": "standard"})).objective == resolved(chosen).objective


def zeros(*shapes):
    return [torch.zeros(shape) for shape in shapes]


def wrong_aligned(head=None, labels=None, **options):
    labels = torch.zeros(3, 7, dtype=torch.long) if labels is None else labels
    return lambda: aligned_loss(zeros(STATE, STATE), head or nn.Linear(6, 4), labels, **options)


STATE = (3, 7, 6)
MISTAKES = [
    (lambda: jump_penalty(zeros(STATE)), "2 hidden states"),
    (lambda: jump_penalty(zeros(STATE, (3, 7, 5), STATE)), r"\(3, 7, 5\)"),
    (lambda: jump_penalty(zeros(STATE, STATE), mask=torch.ones(7, dtype=torch.bool)), "mask"),
    (lambda: jump_penalty(zeros(STATE, STATE), mask=torch.zeros(3, 7)), "mask"),
    (lambda: jump_penalty(zeros(STATE, STATE), math.nan), "alpha"),
    (lambda: similarity_penalty([]), "hidden states"),
    (lambda: similarity_penalty(zeros(STATE), "linar"), "linear"),
    (lambda: orthogonality_penalty(torch.zeros(4, 5)), r"\[B, T, D\]"),
    (lambda: orthogonality_penalty(torch.zeros(STATE), form="frobenus"), "frobenius"),
    (lambda: coherence_penalty(*zeros((1, 8, 3), (1, 8, 3)), 2, 12), "two sequences"),
    (lambda: coherence_penalty(*zeros((1, 8, 3), (1, 8, 3)), 2, 12, reduce=lambda tensor: tensor), "two sequences"),
    (lambda: coherence_penalty(*zeros((5, 1, 3), (5, 1, 3)), 2, 12), "two positions"),
    (lambda: coherence_penalty(*zeros((5, 8, 3), (5, 7, 3)), 2, 12), r"\(5, 7, 3\)"),
    (lambda: coherence_penalty(*zeros((5, 8, 3), (5, 8, 3)), 12, 12), "layer .* 12"),
    (wrong_aligned(labels=torch.zeros(3, 6, dtype=torch.long)), r"labels .*\(3, 6\)"),
    (wrong_aligned(labels=torch.zeros(3, 7)), "labels"),
    (wrong_aligned(weights=[1.0]), "2 finite weights"),
    (wrong_aligned(weights=[1.0, -1.0]), "2 finite weights"),
    (wrong_aligned(weights=[1.0, math.inf]), "2 finite weights"),
    (wrong_aligned(lambda x: x[:, 0]), "head"),
    (wrong_aligned(chunk=0), "chunk"),
    (wrong_aligned(positions=1.5), "positions"),
]


@pytest.mark.parametrize(("call", "word"), MISTAKES)
def test_mistakes_in_calls_of_the_formulas_are_refused(call, word):
    with refused(word):
        call()
