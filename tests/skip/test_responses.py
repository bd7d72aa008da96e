"""Responses against `model.generate` one prompt at a time, and the distribution of samples against the softmax."""

import json
import os
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import GenerationConfig

from fulldepth.data.conversations import conversations
from fulldepth.data.examples import read_examples
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher
from fulldepth.skip.responses import GumbelNoise, generate_responses, read_prompts
from skip.word_tokenizer import ASSISTANT, BOS, CHAT, EOS, LINE, USER, ids, tokenizer, words
from tiny_models import build

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "depth_llama"]
PROMPTS = [
    words(*range(start, start + size)) for start, size in ((1, 3), (9, 11), (30, 1), (5, 3), (50, 6), (2, 20), (7, 4))
]


def decoder(name, *ends):
    """A tiny model whose answers vary from prompt to prompt, and stop at `ends`."""
    model = build(name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.zero_()
            elif "wte" in parameter_name:
                parameter.mul_(0.25)
    model.generation_config.eos_token_id = list(ends) or None
    return model


def alone(model, input_ids, ends, new):
    """The plainest loop: no cache, no padding, no batch."""
    found = list(input_ids)
    for _ in range(new):
        found.append(model(torch.tensor([found]), use_cache=False).logits[0, -1].argmax().item())
        if found[-1] in ends:
            break
    return found[len(input_ids) :]


def stock(model, input_ids, ends, new):
    """transformers, one prompt at a time."""
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=ends or None, pad_token_id=0)
    model.generation_config = GenerationConfig()
    batch = torch.tensor([input_ids])
    return model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=config)[
        0, len(input_ids) :
    ].tolist()


@pytest.mark.parametrize(("name", "bos"), [(name, index % 2 == 0) for index, name in enumerate(FAMILIES)])
def test_greedy_batches_are_the_model_one_prompt_at_a_time(name, bos):
    word_tokenizer = tokenizer(bos=bos)
    asked = [[BOS] * bos + word_tokenizer(prompt, add_special_tokens=False)["input_ids"] + [LINE] for prompt in PROMPTS]
    free = [alone(decoder(name), prompt, {EOS}, 10) for prompt in asked]
    assert len(set(map(tuple, free))) > len(PROMPTS) / 2
    firsts = Counter(answer[0] for answer in free)
    later = Counter(token for answer in free for token in set(answer[1:]) if firsts[token] < 3)
    ends = [token for token, _ in later.most_common(2)]  # so that some end, some at once, and some do not
    stops = {*ends, EOS}
    expected = [alone(decoder(name), prompt, stops, 10) for prompt in asked]
    assert expected == [stock(decoder(name), prompt, sorted(stops), 10) for prompt in asked]
    assert any(answer[-1] in ends for answer in expected)
    cut = [answer[:-1] if answer[-1] in stops else answer for answer in expected]
    texts = [word_tokenizer.decode(answer, skip_special_tokens=True) for answer in cut]
    for batch_size in (1, 3, 7):
        found = generate_responses(
            decoder(name, *ends), word_tokenizer, PROMPTS, max_new_tokens=10, batch_size=batch_size
        )
        assert [(pair["prompt"], pair["response"]) for pair in found.pairs] == [
            (prompt + "\n", text) for prompt, text in zip(PROMPTS, texts, strict=True) if text.strip()
        ]
        assert found.settings["empty"] == [i for i, text in enumerate(texts, start=1) if not text.strip()]
        whole = [text for answer, text in zip(expected, texts, strict=True) if answer[-1] not in stops and text.strip()]
        assert found.settings["unfinished"] == len(whole)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_samples_do_not_depend_on_the_batch(name):
    def sample(batch_size, seed=3, prompts=PROMPTS, temperature=0.9):
        found = generate_responses(
            decoder(name),
            tokenizer(),
            prompts,
            temperature=temperature,
            seed=seed,
            max_new_tokens=10,
            batch_size=batch_size,
        )
        return found.pairs

    assert sample(1) == sample(3) == sample(7)
    assert sample(2, prompts=PROMPTS[:4]) == sample(7)[:4]
    assert sample(3, seed=4) != sample(3)
    twice = sample(2, prompts=[PROMPTS[0]] * 2)
    assert twice[0] != twice[1]  # prompts have their own noise
    assert sample(3, temperature=1e-6) == sample(3, temperature=0.0)


