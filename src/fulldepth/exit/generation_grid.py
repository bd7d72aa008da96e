"""Lens grid of generated tokens: what every layer predicts at each decoding step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fulldepth.data import decode_ids
from fulldepth.execution import body_inputs, capture, read_and_show
from fulldepth.execution.decoding import Decoder, Stats
from fulldepth.hf import Classifier, device_of, evaluating
from fulldepth.metrics import saturation_layer

SAMPLES, POSITIONS, LONGEST = 3, 48, 40
"""Sequences, decoding steps of each, and characters of a token that the grid shows at most."""


@torch.no_grad()
def lens_grid(
    decoder: Decoder, tokenizer: Any, prompts: Sequence[Sequence[int]], added: Sequence[Sequence[int]], stats: Stats
) -> dict[str, Any]:
    """Top token and its probability at every layer and decoding step, from one pass over the finished sequences.

    Args:
        decoder: the model.
        tokenizer: its tokenizer.
        prompts: token ids of each prompt, without padding.
        added: new token ids of each sequence.
        stats: with the exit layers, if tokens left early.
    """
    anatomy, samples = decoder.anatomy, []
    classifier, device = Classifier(anatomy), device_of(anatomy.model)
    for row, (prompt, new) in enumerate(zip(prompts[:SAMPLES], added[:SAMPLES], strict=True)):
        steps = min(len(new), POSITIONS)
        ids = torch.tensor([[*prompt, *new[: steps - 1]]], device=device)
        targets = torch.full_like(ids, -100)
        targets[0, -steps:] = torch.tensor(list(new[:steps]), device=device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with evaluating(anatomy.model), capture(anatomy, ["residual"]) as activations:
            anatomy.body(**body_inputs(anatomy, inputs))
            states = torch.stack(list(activations["residual"]))
        _, top = read_and_show(classifier, states, targets, targets != -100)
        chances = torch.round(top.probability.double(), decimals=4).tolist()
        exits = (stats.exit_layers[row] if stats.exit_layers else [])[:steps]
        samples.append(
            {
                "title": f"Prompt {row + 1}",
                "tokens": [_show(tokenizer, token) for token in ids[0, -steps:].tolist()],
                "targets": [_show(tokenizer, token) for token in new[:steps]],
                "saturation": saturation_layer(top.token[1:]).tolist(),
                "exits": [*exits, *[None] * (steps - len(exits))],
                "grid": [
                    [[_show(tokenizer, token), p] for token, p in zip(tokens, ps, strict=True)]
                    for tokens, ps in zip(top.token.tolist(), chances, strict=True)
                ],
            }
        )
    return {"samples": samples}


def _show(tokenizer: Any, token: int) -> str:
    """A token as text of limited length."""
    text = decode_ids(tokenizer, [token])
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
