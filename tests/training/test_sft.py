"""Fine-tuning on conversations: the loss of the responses, the penalty of every token that is not padding."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.conftest import talk
from fulldepth.core.targets import IGNORE
from fulldepth.data import builtin_texts, train_tokenizer, train_wordpiece
from fulldepth.training import train
from fulldepth.training.text import TEMPLATE, chat_examples
from refusals import refused
from training.conftest import SHORT, jsonl, settings, train_by

pytestmark = pytest.mark.slow

CHATS = [
    {"messages": talk(f"say {word}", word * 2, "again", word)}
    for word in ("one", "two", "house", "river", "stone", "bread", "light", "water", "paper", "glass")
]
PAIRS = [{"prompt": f"{n} and {n}?", "response": f"that is {2 * n}."} for n in range(12)]


@pytest.fixture
def fine_tuning(recipe, tmp_path):
    """`fine_tuning(rows, **changes)`: settings of a run that fine-tunes a small model on rows, and that model."""

    def prepared(rows, data=None, **changes):
        short = {**SHORT, "sequence_length": 64}
        train_by(recipe(**short), tmp_path / "base")
        base = tmp_path / "base" / "checkpoint-2"
        name = str(jsonl(tmp_path / "rows.jsonl", *rows))
        data = {"name": name, "validation_share": 0.4, "validation_sequences": 4} | (data or {})
        return settings(recipe(stage="sft", model={"checkpoint": str(base)}, data=data, **short | changes)), base

    return prepared


@pytest.mark.parametrize("others", [None, PAIRS[:6]], ids=["held out", "other data"])
@pytest.mark.parametrize("rows", [CHATS, PAIRS], ids=["chats", "pairs"])
def test_fine_tuning_reports_the_loss_of_the_responses(rows, others, fine_tuning, tmp_path):
    """The validation loss is that of a loop over the held-out conversations, or over all of `data.validation`."""
    data = {"validation": str(jsonl(tmp_path / "others.jsonl", *others)), "validation_sequences": 9} if others else {}
    chosen, base = fine_tuning(rows, method="jreg", steps=4, data=data)
    results = train(chosen, tmp_path / "run")
    assert {"jump"} == set(results.table.query("measure == 'penalty'").site)
    found = results.table.query("measure == 'validation_loss' and step == 4")

    # The held-out conversations again, by their content; the loss token by token.
    def order(row):
        opening = json.dumps([0, _messages(row)[:2]], sort_keys=True)
        return hashlib.sha256(opening.encode()).digest()

    kept = others or sorted(rows, key=order)[:4]
    entry = results.meta["data"]
    assert (entry["train_sequences"], entry["validation_sequences"]) == (len(rows) - 4 * (not others), len(kept))
    predictions = _predictions(kept, base, tmp_path / "run" / "checkpoint-4")
    losses = [float(F.cross_entropy(logits, token)) for logits, token in predictions]
    assert int(found["count"].iloc[0]) == len(losses)
    assert float(found.value.iloc[0]) == pytest.approx(sum(losses) / len(losses), rel=1e-4)


FIRST_STEP = {"steps": 1, "global_batch_size": len(CHATS), "warmup_steps": 0}


def test_amounts_are_those_of_the_conversations(fine_tuning, tmp_path):
    """Throughput counts sequences, and operations the mean length of what is trained, not the longest allowed."""
    others = str(jsonl(tmp_path / "others.jsonl", *PAIRS))
    chosen, base = fine_tuning(CHATS, data={"validation": others}, steps=4, eval_every=4)
    results = train(chosen, tmp_path / "run")
    rows = results.table.query("step == 4").set_index("measure")
    sequences = 4 * chosen.global_batch_size
    assert rows.unit["throughput"] == "sequences/s"
    assert rows.value["throughput"] * rows.value["elapsed"] == pytest.approx(sequences)
    assert f"{sequences}" in re.search(r"Examples.*", (tmp_path / "run/checkpoint-4/README.md").read_text())[0]
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    length = round(sum(len(_tokens(row, tokenizer)[0]) for row in CHATS) / len(CHATS))
    matrices = sum(w.numel() for name, w in model.named_parameters() if "layers" in name and w.ndim == 2)
    attention = 2 * model.config.hidden_size * (length + 1) * model.config.num_hidden_layers
    token = 3 * (2 * matrices + attention + 2 * model.lm_head.weight.numel())
    assert results.meta["model"]["training_flops"] == pytest.approx(sequences * length * token)


def test_fine_tuning_learns_from_a_teacher(recipe, fine_tuning, tmp_path):
    """The divergence in the first step, a batch of all training rows, is that of a loop over the predictions."""
    chosen, base = fine_tuning(CHATS, data={"validation": str(jsonl(tmp_path / "others.jsonl", *PAIRS))}, **FIRST_STEP)
    train_by(recipe(**SHORT, seed=1, model={"max_position_embeddings": 64}), tmp_path / "teacher")
    teacher = tmp_path / "teacher" / "checkpoint-2"
    objective = type(chosen.objective)(distillation={"teacher": str(teacher), "weight": 0.5})
    table = train(chosen.model_copy(update={"objective": objective}), tmp_path / "run").table
    pairs = zip(_predictions(CHATS, base, base), _predictions(CHATS, base, teacher), strict=True)
    divergences = [
        float(F.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), reduction="sum", log_target=True))
        for (ours, _), (theirs, _) in pairs
    ]
    found = table.query("measure == 'penalty' and site == 'distillation'").value
    assert found.tolist() == pytest.approx([sum(divergences) / len(divergences)], rel=1e-4)


def _predictions(rows, base, checkpoint):
    """Logits [V] of a checkpoint in float64, and the next token, for each token of each response."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).double().eval()
    predictions = []
    for row in rows:
        ids, counts = _tokens(row, tokenizer)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        predictions += [(logits[n - 1], torch.tensor(ids[n])) for n in range(1, len(ids)) if counts[n]]
    return predictions


