"""Linear probes against scikit-learn, and in a measurement against stock hidden states."""

import numpy as np
import pytest
import torch
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


def test_measure_fits_on_the_data_and_scores_on_the_probe_data(tmp_path):
    from PIL import Image

    model = tiny_models.build("vit")
    model.save_pretrained(tmp_path / "model")
    draw = np.random.default_rng(0)
    for part in ("one", "two"):
        for label in range(3):
            (tmp_path / part / f"c{label}").mkdir(parents=True)
            for number in range(12):
                pixels = (40 * draw.normal(size=(16, 16, 3)) + 60 + 40 * label).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / f"c{label}" / f"{number}.png")
    options = {"measures": ["displacement"], "batch_size": 5}
    results = fulldepth.measure(tmp_path / "model", tmp_path / "one", probe_data=str(tmp_path / "two"), **options)
    rows = results.table[results.table.measure == "probe_accuracy"]
    found = rows[rows.statistic == "mean"].value.tolist()
    assert len(found) == 4
    assert rows[rows.statistic == "standard_error"].value.between(0, 0.2).all()

    model.config.tie_last_hidden_states = False

    def features(part):
        files = sorted((tmp_path / part).rglob("*.png"))
        images = np.stack([np.asarray(Image.open(path)) for path in files]).transpose(0, 3, 1, 2)
        with torch.no_grad():
            states = model(torch.tensor(images / 127.5 - 1).float(), output_hidden_states=True).hidden_states
        return [state[:, 0] for state in states], torch.tensor([int(path.parent.name[1]) for path in files])

    (train, labels), (test, test_labels) = features("one"), features("two")
    expected = [probe_accuracy(x, labels, y, test_labels)[0] for x, y in zip(train, test, strict=True)]
    assert found == pytest.approx(expected, abs=0.03)
    assert found[0] == pytest.approx(1 / 3)
    assert found[-1] > 0.6
