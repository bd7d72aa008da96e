"""A loss cache whose scorer knows the losses of all variants, of one attention a layer."""

import numpy as np
import torch

from fulldepth.core.distributed import Processes
from fulldepth.execution.flops import Costs
from fulldepth.execution.scoring import ScoredBatch
from fulldepth.hf import Block
from fulldepth.skip.loss_cache import LossCache


class Scorer:
    """`losses(layers, rows)` are those of rows without the attention of a set of layers."""

    def __init__(self, depth, losses):
        able = tuple(Block(layer, "attention") for layer in range(1, depth + 1))
        self.losses = losses
        self.costs = Costs("attention", (1.0,) * depth, (0.0,) * depth, (1.0,) * depth, 1.0, able=able)

    def sums(self, batch, variants, *, divergence, advance):
        rows = batch.inputs["rows"]
        return {v: {"loss": [*self.losses(frozenset(layer for layer, _ in v), rows)]} for v in variants}


def cache_of(depth, losses, chunks, documents):
    """A cache of chunks of rows; batches carry the numbers of the rows in place of tokens."""
    return LossCache(
        Scorer(depth, losses),
        [
            [ScoredBatch({"rows": rows}, torch.ones(len(rows), 1, dtype=bool), *[torch.arange(len(rows))] * 2, owners)]
            for rows, owners in ((rows, np.asarray(documents)[rows]) for rows in chunks)
        ],
        Processes(),
    )
