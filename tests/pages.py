"""Reads pages of the documentation: their words, and the numbers in them."""

from __future__ import annotations

import re

from places import ROOT

DOCS = ROOT / "docs"
GALLERY = DOCS / "gallery"


def page(name):
    return (DOCS / f"{name}.md").read_text()


def text(path, mark=""):
    """A page with its lines joined, or its part after a mark."""
    whole = (ROOT / path).read_text()
    return " ".join((whole.split(f"<!-- {mark} -->")[1].split("<!-- end -->")[0] if mark else whole).split())


def figures(sentence):
    return [float(n.replace(",", "")) for n in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w]*-)", sentence)]


def prose_of(page_text, *left_out):
    """A page's words on one line, without its blocks of code and what matches the other patterns."""
    for pattern in (r"```.*?```", *left_out):
        page_text = re.sub(pattern, " ", page_text, flags=re.DOTALL)
    return " ".join(page_text.split())


def states_no_number(prose):
    assert not (left := re.findall(r".{20}(?<![A-Z])\d.{20}", prose)), left
