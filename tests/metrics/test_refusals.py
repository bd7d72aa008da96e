"""What the functions of `fulldepth.metrics` refuse: one table of calls and of what the message must name."""

import pytest
import torch

from fulldepth import metrics
from fulldepth.metrics.reservoir import Reservoir

X, Y, ONES = torch.randn(9, 3), torch.arange(9) % 2, torch.ones
REFUSED = [
    ("shape", lambda: metrics.displacement(ONES(2, 3), ONES(2, 4))),
    ("start", lambda: metrics.jump_rate([0.1, 0.2, 0.1, 0.3], 1)),
    ("start", lambda: metrics.jump_rate([0.1, 0.2, 0.1, 0.3], -4)),
    ("sequences", lambda: metrics.coherence(ONES(1, 8, 3), ONES(1, 8, 3))),
    ("positions", lambda: metrics.coherence(ONES(2, 1, 3), ONES(2, 1, 3))),
    ("features", lambda: metrics.cosine_matrix(X)),
    ("features", lambda: metrics.cross_similarity(ONES(2, 5, 4), ONES(2, 5, 3))),
    ("x and y", lambda: metrics.linear_cka(X, X[1:])),
    ("features", lambda: metrics.cka_matrix(X)),
    ("predictions", lambda: metrics.saturation_layer(Y)),
    ("eps", lambda: metrics.effective_depth([0.5], 1.1)),
    ("classes", lambda: metrics.nc1(X, 0 * Y)),
    ("plein", lambda: metrics.renyi_entropy(X, preset="plein")),
    ("alpha", lambda: metrics.renyi_entropy(X, -1.0)),
    ("x", lambda: metrics.mmd(X, ONES(4, 5))),
    ("bandwidth", lambda: metrics.mmd(X, X, -1.0)),
    ("matrix", lambda: metrics.spectral_norm(Y)),
    ("folds", lambda: metrics.separability(X, (torch.arange(9) > 6).long(), folds=5)),
    ("routing", lambda: metrics.retrieval_weight(ONES(3))),
    ("counted", lambda: metrics.retrieval_weight(ONES(2, 5, 3, 4), ONES(2, 4, dtype=torch.bool))),
    ("shares", lambda: metrics.expected_retrieval(ONES(2, 3), ONES(5))),
    ("w_o", lambda: metrics.head_shares(ONES(6, 12), 5)),
    ("capacity", lambda: Reservoir(0, (1,))),
]


@pytest.mark.parametrize(("named", "call"), REFUSED)
def test_refused(named, call):
    with pytest.raises(ValueError, match=named):
        call()
