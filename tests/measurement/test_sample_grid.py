"""Lens grids of classifiers, against transformers' own hidden states, heads and files."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import tiny_models
from fulldepth import measure
from fulldepth.data import open_source, thumbnail
from fulldepth.hf import load_processor
from fulldepth.measurement import sample_grid
from fulldepth.results import Results

MEASURES = ["saturation", "lens_accuracy"]


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory, picture_folder):
    """The pictures in classes and files with names that are markup."""
    root = tmp_path_factory.mktemp("hostile")
    for index, name in enumerate(("<img src=x onerror=alert(1)>", 'it\'s "b" & <b>c', "</script><script>alert(2)<")):
        shutil.copytree(picture_folder / f"LABEL_{index}", root / name.replace("/", "∕"))
    first = next(root.glob("it*"))
    (first / "0.png").rename(first / 'o\'clock "<i>".png')
    return root


def predicted(model, pixels):
    """[L+1, N] classes and probabilities, by the final norm and the head on every hidden state."""
    with torch.no_grad():
        body = model.vit
        states = [body.embeddings(pixels)]
        for layer in body.layers if hasattr(body, "layers") else body.encoder.layer:
            out = layer(states[-1])
            states.append(out[0] if isinstance(out, tuple) else out)
        logits = torch.stack([model.classifier(body.layernorm(state)[:, 0]) for state in states])
    best = logits.softmax(-1).max(-1)
    return best.indices.numpy(), best.values.numpy()


def difficulty(classes, chances):
    """(saturation layer, -final probability, index), by trying every layer."""
    depth = len(classes) - 1
    for sample in range(classes.shape[1]):
        settled = next(s for s in range(1, depth + 1) if len(set(classes[s:, sample].tolist())) == 1)
        yield settled, -chances[-1, sample], sample


def test_samples_of_an_image_classifier(checkpoint, hostile_folder, tmp_path):
    folder = checkpoint("vit")
    model = tf.ViTForImageClassification.from_pretrained(folder).eval()
    source = open_source(str(hostile_folder))
    images = [record.image() for record in source.records]
    processor = load_processor(str(folder), model.config, revision=None, trust_remote_code=False)
    classes, chances = predicted(model, processor(images=images, return_tensors="pt")["pixel_values"])
    results = measure(folder, str(hostile_folder), measures=MEASURES, batch_size=5)
    grid = json.loads(json.dumps(results.meta["lens_grid"]))
    assert grid["of"] == "samples"
    groups = {}
    for sample in grid["samples"]:
        index = int(sample["title"].removeprefix("Image ")) - 1
        groups.setdefault(sample["group"], []).append(index)
        names = [source.class_names[label] for label in classes[:, index]]
        assert [row[0][0] for row in sample["grid"]] == names
        np.testing.assert_allclose([row[0][1] for row in sample["grid"]], chances[:, index], atol=6e-5)
        label = source.records[index].label
        assert sample["targets"] == [source.class_names[label]]
        assert sample["picture"] == thumbnail(images[index])
        assert (hostile_folder / sample["tokens"][0]).is_file()
    order = [index for _, _, index in sorted(difficulty(classes, chances))]
    assert groups["Easiest: settle first"] == order[:6]
    assert groups["Hardest: settle last"] == order[:-7:-1]
    labels = [source.records[index].label for index in groups["Some of the images"]]
    assert len(labels) == sample_grid.SAMPLES
    assert set(labels) == {0, 1, 2}
    assert labels == sorted(labels)
    assert Results.load(results.save(tmp_path)).meta["lens_grid"] == grid


def test_shared_results_hold_neither_pictures_nor_file_names(main, checkpoint, hostile_folder, tmp_path):
    command = ["measure", checkpoint("vit"), "--data", hostile_folder, "--measures", ",".join(MEASURES)]
    outcome = main(*command, "--no-pictures", "--output", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    (sample, *_) = Results.load(tmp_path / "out").meta["lens_grid"]["samples"]
    assert sample["picture"] is None
    assert sample["tokens"] == [sample["title"]]
    for name in ("results.json", "report.html"):
        text = (tmp_path / "out" / name).read_text()
        assert "data:image/png;base64" not in text
        assert "data:image/jpeg" not in text
        assert "clock" not in text
    outcome = main(*command, "--set", "grid_samples=0", "--output", tmp_path / "none")
    assert Results.load(tmp_path / "none").meta["lens_grid"] is None


def test_a_text_classifier_shows_its_texts(checkpoint, ragged_tsv, ragged_texts):
    results = measure(checkpoint("bert-classifier"), ragged_tsv, measures=MEASURES, batch_size=4)
    samples = results.meta["lens_grid"]["samples"]
    texts = {text.casefold()[:8] for text, _ in ragged_texts}
    assert {sample["group"] for sample in samples} >= {"Some of the texts", "Hardest: settle last"}
    for sample in samples:
        assert sample["picture"] is None
        assert sample["tokens"][0].casefold()[:8] in texts
        assert len(sample["grid"]) == 4


def test_probes_through_the_command_are_those_of_scikit_learn(main, tmp_path):
    """Digits, equally many of each class: the probe of one layer is fitted by hand to transformers' hidden states."""
    folder, digits = tmp_path / "model", load_digits()
    torch.manual_seed(0)
    model = tf.ViTForImageClassification(tf.ViTConfig(**tiny_models.VISION | {"num_labels": 10})).eval()
    model.save_pretrained(folder)
    images: dict[str, list[Image.Image]] = {"fitted": [], "scored": []}
    for label in range(10):
        for number, index in enumerate(np.flatnonzero(digits.target == label)[:25]):
            part = "fitted" if number < 15 else "scored"
            image = Image.fromarray((digits.images[index] * 15.9).astype(np.uint8)).convert("RGB")
            (tmp_path / part / str(label)).mkdir(parents=True, exist_ok=True)
            image.save(tmp_path / part / str(label) / f"{number}.png")
            images[part].append(image)
    outcome = main(
        *("measure", folder, "--data", tmp_path / "fitted", "--probe-data", tmp_path / "scored"),
        *("--measures", "lens_accuracy", "--output", tmp_path / "out"),
    )
    assert outcome.code == 0, outcome.err
    results = Results.load(tmp_path / "out")
    probes = results.table[results.table.measure == "probe_accuracy"].set_index(["statistic", "layer"]).value
    figure = results.figures()["probe_accuracy"]
    assert [len(trace.y) for trace in figure.data] == [4, 4]
    np.testing.assert_allclose(figure.data[0].y, probes["mean"])
    processor = load_processor(str(folder), model.config, revision=None, trust_remote_code=False)

    def features(part):
        with torch.no_grad():
            output = model(**processor(images=images[part], return_tensors="pt"), output_hidden_states=True)
        return output.hidden_states[2][:, 0].double().numpy(), np.repeat(np.arange(10), len(images[part]) // 10)

    (train, labels), (test, classes) = features("fitted"), features("scored")
    scale = StandardScaler().fit(train)
    probe = LogisticRegression(max_iter=10_000).fit(scale.transform(train), labels)
    expected = probe.score(scale.transform(test), classes)
    assert expected > 0.4
    assert probes["mean", 2] == pytest.approx(expected, abs=0.011)  # one sample on the border may fall either way


def test_pictures_are_limited(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_grid, "PICTURES", 5)
    for label in range(3):
        (tmp_path / f"LABEL_{label}").mkdir()
        for number in range(6):
            Image.new("RGB", (16, 16), (80 * label, 10 * number, 90)).save(
                tmp_path / f"LABEL_{label}" / f"{number}.png"
            )
    samples = measure(checkpoint("vit"), str(tmp_path), measures=MEASURES, grid_samples=18).meta["lens_grid"]["samples"]
    assert len({sample["title"] for sample in samples if sample["picture"]}) == 5
    assert len({sample["title"] for sample in samples}) == 18
