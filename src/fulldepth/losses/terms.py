"""The registry of penalties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from fulldepth.errors import FulldepthError, unknown
from fulldepth.losses.aligned_loss import Aligned, MultiExit
from fulldepth.losses.coherence_penalty import Coherence
from fulldepth.losses.jump_penalty import Jump
from fulldepth.losses.orthogonality_penalty import Orthogonality
from fulldepth.losses.similarity_penalty import Similarity
from fulldepth.losses.term import Term

TERMS: dict[str, type[Term]] = {
    term.name: term
    for term in (
        Aligned,  # first, because it replaces the cross-entropy
        MultiExit,  # so does this one
        Jump,
        Coherence,
        Orthogonality,
        Similarity,
    )
}
"""Terms by name, in the order in which an objective applies them."""


def make_term(name: str, setting: float | Mapping[str, Any]) -> Term:
    """A term from its weight, or from a mapping of its options.

    Raises:
        FulldepthError: for an unknown term or option, or an invalid value.
    """
    if name not in TERMS:
        raise unknown("term", name, TERMS)
    options = dict(setting) if isinstance(setting, Mapping) else {"weight": setting}
    fields = TERMS[name].model_fields
    for option in options:
        if option not in fields:
            raise unknown(f"option of {name}", option, fields)
    try:
        return TERMS[name](**options)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        wrong = problems[0]["loc"][0]
        expected = " or ".join(p["msg"].removeprefix("Input should be ") for p in problems if p["loc"][0] == wrong)
        expected = expected.replace("greater than or equal to", "at least")
        raise FulldepthError(f"{name}.{wrong} is {options[str(wrong)]!r}; expected {expected}.") from error


def per_batch_terms(names: Iterable[str]) -> list[str]:
    """The names of terms that are functions of a whole batch (`Term.per_batch`)."""
    return [name for name in names if TERMS[name].per_batch]
