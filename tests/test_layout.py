"""The shape of the source: who may import whom, and the limits that keep it readable."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

import fulldepth
from places import ROOT

SOURCE = ROOT / "src" / "fulldepth"

NOUNS = {"architectures", "losses", "execution", "data", "results", "hf", "metrics"}
VERBS = {"measurement", "training", "skip", "exit", "evaluation"}

ARROWS = {
    "core": set(),
    "settings": set(),
    "reporting": set(),
    "metrics": set(),
    "architectures": set(),
    "data": set(),
    "hf": {"architectures", "metrics"},
    "execution": {"architectures", "data", "hf", "metrics"},
    "subject": {"architectures", "execution", "data", "hf", "metrics", "settings"},
    "losses": {"execution", "hf", "metrics"},
    "results": {"reporting", "settings"},
    **dict.fromkeys(VERBS, NOUNS | {"settings", "subject"}),
    "cli": VERBS | {"data", "hf", "results", "settings"},
    "__main__": {"cli"},
    "__init__": NOUNS | VERBS | {"cli", "reporting", "settings", "subject"},
}
"""Package -> the packages that it may import, besides itself and `core`."""
EXCEPTIONS = {"fulldepth.skip.heal": {"training"}, "fulldepth.skip.tasks": {"evaluation"}}
"""Module -> further packages, of which it imports only what their `__init__` shows: healing trains a model, and reads
tasks.
"""
LAZY = {SOURCE / "__init__.py", *(SOURCE / "cli").glob("*.py")}
"""May import rooms of ours when called, so that `--help` and `import fulldepth` need no torch."""
OPTIONAL = {"bitsandbytes", "gguf", "lm_eval", "peft", "pycocotools", "torchao", "trl", "vllm", "xllamacpp"}
"""Extras that a user may not have: imported where they are used."""

WITHOUT_TORCH = ["", ".cli", ".core.errors", ".core.files", ".settings", ".reporting", ".results"]
UNITS = {"1", "%", "nats", "tokens", "layers"}

LIMITS = {"src": (600, 100), "tests": (600, 100)}
"""Folder -> lines of a file, lines of a function."""


def files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def parse(path):
    return ast.parse(path.read_text(), str(path))


def module(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in files("src")}


def imports(path):
    """Every import statement with the full name of each module that it loads."""
    package = module(path) if path.name == "__init__.py" else module(path).rpartition(".")[0]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                yield node, inner if inner in MODULES else origin


def room(name):
    return name.split(".")[1] if "." in name else "__init__"


@pytest.mark.parametrize("path", MODULES.values(), ids=MODULES)
def test_rooms_import_only_along_the_arrows(path):
    here = room(module(path))
    assert here in ARROWS, f"{here} is a new room: draw its arrows here and in docs/architecture.md"
    for node, name in imports(path):
        if name.split(".")[0] != "fulldepth":
            continue
        if name == "fulldepth":
            plain = [alias.name for alias in node.names if f"fulldepth.{alias.name}" not in MODULES]
            assert plain == ["__version__"], f"{path}:{node.lineno}: import from a room"
            continue
        there = room(name)
        more = EXCEPTIONS.get(module(path), set())
        assert there in ARROWS[here] | more | {here, "core"}, f"{path}:{node.lineno}: {here} must not import {there}"
        if there in more:
            source = getattr(node, "module", None)  # `fulldepth.skip.bench` is a function and the module that holds it
            assert source == f"fulldepth.{there}", f"{path}:{node.lineno}: only what {there} shows in its __init__"
            shown = importlib.import_module(source).__all__
            assert {alias.name for alias in node.names} <= {*shown}, f"{path}:{node.lineno}: {there} does not show it"


def test_every_room_with_public_names_is_an_attribute_of_the_package():
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")} - {"cli"}
    assert rooms == set(fulldepth.__all__) & rooms


def test_no_module_imports_itself_in_a_circle():
    graph = {
        name: {other for _, other in imports(path) if other in MODULES and other != name}
        for name, path in MODULES.items()
        if name != "fulldepth"  # the package's own __init__ names every room, lazily
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def parts_of(package):
    """Part of a package (a module or sub-package) -> the other parts that it imports."""
    inside = [name for name in MODULES if name.startswith(f"{package}.")]
    start = len(package.split("."))
    part = {name: name.split(".")[start] for name in inside}
    graph = {each: set() for each in part.values()}
    for name in inside:
        graph[part[name]] |= {part[other] for _, other in imports(MODULES[name]) if other in part} - {part[name]}
    return graph


PACKAGES = [module(path) for path in MODULES.values() if path.name == "__init__.py" and path.parent != SOURCE]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_parts_of_a_room_do_not_import_each_other_in_a_circle(package):
    try:
        TopologicalSorter(parts_of(package)).prepare()
    except CycleError as error:
        pytest.fail(f"{package}: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", MODULES.values(), ids=MODULES)
def test_imports_stand_at_the_top(path):
    nested = {
        inner
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    for node, name in imports(path):
        top = name.split(".")[0]
        lazy = top == "fulldepth" and path in LAZY
        assert node not in nested or lazy or top in OPTIONAL, f"{path}:{node.lineno} hides an import of {name}"
    calls = {node.func for node in nested if isinstance(node, ast.Call)}
    hidden = [f for f in calls if getattr(f, "attr", getattr(f, "id", None)) in {"import_module", "__import__"}]
    assert not hidden or path in LAZY, f"{path} imports by name inside a function"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_reads_results_loads_no_torch(name):
    if not any(known == f"fulldepth{name}" for known in MODULES):
        pytest.skip(f"there is no fulldepth{name} yet")
    program = f"import sys, fulldepth{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("folder", LIMITS)
def test_files_and_functions_stay_short(folder):
    most_in_file, most_in_function = LIMITS[folder]
    long = []
    for path in files(folder):
        lines = len(path.read_text().splitlines())
        if lines > most_in_file:
            long.append(f"{path.relative_to(ROOT)} has {lines} lines")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # The signature of a command or its function is its documentation: one option after another.
                is_command = path.parent == SOURCE / "cli"
                start = node.body[0].lineno if is_command else node.lineno
                size = (node.end_lineno or start) - start + 1
                if size > most_in_function:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {size} lines")
    assert not long, "\n".join(long)


def test_every_measure_has_a_test_and_units():
    from fulldepth.metrics import METRICS
    from metrics.test_formulas import ROWS

    for name, measure in METRICS.items():
        assert measure.name == name
        own = (ROOT / "tests" / "metrics" / f"test_{name}.py").is_file()
        assert own or name in ROWS, f"{name} has no test of its own and no oracle in test_formulas.py"
        assert measure.units, f"{name} has no units"
        assert set(measure.units.values()) <= UNITS, f"{name} has an unknown unit"


def test_every_penalty_and_architecture_has_a_test():
    penalties = {path.stem for path in (SOURCE / "losses").glob("*_penalty.py")} | {"aligned_loss"}
    bare = [name for name in sorted(penalties) if not (ROOT / "tests" / "losses" / f"test_{name}.py").is_file()]
    models = [path.name for path in (SOURCE / "architectures").iterdir() if (path / "__init__.py").is_file()]
    bare += [name for name in models if not (ROOT / "tests" / "architectures" / f"test_{name}.py").is_file()]
    assert not bare, f"no test for {', '.join(bare)}"


def test_every_room_has_tests_of_the_same_name():
    rooms = [path.parent.name for path in SOURCE.glob("*/__init__.py")]
    bare = [name for name in rooms if not list((ROOT / "tests" / name).glob("test_*.py"))]
    assert not bare, f"no tests/{{room}}/test_*.py for {', '.join(bare)}"


def test_every_recipe_folder_is_a_verb():
    folders = {path.name for path in (ROOT / "recipes").iterdir() if path.is_dir()}
    assert folders <= {"measure", "train", "skip", "exit", "evaluate", "reproduce"}


def test_nothing_is_left_for_later():
    promise = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")
    texts = [path for folder in ("src", "tests", "benchmarks") for path in files(folder)]
    texts += [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "recipes").rglob("*.yaml"),
        ROOT / "Makefile",
    ]
    left = [str(path.relative_to(ROOT)) for path in texts if promise.search(path.read_text())]
    assert not left


def test_every_file_has_a_subject():
    vague = {"utils", "util", "helpers", "common", "misc"}
    found = [str(p.relative_to(ROOT)) for p in [*SOURCE.rglob("*"), *(ROOT / "tests").rglob("*")] if p.stem in vague]
    assert not found


def test_no_code_of_a_checkpoint_runs_unasked():
    """transformers asks on the terminal where `trust_remote_code` is left out, and `y` on standard input runs code."""
    loaders = {"from_pretrained", "from_config"}
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files("src")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", None) in loaders
        and "trust_remote_code" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not silent, f"these calls do not pass trust_remote_code: {', '.join(silent)}"
