"""Converts records to token sequences, by task and kind of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fulldepth.data.batches import Example
from fulldepth.data.masking import mask_tokens
from fulldepth.data.sources import Record, Source
from fulldepth.data.tokens import Frame, check_positions, encode_texts, leading_ids, plain_ids
from fulldepth.errors import FulldepthError
from fulldepth.targets import IGNORE


class Limits(NamedTuple):
    """How much to prepare; see `prepare`."""

    max_sequences: int
    sequence_length: int
    max_positions: int | None
    truncate: bool
    seed: int
    skip_bad: bool = False

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, by `sequence_length` and the model's positions."""
        return min(self.sequence_length, self.max_positions or self.sequence_length)


Encoded = tuple[list[Example], list[str]]
"""Examples, and warnings."""


def encode(
    source: Source, order: Sequence[int], labels: Sequence[int], task: str, tokenizer: Any, limits: Limits
) -> Encoded:
    """Examples of the records in `order`, with their `labels`, and warnings about omitted text."""
    records = [source.records[i] for i in order]
    if source.kind == "pairs":
        return _pairs(records, tokenizer, limits)
    if source.kind == "text" and task in ("causal-lm", "masked-lm"):
        examples, warnings = _windows(records, task, tokenizer, limits)
    else:
        pieces = source.kind == "text" and task == "representation"
        examples, cut = _one_by_one(records, labels, tokenizer, limits, pieces=pieces)
        warnings = _cut_warning(len(cut), limits)
        if cut and not limits.truncate and source.kind == "labelled-text" and task == "text-classification":
            message = _too_long(source.name, records[cut[0]], len(cut), tokenizer, limits)
            examples, warnings = [examples[index] for index in sorted(set(range(len(examples))) - set(cut))], [message]
    if task == "causal-lm":
        examples = [replace(example, labels=_causal_labels(example.input_ids)) for example in examples]
    elif task == "masked-lm" and tokenizer.mask_token_id is not None:
        examples = [_masked(example, index, tokenizer, limits.seed) for index, example in enumerate(examples)]
    return examples, warnings


def _causal_labels(ids: Tensor) -> Tensor:
    """[T] labels of a causal model: every token but the first, which has no context."""
    return torch.cat([torch.full_like(ids[:1], IGNORE), ids[1:]])


def _windows(records: Sequence[Record], task: str, tokenizer: Any, limits: Limits) -> Encoded:
    """Full windows of plain text; for a masked model each has special tokens around it."""
    length = limits.sequence_length
    check_positions(length, limits.max_positions)
    texts = [text for record in records for text in (record.text, record.second) if text]
    frame = Frame.of(tokenizer, texts)
    outer, inner = (frame, Frame()) if task == "masked-lm" else (Frame(), frame)
    if length <= len(outer):
        raise FulldepthError(_no_room(length, outer))
    windows, left_over = cut_windows(
        texts,
        lambda text, needed: inner.wrap(leading_ids(tokenizer, text, needed)),
        window=length - len(outer),
        count=limits.max_sequences,
        separator=tokenizer.eos_token_id,
    )
    warnings = []
    if left_over:
        warnings.append(f"The last {left_over} tokens of the text do not fill a sequence and are left out.")
    types = [0] * length if _has_types(tokenizer, texts[0]) else None
    return [_example(outer.wrap(window), types) for window in windows], warnings


def cut_windows(
    texts: Iterable[str],
    tokenise: Callable[[str, int], Sequence[int]],
    *,
    window: int,
    count: int,
    separator: int | None = None,
) -> tuple[list[list[int]], int]:
    """Cut texts, joined by `separator`, into windows.

    Unlike `pack`, which adds special tokens to every document and saves all ids, this reads only the text it needs.

    Args:
        texts: documents, read lazily.
        tokenise: (text, needed) -> its first `needed` or more token ids, or all of them.
        window: tokens of a window.
        count: most windows.
        separator: token id between two documents, unless the first already ends with it.

    Returns:
        Full windows, or one short window if the whole text is shorter; and the number of tokens at the end of the text
        that did not fill a window (0 if the text was not read to its end).
    """
    needed = window * count
    stream: list[int] = []
    for text in texts:
        if len(stream) >= needed:
            break
        ids = tokenise(text, needed - len(stream))
        if ids and stream and separator is not None and stream[-1] != separator:
            stream.append(separator)
        stream.extend(ids)
    del stream[needed:]
    if len(stream) < window:
        return [stream] if stream else [], 0
    full = len(stream) // window * window
    return [stream[start : start + window] for start in range(0, full, window)], len(stream) - full


