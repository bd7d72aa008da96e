"""An image classifier with a head for every layer: measured, left early and cut by these heads; bad files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose
from safetensors.torch import load_file, save_file
from scipy.special import softmax

import fulldepth
import tiny_models
from exit import plain
from fulldepth.data import open_source, prepare
from fulldepth.execution import find_anatomy
from fulldepth.exit import sweep
from fulldepth.hf import EXIT_HEADS, exit_heads_of, load_exit_heads, load_processor, open_model
from golden.tables import images
from metrics.oracle import of_lens
from refusals import refused
from tiny_models import seeded


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A stock checkpoint with the file of heads beside it."""
    folder, model = tmp_path_factory.mktemp("heads") / "model", tiny_models.build("vit")
    model.save_pretrained(folder)
    generator = seeded(5)
    heads = {f"exit_heads.{n}.weight": 0.5 * torch.randn(3, 32, generator=generator) for n in (1, 2)}
    save_file(heads, folder / EXIT_HEADS)
    return folder


@torch.no_grad()
def layer_logits(checkpoint, pixels):
    """[L, N, C] logits of every layer, by transformers and the file alone."""
    model = tf.ViTForImageClassification.from_pretrained(checkpoint, dtype=torch.float64)
    model.config.tie_last_hidden_states = False
    states = model(pixels.double(), output_hidden_states=True).hidden_states[1:]
    features, heads = [model.vit.layernorm(state)[:, 0] for state in states], load_file(checkpoint / EXIT_HEADS)
    early = [features[n - 1] @ heads[f"exit_heads.{n}.weight"].double().T for n in (1, 2)]
    return torch.stack([*early, model.classifier(features[2])]).numpy()


def test_the_file_of_heads_changes_nothing_for_transformers_and_is_told_of(checkpoint):
    stock, report = tf.ViTForImageClassification.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(report.values())
    batch, opened = tiny_models.inputs(stock), open_model(checkpoint, exit_heads=True).model
    assert torch.equal(stock(**batch).logits, opened(**batch).logits)
    assert any(EXIT_HEADS in warning for warning in open_model(checkpoint).warnings)


def test_measure_and_exit_read_each_layer_by_its_own_head(checkpoint, tmp_path):
    data = images(tmp_path / "pictures", 24, "LABEL_")
    anatomy = find_anatomy(open_model(checkpoint).model)
    processor = load_processor(checkpoint, anatomy.config)
    options = {"task": "image-classification", "processor": processor}
    sequences = prepare(open_source(data), **options)
    batch = sequences.collate(range(len(sequences)))
    logits, target = layer_logits(checkpoint, batch.inputs["pixel_values"]), batch.labels.numpy()

    results = fulldepth.measure(checkpoint, data, measures=["lens_loss", "lens_accuracy"])
    accuracy, loss, _ = of_lens(logits, target)
    assert_allclose(results.values("lens_loss", "mean")[-3:], loss, rtol=1e-4)
    assert_allclose(results.values("lens_accuracy", "mean")[-3:], accuracy)
    assert results.meta["model"]["exit_heads"] == 2

    threshold = float(np.median(softmax(logits[0], axis=-1).max(-1)))
    (row,) = sweep(checkpoint, data, threshold=[threshold], repeats=1).meta["exits"]
    expected = plain.row(logits.swapaxes(0, 1).tolist(), target.tolist(), "confidence", threshold, 1)
    assert row["accuracy"] == pytest.approx(expected["accuracy"])
    assert row["exits"] == expected["exits"]
    assert row["exits"][0] == 12


def test_malformed_files_are_refused(checkpoint, tmp_path):
    model, path, content = tiny_models.build("vit"), tmp_path / EXIT_HEADS, (checkpoint / EXIT_HEADS).read_bytes()
    one, two = load_file(checkpoint / EXIT_HEADS).items()
    cases = {
        r"\[1\]": dict([one]),
        r"\[1, 2, 3\]": dict([one, two, ("exit_heads.3.weight", one[1].clone())]),
        r"\[4, 32\]": dict([one, (two[0], torch.ones(4, 32))]),
        "exit_heads.2.weight": dict([one, (two[0], two[1] * torch.nan)]),
        "exit_heads.1.weight": dict([two, (one[0], one[1].long())]),
    }
    for message, tensors in cases.items():
        save_file(tensors, path)
        with refused(message):
            load_exit_heads(model, tmp_path)
    for damaged in (b"", b"\xff" * 40, content[:-9]):
        path.write_bytes(damaged)
        with refused("Cannot read"):
            load_exit_heads(model, path)
    assert not exit_heads_of(model)
