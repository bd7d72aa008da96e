"""`prepare`: a source made ready for one task and one model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fulldepth.data.encoding import Limits, encode
from fulldepth.data.labels import Labels, align_labels, sample
from fulldepth.data.masking import IGNORE
from fulldepth.data.sequences import Example, Picture, Sequences, collate_images, collate_texts
from fulldepth.data.sources import Record, Source
from fulldepth.data.tokens import WordFinder, check_vocabulary
from fulldepth.errors import FulldepthError, unknown
from fulldepth.fingerprint import Fingerprint

TASKS: dict[str, tuple[str, ...]] = {
    "causal-lm": ("text", "pairs", "labelled-text"),
    "masked-lm": ("text", "labelled-text"),
    "text-classification": ("text", "labelled-text"),
    "image-classification": ("images",),
    "representation": ("text", "labelled-text", "images"),
}
"""Task -> kinds of data that it can use."""
NO_MASK = "the tokenizer has no mask token, so no token can be predicted from the others"


def prepare(
    source: Source,
    *,
    task: str,
    tokenizer: Any = None,
    processor: Any = None,
    max_sequences: int = 256,
    sequence_length: int = 256,
    max_positions: int | None = None,
    vocab_size: int | None = None,
    label2id: Mapping[str, int] | None = None,
    words: Sequence[str] = (),
    truncate: bool = False,
    seed: int = 0,
) -> Sequences:
    """Tokenise, pack or cut, mask, sample and label: everything between the data and the model.

    For `masked-lm` the inputs are not masked; a masked copy of them is added with its targets (`Batch.masked_inputs`).
    If the tokenizer has no mask token there is neither, and `Sequences.no_targets` says so.

    Plain text fills whole windows for language models (the first `max_sequences` of them); elsewhere one text, one
    prompt with its response or one image is one sequence. A representation cuts a long plain text into several.
    Labelled data and images beyond `max_sequences` are sampled: seeded, the classes in turn.

    Args:
        source: from `open_source`.
        task: `causal-lm`, `masked-lm`, `text-classification`, `image-classification` or `representation`.
        tokenizer: for text.
        processor: for images.
        max_sequences: at most this many sequences.
        sequence_length: tokens of a window, and at most of any sequence; special tokens included.
        max_positions: what the model can take; None = no limit.
        vocab_size: rows of the model's embedding; None = not checked.
        label2id: the model's classes; labels follow it where the names agree.
        words: words whose positions are wanted (`Batch.words`).
        truncate: cut prompts with responses that are too long instead of refusing them.
        seed: of the sample and the masks.

    Raises:
        FulldepthError: if task, data and model do not fit each other, or nothing is left.
    """
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if source.kind not in TASKS[task]:
        raise FulldepthError(
            f"A {task} model cannot use {source.name}: its kind is {source.kind}, expected {' or '.join(TASKS[task])}."
        )
    if max_sequences < 1 or sequence_length < 1:
        raise FulldepthError(
            f"max_sequences and sequence_length must be at least 1, got {max_sequences} and {sequence_length}."
        )
    labels = align_labels(source, task, label2id)
    if source.kind == "images":
        return _images(source, task, processor, labels, max_sequences, seed)
    if tokenizer is None:
        raise FulldepthError(f"{source.name} is text, and the model has no tokenizer. Give one.")
    limits = Limits(max_sequences, sequence_length, max_positions, truncate, seed)
    return _texts(source, task, tokenizer, labels, limits, vocab_size, words)


def _texts(
    source: Source,
    task: str,
    tokenizer: Any,
    labels: Labels,
    limits: Limits,
    vocab_size: int | None,
    words: Sequence[str],
) -> Sequences:
    order = [index for index, record in enumerate(source.records) if _has_text(record, source.kind)]
    if not order:
        raise FulldepthError(f"{source.name} has no text: every record is blank.")
    blank = len(source) - len(order)
    warnings = [
        *labels.warnings,
        *([f"{blank} blank records are left out."] if blank and source.kind != "text" else []),
    ]
    if source.kind == "labelled-text":
        order = [order[i] for i in sample([labels.ids[index] for index in order], limits.max_sequences, limits.seed)]
    examples, cut = encode(source, order, [labels.ids[index] for index in order], task, tokenizer, limits)
    if not examples:
        raise FulldepthError(f"{source.name} gives no tokens with this tokenizer.")
    fed = [e.token_ids if e.masked_ids is None else np.maximum(e.token_ids, e.masked_ids) for e in examples]
    highest = max(int(ids.max()) for ids in fed)
    warnings += cut + check_vocabulary(highest, tokenizer, vocab_size) + _mark_words(examples, tokenizer, words)
    return Sequences(
        name=source.name,
        kind=source.kind,
        task=task,
        hash=_text_hash(task, examples),
        examples=examples,
        collate=partial(collate_texts, examples, pad_id=_pad_id(tokenizer, vocab_size)),
        lengths=[len(example.token_ids) for example in examples],
        num_targets=_count_targets(examples, task),
        num_classes=labels.num_classes,
        class_names=labels.class_names,
        warnings=warnings,
        no_targets=NO_MASK if task == "masked-lm" and tokenizer.mask_token_id is None else None,
    )


def _count_targets(examples: Sequence[Example], task: str) -> int:
    if task == "text-classification":
        return sum(example.label != IGNORE for example in examples)
    return sum(int((example.targets != IGNORE).sum()) for example in examples if example.targets is not None)


def _has_text(record: Record, kind: str) -> bool:
    parts = (record.prompt, record.response) if kind == "pairs" else (record.text,)
    return all(part is not None and part.strip() for part in parts)


def _images(source: Source, task: str, processor: Any, labels: Labels, max_sequences: int, seed: int) -> Sequences:
    if processor is None:
        raise FulldepthError(
            f"{source.name} holds images, and the model has no image processor. Give images to a vision model."
        )
    chosen = sample(labels.ids, max_sequences, seed)
    pictures = []
    settings = processor.to_dict() if hasattr(processor, "to_dict") else type(processor).__name__
    fingerprint = Fingerprint(task, json.dumps(settings, sort_keys=True, default=str))
    for index in chosen:
        load = source.records[index].image
        if load is None:
            raise FulldepthError(f"Record {index} of {source.name} has no image.")
        image = load()  # also finds corrupt files before the model runs
        for part in (str(image.size).encode(), image.tobytes(), str(labels.ids[index]).encode()):
            fingerprint.add(part)
        pictures.append(Picture(load, labels.ids[index]))
    if not pictures:
        raise FulldepthError(f"{source.name} holds no images.")
    labelled = sum(p.label != IGNORE for p in pictures)
    return Sequences(
        name=source.name,
        kind=source.kind,
        task=task,
        hash=str(fingerprint),
        examples=pictures,
        collate=partial(collate_images, pictures, processor=processor),
        lengths=[0] * len(pictures),
        num_targets=labelled if task == "image-classification" else 0,
        num_classes=labels.num_classes,
        class_names=labels.class_names,
        warnings=labels.warnings,
    )


def _pad_id(tokenizer: Any, vocab_size: int | None) -> int:
    """The padding token, or 0: padding is masked, but its id must exist in the model."""
    pad = tokenizer.pad_token_id
    return 0 if pad is None or (vocab_size is not None and pad >= vocab_size) else int(pad)


def _mark_words(examples: Sequence[Example], tokenizer: Any, words: Sequence[str]) -> list[str]:
    """Fill in `Example.words`."""
    if not words:
        return []
    finder = WordFinder(tokenizer, words)
    missing = set(range(len(words)))
    for example in examples:
        example.words = np.array(finder.find(example.token_ids.tolist()), dtype=np.int64)
        missing -= set(example.words.tolist())
    return [f"The word {words[index]!r} occurs nowhere in the sequences." for index in sorted(missing)]


def _text_hash(task: str, examples: Sequence[Example]) -> str:
    fingerprint = Fingerprint(task)
    for example in examples:
        masked_ids = example.token_ids if example.masked_ids is None else example.masked_ids
        for array in (example.token_ids, masked_ids, example.targets, example.types):
            fingerprint.add(b"" if array is None else array.astype("<i8").tobytes())
        fingerprint.add(str(example.label).encode())
    return str(fingerprint)
