"""`continuations`: samples what a model writes behind given tokens, in batches, each row with noise of its own.

`split_end`, `written_text` and `answered_pair` make text and rows of it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.data.columns import CUT_OFF, END
from fulldepth.data.conversations import Prompt
from fulldepth.data.tokens import decode_ids
from fulldepth.hf import device_of, evaluating, plain_generation


def check_writes(model: PreTrainedModel, purpose: str) -> None:
    """Refuse a model that cannot write text.

    Args:
        model: the model.
        purpose: what it cannot do, such as `respond to prompts`.

    Raises:
        FulldepthError: if it is not a causal language model.
    """
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise FulldepthError(f"{type(model).__name__} cannot {purpose}; give a causal language model.")


def continuations(
    model: PreTrainedModel,
    starts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    ends: set[int],
    temperature: float,
    seeds: Sequence[Sequence[int]],
    batch_size: int,
    watcher: Watcher,
) -> list[list[int]]:
    """The tokens that a model writes behind each of several starts, with left padding and a cache.

    They do not depend on `batch_size`, except for ties that rounding decides. For sampling, Gumbel noise from a
    generator of each row is added to the logits divided by the temperature; the largest sum is a sample from their
    softmax (no top-k, no top-p). The checkpoint's own `generation_config` is not used.

    Args:
        model: a causal language model; runs in evaluation mode, which is restored on leaving.
        starts: token ids, at least one each.
        limits: most tokens behind each start.
        ends: tokens that end a continuation.
        temperature: 0 = greedy.
        seeds: of each row's noise.
        batch_size: rows in a batch; rows are sorted by length.
        watcher: receives the progress in rows, of a task that has begun.

    Returns:
        Token ids in the order of the starts, up to and with the end token, if there is one within the limit.

    Source: Gumbel-max trick (Gumbel 1954).
    """
    order = sorted(range(len(starts)), key=lambda row: len(starts[row]), reverse=True)
    written: dict[int, list[int]] = {}
    generate: Any = model.generate
    with evaluating(model), plain_generation(model):
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            tokens, mask = (
                pad_sequence([torch.tensor(part) for part in parts], batch_first=True, padding_side="left")
                for parts in ([list(starts[row]) for row in rows], [[1] * len(starts[row]) for row in rows])
            )  # [B, T] each
            config = GenerationConfig(
                max_new_tokens=max(limits[row] for row in rows), eos_token_id=sorted(ends) or None, pad_token_id=0
            )
            noise = [GumbelNoise(temperature, [seeds[row] for row in rows])] if temperature else []
            sequences = generate(
                input_ids=tokens.to(device_of(model)),
                attention_mask=mask.to(device_of(model)),
                generation_config=config,
                logits_processor=LogitsProcessorList(noise),
            )
            for row, ids in zip(rows, sequences[:, tokens.shape[1] :].tolist(), strict=True):
                within = ids[: limits[row]]
                stop = next((place for place, token in enumerate(within) if token in ends), len(within))
                written[row] = within[: stop + 1]
            watcher.advance(len(rows))
    return [written[row] for row in range(len(starts))]


def split_end(ids: list[int], ends: Set[int]) -> tuple[list[int], list[int]]:
    """Split a continuation into its text and its end token, which is absent (empty) if a limit ended the text."""
    return (ids[:-1], ids[-1:]) if ids and ids[-1] in ends else (ids, [])


def written_text(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """Decode tokens that a model wrote; spaces are not cleaned up."""
    return decode_ids(
        tokenizer,
        ids,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )


def answered_pair(tokenizer: Any, prompt: Prompt, body: list[int], end: list[int]) -> dict[str, Any] | None:
    """Make the row of a prompt and the model's answer, for `read_examples`.

    Args:
        tokenizer: the model's.
        prompt: a text or messages, also with functions; the answer is a text or messages as it is.
        body: tokens of the answer.
        end: the token that ended it; empty if the answer was cut off.

    Returns:
        The row; None for an answer without text.
    """
    if not written_text(tokenizer, body, skip_special_tokens=True).strip():
        return None
    text = written_text(tokenizer, body)
    response = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    ending = {END: written_text(tokenizer, end)} if end else {}
    row = prompt if isinstance(prompt, dict) else {"prompt": prompt}
    return {**row, "response": response, CUT_OFF: not end, **ending}


class GumbelNoise(LogitsProcessor):
    """Adds temperature * Gumbel noise to the logits: the argmax is a sample of softmax(logits / temperature).

    Args:
        temperature: above 0.
        seeds: of the noise of each row, independent of the batch.
    """

    def __init__(self, temperature: float, seeds: Sequence[Sequence[int]]) -> None:
        self.temperature = temperature
        self.sources = [np.random.default_rng(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B, V] logits with noise."""
        noise = np.stack([source.gumbel(size=scores.shape[-1]) for source in self.sources])
        return scores + self.temperature * torch.from_numpy(noise).to(scores)
