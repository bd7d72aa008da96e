"""Heads of their own for the layers of language models of every type, against the shared head and the stock class."""

from __future__ import annotations

from pathlib import Path

import pytest

from families import zoo
from families.own_heads import check_own_heads, loss_of
from families.verdicts import CAUSAL, MASKED, stated
from fulldepth.errors import FulldepthError

pytestmark = pytest.mark.filterwarnings("ignore")
FREQUENT = {"llama", "gemma2", "cohere", "gpt_neox", "opt", "moshi", "modernbert"}
UNTRAINED = {"git"}
"""Types whose stock class has no loss on a batch of text alone."""
CASES = [
    pytest.param(task, name, marks=() if name in FREQUENT else pytest.mark.slow)
    for task, names in (("causal-lm", CAUSAL), ("masked-lm", MASKED))
    for name in names.split()
    if name not in UNTRAINED
]


@pytest.mark.parametrize(("task", "model_type"), CASES)
def test_heads_of_language_models_read_train_save_and_cut(task: str, model_type: str, tmp_path: Path) -> None:
    """Those that the table of model types calls right; the others have no head to apply to their layers."""
    model = zoo.build(model_type, task)
    batch = zoo.inputs(model, seed=3)
    batch = {**batch, "labels": batch["input_ids"].clone(), **({"use_cache": False} if task == "causal-lm" else {})}
    model(**batch).loss.backward()
    model.zero_grad()
    if stated(task, model_type) == "right":
        loss_of(model, batch, aligned="uniform")
        check_own_heads(model, batch, tmp_path)
    else:
        with pytest.raises(FulldepthError, match=r"cannot be applied to its layers|no prediction head|is refused"):
            loss_of(model, batch, aligned="uniform")