def test_samples_have_the_distribution_of_the_softmax():
    """Chi-square of 4,000 first tokens against softmax(logits / temperature)."""
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5])
    for temperature in (0.7, 1.0, 2.0):
        noise = GumbelNoise(temperature, 5, range(4000))
        drawn = noise(torch.zeros(4000, 1), logits.expand(4000, -1)).argmax(-1)
        expected = (logits.double() / temperature).softmax(-1).numpy() * 4000
        assert stats.chisquare(np.bincount(drawn, minlength=5), expected).pvalue > 1e-3


def test_samples_of_a_model_have_its_distribution():
    """The first token of many responses to one prompt, against the model's own softmax at that temperature."""
    model, word_tokenizer = build("llama"), tokenizer()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)
        logits = model(torch.tensor([[*ids(1), LINE]])).logits[0, -1].double()
    found = generate_responses(model, word_tokenizer, ["w1"] * 1500, temperature=1.5, max_new_tokens=1, batch_size=500)
    said = Counter(pair["response"] for pair in found.pairs)
    probabilities = (logits / 1.5).softmax(-1)
    likely = [i for i in range(10, 90) if probabilities[i] * 1500 > 5]
    observed = [said[f"w{i - 10}"] for i in likely]
    rest = 1500 - sum(observed)
    expected = [1500 * probabilities[i].item() for i in likely]
    assert len(likely) > 10
    assert stats.chisquare([*observed, rest], [*expected, 1500 - sum(expected)]).pvalue > 1e-3


def test_generation_defaults_of_the_checkpoint_are_set_aside():
    expected = generate_responses(decoder("llama"), tokenizer(), PROMPTS, max_new_tokens=8).pairs
    model = decoder("llama")
    own = model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=3.0,
        top_k=5,
        repetition_penalty=9.0,
        num_beams=2,
        max_length=7,
        suppress_tokens=[20],
    )
    assert generate_responses(model, tokenizer(), PROMPTS, max_new_tokens=8).pairs == expected
    assert model.generation_config is own


def test_the_model_is_left_as_it_was():
    model = decoder("llama").train()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    expected = generate_responses(decoder("llama"), tokenizer(), PROMPTS, max_new_tokens=6).pairs
    assert generate_responses(model, tokenizer(), PROMPTS, max_new_tokens=6).pairs == expected
    model.generate = None
    with pytest.raises(TypeError):
        generate_responses(model, tokenizer(), PROMPTS, max_new_tokens=6)
    assert {name: module.training for name, module in model.named_modules()} == before
    word_tokenizer = tokenizer()
    assert word_tokenizer.padding_side == tokenizer().padding_side


@pytest.mark.parametrize("template", [None, CHAT])
def test_the_model_sees_the_prompt_that_the_examples_hold(template):
    word_tokenizer, model = tokenizer(template), decoder("llama")
    seen = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].clone()), with_kwargs=True
    )
    talk = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2"},
        {"role": "user", "content": "w3 w4"},
    ]
    prompts = [*PROMPTS[:3], *([talk] if template else [])]
    found = generate_responses(model, word_tokenizer, prompts, max_new_tokens=5, batch_size=1)
    hook.remove()
    shown = sorted(batch[0].tolist() for batch in seen if batch.shape[1] > 1)
    examples = read_examples(found.pairs, word_tokenizer, 64, heldout=found.pairs).train
    held = [e.input_ids[: (e.labels != -100).nonzero()[0, 0]].tolist() for e in examples]
    assert sorted(held) == shown
    assert [USER, *ids(30), ASSISTANT] in held if template else [*ids(30), LINE] in held


