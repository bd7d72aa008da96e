"""The public names of the room."""

from __future__ import annotations

import torch

import fulldepth
import tiny_models as tm


def test_generate_takes_a_model_or_a_decoder_made_for_it():
    model = tm.build("llama", dtype=torch.float64)
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    found = fulldepth.exit.generate(model, ids, max_new_tokens=4, speculate_from=1, draft_length=2)
    assert torch.equal(found.sequences, expected)
    again = fulldepth.exit.generate(fulldepth.exit.Decoder(model), ids, max_new_tokens=4)
    assert torch.equal(again.sequences, expected)
    assert again.stats.as_dict()["mode"] == "plain"
