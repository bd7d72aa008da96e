"""`Stacks`: states of all layers that are copied into one tensor per site as soon as the model computes them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

Key = tuple[str, int]
"""Name of a captured state, and its 1-based layer."""


class Stacks:
    """One tensor `[S, B, T, D]` per site, overwritten by every pass, so that states are held once and not twice.

    A state on another device is not taken; the caller keeps it.

    Args:
        rows: captured state -> the site that consists of such states, and its row there.
        device: of the tensors.
    """

    def __init__(self, rows: dict[Key, tuple[str, int]], device: torch.device) -> None:
        self.rows, self.device = rows, device
        self.tensors: dict[str, Tensor] = {}
        self.held: set[Key] = set()

    def clear(self, *, keep: bool) -> None:
        """Forget the states of a pass; with `keep`, the next pass writes into the same tensors."""
        self.held.clear()
        if not keep:
            self.tensors = {}

    def put(self, key: Key, state: Tensor) -> bool:
        """Copy a state into its row; False if it has none, is on another device, or is the first and not 3-d."""
        if key not in self.rows or state.device != self.device:
            return False
        site, row = self.rows[key]
        stack = self.tensors.get(site)
        if state.ndim == 3 and (stack is None or stack.shape[1:] != state.shape or stack.dtype != state.dtype):
            states = 1 + max(row for other, row in self.rows.values() if other == site)
            stack = self.tensors[site] = state.new_empty(states, *state.shape)
        if stack is None or state.numel() != stack[row].numel():
            return False
        stack[row] = state.view(stack.shape[1:])
        self.held.add(key)
        return True

    def get(self, key: Key) -> Tensor | None:
        """[B, T, D] a state of this pass; None if it was not taken."""
        if key not in self.held:
            return None
        site, row = self.rows[key]
        return self.tensors[site][row]

    def whole(self, site: str) -> Tensor | None:
        """[S, B, T, D] all states of a site; None unless all of them were taken."""
        keys = {key for key, place in self.rows.items() if place[0] == site}
        return self.tensors[site] if keys and keys <= self.held else None


def stack_rows(captured: Collection[Key], sites: Collection[str], layers: int) -> dict[Key, tuple[str, int]]:
    """The rows of `Stacks` for the sites that consist of captured states; sites that are sums of them are left out.

    Args:
        captured: all states that are captured.
        sites: the requested sites.
        layers: L.
    """
    rows = {("y", layer): ("residual", layer) for layer in range(1, layers + 1)}
    rows["h0" if ("h0", 1) in captured else "x", 1] = ("residual", 0)
    for site in ("attention_output", "value"):
        rows |= {(site, layer): (site, layer - 1) for layer in range(1, layers + 1)}
    whole = {
        site
        for site in sites
        if all(key in captured for key, place in rows.items() if place[0] == site)
        and any(place[0] == site for place in rows.values())
    }
    return {key: place for key, place in rows.items() if place[0] in whole}
