"""The record of a figure: its section, notes, kinds of results and drawing function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import Curve, curve, num_layers
from fulldepth.figures.skip_results import KINDS, TOGETHER, Part, TimedModel, layers_of, parts, timed_models
from fulldepth.figures.style import ZERO, Figures, categorical, label

SINGLE, SERIES, COMPARISON = "single", "series", "comparison"
TRAINING, TRAININGS, SKIP = "training", "trainings", "skip"
EXIT, GENERATION, EVALUATION = "exit", "generation", "evaluation"
EXITS, EVALUATIONS = "exits", "evaluations"
VERBS = {**dict.fromkeys((*KINDS, TOGETHER), SKIP), **{kind: kind for kind in (EXIT, GENERATION, EVALUATION)}}
"""`kind` of a document -> kind of results, see `Source.kind`."""
COMPARED = {EXIT: EXITS, EVALUATION: EVALUATIONS}
"""What a comparison compares, as its document states it (`of`) -> kind of results."""


@dataclass(frozen=True)
class Run:
    """One of several models: its rows, displayed name (unique), depth and line style."""

    name: str
    table: pd.DataFrame
    layers: int
    style: dict[str, Any]
    baseline: bool


@dataclass(frozen=True)
class Source:
    """Source of figures: a result table and its document."""

    table: pd.DataFrame
    meta: Mapping[str, Any]

    @cached_property
    def kind(self) -> str:
        """`single` (one model at one step), `series`, `training`, `skip`, `exit`, `generation` or `evaluation`.

        Several of them side by side are of the kinds `comparison`, `trainings`, `exits` and `evaluations`.
        """
        stated = self.meta.get("kind")
        if stated in VERBS:
            return VERBS[str(stated)]
        if stated == COMPARISON and self.meta.get("of") in COMPARED:
            return COMPARED[str(self.meta["of"])]
        steps = "step" in self.table.columns
        if "model" in self.table.columns:
            return TRAININGS if steps else COMPARISON
        return TRAINING if stated == "training" else SERIES if steps else SINGLE

    @cached_property
    def layers(self) -> int:
        """L of the model."""
        return layers_of(self.parts) if self.kind == SKIP else num_layers(self.table, self.meta.get("model"))

    @cached_property
    def steps(self) -> dict[int, pd.DataFrame]:
        """Step -> its rows, ascending."""
        return {step: self.table[self.table["step"] == step] for step in sorted({int(s) for s in self.table["step"]})}

    @cached_property
    def runs(self) -> list[Run]:
        """The models of a comparison in the order of `meta["models"]`; models only in the table come last."""
        described = {str(entry.get("label")): entry for entry in self.meta.get("models") or []}
        labels = list(dict.fromkeys([*described, *map(str, self.table["model"].unique())]))
        names = [label(text, 40) for text in labels]
        runs: list[Run] = []
        for index, (text, name) in enumerate(zip(labels, names, strict=True)):
            rows = self.table[self.table["model"].astype(str) == text]
            entry = described.get(text, {})
            unique = name if names.count(name) == 1 else f"{name} ({index + 1})"
            layers = num_layers(rows, entry.get("model"))
            runs.append(Run(unique, rows, layers, categorical(index), bool(entry.get("baseline"))))
        return runs

    @cached_property
    def compared(self) -> list[Run]:
        """The models with differences from the baseline."""
        return [run for run in self.runs if not run.baseline and "difference" in run.table.columns]

    @cached_property
    def baseline(self) -> str:
        """Name of the model that the others are compared with."""
        return next((run.name for run in self.runs if run.baseline), "the baseline")

    @cached_property
    def parts(self) -> list[Part]:
        """The folders of `fulldepth skip`."""
        return parts(self.table, self.meta)

    @cached_property
    def timed(self) -> list[TimedModel]:
        """The models that these folders timed."""
        return timed_models(self.parts)


@dataclass(frozen=True)
class Quantity:
    """A curve over depth that is compared between models and followed through training."""

    measure: str
    statistic: str
    title: str
    axis: str
    """Title of the value axis, with the unit."""
    site: str = "residual"
    form: str = ".4f"
    """d3 number format of hover boxes."""
    settings: dict[str, Any] = field(default_factory=lambda: ZERO)
    """Of the value axis."""
    to_last: bool = False
    """Whether the rows are pairs, of which only those with the last layer are drawn."""
    key: str = ""
    """Suffix of the figure's name, `figure:key`, for all quantities of a figure but the first."""
    variant: str = ""
    """Name of the variant if a figure has several."""
    spread: str = ""
    """Statistic of the standard errors of the values."""

    def curve(self, table: pd.DataFrame, layers: int, column: str = "value") -> Curve:
        """The curve of a table of one model at one step."""
        return curve(table, self.measure, self.statistic, self.site, layers if self.to_last else None, column)


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
        elements.append(_with_scripts(tokens))
    if end:
        tokens.pop()
    return elements


