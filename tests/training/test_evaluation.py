"""Validation of a model, against numbers computed from its own hidden states."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import f1_score
from torch.nn import functional
from torch.testing import assert_close
from transformers import default_data_collator

from families import zoo
from fulldepth.training.evaluation import evaluate_held_out
from tiny_models import BUILDERS, token_ids


def values(found, measure):
    """By layer."""
    return [row.value for row in found if row.measure == measure]


@torch.no_grad()
def test_tokens_without_a_direction_are_left_out_of_a_layer():
    """The embedding of token 5 is zero; at the first position, which sees nothing else, so are all later states."""
    model = BUILDERS["llama"]().double()
    model.config.tie_last_hidden_states = False
    model.model.embed_tokens.weight[5] = 0.0
    ids = 3 + token_ids(5, 8, most=90)
    ids[:, 0] = ids[3, 4] = 5
    found, _ = evaluate_held_out(model, [{"input_ids": row, "labels": row} for row in ids], default_data_collator, 2)
    out = model(input_ids=ids, labels=ids, output_hidden_states=True)
    states = torch.stack(out.hidden_states)
    psi = (1 - torch.cosine_similarity(states[:-1], states[1:], dim=-1)) / 2
    nonzero = states.norm(dim=-1) > 0
    counted = nonzero[:-1] & nonzero[1:]
    assert (~counted).sum(dim=(1, 2)).tolist() == [6, 5, 5]
    expected = [values[which].mean() for values, which in zip(psi, counted, strict=True)]
    assert_close(torch.tensor(values(found, "displacement")), torch.stack(expected).to(torch.float32))
    counts = {row.measure: row.count for row in found}
    assert (counts["displacement"], counts["validation_loss"]) == (40, 35)
    assert abs(found[0].value - float(out.loss)) < 1e-6


@torch.no_grad()
def test_the_balance_of_experts_is_no_part_of_the_loss():
    """The model's loss is the cross-entropy and a factor times the balance, of a batch of two or of one."""
    model = zoo.build("mixtral", "causal-lm", output_router_logits=True, router_aux_loss_coef=0.7)
    ids = 3 + token_ids(3, 8, most=90)
    found, _ = evaluate_held_out(model, [{"input_ids": row, "labels": row} for row in ids], default_data_collator, 2)
    outputs = [model(input_ids=rows, labels=rows) for rows in ids.split(2)]
    cross_entropy = [
        functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
        for out, rows in zip(outputs, ids.split(2), strict=True)
    ]
    balance = [out.loss.item() - loss for out, loss in zip(outputs, cross_entropy, strict=True)]
    assert balance[0] > 0.1
    for measure, parts in (("validation_loss", cross_entropy), ("validation_auxiliary_loss", balance)):
        assert values(found, measure) == pytest.approx([(2 * parts[0] + parts[1]) / 3], rel=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("family", "body", "norm"), [("gpt2", "transformer", "ln_f"), ("llama", "model", "norm")])
def test_texts_that_end_with_the_padding_token(family, body, norm, side):
    """The stock class reads the last id that is not the padding id, also where the mask counts a later one."""
    model = BUILDERS[f"{family}-classifier"]().eval()
    model.config.tie_last_hidden_states = False
    pad, length = model.config.pad_token_id, 9
    texts = 3 + token_ids(24, length, most=90)
    ends, sizes = (1, 2, 0), (9, 7, 5, 8)  # padding ids that belong to the text; tokens of a text with them
    items, places = [], []
    for number, ids in enumerate(texts):
        size, end = sizes[number % 4], ends[number % 3]
        start = 0 if side == "right" else length - size
        mask = torch.zeros_like(ids)
        mask[start : start + size] = 1
        ids[start + size - end : start + size] = pad
        items.append({"input_ids": ids.where(mask.bool(), pad), "attention_mask": mask})
        places.append(start + size - end - 1)
    batch = default_data_collator(items)
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True)
        states = torch.stack(output.hidden_states)[:, range(len(items)), places]  # [L+1, B, D]
        logits = model.score(getattr(getattr(model, body), norm)(states))
    assert_close(logits[-1], output.logits, rtol=1e-5, atol=1e-5)
    labels = output.logits.argmax(-1)
    labels[::5] = (labels[::5] + 1) % output.logits.shape[-1]
    rows = [{**item, "labels": label} for item, label in zip(items, labels, strict=True)]
    found, _ = evaluate_held_out(model, rows, default_data_collator, 5)
    assert values(found, "validation_accuracy") == pytest.approx([19 / 24])
    assert values(found, "lens_accuracy") == pytest.approx((logits.argmax(-1) == labels).double().mean(1).tolist())
    losses = [torch.nn.functional.cross_entropy(layer, labels).item() for layer in logits]
    assert values(found, "lens_loss") == pytest.approx(losses, rel=1e-5)
    scores = [f1_score(labels, layer.argmax(-1), average="macro") for layer in logits]
    assert values(found, "lens_f1") == pytest.approx(scores, rel=1e-12)
