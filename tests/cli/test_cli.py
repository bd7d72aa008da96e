"""The program: help, version, names that are nearly right, exit codes. What commands do is tested with their rooms."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import fulldepth
from cli.conftest import shell
from fulldepth.core.errors import FulldepthError
from fulldepth.measurement import MeasureSettings
from fulldepth.metrics import METRICS
from refusals import refused

MEASURE = ["measure", "m", "--data", "d", "--output", "o"]
COMMANDS = ["measure", "train", "compare", "report", "demo", "exit", "skip"]


def options_of(help_text):
    """Option -> its help, default included."""
    lines = re.findall(
        r"^│ [* ]? *(--[a-z-]+)\s+(?:-\w\s+|--no-[a-z-]+\s+)?<[^>]*>\s+(.*?)\s*│$", help_text, re.MULTILINE
    )
    return dict(lines)


def test_help_lists_the_commands(main):
    code, out, err = main("--help")
    assert (code, err) == (0, "")
    for command in COMMANDS:
        assert re.search(rf"^│ {command} +\S", out, re.MULTILINE), f"{command} has no line of its own"
    assert "fulldepth demo --output demo-run/" in out


def test_measure_help_gives_the_defaults_of_the_settings(main):
    described = options_of(main("measure", "--help")[1])
    for name, field in MeasureSettings.model_fields.items():
        option = f"--{name.replace('_', '-')}"
        if option not in described or field.default in (None, False) or field.default_factory:
            continue
        default = ",".join(field.default) if isinstance(field.default, list) else field.default
        default = "on" if default is True else default
        assert f"[default: {default}" in described[option], option
    assert f"{', '.join(METRICS)}. [default: all" in described["--measures"]
    length = "[default: 256, or the model's positions if fewer, and whole texts for a classifier]"
    assert length in described["--sequence-length"]


FOLDERS = ["--output", "o"]
VERBS = {
    "train": ("fulldepth.training.train", ["train", "tiny-llama", *FOLDERS], ["--seed", "3"], "seed=3"),
    "train list": (
        "fulldepth.training.train",
        ["train", "tiny-llama", *FOLDERS],
        ["--report-to", "a,b"],
        "report_to=[a, b]",
    ),
    "measure": ("fulldepth.measurement.measure_into", MEASURE, ["--measures", "cka,mmd"], "measures=[cka, mmd]"),
    "skip search": ("fulldepth.skip.search", ["skip", "search", *MEASURE[1:]], ["--given", "3,7"], "given=[3, 7]"),
    "skip curve": ("fulldepth.skip.curve", ["skip", "curve", *MEASURE[1:]], ["--seed", "3"], "seed=3"),
    "skip bench": ("fulldepth.skip.bench", ["skip", "bench", "m", "e", *FOLDERS], ["--batches", "2"], "batches=[2]"),
    "compare": ("fulldepth.results.compare", ["compare", "a", "b", *FOLDERS], ["--depth", "layer"], "depth=layer"),
}
"""Verb -> the function behind it, a command, an option, and the same setting as `key=value`."""


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_and_key_value_mean_the_same_on_every_verb(main, monkeypatch, tmp_path, verb):
    function, command, option, assigned = VERBS[verb]
    calls = []

    def record(*arguments, **named):
        calls.append((arguments, {key: value for key, value in named.items() if key != "watcher"}))
        raise FulldepthError("called")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(function, record)
    other = [option[0], "9" if option[1].isdecimal() else option[1]]
    ways = [option, ["--set", assigned], [*other, "--set", assigned]]
    ways += [[assigned], [*other, assigned]] if verb.startswith("train") else []
    for way in [[], *ways]:
        assert main(*command, *way)[2].strip() == "Error: called"
    plain, *given = calls
    assert all(call == given[0] != plain for call in given)


def test_an_option_of_training_overrides_the_recipe_and_can_switch_off(main, monkeypatch, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("steps: 7\nfsdp: true\nmodel: {hidden_size: 24}\n")
    resolved = []

    def record(*_, settings, **__):
        resolved.append(settings)
        raise FulldepthError("called")

    monkeypatch.setattr("fulldepth.training.train", record)
    for way in ([], ["--steps", "5", "--no-fsdp", "model.num_hidden_layers=2"]):
        main("train", recipe, "--output", tmp_path / "run", *way)
    assert [(s.steps, s.fsdp, s.model.model_extra) for s in resolved] == [
        (7, True, {"hidden_size": 24}),
        (5, False, {"hidden_size": 24, "num_hidden_layers": 2}),
    ]


def test_version(main):
    assert main("--version") == (0, f"fulldepth {fulldepth.__version__}\n", "")
    same = shell(sys.executable, "-m", "fulldepth", "--version")
    assert (same.returncode, same.stdout) == (0, f"fulldepth {fulldepth.__version__}\n")
    script = Path(sys.executable).with_name("fulldepth")
    assert shell(script, "--version").stdout == same.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["measure", "--help"], ["train", "--help"], ["--version"]])
def test_help_loads_no_heavy_library(arguments):
    program = (
        "import sys\n"
        f"sys.argv = ['fulldepth', *{arguments}]\n"
        "from fulldepth.cli import main\n"
        "try:\n    main()\nexcept SystemExit as leaving:\n    assert not leaving.code\n"
        "heavy = {'torch', 'transformers', 'plotly', 'pandas', 'sklearn', 'scipy', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = shell(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("measure m --data d --max-sequence 3", "--max-sequence --max-sequences"),
        ("mesure", "mesure measure"),
        ("measure", "model"),
        ("measure m", "--data"),
        ("measure m --data d --seed x", "--seed integer"),
        ("compare", "folders"),
        ("report /absent/folder", "/absent/folder results.json"),
        ("compare /absent/a", "two"),
        ("demo --blocks 31", "30 31"),
        ("measure m --data d --set sed=1", "sed 'seed'"),
    ],
)
def test_mistakes_end_with_2_and_one_message(main, tmp_path, command, words):
    output = ["--output", tmp_path / "out"] if len(command.split()) > 1 else []
    code, out, err = main(*command.split(), *output)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert all(word.casefold() in err.casefold() for word in words.split()), err
    assert not (tmp_path / "out").exists()
    if err.startswith("Error: "):  # all but mistakes in usage, which the parser frames
        assert len(err.strip().splitlines()) == 1
    else:
        assert "Usage: " in err


@pytest.mark.parametrize("where", ["before", "after"])
def test_debug_shows_the_traceback(main, where):
    command = ["report", "/absent/folder"]
    arguments = ["--debug", *command] if where == "before" else [*command, "--debug"]
    with refused("/absent/folder"):
        main(*arguments)
    assert main(*command)[0] == 2, "it does not stay on"
