"""`prepare`: a source as sequences for one task and one model."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fulldepth.core.errors import FulldepthError, unknown
from fulldepth.core.files import Fingerprint
from fulldepth.core.targets import IGNORE, next_targets
from fulldepth.data.batches import (
    Example,
    Sequences,
    collate_images,
    collate_texts,
    id_bytes,
    image_shapes,
)
from fulldepth.data.columns import CONVERSATIONS
from fulldepth.data.conversations import Score, empty_warning, read_conversations, response_examples
from fulldepth.data.drawing import block_clusters, cut_windows, room_taken
from fulldepth.data.opening import Order
from fulldepth.data.records import ConversationRecord, ImageRecord, TextRecord
from fulldepth.data.sources import SKIP, Source, choose, content_identities, identities
from fulldepth.data.tokens import (
    Frame,
    WordFinder,
    check_positions,
    check_vocabulary,
    encode_texts,
    leading_ids,
    padding_id,
    plain_ids,
)

SEQ2SEQ = "seq2seq-lm"
TASKS: dict[str, tuple[str, ...]] = {
    "causal-lm": ("text", "pairs", "chats", "labelled-text"),
    "masked-lm": ("text", "labelled-text"),
    SEQ2SEQ: ("pairs",),
    "text-classification": ("text", "labelled-text"),
    "image-classification": ("images",),
    "detection": ("objects", "images"),
    "representation": ("text", "labelled-text", "images", "objects"),
}
"""Task -> supported kinds of data."""
MASKED_SHARE = 0.15
"""Share of the ordinary tokens that is masked, as in BERT; always by the mask token, never by a random one."""
NO_MASK = "the tokenizer has no mask token, so no token can be predicted from the others"
Bos = Literal["auto", "always", "never"]
"""Whether a window of text begins with the BOS token: as the tokenizer begins a text, always, or never."""


@dataclass(frozen=True)
class Preparation:
    """The options of `prepare`."""

    task: str
    """`causal-lm`, `masked-lm`, `seq2seq-lm`, `text-classification`, `image-classification`, `detection` or
    `representation`."""
    tokenizer: Any = None
    """For text."""
    processor: Any = None
    """For images."""
    max_sequences: int = 256
    """At most this many."""
    sequence_length: int = 256
    """Tokens of a window, and at most of any sequence; special tokens included."""
    max_positions: int | None = None
    """Most tokens that the model can read; None = no limit."""
    vocab_size: int | None = None
    """Rows of the model's embedding; None = not checked."""
    pad_id: int | None = None
    """Padding token of the model, by which some classifiers find the last token; None = the tokenizer's."""
    start: int | None = None
    """First token of an encoder-decoder's decoder."""
    rotates: bool = False
    """Whether the decoder begins with the last token of the target instead (mBART: that of the language)."""
    words: Sequence[str] = ()
    """To locate (`Batch.words`)."""
    truncate: bool = False
    """Cut prompts with responses, and a classifier's labelled texts, that are too long; else refuse them."""
    skip_bad: bool = False
    """Leave labelled texts that are too long out, and count them in the warnings."""
    seed: int = 0
    """Of the sample and the masks."""
    order: Order = "random"
    """`first` takes the first records, and the first windows of all texts joined, instead of a sample."""
    bos: Bos = "auto"
    """Whether a causal model's windows of plain text begin with the BOS token; `auto`: if the tokenizer adds it."""
    one_per_row: bool = False
    """One sequence for each plain text too, cut at `sequence_length`."""
    score: Score = "responses"
    """Tokens of prompts with responses and of chats that are predicted."""
    chat: bool = True
    """Put prompts with responses into the chat template, if the tokenizer has one; else they are plain text."""

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, by `sequence_length` and the model's positions."""
        return min(self.sequence_length, self.max_positions or self.sequence_length)

    def windowed(self, kind: str) -> bool:
        """Return True if data of a kind are sampled as windows or pieces of texts, not as rows."""
        return kind == "text" and self.task in ("causal-lm", "masked-lm", "representation") and not self.one_per_row


class Encoded(NamedTuple):
    """Records as sequences."""

    examples: list[Example]
    """Their `document` is their cluster."""
    unit: str
    """What a cluster is."""
    too_few_blocks: str | None = None
    """The reason if windows of these documents allow no standard error."""
    documents: int | None = None
    """Number of documents; None if each cluster is one."""
    read: Collection[int] | None = None
    """Numbers of the records that have tokens in a sequence; None = all may have."""


