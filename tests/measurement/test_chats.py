"""Measuring chats and prompts with responses: the scored tokens, against transformers and the search of blocks."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional

import fulldepth
import tiny_models
from fulldepth.data import open_source, prepare
from fulldepth.skip import read_examples, search
from refusals import refused
from skip.word_tokenizer import CHAT, EOS, LINE, tokenizer, words

TURNS = [
    {"role": "user", "content": words(1, 2)},
    {"role": "assistant", "content": words(3, 4)},
    {"role": "user", "content": words(5)},
    {"role": "assistant", "content": words(6, 7, 8)},
]
CHATS = [{"messages": [*TURNS[:3], {"role": "assistant", "content": words(number, 7, 8)}]} for number in range(10, 16)]
PAIRS = [{"prompt": words(number, 2), "response": words(3, number)} for number in range(6)]


def conversation_of(row):
    """The messages of a row."""
    if "messages" in row:
        return row["messages"]
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]


def losses_of(model, tokens, row):
    """float64 losses of the response tokens of a chat, and of all its tokens, a forward pass for each response."""
    responses = []
    every = []
    messages = conversation_of(row)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokens.apply_chat_template(messages[:index], add_generation_prompt=True, tokenize=False)
        before = tokens(prompt, add_special_tokens=False).input_ids
        answer = [*tokens(message["content"], add_special_tokens=False).input_ids, EOS]
        ids = torch.tensor([[*before, *answer]])
        with torch.no_grad():
            logits = model(ids).logits.double()
        loss = functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
        responses += loss[len(before) - 1 :].tolist()
        every += loss.tolist()
    return responses, every


@pytest.mark.parametrize(
    ("rows", "chat"), [(CHATS, True), (CHATS, False), (PAIRS, True)], ids=["chats", "chats, no template asked", "pairs"]
)
def test_losses_of_responses_are_those_of_transformers_and_of_the_search(rows, chat, tmp_path):
    """Chats have the template even where pairs are to be plain text."""
    model = tiny_models.build("llama").eval()
    tokens = tokenizer(CHAT)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = [losses_of(model, tokens, row) for row in rows]
    for score, column in (("responses", 0), ("all", 1)):
        expected = torch.tensor([loss for row in columns for loss in row[column]], dtype=torch.float64)
        options = {"tokenizer": tokens, "chat": chat, "progress": False}
        results = fulldepth.measure(model, path, measures=["lens_loss"], lens_tokens=None, score=score, **options)
        rows_of_layers = results.table[(results.table.measure == "lens_loss") & (results.table.statistic == "mean")]
        *_, last = rows_of_layers.sort_values("layer").itertuples()
        assert last.count == len(expected)
        assert last.value == pytest.approx(float(expected.mean()), abs=1e-6)
        assert results.meta["data"]["clusters"] == len(rows)
        if score == "responses":
            plan = search(model, None, heldout=path, search="given", given=[2], fit=False, **options)
            assert plan.losses[0] == pytest.approx(last.value, abs=1e-6)


@pytest.mark.parametrize("tokens", [tokenizer(CHAT), tokenizer(None)], ids=["template", "no template"])
def test_pairs_are_plain_text_without_the_chat_template_if_asked(tokens, tmp_path):
    model = tiny_models.build("llama").eval()
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "response": " " + row["response"]}) + "\n" for row in PAIRS))
    losses = []
    for row in PAIRS:
        ids, answer = (torch.tensor(tokens(row[key], add_special_tokens=False).input_ids) for key in row)
        with torch.no_grad():
            logits = model(torch.cat([ids, answer])[None]).logits[0].double()
        losses += functional.cross_entropy(logits[len(ids) - 1 : -1], answer, reduction="none").tolist()
    expected = pytest.approx(sum(losses) / len(losses), abs=1e-6)
    options = {"tokenizer": tokens, "chat": False, "progress": False}
    results = fulldepth.measure(model, path, measures=["lens_loss"], lens_tokens=None, **options)
    last = results.values("lens_loss", "mean").iloc[-1]
    assert last == expected
    plan = search(model, None, heldout=path, search="given", given=[2], fit=False, **options)
    assert plan.losses[0] == expected
    assert plan.cost["settings"]["chat"] is False
    assert tokens.chat_template in (CHAT, None)


def test_sequences_are_those_of_the_search():
    """The same tokens and targets; a model that generated the response ended it, or was cut off."""
    rows = [{**PAIRS[0], "cut_off": True}, {**PAIRS[1], "cut_off": False, "end": "\n"}, PAIRS[2]]
    tokens = tokenizer(CHAT)
    prepared = prepare(open_source(rows), task="causal-lm", tokenizer=tokens)
    examples = read_examples(None, tokens, None, heldout=rows).heldout
    assert [e.input_ids.tolist() for e in prepared.examples] == [e.input_ids.tolist() for e in examples]
    assert [e.labels.tolist() for e in prepared.examples] == [e.labels.tolist() for e in examples]
    assert [e.input_ids[-1].item() for e in examples] == [10, LINE, EOS]


def test_rows_without_an_answer_are_counted_and_chats_need_a_template():
    unanswered = {"messages": TURNS[:1]}
    prepared = prepare(open_source([*CHATS, unanswered]), task="causal-lm", tokenizer=tokenizer(CHAT))
    assert len(prepared) == 2 * len(CHATS)
    assert "1 response gives no token with this tokenizer and is left out." in prepared.warnings
    with refused("holds a chat, but the tokenizer has no chat template"):
        prepare(open_source(CHATS), task="causal-lm", tokenizer=tokenizer())
    with refused("its kind is chats, expected text or labelled-text"):
        prepare(open_source(CHATS), task="masked-lm", tokenizer=tokenizer(CHAT))
    messages = [{"prompt": TURNS[:1], "completion": TURNS[1:2]}]
    with refused("holds messages; an encoder-decoder reads a prompt and a response as text"):
        prepare(open_source(messages), task="seq2seq-lm", tokenizer=tokenizer(CHAT), start=0)


def test_hashes_of_stored_windows_and_pairs():
    """A search of an earlier version is compared by these hashes."""
    text = [words(*((row + step) % 60 for step in range(50))) for row in range(6)]
    windows = read_examples(text, tokenizer(), 64, sequence_length=16, seed=1)
    pairs = read_examples(PAIRS, tokenizer(CHAT), 64, seed=1)
    assert windows.meta["hash"] == "sha256:11c8c9f160bf21f6045dd665253022bafac94ada23592ccceb5652fab33a64d2"
    assert pairs.meta["hash"] == "sha256:dff7a023d7b277fd936e3dce83aa9a08d86c581ce06a4c2f97be7542a7b2fe98"
    source = open_source(PAIRS)
    assert source.hash == "sha256:c1c94aa2af79a0bae3bef2b011d4d91f8cb88e11e89d7565176fe69d769ed689"
