"""Both towers of a CLIP and their similarity across modalities, against numpy on transformers' own hidden states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from PIL import Image
from sklearn.datasets import load_digits

import fulldepth
from data.conftest import jsonl
from fulldepth.data import open_source, train_tokenizer
from fulldepth.hf import load_processor
from refusals import refused

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
CAPTIONS = [f"a drawing of the digit {name}<|endoftext|>" for name in NAMES]
DIGITS = load_digits()
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
VISION = {**SHAPE, "num_hidden_layers": 3, "image_size": 16, "patch_size": 4}
TEXT = {**SHAPE, "num_hidden_layers": 2, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": 0}


def drawing(pixels):
    return Image.fromarray((255 * pixels / 16).astype(np.uint8)).resize((16, 16)).convert("RGB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Drawings of digits, and `pairs.jsonl` with their captions."""
    path = tmp_path_factory.mktemp("drawings")
    rows = []
    for index in range(1200, 1240):
        drawing(DIGITS.images[index]).save(path / f"{index}.png")
        rows.append({"image": str(path / f"{index}.png"), "text": CAPTIONS[DIGITS.target[index]]})
    jsonl(path / "pairs.jsonl", *rows)
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A CLIP trained for seconds on other drawings, so that matched pairs are nearer than mismatched ones."""
    tokenizer = train_tokenizer([" ".join(CAPTIONS)] * 4, vocab_size=280)
    own = {"initializer_factor": 4.0, "projection_dim": 16}
    text = {**TEXT, **own, "vocab_size": len(tokenizer), "pad_token_id": None}
    torch.manual_seed(0)
    model = tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config={**VISION, **own}, **own))
    processor = tf.ViTImageProcessorPil(size={"height": 16, "width": 16}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    images = [drawing(pixels) for pixels in DIGITS.images[:600]]
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    tokens = tokenizer(CAPTIONS, padding=True, return_tensors="pt")
    targets = torch.tensor(DIGITS.target[:600])
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        rows = torch.randint(600, (64,))
        scores = model(pixel_values=pixels[rows], **tokens).logits_per_image
        optimiser.zero_grad()
        F.cross_entropy(scores, targets[rows]).backward()
        optimiser.step()
    place = tmp_path_factory.mktemp("clip") / "clip"
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@torch.no_grad()
def projected(clip, source):
    """[L+1, N, P] features of every layer of both towers, of length 1, and CLIP's own scores."""
    model = tf.CLIPModel.from_pretrained(clip).eval()
    processor = load_processor(str(clip), model.config.vision_config)
    texts = [record.caption for record in source.records]
    tokens = dict(tf.AutoTokenizer.from_pretrained(clip)(texts, padding=True, return_tensors="pt"))
    pixels = processor(images=[record.image() for record in source.records], return_tensors="pt")["pixel_values"]
    seen = model.vision_model(pixel_values=pixels, output_hidden_states=True).hidden_states
    read = model.text_model(**tokens, output_hidden_states=True).hidden_states
    ends = tokens["attention_mask"].sum(1) - 1
    last = torch.stack([h[torch.arange(len(ends)), ends] for h in read])
    features = (
        model.visual_projection(model.vision_model.post_layernorm(torch.stack([h[:, 0] for h in seen]))),
        model.text_projection(model.text_model.final_layer_norm(last)),
    )
    units = [F.normalize(x.double(), dim=-1).numpy() for x in features]
    return *units, model(pixel_values=pixels, **tokens).logits_per_image.numpy()


def test_across_modalities(clip, folder, tmp_path):
    results = fulldepth.measure(
        str(clip), folder / "pairs.jsonl", output=tmp_path / "out", batch_size=16, progress=False
    )
    source = open_source(folder / "pairs.jsonl")
    images, texts, scores = projected(clip, source)
    names = np.array([record.caption for record in source.records])
    equal = names[:, None] == names[None]
    table = results.table.query("site == 'cross'").set_index(["measure", "statistic", "layer", "other"]).value
    expected = {}
    for i, image in enumerate(images):
        for j, text in enumerate(texts):
            similarity = image @ text.T
            expected["cosine", "matched", i, j] = similarity.diagonal().mean()
            expected["cosine", "mismatched", i, j] = similarity[~equal].mean()
            for statistic, rows in (("image_to_text", similarity), ("text_to_image", similarity.T)):
                best = rows > rows.max(1, keepdims=True) - 1e-6
                expected["retrieval", statistic, i, j] = ((best & equal).sum(1) / best.sum(1)).mean()
    assert table.to_dict() == pytest.approx(expected, abs=1e-6)
    own = equal[np.arange(len(names)), scores.argmax(1)].mean()
    assert table["retrieval", "image_to_text", 3, 2] == pytest.approx(own)
    assert own > 0.5
    of_images = f"{100 * own:.1f}".removesuffix(".0")
    sentence = results.headline["cross:matched_cosine"]["sentence"]
    assert f"the nearest text is the right one for {of_images} % of {len(names)} images" in sentence
    assert table["cosine", "matched", 3, 2] > table["cosine", "mismatched", 3, 2] + 0.2
    assert "cross:matched_cosine" in results.headline
    assert [(stack["name"], stack["num_layers"]) for stack in results.meta["stacks"]] == [("image", 3), ("text", 2)]
    assert {site.split(":")[0] for site in results.table.site} == {"image", "text", "cross"}
    assert "displacement:Image" in results.figures()


def test_captions_are_one_to_one(clip, folder):
    rows = [{"image": str(file), "text": CAPTIONS[0]} for file in sorted(folder.glob("*.png"))[:3]]
    one = fulldepth.measure(str(clip), rows, progress=False)
    assert set(one.table.query("measure == 'retrieval'").value) == {1.0}, "equal texts are one text"
    for bad in ([*rows, {"image": rows[0]["image"], "text": None}], [{"image": row["image"]} for row in rows]):
        with refused("text"):
            fulldepth.measure(str(clip), bad, progress=False)


def test_towers_that_pool_in_a_way_of_their_own_are_not_compared(clip, folder, tmp_path):
    """SigLIP's image feature is an attention over the patches, so no layer has a feature in the common space."""
    tokenizer = tf.AutoTokenizer.from_pretrained(clip)
    text = {**TEXT, "vocab_size": len(tokenizer), "pad_token_id": 0}
    tf.SiglipModel(tf.SiglipConfig(text_config=text, vision_config=VISION)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = fulldepth.measure(str(tmp_path), folder / "pairs.jsonl", batch_size=16, progress=False)
    assert {site.split(":")[0] for site in found.table.site} == {"image", "text"}
    assert not any("projected" in site for site in found.table.site)
    assert any("cross" in each["measure"] and "SiglipModel" in each["reason"] for each in found.meta["left_out"])