def _with_scripts(tokens: list[str]) -> str:
    base, scripts = _element(tokens), {}
    while tokens and tokens[-1] in SCRIPTS:
        mark = tokens.pop()
        scripts[mark] = _element(tokens)
    if not scripts:
        return base
    tag = (LIMITS if base == "<mo>∑</mo>" else SCRIPTS)["".join(sorted(scripts, key="^_".index))]
    return f"<{tag}>{base}{scripts.get('_', '')}{scripts.get('^', '')}</{tag}>"


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


@dataclass(frozen=True)
class Method:
    """A note under “How to read the numbers”; shown if the table has one of its measures, or if it names none."""

    title: str
    measures: tuple[str, ...]
    text: str
    """HTML, inside a paragraph."""
    formula: str = ""
    """Formula in the notation of `mathml`."""
    source: str = ""
    """HTML: the source of the formula."""

    @property
    def html(self) -> str:
        """The folded note."""
        formula = f'<math display="block">{mathml(self.formula)}</math>\n' if self.formula else ""
        source = f'\n<p class="source">{self.source}</p>' if self.source else ""
        about = f"<summary>{self.title}</summary>\n{formula}<p>{self.text}</p>{source}"
        return f'<details class="method">{about}</details>'


Draw = Callable[[Source], "go.Figure | Mapping[str, go.Figure] | None"]
"""Returns one figure, several as key -> figure (`name:key`; the key "" is the figure itself), or None without data."""


@dataclass(frozen=True)
class Figure:
    """Record of a figure. Records of other kinds of results may have the same name."""

    name: str
    section: str
    """Id of the section of the page, see `report.sections`; unknown ids go under “Further figures”."""
    draw: Draw
    kinds: tuple[str, ...] = (SINGLE,)
    """Kinds of results that have this figure, see `Source.kind`."""
    title: str = ""
    """Default title, for drawings without one."""
    subtitle: str = ""
    """Default subtitle, for drawings without one: how to read the figure, in one line."""
    methods: tuple[Method, ...] = ()
    """Notes of the page, in this order; a note that several figures share is shown once, at the first."""
    curves: tuple[Quantity, ...] | Callable[[pd.DataFrame], tuple[Quantity, ...]] = ()
    """Curves that are compared between models: figures `NAME` and `difference_NAME` of comparisons."""
    followed: bool = False
    """Whether the curves are also drawn over training, one line per layer: the figure `steps_NAME`."""
    secondary: bool = False
    """Whether the page folds the figure, behind its title."""

    def quantities(self, table: pd.DataFrame) -> tuple[Quantity, ...]:
        """The curves that a table may have."""
        return self.curves(table) if callable(self.curves) else self.curves

    def drawn(self, source: Source) -> Figures:
        """Name -> figure."""
        drawn = self.draw(source) or {}
        readings = {"": drawn} if isinstance(drawn, go.Figure) else drawn
        return {f"{self.name}:{key}" if key else self.name: self._titled(one) for key, one in readings.items()}

    def _titled(self, drawn: go.Figure) -> go.Figure:
        meta = dict(drawn.layout.meta)
        meta["title"], meta["subtitle"] = meta["title"] or self.title, meta["subtitle"] or self.subtitle
        return drawn.update_layout(meta=meta, title={"text": meta["title"], "subtitle": {"text": meta["subtitle"]}})

    def beside(self, name: str, draw: Draw, *kinds: str, **changed: Any) -> Figure:
        """The record of a figure that is derived from this one."""
        return replace(self, name=name, draw=draw, kinds=kinds, curves=(), followed=False, **changed)


def readings(drawings: Iterable[tuple[str, go.Figure | None]]) -> Figures:
    """Key -> figure of the drawings with data; the first has the key "", so that it has the figure's own name."""
    drawn = [(key, figure) for key, figure in drawings if figure is not None]
    return {key if index else "": figure for index, (key, figure) in enumerate(drawn)}
