"""Texts that a model continues by greedy decoding, as data whose targets are the generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import Fingerprint
from fulldepth.core.progress import Watcher
from fulldepth.core.targets import next_targets
from fulldepth.data import Sequences, decode_ids
from fulldepth.data.batches import Example, collate_texts, id_bytes
from fulldepth.data.conversations import encode_prompt
from fulldepth.data.records import TextRecord
from fulldepth.data.tokens import padding_id
from fulldepth.hf import end_tokens, logits_of
from fulldepth.subject import Subject


@torch.inference_mode()
def continued(
    subject: Subject, texts: Sequence[str], steps: int, longest: int | None, shown: int, watcher: Watcher
) -> Sequences:
    """Continue texts by greedy decoding, each token the most probable one after all before it.

    The model runs on the whole text at every step, as the lens reads it: the last layer's prediction at a step is the
    token of the next one. A text ends early behind an end-of-text token.

    Args:
        subject: a language model with its tokenizer.
        texts: the prompts, without a chat template.
        steps: largest number of new tokens of a text.
        longest: tokens after which a prompt is cut; None = it is not cut.
        shown: most tokens that the lens shows of a text.
        watcher: receives progress, in tokens, and every continuation.

    Returns:
        One sequence for each text, prompt and continuation. Targets are the new tokens.

    Raises:
        FulldepthError: if a prompt has no token, or prompt and continuation exceed the model's positions or `shown`.
    """
    tokenizer = subject.tokenizer
    model = subject.model
    ends = end_tokens(model, tokenizer)
    positions = subject.anatomy.max_positions
    watcher.begin("Generating", steps * len(texts))
    examples = []
    for number, text in enumerate(texts):
        ids = encode_prompt(tokenizer, text)[:longest]
        start = len(ids)
        if not start:
            raise FulldepthError(f"Text {number + 1} has no token; give a prompt to continue.")
        room = min(shown, positions or shown)
        if start + steps > room:
            fewer = f", or at most --generate {room - start}" if room > start else ""
            limit = f"{room:,} positions of the model" if room == positions else f"{room:,} tokens that the lens shows"
            raise FulldepthError(
                f"A prompt of {start:,} tokens and {steps:,} new ones exceed the {limit}. Give a shorter prompt{fewer}."
            )
        for _ in range(steps):
            row = torch.tensor([ids])  # [1, T]
            logits = logits_of(model(**subject.inputs({"input_ids": row, "attention_mask": torch.ones_like(row)})))
            assert logits is not None, "a language model gives logits"
            ids.append(int(logits[0, -1].argmax()))
            watcher.advance(1)
            if ids[-1] in ends:
                break
        watcher.say(f"The model continues: {decode_ids(tokenizer, ids[start:])!r}")
        examples.append(Example.of(ids, start, len(ids), document=number))
    padding = padding_id([tokenizer.pad_token_id], subject.anatomy.vocab_size)
    fingerprint = Fingerprint("causal-lm")
    for example in examples:
        fingerprint.add(id_bytes(example.input_ids))
        fingerprint.add(id_bytes(example.labels))
    return Sequences(
        name="texts with their continuation",
        kind="text",
        task="causal-lm",
        hash=str(fingerprint),
        examples=examples,
        collate=partial(collate_texts, examples, pad_id=padding, targets=next_targets),
        lengths=[len(example) for example in examples],
        num_targets=sum(example.predicted for example in examples),
        clusters=[example.document for example in examples],
        unit="text",
        contents=frozenset(TextRecord(text=text).content for text in texts),
    )


def steps_of(sample: dict[str, Any], new: int) -> dict[str, Any]:
    """The columns of a lens grid's sample at which the last `new` tokens were predicted.

    Args:
        sample: entry of a grid with all positions of a sequence, the last of which predicts no token of it.
        new: number of generated tokens.
    """
    columns = slice(len(sample["tokens"]) - 1 - new, -1)
    short = {name: sample[name][columns] for name in ("tokens", "targets", "saturation")}
    by_layer: dict[str, Any] = {
        name: [row[columns] for row in sample[name]] for name in ("grid", "more") if name in sample
    }
    return {**sample, **short, **by_layer}
