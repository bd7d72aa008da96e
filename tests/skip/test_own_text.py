"""The model's own text against the plainest loop, one row at a time, and what happens to damaged and foreign files."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import full_disk
from data.conftest import jsonl
from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.data.conversations import document_start, user_turn
from fulldepth.data.examples import read_examples
from fulldepth.data.mixture import Mixture
from fulldepth.data.opening import open_data
from fulldepth.settings.search import HeldoutSettings
from fulldepth.skip import own_text, search
from fulldepth.skip.own_text import FILE, NOTES, OwnText, with_own_text
from fulldepth.skip.problem import stand_in
from json_files import change_json
from refusals import refused
from skip.test_responses import decoder
from skip.word_tokenizer import ASSISTANT, BOS, CHAT, EOS, TWO_WORDS, USER, tokenizer, words
from tiny_models import build

LENGTH = 30
CHATML = (
    "{% for m in messages %}<user>{{ m['role'] }} {{ m['content'] }} [EOS]{% endfor %}"
    "{% if add_generation_prompt %}<user>assistant {% endif %}"
)
"""Opens and closes every turn with the same tokens; none of them starts a document."""


def subject(template=None, name="llama"):
    """An open model that writes tokens of the vocabulary only."""
    model = decoder(name)
    with torch.no_grad():
        model.get_output_embeddings().weight[90:] = -10.0  # beyond the tokenizer
    return SimpleNamespace(
        model=model,
        tokenizer=tokenizer(template),
        identity={"model": "sha256:" + "a" * 64},
        checkpoint=SimpleNamespace(warnings=[]),
        anatomy=SimpleNamespace(max_positions=64, vocab_size=None),
    )


def settings(rows=6, **changes):
    return HeldoutSettings(**{"max_sequences": rows, "sequence_length": LENGTH, "seed": 3, "batch_size": 4, **changes})


def rows_in(folder):
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def sampled(model, start, limit, ends, seed):
    """The plainest loop: no cache, no batch; token by token the largest of logits plus Gumbel noise."""
    noise = np.random.default_rng(seed)
    found = list(start)
    while len(found) < len(start) + limit:
        logits = model(torch.tensor([found]), use_cache=False).logits[0, -1]
        found.append(int((logits + torch.from_numpy(noise.gumbel(size=len(logits))).to(logits)).argmax()))
        if found[-1] in ends:
            break
    return found[len(start) :]


def test_documents_are_sampled_from_the_token_that_starts_one(tmp_path):
    opened = subject()
    path = with_own_text("own", opened, settings(), tmp_path, Watcher()).sources[0]
    assert path == str(tmp_path / FILE)
    written = {row["number"]: row["text"] for row in rows_in(tmp_path)}
    assert len(written) == 6
    for number, text in written.items():
        alone = sampled(opened.model, [BOS], LENGTH - 1, {EOS}, (3, number, 0))
        body = alone[:-1] if alone[-1] == EOS else alone
        assert text == opened.tokenizer.decode(body)
        assert len(body) >= own_text.LEAST_TOKENS


def test_the_model_writes_the_users_turn_and_answers_it(tmp_path):
    opened = subject(CHAT)
    with_own_text("own", opened, settings(), tmp_path, Watcher())
    rows = rows_in(tmp_path)
    assert len(rows) == 6
    room = LENGTH - 2  # <user> and <assistant>
    ends = {EOS, ASSISTANT}  # the user's turn ends where the answer begins
    for row in rows:
        question = sampled(opened.model, [USER], room // 2, ends, (3, row["number"], 1))
        text = opened.tokenizer.decode(question, skip_special_tokens=True).strip()
        assert row["prompt"] == [{"role": "user", "content": text}]
        asked = opened.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        answer = sampled(opened.model, asked, LENGTH - len(asked), ends, (3, row["number"], 2))
        ended = answer[-1] in ends
        assert row["response"][0]["content"] == opened.tokenizer.decode(answer[:-1] if ended else answer)
        assert row["cut_off"] is not ended
        assert row.get("end") == (opened.tokenizer.decode(answer[-1:]) if ended else None)
    read = read_examples(tmp_path / FILE, opened.tokenizer, LENGTH, seed=0, sequence_length=LENGTH)
    assert len(read.train) + len(read.heldout) == 6


def test_own_chats_have_the_template_beside_pairs_that_are_plain_text(tmp_path):
    opened = subject(CHAT)
    with_own_text("own", opened, settings(), tmp_path, Watcher())
    own = tmp_path / FILE
    pairs = jsonl(tmp_path / "rows.jsonl", *({"prompt": words(n, 2), "response": " " + words(3)} for n in range(6)))
    both = read_examples(None, opened.tokenizer, LENGTH, heldout=f"{own},{pairs}", chat=False).heldout
    alone = read_examples(None, opened.tokenizer, LENGTH, heldout=own).heldout
    alone += read_examples(None, tokenizer(None), LENGTH, heldout=pairs).heldout
    assert [e.input_ids.tolist() for e in both] == [e.input_ids.tolist() for e in alone]
    assert [e.labels.tolist() for e in both] == [e.labels.tolist() for e in alone]


def test_answers_that_grow_when_they_are_read_are_cut_to_the_length(tmp_path):
    opened = subject(CHAT)
    opened.tokenizer = tokenizer(CHAT, vocabulary=TWO_WORDS)
    with_own_text("own", opened, settings(rows=24), tmp_path, Watcher())
    sizes = []
    for row in rows_in(tmp_path):
        asked = opened.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        (message,) = row["response"]
        answer = sampled(opened.model, asked, LENGTH - len(asked), {EOS, ASSISTANT}, (3, row["number"], 2))
        written = answer[:-1] if answer[-1] in (EOS, ASSISTANT) else answer
        text = opened.tokenizer.decode(written)
        whole = opened.tokenizer(text, add_special_tokens=False)["input_ids"]
        ended = answer[-1] in (EOS, ASSISTANT)
        if len(asked) + len(whole) + ended <= LENGTH:
            assert (message["content"], row["cut_off"]) == (text, not ended)
            continue
        cut = opened.tokenizer(message["content"], add_special_tokens=False)["input_ids"]
        assert whole[: len(cut)] == cut
        assert row["cut_off"]
        assert "end" not in row
        sizes.append(len(asked) + len(cut))
    assert sizes, "no answer grew"
    assert max(sizes) <= LENGTH
    read = read_examples(tmp_path / FILE, opened.tokenizer, LENGTH, seed=0, sequence_length=LENGTH)
    assert len(read.train) + len(read.heldout) == 24


def test_rows_do_not_depend_on_the_batch_and_go_on_after_a_kill(tmp_path):
    batches = iter(range(3))

    def kill(done):
        if next(batches) == 2:
            raise KeyboardInterrupt

    whole, halves = tmp_path / "whole", tmp_path / "halves"
    with_own_text("own", subject(CHAT), settings(7, batch_size=7), whole, Watcher())
    with pytest.raises(KeyboardInterrupt):
        with_own_text("own", subject(CHAT), settings(7, batch_size=2), halves, Watcher(advance=kill))
    assert 0 < (done := len(rows_in(halves))) < 7
    with (halves / FILE).open("ab") as file:
        file.write('{"number": 2, "prompt": [{"content": "caf\u00e9'.encode()[:-1])  # half a character
    begun = []
    watcher = Watcher(begin=lambda title, total: begun.append(total))
    with_own_text("own", subject(CHAT), settings(7, batch_size=3), halves, watcher)
    assert (halves / FILE).read_text() == (whole / FILE).read_text()
    assert begun == [7 - done]
    with_own_text("own", subject(CHAT), settings(7), halves, Watcher(begin=lambda *_: pytest.fail("written again")))


def test_a_full_disk_is_named_and_the_text_goes_on(tmp_path, monkeypatch):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    with_own_text("own", subject(CHAT), settings(7), whole, Watcher())
    for batches in (0, 1):
        with full_disk.appending(monkeypatch, after=batches), refused(r"Cannot write .*own\.jsonl: No space left"):
            with_own_text("own", subject(CHAT), settings(7), halves, Watcher())
    with_own_text("own", subject(CHAT), settings(7), halves, Watcher())
    assert (halves / FILE).read_text() == (whole / FILE).read_text()


@pytest.mark.parametrize("moment", ["before the first row", "inside a row", "before the notes"])
def test_a_call_that_ended_in_its_first_batch_leaves_nothing_that_is_refused(moment, tmp_path, monkeypatch):
    """The next call may also have other settings, as the refusal of a row without room for a conversation advises."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    with_own_text("own", subject(CHAT), settings(4), whole, Watcher())

    def kill(self, numbers):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(OwnText, "_rows_of", kill)
        with pytest.raises(KeyboardInterrupt):
            with_own_text("own", subject(CHAT), settings(4), halves, Watcher())
    written = (whole / FILE).read_text()
    ends = {"before the first row": 0, "inside a row": len(written) // 2, "before the notes": len(written)}
    (halves / FILE).write_text(written[: ends[moment]])
    with_own_text("own", subject(CHAT), settings(4), halves, Watcher())
    assert (halves / FILE).read_text() == written
    with refused("no room for a conversation"):
        with_own_text("own", subject(CHAT), settings(4, sequence_length=12), tmp_path / "short", Watcher())
    with_own_text("own", subject(CHAT), settings(4), tmp_path / "short", Watcher())
    assert (tmp_path / "short" / FILE).read_text() == written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / NOTES).unlink(), "is not a file of this model's own text"),
        (lambda folder: (folder / FILE).unlink(), "is missing"),
        (lambda folder: (folder / FILE).write_text("{}\n"), "has changed"),
        (lambda folder: (folder / FILE).write_bytes(b"\xff\xfe"), "has changed"),
        (lambda folder: (folder / FILE).open("a").write('{"text": "w1"}\n'), "has rows that were added"),
        (lambda folder: (folder / NOTES).write_text("{"), "Cannot read"),
        (lambda folder: change_json(folder / NOTES, rows=99), "has changed since it was written"),
        (lambda folder: (folder / NOTES).write_text("[1]"), "own.json"),
    ],
)
def test_damaged_files_are_refused(change, message, tmp_path):
    with_own_text("own", subject(), settings(), tmp_path, Watcher())
    change(tmp_path)
    with refused(message):
        with_own_text("own", subject(), settings(), tmp_path, Watcher())


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"seed": 4}, "seed was 3, is 4"), ({"max_sequences": 5}, "rows was 6"), ({"sequence_length": 20}, "length was")],
)
def test_text_of_other_settings_is_refused(changes, message, tmp_path):
    with_own_text("own:text", subject(CHAT), settings(), tmp_path, Watcher())
    with refused(message):
        with_own_text("own:text", subject(CHAT), settings(**changes), tmp_path, Watcher())
    with refused("kind was 'text', is 'chat'"):
        with_own_text("own", subject(CHAT), settings(), tmp_path, Watcher())


