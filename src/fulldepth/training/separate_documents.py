"""Test, before a run with `across_documents=false`, that attention does not cross documents in the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from fulldepth.errors import FulldepthError, one_line
from fulldepth.hf import evaluating

FLASH = "flash_attention_2"
PROBE = "fulldepth_varlen"
"""Name under which transformers finds `varlen_attention`."""
LENGTH = 6
"""Tokens of each of the two documents."""
LEAK, SAME = 1e-5, {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest differences relative to the largest logit: between logits beside two other documents, and to those of the
document alone, by precision (half precision: 0.05), where kernels for another shape may round differently."""


@torch.no_grad()
def require_separate_documents(model: PreTrainedModel) -> None:
    """Refuse a model in which position ids do not keep documents apart.

    Two documents in one row: the logits of the second must not depend on the first one's tokens, and must be those of
    the second document alone. Flash attention runs on accelerators only; `varlen_attention` replaces it in the test: it
    receives the same arguments and cuts a row at the same places.

    Raises:
        FulldepthError: if the model does not keep documents apart.
    """
    name = type(model).__name__
    advice = "Use data.across_documents=true, or another model."
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise FulldepthError(f"{name} takes no position_ids, so it cannot keep documents apart. {advice}")
    ids = torch.arange(3 * LENGTH).remainder(model.config.get_text_config().vocab_size).to(model.device)
    first, other, second = ids.split(LENGTH)
    with evaluating(model), _without_flash(model):
        try:
            beside, changed = (_logits(model, torch.cat([before, second]))[LENGTH:] for before in (first, other))
            alone = _logits(model, second)
        except Exception as error:  # from the model's code, which may need a mask or another attention
            raise FulldepthError(
                f"{name} cannot read two documents in a row: {one_line(error, 200)}. {advice}"
            ) from error
    scale = alone.abs().max()
    if (beside - changed).abs().max() > LEAK * scale:
        raise FulldepthError(f"In {name} a document sees the one before it in spite of position_ids. {advice}")
    if (beside - alone).abs().max() > SAME.get(model.dtype, 0.05) * scale:
        raise FulldepthError(f"In {name} a document depends on where it lies in a row, position_ids or not. {advice}")


def _logits(model: Any, ids: Tensor) -> Tensor:
    """[N, V] logits of a row of documents of `LENGTH` tokens."""
    positions = torch.arange(len(ids), device=ids.device) % LENGTH
    logits: Tensor = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    return logits


@contextmanager
def _without_flash(model: PreTrainedModel) -> Iterator[None]:
    """Replace flash attention by `varlen_attention`."""
    before = model.config._attn_implementation
    if before == FLASH:
        AttentionInterface.register(PROBE, varlen_attention)
        AttentionMaskInterface.register(PROBE, ALL_MASK_ATTENTION_FUNCTIONS[FLASH])
        model.config._attn_implementation = PROBE
    try:
        yield
    finally:
        model.config._attn_implementation = before


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention with the interface of flash attention: a batch of one row is cut where positions restart.

    Query, key and value are `[B, H, T, D]` and the result `[B, T, H, D]`; the mask is None, as without padding.
    Windows and soft caps in `options` have no effect on two documents of a few tokens.
    """
    cuts = [0, query.shape[2]]
    if position_ids is not None and len(query) == 1:
        starts = (position_ids[0] == position_ids.min()).nonzero()[:, 0].tolist()
        cuts = sorted({*cuts, *starts})
    parts = [
        scaled_dot_product_attention(
            query[:, :, start:stop],
            key[:, :, start:stop],
            value[:, :, start:stop],
            scale=scaling,
            is_causal=True,
            enable_gqa=True,
        )
        for start, stop in pairwise(cuts)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None
