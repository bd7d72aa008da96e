"""`fulldepth.lens`: the table of predictions of every layer, against stock transformers with fewer layers."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose

import tiny_models
from fulldepth.core.progress import Watcher
from fulldepth.exit import generate_texts
from fulldepth.measurement import lens, measure
from fulldepth.results import PAGE, Results
from measurement import oracle
from refusals import refused
from skip.test_responses import roberta
from skip.word_tokenizer import tokenizer as word_tokenizer
from skip.word_tokenizer import words

TEXT = "the cat sat on the mat and slept"
K = 4


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_table_is_what_stopping_at_each_layer_predicts(family, checkpoint, tokenizer, tmp_path):
    folder = checkpoint(family, 0)
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    results = lens(folder, TEXT, top_k=K, dtype="float64", tokenizer=tokenizer)
    table = results.lens()
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    blocks = "model.layers" if family == "llama" else "transformer.h"
    (logits,) = map(torch.tensor, oracle.exits(model, blocks, {"input_ids": ids}))
    (sample,), best = results.meta["lens_grid"]["samples"], logits[:, 0].argmax(-1)  # [L+1, T]
    assert sample["targets"] == [*sample["tokens"][1:], ""]
    depth = len(best) - 1
    settled = [next(n for n in range(1, depth + 1) if len(set(column[n:])) == 1) for column in best.T.tolist()]
    assert sample["saturation"] == settled
    assert len(table) == len(logits) * ids.shape[1] * K
    for layer, of_layer in enumerate(logits):
        chances, tokens = of_layer[0].softmax(-1).topk(K)
        shown = table[table["layer"] == layer].sort_values(["position", "rank"])
        assert shown["rank"].tolist() == [*range(1, K + 1)] * ids.shape[1]
        assert shown["token"].tolist() == [tokenizer.decode([i]) for i in ids[0].tolist() for _ in range(K)]
        assert shown["top_token"].tolist() == [tokenizer.decode([i]) for i in tokens.flatten().tolist()]
        assert_allclose(shown["probability"], chances.flatten(), atol=5.1e-5)
    single = lens(folder, TEXT, top_k=1, dtype="float64", tokenizer=tokenizer).lens()
    first = table[table["rank"] == 1].reset_index(drop=True)
    assert single.drop(columns="probability").equals(first.drop(columns="probability"))
    assert_allclose(single["probability"], first["probability"], atol=1.1e-4)
    assert Results.load(results.save(tmp_path / "saved", page=False)).lens().equals(table)


def test_a_long_text_is_shown_whole_or_said_to_be_cut(trained, tokenizer):
    said = []

    def shown(repeats, **options):
        table = lens(trained, " ".join([TEXT] * repeats), watcher=Watcher(say=said.append), **options).lens()
        return table["position"].max()

    assert shown(4) == len(tokenizer(" ".join([TEXT] * 4))["input_ids"]) > 48
    assert not any("cut" in line for line in said)
    assert shown(4, sequence_length=40) == 40
    assert any("40 tokens and cut" in line for line in said)


def test_more_texts_than_a_measurement_reads_are_all_shown(trained):
    """A measurement reads 256 sequences unless it is told otherwise."""
    words = [f"{number} cats sat" for number in range(300)]
    samples = lens(trained, words, top_k=1).meta["lens_grid"]["samples"]
    assert len(samples) == 300
    with refused("The lens shows at most 1,000 texts, got 1,001."):
        lens(trained, ["the mat"] * 1001)


def test_a_text_of_more_tokens_than_the_grid_holds_is_said_to_be_cut(tokenizer):
    said = []
    config = tf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8192,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).eval()
    text = TEXT * 500
    assert len(tokenizer(text)["input_ids"]) > 4200
    options = {"sequence_length": 5000, "top_k": 1, "watcher": Watcher(say=said.append)}
    assert lens(model, text, tokenizer=tokenizer, **options).lens()["position"].max() == 4096
    assert any("4096 tokens and cut" in line for line in said)


def test_one_token_is_shown_and_needs_no_target(trained, tokenizer, main, tmp_path):
    """Oracle: the first column of a longer text, which causal attention does not change."""
    said, token = [], tokenizer.decode(tokenizer(TEXT)["input_ids"][:1])
    assert len(tokenizer(token)["input_ids"]) == 1
    one = lens(trained, token, watcher=Watcher(say=said.append), output=tmp_path / "out").lens()
    longer = lens(trained, TEXT).lens()
    first = longer[longer["position"] == 1].reset_index(drop=True)
    assert one.drop(columns="probability").equals(first.drop(columns="probability"))
    assert_allclose(one["probability"], first["probability"], atol=1.1e-4)
    assert not any("not a number" in line for line in said)
    assert (tmp_path / "out" / PAGE).is_file()
    assert main("lens", trained, token)[0] == 0
    with refused("lens_accuracy was asked for but cannot be measured: no position has a target"):
        measure(trained, [token], measures=["lens_accuracy"])


def test_every_text_is_shown_whatever_shares_a_batch(trained, tokenizer):
    """Each text is shown as if it were alone, also where the model's sequences may not share a batch."""
    model = tf.AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float64).eval()
    texts = ["the mat", TEXT, "a dog"]
    block = model.model.layers[1]
    plain = block.forward
    for mixing in (0.0, 0.5):
        block.forward = lambda x, *args, mixing=mixing, **more: plain(x - mixing * x.mean(0), *args, **more)
        alone = [lens(model, text, tokenizer=tokenizer).meta["lens_grid"]["samples"][0] for text in texts]
        shown = lens(model, texts, tokenizer=tokenizer).meta["lens_grid"]["samples"]
        assert shown == [{**entry, "title": f"Sequence {place}"} for place, entry in enumerate(alone, start=1)]


