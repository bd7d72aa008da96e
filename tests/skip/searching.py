"""One search in a process of its own: python tests/skip/searching.py FOLDER, for `test_loss_cache.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fulldepth.skip.search import search
from skip import plain

OPTIONS = {"batch_size": 4, "epochs": 2, "blocks": 3}
UNFITTED = {"batch_size": 4, "fit": False, "blocks": 3}
LAYERS, WIDTH, STEPS = 5, 32, 200
SIZES = {"train": 12, "heldout": 20}
WEIGHTS = "weights.pt"
"""Of the model, beside the folder."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    which, criterion, *target = Path(sys.argv[1]).name.split("-")
    if target:
        OPTIONS = UNFITTED | {"blocks": None, "target_speedup": 1.1}
    model = plain.fresh(LAYERS, WIDTH).eval()
    model.load_state_dict(torch.load(Path(sys.argv[1]).with_name(WEIGHTS)))
    search(
        model,
        plain.examples(**SIZES),
        search=which,
        criterion=criterion,
        output=sys.argv[1],
        resume=True,
        **OPTIONS,
    )
