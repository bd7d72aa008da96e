"""A multi-exit DETR whose layers disagree, and images whose objects are what single layers of it see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoImageProcessor, DetrImageProcessorPil

import tiny_models
from drawn_shapes import CLASSES, write_shapes
from exit.plain_detector import HEADS_FILE, answers, layer_norm, states_of

LAYERS, WIDTH, IMAGES = tiny_models.LAYERS, tiny_models.WIDTH, 12


def detector(name: str = "detr", seed: int = 3) -> Any:
    """A tiny DETR in which queries look at different places, so that their answers differ."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_models.build(name)
    model.config.id2label = dict(enumerate(CLASSES))
    model.config.label2id = {kind: index for index, kind in enumerate(CLASSES)}
    with torch.no_grad():
        for place, weight in model.named_parameters():
            if weight.ndim == 2:
                sharp = 5 if "q_proj" in place or "k_proj" in place else 2
                weight.normal_(std=sharp / weight.shape[1] ** 0.5, generator=generator)
            elif place.startswith(("model.encoder.", "model.decoder.layers.")):
                weight.copy_(0.3 * weight if place.endswith("bias") else torch.ones_like(weight))
        model.model.query_position_embeddings.weight.normal_(std=2, generator=generator)
        model.model.input_projection.weight.normal_(generator=generator)
        model.bbox_predictor.layers[-1].bias.zero_()
    return model


@torch.no_grad()
def heads_for(model: Any, inputs: dict[str, Tensor], seed: int = 4) -> dict[str, Tensor]:
    """Heads of layers 1..L-1; these and the model's own see all classes, and boxes around the middle."""
    generator, heads = torch.Generator().manual_seed(seed), {}
    for layer, state in enumerate(states_of(model, inputs), start=1):
        normed = layer_norm(state, model.model.decoder.layernorm).flatten(0, 1)
        inner = normed
        for part in model.bbox_predictor.layers[:-1]:
            inner = part(inner).relu()
        for kind, rows, scale in (("exit_heads", normed, 1.0), ("exit_box_heads", inner, 0.5)):
            weight, mean = scale * torch.randn(4, WIDTH, generator=generator), rows.mean(0)
            if layer < LAYERS:  # without a bias, the mean state has to give zeros
                heads[f"{kind}.{layer}.weight"] = weight - torch.outer(weight @ mean, mean) / mean.square().sum()
                continue
            own = model.class_labels_classifier if kind == "exit_heads" else model.bbox_predictor.layers[-1]
            own.weight.copy_(weight)
            own.bias.copy_(-weight @ mean)
    return heads


def pixels(folder: Path, images: list[Any]) -> dict[str, Tensor]:
    """The inputs of a model for some images, by the processor of its folder."""
    return dict(AutoImageProcessor.from_pretrained(folder)(images=images, return_tensors="pt"))


def pictures(data: Path) -> list[Any]:
    """The images of a set in COCO's format, in its order."""
    names = [image["file_name"] for image in json.loads(data.read_text())["images"]]
    return [Image.open(data.parent / "images" / name) for name in names]


def world(folder: Path, name: str = "detr") -> tuple[Path, Path]:
    """A checkpoint with heads, and a set of images with two or three objects each: what layer `1 + i % L` sees."""
    checkpoint, model = folder / "model", detector(name)
    DetrImageProcessorPil(size={"shortest_edge": 40, "longest_edge": 60}).save_pretrained(checkpoint)
    data = write_shapes(folder / "data", f"32x{IMAGES}/train")
    inputs = pixels(checkpoint, pictures(data))
    heads = heads_for(model, inputs)
    model.save_pretrained(checkpoint)
    save_file(heads, checkpoint / HEADS_FILE)
    logits, boxes = answers(checkpoint, inputs)
    content, annotations = json.loads(data.read_text()), []
    for index, image in enumerate(content["images"]):
        seen = logits[index % LAYERS, index, :, :-1].max(-1)
        for query in seen.values.argsort(descending=True)[: 2 + index % 2].tolist():
            x, y, width, height = (32 * boxes[index % LAYERS, index, query]).tolist()
            left, top = max(x - width / 2, 0) + 0.3, max(y - height / 2, 0) + 0.3
            box = [left, top, max(min(x + width / 2, 32) - left, 1), max(min(y + height / 2, 32) - top, 1)]
            place = {"id": len(annotations) + 1, "image_id": image["id"], "bbox": box, "area": box[2] * box[3]}
            annotations.append({**place, "category_id": 1 + int(seen.indices[query]), "iscrowd": 0})
    data.write_text(json.dumps({**content, "annotations": annotations}))
    return checkpoint, data


def objects(data: Path) -> list[dict[str, Tensor]]:
    """The classes and relative boxes of each image, by the text of the format."""
    content = json.loads(data.read_text())
    found = []
    for image in content["images"]:
        own = [each for each in content["annotations"] if each["image_id"] == image["id"]]
        corner = torch.tensor([each["bbox"] for each in own], dtype=torch.float64)
        size = torch.tensor([image["width"], image["height"]] * 2, dtype=torch.float64)
        centred = torch.cat([corner[:, :2] + corner[:, 2:] / 2, corner[:, 2:]], dim=1) / size
        labels = torch.tensor([each["category_id"] - 1 for each in own])
        found.append({"class_labels": labels, "boxes": centred})
    return found
