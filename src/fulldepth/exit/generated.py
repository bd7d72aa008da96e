"""Generation with early exit, beside a decoder's sweep: tokens that equal plain greedy's, and measured speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fulldepth.early_exit import UNTIMED, Exit, SpeedUp, Subject
from fulldepth.execution.decoding import BOUNDED_RULES, Decoder, Generation
from fulldepth.execution.latency import OtherLoad, order
from fulldepth.settings.exit import ExitSettings

PLAIN = "plain"


def generation_rows(
    subject: Subject,
    exits: Sequence[Exit],
    settings: ExitSettings,
    advance: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """One entry of `generation` in `results.json` for every rule, threshold and policy.

    The beginnings of the first sequences are the prompts. All runs are greedy and without end tokens, so that every
    run decodes the same number of tokens. Times are of the tokens after the first, in rounds of changing order.

    Args:
        subject: a decoder and its data.
        exits: rules and thresholds.
        settings: prompts, number of new tokens, policies, rounds.
        advance: called with the number of generations completed.

    Raises:
        FulldepthError: if the model cannot be decoded layer by layer.
    """
    decoder, prompts = Decoder(subject.checkpoint.model), prompts_of(subject, settings)
    options: dict[str, dict[str, Any]] = {PLAIN: {}}
    for number, (exit, policy) in enumerate(product(exits, settings.policy)):
        chosen = {"rule": exit.rule, "threshold": exit.threshold, "min_layer": exit.min_layer, "policy": policy}
        if exit.rule in BOUNDED_RULES and settings.lens_candidates is not None:
            chosen["lens_candidates"] = settings.lens_candidates
        options[str(number)] = chosen
    names = list(options)
    found: dict[str, Generation] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    load = OtherLoad()
    for turn in range(max(1, settings.rounds)):
        for place in order(len(names), turn, settings.seed):
            name = names[place]
            made = decoder.generate(
                prompts,
                torch.ones_like(prompts),
                max_new_tokens=settings.new_tokens,
                eos_token_id=subject.anatomy.vocab_size or 1 << 30,  # no token: nothing ends early
                pad_token_id=0,
                **options[name],
            )
            found[name] = made
            seconds[name].append(made.stats.seconds)
            advance(1)
    plain = found[PLAIN].sequences[:, prompts.shape[1] :]
    other = load.share()
    times = {name: SpeedUp.of(seconds[PLAIN], seconds[name], other) if settings.rounds else None for name in names}
    return [_row(options[name], found[name], plain, times[name]) for name in names[1:]]


def runs_of(exits: Sequence[Exit], settings: ExitSettings) -> int:
    """Number of generations."""
    return max(1, settings.rounds) * (1 + len(exits) * len(settings.policy))


def prompts_of(subject: Subject, settings: ExitSettings) -> Tensor:
    """[B, P] the beginnings of the first sequences, of one length: at most half of a sequence."""
    count = min(settings.prompts, len(subject.sequences))
    batch = subject.sequences.collate(range(count))
    ids = batch.inputs["input_ids"]
    lengths = batch.inputs["attention_mask"].sum(1)
    limit = subject.anatomy.max_positions
    width = max(1, int(lengths.min()) // 2)
    if limit is not None:
        width = max(1, min(width, limit - settings.new_tokens))
    return ids[:, :width].to(subject.device)


def _row(options: dict[str, Any], made: Generation, plain: Tensor, speedup: SpeedUp | None) -> dict[str, Any]:
    """The entry of one rule, threshold and policy."""
    new = made.sequences[:, -plain.shape[1] :]
    return {
        "rule": options["rule"],
        "threshold": options["threshold"],
        "policy": options["policy"],
        "min_layer": options["min_layer"],
        "lens_candidates": options.get("lens_candidates"),
        "exits": made.stats.exits,
        "tokens": plain.numel(),
        "agreement": float((new == plain).double().mean()),
        "layers_computed": made.stats.layers_computed,
        "theoretical_speedup": made.stats.theoretical_speedup,
        **(UNTIMED if speedup is None else speedup.document()),
    }