def _one_by_one(
    records: Sequence[Record], labels: Sequence[int], tokenizer: Any, limits: Limits, *, pieces: bool
) -> tuple[list[Example], list[int]]:
    """One sequence per text or pair of texts, with special tokens. Long texts are cut off or, with `pieces`, split.

    Returns:
        The sequences, and the indices of those that were cut off.
    """
    texts = [record.text or "" for record in records]
    frame, typed = Frame.of(tokenizer, texts), _has_types(tokenizer, texts[0])
    room = limits.longest - len(frame)
    if room < 1:
        raise FulldepthError(_no_room(limits.longest, frame))
    examples: list[Example] = []
    cut: list[int] = []
    for record, text, label in zip(records, texts, labels, strict=True):
        remaining = limits.max_sequences - len(examples)
        if not remaining:
            break
        count = remaining if pieces else 1
        if record.second is not None:
            joined, is_cut = _two(text, record.second, tokenizer, limits.longest)
            cut += [len(examples)] * is_cut
            examples.append(_example(joined["input_ids"], joined.get("token_type_ids"), label))
            continue
        ids = leading_ids(tokenizer, text, room * count + 1)
        cut += [len(examples)] * (len(ids) > room and not pieces)
        for start in range(0, len(ids), room)[:count]:
            wrapped = frame.wrap(ids[start : start + room])
            examples.append(_example(wrapped, [0] * len(wrapped) if typed else None, label))
    return examples, cut


def _cut_warning(cut: int, limits: Limits) -> list[str]:
    verb = "text is" if cut == 1 else "texts are"
    return [f"{cut} {verb} longer than {limits.longest} tokens and cut there."] if cut else []


def _too_long(name: str, first: Record, count: int, tokenizer: Any, limits: Limits) -> str:
    """The warning that labelled texts are too long and left out, with the place of the first.

    Raises:
        FulldepthError: if they shall not be left out.
    """
    texts = [first.text or "", *([] if first.second is None else [first.second])]
    longest, remedy = f"sequence_length is {limits.sequence_length}", "Raise it, cut long texts"
    if limits.max_positions is not None and limits.max_positions <= limits.sequence_length:
        longest, remedy = f"the model reads at most {limits.max_positions}", "Cut long texts"
    where = f"{first.where} has {len(encode_texts(tokenizer, *texts)['input_ids'])} tokens, {longest}."
    if not limits.skip_bad:
        raise FulldepthError(f"{where} {remedy} (truncate), or leave them out (--skip-bad).")
    return f"{count} {'text is' if count == 1 else 'texts are'} too long and left out of {name}: {where}"


def _two(first: str, second: str, tokenizer: Any, longest: int) -> tuple[Mapping[str, Any], bool]:
    """Two texts as the tokenizer joins them, the longer one truncated if necessary; and whether it was."""
    joined = encode_texts(tokenizer, first, second)
    is_cut = len(joined["input_ids"]) > longest
    if is_cut:
        joined = encode_texts(tokenizer, first, second, truncation="longest_first", max_length=longest)
    return joined, is_cut


def _no_room(length: int, frame: Frame) -> str:
    return f"A sequence_length of {length} leaves no room beside the tokenizer's {len(frame)} special tokens."


def _pairs(records: Sequence[Record], tokenizer: Any, limits: Limits) -> Encoded:
    """Prompts and responses, tokenised separately so that every target is a token of the response."""
    frame = Frame.of(tokenizer, (record.prompt or "" for record in records))
    examples, lengths = [], []
    for record in records[: limits.max_sequences]:
        prompt = [*frame.prefix, *plain_ids(tokenizer, record.prompt or "")]
        response = plain_ids(tokenizer, record.response or "")
        ids = [*prompt, *response, *frame.suffix]
        if not response:
            continue
        lengths.append(len(ids))
        start = max(1, len(prompt))  # the first token has no context
        examples.append(Example.of(ids[: limits.longest], start, len(prompt) + len(response)))
    too_long = sum(length > limits.longest for length in lengths)
    if not too_long:
        return examples, []
    message = f"{too_long} of {len(lengths)} prompts with their responses are longer than {limits.longest} tokens"
    if limits.truncate:
        return examples, [f"{message} and cut there."]
    raise FulldepthError(
        f"{message}; the longest has {max(lengths)}. sequence_length is {limits.sequence_length}, "
        f"the model's positions are {limits.max_positions or 'not limited'}. "
        "Raise sequence_length, or ask for truncation."
    )


def _masked(example: Example, index: int, tokenizer: Any, seed: int) -> Example:
    """The example with masked tokens and their labels."""
    ids = example.input_ids.numpy()
    special = np.isin(ids, tokenizer.all_special_ids)
    masked_ids, labels = mask_tokens(ids, special, tokenizer.mask_token_id, seed=seed, index=index)
    return replace(example, masked_ids=torch.from_numpy(masked_ids), labels=torch.from_numpy(labels))


def _has_types(tokenizer: Any, text: str) -> bool:
    return "token_type_ids" in encode_texts(tokenizer, text[:8])


def _example(ids: Sequence[int], types: Sequence[int] | None = None, class_index: int = IGNORE) -> Example:
    kinds = None if types is None else torch.tensor(types[: len(ids)], dtype=torch.int64)
    return Example.of(ids, types=kinds, class_index=class_index)
