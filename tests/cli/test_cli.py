"""The program: help, version, names that are nearly right, exit codes. What commands do is tested with their rooms."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fulldepth
from fulldepth.errors import FulldepthError
from fulldepth.measurement import MeasureSettings

MEASURE = ["measure", "m", "--data", "d", "--output", "o"]
COMMANDS = ["measure", "train", "compare", "report", "demo", "exit", "skip"]


def shell(*arguments):
    """The program as another process."""
    return subprocess.run(
        [*map(str, arguments)], capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL
    )


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
    assert "[default: all" in described["--measures"]
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
    ("arguments", "words"),
    [
        ([*MEASURE, "--max-sequence", "3"], ["--max-sequence", "--max-sequences"]),
        (["mesure"], ["mesure", "measure"]),
        (["measure"], ["model"]),
        (["measure", "m", "--output", "o"], ["--data"]),
        ([*MEASURE, "--seed", "x"], ["--seed", "integer"]),
        (["compare"], ["folders"]),
    ],
)
def test_wrong_usage_ends_with_2_and_a_hint(main, arguments, words):
    code, out, err = main(*arguments)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    for word in words:
        assert word.casefold() in err.casefold(), err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "/absent/folder"], ["/absent/folder", "results.json"]),
        (["compare", "/absent/a", "--output", "{out}"], ["two"]),
        (["demo", "--blocks", "31", "--output", "{out}"], ["30", "31"]),
        (["measure", "m", "--data", "d", "--output", "{out}", "--set", "sed=1"], ["sed", "'seed'"]),
    ],
)
def test_mistakes_end_with_2_and_one_message(main, tmp_path, arguments, words):
    code, out, err = main(*(part.format(out=tmp_path / "out") for part in arguments))
    assert (code, out) == (2, "")
    said = err.strip().splitlines()
    assert len(said) == 1, err
    assert said[0].startswith("Error: ")
    for word in words:
        assert word in said[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["before", "after"])
def test_debug_shows_the_traceback(main, where):
    command = ["report", "/absent/folder"]
    arguments = ["--debug", *command] if where == "before" else [*command, "--debug"]
    with pytest.raises(FulldepthError, match="/absent/folder"):
        main(*arguments)
    assert main(*command)[0] == 2, "it does not stay on"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FulldepthError("got x, expected y"), "got x, expected y"),
        (torch.OutOfMemoryError("CUDA out of memory."), "Out of memory"),
        (None, "Out of memory"),
        (PermissionError(13, "Permission denied", "/there"), "/there"),
        (FulldepthError("markup [red]stays[/red] as it is [/]"), "markup [red]stays[/red] as it is [/]"),
    ],
)
def test_what_goes_wrong_inside_a_command(main, monkeypatch, error, words):
    def fail(*_, **__):
        if error is None:
            torch.empty(1 << 55)
        raise error

    monkeypatch.setattr("fulldepth.results.report", fail)
    code, out, err = main("report", "somewhere")
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_the_help_names_every_measure(main):
    from fulldepth.metrics import METRICS

    described = options_of(main("measure", "--help")[1])
    assert f"{', '.join(METRICS)}. [default" in described["--measures"]
