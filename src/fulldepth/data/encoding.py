"""Records into token sequences, one recipe per task and kind of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fulldepth.data.masking import IGNORE, mask_tokens
from fulldepth.data.packing import pack
from fulldepth.data.sequences import Example
from fulldepth.data.sources import Record, Source
from fulldepth.data.tokens import Frame, encode_texts, leading_ids, plain_ids
from fulldepth.errors import FulldepthError


class Limits(NamedTuple):
    """How much to prepare; see `prepare`."""

    max_sequences: int
    sequence_length: int
    max_positions: int | None
    truncate: bool
    seed: int

    @property
    def longest(self) -> int:
        """Tokens of a sequence at most, by what is asked and what the model can take."""
        return min(self.sequence_length, self.max_positions or self.sequence_length)


Encoded = tuple[list[Example], list[str]]
"""Examples, and warnings."""


def encode(
    source: Source, order: Sequence[int], labels: Sequence[int], task: str, tokenizer: Any, limits: Limits
) -> Encoded:
    """Examples of the records in `order`, with their `labels`, and warnings about what was left out.

    Raises:
        FulldepthError: if sequences are too long for the model.
    """
    records = [source.records[i] for i in order]
    if source.kind == "pairs":
        return _pairs(records, tokenizer, limits)
    if source.kind == "text" and task in ("causal-lm", "masked-lm"):
        examples, warnings = _windows(records, task, tokenizer, limits)
    else:
        pieces = source.kind == "text" and task == "representation"
        examples, warnings = _one_by_one(records, labels, tokenizer, limits, pieces=pieces)
    if task == "causal-lm":
        for example in examples:
            example.targets = next_tokens(example.token_ids)
    elif task == "masked-lm" and tokenizer.mask_token_id is not None:
        _mask(examples, tokenizer, limits.seed)
    return examples, warnings


def next_tokens(ids: np.ndarray) -> np.ndarray:
    """[T] targets of a causal model: the following token, -100 at the end."""
    return np.append(ids[1:], IGNORE)


def _windows(records: Sequence[Record], task: str, tokenizer: Any, limits: Limits) -> Encoded:
    """Full windows of plain text; a masked model's carry its special tokens around each."""
    length = limits.sequence_length
    if limits.max_positions is not None and length > limits.max_positions:
        raise FulldepthError(
            f"Sequences of {length} tokens are longer than the model's {limits.max_positions} positions. "
            f"Set sequence_length to {limits.max_positions} or less."
        )
    texts = [text for record in records for text in (record.text, record.second) if text]
    frame = Frame.of(tokenizer, texts)
    outer, inner = (frame, Frame()) if task == "masked-lm" else (Frame(), frame)
    if length <= len(outer):
        raise FulldepthError(_no_room(length, outer))
    packed = pack(
        texts,
        lambda text, needed: inner.wrap(leading_ids(tokenizer, text, needed)),
        window=length - len(outer),
        most=limits.max_sequences,
        separator=tokenizer.eos_token_id,
    )
    warnings = []
    if packed.left_over:
        warnings.append(f"The last {packed.left_over} tokens of the text do not fill a sequence and are left out.")
    types = [0] * length if _has_types(tokenizer, texts[0]) else None
    return [_example(outer.wrap(window), types) for window in packed.windows], warnings


def _one_by_one(
    records: Sequence[Record], labels: Sequence[int], tokenizer: Any, limits: Limits, *, pieces: bool
) -> Encoded:
    """One text (or two), one sequence, with special tokens. What is too long is cut off or, with `pieces`, cut up."""
    texts = [record.text or "" for record in records]
    frame, typed = Frame.of(tokenizer, texts), _has_types(tokenizer, texts[0])
    room = limits.longest - len(frame)
    if room < 1:
        raise FulldepthError(_no_room(limits.longest, frame))
    examples: list[Example] = []
    cut = 0
    for record, text, label in zip(records, texts, labels, strict=True):
        left = limits.max_sequences - len(examples)
        if not left:
            break
        most = left if pieces else 1
        if record.second is not None:
            example, is_cut = _two(text, record.second, tokenizer, limits.longest)
            example.label = label
            examples.append(example)
            cut += is_cut
            continue
        ids = leading_ids(tokenizer, text, room * most + 1)
        cut += len(ids) > room and not pieces
        for start in range(0, len(ids), room)[:most]:
            whole = frame.wrap(ids[start : start + room])
            examples.append(_example(whole, [0] * len(whole) if typed else None, label))
    verb = "text is" if cut == 1 else "texts are"
    return examples, [f"{cut} {verb} longer than {limits.longest} tokens and cut there."] if cut else []


def _two(first: str, second: str, tokenizer: Any, longest: int) -> tuple[Example, bool]:
    """Two texts as the tokenizer joins them, the longer one cut where they do not fit; and whether it was."""
    joined = encode_texts(tokenizer, first, second)
    is_cut = len(joined["input_ids"]) > longest
    if is_cut:
        joined = encode_texts(tokenizer, first, second, truncation="longest_first", max_length=longest)
    return _example(joined["input_ids"], joined.get("token_type_ids")), is_cut


def _no_room(length: int, frame: Frame) -> str:
    return f"A sequence_length of {length} leaves no room beside the tokenizer's {len(frame)} special tokens."


def _pairs(records: Sequence[Record], tokenizer: Any, limits: Limits) -> Encoded:
    """Prompt and response tokenised apart, so that every target is a token of the response."""
    frame = Frame.of(tokenizer, (record.prompt or "" for record in records))
    examples, lengths = [], []
    for record in records[: limits.max_sequences]:
        prompt = [*frame.prefix, *plain_ids(tokenizer, record.prompt or "")]
        response = plain_ids(tokenizer, record.response or "")
        ids = [*prompt, *response, *frame.suffix]
        if not response:
            continue
        lengths.append(len(ids))
        example = _example(ids[: limits.longest])
        example.targets = next_tokens(example.token_ids)
        position = np.arange(1, len(example.targets) + 1)  # of the token that is the target
        example.targets[(position < len(prompt)) | (position >= len(prompt) + len(response))] = IGNORE
        examples.append(example)
    too_long = sum(length > limits.longest for length in lengths)
    if not too_long:
        return examples, []
    found = f"{too_long} of {len(lengths)} prompts with their responses are longer than {limits.longest} tokens"
    if limits.truncate:
        return examples, [f"{found} and cut there."]
    raise FulldepthError(
        f"{found}; the longest has {max(lengths)}. sequence_length is {limits.sequence_length}, "
        f"the model's positions are {limits.max_positions or 'not limited'}. "
        "Raise sequence_length, or ask for truncation."
    )


def _mask(examples: Sequence[Example], tokenizer: Any, seed: int) -> None:
    """Fill in what a masked language model is asked: `Example.masked_ids` and `Example.targets`."""
    for index, example in enumerate(examples):
        special = np.isin(example.token_ids, tokenizer.all_special_ids)
        example.masked_ids, example.targets = mask_tokens(
            example.token_ids, special, tokenizer.mask_token_id, seed=seed, index=index
        )


def _has_types(tokenizer: Any, text: str) -> bool:
    return "token_type_ids" in encode_texts(tokenizer, text[:8])


def _example(ids: Sequence[int], types: Sequence[int] | None = None, label: int = IGNORE) -> Example:
    token_ids = np.asarray(ids, dtype=np.int64)
    kinds = None if types is None else np.asarray(types[: len(token_ids)], dtype=np.int64)
    return Example(token_ids, types=kinds, label=label)
