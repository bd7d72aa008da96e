"""Docstrings and pages of public functions, as Griffe reads them for the Python reference."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache

import griffe
import pytest

import fulldepth
from places import ROOT
from test_docs import generated_pages

INDEX = (ROOT / "docs" / "api" / "index.md").read_text()


def functions():
    """Path -> each public function: those of the package and those of a page of the reference."""
    shown = [(name, getattr(fulldepth, name)) for name in fulldepth.__all__]
    shown += [pair for room in generated_pages.ROOMS for pair in generated_pages.public(room)]
    return {f"{value.__module__}.{name}": value for name, value in shown if inspect.isfunction(value)}


FUNCTIONS = functions()


@cache
def package():
    """The package as the site shows it."""
    extensions = griffe.load_extensions(ROOT / "docs" / "public_signatures.py")
    return griffe.load("fulldepth", search_paths=[ROOT / "src"], extensions=extensions)


@pytest.mark.parametrize("path", FUNCTIONS)
def test_a_reference_describes_every_parameter_of_the_public_signature_and_what_is_returned(path):
    signature = inspect.signature(FUNCTIONS[path])
    page = package()[path.removeprefix("fulldepth.")]
    assert [parameter.name for parameter in page.parameters] == [*signature.parameters]
    for text in (inspect.getdoc(FUNCTIONS[path]), page.docstring.value):
        sections = {part.kind.value: part.value for part in griffe.Docstring(text, parent=page).parse("google")}
        described = {entry.name.lstrip("*"): entry.description for entry in sections.get("parameters", [])}
        assert sorted(described) == sorted(signature.parameters)
        assert all(described.values()), described
        if signature.return_annotation not in (None, "None", inspect.Signature.empty):
            assert "returns" in sections
        assert "this module" not in text  # its docstring is on no page


def test_every_function_and_command_has_a_place_in_the_reference():
    pages = INDEX + "".join(generated_pages.api().values())
    shown = re.findall(r"^::: (fulldepth\S+)", pages, re.MULTILINE)
    objects = [getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in shown]
    public = [value for name in fulldepth.__all__ if inspect.isfunction(value := getattr(fulldepth, name))]
    assert not [function.__name__ for function in public if function not in objects]
    before = INDEX.split("```")[0]
    for command, _ in generated_pages.programs():
        assert command.split()[0] in re.findall(r"\w+", before), command
