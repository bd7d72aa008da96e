"""No number depends on the batch: models that mix padding into their tokens, and models that draw random numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fulldepth
from families import zoo
from fulldepth.data.batches import Batch, Sequences
from fulldepth.execution.batching import batched
from refusals import refused
from tiny_models import seeded


def texts(lengths, seed=0):
    """Random token sequences of these lengths, right padded."""
    generator = seeded(seed)
    rows = [torch.randint(3, zoo.VOCAB, (length,), generator=generator) for length in lengths]

    def collate(indices):
        chosen = [rows[index] for index in indices]
        ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in chosen], batch_first=True)
        order = torch.tensor(list(indices))
        return Batch({"input_ids": ids, "attention_mask": mask}, mask.bool(), order, token_ids=ids)

    return Sequences("random", "text", "representation", "sha256:0", rows, collate, lengths, 0)


def measured(model, batch_size):
    data = texts([9, 16, 9, 12, 16, 7])
    results = fulldepth.measure(model, data, measures=["displacement"], batch_size=batch_size)
    return results.table.query("statistic == 'mean'").value.tolist(), results.meta["warnings"]


@pytest.mark.parametrize("model_type", ["fnet", "convbert", "bert"])
def test_displacement_is_that_of_each_sequence_alone(model_type):
    model = zoo.build(model_type, "representation")
    together, warnings = measured(model, 6)
    alone, _ = measured(model, 1)
    assert together == pytest.approx(alone, rel=1e-5)
    mixes = model_type != "bert"
    assert any("change when a sequence is padded" in line for line in warnings) is mixes


@pytest.mark.parametrize("batching", ["padded", "equal", "single"])
def test_what_an_earlier_model_needs_stays(batching):
    """Of two models that are measured on the same data, the first mixes padding or sequences, and this one does not."""
    anatomy = fulldepth.execution.find_anatomy(zoo.build("bert", "representation"))
    data = replace(texts([9, 16, 9]), batching=batching)
    found, sentence = batched(anatomy, data, torch.device("cpu"))
    assert (found.batching, sentence) == (batching, None)


def test_a_model_whose_sequences_see_each_other_runs_them_alone():
    model = zoo.build("llama", "causal-lm")
    block = model.model.layers[1]
    plain = block.forward
    block.forward = lambda states, *args, **kwargs: plain(states - states.mean(0, keepdim=True), *args, **kwargs)
    anatomy = fulldepth.execution.find_anatomy(model)
    sequences, sentence = batched(anatomy, texts([8, 8, 8]), torch.device("cpu"))
    assert sequences.batching == "single"
    assert sentence is not None


def test_a_model_that_draws_random_numbers_is_refused():
    """ViT-MAE masks patches at random, in evaluation mode too."""
    model = zoo.build("vit_mae", "representation")
    pixels = torch.randn(2, 3, 32, 32)

    def collate(indices):
        return Batch({"pixel_values": pixels[list(indices)]}, None, torch.tensor(list(indices)))

    data = Sequences("noise", "images", "representation", "sha256:0", [0, 1], collate, [0, 0], 0)
    with refused("draws random numbers"):
        fulldepth.measure(model, data, measures=["displacement"])
