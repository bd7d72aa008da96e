"""Weights as plain tensors: projections, shares of the heads of memory routers, tokens nearest to dynamic routers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fulldepth.hf import Anatomy, is_adapted
from fulldepth.measurement.lens_reader import show
from fulldepth.metrics import SpectralNorm, head_shares
from fulldepth.subject import Subject


def plain(parameter: nn.Parameter | None) -> Tensor | None:
    """A weight as a plain tensor; None if it is offloaded, or packed in a form that cannot be dequantised."""
    if parameter is None:
        return None
    weight: Tensor = parameter.detach()
    if type(weight) is not Tensor and hasattr(weight, "dequantize"):
        weight = weight.dequantize()
    return weight if weight.is_floating_point() and weight.device.type != "meta" else None


def weight_of(module: nn.Module) -> Tensor | None:
    """The weight that a layer computes with, as a plain tensor: with the adapters that are active; None as for `plain`,
    or if they cannot be merged.
    """
    if not is_adapted(module):
        return plain(module.get_parameter("weight"))
    layer: Any = module
    weight = plain(layer.get_base_layer().get_parameter("weight"))
    if weight is None or layer.merged or layer.disable_adapters:
        return weight
    try:
        merged = copy.deepcopy(layer)
        merged.merge()
    except (RuntimeError, ValueError, NotImplementedError):  # a kind of adapter that is not a change of the weight
        return None
    return plain(merged.get_base_layer().get_parameter("weight"))


def projection_names(anatomy: Anatomy) -> tuple[str, ...]:
    """Names, inside a block, of the weights that `feed_projections` reads: matrices and stacks of expert matrices."""
    experts = [name for name, _, parameter in anatomy.expert_projections() if parameter is not None]
    return tuple(dict.fromkeys([*(name for name, _, _ in anatomy.projections()), *experts]))


def num_projections(anatomy: Anatomy) -> int:
    """Number of the weights that `feed_projections` reads."""
    return sum(1 for _ in chain(anatomy.projections(), anatomy.expert_projections()))


def feed_projections(
    measure: SpectralNorm,
    anatomy: Anatomy,
    rank: int = 0,
    world: int = 1,
    advance: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Update a measure with the projections of every block, experts as stacks `[E, m, n]`; matrix `i` goes to process
    `i % world`.

    Args:
        measure: updated in place.
        anatomy: of the model.
        rank: of this process.
        world: number of processes.
        advance: called with 1 at each matrix, for a progress bar.

    Returns:
        The names of projections that cannot be read.
    """
    unreadable: list[str] = []

    def readable() -> Iterator[tuple[str, int, Tensor]]:
        alone = ((site, layer, partial(weight_of, module)) for site, layer, module in anatomy.projections())
        experts = ((site, layer, partial(plain, parameter)) for site, layer, parameter in anatomy.expert_projections())
        for index, (site, layer, read) in enumerate(chain(alone, experts)):
            weight = read()
            advance(1)
            if weight is None:
                unreadable.append(site)
            elif index % world == rank:
                yield site, layer, weight

    measure.update(readable())
    return unreadable


NEAREST = 30
"""Tokens listed for each router (LIME, Sec. 5.2)."""
ROUTERS = 64
"""Number of routers listed, those with the largest cosines first."""
AT_ONCE = 64
"""Number of routers compared with the vocabulary at once."""


def shares_of_heads(anatomy: Anatomy) -> tuple[tuple[float, ...], ...]:
    """`Setup.head_shares` of a model with a memory; empty without one, or if a projection cannot be read."""
    if not anatomy.layers_with("router"):
        return ()
    shares = []
    for layer in anatomy.layers:
        projection = anatomy.part(layer, "output")
        weight = None if projection is None else weight_of(projection)
        if weight is None:
            return ()
        shares.append(tuple(head_shares(weight, anatomy.config.num_attention_heads).tolist()))
    return tuple(shares)


@torch.inference_mode()
def nearest_tokens(subject: Subject) -> dict[str, Any] | None:
    """The tokens whose embeddings are nearest, by cosine, to the vectors of dynamic routers, as plain data.

    A dynamic router of layer r gives head h's source m the logit `x P[:, h, m]`, so a state x that resembles the
    vector `P[:, h, m]` reads that source. The norm's gain on x is left out, as the embeddings have none.

    Returns:
        `routers`: layer (from 1), source (0..r-1), head (from 0) and `tokens`, pairs of token and cosine, nearest
        first; the routers by descending mean cosine of their tokens. `of`: number of routers. None without dynamic
        routers, or if a weight cannot be read.

    Source: "LIME: layer-integrated memory", Sec. 5.2 and Table 2.
    """
    anatomy = subject.anatomy
    vectors = {
        layer: vector
        for layer in anatomy.layers_with("router")
        if (vector := anatomy.router_vectors(layer)) is not None
    }
    embeddings = weight_of(anatomy.body.get_input_embeddings()) if vectors else None  # type: ignore[operator]
    if embeddings is None:
        return None
    names = [(layer, m, h) for layer, vector in vectors.items() for h in range(len(vector)) for m in range(layer)]
    columns = torch.cat([vector.flatten(0, 1).to(embeddings.device) for vector in vectors.values()])
    directions = normalize(embeddings.float(), dim=-1)
    count = min(NEAREST, len(directions))
    tops = [(normalize(part, dim=-1) @ directions.T).topk(count) for part in columns.float().split(AT_ONCE)]
    cosines = torch.cat([top.values for top in tops])
    tokens = torch.cat([top.indices for top in tops])
    routers = cosines.mean(1).sort(descending=True, stable=True).indices[:ROUTERS].tolist()
    entries = []
    for index in routers:
        layer, source, head = names[index]
        rounded = torch.round(cosines[index].double(), decimals=4).tolist()
        words = [show(subject.tokenizer, token) for token in tokens[index].tolist()]
        pairs = [list(pair) for pair in zip(words, rounded, strict=True)]
        entries.append({"layer": layer, "source": source, "head": head, "tokens": pairs})
    return {"routers": entries, "of": len(names)}
