"""One search in a process of its own, which may be killed at a moment; see test_ledger.

    python tests/skip/searching.py FOLDER [MOMENT]

MOMENT n: killed without notice once the progress was written n times; n + 0.5: killed halfway through the next time.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fulldepth.skip.selection.loss_cache import LossCache
from fulldepth.skip.selection.search import search
from skip import plain

OPTIONS = {"batch_size": 4, "epochs": 2, "blocks": 3}
LAYERS, WIDTH, STEPS = 5, 32, 200
WEIGHTS = "weights.pt"
"""Of the model, beside the folder."""


def dies_at(moment: float) -> None:
    """Let the loss cache's writing end the process."""
    save, write, times = LossCache._save, Path.write_text, [0]

    def killed_after(loss_cache: LossCache) -> None:
        save(loss_cache)
        times[0] += 1
        if times[0] == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def killed_within(path: Path, text: str, **options: object) -> int:
        if times[0] == moment - 0.5:
            write(path, text[: len(text) // 2], **options)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, text, **options)

    LossCache._save = killed_after
    Path.write_text = killed_within


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        dies_at(float(sys.argv[2]))
    which, criterion = Path(sys.argv[1]).name.split("-")[:2]
    model = plain.fresh(LAYERS, WIDTH).eval()
    model.load_state_dict(torch.load(Path(sys.argv[1]).with_name(WEIGHTS)))
    search(
        model,
        plain.examples(train=12, heldout=48),
        search=which,
        criterion=criterion,
        output=sys.argv[1],
        resume=True,
        **OPTIONS,
    )