def test_empty_and_broken_off_responses_are_reported():
    model, lines, parts = decoder("llama"), [], []
    free = [alone(decoder("llama"), [*ids(*range(i, i + 2)), LINE], (), 4) for i in range(8)]
    first = Counter(answer[0] for answer in free).most_common(1)[0][0]
    assert 0 < sum(answer[0] == first for answer in free) < 8
    model.generation_config.eos_token_id = first
    watcher = Watcher(lines.append, lambda title, total: parts.append((title, total)), parts.append)
    prompts = [words(i, i + 1) for i in range(8)]
    found = generate_responses(model, tokenizer(), prompts, max_new_tokens=4, batch_size=3, watcher=watcher)
    empty = [i for i, answer in enumerate(free, start=1) if answer[0] == first]
    broken = [i for i, answer in enumerate(free, start=1) if first not in answer]
    assert found.settings["empty"] == empty
    assert [pair["prompt"] for pair in found.pairs] == [p + "\n" for i, p in enumerate(prompts, 1) if i not in empty]
    assert lines[0].startswith(f"{len(empty)} of 8 responses are empty and left out: {empty[0]}")
    assert lines[1] == f"{len(broken)} of 8 responses were cut off after 4 tokens; no loss is put on their ends."
    assert [pair.get("cut_off", False) for pair in found.pairs] == [
        i in broken for i in range(1, len(prompts) + 1) if i not in empty
    ]
    assert parts == [("Responses", 8), 3, 3, 2]
    with pytest.raises(FulldepthError, match="gave an empty response to each of the 1 prompts"):
        generate_responses(model, tokenizer(), [prompts[empty[0] - 1]], max_new_tokens=4)


@pytest.mark.parametrize("template", [None, CHAT])
def test_an_end_that_the_model_did_not_choose_has_no_loss(template):
    """Labels of the examples are exactly the tokens that the model generated, its end of turn included."""
    word_tokenizer, count = tokenizer(template), 8
    prompts = [words(i, i + 1) for i in range(count)]
    mark = [USER] if template else []
    asked = [[*mark, *ids(i, i + 1), *([ASSISTANT] if template else [LINE])] for i in range(count)]
    free = [alone(decoder("llama"), prompt, (), 4) for prompt in asked]
    model = decoder("llama")
    # the end of turn stands where the model says its third token, so that some answers end and others are cut
    third = Counter(answer[2] for answer in free).most_common(1)[0][0]
    swap = model.lm_head.weight.data
    swap[[third, EOS]] = swap[[EOS, third]]
    expected = [alone(model, prompt, {EOS}, 4) for prompt in asked]
    assert {answer[-1] == EOS for answer in expected} == {True, False}
    found = generate_responses(model, word_tokenizer, prompts, max_new_tokens=4, batch_size=3)
    examples = read_examples(found.pairs, word_tokenizer, 64, heldout=found.pairs).train
    labels = [example.labels[example.labels != -100].tolist() for example in examples]
    kept = {*ids(*range(80)), *([EOS] if template else [])}  # decoding drops the other marks
    spoken = [[token for token in answer if token in kept] for answer in expected]
    assert labels == [answer for answer in spoken if answer not in ([], [EOS])]


def test_fine_tuning_leaves_out_responses_that_were_cut_off():
    """TRL puts an end of turn after every completion, and a loss on it."""
    lines = []
    rows = [{"prompt": "w1", "response": "w2"}, {"prompt": "w3", "response": "w4", "cut_off": True}]
    kept = conversations(rows, tokenizer(), watcher=Watcher(lines.append))
    assert kept.to_list() == [{"prompt": "w1\n", "completion": "w2"}]
    assert lines == ["1 of the rows of rows have a response that was cut off and are left out."]
    with pytest.raises(FulldepthError, match="has no row with a response"):
        conversations(rows[1:], tokenizer())


