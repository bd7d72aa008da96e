"""`prepare`: prepares a source for one task and one model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fulldepth.data.batches import Example, id_bytes
from fulldepth.data.coco import Objects
from fulldepth.data.encoding import Bos, Limits, Records, encode, windowed
from fulldepth.data.labelled import align_labels, align_objects, balanced_sample
from fulldepth.data.opening import Order
from fulldepth.data.sequences import Picture, Sequences, collate_images, collate_texts
from fulldepth.data.sources import SKIP, Source, choose, content_hash, identities
from fulldepth.data.tokens import WordFinder, check_vocabulary
from fulldepth.errors import FulldepthError, unknown
from fulldepth.fingerprint import Fingerprint
from fulldepth.targets import IGNORE, next_targets

TASKS: dict[str, tuple[str, ...]] = {
    "causal-lm": ("text", "pairs", "labelled-text"),
    "masked-lm": ("text", "labelled-text"),
    "text-classification": ("text", "labelled-text"),
    "image-classification": ("images",),
    "detection": ("objects", "images"),
    "representation": ("text", "labelled-text", "images", "objects"),
}
"""Task -> supported kinds of data."""
BALANCED = "Balanced sample: accuracy is the mean over classes, not over rows."
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
    pad_id: int | None = None,
    label2id: Mapping[str, int] | None = None,
    words: Sequence[str] = (),
    truncate: bool = False,
    skip_bad: bool = False,
    seed: int = 0,
    order: Order = "random",
    bos: Bos = "auto",
    one_per_row: bool = False,
    balanced: bool = False,
) -> Sequences:
    """Tokenise, pack or cut, mask, sample and label the records of a source.

    For `masked-lm` the inputs are not masked; a masked copy of them is added with its targets (`Batch.masked_inputs`).
    If the tokenizer has no mask token there is neither, and `Sequences.no_targets` states the reason.
    Plain text fills whole windows for language models; elsewhere one text, one prompt with its response or one image is
    one sequence. A representation cuts a long plain text into several. Samples are uniform, over all text or over the
    records, and depend on content and seed, not on order.

    Args:
        source: from `open_source`.
        task: `causal-lm`, `masked-lm`, `text-classification`, `image-classification`, `detection` or `representation`.
        tokenizer: for text.
        processor: for images.
        max_sequences: at most this many.
        sequence_length: tokens of a window, and at most of any sequence; special tokens included.
        max_positions: most tokens that the model can read; None = no limit.
        vocab_size: rows of the model's embedding; None = not checked.
        pad_id: padding token of the model, by which some classifiers find the last token; None = the tokenizer's.
        label2id: the model's classes; labels follow it where the names agree.
        words: words to locate (`Batch.words`).
        truncate: cut prompts with responses, and a classifier's labelled texts, that are too long; else refuse them.
        skip_bad: leave such labelled texts out, and objects of unknown classes, and count them in the warnings.
        seed: seed of the sample and the masks.
        order: `first` takes the first records, and the first windows of all texts joined, instead of a sample.
        bos: whether a causal model's windows of plain text begin with the BOS token; `auto`: if the tokenizer adds it.
        one_per_row: one sequence for each plain text too, cut at `sequence_length`.
        balanced: sample the classes in turn. Means are then over classes, which a warning says.

    Raises:
        FulldepthError: if task, data and model do not match, or no sequence remains.
    """
    if max_sequences < 1 or sequence_length < 1:
        given = f"{max_sequences} and {sequence_length}"
        raise FulldepthError(f"max_sequences and sequence_length must be at least 1, got {given}.")
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if source.kind not in TASKS[task]:
        kinds = " or ".join(TASKS[task])
        raise FulldepthError(f"A {task} model cannot use {source.name}: its kind is {source.kind}, expected {kinds}.")
    limits = Limits(
        max_sequences,
        sequence_length,
        max_positions,
        truncate,
        seed,
        skip_bad,
        order,
        bos,
        one_per_row,
        balanced,
        vocab_size,
        pad_id,
        label2id,
        words,
    )
    if source.kind in ("objects", "images"):
        return _images(source, task, processor, limits)
    return _texts(source, task, tokenizer, limits)


def _chosen(labels: Sequence[int], names: Sequence[int], limits: Limits) -> tuple[list[int], list[str]]:
    """Indices of the records to prepare, of these classes and identities, and a warning if they are balanced."""
    if limits.balanced and len(set(labels)) > 1:
        chosen = balanced_sample(labels, names, limits.max_sequences, limits.seed)
        return chosen, [BALANCED] if len(chosen) < len(labels) else []
    return choose(names, limits.max_sequences, limits.seed, limits.order), []


def _texts(source: Source, task: str, tokenizer: Any, limits: Limits) -> Sequences:
    labels = align_labels(source, task, limits.label2id)
    if tokenizer is None:
        raise FulldepthError(f"{source.name} is text, and the model has no tokenizer. Give one.")
    texts = ((r.prompt, r.response) if source.kind == "pairs" else (r.text,) for r in source.records)
    order = [index for index, parts in enumerate(texts) if all(part is not None and part.strip() for part in parts)]
    if not order:
        raise FulldepthError(f"{source.name} has no text: every record is blank.")
    blank = len(source) - len(order)
    warnings = [
        *source.warnings,
        *labels.warnings,
        *([f"{blank} blank records are left out."] if blank and source.kind != "text" else []),
    ]
    given = Records(list(source.records), identities(source), labels.ids).select(order)
    if not windowed(source.kind, task, limits.one_per_row):
        chosen, note = _chosen(given.labels, given.identities, limits)
        given, warnings = given.select(chosen), warnings + note
    encoded = encode(source.name, source.kind, given, task, tokenizer, limits)
    examples, cut = encoded.examples, encoded.warnings
    if not examples:
        raise FulldepthError(" ".join([f"{source.name} gives no sequence with this tokenizer.", *cut]))
    fed = [e.input_ids if e.masked_ids is None else torch.cat([e.input_ids, e.masked_ids]) for e in examples]
    highest = max(int(ids.max()) for ids in fed)
    examples, missing = _mark_words(examples, tokenizer, limits.words) if limits.words else (examples, [])
    warnings += cut + check_vocabulary(highest, tokenizer, limits.vocab_size) + missing
    masks = tokenizer.mask_token_id is not None
    targets = {"causal-lm": next_targets, "masked-lm": torch.clone if masks else None}.get(task)
    pads = (limits.pad_id, tokenizer.pad_token_id)  # padding is masked, but its id must exist in the model
    pad = next((pad for pad in pads if pad is not None and 0 <= pad < (limits.vocab_size or pad + 1)), 0)
    classified = task == "text-classification"
    return Sequences(
        name=source.name,
        kind=source.kind,
        task=task,
        hash=_text_hash(task, examples, targets),
        text_hash=content_hash(source),
        examples=examples,
        collate=partial(collate_texts, examples, pad_id=pad, targets=targets),
        lengths=[len(example) for example in examples],
        num_targets=sum(e.class_index != IGNORE if classified else e.predicted for e in examples),
        num_classes=labels.num_classes,
        class_names=labels.class_names,
        warnings=warnings,
        no_targets=NO_MASK if task == "masked-lm" and not masks else None,
        clusters=encoded.clusters,
        unit=encoded.unit,
        no_error=encoded.no_error,
    )


def _images(source: Source, task: str, processor: Any, limits: Limits) -> Sequences:
    if processor is None:
        raise FulldepthError(
            f"{source.name} holds images, and the model has no image processor. Give images to a vision model."
        )
    objects: list[Objects | None] = []
    if source.kind == "objects":
        objects, labels = align_objects(source, limits.label2id, skip_bad=limits.skip_bad)
    else:
        labels = align_labels(source, task, limits.label2id)
    names = identities(source)
    chosen, note = _chosen(labels.ids, names, limits)
    pictures = []
    settings = processor.to_dict() if hasattr(processor, "to_dict") else type(processor).__name__
    fingerprint = Fingerprint(task, json.dumps(settings, sort_keys=True, default=str))
    for index in chosen:
        load = source.records[index].image
        if load is None:
            raise FulldepthError(f"Record {index} of {source.name} has no image.")
        try:
            image = load()  # also finds corrupt files before the model runs
        except FulldepthError as error:
            raise FulldepthError(f"{error} {SKIP}") from error
        for part in (str(image.size).encode(), image.tobytes(), str(labels.ids[index]).encode()):
            fingerprint.add(part)
        if objects:
            fingerprint.add(repr(objects[index]).encode())
        pictures.append(Picture(load, labels.ids[index], objects[index] if objects else None))
    if not pictures:
        raise FulldepthError(f"{source.name} holds no images.")
    targets = {
        "image-classification": sum(picture.class_index != IGNORE for picture in pictures),
        "detection": sum(picture.objects.targets for picture in pictures if picture.objects is not None),
    }
    return Sequences(
        name=source.name,
        kind=source.kind,
        task=task,
        hash=str(fingerprint),
        examples=pictures,
        collate=partial(collate_images, pictures, processor=processor),
        lengths=[0] * len(pictures),
        num_targets=targets.get(task, 0),
        num_classes=labels.num_classes,
        class_names=labels.class_names,
        warnings=[*source.warnings, *labels.warnings, *note],
        clusters=[names[index] for index in chosen],
        unit="image",
    )


def _mark_words(examples: list[Example], tokenizer: Any, words: Sequence[str]) -> tuple[list[Example], list[str]]:
    """The examples with `Example.words`, and a warning for each word that occurs nowhere."""
    finder = WordFinder(tokenizer, words)
    marks = [finder.find(example.input_ids.tolist()) for example in examples]
    missing = sorted(set(range(len(words))).difference(*marks))
    marked = [replace(e, words=torch.tensor(mark, dtype=torch.int64)) for e, mark in zip(examples, marks, strict=True)]
    return marked, [f"The word {words[index]!r} occurs nowhere in the sequences." for index in missing]


def _text_hash(task: str, examples: Sequence[Example], targets: Callable[[Tensor], Tensor] | None) -> str:
    fingerprint = Fingerprint(task)
    for example in examples:
        masked_ids = example.input_ids if example.masked_ids is None else example.masked_ids
        predicted = None if targets is None else targets(example.labels)
        for tensor in (example.input_ids, masked_ids, predicted, example.types):
            fingerprint.add(b"" if tensor is None else id_bytes(tensor))
        fingerprint.add(str(example.class_index).encode())
    return str(fingerprint)
