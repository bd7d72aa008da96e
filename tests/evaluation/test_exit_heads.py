"""Scores at exit layers of a model with a head for every layer, against lm-eval on stock models of the first layers."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("lm_eval")
from torch import nn

from evaluation import small_world
from evaluation.test_layers import LIMIT, ours, scored, stock
from fulldepth.evaluation.harness import Answers
from tiny_models import seeded


@pytest.mark.parametrize("tied", [False, True])
def test_each_layer_is_scored_and_generates_by_its_own_head(tmp_path, monkeypatch, tied):
    model = small_world.model()
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    generator = seeded(1)
    matrices = {n: 0.3 * torch.randn(model.lm_head.weight.shape, generator=generator) for n in (1, 2, 3)}
    model.save_pretrained(tmp_path / "model")
    save_file({f"exit_heads.{n}.weight": w for n, w in matrices.items()}, tmp_path / "model/exit_heads.safetensors")
    data, texts, replies = small_world.write_data(tmp_path / "tasks"), [], {}
    monkeypatch.setattr(Answers, "put", lambda self, new: (texts.extend(new.values()), self.update(new)))
    path = str(tmp_path / "model")
    results = scored(path, ["lambada_local"], data, exit_layers="all")
    texts.clear()
    generated = scored(path, ["gsm8k_local"], data, exit_layers="2", num_fewshot=2)
    for layer in (1, 2, 3, 4):
        first = copy.deepcopy(model) if layer == 4 else small_world.first_layers(model, layer)
        if layer < 4:
            first.config.tie_word_embeddings = False  # the harness ties weights again
            first.lm_head = nn.Linear(32, 259, bias=False)
            first.lm_head.weight.data.copy_(matrices[layer])
        expected = stock(first, "lambada_local", data)
        found = ours(results, "lambada_local", layer)
        assert found["perplexity"][0] == pytest.approx(expected["perplexity"][0], rel=1e-4)
        if layer in (2, 4):
            assert ours(generated, "gsm8k_local", layer) == stock(first, "gsm8k_local", data, replies, num_fewshot=2)
    assert set(texts) == set(replies["gsm8k_local"])
    assert len(set(texts)) == 2 * LIMIT
