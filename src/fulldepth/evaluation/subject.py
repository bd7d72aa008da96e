"""The model of an evaluation: loaded, checked, with its plan, tokenizer and exit layers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import fulldepth.architectures  # noqa: F401  # registers this package's models with transformers
from fulldepth import __version__
from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import Fingerprint
from fulldepth.execution.verify import prove
from fulldepth.hf import (
    Anatomy,
    Checkpoint,
    Classifier,
    Scalars,
    anatomy_candidates,
    device_of,
    evaluating,
    open_model,
    open_tokenizer,
    skipping,
    task_of,
)
from fulldepth.hf.model_hash import model_hash
from fulldepth.settings.evaluate import EvaluateSettings


@dataclass(frozen=True)
class EvaluationSubject:
    """A verified causal language model."""

    checkpoint: Checkpoint
    anatomy: Anatomy
    classifier: Classifier
    tokenizer: Any
    """A copy, which the harness may change."""
    hash: str
    plan: Any
    """A plan of `fulldepth skip search` (`fulldepth.skip.Plan`) whose blocks are skipped, or None."""
    tokenizer_hash: str
    """Of its vocabulary, rules, special tokens and chat template."""

    @property
    def identity(self) -> dict[str, Any]:
        """What all scores of the model depend on."""
        return {
            "model": self.hash,
            "tokenizer": self.tokenizer_hash,
            "dtype": str(self.model.dtype),
            "plan": self.plan and str(Fingerprint(json.dumps(self.plan.document(), sort_keys=True, default=str))),
            "version": __version__,
        }

    @property
    def model(self) -> PreTrainedModel:
        """The model, in evaluation mode inside `opened`."""
        return self.checkpoint.model

    @property
    def num_layers(self) -> int:
        """L."""
        return self.anatomy.num_layers

    def check_can_be_cut(self) -> None:
        """Refuse to generate text with the first layers of a model with blocks skipped in place."""
        if self.plan is not None:
            raise FulldepthError(
                "A model with blocks skipped in place cannot be cut to its first layers to generate. Export the plan "
                "(fulldepth skip apply) and evaluate the export, or use --exit-layers full."
            )

    @property
    def document(self) -> dict[str, Any]:
        """The entry `model` of the results."""
        own = {"task": self.anatomy.task, "num_layers": self.num_layers, "hash": self.hash}
        return self.checkpoint.describe() | own


@contextmanager
def opened(
    model: str | Path | PreTrainedModel, settings: EvaluateSettings, tokenizer: Any, plan: Any
) -> Iterator[EvaluationSubject]:
    """Load, hash and verify a model; inside `with` it is in evaluation mode and its plan's blocks are skipped.

    Raises:
        FulldepthError: if it cannot be loaded, is no causal language model, has weights that are not finite or no
            tokenizer, or is not the plan's model.
    """
    options = settings.model_dump(include={"dtype", "device", "revision", "trust_remote_code"})
    checkpoint = open_model(model, exit_heads=plan is None, **options)  # a plan's hash is that of the checkpoint alone
    owner = checkpoint.model
    if task_of(owner) != "causal-lm":
        raise FulldepthError(
            f"{one_line(type(owner).__name__, 100)} is no causal language model (a decoder that predicts the next "
            "token), so it cannot score or generate text."
        )
    checkpoint.check_weights()
    named = settings.tokenizer if tokenizer is None else tokenizer
    reading: dict[str, Any] = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    tokens = open_tokenizer(checkpoint, named, **reading)
    if settings.apply_chat_template and not tokens.chat_template:
        raise FulldepthError(f"The tokenizer of {checkpoint.name} has no chat template; leave out apply_chat_template.")
    hashed = model_hash(owner)
    if plan is not None:
        plan.check_model(owner)
    with evaluating(owner):
        size = anatomy_candidates(owner)[0].vocab_size or 1
        ids = (torch.arange(3, 11) % size).view(2, 4)
        anatomy, classifier = prove(owner, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        skipped: AbstractContextManager[Any] = nullcontext()
        if plan is not None:
            scalars = None
            if plan.healed_loss is not None:
                scalars = Scalars.from_dict(plan.scalars, anatomy.num_layers, plan.granularity).to(device_of(owner))
            skipped = skipping(anatomy, plan.removed, plan.granularity, scalars)
        with skipped:
            digest = hash_tokenizer(tokens)
            yield EvaluationSubject(checkpoint, anatomy, classifier, copy.deepcopy(tokens), hashed, plan, digest)


def hash_tokenizer(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary, rules, special tokens and chat template."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if core is None else json.loads(core.to_str())
    state = {name: value for name, value in rules.items() if name not in ("padding", "truncation")}  # set by calls
    parts = [type(tokenizer).__name__, state, tokenizer.special_tokens_map, tokenizer.chat_template]
    return str(Fingerprint(json.dumps(parts, sort_keys=True, default=str)))
