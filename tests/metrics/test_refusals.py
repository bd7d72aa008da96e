"""What the functions of `fulldepth.metrics` refuse: one table of calls and of what the message must name."""

import pytest
import torch

from fulldepth import metrics
from fulldepth.metrics.reservoir import Reservoir

X, Y, ONES = torch.randn(9, 3), torch.arange(9) % 2, torch.ones
REFUSED = {
    "displacement": (lambda: metrics.displacement(ONES(2, 3), ONES(2, 4)), "shape"),
    "norm_ratio": (lambda: metrics.norm_ratio(ONES(2, 3), ONES(2, 4)), "shape"),
    "jump_rate at 1": (lambda: metrics.jump_rate([0.1, 0.2, 0.1, 0.3], 1), "start"),
    "jump_rate beyond": (lambda: metrics.jump_rate([0.1, 0.2, 0.1, 0.3], -4), "start"),
    "coherence of one sequence": (lambda: metrics.coherence(ONES(1, 8, 3), ONES(1, 8, 3)), "sequences"),
    "coherence of one position": (lambda: metrics.coherence(ONES(2, 1, 3), ONES(2, 1, 3)), "positions"),
    "cosine_matrix": (lambda: metrics.cosine_matrix(X), "features"),
    "cross_similarity": (lambda: metrics.cross_similarity(ONES(2, 5, 4), ONES(2, 5, 3)), "features"),
    "linear_cka": (lambda: metrics.linear_cka(X, X[1:]), "x and y"),
    "cka_matrix": (lambda: metrics.cka_matrix(X), "features"),
    "saturation_layer": (lambda: metrics.saturation_layer(Y), "predictions"),
    "effective_depth": (lambda: metrics.effective_depth([0.5], 1.1), "eps"),
    "lens_accuracy": (lambda: metrics.lens_accuracy(X, Y[1:]), "targets"),
    "lens_loss": (lambda: metrics.lens_loss(X, Y[1:]), "targets"),
    "nc1 of one class": (lambda: metrics.nc1(X, 0 * Y), "classes"),
    "renyi_entropy": (lambda: metrics.renyi_entropy(X, preset="plein"), "plein"),
    "renyi_entropy below 0": (lambda: metrics.renyi_entropy(X, -1.0), "alpha"),
    "mmd": (lambda: metrics.mmd(X, ONES(4, 5)), "x"),
    "mmd's bandwidth": (lambda: metrics.mmd(X, X, -1.0), "bandwidth"),
    "spectral_norm": (lambda: metrics.spectral_norm(Y), "matrix"),
    "separability": (lambda: metrics.separability(X, (torch.arange(9) > 6).long(), folds=5), "folds"),
    "retrieval_weight": (lambda: metrics.retrieval_weight(ONES(3)), "routing"),
    "retrieval_weight's mask": (
        lambda: metrics.retrieval_weight(ONES(2, 5, 3, 4), ONES(2, 4, dtype=torch.bool)),
        "counted",
    ),
    "expected_retrieval": (lambda: metrics.expected_retrieval(ONES(2, 3), ONES(5)), "shares"),
    "head_shares": (lambda: metrics.head_shares(ONES(6, 12), 5), "w_o"),
    "stream_mixing": (lambda: metrics.stream_mixing(ONES(4, 5)), "mixing"),
    "stream_mixing's mask": (
        lambda: metrics.stream_mixing(ONES(2, 3, 2, 4), ONES(3, 2, dtype=torch.bool)),
        "counted",
    ),
    "Reservoir": (lambda: Reservoir(0, (1,)), "capacity"),
}


@pytest.mark.parametrize("call", REFUSED)
def test_refused(call):
    function, named = REFUSED[call]
    with pytest.raises(ValueError, match=named):
        function()


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (2, 4, 2), (12, 9, 2, 2)])
def test_a_router_of_other_sources_or_heads_is_refused(world, shape):
    world = world.replace(coefficients={"routing": {3: torch.ones(shape)}})
    with pytest.raises(ValueError, match="router of layer 3"):
        world.rows(metrics.RetrievalWeight)
