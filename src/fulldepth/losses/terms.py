"""The terms of an objective and their options, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from fulldepth.errors import FulldepthError, unknown


@dataclass(frozen=True)
class Term:
    """One penalty: its weight in the loss and how it is computed."""

    name: ClassVar[str]
    sites: ClassVar[tuple[str, ...]]
    """Names out of `capture.SITES` that it reads."""
    weight: float = 1.0


@dataclass(frozen=True)
class Jump(Term):
    """JREG's displacement penalty, Eq. 5-6."""

    name = "jump"
    sites = ("residual",)
    alpha: float = 1.0
    """Sharpness of the layers' weights; infinity = the last layer only."""


@dataclass(frozen=True)
class Coherence(Term):
    """CR's penalty on attention sub-layers, Sec. 3.3."""

    name = "coherence"
    sites = ("attention_input", "attention_output")
    weight: float = 0.01
    layers: Sequence[int] | None = None
    """0-based; None = the paper's {2, 4, 6, 8} of 12, at the same share of other depths."""
    target: float = 0.35
    scope: str = "global"
    """global: the batch mean runs over all processes; process: over each process's own sequences."""


@dataclass(frozen=True)
class Orthogonality(Term):
    """Channels of the attention sub-layers' output orthogonal, CR Sec. 3.3."""

    name = "orthogonality"
    sites = ("attention_output",)
    weight: float = 0.01
    layers: Sequence[int] | None = None
    """0-based; None = the paper's {3, 5, 7, 9, 10} of 12, at the same share of other depths."""
    form: str = "mean"
    """mean (the paper's listing) or frobenius (its text)."""


@dataclass(frozen=True)
class Aligned(Term):
    """Cross-entropy of every layer through the shared head, in place of the last layer's (Eq. 5)."""

    name = "aligned"
    sites = ("residual",)
    weights: str | Sequence[float] = "linear"
    """linear (2l / (L (L+1))), uniform (1/L), or one number a layer."""
    schedule: str = "alternate"
    """alternate: even steps only, odd steps take the last layer's (training from scratch, App. B.3); always."""


@dataclass(frozen=True)
class Similarity(Term):
    """Cosine of every layer to the last one (App. B.3)."""

    name = "similarity"
    sites = ("residual",)
    weights: str | Sequence[float] = "linear"


TERMS: dict[str, type[Term]] = {kind.name: kind for kind in (Jump, Coherence, Orthogonality, Aligned, Similarity)}
"""Every term by name."""

CHOICES = {"scope": ("global", "process"), "form": ("mean", "frobenius"), "schedule": ("alternate", "always")}


def make_term(name: str, given: float | Mapping[str, Any]) -> Term:
    """A term out of its weight, or out of a mapping of options.

    Raises:
        FulldepthError: for an unknown term or option, or a value that means nothing.
    """
    if name not in TERMS:
        raise unknown("term", name, TERMS)
    kind = TERMS[name]
    options = dict(given) if isinstance(given, Mapping) else {"weight": given}
    known = [field.name for field in fields(kind)]
    for option in options:
        if option not in known:
            raise unknown(f"option of {name}", option, known)
    term = kind(**options)
    _check(term)
    return term


def _check(term: Term) -> None:
    for option, choices in CHOICES.items():
        value = getattr(term, option, choices[0])
        if value not in choices:
            raise unknown(f"{option} of {term.name}", str(value), choices)
    weights = getattr(term, "weights", None)
    if isinstance(weights, str) and weights not in ("linear", "uniform"):
        raise unknown(f"weights of {term.name}", weights, ("linear", "uniform"))
    numbers = {"weight": term.weight, **{n: getattr(term, n) for n in ("target",) if hasattr(term, n)}}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise FulldepthError(f"{term.name}.{name} is {number!r}; expected a finite number, at least 0.")
    alpha = getattr(term, "alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha >= 0:
        raise FulldepthError(f"{term.name}.alpha is {alpha!r}; expected at least 0 (infinity: last layer only).")


def coherence_layers(term: Coherence, num_layers: int) -> list[int]:
    """0-based layers of the CR penalty: the paper's 2, 4, 6, 8 of 12, or the even ones up to the same share."""
    last = round(8 * num_layers / 12)
    return _layers(term, range(2, last + 1, 2), num_layers, highest=num_layers - 1)


def orthogonality_layers(term: Orthogonality, num_layers: int) -> list[int]:
    """0-based layers of the orthogonality penalty: those after CR's, and the last but one (3, 5, 7, 9, 10 of 12)."""
    after = [layer + 1 for layer in range(2, round(8 * num_layers / 12) + 1, 2)]
    default = sorted({layer for layer in (*after, num_layers - 2) if 0 <= layer < num_layers})
    return _layers(term, default, num_layers, highest=num_layers - 1)


def _layers(term: Any, default: Sequence[int], num_layers: int, highest: int) -> list[int]:
    chosen = list(default if term.layers is None else term.layers)
    wrong = [layer for layer in chosen if type(layer) is not int or not 0 <= layer <= highest]
    if wrong or not chosen or len(set(chosen)) < len(chosen):
        raise FulldepthError(
            f"{term.name}.layers is {chosen}; expected different 0-based layers, 0 to {highest} of {num_layers}."
        )
    return chosen