def _messages(row):
    return row.get("messages") or talk(row["prompt"], row["response"])


def _tokens(row, tokenizer):
    """Ids of a conversation under the plain template, and which of them the assistant says: turn by turn, each
    response after the prompt that generation starts from.
    """
    tokenizer.chat_template = TEMPLATE
    messages, ids, said = _messages(row), list[int](), list[bool]()
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True)["input_ids"]
            assert prompt[: len(ids)] == ids
            answer = tokenizer(message["content"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
            said += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
            ids = [*prompt, *answer]
    return ids, said


SPACED = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + (eos_token if m['role'] == 'assistant' else '|') }}"
    + ("{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
)
"""Its prompt ends in a space, which most tokenizers merge with the next word."""
FORGETTING = (
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{{ eos_token if m['role'] == 'assistant' else '' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""Leaves earlier answers out, as templates do with reasoning."""


@pytest.mark.parametrize("template", [TEMPLATE, SPACED, FORGETTING], ids=["own", "spaced", "forgetting"])
@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_each_label_is_what_the_model_can_say_after_the_prompt(template, kind):
    """The ids before a response are stock transformers' generation prompt; its labels decode to it and its end."""
    tokenizer = _tokenizer(kind)
    tokenizer.chat_template = template
    texts = ["hello there", "the lord is here", "and then", "  no more  than that", "again", "yes"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    examples = chat_examples(tokenizer, messages, "here")
    if template != SPACED:
        assert len(examples) == (3 if template == FORGETTING else 1)
    answers, end = [], tokenizer.eos_token_id
    for ids, labels in examples:
        start = 0
        while any(label != IGNORE for label in labels[start:]):
            start = next(i for i in range(start, len(ids)) if labels[i] != IGNORE)
            before = messages[: 1 + 2 * len(answers)]
            assert ids[:start] == tokenizer.apply_chat_template(before, add_generation_prompt=True)["input_ids"]
            after = labels.index(end, start) + 1
            assert labels[start:after] == ids[start:after]
            answers.append(tokenizer.decode(labels[start : after - 1]).strip())
            start = after
    assert answers == [" ".join(text.split()) if kind == "words" else text.strip() for text in texts[1::2]]


def _tokenizer(kind):
    texts = builtin_texts("heldout")[0][:20_000].split("\n\n")
    if kind == "bytes":
        return train_tokenizer(texts, vocab_size=400)
    tokenizer = train_wordpiece(texts, 600)
    tokenizer.eos_token = "[SEP]"
    return tokenizer


def test_what_is_cut_is_said_and_what_is_trained_is_counted(fine_tuning, tmp_path):
    """Of 14 chats two are cut, one of them before its answer, and two have none; the counts are those of a loop."""
    unanswered = [{"messages": talk(word)} for word in ("what", "why")]
    long = [{"messages": talk("one two " * 40, "yes")}, {"messages": talk("tell me", "house river " * 40)}]
    chosen, base = fine_tuning([*CHATS, *unanswered, *long])
    tokenizer = AutoTokenizer.from_pretrained(base)
    sizes = [len(_tokens(row, tokenizer)[0]) for row in [*CHATS, *long]]
    assert [size > 64 for size in sizes] == [False] * 10 + [True] * 2
    document = train(chosen, tmp_path / "run").meta
    assert document["data"]["documents"] == 11
    assert document["data"]["train_sequences"] + document["data"]["validation_sequences"] == 11
    assert document["warnings"][:2] == [
        "2 of the rows of rows.jsonl have no response and are left out.",
        f"2 of 12 conversations in {chosen.data.name} are longer than 64 tokens and are cut there (the longest has "
        f"{max(sizes)}); 1 of them are left out, because no response begins before the cut.",
    ]
    with refused("holds 12 conversations, 0 of them with a response that begins within"):
        train(chosen.model_copy(update={"sequence_length": 4}), tmp_path / "short")
