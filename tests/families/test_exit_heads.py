"""Heads of their own for the layers of language models of every type, against the shared head and the stock class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

from families import zoo
from families.expected import FAILURES, REFUSED, UNBUILT, expected_verdict
from families.own_heads import check_own_heads, loss_of
from families.verdicts import CAUSAL, MASKED
from fulldepth.errors import FulldepthError

pytestmark = pytest.mark.filterwarnings("ignore")
FREQUENT = {"llama", "gemma2", "cohere", "gpt_neox", "opt", "moshi", "modernbert"}
CASES = [
    pytest.param(task, name, marks=() if name in FREQUENT else pytest.mark.slow)
    for task, names in (("causal-lm", CAUSAL), ("masked-lm", MASKED))
    for name in names.split()
]


def prepared(task: str, model_type: str) -> tuple[tf.PreTrainedModel, dict[str, torch.Tensor]]:
    """A tiny model, and a batch with labels that it trains on."""
    model = zoo.build(model_type, task)
    batch = zoo.inputs(model, seed=3)
    batch = {**batch, "labels": batch["input_ids"].clone(), "use_cache": False}
    if task == "masked-lm":
        del batch["use_cache"]
    model(**batch).loss.backward()
    model.zero_grad()
    return model, batch


@pytest.mark.parametrize(("task", "model_type"), CASES)
def test_heads_of_language_models_read_train_save_and_cut(task: str, model_type: str, tmp_path: Path) -> None:
    verdict = expected_verdict(task, model_type)
    if verdict == UNBUILT:
        with pytest.raises(FAILURES):
            prepared(task, model_type)
        return
    model, batch = prepared(task, model_type)
    if verdict == REFUSED:
        with pytest.raises(FulldepthError):
            loss_of(model, batch, aligned="uniform")
    else:
        check_own_heads(model, batch, tmp_path)
