"""Early exit with layers read for few candidate tokens, against a loop over stock hidden states in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf

import tiny_models as tm
from execution import decoders
from fulldepth.errors import FulldepthError
from fulldepth.execution.decoding import Decoder

NEW, DEPTH = 16, 8


def deep(kind: str) -> tf.PreTrainedModel:
    """A float64 decoder of 8 layers whose predictions are sharp and change from layer to layer."""
    torch.manual_seed(1)
    sizes = tm.DECODER | {"num_hidden_layers": DEPTH}
    if kind == "gemma2":
        model = tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes, final_logit_softcapping=20.0)).eval()
    else:
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)).to(torch.float64).eval()
    with torch.no_grad():
        for part, parameter in model.model.layers.named_parameters():
            parameter.mul_(8.0 if "proj" in part else 1.0)
        model.get_output_embeddings().weight.mul_(40.0)
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def readings(model, ids):
    """[T, L, V] logits at layers 1..L, from stock hidden states."""
    states = model(ids[None], output_hidden_states=True).hidden_states
    cap = getattr(model.config, "final_logit_softcapping", None)
    made = []
    for layer in range(1, DEPTH + 1):
        state = states[layer] if layer == DEPTH else model.model.norm(states[layer])
        logits = model.get_output_embeddings()(state)[0]
        made.append(logits if cap is None else torch.tanh(logits / cap) * cap)
    return torch.stack(made, 1).double().numpy()


def value(logits, rule):
    p = np.exp(logits - logits.max())
    p = np.sort(p / p.sum())
    return p[-1] if rule == "confidence" else p[-1] - p[-2]


def leave(logits, rule, threshold, count, first):
    """The exit layer of `logits: [L, V]`, and the number of layers read whole."""
    candidates, whole = None, 0
    for layer in range(first, DEPTH):
        own = logits[layer - 1]
        if candidates is not None and value(own[candidates], rule) <= threshold:
            continue
        whole += 1
        if value(own, rule) > threshold:
            return layer, whole
        candidates = np.argsort(-own)[:count]
    return DEPTH, whole + 1


@pytest.mark.parametrize(("kind", "rule"), [("llama", "confidence"), ("llama", "margin"), ("gemma2", "confidence")])
def test_every_exit_is_one_of_the_whole_vocabulary_and_none_is_earlier(kind, rule):
    """Batch of three lengths: exit layers, tokens and the number of whole readings equal those of the plain loop."""
    model, prompts, count, first = deep(kind), decoders.prompts(3), 4, 2
    logits = readings(model, prompts["input_ids"][0])
    threshold = float(np.quantile([value(row, rule) for row in logits[:, 3]], 0.8))
    decoder, later, total = Decoder(model), 0, 0
    options = {"threshold": threshold, "rule": rule, "min_layer": first, "lens_candidates": count}
    found = decoder.generate(**prompts, max_new_tokens=NEW, **options)
    for row, mask in enumerate(prompts["attention_mask"]):
        start = int((1 - mask).sum())
        logits = readings(model, found.sequences[row, start:])[8 - start : 8 - start + NEW]
        expected = [leave(each, rule, threshold, count, first) for each in logits]
        exact = [leave(each, rule, threshold, tm.VOCAB, first)[0] for each in logits]
        layers = [layer for layer, _ in expected]
        total += sum(whole for _, whole in expected)
        assert found.stats.exit_layers[row] == layers
        tokens = [int(each[layer - 1].argmax()) for each, layer in zip(logits, layers, strict=True)]
        assert found.sequences[row, 9:].tolist() == tokens
        assert all(layer >= own for layer, own in zip(layers, exact, strict=True))
        later += sum(layer > own for layer, own in zip(layers, exact, strict=True))
    assert found.stats.lens_positions == total
    assert later or kind == "gemma2"  # a hidden exit: the loop tells the two apart


@pytest.mark.parametrize("policy", ["recompute", "propagate"])
def test_all_tokens_as_candidates_change_nothing(policy):
    model, prompts = deep("llama"), decoders.prompts(3)
    options = {"max_new_tokens": NEW, "threshold": 0.3, "policy": policy}
    exact = Decoder(model).generate(**prompts, **options)
    found = Decoder(model).generate(**prompts, **options, lens_candidates=10 * tm.VOCAB)
    assert torch.equal(found.sequences, exact.sequences)
    assert found.stats.exit_layers == exact.stats.exit_layers
    assert sum(count > 0 for count in exact.stats.exits) > 1
    assert found.stats.lens_positions < exact.stats.lens_positions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.5, "lens_candidates": 1}, "2 tokens or more"),
        ({"threshold": 0.5, "lens_candidates": 8, "rule": "patience"}, "confidence or margin"),
        ({"lens_candidates": 8}, "threshold"),
        ({"threshold": 0.5, "speculate_from": 1, "lens_candidates": 8}, "threshold"),
    ],
)
def test_candidates_where_they_mean_nothing_are_refused(options, message):
    with pytest.raises(FulldepthError, match=message):
        Decoder(deep("llama")).generate(**decoders.prompts(1), max_new_tokens=2, **options)
