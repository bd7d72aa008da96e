"""Responses against the plainest loop, one prompt at a time, and the distribution of samples against the softmax."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import GenerationConfig

from data.conftest import jsonl
from families import zoo
from fulldepth.core.progress import Watcher
from fulldepth.data.conversations import conversations
from fulldepth.data.examples import read_examples
from fulldepth.skip import search
from fulldepth.skip.responses import generate_responses, read_prompts
from fulldepth.skip.sampling import GumbelNoise
from refusals import refused
from skip.word_tokenizer import ASSISTANT, BOS, CHAT, EOS, LINE, USER, VOCABULARY, ids, tokenizer, words
from tiny_models import build

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


@pytest.mark.parametrize(("name", "bos"), [("gemma3", True), ("gpt2", False), ("depth_llama", True)])
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
    assert any(answer[-1] in ends for answer in expected)
    cut = [answer[:-1] if answer[-1] in stops else answer for answer in expected]
    spoken = [bool(word_tokenizer.decode(answer, skip_special_tokens=True).strip()) for answer in cut]
    texts = [word_tokenizer.decode(answer) for answer in cut]
    whole = [answer for answer, said in zip(expected, spoken, strict=True) if answer[-1] not in stops and said]
    for size in (1, 3):
        model = decoder(name, *ends)
        own = model.generation_config = GenerationConfig(
            do_sample=True, temperature=3.0, repetition_penalty=9.0, max_length=7, eos_token_id=ends
        )  # of which only the ends are used
        found = generate_responses(model, word_tokenizer, PROMPTS, max_new_tokens=10, batch_size=size)
        assert [(pair["prompt"], pair["response"]) for pair in found.pairs] == [
            (prompt + "\n", text) for prompt, text, said in zip(PROMPTS, texts, spoken, strict=True) if said
        ]
        assert [pair.get("end") for pair in found.pairs] == [
            word_tokenizer.decode(answer[-1:]) if answer[-1] in stops else None
            for answer, said in zip(expected, spoken, strict=True)
            if said
        ]
        assert found.settings["empty"] == [i for i, said in enumerate(spoken, start=1) if not said]
        assert found.settings["unfinished"] == len(whole)
        assert model.generation_config is own


def test_samples_do_not_depend_on_the_batch():
    def sample(size, seed=3, prompts=PROMPTS, temperature=0.9):
        options = {"temperature": temperature, "seed": seed, "max_new_tokens": 10, "batch_size": size}
        return generate_responses(decoder("gpt2"), tokenizer(), prompts, **options).pairs

    assert sample(1) == sample(3) == sample(7)
    assert sample(2, prompts=PROMPTS[:4]) == sample(7)[:4]
    assert sample(3, seed=4) != sample(3)
    twice = sample(2, prompts=[PROMPTS[0]] * 2)
    assert twice[0] != twice[1]  # prompts have their own noise
    assert sample(3, temperature=1e-6) == sample(3, temperature=0.0)


def test_samples_have_the_distribution_of_the_softmax():
    """Chi-square of 4,000 first tokens against softmax(logits / temperature)."""
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5])
    for temperature in (0.7, 2.0):
        noise = GumbelNoise(temperature, [(5, row) for row in range(4000)])
        drawn = noise(torch.zeros(4000, 1), logits.expand(4000, -1)).argmax(-1)
        expected = (logits.double() / temperature).softmax(-1).numpy() * 4000
        assert stats.chisquare(np.bincount(drawn, minlength=5), expected).pvalue > 1e-3


@pytest.mark.parametrize("template", [None, CHAT])
def test_an_end_that_the_model_did_not_choose_has_no_loss(template):
    """Labels of the examples are exactly the tokens that the model generated, its end of turn included."""
    word_tokenizer, mark = tokenizer(template), [USER] if template else []
    prompts = [words(i, i + 1) for i in range(8)]
    asked = [[*mark, *ids(i, i + 1), *([ASSISTANT] if template else [LINE])] for i in range(8)]
    model = decoder("llama")
    # the end of turn stands where the model says its third token, so that some answers end and others are cut
    third = Counter(alone(model, prompt, (), 4)[2] for prompt in asked).most_common(1)[0][0]
    swap = model.lm_head.weight.data
    swap[[third, EOS]] = swap[[EOS, third]]
    expected = [alone(model, prompt, {EOS}, 4) for prompt in asked]
    assert {answer[-1] == EOS for answer in expected} == {True, False}
    found = generate_responses(model, word_tokenizer, prompts, max_new_tokens=4, batch_size=3)
    examples = read_examples(found.pairs, word_tokenizer, 64, heldout=found.pairs).train
    labels = [example.labels[example.labels != -100].tolist() for example in examples]
    ends = {EOS} if template else set()
    known = {*range(len(VOCABULARY))} - {EOS} | ends  # the model has more tokens than the tokenizer
    answers = [[token for token in answer if token in known] for answer in expected]
    assert labels == [answer for answer in answers if any(token in ids(*range(80)) for token in answer)]


def test_fine_tuning_leaves_out_responses_that_were_cut_off():
    """TRL puts an end of turn after every completion, and a loss on it."""
    lines = []
    rows = [{"prompt": "w1", "response": "w2"}, {"prompt": "w3", "response": "w4", "cut_off": True}]
    kept = conversations(rows, tokenizer(), watcher=Watcher(lines.append))
    assert kept.to_list() == [{"prompt": "w1\n", "completion": "w2"}]
    assert lines == ["1 of the rows of rows have a response that was cut off and are left out."]
    with refused("has no row with a response"):
        conversations(rows[1:], tokenizer())


def test_settings_are_recorded(tmp_path):
    options = {"temperature": 0.5, "seed": 9, "max_new_tokens": 6, "batch_size": 2}
    found = generate_responses(decoder("llama"), tokenizer(), PROMPTS[:5], **options)
    made = {"prompts": 5, **options, "chat_template": False}
    assert found.settings == {**made, "empty": [], "unfinished": 5, "response_tokens": 30}
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in found.pairs))
    assert read_examples(path, tokenizer(), 64).meta["hash"] == read_examples(found.pairs, tokenizer(), 64).meta["hash"]


def test_a_search_of_plain_pairs_answers_and_scores_without_the_template(tmp_path):
    rows = jsonl(tmp_path / "rows.jsonl", *({"prompt": words(n, n + 1), "response": ""} for n in range(12)))
    model = decoder("llama")
    options = {"responses": 12, "search": "given", "given": [2], "fit": False, "max_new_tokens": 6, "progress": False}
    plans = [
        search(model, rows, output=tmp_path / name, tokenizer=tokenizer(template), chat=chat, **options)
        for name, template, chat in (("plain", CHAT, False), ("bare", None, True))
    ]
    plain, bare = ((tmp_path / name / "responses.jsonl").read_text() for name in ("plain", "bare"))
    assert plain == bare
    assert plans[0].losses == plans[1].losses


def roberta():
    """A decoder whose positions start after the row of the padding token."""
    return zoo.build("roberta", "causal-lm", is_decoder=True, max_position_embeddings=34)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("no prompts", {"prompts": []}),
        ("Prompt 2", {"prompts": ["w1", " "]}),
        ("chat template", {"prompts": ["w1", [{"role": "user", "content": "w1"}]]}),
        ("temperature", {"temperature": float("nan")}),
        ("batch_size", {"batch_size": 0}),
        ("Prompt 6 with 44 new tokens", {"max_new_tokens": 44}),
        ("64 positions", {"prompts": [words(*range(70))]}),
        ("the model's 33 positions", {"model": roberta(), "prompts": [words(*range(20))], "max_new_tokens": 14}),
        ("BertForMaskedLM", {"model": build("bert")}),
    ],
)
def test_what_makes_no_sense_is_refused(message, options):
    given = {"model": decoder("llama"), "tokenizer": tokenizer(), "prompts": PROMPTS, "max_new_tokens": 4, **options}
    with refused(message):
        generate_responses(**given)


def test_prompts_of_rows():
    plain, chat = tokenizer(), tokenizer(CHAT)
    rows = [{"question": "w1", "answer": ""}, {"question": "w2\n", "answer": "w3"}]
    assert read_prompts(rows, plain) == ["w1\n", "w2\n"]
    assert read_prompts(rows, chat) == [[{"role": "user", "content": text}] for text in ("w1", "w2\n")]
    many = [{"prompt": f"w{number}"} for number in range(90)]
    drawn = read_prompts(many, plain, 30)
    assert drawn == read_prompts(many, plain, 30)
    assert set(drawn) != set(read_prompts(many, plain, 30, seed=1))
    assert 30 < sum(int(prompt[1:]) for prompt in drawn) / 30 < 60, "of all rows: the first 30 have a mean of 14.5"
    talk = [{"role": role, "content": f"w{n}"} for n, role in enumerate(("user", "assistant") * 2)]
    assert read_prompts([{"messages": talk}, {"messages": talk[:3]}], chat) == [talk[:3], talk[:3]]
    for bad in ([{"prompt": " "}], [{"messages": talk[1:2]}], []):
        with refused("rows"):
            read_prompts(bad, chat)
