"""Model types that read texts of some lengths in another way: against stock models that read each text alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fulldepth
import tiny_models as tm
from families import zoo
from families.stock import word_tokenizer
from fulldepth.core.progress import Watcher
from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.execution.heldout import heldout_losses
from fulldepth.skip import search
from refusals import refused

SPARSE = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
LONGEST = 28
"""Tokens that BigBird with these blocks reads with full attention."""


def texts(length, count=4):
    """Texts of so many tokens, with the two that the tokenizer puts around them."""
    ids = tm.token_ids(count, length - 2, seed=length, most=85)
    return [" ".join(f"w{token}" for token in row) for row in ids.tolist()]


@torch.no_grad()
def test_what_bigbird_reads_depends_on_its_past_only_in_texts_that_are_refused(tmp_path):
    zoo.build("big_bird", "masked-lm", **SPARSE).save_pretrained(tmp_path)
    tokenizer = word_tokenizer()
    options = {"tokenizer": tokenizer, "one_per_row": True, "token_policy": "all", "measures": ["displacement"]}
    results = fulldepth.measure(tmp_path, texts(LONGEST), sequence_length=LONGEST, **options)
    sums = []
    for text in texts(LONGEST):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        model = zoo.tf.AutoModelForMaskedLM.from_pretrained(tmp_path)  # which has read nothing
        states = [state.double() for state in model(input_ids=ids, output_hidden_states=True).hidden_states]
        cosines = F.cosine_similarity(torch.stack(states[:-1]), torch.stack(states[1:]), dim=-1)
        sums.append(((1 - cosines) / 2).mean((1, 2)))
    expected = torch.stack(sums).mean(0).tolist()
    assert results.values("displacement", "mean", "residual").tolist() == pytest.approx(expected, rel=1e-5)
    with refused(f"longer than the model's {LONGEST} positions"):
        fulldepth.measure(tmp_path, texts(64), tokenizer=tokenizer, sequence_length=LONGEST + 4)


def test_a_longformer_s_padding_to_whole_windows_is_refused_with_the_reason(tmp_path):
    zoo.build("longformer", "masked-lm").save_pretrained(tmp_path)
    with refused("pads or rearranges sequences of some lengths"):
        fulldepth.measure(tmp_path, [*texts(16), *texts(11)], tokenizer=word_tokenizer(), one_per_row=True)


@torch.no_grad()
def test_a_search_does_not_rotate_a_short_text_as_a_long_one_of_its_batch():
    """LongRoPE: of more than ten tokens all keys of a batch are rotated by the second list of factors."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = zoo.build("phi3", "causal-lm", rope_parameters=rope, original_max_position_embeddings=10)
    ids = [tm.token_ids(1, length, seed=length) for length in (12, 9, 10, 16, 5, 11)]
    rows = [Example.of(row[0].tolist(), 1, row.shape[1], document=number) for number, row in enumerate(ids)]
    logits = [model(input_ids=row, use_cache=False).logits.double() for row in ids]
    sums = [F.cross_entropy(out[0, :-1], row[0, 1:], reduction="sum") for out, row in zip(logits, ids, strict=True)]
    expected = float(sum(sums)) / sum(row.shape[1] - 1 for row in ids)
    data = Examples([], rows, {"hash": "sha256:" + "1" * 64, "name": "texts", "kind": "text"})
    plan = search(model, data, search="given", given=[2], granularity="layer", fit=False, batch_size=6, progress=False)
    assert plan.losses[0] == pytest.approx(expected, abs=1e-5)
    held = heldout_losses({"model": model}, rows, 6, Watcher())["loss"]
    assert held.mean("model") == pytest.approx(expected, abs=1e-5)
