"""Validation of a model, against numbers computed from its own hidden states."""

from __future__ import annotations

import torch
from transformers import default_data_collator

from fulldepth.training.evaluation import Evaluator
from tiny_models import BUILDERS


def test_tokens_without_a_direction_are_left_out_of_a_layer() -> None:
    """The embedding of token 5 is zero; at the first position, which sees nothing else, so are all later states."""
    model = BUILDERS["llama"]().double()
    model.config.tie_last_hidden_states = False
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = 0.0
    ids = torch.randint(6, 90, (5, 8), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = ids[3, 4] = 5
    found = Evaluator([{"input_ids": row, "labels": row} for row in ids], default_data_collator, 2)(model)
    with torch.no_grad():
        out = model(input_ids=ids, labels=ids, output_hidden_states=True)
    states = torch.stack(out.hidden_states)
    psi = (1 - torch.cosine_similarity(states[:-1], states[1:], dim=-1)) / 2
    nonzero = states.norm(dim=-1) > 0
    counted = nonzero[:-1] & nonzero[1:]
    assert (~counted).sum(dim=(1, 2)).tolist() == [6, 5, 5]
    expected = [values[which].mean() for values, which in zip(psi, counted, strict=True)]
    torch.testing.assert_close(torch.tensor(found.displacement), torch.stack(expected).to(torch.float32))
    assert found.tokens == 40
    assert found.targets == 35
    assert abs(found.loss - float(out.loss)) < 1e-6
