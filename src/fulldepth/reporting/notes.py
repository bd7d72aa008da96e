"""Notes on how to read the numbers, and their formulas."""

from __future__ import annotations

import re
from html import escape

from pydantic.dataclasses import dataclass

TOKEN = re.compile(r'\\[a-z]+|\\[{}]|"[^"]*"|[^\W\d_][^\W_]*|\d+|\S')
SPACES = {r"\thin": "0.1em", r"\space": "0.2em", r"\quad": "0.8em"}
SCRIPTS = {"_": "msub", "^": "msup", "^_": "msubsup"}
LIMITS = {"_": "munder", "^": "mover", "^_": "munderover"}


def mathml(formula: str) -> str:
    r"""The MathML elements inside `math` for a formula.

    Words are identifiers, text in quotes is upright, `_` and `^` set scripts (limits of a sum), braces group; `\{` and
    `\}` are literal braces. Supported are `\frac{a}{b}`, `\bar{a}` and the spaces `\thin`, `\space` and `\quad`. All
    other characters are kept.
    """
    return "".join(_row(TOKEN.findall(formula)[::-1]))


def _row(tokens: list[str], end: str = "") -> list[str]:
    """The elements up to `end`; `tokens` is a stack, the next one last."""
    elements = []
    while tokens and tokens[-1] != end:
        base, scripts = _element(tokens), {}
        while tokens and tokens[-1] in SCRIPTS:
            mark = tokens.pop()
            scripts[mark] = _element(tokens)
        if scripts:
            tag = (LIMITS if base == "<mo>∑</mo>" else SCRIPTS)["".join(sorted(scripts, key="^_".index))]
            base = f"<{tag}>{base}{scripts.get('_', '')}{scripts.get('^', '')}</{tag}>"
        elements.append(base)
    if end:
        tokens.pop()
    return elements


def _element(tokens: list[str]) -> str:
    token = tokens.pop()
    if token == "{":
        elements = _row(tokens, "}")
        return elements[0] if len(elements) == 1 else f"<mrow>{''.join(elements)}</mrow>"
    if token == r"\frac":
        return f"<mfrac>{_element(tokens)}{_element(tokens)}</mfrac>"
    if token == r"\bar":
        return f"<mover>{_element(tokens)}<mo>¯</mo></mover>"
    if token in SPACES:
        return f'<mspace width="{SPACES[token]}"></mspace>'
    tag = "mtext" if token[0] == '"' else "mn" if token.isdigit() else "mi" if token[0].isalpha() else "mo"
    text = escape(token.strip('"').removeprefix("\\"))
    return f"<{tag}>{text}</{tag}>"


@dataclass(frozen=True, config={"extra": "forbid"})
class Note:
    """A note under “How to read the numbers”; shown if the table has one of its measures, or if it names none."""

    title: str
    text: str
    """HTML, inside a paragraph."""
    measures: tuple[str, ...] = ()
    """Measures of the table to which the note belongs; empty = all."""
    formula: str = ""
    """See `mathml`."""
    source: str = ""
    """HTML: the source of the formula."""

    @property
    def mathml(self) -> str:
        """The formula as MathML; empty without one."""
        return f'<math display="block">{mathml(self.formula)}</math>' if self.formula else ""
