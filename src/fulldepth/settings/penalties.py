"""Names of the penalties and their options, and the methods that combine them. Importing this does not load torch."""

from __future__ import annotations

from typing import Any

PENALTIES: dict[str, tuple[str, ...]] = {
    "aligned": ("weight", "weights", "schedule", "positions"),
    "multi_exit": ("weight", "weights", "schedule"),
    "jump": ("weight", "alpha"),
    "coherence": ("weight", "layers", "target", "scope"),
    "orthogonality": ("weight", "layers", "form"),
    "similarity": ("weight", "weights"),
}
"""Penalty -> its options: the classes of `fulldepth.losses.TERMS` and their fields, which check the values."""

METHODS: dict[str, dict[str, Any]] = {
    "standard": {},
    "baseline": {},
    "jreg": {"jump": {"weight": 1.0, "alpha": 1.0}},
    "cr": {"coherence": {"weight": 0.01}, "orthogonality": {"weight": 0.01}},
    "aligned": {"aligned": {"weight": 1.0, "weights": "linear", "schedule": "alternate"}},
    "multi-exit": {"multi_exit": {"weight": 1.0, "weights": "linear", "schedule": "alternate"}},
    "cos-regularised": {"similarity": {"weight": 1.0, "weights": "linear"}},
    "similarity": {"similarity": {"weight": 1.0, "weights": "linear"}},
}
"""Method -> terms with the papers' weights (JREG Eq. 5; CR Sec. 3.3; aligned training Eq. 5 and App. B.3). `baseline`
is `standard`, and `cos-regularised` is `similarity`. In fine-tuning from a checkpoint, `schedule` is `always`."""