def test_what_cannot_be_written_is_refused(tmp_path):
    encoder = SimpleNamespace(model=build("bert"), tokenizer=tokenizer())
    for given, folder, data, message in (
        (encoder, tmp_path, "own", "BertForMaskedLM cannot write text"),
        (subject(), tmp_path, "own:chat", "no chat template"),
        (subject(), None, "own", "name an output folder"),
        (subject(), tmp_path, "own,own:text", "Give one of"),
        (subject(CHAT), tmp_path, "own", "no room for a conversation"),
    ):
        length = 12 if "room" in message else LENGTH
        with refused(message):
            with_own_text(data, given, settings(sequence_length=length), folder, Watcher())
    with refused("leave out --generate-responses"):
        search("unused", "own", blocks=1, output=tmp_path, responses=3)
    with refused("text that a model writes itself"):
        open_data("own:chat")


def test_a_model_that_writes_nothing_ends_the_search_for_text(tmp_path):
    silent = subject()
    with torch.no_grad():
        silent.model.get_output_embeddings().weight.zero_()
        silent.model.get_output_embeddings().weight[EOS] = (
            1e3 * silent.model(torch.tensor([[BOS]]), output_hidden_states=True).hidden_states[-1][0, -1]
        )
    with refused("Only 0 of 20 texts"):
        with_own_text("own", silent, settings(), tmp_path, Watcher())