def test_the_shown_sequences_do_not_depend_on_the_batch_size(trained):
    texts = [f"{word} {TEXT}" for word in ("a", "the", "one", "two")]
    sizes = ({"batch_size": size, "grid_samples": 3, "one_per_row": True} for size in (1, 2, 4))
    common = {"measures": ["lens_accuracy"], "dtype": "float64"}
    grids = [measure(trained, texts, **common, **one).meta["lens_grid"] for one in sizes]
    assert [sample["title"] for sample in grids[0]["samples"]] == ["Sequence 1", "Sequence 2", "Sequence 3"]
    assert grids[0] == grids[1] == grids[2]


def test_command(trained, monkeypatch, main, tmp_path):
    code, shown, _ = main("lens", trained, TEXT, "--top-k", 2, "--json")
    rows = json.loads(shown)
    assert (code, rows) == (0, lens(trained, TEXT, top_k=2).lens().to_dict("records"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT))
    code, shown, _ = main("lens", trained, "-", "--output", tmp_path / "out")
    assert code == 0
    grid = shown.splitlines()
    tops = [row["top_token"].strip() for row in rows if row["layer"] == 3 and row["rank"] == 1]
    assert grid[1].split()[0] == "3"  # the last layer is on top
    assert [word.strip("·") for word in grid[1].split()[1:3]] == [top[:11] for top in tops[:2]]
    assert (tmp_path / "out" / PAGE).is_file()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generated_steps_are_those_of_greedy_decoding(family, checkpoint, tokenizer):
    """Oracle: the most probable token, one by one, and what the model predicts when cut off after each layer."""
    folder = checkpoint(family, 0)
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    texts, steps = [TEXT, "a dog"], 6
    results = lens(folder, texts, generate=steps, top_k=2, dtype="float64", tokenizer=tokenizer)
    blocks = "model.layers" if family == "llama" else "transformer.h"
    for text, sample in zip(texts, results.meta["lens_grid"]["samples"], strict=True):
        ids = tokenizer(text)["input_ids"]
        start = len(ids)
        for _ in range(steps):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        words = [tokenizer.decode([token]) for token in ids]
        assert sample["tokens"] == words[start - 1 : -1]
        assert sample["targets"] == words[start:]
        assert [cell[0] for cell in sample["grid"][-1]] == sample["targets"]
        (logits,) = oracle.exits(model, blocks, {"input_ids": torch.tensor([ids])})
        chances = torch.from_numpy(logits[:, 0, start - 1 : -1]).softmax(-1)  # [L+1, steps, V]
        for layer, row in enumerate(chances):
            values, tokens = row.topk(2)
            cells = zip(sample["grid"][layer], (more[0] for more in sample["more"][layer]), strict=True)
            for cell, token, value in zip(cells, tokens.tolist(), values.tolist(), strict=True):
                assert [word for word, _ in cell] == [tokenizer.decode([index]) for index in token]
                assert [p for _, p in cell] == pytest.approx(value, abs=5.1e-5)
    table = results.table.query("measure == 'lens_accuracy' and statistic == 'mean'")
    assert set(table["count"]) == {steps * len(texts)}
    assert table.value.iloc[-1] == 1.0


def test_generation_from_the_command_line(trained, main, tmp_path):
    code, shown, _ = main("lens", trained, TEXT, "--generate", 5, "--output", tmp_path / "out", "--json")
    rows = json.loads(shown)
    assert (code, {row["position"] for row in rows}) == (0, {1, 2, 3, 4, 5})
    assert len(Results.load(tmp_path / "out").lens()) == len(rows)
    assert (tmp_path / "out" / PAGE).is_file()
    with refused("at most --generate"):
        lens(trained, TEXT, generate=4000)
    with refused("Give a shorter prompt."):
        lens(trained, TEXT * 200, generate=3)
    with refused("20 tokens and 14 new ones exceed the 33 positions of the model. .* at most --generate 13"):
        lens(roberta(), words(*range(1, 21)), generate=14, tokenizer=word_tokenizer())
    with refused("Text 2 is blank"):
        lens(trained, [TEXT, " "])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "is empty .null.. Expected a text"),
        (5, "is of type int. Expected a text"),
        (["a", 5], "2 is of type int"),
    ],
)
def test_something_else_than_texts_is_refused(given, reason):
    with refused(f"Text {reason}"):
        lens("nowhere", given)
    with refused(f"Prompt {reason}"):
        generate_texts("nowhere", given)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bert-classifier", "predicts one class for a whole text. `fulldepth measure` and `fulldepth exit` read clas"),
        ("vit", "predicts one class for a whole image. .* on images in class folders"),
        ("bert-bare", "BertModel has no language-model or classification head known here. `fulldepth measure` reads"),
        ("clip", "CLIPModel has no language-model or classification head known here. `fulldepth measure` reads"),
        ("detr", "DetrForObjectDetection detects objects. `fulldepth measure` reads detectors, on images with"),
    ],
)
@pytest.mark.parametrize("linear", [False, True])
def test_a_model_that_predicts_no_tokens_is_refused_with_a_command_that_reads_it(name, says, linear):
    with refused(f"The lens shows the predictions at every token: .*{says}"):
        lens(tiny_models.build(name), TEXT, linear=linear, tokenizer=word_tokenizer())
