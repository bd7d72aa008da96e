"""`generate_responses`: the unmodified model's responses to prompts, used as data of a search."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from fulldepth.data.conversations import CUT_OFF, TABLES, Prompt, conversation_prompts
from fulldepth.data.opening import open_data
from fulldepth.data.rendering import as_prompt, encode_prompt
from fulldepth.data.row_index import sampled_rows
from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import atomic
from fulldepth.hf import device_of
from fulldepth.progress import Watcher

FILE = "responses.jsonl"
MOST = 10_000_000
"""Largest number of prompts, of tokens in a response, and of sequences in a batch."""


class Responses(NamedTuple):
    """Prompts with the model's responses, and the settings of their generation."""

    pairs: list[dict[str, Any]]
    """`prompt` and `response`, for `read_examples`: both texts, or both lists of messages; `cut_off` is true where the
    limit of tokens ended the response, so that no loss is put on an end that the model did not choose."""
    settings: dict[str, Any]
    """Settings of the generation, and counts of responses; plain values for a plan's `data`."""

    def text(self) -> str:
        """The pairs as the text of a `.jsonl` file."""
        return "".join(json.dumps(pair) + "\n" for pair in self.pairs)

    def save(self, path: str | Path) -> Path:
        """Write the pairs as a `.jsonl` file, atomically.

        Raises:
            FulldepthError: if it cannot be written.
        """
        target = Path(path)
        try:
            with atomic(target) as part:
                part.write_text(self.text(), encoding="utf-8")
        except OSError as error:
            raise FulldepthError(f"Cannot write responses to {target}: {error.strerror or error}.") from error
        return target


def read_prompts(data: Any, tokenizer: Any, limit: int | None = None, seed: int = 0) -> list[Prompt]:
    """The prompts of rows; their responses, if any, are ignored.

    Args:
        data: pairs as for `read_examples`; a row may also hold only a prompt. The prompt of a chat is everything
            before its last response.
        tokenizer: with a chat template, prompts become messages.
        limit: most rows, a uniform sample in the order of the data (of a stream the first ones); None = all.
        seed: of the sample.

    Raises:
        FulldepthError: if a row has no prompt, or there are no rows.
    """
    stream = isinstance(data, datasets.IterableDataset)
    opened = open_data(data, limit=limit if stream else None, suffixes=TABLES)
    rows, (_, first) = opened.rows(), next(opened.rows(), ("", {}))
    if limit is not None and not stream and (chosen := sampled_rows(opened, list(first), limit, seed)) is not None:
        rows = ((where, row) for _, where, row in chosen)
    prompts: list[Prompt] = []
    for where, prompt in conversation_prompts(rows, tokenizer):
        if not _has_text(prompt):
            raise FulldepthError(f"{where} has an empty prompt. Leave the row out, or give it one.")
        prompts.append(prompt)
    if not prompts:
        raise FulldepthError(f"There are no prompts in {opened.name}.")
    return prompts


