"""What the functions of `fulldepth.metrics` refuse: one table of calls and of what the message says."""

import re

import pytest
import torch

from fulldepth import metrics
from fulldepth.metrics.reservoir import Reservoir

X, Y, ONES = torch.randn(9, 3), torch.arange(9) % 2, torch.ones
REFUSED = [
    ("must have one shape, got (2, 3) and (2, 4)", lambda: metrics.displacement(ONES(2, 3), ONES(2, 4))),
    (
        "start must name a layer in 2..4 (or its negative index), got 1",
        lambda: metrics.jump_rate([0.1, 0.2, 0.1, 0.3], 1),
    ),
    (
        "start must name a layer in 2..4 (or its negative index), got -4",
        lambda: metrics.jump_rate([0.1, 0.2, 0.1, 0.3], -4),
    ),
    ("at least two sequences", lambda: metrics.coherence(ONES(1, 8, 3), ONES(1, 8, 3))),
    ("at least two positions", lambda: metrics.coherence(ONES(2, 1, 3), ONES(2, 1, 3))),
    ("features must be [L+1, N, D], got (9, 3)", lambda: metrics.cosine_matrix(X)),
    (
        "features must be [L+1, N, P], got (2, 5, 4) and (2, 5, 3)",
        lambda: metrics.cross_similarity(ONES(2, 5, 4), ONES(2, 5, 3)),
    ),
    ("x and y must be [N, D] and [N, E], got (9, 3) and (8, 3)", lambda: metrics.linear_cka(X, X[1:])),
    ("features must be [L+1, N, D], got (9, 3)", lambda: metrics.cka_matrix(X)),
    ("predictions must be [L, N]", lambda: metrics.saturation_layer(Y)),
    ("eps must lie in [0, 1], got 1.1", lambda: metrics.effective_depth([0.5], 1.1)),
    ("needs at least two, got 1", lambda: metrics.nc1(X, 0 * Y)),
    ("unknown preset 'plein'", lambda: metrics.renyi_entropy(X, preset="plein")),
    ("alpha must be at least 0, got -1.0", lambda: metrics.renyi_entropy(X, -1.0)),
    ("expected x [N, D] and y [M, D], neither empty, got (9, 3) and (4, 5)", lambda: metrics.mmd(X, ONES(4, 5))),
    ("bandwidth must not be negative, got -1.0", lambda: metrics.mmd(X, X, -1.0)),
    ("expected a floating-point matrix [m, n], got torch.int64 (9,)", lambda: metrics.spectral_norm(Y)),
    ("got 5 folds and class sizes [7, 2]", lambda: metrics.separability(X, (torch.arange(9) > 6).long(), folds=5)),
    ("routing must be [H, r], [B, T, H, r] or [H, r, H], got shape (3,)", lambda: metrics.retrieval_weight(ONES(3))),
    (
        "counted must be (2, 5), got (2, 4)",
        lambda: metrics.retrieval_weight(ONES(2, 5, 3, 4), ONES(2, 4, dtype=torch.bool)),
    ),
    ("expected weights [..., H_kv, r] and shares [H]", lambda: metrics.expected_retrieval(ONES(2, 3), ONES(5))),
    ("w_o must be [D, H d_h] with H = 5 heads, got shape (6, 12)", lambda: metrics.head_shares(ONES(6, 12), 5)),
    ("keeps at least one token, got capacity 0", lambda: Reservoir(0, (1,))),
]


@pytest.mark.parametrize(("named", "call"), REFUSED)
def test_refused(named, call):
    with pytest.raises(ValueError, match=re.escape(named)):
        call()
