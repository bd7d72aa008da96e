"""`EvaluatedModel`: an open subject with the plan whose blocks are skipped in it, and what all its scores depend on."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

from fulldepth import __version__
from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import Fingerprint
from fulldepth.hf import Scalars, skipping
from fulldepth.subject import Subject


@dataclass(frozen=True)
class EvaluatedModel:
    """A causal language model that is evaluated."""

    subject: Subject
    """Its tokenizer is a copy, which the harness may change."""
    plan: Any
    """A plan of `fulldepth skip search` (`fulldepth.skip.Plan`) whose blocks are skipped, or None."""
    identity: dict[str, Any]
    """What all scores of the model depend on."""

    @classmethod
    @contextmanager
    def prepare(cls, subject: Subject, plan: Any) -> Iterator[Self]:
        """Inside `with` the blocks of a plan are skipped in place.

        Raises:
            FulldepthError: if the anatomy is not proven, or the model is not the plan's.
        """
        if plan is not None:
            plan.check_model(subject.model)
        identity = {
            **subject.identity,  # while blocks are skipped, weights have other names
            "tokenizer": hash_tokenizer(subject.tokenizer),
            "dtype": str(subject.model.dtype),
            "plan": plan and str(Fingerprint(json.dumps(plan.document(), sort_keys=True, default=str))),
            "version": __version__,
        }
        subject.tokenizer = copy.deepcopy(subject.tokenizer)
        anatomy = subject.verified.anatomy
        scalars = None
        if plan is not None and plan.healed_loss is not None:
            scalars = Scalars.from_dict(plan.scalars, anatomy.num_layers, plan.granularity).to(subject.device)
        with nullcontext() if plan is None else skipping(anatomy, plan.removed, plan.granularity, scalars):
            yield cls(subject, plan, identity)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.subject.anatomy.num_layers

    def check_can_be_cut(self) -> None:
        """Refuse to generate text with the first layers of a model with blocks skipped in place."""
        if self.plan is not None:
            raise FulldepthError(
                "A model with blocks skipped in place cannot be cut to its first layers to generate. Export the plan "
                "(fulldepth skip apply) and evaluate the export, or use --exit-layers full."
            )


def hash_tokenizer(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary, rules, special tokens and chat template."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if core is None else json.loads(core.to_str())
    state = {name: value for name, value in rules.items() if name not in ("padding", "truncation")}  # set by calls
    parts = [type(tokenizer).__name__, state, tokenizer.special_tokens_map, tokenizer.chat_template]
    return str(Fingerprint(json.dumps(parts, sort_keys=True, default=str)))
