"""Quality of generated text against the formulas of the paper, written again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from data.conftest import jsonl
from evaluation import small_world
from evaluation.small_world import LAYERS
from fulldepth.evaluation import evaluate
from fulldepth.evaluation.quality import diversity, mean_of
from refusals import refused

PREFIX, NEW, PROMPTS = 8, 12, 6


@pytest.fixture
def text(tmp_path):
    """As many documents as prompts, each longer than one window and shorter than two."""
    return documents(tmp_path / "text.jsonl", range(PROMPTS))


def documents(path, numbers):
    things = ("sun", "sea", "elm", "fox", "owl", "bee", "cow", "ant", "elk", "yak")
    texts = [f"{number:02} The {things[number % 10]} saw a river, a stone."[: PREFIX + NEW + 9] for number in numbers]
    return str(jsonl(path, *({"text": text} for text in texts)))


def test_diversity_is_the_product_of_the_shares_of_distinct_ngrams():
    assert diversity("a b a b a b") == pytest.approx(2 / 5 * 2 / 4 * 2 / 3)
    assert diversity("a b c d e") == 1
    assert diversity("a a a a") == pytest.approx(1 / 3 * 1 / 2)
    assert diversity("a b c") is None


def test_texts_of_one_document_are_one_observation():
    values, of = [0.1, 0.2, 0.9, 0.8, 0.4, 0.6, 0.5], [1, 1, 2, 2, 3, 4, 4]
    mean = sum(values) / 7
    shares = [sum(value - mean for value, one in zip(values, of, strict=True) if one == n) / 7 for n in (1, 2, 3, 4)]
    error = math.sqrt(4 / 3 * sum(share**2 for share in shares))
    for given, clusters, expected in (
        (values, of, (mean, error, 7)),
        ([1.0, None, 2.0, 3.0], [1, 2, 3, 4], (2.0, 1 / math.sqrt(3), 3)),
        ([1.0, 2.0], [1, 2], (1.5, None, 2)),
        ([1.0, 2.0, 3.0], [], (2.0, None, 3)),
    ):
        found = mean_of(given, clusters)
        assert (found.value, found.error, found.samples) == pytest.approx(expected)
    assert mean_of([None], [1]) is None


def values(results):
    rows = results.table[results.table.measure == "generation_quality"]
    return {(row.site, row.layer, row.statistic): row.value for row in rows.itertuples()}


@torch.no_grad()
def nats(model, ids, start):
    """Losses of the tokens from `start` on, and whether each is the most likely one, in float64."""
    predicted = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)[start - 1 : -1]
    targets = torch.tensor(ids[start:])
    losses = -predicted[torch.arange(len(targets)), targets]
    return losses.tolist(), (predicted.argmax(-1) == targets).tolist()


def test_quality_of_data_and_of_generated_text_at_exit_layers(text, tmp_path):
    model, tokens = small_world.model(), small_world.tokenizer()
    options = {"prompts": PROMPTS, "prefix_tokens": PREFIX, "max_new_tokens": NEW, "seed": 7, "batch_size": 4}
    results = evaluate(
        model, tokenizer=tokens, output=tmp_path / "out", generation_quality=text, exit_layers="2", **options
    )
    got = values(results)
    texts = [json.loads(line)["text"] for line in Path(text).read_text().splitlines()]
    windows = [tokens(one)["input_ids"][: PREFIX + NEW] for one in texts]
    assert {len(window) for window in windows} == {PREFIX + NEW}
    for layer in (2, LAYERS):
        first = small_world.first_layers(model, layer)
        losses, hits = map(sum, zip(*(nats(first, window, 1) for window in windows), strict=True), [[], []])
        assert got["data", layer, "perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
        assert got["data", layer, "accuracy"] == pytest.approx(sum(hits) / len(hits))
        sequences = generated(first, windows)
        assert got["full model", layer, "perplexity"] == pytest.approx(mean_perplexity(model, sequences), rel=1e-4)
        texts = [tokens.decode(sequence[PREFIX:], skip_special_tokens=True) for sequence in sequences]
        known = [share for share in map(diversity, texts) if share is not None]
        assert ("full model", layer, "diversity") in got or not known
        assert not known or got["full model", layer, "diversity"] == pytest.approx(sum(known) / len(known))
    assert got["full model", 2, "perplexity"] != got["full model", LAYERS, "perplexity"]
    assert "generated_perplexity" in results.headline


def test_windows_are_a_sample_whatever_the_order_of_the_documents(tmp_path):
    model, options = small_world.model(), {"tokenizer": small_world.tokenizer(), "exit_layers": "full"}
    options |= {"prompts": 4, "prefix_tokens": PREFIX, "max_new_tokens": NEW}
    files = [
        documents(tmp_path / f"{at}.jsonl", one) for at, one in enumerate((range(40), range(39, -1, -1), range(4)))
    ]
    one, same, first = (values(evaluate(model, generation_quality=file, **options)) for file in files)
    place = "data", LAYERS, "perplexity"
    assert one[place] == pytest.approx(same[place], rel=1e-6)
    assert one[place] != pytest.approx(first[place], rel=1e-6), "not the first four"


def generated(model, windows):
    """Sequences that the model samples, in batches of four, up to the end of each text."""
    torch.manual_seed(7)
    sequences = []
    for at in range(0, PROMPTS, 4):
        prefixes = torch.tensor([window[:PREFIX] for window in windows[at : at + 4]])
        sampling = {"do_sample": True, "top_p": 0.95, "top_k": 0, "max_new_tokens": NEW, "pad_token_id": 0}
        for row in model.generate(prefixes, attention_mask=torch.ones_like(prefixes), **sampling).tolist():
            ends = [place + 1 for place, token in enumerate(row) if token == 2 and place >= PREFIX]
            sequences.append(row[: min(ends, default=len(row))])
    return sequences


def mean_perplexity(model, sequences):
    losses = [loss for sequence in sequences for loss in nats(model, sequence, PREFIX)[0]]
    return math.exp(sum(losses) / len(losses))


def test_refusals(text):
    model, options = small_world.model(), {"tokenizer": small_world.tokenizer()}
    with refused("more than the model's 2048 positions"):
        evaluate(model, generation_quality=text, prefix_tokens=2040, **options)
    with refused("has no text of 1300 tokens"):
        evaluate(model, generation_quality=text, prefix_tokens=1000, max_new_tokens=300, **options)
