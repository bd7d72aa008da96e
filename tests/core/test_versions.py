"""The promised versions are the tested ones: pyproject.toml, both constraint files and the README agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import fulldepth
from fulldepth.architectures import TESTED_TRANSFORMERS
from fulldepth.core import tested_versions
from places import ROOT

CAPPED = {"transformers", "torch", "datasets", "accelerate", "peft", "trl", "lm-eval", "gguf", "torchao", "xllamacpp"}
"""Libraries whose interface the package leans on."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = {"dev", "docs"}
"""Extras of developers, which the oldest set leaves out."""


def requirements(leave_out=frozenset()):
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for name in extras.keys() - leave_out for line in extras[name])]
    return {Requirement(line).name: Requirement(line) for line in lines}


def bound(requirement, operator):
    return next((part.version for part in requirement.specifier if part.operator == operator), None)


def constraints(name):
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_library_that_is_leaned_on_has_a_cap():
    assert {name for name, requirement in requirements().items() if bound(requirement, "<")} == CAPPED


def test_an_extra_states_the_range_that_the_others_state():
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    stated = {}
    for requirement in map(Requirement, lines):
        assert stated.setdefault(requirement.name, requirement.specifier) == requirement.specifier, requirement


def test_the_oldest_set_is_every_lower_bound():
    lowest = {name: bound(requirement, ">=") for name, requirement in requirements(TOOLS).items()}
    assert constraints("constraints-oldest.txt") == lowest


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_the_newest_set_is_the_last_below_the_cap_and_the_readme_states_both_ends(name):
    requirement, newest = requirements()[name], Version(constraints("constraints.txt")[name])
    cap = Version(bound(requirement, "<"))
    assert requirement.specifier.contains(newest)
    assert (newest.major, newest.minor + 1) == (cap.major, cap.minor)
    ends = dict.fromkeys((bound(requirement, ">="), f"{newest.major}.{newest.minor}"))
    assert f"{name} {' to '.join(ends)}" in " ".join((ROOT / "README.md").read_text().split())


def test_the_code_of_exports_names_both_ends_of_transformers():
    oldest, newest = (constraints(f"constraints{end}.txt")["transformers"] for end in ("-oldest", ""))
    assert TESTED_TRANSFORMERS[0].startswith("4.")
    assert [Version(version) for version in TESTED_TRANSFORMERS[1:]] == [Version(oldest), Version(newest)]


def test_the_tests_run_on_a_tested_set():
    assert tested_versions.untested_versions() == {}


def python(code, *, path=()):
    searched = os.pathsep.join([*map(str, path), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": searched}
    command = [sys.executable, "-W", "always", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_newer_library_is_one_warning_that_names_the_tested_versions(tmp_path):
    for name, version in (("transformers", "5.99.0"), ("peft", "0.99.0"), ("torch", "2.13.0+cu130")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    ran = python("import fulldepth, fulldepth.cli; print(fulldepth.__version__)", path=[tmp_path])
    assert ran.stdout.strip() == fulldepth.__version__
    assert ran.stderr.count("Warning:") == 1
    assert "not tested with transformers 5.99.0, peft 0.99.0:" in ran.stderr
    for name in ("transformers", "peft"):
        stated = re.search(rf"'{name}([^']*)'", ran.stderr)[1]
        assert Requirement(name + stated).specifier == requirements()[name].specifier


def test_every_public_name_can_be_imported():
    code = (
        "from fulldepth import *\n"
        "import importlib, fulldepth\n"
        "for name in fulldepth.__all__:\n"
        "    assert name in globals(), name\n"
        "    room = getattr(fulldepth, name)\n"
        "    for inner in getattr(room, '__all__', ()):\n"
        "        getattr(room, inner)\n"
    )
    ran = python(code)
    assert not ran.returncode, ran.stderr
