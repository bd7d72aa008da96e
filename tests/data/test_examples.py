"""Examples against ids written down by hand and transformers' own assistant masks.

Their losses in batches: `execution.test_scoring`.
"""

import json

import pandas as pd
import pytest

from data.conftest import jsonl, talk
from fulldepth.data import builtin_texts, open_source, prepare, train_tokenizer
from fulldepth.data.conversations import conversations, encode_prompt
from fulldepth.data.examples import read_examples, units
from fulldepth.data.mixture import Mixture
from fulldepth.skip.responses import read_prompts
from fulldepth.skip.sampling import answered_pair
from fulldepth.training.text import _encoded, chat_examples
from refusals import refused
from skip.word_tokenizer import (
    ASSISTANT,
    BOS,
    CHAT,
    COUNTING,
    EOS,
    LINE,
    MARKED,
    NO_THINK,
    STRICT,
    THINK,
    THINKING,
    USER,
    ids,
    tokenizer,
    words,
)

NO = -100


def test_texts_of_every_kind_in_a_folder_are_read(tmp_path):
    """Whichever file comes first: rows of a table, or paragraphs."""
    jsonl(tmp_path / "b.jsonl", *({"text": words(*range(n, n + 15))} for n in range(8)))
    counts = []
    for name in ("a.txt", "c.txt"):
        (tmp_path / name).write_text("\n\n".join(words(*range(n, n + 15)) for n in range(20, 40)))
        counts.append(len({tuple(ids) for ids, _ in listed(both(read_examples(tmp_path, tokenizer(), None)))}))
        (tmp_path / name).unlink()
    assert counts[0] == counts[1] > 8


def test_an_instruction_and_its_input_are_one_prompt_to_every_reader():
    """Of Alpaca: rows that differ in the input alone are different texts, also to an encoder-decoder."""
    rows = [{"instruction": words(3), "input": words(number), "output": words(9)} for number in range(4, 9)]
    source = open_source(rows)
    assert [record.prompt for record in source.records] == [f"{words(3)}\n\n{row['input']}" for row in rows]
    assert len({record.content for record in source.records}) == len(rows)
    assert source.hash != open_source([{**rows[0], "input": ""}, *rows[1:]]).hash
    (first, *_), plain = conversations(rows), conversations([{**rows[0], "input": ""}])
    assert first["prompt"].strip() == source.records[0].prompt
    assert plain[0]["prompt"].strip() == words(3)


def both(examples):
    """All examples in the order of the rows that they come from."""
    return sorted([*examples.train, *examples.heldout], key=lambda example: example.document)


def listed(examples):
    return [(example.input_ids.tolist(), example.labels.tolist()) for example in examples]


def pair(prompt, response):
    return {"prompt": words(*prompt), "response": words(*response)}


PAIRS = [pair((1, 2), (3, 4, 5)), pair((6,), (7,)), pair((8, 9, 10), (11, 12))]


def test_plain_pairs():
    found = read_examples(PAIRS, tokenizer(), 64)
    assert listed(both(found)) == [
        ([*ids(1, 2), LINE, *ids(3, 4, 5)], [NO] * 3 + ids(3, 4, 5)),
        ([*ids(6), LINE, *ids(7)], [NO] * 2 + ids(7)),
        ([*ids(8, 9, 10), LINE, *ids(11, 12)], [NO] * 4 + ids(11, 12)),
    ]
    assert [example.document for example in both(found)] == [0, 1, 2]
    assert [example.predicted for example in both(found)] == [3, 1, 2]
    with_bos = read_examples(PAIRS, tokenizer(bos=True), 64)
    assert listed(both(with_bos))[1] == ([BOS, *ids(6), LINE, *ids(7)], [NO] * 3 + ids(7))


def test_white_space_between_prompt_and_response_is_not_doubled():
    rows = [{"prompt": "w1\n", "response": "w2"}, {"prompt": "w1", "response": "\nw2"}]
    first, second = listed(both(read_examples(rows, tokenizer(bos=True), 64)))
    assert first == ([BOS, *ids(1), LINE, *ids(2)], [NO] * 3 + ids(2))
    assert second == (first[0], [NO] * 2 + [LINE, *ids(2)])  # the line is the response's own


