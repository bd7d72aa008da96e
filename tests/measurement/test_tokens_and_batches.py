"""What must change no number (batching, padding, the seed of what is not sampled), and which tokens count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose
from pandas.testing import assert_frame_equal

from fulldepth.data import open_source
from fulldepth.hf import load_processor
from fulldepth.measurement import measure
from measurement import oracle
from metrics.oracle import cosines, nc1, steps
from refusals import refused

KEYS = ["measure", "site", "layer", "other", "statistic"]


def assert_same(left, right, *, rtol=1e-9, atol=1e-9, but=()):
    """Two tables hold the same rows with the same numbers, apart from the measures in `but`."""
    tables = [table[~table.measure.isin(but)].set_index(KEYS)[["value", "count", "unit"]] for table in (left, right)]
    assert_frame_equal(*tables, check_like=True, rtol=rtol, atol=atol)


@pytest.mark.parametrize("family", ["llama", "bert-classifier"])
def test_padding_and_batch_size_change_nothing(checkpoint, ragged_tsv, family):
    """Alone, no text is padded; in batches of five, most are."""
    options = {"sequence_length": 48, "words": ["the", "I"]}
    for dtype, near in (("float64", 1e-9), ("float32", 1e-4)):  # which differs with the batch in the seventh digit
        alone, batched = (
            measure(checkpoint(family), ragged_tsv, batch_size=size, dtype=dtype, **options).table for size in (1, 5)
        )
        assert_same(alone, batched, rtol=near, atol=near / 10)


def test_padding_on_the_left_changes_nothing_either(checkpoint, ragged_tsv, tokenizer):
    left = tf.AutoTokenizer.from_pretrained(checkpoint("llama"), padding_side="left")
    model = tf.LlamaForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float64)
    assert_same(*(measure(model, str(ragged_tsv), tokenizer=t, batch_size=5).table for t in (tokenizer, left)))


@pytest.mark.parametrize("policy", ["all", "no-first", "last", "cls", "mean"])
def test_policies_choose_tokens(checkpoint, ragged_tsv, ragged_texts, tokenizer, policy):
    """Against states of every text alone, cut by hand."""
    results = measure(
        checkpoint("llama"), ragged_tsv, token_policy=policy, batch_size=5, sequence_length=64, dtype="float64"
    )
    model = tf.LlamaForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float64).eval()
    cuts = {"no-first": slice(1, None), "last": slice(-1, None), "cls": slice(0, 1)}
    states = []
    for text, _ in ragged_texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        own = oracle.taps(model, "model.layers", {"input_ids": ids})[0][:, 0, cuts.get(policy, slice(None))]
        states.append(own.mean(1, keepdims=True) if policy == "mean" else own)
    kept = np.concatenate(states, axis=1)
    rows = results.table.query("measure == 'displacement' and site == 'residual'")
    assert set(rows["count"][~rows.statistic.str.contains("no-first")]) == {kept.shape[1]}
    assert_allclose(results.values("displacement", "mean", "residual"), steps(kept).mean(1), rtol=1e-9)
    similar = cosines(kept[0], kept[2]).mean()
    assert results.values("cosine", "mean_raw", other=2)[0] == pytest.approx(similar, rel=1e-9)
    assert bool(results.table.statistic.str.endswith(":no-first").any()) is (policy == "all")
    assert results.meta["token_policy"]["name"] == policy
    assert results.meta["sampling"]["counted_tokens"] == kept.shape[1]


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "policy", "chosen"),
    [
        ("vit", "patches", "patches"),
        ("vit", "mean", "mean"),
        ("vit", "mean-patches", "mean-patches"),
        ("clip-classifier", "auto", "mean-patches"),
    ],
)
def test_policies_for_images(checkpoint, picture_folder, family, policy, chosen):
    """Against the hidden states that transformers returns, for a class token and 16 patches."""
    folder = checkpoint(family)
    names = ["displacement", "cosine", "nc1", "lens_accuracy"]
    results = measure(folder, picture_folder, token_policy=policy, measures=names, batch_size=5, dtype="float64")
    assert results.meta["token_policy"]["name"] == chosen
    source = open_source(picture_folder)
    config = tf.AutoConfig.from_pretrained(folder)
    processor = load_processor(str(folder), getattr(config, "vision_config", config))
    model = tf.AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float64).eval()
    pixels = processor(images=[record.image() for record in source.records], return_tensors="pt")["pixel_values"]
    output = model(pixel_values=pixels.double(), output_hidden_states=True)
    states = np.stack([h.numpy() for h in output.hidden_states])  # [L+1, B, 17, D]
    cut = {"cls": states[:, :, :1], "mean": states.mean(2, keepdims=True), "patches": states[:, :, 1:]}
    kept = cut.get(chosen, states[:, :, 1:].mean(2, keepdims=True))
    labels = np.repeat([record.label for record in source.records], kept.shape[2])
    flat = kept.reshape(len(kept), -1, kept.shape[-1])
    assert_allclose(results.values("displacement", "mean", "residual"), steps(flat).mean(1), rtol=1e-7)
    expected = [nc1(h, labels) for h in flat]
    assert_allclose(results.values("nc1", "value"), expected, rtol=1e-3)
    right = (output.logits.argmax(-1).numpy() == [record.label for record in source.records]).mean()
    assert results.values("lens_accuracy", "mean").iloc[-1] == pytest.approx(right)


def test_end_of_sequence_policy(checkpoint, tokenizer, corpus):
    texts = [{"text": corpus[n * 30 : n * 30 + 10 + n], "label": n % 2} for n in range(6)]
    ended = [{**entry, "text": entry["text"] + tokenizer.eos_token} for entry in texts]
    options = {"sequence_length": 64, "measures": ["displacement"], "dtype": "float64"}
    assert_same(*(measure(checkpoint("llama"), ended, token_policy=p, **options).table for p in ("eos", "last")))
    with refused(r"end-of-sequence token"):
        measure(checkpoint("llama"), texts, token_policy="eos", **options)


def test_the_seed_changes_only_what_is_sampled(trained, text_file):
    options = {"max_sequences": 12, "sequence_length": 16, "order": "first", "reservoir_tokens": 40}
    first, other, again = (measure(trained, text_file, seed=seed, **options).table for seed in (0, 1, 1))
    assert_same(first, other, but={"cosine"})
    assert not np.allclose(*(table.query("measure == 'cosine'")["value"] for table in (first, other)))
    assert_same(other, again, rtol=0, atol=0)


def test_a_capped_sample_does_not_depend_on_the_batches(trained, text_file):
    options = {"max_sequences": 12, "sequence_length": 16, "reservoir_tokens": 50, "lens_tokens": 30}
    options |= {"entropy_sequences": 5, "dtype": "float64"}
    results = [measure(trained, text_file, batch_size=size, **options) for size in (1, 5)]
    assert_same(*(each.table for each in results))
    sampling = results[0].meta["sampling"]
    sizes = [sampling[name] for name in ("reservoir_tokens", "counted_tokens", "lens_positions", "lens_targets")]
    assert sizes == [50, 192, 30, 180]
    counts = results[0].table.groupby(["measure", "statistic"])["count"].max()
    assert counts["cosine", "mean"] == 50
    assert counts["cka", "biased"] == counts["cka", "debiased"] == counts["cosine", "mean_raw"] == 192
    assert counts["lens_loss", "mean"] == counts["lens_accuracy", "mean"] == 30
    assert counts["renyi_entropy", "mean:plain:1"] == 5
