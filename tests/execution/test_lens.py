"""The lens against log-softmax and argmax over full logits in float64, and what it never builds."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from torch.testing import assert_close

import tiny_models
from fulldepth.execution import body_inputs, capture, predictions, read_layers, top_tokens, verify
from fulldepth.hf import anatomy_candidates
from tiny_models import seeded

MOST = 128
"""Rows that the budget of a test allows."""


class Fake:
    """A classifier out of one matrix that remembers the largest batch it was given."""

    def __init__(self, weight, dtype=torch.float32, softcap=None):
        self.anatomy = SimpleNamespace(vocab_size=len(weight))
        self.weight, self.per_token, self.largest, self.dtype = weight, True, 0, dtype
        self.softcap = softcap

    device = None

    classes = None

    def at(self, layer):
        return self

    def prepare(self, states):
        return states

    def logits(self, states):
        return self.tokens(states)

    def tokens(self, states):
        self.largest = max(self.largest, len(states))
        assert states.ndim == 2
        logits = (states.to(self.weight.dtype) @ self.weight.T).to(self.dtype)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def oracle(logits, targets):
    """[L+1, M] agreement, correctness and loss of full logits `[L+1, M, V]`, in plain float64 numpy."""
    logits = np.asarray(logits, dtype=np.float64)
    top = logits.argmax(-1)
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    loss = -np.take_along_axis(log_p, np.broadcast_to(targets, top.shape)[..., None], -1)[..., 0]
    return SimpleNamespace(agrees=top == top[-1], correct=top == targets, loss=loss)


def same(readout, expected, rtol=1e-5, atol=1e-5):
    assert_array_equal(readout.agrees.numpy(), expected.agrees)
    assert_array_equal(readout.correct.numpy(), expected.correct)
    assert_allclose(readout.loss.numpy(), expected.loss, rtol=rtol, atol=atol)


def invented(layers, batch, length, generator, width=6, vocabulary=11, share=0.7):
    states = torch.randn(layers, batch, length, width, generator=generator, dtype=torch.float64).float()
    weight = torch.randn(vocabulary, width, generator=generator)
    targets = torch.randint(vocabulary, (batch, length), generator=generator)
    targets[torch.rand(batch, length, generator=generator) > share] = -100
    return states, weight, targets


def full(states, weight, targets):
    where = targets != -100
    logits = states.double()[:, where] @ weight.double().T
    return oracle(logits, targets[where].numpy())


@given(
    layers=st.integers(1, 4),
    batch=st.integers(1, 5),
    length=st.integers(1, 90),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 999),
)
def test_token_heads_against_full_logits(layers, batch, length, share, seed):
    states, weight, targets = invented(layers, batch, length, seeded(seed), share=share)
    spoilt = states.masked_fill((targets == -100)[..., None], float("nan"))
    classifier = Fake(weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions, "CPU_BYTES", MOST * len(weight) * 4)
        readout = read_layers(classifier, spoilt, targets, torch.ones_like(targets))
    same(readout, full(states, weight, targets))
    assert classifier.largest <= MOST
    assert readout.loss.shape == (layers, int((targets != -100).sum()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_of_half_precision_are_broken_as_the_model_breaks_them(dtype, generator):
    """A coarse head: many equal maxima, of which argmax takes the first."""
    states, weight, targets = invented(4, 3, 120, generator, vocabulary=200)
    classifier = Fake(weight.round(), dtype)
    states = states.round()
    where = targets != -100
    logits = torch.stack([classifier.tokens(layer[where]) for layer in states])
    assert (logits == logits.amax(-1, keepdim=True)).sum(-1).gt(1).float().mean() > 0.1
    readout = read_layers(classifier, states, targets, torch.ones_like(targets))
    same(readout, oracle(logits.double(), targets[where].numpy()), rtol=1e-3, atol=1e-3)


def test_of_logits_at_a_soft_cap_the_first_is_predicted(generator):
    """In float32 tanh is exactly 1 above 9: large logits are equal, and argmax takes the first, as in the model."""
    states, weight, targets = invented(4, 3, 120, generator, vocabulary=200)
    classifier = Fake(100 * weight, softcap=5.0)
    where = targets != -100
    logits = torch.stack([classifier.tokens(layer[where]) for layer in states])
    assert (logits == logits.amax(-1, keepdim=True)).sum(-1).gt(1).float().mean() > 0.9
    readout = read_layers(classifier, states, targets, torch.ones_like(targets))
    same(readout, oracle(logits.double(), targets[where].numpy()), rtol=1e-3, atol=1e-3)


def test_the_loss_of_a_hopeless_target_is_finite():
    states, targets = torch.eye(2)[None, None], torch.tensor([[1, 0]])
    weight = torch.tensor([[300.0, 0], [0, 0], [0, 500]])
    readout = read_layers(Fake(weight), states, targets, torch.ones_like(targets))
    assert_allclose(readout.loss.numpy(), [[300, 500]])


def test_equal_logits_of_full_precision_are_one_prediction():
    """A head of zeros (some are initialised so) predicts the first class everywhere, not every class."""
    states, targets = torch.randn(3, 1, 40, 6), torch.arange(40)[None] % 10
    readout = read_layers(Fake(torch.zeros(10, 6)), states, targets, torch.ones_like(targets))
    same(readout, oracle(np.zeros((3, 40, 10)), targets[0].numpy()))
    assert readout.correct.float().mean() == 0.1


def states_of(name, dtype=torch.float32, **shape):
    model = tiny_models.build(name, dtype=dtype)
    batch = tiny_models.inputs(model, **shape)
    found = verify(anatomy_candidates(model), batch)
    with capture(found.anatomy, ["residual"]) as activations, torch.no_grad():
        found.anatomy.body(**body_inputs(found.anatomy, batch))
        return model, batch, found, activations.stack("residual")


@pytest.mark.parametrize("name", ["llama-classifier", "vit"])
@torch.no_grad()
def test_sequence_heads_read_each_sequence_once(name, generator):
    model, batch, found, states = states_of(name, batch=6)
    targets = torch.tensor([0, -100, 2, 1, 1, 0])
    mask = batch.get("attention_mask", torch.ones(states.shape[1:3], dtype=torch.long))
    readout = read_layers(found.classifier, states, targets, mask)
    where = targets != -100
    logits = torch.stack([found.classifier.sequences(layer, mask)[where] for layer in states]).double()
    assert_close(logits[-1].float(), model(**batch).logits[where], rtol=1e-4, atol=1e-4)
    same(readout, oracle(logits, targets[where].numpy()))


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "bert", "detr"])
@torch.no_grad()
def test_tiles_of_the_vocabulary_and_shown_positions_against_full_logits(name, generator, monkeypatch):
    """Tiles of 7 rows and a few classes; shown positions with and without a target; logits beyond the safe range.

    That the classifier gives the model's logits is tested with the heads.
    """
    model, _, found, states = states_of(name, torch.float64, batch=4, length=40)
    monkeypatch.setattr(predictions, "TILE_ROWS", 7)
    monkeypatch.setattr(predictions, "TILE_BYTES", 8 * 7 * 13)
    targets = torch.randint(3 if name == "detr" else 96, states.shape[1:3], generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.5] = -100
    shown = torch.rand(targets.shape, generator=generator) < 0.2
    for scale in (1.0, 500.0)[: 2 if name == "llama" else 1]:
        if scale != 1.0:
            model.lm_head.weight.mul_(scale)
        logits = found.classifier.tokens(states.flatten(0, 2)).view(len(states), targets.numel(), -1)
        readout = read_layers(found.classifier, states, targets, torch.ones_like(targets))
        where = (targets != -100).flatten()
        same(readout, oracle(logits[:, where], targets.flatten()[where].numpy()))
        for k in (1, 3):
            top, expected = top_tokens(found.classifier, states, shown, k), logits[:, shown.flatten()]
            assert torch.equal(top.token, expected.topk(k).indices)
            assert_close(top.probability, expected.softmax(-1).gather(-1, top.token))


@torch.no_grad()
def test_bfloat16_products_are_those_of_rounded_operands(generator, monkeypatch):
    """The oracle rounds norms, weights and logits to bfloat16 and computes everything else in float64."""
    model, batch, found, states = states_of("llama", batch=3, length=40)
    monkeypatch.setattr(predictions, "TILE_BYTES", 4 * 40 * 30)
    targets = torch.randint(96, states.shape[1:3], generator=generator)
    full = read_layers(found.classifier, states, targets, batch["attention_mask"])
    model.bfloat16()
    states = states.bfloat16()
    readout = read_layers(found.classifier, states, targets, batch["attention_mask"])
    logits = (model.model.norm(states).double() @ model.lm_head.weight.double().T).bfloat16().flatten(1, 2)
    expected = oracle(logits.double(), targets.flatten().numpy())
    assert_allclose(readout.loss.numpy(), expected.loss, atol=2e-2)
    assert (readout.agrees.numpy() == expected.agrees).mean() > 0.98
    assert 0 < (readout.loss - full.loss).abs().max() < 0.05