TALK = [
    {"role": "system", "content": words(1)},
    *talk(words(2), words(3), words(4), words(5, 6)),
]


def test_responses_are_those_that_transformers_marks():
    """Oracle: the mask of `apply_chat_template`, from a template that says what the assistant generates."""
    chat = tokenizer(MARKED)
    found = both(read_examples([{"messages": TALK}] * 2, chat, 64))
    for stop, example in zip((3, 5, 3, 5), found, strict=True):
        told = chat.apply_chat_template(TALK[:stop], return_dict=True, return_assistant_tokens_mask=True)
        assert example.input_ids.tolist() == told["input_ids"]
        last_turn = len(told["input_ids"]) - len(TALK[stop - 1]["content"].split()) - 1
        mask = [bool(m) and i >= last_turn for i, m in enumerate(told["assistant_masks"])]
        assert (example.labels != NO).tolist() == mask


FUNCTIONS = [{"name": "w50", "parameters": {"type": "object", "properties": {}}}, {"name": "w51"}]
WITH_FUNCTIONS = "{% for f in tools or [] %}{{ f['name'] }} {% endfor %}{% if tools is not none %}w52 {% endif %}"
GIVEN = (None, FUNCTIONS, [], FUNCTIONS[:1])


@pytest.mark.parametrize("several", [False, True])
def test_templates_are_given_the_functions_of_a_chat(tmp_path, several):
    """Oracle: `apply_chat_template(messages, tools=tools)`, for all that reads chats: searches, measurements, training,
    and prompts of responses. Of several templates it takes `tool_use` with functions. Only the second file has any."""
    told = tokenizer({"default": MARKED, "tool_use": WITH_FUNCTIONS + MARKED} if several else WITH_FUNCTIONS + MARKED)
    rows = [{"messages": TALK[:3], "tools": tools} for tools in GIVEN]
    written = [{**row, "tools": json.dumps(row["tools"])} for row in rows]
    pd.DataFrame([{"messages": TALK[:3]}]).to_parquet(tmp_path / "a.parquet")
    pd.DataFrame(written[1:]).to_parquet(tmp_path / "b.parquet")
    expected = [
        told.apply_chat_template(TALK[:3], tools=tools, return_dict=True, return_assistant_tokens_mask=True)
        for tools in GIVEN
    ]
    marked = [zip(row["input_ids"], row["assistant_masks"], strict=True) for row in expected]
    labels = [[number if mask else NO for number, mask in pairs] for pairs in marked]
    examples = [(row["input_ids"], row_labels) for row, row_labels in zip(expected, labels, strict=True)]
    assert len({tuple(ids) for ids, _ in examples}) == len(GIVEN)
    for data in (rows, written, tmp_path):
        assert listed(both(read_examples(data, told, 64))) == examples
        for limit in (None, len(GIVEN), len(GIVEN) - 1):
            source = open_source(data, limit=limit, seed=1)
            measured = prepare(source, task="causal-lm", tokenizer=told, sequence_length=64, vocab_size=96)
            drawn = [example for example in examples if example in listed(measured.examples)]
            assert listed(measured.examples) == drawn
            assert len(drawn) == (limit or len(GIVEN))
        kept = conversations(data, told)
        made = _encoded(kept[:], list(range(len(kept))), tokenizer=told, length=64, name="rows")
        assert list(zip(made["input_ids"], made["labels"], strict=True)) == examples
        assert [tools if tools is None else json.loads(tools) for tools in kept["tools"]] == list(
            GIVEN
        )  # as TRL reads it
        asked = [encode_prompt(told, prompt) for prompt in read_prompts(data, told)]
        assert asked == [
            told.apply_chat_template(TALK[:2], tools=tools, add_generation_prompt=True)["input_ids"] for tools in GIVEN
        ]
    [*_, prompt] = read_prompts(rows, told)
    answered = answered_pair(told, prompt, ids(3), [])
    assert listed(both(read_examples([answered] * 2, told, 64)))[0][0] == [*asked[-1], *ids(3)]


