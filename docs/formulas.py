"""Formulas as MathML, so that the pages show them offline: a MkDocs hook for pages, a Griffe extension for docstrings.

Pages write `$...$` and `$$...$$`, docstrings `:math:` and `.. math::`.
"""

from __future__ import annotations

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

PAGE = re.compile(r"```.*?```|`[^`\n]*`|\$\$(?P<display>.+?)\$\$|\$(?P<inline>[^$\n]+)\$", re.DOTALL)
"""Code comes first, so that the dollars inside it stay."""
BLOCK = re.compile(r"^\.\. math::(?P<display>.*(?:\n(?:[ \t]+.*|[ \t]*))*)$", re.MULTILINE)
ROLE = re.compile(r":math:`(?P<inline>[^`]+)`")


def _mathml(match: re.Match[str]) -> str:
    groups = match.groupdict()
    if groups.get("display"):
        return f"\n\n{_convert(groups['display'], 'block')}\n\n"
    if groups.get("inline"):
        return f"<span>{_convert(groups['inline'], 'inline')}</span>"
    return match.group()


def _convert(formula: str, display: str) -> str:
    return str(convert(" ".join(formula.split()), display=display)).replace("\n", " ")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs: the formulas of a page."""
    return PAGE.sub(_mathml, markdown)


class Formulas(griffe.Extension):
    """Griffe: the formulas of a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(_mathml, BLOCK.sub(_mathml, obj.docstring.value))
