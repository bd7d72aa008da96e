"""Ctrl-C while a command writes its results: the command in the message works."""

from __future__ import annotations

import os
import shlex
import shutil

import pytest

import fulldepth
from api.test_output_folders import small
from data.conftest import jsonl
from fulldepth import reporting
from fulldepth.results import DOCUMENT, GROUPS, PAGE, TABLE, Results
from skip import word_tokenizer
from skip.word_tokenizer import words


@pytest.mark.parametrize(("moment", "overwrite"), [("document", True), ("document", False), ("page", True)])
def test_the_command_that_is_advised_after_an_interruption_works(main, tmp_path, monkeypatch, moment, overwrite):
    """Ctrl-C before the document of a comparison is renamed, and while its page is made."""
    folders = [small(value).save(tmp_path / f"{value}") for value in (1.0, 2.0)]
    output = tmp_path / "both"
    if overwrite:
        fulldepth.compare([folders[1], folders[0]], output=output)
    replace = os.replace

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    if moment == "document":
        monkeypatch.setattr(os, "replace", lambda a, b: interrupt() if str(b).endswith(DOCUMENT) else replace(a, b))
    else:
        monkeypatch.setattr(reporting, "render", interrupt)
    code, _, err = main("compare", *folders, "--output", output, *(["--overwrite"] if overwrite else []))
    assert code == 130, err
    assert not (output / PAGE).exists(), "the old page stands beside new numbers"
    monkeypatch.undo()
    advised = shlex.split(err.strip().splitlines()[-1].partition(": ")[2])
    code, _, err = main(*advised[1:])
    assert code == 0, err
    found = Results.load(output)
    assert [model["label"] for model in found.meta["models"]] == ["1.0", "2.0"]
    assert (output / PAGE).read_text() == reporting.render(found.table, found.meta)


def test_results_of_an_earlier_call_are_not_what_was_interrupted(main, tmp_path, monkeypatch):
    """A folder of checkpoints has grown since it was measured; Ctrl-C comes before the new one is."""
    for step in (1, 2):
        word_tokenizer.checkpoint(tmp_path / "run" / f"checkpoint-{step}")
    later = tmp_path / "run" / "checkpoint-2"
    later.rename(tmp_path / "later")
    texts = jsonl(tmp_path / "text.jsonl", *({"text": words(*range(n, n + 24))} for n in range(8)))
    reading = ["--data", texts, "--max-sequences", "4", "--sequence-length", "16"]
    arguments = ["measure", tmp_path / "run", "--output", tmp_path / "out", *reading]
    assert main(*arguments)[0] == 0
    (tmp_path / "later").rename(later)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fulldepth.subject.open.open_model", interrupt)
    code, _, err = main(*arguments)
    assert code == 130
    monkeypatch.undo()
    code, _, err = main(*shlex.split(err.strip().splitlines()[-1].partition("Run again: ")[2])[1:])
    assert code == 0, err
    assert sorted(set(Results.load(tmp_path / "out").table.step)) == [1, 2]


FILES = {DOCUMENT, GROUPS, PAGE, TABLE}
COMMANDS = {
    "measure": "measure MODEL --data text.jsonl --max-sequences 4 --sequence-length 16",
    "compare": "compare a b",
    "exit": "exit MODEL --data text.jsonl --max-sequences 4 --sequence-length 16 --repeats 0",
    "generate": "generate MODEL --prompt w3 --no-chat --max-new-tokens 2",
    "skip search": "skip search MODEL --data text.jsonl --blocks 1 --sequence-length 16 --no-fit",
    "skip curve": "skip curve MODEL --data text.jsonl --blocks 1 --sequence-length 16",
    "skip bench": "skip bench MODEL MODEL2 --batches 1 --set contexts=[8] --max-new-tokens 2 --repeats 1",
    "evaluate": "evaluate MODEL --tasks arc_easy_local --task-data . --set bootstrap_iters=10",
    "train": "train run.yaml",
}
"""Command -> a small run of it."""
RECIPE = """
model: {type: llama, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 2, num_attention_heads: 2}
data: {name: text.jsonl, validation_share: 0.3, validation_sequences: 2}
tokenizer: MODEL
steps: 2
eval_every: 2
save_every: 2
warmup_steps: 1
global_batch_size: 2
sequence_length: 16
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two models, texts, questions, two result folders, and a recipe."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("MODEL", "MODEL2"):
        word_tokenizer.checkpoint(folder / name)
    jsonl(folder / "text.jsonl", *({"text": words(*((n + i) % 60 for i in range(24)))} for n in range(24)))
    asked = ({"question": words(n, n + 1), "choices": [words(n + 2), words(n + 5)], "gold": n % 2} for n in range(4))
    jsonl(folder / "arc_easy_test.jsonl", *asked)
    for name, value in (("a", 1.0), ("b", 2.0)):
        small(value).save(folder / name)
    (folder / "run.yaml").write_text(RECIPE)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_interrupted_after_any_file_of_its_results_goes_on_as_advised(
    main, home, tmp_path, monkeypatch, command
):
    """Ctrl-C after each file that is renamed into the folder, and before the first: what is printed ends with 0."""
    monkeypatch.chdir(home)
    arguments, replace = [*shlex.split(COMMANDS[command]), "--output", str(tmp_path / "out")], os.replace
    for moment in range(len(FILES) + 1):
        written = []

        def interrupting(source, target, moment=moment, written=written):
            if moment == 0 and os.path.basename(target) in FILES and not written:
                written.append(target)
                raise KeyboardInterrupt
            replace(source, target)
            if os.path.basename(target) in FILES:
                written.append(target)
                if len(written) == moment:
                    raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", interrupting)
        code, _, said = main(*arguments)
        monkeypatch.setattr(os, "replace", replace)
        if code == 0:
            assert moment > len(written)
            break
        assert code == 130, (moment, said)
        advised = shlex.split(said.strip().splitlines()[-1].partition("Run again: ")[2])
        code, _, said = main(*advised[1:])
        assert code == 0, (moment, written, advised, said)
        found = Results.load(tmp_path / "out")
        assert (tmp_path / "out" / PAGE).read_text() == reporting.render(found.table, found.meta), moment
        shutil.rmtree(tmp_path / "out")
