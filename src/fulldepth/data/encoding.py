"""Converts records to token sequences, by task and kind of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fulldepth.data.batches import Example
from fulldepth.data.drawing import Text, block_clusters, draw_windows, first_windows
from fulldepth.data.opening import Order
from fulldepth.data.sources import Record
from fulldepth.data.tokens import Frame, check_positions, encode_texts, leading_ids, plain_ids
from fulldepth.errors import FulldepthError
from fulldepth.targets import IGNORE

MASKED_SHARE = 0.15
"""Share of the ordinary tokens that is masked, as in BERT; always by the mask token, never by a random one."""
Bos = Literal["auto", "always", "never"]
"""Whether a window of text begins with the BOS token: as the tokenizer begins a text, always, or never."""


class Limits(NamedTuple):
    """How much to prepare, and which of it; see `prepare`."""

    max_sequences: int
    sequence_length: int
    max_positions: int | None
    truncate: bool
    seed: int
    skip_bad: bool = False
    order: Order = "random"
    bos: Bos = "auto"
    one_per_row: bool = False
    balanced: bool = False
    vocab_size: int | None = None
    pad_id: int | None = None
    label2id: Mapping[str, int] | None = None
    words: Sequence[str] = ()

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, by `sequence_length` and the model's positions."""
        return min(self.sequence_length, self.max_positions or self.sequence_length)


class Encoded(NamedTuple):
    """Examples with their clusters."""

    examples: list[Example]
    warnings: list[str]
    clusters: list[int]
    unit: str
    """What a cluster is."""
    no_error: str | None = None
    """Reason why no standard error can be stated."""


class Records(NamedTuple):
    """Records to encode."""

    records: list[Record]
    identities: list[int]
    labels: list[int]

    def select(self, indices: Sequence[int]) -> Records:
        """The records of these indices."""
        records, identities, labels = ([column[i] for i in indices] for column in self[:3])
        return Records(records, identities, labels)  # type: ignore[arg-type]


def windowed(kind: str, task: str, one_per_row: bool) -> bool:
    """Whether a sample is one of windows or pieces of texts, not of rows."""
    return kind == "text" and task in ("causal-lm", "masked-lm", "representation") and not one_per_row


def encode(name: str, kind: str, given: Records, task: str, tokenizer: Any, limits: Limits) -> Encoded:
    """Examples of records, and warnings about omitted text."""
    if kind == "pairs":
        return _pairs(given, tokenizer, limits)
    pairs = task == "representation" and any(record.second is not None for record in given.records)
    if windowed(kind, task, limits.one_per_row) and not pairs:
        encoded = _windows(given, task, tokenizer, limits)
    else:
        encoded = _one_by_one(name, kind, given, task, tokenizer, limits)
    if task != "masked-lm" or tokenizer.mask_token_id is None:
        return encoded
    masked = []
    for index, example in enumerate(encoded.examples):
        ids = example.input_ids.numpy()
        special = np.isin(ids, tokenizer.all_special_ids)
        masked_ids, labels = mask_tokens(ids, special, tokenizer.mask_token_id, seed=limits.seed, index=index)
        masked.append(replace(example, masked_ids=torch.from_numpy(masked_ids), labels=torch.from_numpy(labels)))
    return encoded._replace(examples=masked)


