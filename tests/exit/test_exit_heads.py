"""An image classifier with a head for every layer: measured, left early and cut by these heads; bad files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from scipy.special import softmax
from torch import Tensor

import fulldepth
import tiny_models
from fulldepth.data import open_source, prepare
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.exit import sweep
from fulldepth.hf import EXIT_HEADS, exit_heads_of, load_exit_heads, load_processor, open_model
from golden.tables import images
from metrics.oracle import of_lens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock checkpoint with the file of heads beside it."""
    folder, model = tmp_path_factory.mktemp("heads") / "model", tiny_models.build("vit")
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    heads = {f"exit_heads.{n}.weight": 0.5 * torch.randn(3, 32, generator=generator) for n in (1, 2)}
    save_file(heads, folder / EXIT_HEADS)
    return folder


def layer_logits(checkpoint: Path, pixels: Tensor) -> np.ndarray[Any, Any]:
    """[L, N, C] logits of every layer, by transformers, numpy and the files alone."""
    model = tf.ViTForImageClassification.from_pretrained(checkpoint, dtype=torch.float64)
    model.config.tie_last_hidden_states = False
    with torch.no_grad():
        states = model(pixels.double(), output_hidden_states=True).hidden_states[1:]
    heads = load_file(checkpoint / EXIT_HEADS)
    gain, shift = (p.detach().numpy() for p in (model.vit.layernorm.weight, model.vit.layernorm.bias))
    logits = []
    for layer, state in enumerate(states, start=1):
        h = state[:, 0].numpy()
        h = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + model.vit.layernorm.eps) * gain + shift
        if layer < len(states):
            logits.append(h @ heads[f"exit_heads.{layer}.weight"].double().numpy().T)
        else:
            logits.append(h @ model.classifier.weight.detach().numpy().T + model.classifier.bias.detach().numpy())
    return np.stack(logits)


def test_the_file_of_heads_changes_nothing_for_transformers_and_is_told_of(checkpoint: Path) -> None:
    stock, report = tf.ViTForImageClassification.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(report.values())
    batch, opened = tiny_models.inputs(stock), open_model(checkpoint, exit_heads=True).model
    assert torch.equal(stock(**batch).logits, opened(**batch).logits)
    assert any(EXIT_HEADS in warning for warning in open_model(checkpoint).warnings)


def test_measure_and_exit_read_each_layer_by_its_own_head(checkpoint: Path, tmp_path: Path) -> None:
    data = images(tmp_path / "pictures", 24)
    anatomy = find_anatomy(open_model(checkpoint).model)
    processor = load_processor(checkpoint, anatomy.config)
    options = {"task": "image-classification", "processor": processor}
    sequences = prepare(open_source(data), **options)
    batch = sequences.collate(range(len(sequences)))
    logits, target = layer_logits(checkpoint, batch.inputs["pixel_values"]), batch.labels.numpy()
    probability = softmax(logits, axis=-1)

    results = fulldepth.measure(checkpoint, data, measures=["lens_loss", "lens_accuracy"])
    accuracy, loss, _ = of_lens(logits, target)
    np.testing.assert_allclose(results.values("lens_loss", "mean")[-3:], loss, rtol=1e-4)
    np.testing.assert_allclose(results.values("lens_accuracy", "mean")[-3:], accuracy)
    assert results.meta["model"]["exit_heads"] == 2

    threshold = float(np.median(probability[0].max(-1)))
    (row,) = sweep(checkpoint, data, threshold=[threshold], repeats=1).meta["exits"]
    sure = probability.max(-1) >= threshold  # [L, N]
    sure[-1] = True
    left = sure.argmax(0)
    assert row["accuracy"] == pytest.approx((logits.argmax(-1)[left, np.arange(len(target))] == target).mean())
    assert row["exits"] == np.bincount(left, minlength=3).tolist()
    assert row["exits"][0] == 12


def test_malformed_files_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    model, path, content = tiny_models.build("vit"), tmp_path / EXIT_HEADS, (checkpoint / EXIT_HEADS).read_bytes()
    one, two = load_file(checkpoint / EXIT_HEADS).items()
    cases: dict[str, dict[str, Tensor]] = {
        r"\[1\]": dict([one]),
        r"\[1, 2, 3\]": dict([one, two, ("exit_heads.3.weight", one[1].clone())]),
        r"\[4, 32\]": dict([one, (two[0], torch.ones(4, 32))]),
        "exit_heads.2.weight": dict([one, (two[0], two[1] * torch.nan)]),
        "exit_heads.1.weight": dict([two, (one[0], one[1].long())]),
    }
    for message, tensors in cases.items():
        save_file(tensors, path)
        with pytest.raises(FulldepthError, match=message):
            load_exit_heads(model, tmp_path)
    for damaged in (b"", b"\xff" * 40, content[:-9]):
        path.write_bytes(damaged)
        with pytest.raises(FulldepthError, match="Cannot read"):
            load_exit_heads(model, path)
    assert not exit_heads_of(model)
