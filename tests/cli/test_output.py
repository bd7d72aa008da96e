"""What the program prints: JSON, choices, completion, the first line, bars and lines, the advice after Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cli.conftest import shell
from fulldepth.cli import options, program
from fulldepth.core import bars, console
from fulldepth.core.shell import arguments, same_model
from fulldepth.results import DOCUMENT, Finding, Results, tabulate
from fulldepth.settings.bench import BenchSettings
from fulldepth.settings.compare import CompareSettings
from fulldepth.settings.measure import MeasureSettings
from fulldepth.settings.search import ExportSettings, SearchSettings
from fulldepth.settings.train import TrainSettings
from fulldepth.skip.exports.formats import FORMATS
from json_files import read_json

COMMANDS = {
    "measure": MeasureSettings,
    "compare": CompareSettings,
    "train": TrainSettings,
    "skip search": SearchSettings,
    "skip apply": ExportSettings,
    "skip bench": BenchSettings,
}


@pytest.fixture
def two(tmp_path):
    """Two measured folders whose warnings mention a difference."""
    folders = []
    for name, value in (("a", 0.25), ("b", 0.5)):
        rows = [("displacement", "residual", layer, None, "mean", value * layer, 9, "1") for layer in (1, 2)]
        rows.append(("jump_rate", "residual", 2, None, "value", value, 9, "%"))
        model = {"name": name, "num_layers": 2, "dtype": {"a": "float32", "b": "bfloat16"}[name]}
        meta = {"kind": "measure", "model": model, "data": {"hash": "d"}}
        finding = {"value": value, "unit": "%", "sentence": f"It is {value}."}
        folders.append(Results(tabulate(rows), {**meta, "headline": {"zeta_L": finding}}).save(tmp_path / name))
    return folders


def test_home_in_paths(main, two, tmp_path, monkeypatch):
    """`~` in quotes, and after `=`, is the home folder for every path, as it is for libraries that write files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, out, err = main("compare", *(f"~/{folder.name}" for folder in two), "--output=~/c")
    assert code == 0, err
    assert out.splitlines()[-1] == f"Page: {tmp_path / 'c' / 'report.html'}"
    assert not Path("~").exists()
    shown = options.at_home({"model": "~/m", "data": Path("~"), "tokens": ["~/t", "~x", 1], "prompt": "~ about"})
    home = {"model": f"{tmp_path}/m", "data": tmp_path, "tokens": [f"{tmp_path}/t", "~x", 1], "prompt": "~ about"}
    assert shown == home


@pytest.mark.parametrize(
    ("finding", "shown"),
    [
        (Finding(51_234.56, "tokens/s", ""), "51,235 tokens/s"),
        (Finding(9_999.96, "1", "", interval=(1234.5, 20_000.0)), "10,000 (1,234 to 20,000)"),
        (Finding(1 / 30, "1", "", standard_error=1 / 300), "0.03333 ± 0.0033"),
    ],
)
def test_numbers_on_the_console_have_no_exponent(capsys, finding, shown):
    console.finish(Results(tabulate([]), {"headline": {"speed": finding.document()}}))
    assert re.split(r" {2,}", capsys.readouterr().out.strip())[1] == shown


def test_hidden_files_make_no_folder_of_something_else_a_result_folder(main, two, tmp_path):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / ".DS_Store").write_text("")
    assert main("compare", *two, "--output", folder)[0] == 0
    other = tmp_path / "other"
    other.mkdir()
    for name in (".gitignore", "thesis.tex"):
        (other / name).write_text("")
    code, _, err = main("compare", *two, "--output", other)
    assert code == 2
    assert "something else (thesis.tex)" in " ".join(err.split())