def test_pairs_go_through_the_chat_template_too():
    found = listed(both(read_examples(PAIRS[:2], tokenizer(CHAT), 64)))
    assert found[0] == ([USER, *ids(1, 2), ASSISTANT, *ids(3, 4, 5), EOS], [NO] * 4 + [*ids(3, 4, 5), EOS])
    messages = {"prompt": TALK[:2], "completion": TALK[2:3]}
    assert listed(both(read_examples([messages] * 2, tokenizer(CHAT), 64)))[0][0][-2:] == [*ids(3), EOS]
    two = {"prompt": TALK[:2], "completion": TALK[2:]}
    assert len(both(read_examples([two, two], tokenizer(CHAT), 64))) == 4


FORGETFUL = THINKING.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")


@pytest.mark.parametrize("template", [THINKING, FORGETFUL, FORGETFUL.replace("<think>\n", "")])
@pytest.mark.parametrize("shown", ["", "<think>\n"])
def test_reasoning_is_scored_after_the_prompt_of_generation(template, shown):
    """Ids are those of the generation prompt, the whole response and its end, whatever the template leaves out."""
    thinking, content = tokenizer(template), f"{shown}w3 </think> w4"
    opens = template != FORGETFUL.replace("<think>\n", "")
    before = thinking.apply_chat_template(TALK[1:2], add_generation_prompt=True)["input_ids"]
    assert before[-1] == (LINE if opens else ASSISTANT)
    said = [*([THINK, LINE] if shown and not opens else []), *ids(3), NO_THINK, *ids(4), EOS]
    rows = [{"messages": [TALK[1], {**TALK[2], "content": content}]}] * 2
    expected = ([*before, *said], [NO] * len(before) + said)
    assert listed(both(read_examples(rows, thinking, 64))) == [expected] * 2
    assert chat_examples(thinking, rows[0]["messages"], "here") == [expected]
    assert encode_prompt(thinking, TALK[1:2]) == before