def test_a_share_of_a_mixture_is_written_and_read(tmp_path):
    opened = subject(CHAT)
    other = tmp_path / "pairs.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"w{n}", "response": "w1 w2"}) + "\n" for n in range(40)))
    mixed = with_own_text(f"own=3,{other}=1", opened, settings(20), tmp_path, Watcher())
    assert len(rows_in(tmp_path)) == 15
    read = read_examples(mixed, opened.tokenizer, LENGTH, limit=20)
    rows = [*read.train, *read.heldout]
    assert len(rows) == 20
    assert len({row.document for row in rows}) == 20, "units are numbered through"
    assert read.meta["heldout"]["examples"] == 4, "a fifth of each source"
    answers = [row for row in rows if len(row) == 6]  # <user> w7 <assistant> w1 w2 [EOS]
    assert len(answers) >= 5


def test_the_token_that_starts_a_document_does_not_mark_turns():
    assert document_start(tokenizer()) == BOS
    assert document_start(tokenizer(CHAT)) == BOS
    marking = tokenizer(CHATML)
    marking.bos_token = "<user>"
    assert marking.decode([document_start(marking)]) == "[PAD]"
    assert user_turn(tokenizer(CHAT)) == ("<user>", " <assistant>")
    with refused("rewrites the user's turn"):
        user_turn(tokenizer("{% for m in messages %}<user>{{ m['content'] | upper }}{% endfor %}"))