def test_json_is_the_headline_and_nothing_else(main, two, tmp_path):
    code, out, err = main("compare", *two, "--output", tmp_path / "c", "--json")
    assert code == 0, err
    assert json.loads(out) == read_json(tmp_path / "c" / DOCUMENT)["headline"]
    assert "Page: " in err
    assert "Note: " in err
    code, plain, _ = main("compare", *two, "--output", tmp_path / "d")
    assert plain.splitlines()[-1] == f"Page: {tmp_path / 'd' / 'report.html'}"
    assert "zeta_L:b" in plain  # the numbers of single models are printed, too
    assert " 0.25 %" in plain
    code, out, err = main("compare", two[0], tmp_path / "absent", "--output", tmp_path / "e", "--json")
    assert (code, out) == (2, "")


def test_json_survives_a_verb_that_prints(main, monkeypatch, two, tmp_path):
    from fulldepth.results import compare

    def loud(*arguments, **named):
        print("a library says something")
        return compare(*arguments, **named)

    monkeypatch.setattr("fulldepth.results.compare", loud)
    _, out, err = main("compare", *two, "--output", tmp_path / "c", "--json")
    assert json.loads(out) == Results.load(tmp_path / "c").headline
    assert "a library says something" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_choice_and_the_shell_completes_it(main, command):
    text = " ".join(re.sub(r"[│╭╰╮╯─]", " ", main(*command.split(), "--help")[1]).split())
    settings = COMMANDS[command]
    for name in (name for chosen in settings.options.values() for name in chosen):
        field = settings.model_fields[name]
        for choice in options._choices(field.annotation):
            about = text[text.index(f"--{name.replace('_', '-')} ") :][:900]
            assert re.search(rf"\b{choice}\b", about), f"{command} --{name} does not list {choice}"


def test_help_names_every_format(main):
    text = main("skip", "apply", "--help")[1]
    assert all(name in text for name in FORMATS)


def test_completion_knows_choices_and_loads_no_torch():
    program = (
        "import os, sys\n"
        "from fulldepth.cli import main\n"
        "sys.argv = ['fulldepth']\n"
        "try:\n    main()\n"
        "except SystemExit:\n    assert not {'torch', 'pandas', 'plotly'} & set(sys.modules)\n"
    )
    for words, expected in {
        "measure m --token-policy c": ["cls"],
        "train tiny-tr": ["tiny-tree", "tiny-tree-cr"],
    }.items():
        environment = {"COMP_WORDS": f"fulldepth {words}", "COMP_CWORD": str(len(words.split()))}
        environment = {**os.environ, "_FULLDEPTH_COMPLETE": "complete_bash", **environment}
        done = shell(sys.executable, "-c", program, env=environment)
        assert done.stdout.split() == expected, done.stderr


MISTAKES = {
    "./absent": ["measure", "./absent", "--data", "d", "--output", "o"],
    "absent.jsonl": ["exit", "m", "--data", "absent.jsonl", "--output", "o"],
    "/absent.gguf": ["skip", "bench", "m", "/absent.gguf", "--output", "o"],
    "plan.json": ["skip", "heal", "plan.json", "m", "--data", "d", "--output", "o"],
    "notes.txt": ["measure", "m", "--data", "d", "--output", "foreign"],
}
"""Part of the message -> the command with that mistake."""