def prepare(source: Source, **options: Any) -> Sequences:
    """Tokenise, pack or cut, mask, sample and label the records of a source.

    For `masked-lm` the inputs are not masked; a masked copy of them is added with its targets (`Batch.masked_inputs`).
    If the tokenizer has no mask token there is neither, and `Sequences.no_targets` states the reason.
    Plain text fills whole windows for language models; elsewhere one text, one response with all that precedes it, or
    one image is one sequence. A representation cuts a long plain text into several. For `seq2seq-lm` the decoder reads
    the target (encoded as `text_target`) shifted right by one, behind the start token or the target's own last one, and
    predicts every token of the target, the tokenizer's own end included. Samples are uniform, over all text or over the
    records, and depend on content and seed, not on order.

    Args:
        source: from `open_source`; labels are taken as they are (`number_labels` gives them a model's numbers).
        **options: the fields of `Preparation`: `task`, and a `tokenizer` or a `processor`; all others have defaults.

    Returns:
        The inputs and targets in their order, with their hash and warnings.

    Raises:
        FulldepthError: if task, data and model do not match, or no sequence remains.
    """
    plan = Preparation(**options)
    if plan.max_sequences < 1 or plan.sequence_length < 1:
        given = f"{plan.max_sequences} and {plan.sequence_length}"
        raise FulldepthError(f"max_sequences and sequence_length must be at least 1, got {given}.")
    if plan.task not in TASKS:
        raise unknown("task", plan.task, TASKS)
    if source.kind not in TASKS[plan.task]:
        advice = "."
        if plan.task == SEQ2SEQ:
            advice = (
                ": rows with an input and a target, or prompt + response. fulldepth makes no such pairs of text, as "
                "the rule (which spans are hidden) belongs to the model's pre-training; the tower encoder alone can be "
                "measured."
            )
        kinds = " or ".join(TASKS[plan.task])
        raise FulldepthError(
            f"A {plan.task} model cannot use {source.name}: its kind is {source.kind}, expected {kinds}{advice}"
        )
    return _images(source, plan) if source.kind in ("objects", "images") else _texts(source, plan)


def _texts(source: Source, plan: Preparation) -> Sequences:
    task = plan.task
    tokenizer = plan.tokenizer
    kind = source.kind
    if tokenizer is None:
        raise FulldepthError(f"{source.name} is text, and the model has no tokenizer. Give one.")
    is_chat = kind in CONVERSATIONS
    records: Sequence[TextRecord | ConversationRecord] = source.of(ConversationRecord if is_chat else TextRecord)
    filled = [index for index, record in enumerate(records) if not record.is_blank]
    if not filled:
        raise FulldepthError(f"{source.name} has no text: every record is blank.")
    warnings = list(source.warnings)
    if kind == "labelled-text" and task in ("causal-lm", "masked-lm"):
        warnings.append(
            f"The labels of {source.name} are not answers of this model, which predicts tokens: losses and accuracies "
            "are those of the text. Only measures of classes (nc1, separability) read labels."
        )
    if len(filled) < len(source) and kind != "text":
        warnings.append(f"{len(source) - len(filled)} blank records are left out.")
    names = identities(source)
    if not plan.windowed(kind):
        sampled = choose([names[i] for i in filled], plan.max_sequences, plan.seed, plan.order)
        filled = [filled[i] for i in sampled]
        names = content_identities(source)
    sample = replace(source, records=[replace(records[i], identity=names[i]) for i in filled])
    if is_chat:
        encode = _translation if task == SEQ2SEQ else _conversations
        encoded = encode(sample.of(ConversationRecord), plan, warnings)
    else:
        given = sample.of(TextRecord)
        pairs = task == "representation" and any(record.second is not None for record in given)
        if plan.windowed(kind) and not pairs:
            encoded = _windows(given, plan, warnings)
        else:
            encoded = _one_by_one(source, given, plan, warnings)
    examples = encoded.examples
    if not examples:
        raise FulldepthError(" ".join([f"{source.name} gives no sequence with this tokenizer.", *warnings]))
    masks = task == "masked-lm" and tokenizer.mask_token_id is not None
    if masks:
        examples = [_masked(example, tokenizer, plan.seed, index) for index, example in enumerate(examples)]
    fed = [ids for e in examples for ids in (e.input_ids, e.masked_ids, e.encoder_ids) if ids is not None]
    warnings += check_vocabulary(max(int(ids.max()) for ids in fed), tokenizer, plan.vocab_size)
    if plan.words:
        finder = WordFinder(tokenizer, plan.words)
        marks = [finder.find(example.input_ids.tolist()) for example in examples]
        examples = [replace(e, words=torch.tensor(mark)) for e, mark in zip(examples, marks, strict=True)]
        missing = sorted(set(range(len(plan.words))).difference(*marks))
        warnings += [f"The word {plan.words[index]!r} occurs nowhere in the sequences." for index in missing]
    targets = {"causal-lm": next_targets, "masked-lm": torch.clone if masks else None, SEQ2SEQ: torch.clone}.get(task)
    pad = padding_id((plan.pad_id, tokenizer.pad_token_id), plan.vocab_size)
    fingerprint = Fingerprint(task)
    for example in examples:
        masked_ids = example.input_ids if example.masked_ids is None else example.masked_ids
        target_ids = None if targets is None else targets(example.labels)
        for ids in (example.input_ids, masked_ids, target_ids, example.types):
            fingerprint.add(b"" if ids is None else id_bytes(ids))
        if example.encoder_ids is not None:
            fingerprint.add(id_bytes(example.encoder_ids))
        fingerprint.add(str(example.class_index).encode())
    classified = task == "text-classification"
    clusters = [example.document for example in examples]
    lengths = [len(example) for example in examples]
    return Sequences(
        name=source.name,
        kind=kind,
        task=task,
        hash=str(fingerprint),
        text_hash=source.hash,
        examples=examples,
        collate=partial(collate_texts, examples, pad_id=pad, targets=targets),
        lengths=lengths,
        num_targets=sum(e.class_index != IGNORE if classified else e.predicted for e in examples),
        num_classes=source.num_classes,
        class_names=source.class_names,
        warnings=warnings,
        no_targets=NO_MASK if task == "masked-lm" and not masks else None,
        clusters=clusters,
        unit=encoded.unit,
        too_few_blocks=encoded.too_few_blocks,
        documents=encoded.documents,
        contents=frozenset(sample.records[i].content for i in encoded.read or range(len(sample))),
    )