def generate_responses(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    n: int | None = None,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    watcher: Watcher | None = None,
) -> Responses:
    """The model's responses to the first `n` prompts, generated in batches with left padding and a cache.

    Responses do not depend on `batch_size`, except for ties that rounding decides. For sampling, Gumbel noise from a
    generator seeded by (`seed`, number of the prompt) is added to the logits divided by the temperature; the largest
    sum is a sample from their softmax (no top-k, no top-p). Of the checkpoint's `generation_config` only the end tokens
    are used. Empty responses are left out and reported.

    Args:
        model: a causal language model; runs in evaluation mode, which is restored on leaving.
        tokenizer: the model's, with its chat template if it has one.
        prompts: texts or lists of messages (see `read_prompts`).
        n: None = all.
        temperature: 0 = greedy.
        seed: of the sampling.
        max_new_tokens: most tokens of a response; longer ones are cut off.
        batch_size: prompts in a batch; prompts are sorted by length.
        watcher: receives progress, and messages on empty and unfinished responses.

    Returns:
        Pairs in the order of the prompts, and the settings.

    Raises:
        FulldepthError: for settings out of range, a model that cannot generate, prompts that are empty or leave
            no room for a response, or if no response is left.

    Source: Hopscotch (arXiv 2506.03303), its data generation; Gumbel-max trick: Gumbel 1954.
    """
    watcher = watcher or Watcher()
    count = len(prompts) if n is None else n
    _check_settings(model, len(prompts), count, temperature, seed, max_new_tokens, batch_size)
    rendered = [as_prompt(tokenizer, prompt) for prompt in prompts[:count]]
    encoded = [encode_prompt(tokenizer, prompt, f"Prompt {i}") for i, prompt in enumerate(rendered, start=1)]
    _check_prompts(rendered, encoded, model, max_new_tokens)
    ends = _end_tokens(model, tokenizer)
    config = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=sorted(ends) or None, pad_token_id=0)
    order = sorted(range(count), key=lambda i: len(encoded[i]), reverse=True)
    answers: dict[int, list[int]] = {}
    watcher.begin("Responses", count)
    with _plain_generation(model):
        for start in range(0, count, batch_size):
            chosen = order[start : start + batch_size]
            noise = [GumbelNoise(temperature, seed, chosen)] if temperature else []
            answers |= zip(chosen, _answers(model, [encoded[i] for i in chosen], config, noise), strict=True)
            watcher.advance(len(chosen))
    settings = {"prompts": count, "temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    settings |= {"batch_size": batch_size, "chat_template": bool(tokenizer.chat_template)}
    return _responses(tokenizer, prompts, rendered, answers, ends, settings, watcher)


def _answers(
    model: PreTrainedModel, prompts: Sequence[list[int]], config: GenerationConfig, noise: Sequence[LogitsProcessor]
) -> list[list[int]]:
    """Generated ids of one batch, up to the length of the longest response."""
    batch = _left_padded(prompts, device_of(model))
    generate: Any = model.generate
    sequences = generate(**batch, generation_config=config, logits_processor=LogitsProcessorList(noise))
    return sequences[:, batch["input_ids"].shape[1] :].tolist()


class GumbelNoise(LogitsProcessor):
    """Adds temperature * Gumbel noise to the logits: the argmax is a sample of softmax(logits / temperature).

    Args:
        temperature: above 0.
        seed: with the number of a row, seeds its noise.
        rows: number of each row in the data, independent of the batch.
    """

    def __init__(self, temperature: float, seed: int, rows: Sequence[int]) -> None:
        self.temperature = temperature
        self.sources = [np.random.default_rng([seed, row]) for row in rows]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B, V] logits with noise."""
        noise = np.stack([source.gumbel(size=scores.shape[-1]) for source in self.sources])
        return scores + self.temperature * torch.from_numpy(noise).to(scores)


def _responses(
    tokenizer: Any,
    prompts: Sequence[Prompt],
    rendered: Sequence[Prompt],
    answers: Mapping[int, list[int]],
    ends: set[int],
    settings: dict[str, Any],
    watcher: Watcher,
) -> Responses:
    """Pairs in order, without the empty ones, which are reported."""
    pairs: list[dict[str, Any]] = []
    empty, unfinished, tokens = [], 0, 0
    for index in range(len(rendered)):
        ids = answers[index]
        stop = next((i for i, token in enumerate(ids) if token in ends), None)
        text = tokenizer.decode(ids[:stop], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if not text.strip():
            empty.append(index + 1)
            continue
        unfinished += stop is None
        tokens += len(ids[:stop])
        if isinstance(prompts[index], str):  # the template gives the same messages when the pair is read
            prompt = prompts[index] if tokenizer.chat_template else rendered[index]
            pair = {"prompt": prompt, "response": text}
        else:
            pair = {"prompt": prompts[index], "response": [{"role": "assistant", "content": text}]}
        pairs.append(pair | ({CUT_OFF: True} if stop is None else {}))
    settings |= {"empty": empty, "unfinished": unfinished, "response_tokens": tokens}
    if not pairs:
        raise FulldepthError(f"The model gave an empty response to each of the {len(rendered)} prompts.")
    if empty:
        watcher.say(f"{len(empty)} of {len(rendered)} responses are empty and left out: {_numbers(empty)}.")
    if unfinished:
        watcher.say(
            f"{unfinished} of {len(rendered)} responses were cut off after {settings['max_new_tokens']} tokens; no "
            "loss is put on their ends."
        )
    return Responses(pairs, settings)


def _check_settings(
    model: PreTrainedModel, available: int, n: int, temperature: float, seed: int, max_new_tokens: int, batch_size: int
) -> None:
    if not available:
        raise FulldepthError("There are no prompts to respond to.")
    if n > available:
        raise FulldepthError(f"{one_line(n, 30)} responses were asked for, but there are {available} prompts.")
    for name, number in (("responses", n), ("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if not 1 <= number <= MOST:
            raise FulldepthError(f"{name} must be 1 to {MOST:,}, got {one_line(number, 30)}.")
    if not 0 <= temperature < math.inf:
        raise FulldepthError(f"The temperature must be a number from 0 (greedy), got {temperature}.")
    if not 0 <= seed < 2**32:
        raise FulldepthError(f"The seed must be a whole number from 0, below 2**32, got {one_line(seed, 30)}.")
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise FulldepthError(f"{type(model).__name__} cannot respond to prompts; give a causal language model.")


def _check_prompts(
    rendered: Sequence[Prompt], encoded: Sequence[list[int]], model: PreTrainedModel, max_new_tokens: int
) -> None:
    for number, (prompt, ids) in enumerate(zip(rendered, encoded, strict=True), start=1):
        if not _has_text(prompt) or not ids:
            raise FulldepthError(f"Prompt {number} is empty. Leave it out, or give it text.")
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is None:
        return
    long = [number for number, ids in enumerate(encoded, start=1) if len(ids) + max_new_tokens > positions]
    if long:
        longest = max(map(len, encoded))
        room = f"Set max_new_tokens to {positions - longest} or less" if longest < positions else "Shorten them"
        raise FulldepthError(
            f"Prompt{'s' if len(long) > 1 else ''} {_numbers(long)} with {max_new_tokens} new tokens would be longer "
            f"than the model's {positions} positions; the longest prompt has {longest} tokens. {room}, or leave them "
            "out."
        )


def _end_tokens(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """Ids that end a response: those of the tokenizer and of the checkpoint's `generation_config`."""
    named = model.generation_config.eos_token_id if model.generation_config else None
    ids = {named} if isinstance(named, int) else set(named or ())
    return ids | ({tokenizer.eos_token_id} - {None})


@contextmanager
def _plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode and default generation settings inside `with`."""
    config, training = model.generation_config, [module for module in model.modules() if module.training]
    model.eval()
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = config
        for module in training:
            module.training = True


def _left_padded(rows: Sequence[list[int]], device: torch.device) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, [B, T] int64."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return {"input_ids": ids, "attention_mask": mask}


def _has_text(prompt: Prompt) -> bool:
    parts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return any(part.strip() for part in parts)


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