def _windows(given: Records, task: str, tokenizer: Any, limits: Limits) -> Encoded:
    """Windows of plain text. For a causal model they begin as `limits.bos` says; for others each has special tokens
    around it, and as a representation a short document, or the end of one, is a short window.
    """
    length = limits.longest if task == "representation" else limits.sequence_length
    check_positions(length, limits.max_positions)
    parts = [(i, text) for i, record in enumerate(given.records) for text in (record.text, record.second) if text]
    documents = [(given.identities[index], text) for index, text in parts]
    frame = Frame.of(tokenizer, (text for _, text in documents))
    warnings: list[str] = []
    outer, inner = (frame, Frame())
    if task == "causal-lm":
        opening, warnings = _opening(frame, tokenizer, limits.bos)
        outer, inner = Frame(opening), Frame(frame.prefix if opening else (), frame.suffix)
    if length <= len(outer):
        raise FulldepthError(_no_room(length, outer))
    separator = tokenizer.eos_token_id

    def join(ids: list[int], following: Sequence[int]) -> list[int]:
        between = [separator] if separator is not None and ids[-1] != separator else []
        return [*ids, *between, *inner.prefix, *following]

    def tokenise(text: Text) -> list[int]:
        ids = plain_ids(tokenizer, text.text)
        return [*ids, *(inner.suffix if text.ends and ids else ())]

    def leading(text: str, needed: int) -> list[int]:
        ids = leading_ids(tokenizer, text, needed)
        return [*ids, *inner.suffix] if ids else []

    options: dict[str, Any] = {
        "window": length - len(outer),
        "count": limits.max_sequences,
        "join": None if task == "representation" else join,
    }
    if limits.order == "first":
        drawn = first_windows((text for _, text in documents), leading, **options)
    else:
        drawn = draw_windows(documents, tokenise, seed=limits.seed, **options)
    if drawn.left_over:
        warnings.append(f"{drawn.left_over} tokens at the ends of documents do not fill a sequence and are left out.")
    typed = _has_types(tokenizer, documents[0][1])
    wrapped = [outer.wrap(each.ids) for each in drawn.windows]
    examples = [_example(ids, task, [0] * len(ids) if typed else None) for ids in wrapped]
    clusters, unit, no_error = block_clusters(drawn.windows, [identity for identity, _ in documents])
    return Encoded(examples, warnings, clusters, unit, no_error)


def _opening(frame: Frame, tokenizer: Any, bos: Bos) -> tuple[tuple[int, ...], list[str]]:
    """The special tokens that every window of text begins with, and a warning if there is none to begin with."""
    if bos != "always" or frame.prefix:
        return (() if bos == "never" else frame.prefix), []
    if tokenizer.bos_token_id is None:
        return (), ["The tokenizer has no BOS token, so no sequence begins with it."]
    return (tokenizer.bos_token_id,), []


def _one_by_one(name: str, kind: str, given: Records, task: str, tokenizer: Any, limits: Limits) -> Encoded:
    """One sequence per text or pair of texts, with special tokens. Long texts are cut off.

    A classifier's labelled texts that are too long are refused or left out, unless `limits.truncate`. Texts without a
    token of their own are left out.
    """
    records = given.records
    texts = [record.text or "" for record in records]
    frame, typed = Frame.of(tokenizer, texts), _has_types(tokenizer, texts[0])
    warnings: list[str] = []
    if kind == "text" and task == "causal-lm":
        opening, warnings = _opening(frame, tokenizer, limits.bos)
        frame = Frame(opening, frame.suffix)
    room = limits.longest - len(frame)
    if room < 1:
        raise FulldepthError(_no_room(limits.longest, frame))
    examples: list[Example] = []
    cut: list[int] = []
    empty: list[int] = []
    for index, (record, text, label) in enumerate(zip(records, texts, given.labels, strict=True)):
        if record.second is not None:
            joined = encode_texts(tokenizer, text, record.second)
            is_cut = len(joined["input_ids"]) > limits.longest
            if is_cut:  # the longer text, as the tokenizer does it
                options = {"truncation": "longest_first", "max_length": limits.longest}
                joined = encode_texts(tokenizer, text, record.second, **options)
            ids = joined["input_ids"]
            examples.append(_example(ids, task, joined.get("token_type_ids"), label))
        else:
            ids = leading_ids(tokenizer, text, room + 1)
            is_cut = len(ids) > room
            wrapped = frame.wrap(ids[:room])
            examples.append(_example(wrapped, task, [0] * len(wrapped) if typed else None, label))
        cut += [index] * is_cut
        empty += [index] * (not ids)
    warnings += _empty_warning(len(empty))
    left_out = set(empty)
    if cut and not limits.truncate and kind == "labelled-text" and task == "text-classification":
        warnings.append(_too_long(name, records[cut[0]], len(cut), tokenizer, limits))
        left_out |= set(cut)
    elif cut:
        verb = "text is" if len(cut) == 1 else "texts are"
        warnings.append(f"{len(cut)} {verb} longer than {limits.longest} tokens and cut there.")
    kept = [index for index in range(len(examples)) if index not in left_out]
    unit = "document" if kind == "text" else "row"
    return Encoded([examples[i] for i in kept], warnings, [given.identities[i] for i in kept], unit)