def _windows(given: Sequence[TextRecord], plan: Preparation, warnings: list[str]) -> Encoded:
    """Windows of plain text. For a causal model they begin as `plan.bos` says; for others each has special tokens
    around it, and as a representation a short document, or the end of one, is a short window.
    """
    task = plan.task
    tokenizer = plan.tokenizer
    length = plan.longest if task == "representation" else plan.sequence_length
    check_positions(length, plan.max_positions)
    texts = [(index, text) for index, record in enumerate(given) for text in record.texts]
    owners = [index for index, _ in texts]
    documents = [(int(given[index].identity or 0), text) for index, text in texts]
    frame = Frame.of(tokenizer, (text for _, text in documents))
    around = frame
    document = Frame()
    if task == "causal-lm":
        around = Frame(_opening(frame, plan, warnings))
        document = Frame(frame.prefix if around.prefix else (), frame.suffix)
    drawn = cut_windows(
        documents,
        tokenizer,
        window=length,
        count=plan.max_sequences,
        seed=plan.seed,
        order=plan.order,
        around=around,
        document=document,
        joined=task != "representation",
    )
    if drawn.left_over:
        warnings.append(f"{drawn.left_over} tokens at the ends of documents do not fill a sequence and are left out.")
    typed = _has_types(tokenizer, documents[0][1])
    first = {text: name for name, text in reversed(documents)}  # equal texts are one document
    names = [first[text] for _, text in documents]
    clusters, unit, too_few_blocks = block_clusters(drawn.windows, names)
    windows = zip(drawn.windows, clusters, strict=True)
    examples = [_example(window.ids, task, typed, document=cluster) for window, cluster in windows]
    number = len({names[window.document] for window in drawn.windows})
    return Encoded(examples, unit, too_few_blocks, number, {owners[document] for document in drawn.documents})


def _opening(frame: Frame, plan: Preparation, warnings: list[str]) -> tuple[int, ...]:
    """The special tokens that every window of text begins with."""
    if plan.bos != "always" or frame.prefix:
        return () if plan.bos == "never" else frame.prefix
    if plan.tokenizer.bos_token_id is None:
        warnings.append("The tokenizer has no BOS token, so no sequence begins with it.")
        return ()
    return (plan.tokenizer.bos_token_id,)