def test_mixtures_are_split_at_commas(tmp_path):
    assert Mixture.of("a.jsonl").sources == ("a.jsonl",)
    assert Mixture.of(["w1, w2"]).sources == (["w1, w2"],)
    assert Mixture.of("own, b.txt") == Mixture(("own", "b.txt"))
    assert Mixture.of("own=3,b=c.txt=1") == Mixture(("own", "b=c.txt"), (0.75, 0.25))
    odd = tmp_path / "a,b=2.txt"
    odd.write_text("w1")
    assert Mixture.of(str(odd)).sources == (str(odd),)
    assert Mixture.of("a,b").limits(9) == [5, 4]
    assert Mixture.of("a,b,c").limits(8) == [3, 3, 2]
    assert Mixture.of("a=1,b=1,c=1000").limits(100) == [1, 1, 100]
    assert Mixture.of("a=1,b=9").limits(9) == [1, 8]
    assert Mixture.of("a,b").limits(None) == [None, None]
    for given, message in (
        ("a,,b", "empty source"),
        ("a,a", "names a source twice"),
        ("a=1,b", "Only some of the sources"),
        ("a=0,b=1", "expected a number above 0"),
        ("a=1e999,b=1", "expected a number above 0"),
        ("a=1.2.3,b=1", "expected a number above 0"),
    ):
        with refused(message):
            Mixture.of(given)
    with pytest.raises(FulldepthError, match="--max-sequences"):
        Mixture.of("a=1,b=1").limits(None)


def test_a_source_with_fewer_rows_than_its_share_is_said():
    pairs = [{"prompt": f"w{n}", "response": "w1"} for n in range(6)]
    read = read_examples(Mixture((pairs, [*pairs, *pairs])), tokenizer(), 64, limit=20)
    assert read.meta["warnings"][:1] == ["rows has 6 of the 10 rows that its share of the data asks for."]


def test_what_cannot_be_written_is_refused_before_the_model_writes(tmp_path):
    """Too short rows, rows beyond the model's positions, and shares of an unknown number of rows."""
    with refused("Set a larger --sequence-length"):
        with_own_text("own", subject(), settings(sequence_length=8), tmp_path, Watcher())
    with refused("64 positions"):
        with_own_text("own", subject(), settings(sequence_length=65), tmp_path, Watcher())
    with refused("--max-sequences"):
        with_own_text("own=0.5,a.jsonl=0.5", subject(), settings(rows=None), tmp_path, Watcher())
    assert not list(tmp_path.iterdir())


def test_other_data_and_the_search_are_checked_before_the_model_writes(tmp_path, monkeypatch):
    """Each of them is refused only once there is text to search on."""
    monkeypatch.setattr(OwnText, "write", lambda *_: pytest.fail("written"))
    one_row = jsonl(tmp_path / "one.jsonl", {"text": "w1 w2 w3 w4"})
    model = decoder("llama")
    options = {"tokenizer": tokenizer(), "max_sequences": 20, "sequence_length": LENGTH, "progress": False}
    for data, changes, message in (
        ("own", {"heldout": "nobody/nothing"}, "nobody/nothing"),
        (f"own,{one_row}", {}, "holds one document"),
        ("own", {"blocks": 40}, "Cannot remove 40 blocks"),
        ("own", {"blocks": None}, "How much to remove"),
    ):
        with refused(message):
            search(model, data, output=tmp_path / "out", **{"blocks": 1, **options, **changes})
    single = SimpleNamespace(tokenizer=tokenizer(vocabulary={"[UNK]": 0}), anatomy=SimpleNamespace(vocab_size=None))
    assert [len(row) for row in stand_in(single).train] == [8, 8]
    single.anatomy.vocab_size = 0
    with refused("Wrong tokenizer"):
        stand_in(single)
    assert not (tmp_path / "out" / FILE).exists()


def test_a_template_that_writes_nothing_before_the_user_starts_with_a_document(tmp_path):
    opened = subject("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    with_own_text("own:chat", opened, settings(), tmp_path, Watcher())
    for row in rows_in(tmp_path):
        question = sampled(opened.model, [BOS], (LENGTH - 1) // 2, {EOS}, (3, row["number"], 1))
        text = opened.tokenizer.decode(question, skip_special_tokens=True).strip()
        assert row["prompt"] == [{"role": "user", "content": text}]


@pytest.mark.parametrize("template", ["{% if messages[1] %}{{ raise_exception('one turn') }}{% endif %}", "{% for"])
def test_documents_need_no_chat_template_that_works(template, tmp_path):
    opened = subject(template)
    with_own_text("own:text", opened, settings(), tmp_path, Watcher())
    without = tmp_path / "without"
    with_own_text("own:text", subject(), settings(), without, Watcher())
    assert rows_in(tmp_path) == rows_in(without)
