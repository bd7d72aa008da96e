"""Linear probes against scikit-learn, and in a measurement against stock hidden states."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score

import fulldepth
import tiny_models
from fulldepth.metrics.separability import probe_accuracy


def blobs(counts, seed):
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(9).normal(size=(len(counts), 5))
    labels = np.repeat(np.arange(len(counts)), counts)
    return torch.tensor(centres[labels] + draw.normal(size=(len(labels), 5))), torch.tensor(labels)


def test_accuracy_is_scikit_learns_balanced_one():
    (x, y), (test_x, test_y) = blobs([20, 20, 20], 0), blobs([5, 30, 60], 1)
    mean, std = x.mean(0), x.std(0, correction=0)
    plain = LogisticRegression(max_iter=10_000).fit((x - mean) / std, y)
    predicted = plain.predict((test_x - mean) / std)
    value, error = probe_accuracy(x, y, test_x, test_y)
    assert value == pytest.approx(balanced_accuracy_score(test_y, predicted))
    shares = [(predicted[test_y == k] == k).mean() for k in range(3)]
    variance = sum(p * (1 - p) / n for p, n in zip(shares, (5, 30, 60), strict=True))
    assert error == pytest.approx(variance**0.5 / 3)
    assert 0.4 < value < 1


@torch.no_grad()
def test_measure_fits_on_the_data_and_scores_on_the_probe_data(tmp_path):
    model, draw = tiny_models.build("vit"), np.random.default_rng(0)
    model.save_pretrained(tmp_path / "model")
    features, labels = [], torch.arange(3).repeat_interleave(12)
    for part in ("one", "two"):
        pixels = 40 * draw.normal(size=(36, 16, 16, 3)) + 60 + 40 * labels[:, None, None, None].numpy()
        pixels = pixels.clip(0, 255).astype(np.uint8)
        for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
            folder = tmp_path / part / f"c{label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number}.png")
        inputs = torch.tensor(pixels.transpose(0, 3, 1, 2) / 127.5 - 1).float()
        states = model(inputs, output_hidden_states=True).hidden_states
        features.append([state[:, 0] for state in states])
    options = {"measures": ["displacement"], "batch_size": 5}
    results = fulldepth.measure(tmp_path / "model", tmp_path / "one", probe_data=str(tmp_path / "two"), **options)
    found = results.values("probe_accuracy", "mean").tolist()
    expected = [probe_accuracy(x, labels, y, labels)[0] for x, y in zip(*features, strict=True)]
    assert found == pytest.approx(expected, abs=0.03)
    assert found[0] == pytest.approx(1 / 3)
    assert found[-1] > 0.6
    assert results.values("probe_accuracy", "standard_error").between(0, 0.2).all()
