"""Pairs of an input and a target text for encoder-decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fulldepth.data.batches import Example, id_bytes, padded_batch
from fulldepth.data.opening import Order
from fulldepth.data.sequences import Batch, Sequences
from fulldepth.data.sources import Record, Source, choose, content_hash, identities
from fulldepth.data.tokens import Frame, check_vocabulary, plain_ids
from fulldepth.errors import FulldepthError
from fulldepth.fingerprint import Fingerprint
from fulldepth.targets import IGNORE

TASK = "seq2seq-lm"


def input_texts(source: Source) -> Source:
    """The input texts of pairs, for an encoder alone."""
    filled = _filled(source)
    pairs = zip(filled.records, identities(filled), strict=True)
    records = [Record(text=record.prompt, where=record.where, identity=name) for record, name in pairs]
    return Source(source.name, "labelled-text", records, warnings=source.warnings)


def prepare_translation(
    source: Source,
    *,
    tokenizer: Any,
    start: int | None,
    max_sequences: int = 256,
    sequence_length: int = 256,
    vocab_size: int | None = None,
    seed: int = 0,
    order: Order = "random",
) -> Sequences:
    """Inputs for both stacks of an encoder-decoder; positions and targets are the decoder's.

    The decoder reads the target shifted right by one, behind the start token, and predicts every token of the target,
    the tokenizer's own end included.

    Args:
        source: pairs of input (`prompt`) and target (`response`).
        tokenizer: of both texts.
        start: the decoder's first token.
        max_sequences: at most so many pairs.
        sequence_length: tokens of either text, special tokens included; longer ones are cut there.
        vocab_size: rows of the model's embedding; None = not checked.
        seed: of the sample of pairs.
        order: `first` takes the first pairs instead of a sample.

    Raises:
        FulldepthError: if the data hold no pairs, or the model names no start token.
    """
    if source.kind != "pairs":
        raise FulldepthError(
            f"{source.name} holds {source.kind}, and an encoder-decoder reads an input and a target: give rows with "
            "input + target or prompt + response. fulldepth makes no such pairs of plain text, because the rule "
            "(which spans are hidden) belongs to the model's pre-training; the tower encoder alone can be measured."
        )
    if tokenizer is None or start is None:
        raise FulldepthError("An encoder-decoder needs a tokenizer, and decoder_start_token_id in its configuration.")
    filled = _filled(source)
    names = identities(filled)
    chosen = choose(names, max_sequences, seed, order)
    pairs = [(filled.records[i].prompt or "", filled.records[i].response or "") for i in chosen]
    frame = Frame.of(tokenizer, [text for pair in pairs for text in pair])
    room = sequence_length - len(frame)
    if room < 1:
        raise FulldepthError(f"sequence_length {sequence_length} leaves no room beside {len(frame)} special tokens.")
    ids = [[plain_ids(tokenizer, text) for text in pair] for pair in pairs]
    cut = sum(len(part) > room for pair in ids for part in pair)
    inputs, targets = ([Example.of(frame.wrap(pair[side][:room])) for pair in ids] for side in (0, 1))
    examples = [
        replace(
            each, input_ids=torch.cat([each.input_ids.new_tensor([start]), each.input_ids[:-1]]), labels=each.input_ids
        )
        for each in targets
    ]  # what the decoder reads for a target, labelled with the target itself
    fingerprint = Fingerprint(TASK)
    for given, example in zip(inputs, examples, strict=True):
        for tensor in (given.input_ids, example.input_ids, example.labels):
            fingerprint.add(id_bytes(tensor))
    highest = max(int(example.input_ids.max()) for example in (*inputs, *examples))
    warnings = [f"{cut} texts are longer than {sequence_length} tokens and cut there."] if cut else []
    return Sequences(
        name=source.name,
        kind=source.kind,
        task=TASK,
        hash=str(fingerprint),
        text_hash=content_hash(source),
        examples=examples,
        collate=partial(_collate, inputs, examples, pad_id=tokenizer.pad_token_id or 0),
        lengths=[len(example) for example in examples],
        num_targets=sum(example.predicted for example in examples),
        warnings=[*source.warnings, *warnings, *check_vocabulary(highest, tokenizer, vocab_size)],
        clusters=[names[index] for index in chosen],
        unit="row",
    )


def _filled(source: Source) -> Source:
    """The pairs of which neither text is blank."""
    records = [r for r in source.records if (r.prompt or "").strip() and (r.response or "").strip()]
    if not records:
        raise FulldepthError(f"{source.name} has no pair of two texts.")
    return replace(source, records=records)


def _collate(inputs: Sequence[Example], targets: Sequence[Example], indices: Sequence[int], *, pad_id: int) -> Batch:
    read = padded_batch([inputs[index] for index in indices], pad_id)
    said = padded_batch([targets[index] for index in indices], pad_id)
    return Batch(
        inputs={
            "input_ids": read["input_ids"],
            "attention_mask": read["attention_mask"],
            "decoder_input_ids": said["input_ids"],
            "decoder_attention_mask": said["attention_mask"],
        },
        attention_mask=said["attention_mask"].bool(),
        sequence=torch.tensor(list(indices), dtype=torch.int64),
        targets=said["labels"].where(said["attention_mask"].bool(), IGNORE),
        token_ids=said["input_ids"],
    )
