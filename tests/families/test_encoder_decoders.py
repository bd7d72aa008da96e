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


RARE = [thorough(name) for name in ("UMT5", "LongT5", "SwitchTransformers", "PLBart", "Pegasus")]


def tiny(name):
    torch.manual_seed(0)
    model_type = {"LongT5": "longt5", "SwitchTransformers": "switch_transformers"}.get(name, name.lower())
    config = zoo.config_for(model_type)
    if getattr(config, "decoder_start_token_id", None) is None and name != "MBart":
        config.decoder_start_token_id = 3  # without it T5 makes no inputs from labels
    return getattr(tf, f"{name}ForConditionalGeneration")(config).eval()


@torch.no_grad()
def stock_losses(model, tokenizer):
    """Of every token of the targets, as the class computes them from labels."""
    losses = []
    for row in ROWS:
        given = torch.tensor([tokenizer(row["input"])["input_ids"]])
        target = torch.tensor([tokenizer(text_target=row["target"])["input_ids"]])
        output = model(input_ids=given, labels=target)
        each = F.cross_entropy(output.logits[0], target[0], reduction="none")
        assert float(output.loss) == pytest.approx(float(each.mean()), rel=1e-5)
        losses += each.tolist()
    return losses


def test_a_tokenizer_of_two_languages_encodes_targets_as_targets():
    """They begin with the code of their own language; without one a warning says how they are read."""
    words = ["a", "b", "c", "▁a", "▁b", "▁c"]
    vocabulary = {token: index for index, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "▁", *words])}
    merges = [("▁", "a"), ("▁", "b"), ("▁", "c")]
    tokenizer = tf.NllbTokenizer(vocab=vocabulary, merges=merges, src_lang="eng_Latn", tgt_lang="fra_Latn")
    rows = [{"input": "a b c", "target": "c b a"}, {"input": "b b", "target": "a c"}]
    torch.manual_seed(0)
    model = tf.M2M100ForConditionalGeneration(
        zoo.config_for("m2m_100", vocab_size=len(tokenizer), pad_token_id=1, decoder_start_token_id=2)
    ).eval()
    losses = []
    for row in rows:
        target = tokenizer(text_target=row["target"], return_tensors="pt").input_ids
        assert tokenizer.convert_ids_to_tokens(target[0])[0] == "fra_Latn"
        with torch.no_grad():
            logits = model(**tokenizer(row["input"], return_tensors="pt"), labels=target).logits[0]
        losses += F.cross_entropy(logits, target[0], reduction="none").tolist()
    options = {"tokenizer": tokenizer, "measures": ["lens_loss"]}
    results = fulldepth.measure(model, rows, **options)
    assert results.values("lens_loss", "mean", "decoder").iloc[-1] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    tokenizer.tgt_lang = None
    warned = fulldepth.measure(model, rows, **options).meta["warnings"]
    assert any("no target language (tgt_lang)" in warning for warning in warned)


@torch.no_grad()
@pytest.mark.parametrize("name", ["T5", "Bart", "MBart", *RARE])
def test_the_decoders_last_layer_is_the_stock_model(name):
    """T5's kin divide the states by the root of their width before tied embeddings."""
    model, tokenizer = tiny(name), word_tokenizer()
    results = fulldepth.measure(model, ROWS, tokenizer=tokenizer, measures=["lens_loss", "displacement"])
    losses = stock_losses(model, tokenizer)
    table = results.table
    assert set(table.site[table.measure == "lens_loss"]) == {"decoder"}
    assert {"encoder", "decoder"} <= set(table.site[table.measure == "displacement"])
    assert results.values("lens_loss", "mean", "decoder").iloc[-1] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_a_classifier_of_two_stacks_names_a_way_that_works():
    model = zoo.build("t5", "text-classification", num_labels=3)
    rows = [{"text": row["input"], "label": index} for index, row in enumerate(ROWS)]
    with refused("`fulldepth measure --set tower=encoder` reads that stack alone"):
        fulldepth.measure(model, rows, tokenizer=word_tokenizer())
    results = fulldepth.measure(model, rows, tokenizer=word_tokenizer(), tower="encoder", measures=["displacement"])
    assert results.meta["model"]["num_layers"] == 3