def _one_by_one(source: Source, given: Sequence[TextRecord], plan: Preparation, warnings: list[str]) -> Encoded:
    """One sequence per text or pair of texts, with special tokens. Long texts are cut off.

    A classifier's labelled texts that are too long are refused or left out, unless `plan.truncate`. Texts without a
    token of their own are left out.
    """
    task = plan.task
    tokenizer = plan.tokenizer
    longest_sequence = plan.longest
    texts = [record.text for record in given]
    frame = Frame.of(tokenizer, texts)
    typed = _has_types(tokenizer, texts[0])
    if source.kind == "text" and task == "causal-lm":
        frame = Frame(_opening(frame, plan, warnings), frame.suffix)
    room = longest_sequence - room_taken(frame, longest_sequence)
    examples: list[Example | None] = []
    cut: list[int] = []
    for index, (record, text) in enumerate(zip(given, texts, strict=True)):
        types: Any = typed
        if record.second is None:
            ids = leading_ids(tokenizer, text, room + 1)
            cut += [index] * (len(ids) > room)
            wrapped = frame.wrap(ids[:room])
        else:
            joined = encode_texts(tokenizer, text, record.second)
            if len(joined["input_ids"]) > longest_sequence:  # the longer text is cut, as the tokenizer does it
                cut.append(index)
                joined = encode_texts(
                    tokenizer, text, record.second, truncation="longest_first", max_length=longest_sequence
                )
            ids = wrapped = joined["input_ids"]
            types = joined.get("token_type_ids")
        example = _example(wrapped, task, types, class_index=record.class_index, document=record.identity)
        examples.append(example if ids else None)
    empty = examples.count(None)
    warnings += empty_warning(empty)
    noun = "text is" if len(cut) == 1 else "texts are"
    if cut and not plan.truncate and source.kind == "labelled-text" and task == "text-classification":
        first = given[cut[0]]
        whole = [text for text in (first.text, first.second) if text is not None]
        limited = plan.max_positions is not None and plan.max_positions <= plan.sequence_length
        longest = (
            f"the model reads at most {plan.max_positions}" if limited else f"sequence_length is {longest_sequence}"
        )
        where = f"{first.where} has {len(encode_texts(tokenizer, *whole)['input_ids'])} tokens, {longest}."
        if not plan.skip_bad:
            remedy = "Cut long texts" if limited else "Raise it, cut long texts"
            raise FulldepthError(f"{where} {remedy} (truncate), or leave them out (--skip-bad).")
        warnings.append(f"{len(cut)} {noun} too long and left out of {source.name}: {where}")
        for index in cut:
            examples[index] = None
    elif cut:
        warnings.append(f"{len(cut)} {noun} longer than {longest_sequence} tokens and cut there.")
    unit = "document" if source.kind == "text" else "row"
    return Encoded([example for example in examples if example is not None], unit)


def _conversations(given: Sequence[ConversationRecord], plan: Preparation, warnings: list[str]) -> Encoded:
    """A sequence for each response, behind all that precedes it; see `fulldepth.data.conversations`."""
    rows = ((record.where, record.conversation) for record in given)
    conversations = read_conversations(rows, plan.tokenizer, chat=plan.chat)
    can_be_longer = plan.max_positions is None or plan.sequence_length < plan.max_positions
    remedy = "Raise sequence_length, or cut them" if can_be_longer else "Cut them"
    positions = plan.max_positions or "not limited"
    examples, further_warnings = response_examples(
        (
            (int(record.identity or 0), where, conversation)
            for record, (where, conversation) in zip(given, conversations, strict=True)
        ),
        plan.tokenizer,
        name="the sample",
        longest=plan.longest,
        score=plan.score,
        skip_empty=True,
        truncate=plan.truncate,
        advice=(
            f"sequence_length is {plan.sequence_length}, the model's positions are {positions}. {remedy} "
            "(--set truncate=true)."
        ),
    )
    warnings += further_warnings
    return Encoded(examples, "row")


def _translation(given: Sequence[ConversationRecord], plan: Preparation, warnings: list[str]) -> Encoded:
    """Sequences for both stacks of an encoder-decoder."""
    if plan.start is None and not plan.rotates:
        raise FulldepthError("An encoder-decoder needs decoder_start_token_id in its configuration.")
    if messages := next((record for record in given if record.messages is not None), None):
        raise FulldepthError(
            f"{messages.where} holds messages; an encoder-decoder reads a prompt and a response as text."
        )
    tokenizer = plan.tokenizer
    length = plan.sequence_length
    prompts = [record.prompt or "" for record in given]
    responses = [record.response or "" for record in given]
    has_targets = getattr(tokenizer, "tgt_lang", "") is not None
    if not has_targets:
        warnings.append("The tokenizer has no target language (tgt_lang): responses are read as texts of the source's.")
    sides = []
    cut = 0
    for texts, as_target in ((prompts, False), (responses, has_targets)):
        frame = Frame.of(tokenizer, texts, target=as_target)
        room = length - room_taken(frame, length)
        ids = [plain_ids(tokenizer, text, target=as_target) for text in texts]
        cut += sum(len(part) > room for part in ids)
        sides.append([torch.tensor(frame.wrap(part[:room]), dtype=torch.int64) for part in ids])
    examples = []
    for record, read, target in zip(given, *sides, strict=True):
        start = target[-1:] if plan.rotates else torch.tensor([plan.start])
        shifted = torch.cat([start, target[:-1]])
        examples.append(Example(shifted, target, int(record.identity or 0), encoder_ids=read))
    if cut:
        warnings.append(f"{cut} texts are longer than {length} tokens and cut there.")
    return Encoded(examples, "row")