def test_ordinary_mistakes_are_found_before_torch_is_imported(main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()
    monkeypatch.setattr("fulldepth.core.console.loading", lambda: pytest.fail("torch is imported"))
    for words, command in MISTAKES.items():
        code, _, error = main(*command)
        assert code == 2
        assert words in error
    assert [path.name for path in tmp_path.rglob("*")] == ["foreign", "notes.txt"]


RIGHT = {
    "measure": ["measure", "m", "--data", "d", "--output", "o"],
    "train": ["train", "tiny-llama", "--output", "o"],
    "search": ["skip", "search", "m", "--data", "d", "--output", "o"],
    "curve": ["skip", "curve", "m", "--data", "d", "--output", "o"],
    "bench": ["skip", "bench", "m", "e", "--output", "o"],
}


def test_settings_are_checked_and_a_line_is_printed_before_torch_is_imported(tmp_path):
    """An import of torch ends the command with 7: right settings reach it after the line, wrong ones never."""
    program = f"""
import json, sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise SystemExit(7)
sys.meta_path.insert(0, Stop())
from fulldepth.cli import main
for command in {list(RIGHT.values())!r}:
    for wrong in ([], ["--set", "sed=1"]):
        sys.argv = ["fulldepth", *command, *wrong]
        try:
            main()
        except SystemExit as leaving:
            print(leaving.code, file=sys.stderr)
"""
    done = shell(sys.executable, "-c", program, cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if not line.startswith("... and ")]
    one = ["Loading...", "7", "Error: Unknown setting 'sed'.", "2"]
    assert [line.partition(" Did you mean")[0].partition(" Available")[0] for line in said] == one * len(RIGHT)


def test_a_bar_shows_its_remaining_time_in_80_columns(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(bars, "Console", lambda **_: Console(file=screen, force_terminal=True, width=80))
    with bars.watching() as watcher:
        watcher.begin("Measuring a-checkpoint-with-a-very-long-name-that-nobody-can-read-in-one-line", 65_536)
        watcher.advance(60_001)
    last = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", screen.getvalue()).strip().splitlines()[-1]
    assert re.fullmatch(r"Measuring \S+… \S+ +60001/65536 \d:\d\d:\d\d \d:\d\d:\d\d left ?", last), last
    assert len(last) <= 80


def test_a_log_file_gets_lines_at_growing_intervals():
    now, lines = [0.0], []
    watcher = bars.LogLines(lines.append, lambda: now[0]).watcher()
    watcher.begin("Training", 3600)
    for _ in range(3600):
        now[0] += 1.0
        watcher.advance(1)
    assert lines[0] == "Training: 15 of 3,600, 0:00:15 elapsed, 0:59:45 left"
    assert lines[-1] == "Training: 3,600 of 3,600, 1:00:00 elapsed"
    assert 30 < len(lines) < 60
    watcher.begin("Short", 2)
    watcher.advance(2)
    assert len(lines) < 60


@pytest.mark.parametrize(("progress", "shown"), [(True, ["said"]), (None, []), (False, [])])
def test_without_a_terminal_progress_is_shown_only_if_it_is_asked_for(capsys, progress, shown):
    with bars.watching(progress) as watcher:
        watcher.begin("Task", 3)
        watcher.say("said")
        watcher.advance(3)
    assert capsys.readouterr().err.splitlines() == shown


@pytest.mark.parametrize(
    ("arguments", "resumable", "expected"),
    [
        (["train", "x", "-o", "a b"], True, "fulldepth train x -o 'a b' --resume"),
        (["train", "x", "--resume"], True, "fulldepth train x --resume"),
        (["skip", "bench"], False, "fulldepth skip bench"),
    ],
)
def test_the_advice_after_an_interruption(monkeypatch, capsys, arguments, resumable, expected):
    monkeypatch.setitem(program.RUNNING, "resumable", resumable)

    def advised(name):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit):
            program._end(130, "Interrupted")
        return capsys.readouterr().err

    assert advised("/bin/fulldepth") == f"Interrupted. Run again: {expected}\n"
    assert f": python -m {expected}\n" in advised(str(Path("fulldepth") / "__main__.py"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert f": torchrun ... -m {expected}\n" in advised("fulldepth")


def test_a_suggested_command_is_printed_as_it_is(capsys):
    """A name may have two spaces in a row."""
    command = "fulldepth skip search 'a  b' --data '#ü=,:%{}\"' --output plan/"
    console.finish(Results(tabulate([]), {"headline": {}, "next": {"why": "go on:", "command": command}}))
    assert capsys.readouterr().out.splitlines()[-1] == f"Next: go on: {command}"


@pytest.mark.parametrize("name", ["plain", "-m", "a  b", 'it\'s "x" #=,:%{}$`!', "~", "ü", "a\nb"])
def test_a_name_in_a_suggested_command_reaches_the_program(name):
    text = f"fulldepth {arguments([name, name])}{same_model({'tokenizer': name, 'revision': None})}"
    there = f"./{name}" if name == "-m" else name
    assert shlex.split(text) == ["fulldepth", there, there, "--tokenizer", there]
    assert not there.startswith("-")