def test_settings_are_recorded(tmp_path):
    found = generate_responses(
        decoder("llama"), tokenizer(), PROMPTS, 5, temperature=0.5, seed=9, max_new_tokens=6, batch_size=2
    )
    assert len(found.pairs) == 5
    asked = {"prompts": 5, "temperature": 0.5, "seed": 9, "max_new_tokens": 6, "batch_size": 2, "chat_template": False}
    assert found.settings == {**asked, "empty": [], "unfinished": 5, "response_tokens": 30}
    json.dumps(found.settings, allow_nan=False)
    path = found.save(tmp_path / "responses.jsonl")
    assert [json.loads(line) for line in path.read_text().splitlines()] == found.pairs
    assert read_examples(path, tokenizer(), 64).meta["hash"] == read_examples(found.pairs, tokenizer(), 64).meta["hash"]
    with pytest.raises(FulldepthError, match="Cannot write responses"):
        found.save(tmp_path / "nowhere" / "responses.jsonl")
    assert os.listdir(tmp_path) == ["responses.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 9}, "9 responses were asked for, but there are 7 prompts"),
        ({"n": 0}, "responses must be 1 to 10,000,000, got 0"),
        ({"prompts": []}, "There are no prompts"),
        ({"prompts": ["w1", " "]}, "Prompt 2 is empty"),
        (
            {"prompts": ["w1", [{"role": "user", "content": "w1"}]]},
            "needs a chat template, which the tokenizer does not have",
        ),
        ({"temperature": -1}, "The temperature must be a number from 0 (greedy), got -1"),
        ({"temperature": float("nan")}, "The temperature must be a number from 0"),
        ({"temperature": float("inf")}, "The temperature must be a number from 0"),
        ({"seed": -1}, "The seed must be a whole number from 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 to 10,000,000, got 0"),
        ({"batch_size": 0}, "batch_size must be 1 to 10,000,000, got 0"),
        (
            {"max_new_tokens": 44},
            "Prompt 6 with 44 new tokens would be longer than the model's 64 positions; the longest prompt has "
            "21 tokens. Set max_new_tokens to 43 or less",
        ),
        ({"prompts": [words(*range(70))]}, "Shorten them"),
        ({"model": build("bert")}, "BertForMaskedLM cannot respond to prompts"),
    ],
)
def test_what_makes_no_sense(options, message):
    given = {"model": decoder("llama"), "tokenizer": tokenizer(), "prompts": PROMPTS, "max_new_tokens": 4, **options}
    with pytest.raises(FulldepthError) as caught:
        generate_responses(**given)
    assert message in str(caught.value)


def test_prompts_of_rows(tmp_path):
    plain, chat = tokenizer(), tokenizer(CHAT)
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "w1", "answer": ""}\n{"question": "w2\\n", "answer": "w3"}\n')
    assert read_prompts(path, plain) == ["w1\n", "w2\n"]
    many = [{"prompt": f"w{number}"} for number in range(90)]
    drawn = read_prompts(many, plain, 30)
    assert set(drawn) == set(read_prompts(many[::-1], plain, 30)), "whatever the order of the rows"
    assert set(drawn) != set(read_prompts(many, plain, 30, seed=1))
    assert 30 < sum(int(prompt[1:]) for prompt in drawn) / 30 < 60, "of all rows: the first 30 have a mean of 14.5"
    assert read_prompts(path, chat) == [[{"role": "user", "content": text}] for text in ("w1", "w2\n")]
    assert read_prompts([{"prompt": "w1"}, {"prompt": "w2", "response": "w3"}], plain) == ["w1\n", "w2\n"]
    assert read_prompts([{"instruction": "w1", "input": "w2"}], plain) == ["w1\n\nw2\n"]
    talk = [
        {"role": r, "content": c} for r, c in [("user", "w1"), ("assistant", "w2"), ("user", "w3"), ("assistant", "w4")]
    ]
    assert read_prompts([{"messages": talk}, {"messages": talk[:3]}], chat) == [talk[:3], talk[:3]]
    assert read_prompts([{"prompt": talk[:1], "completion": talk[1:2]}], chat) == [talk[:1]]
    shared = [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]
    assert read_prompts([{"conversations": shared}], chat) == [talk[:1]]
    for rows, message in [
        ([{"text": "w1"}], "rows row 1 has no column of prompts. Got: 'text'"),
        ([{"prompt": "w1"}, {"prompt": " "}], "rows row 2 has an empty prompt"),
        ([{"prompt": None}], "rows row 1, 'prompt' is empty"),
        ([], "There are no prompts in rows"),
    ]:
        with pytest.raises(FulldepthError, match=message):
            read_prompts(rows, plain)
    for messages in ([], talk[1:2], [{"role": "user", "content": ""}]):
        with pytest.raises(FulldepthError, match="rows row 1 has an empty prompt"):
            read_prompts([{"messages": messages}], chat)


def test_real_prompts(shared_data):
    found = read_prompts(shared_data / "gsm8k" / "test.jsonl", tokenizer(), limit=3)
    rows = [json.loads(line) for line in (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()]
    assert len(found) == 3
    assert set(found) < {row["question"] + "\n" for row in rows}