def input_texts(source: Source) -> Source:
    """The input texts of pairs, for an encoder alone.

    Args:
        source: records with a prompt and a response. Pairs with an empty text are left out.

    Returns:
        A source of the prompts, each with the identity of its pair.

    Raises:
        FulldepthError: if no pair has two texts.
    """
    records = [
        TextRecord(text=record.prompt or "", where=record.where, identity=name)
        for record, name in zip(source.of(ConversationRecord), identities(source), strict=True)
        if (record.prompt or "").strip() and (record.response or "").strip()
    ]
    if not records:
        raise FulldepthError(f"{source.name} has no pair of two texts.")
    return Source(source.name, "labelled-text", records, warnings=source.warnings)


def _has_types(tokenizer: Any, text: str) -> list[int] | None:
    """Types of tokens of a single text, for any number of them; None if the tokenizer gives none."""
    return [] if "token_type_ids" in encode_texts(tokenizer, text[:8]) else None


def _example(ids: Sequence[int], task: str, types: Sequence[int] | None, **entries: Any) -> Example:
    """A sequence; of a causal model every token but the first, which has no context, is predicted."""
    kinds = None if types is None else torch.tensor(types or [0] * len(ids), dtype=torch.int64)[: len(ids)]
    predicted = (1, len(ids)) if task == "causal-lm" else (0, 0)
    return Example.of(ids, *predicted, types=kinds, **entries)


def _masked(example: Example, tokenizer: Any, seed: int, index: int) -> Example:
    """Mask `MASKED_SHARE` of the ordinary tokens, at least one if there is any, which become the labels.

    Seed and index (of the sequence in the whole data set) determine the positions, independently of the batching.

    Source: Devlin et al. 2019, section 3.1.
    """
    ids = example.input_ids
    ordinary = np.flatnonzero(~np.isin(ids.numpy(), tokenizer.all_special_ids))
    count = min(len(ordinary), max(1, round(MASKED_SHARE * len(ordinary))))
    positions = torch.from_numpy(np.random.default_rng([seed, index]).choice(ordinary, count, replace=False))
    labels = torch.full_like(ids, IGNORE).index_copy(0, positions, ids[positions])
    return replace(example, masked_ids=ids.index_fill(0, positions, tokenizer.mask_token_id), labels=labels)


def _images(source: Source, plan: Preparation) -> Sequences:
    if plan.processor is None:
        raise FulldepthError(
            f"{source.name} holds images, and the model has no image processor. Give images to a vision model."
        )
    names = identities(source)
    sampled = choose(names, plan.max_sequences, plan.seed, plan.order)
    records = source.select(sampled).of(ImageRecord)
    processor = plan.processor
    settings = processor.to_dict() if hasattr(processor, "to_dict") else type(processor).__name__
    fingerprint = Fingerprint(plan.task, json.dumps(settings, sort_keys=True, default=str))
    sizes = []
    for record in records:
        try:
            image = record.image()  # also finds corrupt files before the model runs
        except FulldepthError as error:
            raise FulldepthError(f"{error} {SKIP}") from error
        sizes.append(image.size)
        for part in (str(image.size).encode(), image.tobytes(), str(record.class_index).encode()):
            fingerprint.add(part)
        if record.objects is not None:
            fingerprint.add(repr(record.objects).encode())
    known = sum(record.label is not None for record in records)
    boxes = sum(record.objects.targets for record in records if record.objects is not None)
    return Sequences(
        name=source.name,
        kind=source.kind,
        task=plan.task,
        hash=str(fingerprint),
        examples=records,
        collate=partial(collate_images, records, processor=processor),
        lengths=[0] * len(records),
        num_targets={"image-classification": known, "detection": boxes}.get(plan.task, 0),
        num_classes=source.num_classes,
        class_names=source.class_names,
        shapes=image_shapes(records, sizes, processor),
        warnings=list(source.warnings),
        clusters=[names[index] for index in sampled],
        unit="image",
    )
