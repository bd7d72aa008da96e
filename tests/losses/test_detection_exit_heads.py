"""The multi-exit loss of a detector and its gradient, against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drawn_shapes import draw
from exit.detector_world import LAYERS, detector, heads_for
from exit.plain_detector import multi_exit_loss, read_layer, set_loss, states_of
from fulldepth.errors import FulldepthError
from fulldepth.losses import Objective, add_exit_heads, use_set_loss

SHARES = {"linear": [1 / 6, 2 / 6, 3 / 6], "uniform": [1 / 3] * 3, "sum": [1.0] * 3}


def batch(size: int = 4, empty: int = 2) -> dict[str, Any]:
    """Images of shapes and their objects, boxes in float64; one image has none."""
    images, labels = [], []
    for index in range(size):
        image, objects = draw("train", 48, index)
        images.append(torch.tensor(list(image.convert("RGB").tobytes())).view(48, 48, 3).permute(2, 0, 1) / 255.0)
        keep = slice(0, 0 if index == empty else None)
        boxes = torch.tensor(objects.relative, dtype=torch.float64)[keep]
        labels.append({"class_labels": torch.tensor(objects.classes)[keep], "boxes": boxes})
    return {"pixel_values": torch.stack(images).double(), "labels": labels}


def multi_exit(name: str = "detr") -> tuple[Any, dict[str, Tensor]]:
    """A detector in float64 with exit heads that answer differently, and their weights by name."""
    model = detector(name)
    drawn = heads_for(model, {"pixel_values": batch()["pixel_values"].float()})
    add_exit_heads(model.double())
    heads = {key: weight for key, weight in model.named_parameters() if key.startswith("exit_")}
    assert {key: tuple(weight.shape) for key, weight in heads.items()} == {
        key: tuple(weight.shape) for key, weight in drawn.items()
    }
    with torch.no_grad():
        for key, weight in heads.items():
            weight.copy_(drawn[key])
    use_set_loss(model)
    return model.eval(), heads


@pytest.mark.parametrize("name", ["detr", "detr-auxiliary"])
@pytest.mark.parametrize("weights", [*SHARES, [0.0, 2.0, 0.5]], ids=str)
def test_loss_and_gradient_are_those_of_the_definition(weights: str | list[float], name: str) -> None:
    (model, heads), inputs = multi_exit(name), batch()
    shares = SHARES[weights] if isinstance(weights, str) else weights
    expected = multi_exit_loss(model, heads, inputs, shares)
    own = {key: weight for key, weight in model.named_parameters() if weight.requires_grad}
    slopes = torch.autograd.grad(expected, list(own.values()), allow_unused=True)
    objective = Objective(multi_exit={"weights": weights, "schedule": "always"}).attach(model)
    loss, parts = objective(model(**inputs), inputs)
    objective.detach()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
    assert float(parts["multi_exit"]) == pytest.approx(float(expected.detach()), rel=1e-10)
    found = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
    largest = max(float(slope.abs().max()) for slope in slopes if slope is not None)
    for key, got, slope in zip(own, found, slopes, strict=True):
        missing = torch.zeros(())
        got, slope = (missing if each is None else each for each in (got, slope))
        assert float((got - slope).abs().max()) <= 1e-9 * largest, key
    for layer in range(1, LAYERS):
        for kind in ("exit_heads", "exit_box_heads"):
            taught = bool(found[list(own).index(f"{kind}.{layer}.weight")].any())
            assert taught == (shares[layer - 1] > 0)


def test_alternating_steps_take_the_loss_of_the_last_layer_alone() -> None:
    (model, heads), inputs = multi_exit(), batch()
    state = states_of(model, {"pixel_values": inputs["pixel_values"]})[-1]
    last = float(set_loss(*read_layer(model, heads, LAYERS, state), inputs["labels"])["mean"].detach())
    every = float(multi_exit_loss(model, heads, inputs, SHARES["linear"]).detach())
    assert last != pytest.approx(every, rel=0.01)
    objective = Objective(multi_exit={"schedule": "alternate"}).attach(model)
    for step, expected in enumerate([last, every, last, every], start=1):
        assert objective.step == step
        loss, parts = objective(model(**inputs), inputs)
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-10)
        assert float(parts["ce"]) == pytest.approx(last, rel=1e-10)
        assert ("multi_exit" in parts) == (step % 2 == 0)
        gradients = torch.autograd.grad(loss, list(heads.values()), allow_unused=True)
        assert all((gradient is not None) == (step % 2 == 0) for gradient in gradients)
    objective.detach()


def test_aligned_reads_all_layers_by_the_shared_heads_of_a_model_that_has_others() -> None:
    (model, heads), inputs = multi_exit(), batch()
    classes, boxes = model.class_labels_classifier, model.bbox_predictor
    expected: Any = 0.0
    for share, state in zip(SHARES["linear"], states_of(model, {"pixel_values": inputs["pixel_values"]}), strict=True):
        normed = model.model.decoder.layernorm(state)
        expected = expected + share * set_loss(classes(normed), boxes(normed).sigmoid(), inputs["labels"])["mean"]
    objective = Objective(aligned={"schedule": "always"}).attach(model)
    loss, _ = objective(model(**inputs), inputs)
    objective.detach()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
    assert all(g is None for g in torch.autograd.grad(loss, list(heads.values()), allow_unused=True))


def test_bfloat16_is_close_and_reaches_every_head() -> None:
    (model, heads), inputs = multi_exit(), batch()
    expected = float(multi_exit_loss(model, heads, inputs, SHARES["linear"]).detach())
    model.to(torch.bfloat16)
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    objective = Objective(multi_exit={"schedule": "always"}).attach(model)
    loss, _ = objective(model(**inputs), inputs)
    loss.backward()
    objective.detach()
    assert float(loss.detach()) == pytest.approx(expected, rel=0.1)
    for head in (*model.exit_heads.values(), *model.exit_box_heads.values()):
        assert head.weight.grad.dtype == torch.bfloat16
        assert head.weight.grad.any()


def test_heads_are_small_reproducible_and_refused_twice() -> None:
    model, other = detector(), detector()
    state = torch.random.get_rng_state()
    for each in (model, other):
        add_exit_heads(each, seed=5)
    assert torch.equal(state, torch.random.get_rng_state())
    weights = [head.weight for kind in (model.exit_heads, model.exit_box_heads) for head in kind.values()]
    again = [head.weight for kind in (other.exit_heads, other.exit_box_heads) for head in kind.values()]
    assert [tuple(weight.shape) for weight in weights] == [(4, 32)] * 4
    assert all(torch.equal(one, two) for one, two in zip(weights, again, strict=True))
    assert float(torch.cat(weights).detach().std()) == pytest.approx(0.02, rel=0.15)
    assert len({float(weight.sum().detach()) for weight in weights}) == 4
    with pytest.raises(FulldepthError, match="has exit heads already"):
        add_exit_heads(model)
