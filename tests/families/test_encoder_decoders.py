"""Encoder-decoders against stock transformers: the decoder's lens, and classifiers of two stacks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as tf

import fulldepth
from families import zoo
from families.stock import word_tokenizer
from marks import thorough
from refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = [
    {"input": "w1 w2 w3 w4 w5", "target": "w9 w8 w7"},
    {"input": "w11 w3", "target": "w5 w1 w22 w30 w2"},
    {"input": "w6 w6 w7 w40", "target": "w3"},
]


RARE = [thorough(name) for name in ("UMT5", "LongT5", "SwitchTransformers")]


def tiny(name):
    torch.manual_seed(0)
    model_type = {"LongT5": "longt5", "SwitchTransformers": "switch_transformers"}.get(name, name.lower())
    return getattr(tf, f"{name}ForConditionalGeneration")(zoo.config_for(model_type)).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", ["T5", "Bart", *RARE])
def test_the_decoders_last_layer_is_the_stock_model(name):
    """T5's kin divide the states by the root of their width before tied embeddings."""
    model, tokenizer = tiny(name), word_tokenizer()
    results = fulldepth.measure(model, ROWS, tokenizer=tokenizer, measures=["lens_loss", "displacement"])
    starts = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    start = next(token for key in starts if (token := getattr(model.config, key, None)) is not None)
    losses = []
    for row in ROWS:
        given, target = (torch.tensor([tokenizer(row[key])["input_ids"]]) for key in ("input", "target"))
        shifted = torch.cat([torch.tensor([[start]]), target[:, :-1]], dim=1)
        logits = model(input_ids=given, decoder_input_ids=shifted).logits[0]
        losses += F.cross_entropy(logits, target[0], reduction="none").tolist()
    table = results.table
    assert set(table.site[table.measure == "lens_loss"]) == {"decoder"}
    assert {"encoder", "decoder"} <= set(table.site[table.measure == "displacement"])
    assert results.values("lens_loss", "mean", "decoder").iloc[-1] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_a_classifier_of_two_stacks_names_a_way_that_works():
    model = zoo.build("t5", "text-classification", num_labels=3)
    rows = [{"text": row["input"], "label": index} for index, row in enumerate(ROWS)]
    with refused("Choose the tower encoder to read that stack alone"):
        fulldepth.measure(model, rows, tokenizer=word_tokenizer())
    results = fulldepth.measure(model, rows, tokenizer=word_tokenizer(), tower="encoder", measures=["displacement"])
    assert results.meta["model"]["num_layers"] == 3
