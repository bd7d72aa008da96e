"""`flatten_windows`: a batch of windows as one row, for attention that knows documents by position ids alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fulldepth.errors import FulldepthError
from fulldepth.targets import IGNORE


def flatten_windows(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Collate windows of B x T tokens into one row of B T tokens with the loss and the targets of the `[B, T]` batch.

    transformers takes the variable-length path of flash attention from position ids only for a batch of one row
    (`_is_packed_sequence` in its `modeling_flash_attention_utils`); in a batch of more rows documents see each other.
    In the row every window and every document starts at position 0. A causal model predicts a label from the token
    before it, so the first label of each window, which no `[B, T]` batch counts, is -100.

    Args:
        items: windows with `input_ids`, `labels` and `position_ids`, each [T], as `Windows` gives without
            `across_documents`; T may differ.

    Returns:
        `input_ids`, `labels` and `position_ids`, each [1, B T] int64. Call the model with `use_cache=False` and no
        `attention_mask`: with either it ignores the position ids.

    Raises:
        FulldepthError: for items without position ids that start at 0.
    """
    if any("position_ids" not in item or int(item["position_ids"][0]) for item in items):
        raise FulldepthError(
            "Only windows with position_ids that start at 0 can be flattened (across_documents=false)."
        )
    labels = [item["labels"].clone() for item in items]
    for window in labels:
        window[0] = IGNORE
    parts = {name: [item[name] for item in items] for name in ("input_ids", "position_ids")}
    return {name: torch.cat(rows)[None] for name, rows in {**parts, "labels": labels}.items()}
