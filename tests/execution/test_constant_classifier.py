"""A constant classifier on data of which 90 % are its class: commands report about 0.9, not balanced accuracy.

Rows held out for training: `data.test_labelled`.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binomtest
from transformers import BertConfig, BertForSequenceClassification

import fulldepth
from fulldepth.data import train_wordpiece
from fulldepth.exit import sweep

ROWS = [{"text": f"film {i} number {i * 7 % 1000}", "label": int(i % 10 == 0)} for i in range(3000)]
SAMPLE = 512


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece([row["text"] for row in ROWS[:200]], 300)


@pytest.fixture(scope="module")
def constant(tokenizer):
    """Predicts class 0."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=2, pad_token_id=0, **sizes))
    model.classifier.weight.data.zero_()
    model.classifier.bias.data.copy_(torch.tensor([1.0, 0.0]))
    return model


def is_about_nine_tenths(accuracy):
    return bool(binomtest(round(accuracy * SAMPLE), SAMPLE, 0.9).pvalue > 1e-3)


def accuracy_of(table, measure):
    return float(table.query("measure == @measure and statistic == 'mean'").value.iloc[-1])


def test_measure_and_exit(constant, tokenizer):
    """It was 0.766 by measure and 0.525 by exit."""
    measured = fulldepth.measure(
        constant, ROWS, tokenizer=tokenizer, max_sequences=SAMPLE, measures=["lens_accuracy"], lens_tokens=None
    )
    assert is_about_nine_tenths(accuracy_of(measured.table, "lens_accuracy"))
    swept = sweep(constant, ROWS, tokenizer=tokenizer, max_sequences=SAMPLE, repeats=0)
    assert is_about_nine_tenths(max(row["accuracy"] for row in swept.meta["exits"]))