def _empty_warning(count: int, noun: str = "text") -> list[str]:
    what, verb = (f"1 {noun} gives", "is") if count == 1 else (f"{count} {noun}s give", "are")
    return [f"{what} no token with this tokenizer and {verb} left out."] if count else []


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


def _no_room(length: int, frame: Frame) -> str:
    return f"A sequence_length of {length} leaves no room beside the tokenizer's {len(frame)} special tokens."


def _pairs(given: Records, tokenizer: Any, limits: Limits) -> Encoded:
    """Prompts and responses, tokenised separately so that every target is a token of the response."""
    frame = Frame.of(tokenizer, (record.prompt or "" for record in given.records))
    examples, lengths, clusters = [], [], []
    empty = 0
    for record, cluster in zip(given.records, given.identities, strict=True):
        prompt = [*frame.prefix, *plain_ids(tokenizer, record.prompt or "")]
        response = plain_ids(tokenizer, record.response or "")
        ids = [*prompt, *response, *frame.suffix]
        if not response:
            empty += 1
            continue
        lengths.append(len(ids))
        start = max(1, len(prompt))  # the first token has no context
        examples.append(Example.of(ids[: limits.longest], start, len(prompt) + len(response)))
        clusters.append(cluster)
    too_long = sum(length > limits.longest for length in lengths)
    message = f"{too_long} of {len(lengths)} prompts with their responses are longer than {limits.longest} tokens"
    if too_long and not limits.truncate:
        raise FulldepthError(
            f"{message}; the longest has {max(lengths)}. sequence_length is {limits.sequence_length}, "
            f"the model's positions are {limits.max_positions or 'not limited'}. "
            "Raise sequence_length, or ask for truncation."
        )
    warnings = _empty_warning(empty, "response") + ([f"{message} and cut there."] if too_long else [])
    return Encoded(examples, warnings, clusters, "row")


def _has_types(tokenizer: Any, text: str) -> bool:
    return "token_type_ids" in encode_texts(tokenizer, text[:8])


def _example(ids: Sequence[int], task: str, types: Sequence[int] | None = None, class_index: int = IGNORE) -> Example:
    """A sequence; of a causal model every token but the first, which has no context, is predicted."""
    kinds = None if types is None else torch.tensor(types[: len(ids)], dtype=torch.int64)
    predicted = (1, len(ids)) if task == "causal-lm" else (0, 0)
    return Example.of(ids, *predicted, types=kinds, class_index=class_index)


def mask_tokens(
    ids: np.ndarray, special: np.ndarray, mask_id: int, *, seed: int, index: int, share: float = MASKED_SHARE
) -> tuple[np.ndarray, np.ndarray]:
    """Replace a share of the ordinary tokens by the mask token.

    Args:
        ids: `[T]` token ids.
        special: `[T]` bool, positions that are never masked.
        mask_id: id of the mask token.
        seed: determines the positions together with `index`, independently of batching and order.
        index: index of the sequence in the whole data set.
        share: share of the ordinary tokens, rounded; at least one token if there is any.

    Returns:
        `[T]` ids with masks, and `[T]` targets: the true token where masked, -100 elsewhere.

    Source: Devlin et al. 2019, section 3.1.
    """
    ordinary = np.flatnonzero(~special)
    count = min(len(ordinary), max(1, round(share * len(ordinary))))
    chosen = np.random.default_rng([seed, index]).choice(ordinary, count, replace=False)
    masked_ids, targets = ids.copy(), np.full_like(ids, IGNORE)
    targets[chosen], masked_ids[chosen] = ids[chosen], mask_id
    return masked_ids, targets
