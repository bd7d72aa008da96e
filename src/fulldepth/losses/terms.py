"""The registry of penalties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from fulldepth.errors import unknown
from fulldepth.losses.aligned_loss import Aligned
from fulldepth.losses.coherence_penalty import Coherence
from fulldepth.losses.jump_penalty import Jump
from fulldepth.losses.orthogonality_penalty import Orthogonality
from fulldepth.losses.similarity_penalty import Similarity
from fulldepth.losses.term import Term

TERMS: dict[str, type[Term]] = {
    term.name: term
    for term in (
        Aligned,  # first, because it replaces the cross-entropy
        Jump,
        Coherence,
        Orthogonality,
        Similarity,
    )
}
"""Every term by name, in the order in which an objective applies them."""


def make_term(name: str, given: float | Mapping[str, Any]) -> Term:
    """A term from its weight, or from a mapping of its options.

    Raises:
        FulldepthError: for an unknown term or option, or a value that means nothing.
    """
    if name not in TERMS:
        raise unknown("term", name, TERMS)
    options = dict(given) if isinstance(given, Mapping) else {"weight": given}
    known = [field.name for field in fields(TERMS[name])]
    for option in options:
        if option not in known:
            raise unknown(f"option of {name}", option, known)
    return TERMS[name](**options)


def per_batch_terms(names: Iterable[str]) -> list[str]:
    """Those of some terms that are functions of the sequences of a whole batch."""
    return [name for name in names if TERMS[name].per_batch]
