"""Models that judge generated text: a language model for its perplexity, a sentence embedder for its coherence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fulldepth.errors import FulldepthError
from fulldepth.evaluation.subject import check_is_decoder
from fulldepth.hf import Checkpoint, anatomy_candidates, open_model, open_tokenizer
from fulldepth.settings.evaluate import EvaluateSettings

LONGEST = 512
"""Most tokens of a text that is embedded."""


class Judge:
    """A causal language model that states how likely continuations are.

    Args:
        name: checkpoint.
        settings: how it is loaded.

    Raises:
        FulldepthError: if it cannot be loaded, or is no causal language model.
    """

    def __init__(self, name: str, settings: EvaluateSettings) -> None:
        self.name, self.checkpoint, self.tokenizer = name, *_opened(name, settings)
        check_is_decoder(self.checkpoint.model)
        self._most = anatomy_candidates(self.checkpoint.model)[0].max_positions

    @torch.no_grad()
    def log_probabilities(self, prefixes: Sequence[str], texts: Sequence[str]) -> list[float]:
        """Of all tokens after the prefixes, in nats; prefix and continuation are tokenised together.

        Raises:
            FulldepthError: for a text of more tokens than the model has positions.
        """
        found: list[float] = []
        model = self.checkpoint.model
        for prefix, text in zip(prefixes, texts, strict=True):
            ids = torch.tensor([self.tokenizer(prefix + text)["input_ids"]], device=model.device)
            if self._most is not None and ids.shape[1] > self._most:
                raise FulldepthError(
                    f"{self.name} has {self._most:,} positions, and a text has {ids.shape[1]:,} tokens with its "
                    "tokenizer; set fewer --prefix-tokens or --new-tokens."
                )
            start = max(1, len(self.tokenizer(prefix)["input_ids"]))
            if start < ids.shape[1]:
                found += continuation_log_probabilities(model(ids).logits, ids, start)[0].tolist()
        return found


class Embedder:
    """A sentence encoder: the mean of its last states over the tokens of a text.

    Args:
        name: checkpoint.
        settings: how it is loaded.

    Raises:
        FulldepthError: if it cannot be loaded, or gives no states.
    """

    def __init__(self, name: str, settings: EvaluateSettings) -> None:
        self.name, self.checkpoint, self.tokenizer = name, *_opened(name, settings)
        if self.tokenizer.pad_token_id is None:
            raise FulldepthError(f"{name} has no padding token, so it is no sentence embedder.")
        self.embed(["a"])

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """[N, D] embeddings."""
        model = self.checkpoint.model
        limit = getattr(model.config, "max_position_embeddings", None) or 512
        inputs = self.tokenizer(
            list(texts), return_tensors="pt", padding=True, truncation=True, max_length=min(limit, 512)
        )
        states = getattr(model(**inputs.to(model.device)), "last_hidden_state", None)  # [N, T, D]
        if states is None:
            raise FulldepthError(
                f"{self.name} ({type(model).__name__}) gives no states of its tokens; name an encoder."
            )
        mask = inputs["attention_mask"].to(states.device)[..., None].to(states.dtype)
        return (states * mask).sum(1) / mask.sum(1).clamp(min=1)


def continuation_log_probabilities(logits: Tensor, ids: Tensor, start: int) -> Tensor:
    """[B, T - start] log-probabilities of the tokens from `start` on, from logits `[B, T, V]` and tokens `[B, T]`."""
    log_probabilities = logits[:, start - 1 : -1].float().log_softmax(-1)
    return log_probabilities.gather(2, ids[:, start:, None])[..., 0]


def _opened(name: str, settings: EvaluateSettings) -> tuple[Checkpoint, Any]:
    checkpoint = open_model(name, device=settings.device, trust_remote_code=settings.trust_remote_code)
    return checkpoint, open_tokenizer(checkpoint, trust_remote_code=settings.trust_remote_code)
