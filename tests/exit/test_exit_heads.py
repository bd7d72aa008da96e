"""A multi-exit model from training to its exits: checkpoint, resuming, measuring, leaving early, cutting, bad files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

import fulldepth
import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.exit import export_layers, sweep
from fulldepth.hf import (
    EXIT_HEADS,
    exit_heads_of,
    load_exit_heads,
    open_model,
    truncated,
)
from fulldepth.losses import DepthTrainer, Objective, add_exit_heads


def images(count: int = 24) -> list[dict[str, Tensor]]:
    """Pictures whose class is their brightness."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    pixels = 0.3 * torch.randn(count, 3, 16, 16, generator=generator) + (labels - 1.0)[:, None, None, None]
    return [{"pixel_values": image, "labels": label} for image, label in zip(pixels, labels, strict=True)]


class InOrder(DepthTrainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(folder: Path, model: Any, **options: Any) -> DepthTrainer:
    arguments = tf.TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        learning_rate=0.01,
        report_to=[],
        save_steps=2,
        use_cpu=True,
        disable_tqdm=True,
        **{"max_steps": 6, **options},
    )
    return InOrder(model, arguments, train_dataset=images(), objective=Objective(multi_exit={"schedule": "always"}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trainer(folder, tiny_models.build("vit")).train()
    return folder


def test_heads_are_trained_saved_beside_a_stock_checkpoint_and_resumed(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoint-6"
    heads = load_file(checkpoint / EXIT_HEADS)
    assert sorted(heads) == ["exit_heads.1.weight", "exit_heads.2.weight"]
    assert not any("exit" in name for name in load_file(checkpoint / "model.safetensors"))
    model = tiny_models.build("vit")
    add_exit_heads(find_anatomy(model).model, seed=42)  # the Trainer's seed
    assert all((heads[f"exit_heads.{n}.weight"] != h.weight).all() for n, h in exit_heads_of(model).items())

    stock, report = tf.ViTForImageClassification.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(report.values())
    opened = open_model(checkpoint, exit_heads=True).model
    batch = tiny_models.inputs(stock)
    assert torch.equal(stock(**batch).logits, opened(**batch).logits)
    assert any(EXIT_HEADS in warning for warning in open_model(checkpoint).warnings)

    (tmp_path / "checkpoint-2").parent.mkdir(exist_ok=True)
    shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")
    resumed = trainer(tmp_path, tiny_models.build("vit"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, weight in load_file(tmp_path / "checkpoint-6" / EXIT_HEADS).items():
        torch.testing.assert_close(weight, heads[name], rtol=1e-5, atol=1e-6)


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


def labelled(folder: Path) -> Path:
    """The pictures as files in class folders."""
    from PIL import Image

    for index, row in enumerate(images()):
        place = folder / f"{int(row['labels'])}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = (row["pixel_values"].clamp(-2, 2) + 2) * 63
        Image.fromarray(pixels.permute(1, 2, 0).byte().numpy()).save(place / f"{index:02}.png")
    return folder


def test_measure_and_exit_read_each_layer_by_its_own_head(run: Path, tmp_path: Path) -> None:
    from fulldepth.data import open_source, prepare
    from fulldepth.hf import load_processor

    checkpoint, data = run / "checkpoint-6", labelled(tmp_path / "pictures")
    labels = {"label2id": {str(n): n for n in range(3)}, "id2label": {n: str(n) for n in range(3)}}
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "model").mkdir()
    for path in checkpoint.glob("*.safetensors"):
        shutil.copy(path, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | labels))
    checkpoint = tmp_path / "model"

    anatomy = find_anatomy(open_model(checkpoint).model)
    sequences = prepare(
        open_source(data),
        task="image-classification",
        processor=load_processor(checkpoint, anatomy.config),
    )
    batch = sequences.collate(range(len(sequences)))
    logits = layer_logits(checkpoint, batch.inputs["pixel_values"])
    target = batch.labels.numpy()
    probability = np.exp(logits - logits.max(-1, keepdims=True))
    probability /= probability.sum(-1, keepdims=True)

    results = fulldepth.measure(checkpoint, data, measures=["lens_loss", "lens_accuracy", "saturation"])
    table = results.table
    for layer in (1, 2, 3):
        rows = table[(table.layer == layer) & (table.statistic == "mean")].set_index("measure").value
        nll = -np.log(probability[layer - 1, np.arange(len(target)), target]).mean()
        assert rows["lens_loss"] == pytest.approx(nll, rel=1e-4)
        assert rows["lens_accuracy"] == pytest.approx((logits[layer - 1].argmax(-1) == target).mean())
    assert results.meta["model"]["exit_heads"] == 2

    threshold = 0.6
    sweeps = sweep(checkpoint, data, threshold=[threshold], repeats=1)
    sure = probability.max(-1) >= threshold  # [L, N]
    sure[-1] = True
    left = sure.argmax(0)
    row = next(row for row in sweeps.meta["exits"] if row["threshold"] == threshold)
    accuracy = (logits.argmax(-1)[left, np.arange(len(target))] == target).mean()
    assert row["accuracy"] == pytest.approx(accuracy)
    assert row["exits"][-3:] == [int((left == layer).sum()) for layer in range(3)]


def test_the_first_layers_end_in_their_own_head(run: Path, tmp_path: Path, without_fresh_process: None) -> None:
    checkpoint = run / "checkpoint-6"
    pixels = torch.stack([row["pixel_values"] for row in images(4)])
    expected = layer_logits(checkpoint, pixels)
    opened = open_model(checkpoint, exit_heads=True).model
    export_layers(checkpoint, tmp_path / "2", layers=2)
    stock, report = tf.ViTForImageClassification.from_pretrained(tmp_path / "2", output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        for layers, model in {1: truncated(opened, 1), 2: stock, 3: truncated(opened, 3)}.items():
            np.testing.assert_allclose(model(pixels).logits, expected[layers - 1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(layer_logits(tmp_path / "2", pixels)[0], expected[0], rtol=1e-4, atol=1e-4)


def test_malformed_files_are_refused(run: Path, tmp_path: Path) -> None:
    heads = load_file(run / "checkpoint-6" / EXIT_HEADS)
    model = tiny_models.build("vit")
    one, two = (f"exit_heads.{layer}.weight" for layer in (1, 2))
    path = tmp_path / EXIT_HEADS
    cases: dict[str, dict[str, Tensor]] = {
        r"\[1\]": {one: heads[one]},
        r"\[1, 2, 3\]": {**heads, "exit_heads.3.weight": heads[one].clone()},
        r"\[4, 32\]": {**heads, two: torch.ones(4, 32)},
        "exit_heads.2.weight": {**heads, two: heads[two] * torch.nan},
        "exit_heads.1.weight": {**heads, one: heads[one].long()},
    }
    for message, tensors in cases.items():
        save_file(tensors, path)
        with pytest.raises(FulldepthError, match=message):
            load_exit_heads(model, tmp_path)
    for content in (b"", b"\xff" * 40, (run / "checkpoint-6" / EXIT_HEADS).read_bytes()[:-9]):
        path.write_bytes(content)
        with pytest.raises(FulldepthError, match="Cannot read"):
            load_exit_heads(model, path)
    assert not exit_heads_of(model)
