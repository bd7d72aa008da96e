"""Subject of a measurement: a verified model and the data prepared for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.data import Sequences
from fulldepth.execution import Verified
from fulldepth.execution.batching import batched
from fulldepth.execution.subject import open_checkpoint, prove, sequences_for, small_batch, tokenizer_for
from fulldepth.hf import Anatomy, Checkpoint, anatomy_candidates, device_of
from fulldepth.measurement import tokens
from fulldepth.settings.measure import MeasureSettings


@dataclass
class MeasuredSubject:
    """A verified model with its data."""

    checkpoint: Checkpoint
    verified: Verified
    sequences: Sequences
    tokenizer: Any
    policy: str
    """The token policy, with `auto` resolved."""
    device: torch.device
    """Device of the inputs and accumulators."""
    openings: tokens.Openings
    """How the sequences begin."""
    class_token: bool | None = None
    """Whether they begin with a class token; None if unknown."""
    leading: int = 0
    """Tokens before the first patch of an image; 0 for text."""
    warnings: tuple[str, ...] = ()

    @property
    def anatomy(self) -> Anatomy:
        """The model's anatomy."""
        return self.verified.anatomy

    @property
    def eos(self) -> int | None:
        """Id of the end-of-sequence token."""
        own = getattr(self.tokenizer, "eos_token_id", None)
        return own if own is not None else getattr(self.anatomy.config, "eos_token_id", None)


def prepare_subject(
    model: str | Path | PreTrainedModel | Checkpoint,
    data: Any,
    settings: MeasureSettings,
    *,
    tokenizer: Any,
    device: str | None,
) -> MeasuredSubject:
    """Load the model, prepare the data for it, and verify its anatomy on the first batch.

    Raises:
        FulldepthError: if the model or the data are invalid or do not fit each other.
    """
    checkpoint = open_checkpoint(model, settings, device, settings.device_map)
    checkpoint.check_weights()
    candidates = anatomy_candidates(checkpoint.model, tower=settings.tower, override=settings.anatomy)
    tokenizer = tokenizer_for(checkpoint, candidates[0], data, settings, tokenizer)
    sequences = sequences_for(checkpoint, candidates[0], data, tokenizer, settings, settings.words)
    where = device_of(checkpoint.model)
    first = small_batch(sequences)
    described = {name for name, part in (settings.anatomy or {}).items() if part is not None}
    parts = {"head": {"head"}, "branches": {"attention", "mlp"}}  # must be proven if the settings describe them
    optional = {part for part, names in parts.items() if not names & described}
    verified = prove(candidates, first, where, checkpoint.model.dtype, optional=optional)
    sequences, batching = batched(verified.anatomy, sequences, where)
    leading = tokens.leading_tokens(first, verified.anatomy, verified.positions)
    class_token = None if leading is None else leading > 0
    if first.token_ids is not None:
        cls = getattr(tokenizer, "cls_token_id", None)
        class_token = cls is not None and bool((first.token_ids[:, 0] == cls).all())
    policy = tokens.resolve(settings.token_policy, verified.anatomy, class_token)
    if policy in ("patches", "mean-patches") and leading is None:
        raise FulldepthError(f"--token-policy {policy} needs images cut into patches of one known size.")
    bos = getattr(verified.anatomy.config if tokenizer is None else tokenizer, "bos_token_id", None)
    openings = tokens.openings(sequences, bos, getattr(tokenizer, "bos_token", None) or f"id {bos}")
    warnings = [] if batching is None else [batching]
    if 0 < (openings.begin_with_bos or 0) < len(sequences) and policy in ("all", "cls"):
        warnings.append(
            f"{openings.sentence} In a model that uses its first token as an attention sink, the sequences with it "
            "and those without it are unlike."
        )
    subject = MeasuredSubject(
        checkpoint, verified, sequences, tokenizer, policy, where, openings, class_token, leading or 0
    )
    if settings.token_policy == "auto" and policy == "eos":
        ids, eos = first.token_ids, subject.eos
        if ids is None or eos is None or not bool((ids == eos).any(1).all()):
            warnings.append("The tokenizer adds no end-of-sequence token, so the last token of each sequence counts.")
            subject.policy = "last"
    subject.warnings = tuple(warnings)
    return subject