@pytest.mark.parametrize("closed", ["<think>\n</think>\n", "</think>"])
@pytest.mark.parametrize(
    "history", [CHAT, CHAT.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")]
)
def test_answers_follow_reasoning_that_the_template_switches_off(history, closed):
    """Templates that open each answer with closed reasoning, which finished answers lack, as DeepSeek's and Qwen's."""
    silent = tokenizer(history.replace("<assistant>{% endif %}", f"<assistant>{closed}{{% endif %}}"))
    before = silent.apply_chat_template(TALK[1:2], add_generation_prompt=True)["input_ids"]
    assert NO_THINK in before
    expected = ([*before, *ids(3), EOS], [NO] * len(before) + [*ids(3), EOS])
    assert listed(both(read_examples([{"messages": TALK[1:3]}] * 2, silent, 64))) == [expected] * 2


@pytest.mark.parametrize("generated", [False, None])
def test_an_end_of_turn_that_is_not_the_eos_token_ends_the_response(generated):
    """Generation stops there (Gemma's `<end_of_turn>`, Llama's `<|eot_id|>`): the line after it has no loss."""
    chat = tokenizer(CHAT)
    chat.eos_token = "[PAD]"
    row = {"prompt": TALK[1:2], "response": TALK[2:3], "cut_off": generated}
    assert [example.input_ids.tolist()[-2:] for example in both(read_examples([row] * 2, chat, 64))] == [
        [*ids(3), EOS]
    ] * 2


@pytest.mark.parametrize("cut_off", [True, False])
def test_generated_responses_are_scored_as_they_are(cut_off):
    """White space and an unfinished thought included; fine-tuning leaves those out that were cut off."""
    thinking = tokenizer(FORGETFUL)
    row = {"prompt": TALK[1:2], "response": [{"role": "assistant", "content": "\nw3 <think> w4\n"}], "cut_off": cut_off}
    said = [LINE, *ids(3), THINK, *ids(4), LINE, *([] if cut_off else [EOS])]
    before = encode_prompt(thinking, TALK[1:2])
    assert listed(both(read_examples([row] * 2, thinking, 64))) == [([*before, *said], [NO] * len(before) + said)] * 2
    written = {**row, "response": [{"role": "assistant", "content": "w3 </think> w4"}], "cut_off": None}
    kept = conversations([row, written], thinking)
    assert kept.column_names == ["prompt", "completion", *([] if cut_off else ["cut_off"])]
    made = _encoded(kept[:], list(range(len(kept))), tokenizer=thinking, length=64, name="rows")["input_ids"]
    answers = [said, [*ids(3), NO_THINK, *ids(4), EOS]][cut_off:]
    assert made == [[*before, *answer] for answer in answers]


def test_a_response_ends_where_generation_stops():
    """At the end of turn, which need not be the tokenizer's `eos_token`; a generated one at the token that ended it."""
    chat = tokenizer(CHAT.replace("[EOS]", "[PAD]"))
    [pad] = chat("[PAD]")["input_ids"]
    row = {"prompt": TALK[1:2], "response": [{"role": "assistant", "content": "w3"}]}
    endings = [({}, pad), ({"cut_off": False}, pad), ({"cut_off": False, "end": "[EOS]"}, EOS)]
    rows = [row | ending for ending, _ in endings]
    answers = [[*ids(3), last] for _, last in endings]
    assert [[n for n in labels if n != NO] for _, labels in listed(both(read_examples(rows, chat, 64)))] == answers
    kept = conversations(rows, chat)
    made = _encoded(kept[:], list(range(3)), tokenizer=chat, length=64, name="rows")["labels"]
    assert [[n for n in labels if n != NO] for labels in made] == answers
    assert conversations([row | {"end": "2 pm"}], chat).column_names == ["prompt", "completion"]


def test_an_answer_without_the_reasoning_that_the_template_opens_is_refused():
    for template in (THINKING, FORGETFUL):
        with refused("rows row 1: .* opens each answer with '<think>'.*'</think>'.*generate-responses"):
            read_examples([{"messages": TALK[1:3]}] * 2, tokenizer(template), 64)
    with refused("row 1: .*rewrites the response"):
        silent = CHAT.replace("{{ m['content'] }}", "{{ m['content'] if m['role'] == 'user' else '' }}")
        read_examples([{"messages": TALK[1:3]}] * 2, tokenizer(silent), 64)


def test_pairs_that_are_too_long_are_refused_and_never_cut(tmp_path):
    rows = [pair((1,), range(2, 2 + n)) for n in (6, 7, 3, 8)]  # 8, 9, 5 and 10 tokens
    path = jsonl(tmp_path / "a.jsonl", *rows)
    for longest in (10, None):
        assert max(map(len, both(read_examples(path, tokenizer(), longest)))) == 10
    with refused(None, "a.jsonl line 2 has 9", "a.jsonl line 4 has 10"):
        read_examples(path, tokenizer(), 64, sequence_length=8)


def test_nothing_is_deduplicated():
    found = read_examples([PAIRS[0]] * 10, tokenizer(), 64)
    assert (len(found.train), len(found.heldout)) == (8, 2)
    assert found.meta["warnings"] == ["2 of the 2 held-out examples are also among those to fit on."]


def chat(*contents):
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


REFUSED = [
    ([], {}, "rows"),
    ([{"image": "a.png", "text": "w1 w2"}] * 2, {}, "rows row 1 holds an image ('image'), and `skip` reads text alone"),
    (["", " "], {}, "texts"),
    (["w1 w2 w3"], {}, "texts"),
    ([PAIRS[0]], {}, "rows"),
    (7, {}, "int"),
    (PAIRS, {"limit": 0}, "limit"),
    (PAIRS, {"sequence_length": 65}, "64 positions"),
    (PAIRS, {"vocab_size": 20}, "tokenizer"),
    ([PAIRS[0], {"text": "w1 w2"}], {}, "rows row 2"),
    ([PAIRS[0], pair((1,), ())], {}, "rows row 2 has no response"),
    ([chat("w1", "w2"), chat("w1")], {"template": CHAT}, "rows row 2 has no response"),
    ([chat("w1", "w2"), chat("w1", "", "w3", "w4")], {"template": CHAT}, "row 2 has an empty response, message 2"),
    ([chat("w1", "w2"), chat(" ", "w2")], {"template": CHAT}, "rows row 2 has an empty prompt"),
    ([PAIRS[0], {"prompt": " ", "response": "w2"}], {}, "rows row 2 has an empty prompt"),
    ([{"messages": TALK}] * 2, {"template": COUNTING}, "rows row 1"),
    ([{"messages": TALK[1:]}, {"messages": TALK}], {"template": STRICT}, "rows row 2"),
    ([{"messages": TALK}] * 2, {}, "chat template"),
    ([{"messages": TALK[1:]}] * 2, {"template": "{{ messages[0]['role'].__class__.__mro__ }}"}, "rows row 1"),
    ([{"messages": TALK[1:]}] * 2, {"template": "{% for n in range(10 ** 9) %}{{ n }}{% endfor %}"}, "rows row 1"),
]


@pytest.mark.parametrize(("data", "options", "name"), REFUSED)
def test_bad_data_and_settings_are_refused(data, options, name):
    with refused(None, name) as caught:
        read_examples(data, tokenizer(options.pop("template", None)), 64, **options)
    assert len(str(caught.value)) < 500


# --- text -------------------------------------------------------------------------------------------------------------


def test_windows_of_text(tmp_path):
    rows = [{"text": words(*range(n))} for n in (7, 1, 4, 9)]
    found = read_examples(jsonl(tmp_path / "a.jsonl", *rows), tokenizer(), 4)
    assert [(e.document, e.input_ids.tolist(), e.labels.tolist()) for e in both(found)] == [
        (0, ids(0, 1, 2, 3), [NO, *ids(1, 2, 3)]),
        (0, ids(4, 5, 6), [NO, *ids(5, 6)]),
        (2, ids(0, 1, 2, 3), [NO, *ids(1, 2, 3)]),
        (3, ids(0, 1, 2, 3), [NO, *ids(1, 2, 3)]),
        (3, ids(4, 5, 6, 7), [NO, *ids(5, 6, 7)]),  # the ninth token has nothing before it
    ]
    texts = [row["text"] for row in rows]
    assert read_examples(texts, tokenizer(), 4).meta["hash"] == found.meta["hash"]
    alpaca = [{"instruction": "w1", "input": "", "output": "w2", **row} for row in rows]
    assert listed(both(read_examples(alpaca, tokenizer(), 4))) == listed(both(found))
    assert open_source(alpaca).kind == "text"  # as `measure` reads them
    framed = both(read_examples(texts, tokenizer(bos=True), 64, sequence_length=4))
    assert [len(e) for e in framed] == [4, 4, 2, 4, 4, 4, 2]


def test_labels_that_are_not_used_are_said():
    rows = [{"text": words(*range(i, i + 4)), "label": i % 2} for i in range(10)]
    unused = "The labels of rows are not used: every token of the text is predicted."
    assert read_examples(rows, tokenizer(), 64).meta["warnings"] == [unused]
    bare = [{"text": row["text"]} for row in rows]
    assert read_examples(bare, tokenizer(), 64).meta["warnings"] == []
    source = open_source(rows)
    options = {"max_sequences": 10, "sequence_length": 8}
    for task, noted in (("causal-lm", True), ("masked-lm", True), ("text-classification", False)):
        found = prepare(source, task=task, tokenizer=tokenizer(), **options).warnings
        assert any("labels of rows are not answers of this model" in line for line in found) is noted, task
    plain = prepare(open_source(bare), task="causal-lm", tokenizer=tokenizer(), **options).warnings
    assert not any("labels" in line for line in plain)


def test_a_limit_takes_windows_of_the_whole_corpus():
    own, novels = train_tokenizer(builtin_texts("heldout")[:1], vocab_size=400), builtin_texts("heldout")
    builtin = read_examples("corpus:builtin", own, 128, limit=100)
    assert (builtin.meta["name"], builtin.meta["sequence_length"]) == ("corpus:builtin/heldout", 128)
    assert all(any(own.decode(e.input_ids) in novel for novel in novels) for e in both(builtin))
    texts = [words(*[number] * length) for number, length in enumerate((9000, 2000, 600, 400))]
    found = both(read_examples(texts, tokenizer(), 64, limit=100, sequence_length=8))
    shares = [sum(e.document == number for e in found) / 100 for number in range(4)]
    assert shares == pytest.approx([0.75, 0.167, 0.05, 0.033], abs=0.06)  # by length; 0.25 each by document
    assert all(set(e.input_ids.tolist()) == set(ids(e.document)) for e in found), "contiguous within a document"


# --- held out ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "seed"), [(2, 0), (13, 1), (60, 0)])
def test_a_seeded_fifth_is_held_out(count, seed):
    rows = [pair((i,), (i + 1,)) for i in range(count)]
    found = read_examples(rows, tokenizer(), 64, seed=seed)
    assert len(found.heldout) == max(1, round(count / 5))
    assert sorted(e.document for e in (*found.train, *found.heldout)) == list(range(count))
    for part in (found.train, found.heldout):
        assert [e.document for e in part] == sorted(e.document for e in part)
        assert all(e.input_ids.tolist() == [*ids(e.document), LINE, *ids(e.document + 1)] for e in part)
    again = read_examples(rows, tokenizer(), 64, seed=seed)
    assert again.meta == found.meta
    assert listed(again.heldout) == listed(found.heldout)


def test_documents_are_held_out_whole():
    texts = [words(*[i] * 30) for i in range(20)]
    found = read_examples(texts, tokenizer(), 4)
    train, heldout = ({e.document for e in part} for part in (found.train, found.heldout))
    assert not train & heldout
    assert len(heldout) == 4
    chats = read_examples([{"messages": TALK}] * 5, tokenizer(CHAT), 64)
    assert [len(chats.train), len(chats.heldout)] == [8, 2]


def test_seeds_and_contents_have_their_own_hash():
    rows = [pair((i,), (i + 1,)) for i in range(30)]
    first = read_examples(rows, tokenizer(), 64)
    others = [(rows, {"seed": 1}), (rows[:-1], {}), (rows, {"heldout": rows[:3]}), (rows[:3], {"heldout": rows})]
    seen = [first.meta["hash"], *(read_examples(data, tokenizer(), 64, **more).meta["hash"] for data, more in others)]
    seen.append(read_examples(rows, tokenizer(bos=True), 64).meta["hash"])
    assert len(set(seen)) == len(seen)
    json.dumps(first.meta, allow_nan=False)


@pytest.mark.parametrize(
    ("kind", "named"),
    [("one long text", "pieces of text"), ("rows of text", "documents"), ("pairs", "rows")],
)
def test_units_are_named_as_they_are_cut(tmp_path, kind, named):
    """One text file is one document, so what it is cut into has another name."""
    paragraphs = [words(*[number % 9 + 1] * 1000) for number in range(60)]
    data = tmp_path / "text.txt"
    data.write_text("\n\n".join(paragraphs))
    if kind != "one long text":
        rows = [{"text": text} for text in paragraphs] if kind == "rows of text" else PAIRS * 4
        data = jsonl(tmp_path / "rows.jsonl", *rows)
    found = read_examples(str(data), tokenizer(), 64)
    assert units(found.meta) == named
    told = found.meta["heldout"]
    assert told["clusters"] == len({example.document for example in found.heldout}) > 1
    assert told["documents"] == (1 if kind == "one long text" else told["clusters"])
    if kind == "one long text":
        (record,) = open_source(str(data)).records
        assert record.text == data.read_text()


PAIRS_OF_TEXT = [{"prompt": f"w{number}", "response": "w1 w2"} for number in range(6)]


def test_a_source_of_which_the_limit_reads_one_row_is_not_said_to_hold_one():
    """Six rows each: the limit, of which two sources have a share, is what leaves one."""
    for data, limit in ((PAIRS_OF_TEXT, 1), (Mixture((PAIRS_OF_TEXT, PAIRS_OF_TEXT)), 1)):
        with refused("^1 row was read of .*--max-sequences.*one row: none can be held out.*Raise the limit"):
            read_examples(data, tokenizer(), 64, limit=limit)
    with refused("holds one row, so none can be held out"):
        read_examples(PAIRS_OF_TEXT[:1], tokenizer(), 64)
    with refused("holds one row, so none can be held out"):
        read_examples(PAIRS_OF_TEXT[:1], tokenizer(), 64, limit=2)
    assert len(read_examples(PAIRS_OF_TEXT, tokenizer(), 64, limit=2).heldout) == 1
