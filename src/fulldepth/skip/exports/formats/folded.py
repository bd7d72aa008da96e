"""`folded`: an ordinary checkpoint of the same class, which computes the plan's model at the original's cost."""

from __future__ import annotations

import copy
from collections.abc import Collection

from fulldepth.skip.exports.formats.checkpoint import Draft, save
from fulldepth.skip.exports.formats.format import Format


class Folded(Format):
    """All weights after folding; skipped branches have output weights of zero."""

    name = "folded"
    granularities = ("attention", "mlp", "layer")

    def computed(self, blocks: Collection[int]) -> frozenset[int]:
        """All of them."""
        return frozenset(blocks)

    def write(self, draft: Draft) -> list[str]:
        """Write all weights."""
        model = draft.model
        conversions = getattr(model, "_weight_conversions", None)
        save(draft, type(model), copy.deepcopy(model.config), draft.weights(), conversions=conversions)
        return [draft.folding.note, "Skipped blocks are computed and give zeros: for less cost, use another format."]
