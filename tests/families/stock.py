"""What stock transformers says of tiny classifiers: each sample alone, without padding; nothing here reads our code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers as tf
from PIL import Image
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from data.conftest import splitting
from families import zoo

CLASSES = ("a", "b", "c")
PER_CLASS = 2
LENGTHS = (5, 12, 7, 12, 3, 9)
"""Words of the texts: batches of them are padded."""
SIZES = {"levit": 224, "convnext": 64, "convnextv2": 64, "efficientnet": 64}
"""Model type -> edge of its images where the configuration does not say it."""


@dataclass(frozen=True)
class Stock:
    """A saved checkpoint with data, and what the stock class answers to each sample alone."""

    folder: Path
    data: Any
    model: tf.PreTrainedModel
    inputs: list[dict[str, Tensor]]
    """Of each sample, a batch of one."""
    labels: Tensor
    logits: Tensor
    """[N, C]."""

    @property
    def accuracy(self):
        """Share of right classes."""
        return float((self.logits.argmax(-1) == self.labels).double().mean())

    @property
    def loss(self):
        """Mean cross-entropy in nats."""
        return float(F.cross_entropy(self.logits, self.labels))

    def batch(self, count=4):
        """The first samples as one batch with labels, padded on the right as the model's own tokenizer does."""
        if "input_ids" in self.inputs[0]:
            tokenizer = tf.AutoTokenizer.from_pretrained(self.folder)
            rows = [{"input_ids": inputs["input_ids"][0].tolist()} for inputs in self.inputs[:count]]
            batch = dict(tokenizer.pad(rows, return_tensors="pt"))
        else:
            batch = {"pixel_values": torch.cat([inputs["pixel_values"] for inputs in self.inputs[:count]])}
        return {**batch, "labels": self.labels[:count]}


def word_tokenizer(pad="[PAD]"):
    """`w7` -> 12; `[CLS] ... [SEP]` around a text."""
    marks = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    words = {name: index for index, name in enumerate([*marks, *(f"w{i}" for i in range(zoo.VOCAB - len(marks)))])}
    frame = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    return splitting(words, frame, cls_token="[CLS]", sep_token="[SEP]", pad_token=pad)


@torch.no_grad()
def stock(task, model_type, folder, pad="[PAD]", **fields):
    """A tiny random classifier of a type, saved with its tokenizer or processor, and its answers.

    Args:
        task: `text-classification` or `image-classification`.
        model_type: of transformers.
        folder: to write to.
        pad: padding token of the tokenizer.
        **fields: of the configuration.
    """
    model = zoo.build(model_type, task, **{"num_labels": len(CLASSES), **fields})
    if model.config.num_labels > 1:
        model.config.problem_type = fields.get("problem_type", "single_label_classification")
    model.save_pretrained(folder / "model")
    texts = task == "text-classification"
    data, inputs = _texts(folder, pad) if texts else _images(folder, SIZES.get(model_type) or _edge(model.config))
    logits = torch.cat([model(**each).logits for each in inputs])
    return Stock(folder / "model", data, model, inputs, torch.arange(len(inputs)) // PER_CLASS, logits)


def _texts(folder, pad):
    tokenizer, generator = word_tokenizer(pad), np.random.default_rng(0)
    tokenizer.save_pretrained(folder / "model")
    texts = [" ".join(f"w{i}" for i in generator.integers(0, 90, length)) for length in LENGTHS]
    rows = [{"text": text, "label": index // PER_CLASS} for index, text in enumerate(texts)]
    ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
    return rows, [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in ids]


def _images(folder, edge):
    processor = tf.ViTImageProcessorPil(size={"height": edge, "width": edge}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processor.save_pretrained(folder / "model")
    inputs = []
    for index in range(len(LENGTHS)):
        pixels = np.random.default_rng(index).integers(0, 255, (edge, edge, 3), dtype=np.uint8)
        where = folder / "images" / CLASSES[index // PER_CLASS]
        where.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(where / f"{index}.png")
        values = torch.tensor(pixels).permute(2, 0, 1)[None] / 127.5 - 1
        inputs.append({"pixel_values": values.float()})
    return folder / "images", inputs


def _edge(config):
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or zoo.SMALL["image_size"]
    return int(size if isinstance(size, int) else size[0])
