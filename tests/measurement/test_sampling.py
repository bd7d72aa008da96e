"""What is sampled by default, its standard errors, and `exact`."""

from __future__ import annotations

import numpy as np
import pytest
from pandas.testing import assert_frame_equal
from transformers import LlamaConfig, LlamaForCausalLM

from fulldepth import measure
from fulldepth.core.console import finish
from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.settings.measure import MeasureSettings
from refusals import refused

OPTIONS = {"max_sequences": 24, "sequence_length": 16}


def test_defaults_sample_and_exact_samples_nothing(trained, text_file, capsys):
    settings = MeasureSettings()
    assert (settings.lens_tokens, settings.entropy_sequences, settings.reservoir_tokens) == ("auto", 16, 2048)
    default = measure(trained, text_file, **OPTIONS)
    sampling = default.meta["sampling"]
    assert sampling["lens_positions"] == sampling["lens_targets"] == 24 * 15, "small data are read in full"
    assert sampling["entropy_sequences"] == 16
    finish(default)
    assert sampling["sentence"] in capsys.readouterr().out
    exact = measure(trained, text_file, exact=True, **OPTIONS)
    assert exact.meta["sampling"]["entropy_sequences"] == 24
    assert exact.meta["sampling"]["sentence"] is None
    by_hand = measure(trained, text_file, entropy_sequences=24, lens_tokens=None, **OPTIONS)
    assert_frame_equal(exact.table, by_hand.table, check_exact=True)


def test_a_lens_of_a_large_vocabulary_on_little_text_costs_no_more_than_a_pass_and_a_quarter(tmp_path):
    """24 x 40 tokens of a model with two layers of 32 channels and 2,000 tokens in its vocabulary, counted by hand."""
    config = LlamaConfig(
        vocab_size=2000, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    tokenizer = train_tokenizer(builtin_texts("train")[:1], vocab_size=512)
    options = {"max_sequences": 24, "sequence_length": 40, "measures": ["lens_accuracy"], "tokenizer": tokenizer}
    found = measure(model, "corpus:builtin", **options)
    head = 2000 * 32
    one_pass = 24 * 40 * (2 * (4 * 32 * 32 + 3 * 32 * 48) + head)
    sampling = found.meta["sampling"]
    assert sampling["lens_positions"] == int(1.25 * one_pass / (3 * head)) < 24 * 39 == sampling["lens_targets"]
    assert found.table.query("measure == 'lens_accuracy'")["count"].unique() == [sampling["lens_positions"]]
    assert "because more would cost over 1.25 forward passes (lens_tokens sets the number)" in sampling["sentence"]
    given = measure(model, "corpus:builtin", lens_tokens=700, **options).meta["sampling"]
    assert given["lens_positions"] == 700
    assert "cost" not in given["sentence"]


@pytest.mark.parametrize("lens_tokens", ["auto", 3])
def test_the_lens_of_a_classifier_reads_every_sequence(checkpoint, tmp_path, lens_tokens):
    path = tmp_path / "rows.tsv"
    path.write_text("text\tlabel\n" + "".join(f"row {n}\t{n % 2}\n" for n in range(1100)), "utf-8")
    options = {"measures": ["lens_accuracy"], "max_sequences": 1200, "lens_tokens": lens_tokens}
    found = measure(checkpoint("bert-classifier"), path, **options)
    assert set(found.table.query("measure == 'lens_accuracy'")["count"]) == {1100}
    sampling = found.meta["sampling"]
    assert (sampling["lens_positions"], sampling["lens_targets"], sampling["sentence"]) == (1100, 1100, None)


def test_exact_contradicts_the_size_of_a_sample(trained, text_file):
    with refused("--set lens_tokens"):
        measure(trained, text_file, exact=True, lens_tokens=100)
    resolved = MeasureSettings(exact=True)
    assert MeasureSettings.model_validate(resolved.model_dump()) == resolved, "saved settings can be read again"


def test_copies_of_a_text_are_one_document(trained, corpus):
    """Of texts and of pairs; three other texts are three."""
    options = {"measures": ["displacement"]}
    pair = {"prompt": corpus[:30], "response": corpus[30:60]}
    for rows in ([corpus[:400]] * 10, [pair] * 10):
        found = measure(trained, rows, **options)
        assert found.meta["data"]["clusters"] == 1
        assert "error" not in " ".join(found.table.statistic)
        assert any("there is 1" in line or "the text is 1 document" in line for line in found.meta["warnings"])
    once = measure(trained, [corpus[:400], corpus[400:800], corpus[800:1200]], max_sequences=6, **options)
    assert once.meta["data"]["clusters"] == 3
    assert "standard_error" in set(once.table.statistic)


def test_the_standard_error_of_a_sampled_lens_is_its_scatter_over_samples(trained, documents_file):
    """Samples of other seeds scatter around the exact value by about the standard error that a single one states."""
    options = {"max_sequences": 32, "sequence_length": 32, "measures": ["lens_loss"]}
    options["order"] = "first"  # the same windows for every seed
    exact = measure(trained, documents_file, exact=True, **options).values("lens_loss", "mean")
    runs = [measure(trained, documents_file, lens_tokens=100, seed=seed, **options) for seed in range(8)]
    differences = np.array([run.values("lens_loss", "mean") - exact for run in runs])
    stated = np.array([run.values("lens_loss", "standard_error") for run in runs])
    scatter = np.sqrt((differences**2).mean(0)) / stated.mean(0)
    assert ((scatter > 0.4) & (scatter < 1.6)).all()
    assert runs[0].meta["sampling"]["lens_positions"] == 100
