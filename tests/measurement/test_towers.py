"""Both towers of a CLIP and their similarity across modalities, against numpy on transformers' own hidden states."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from sklearn.datasets import load_digits

import fulldepth
from fulldepth.data import open_source, train_tokenizer
from fulldepth.errors import FulldepthError
from fulldepth.hf import load_processor

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LAYERS = {"vision": 3, "text": 2}
EDGE = 16


def caption(digit):
    return f"a drawing of the digit {NAMES[digit]}<|endoftext|>"


def drawing(pixels):
    return Image.fromarray((255 * pixels / 16).astype(np.uint8)).resize((EDGE, EDGE)).convert("RGB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Drawings of digits with captions in metadata.jsonl."""
    path = tmp_path_factory.mktemp("drawings")
    data = load_digits()
    rows = []
    for index in range(40):
        name = f"{index:03}.png"
        drawing(data.images[1200 + index]).save(path / name)
        rows.append({"file_name": name, "text": caption(data.target[1200 + index])})
    (path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A CLIP trained for seconds on other drawings, so that matched pairs are nearer than mismatched ones."""
    tokenizer = train_tokenizer([" ".join(caption(d) for d in range(10))] * 4, vocab_size=280)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "projection_dim": 16,
        "initializer_factor": 4.0,
    }
    ids = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    text = {**shape, **ids, "num_hidden_layers": LAYERS["text"], "max_position_embeddings": 32}
    vision = {**shape, "num_hidden_layers": LAYERS["vision"], "image_size": EDGE, "patch_size": 4}
    torch.manual_seed(0)
    model = tf.CLIPModel(
        tf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16, initializer_factor=4.0)
    )
    data = load_digits()
    processor = tf.ViTImageProcessorPil(size={"height": EDGE, "width": EDGE}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    images = [drawing(pixels) for pixels in data.images[:600]]
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    tokens = tokenizer([caption(d) for d in range(10)], padding=True, return_tensors="pt")
    targets = torch.tensor(data.target[:600])
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        rows = torch.randint(600, (64,))
        scores = model(
            pixel_values=pixels[rows], input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        ).logits_per_image
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(scores, targets[rows]).backward()
        optimiser.step()
    place = tmp_path_factory.mktemp("clip") / "clip"
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def expected(clip, folder):
    """Projected features of every layer of both towers, [L+1, N, P], and the hidden states that they come from."""
    model = tf.CLIPModel.from_pretrained(clip).eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(clip)
    source = open_source(folder)
    processor = load_processor(str(clip), model.config.vision_config)
    tokens = tokenizer([record.text for record in source.records], padding=True, return_tensors="pt")
    pixels = processor(images=[record.image() for record in source.records], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        seen = model.vision_model(pixel_values=pixels, output_hidden_states=True).hidden_states
        read = model.text_model(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], output_hidden_states=True
        ).hidden_states
        ends = tokens["attention_mask"].sum(1) - 1
        first = torch.stack([h[:, 0] for h in seen])
        last = torch.stack([h[torch.arange(len(ends)), ends] for h in read])
        scores = model(pixel_values=pixels, **{k: tokens[k] for k in ("input_ids", "attention_mask")}).logits_per_image
        features = {
            "image": model.visual_projection(model.vision_model.post_layernorm(first)).double().numpy(),
            "text": model.text_projection(model.text_model.final_layer_norm(last)).double().numpy(),
        }
    states = {"image": first.double().numpy(), "text": last.double().numpy()}
    return features, states, [record.text for record in source.records], scores.numpy()


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True).clip(1e-12)


@pytest.fixture(scope="module")
def results(clip, folder, tmp_path_factory):
    return fulldepth.measure(
        str(clip), folder, output=tmp_path_factory.mktemp("results") / "out", batch_size=16, progress=False
    )


def test_across_modalities(results, expected):
    features, _, texts, scores = expected
    table = results.table[results.table.site == "cross"].set_index(["measure", "statistic", "layer", "other"])
    assert len(table) == 4 * (LAYERS["vision"] + 1) * (LAYERS["text"] + 1)
    for i in range(LAYERS["vision"] + 1):
        for j in range(LAYERS["text"] + 1):
            similarity = unit(features["image"][i]) @ unit(features["text"][j]).T
            pairs = [
                (similarity[a, b], a == b, texts[a] == texts[b]) for a in range(len(texts)) for b in range(len(texts))
            ]
            matched = np.mean([value for value, own, _ in pairs if own])
            mismatched = np.mean([value for value, _, equal in pairs if not equal])
            assert table.value["cosine", "matched", i, j] == pytest.approx(matched, abs=1e-6)
            assert table.value["cosine", "mismatched", i, j] == pytest.approx(mismatched, abs=1e-6)
            for statistic, scored in (("image_to_text", similarity), ("text_to_image", similarity.T)):
                found = []
                for n, row in enumerate(scored):
                    tied = [texts[k] == texts[n] for k in range(len(texts)) if row[k] > row.max() - 1e-6]
                    found.append(np.mean(tied))
                assert table.value["retrieval", statistic, i, j] == pytest.approx(np.mean(found), abs=1e-6)
    last = table.value.xs((LAYERS["vision"], LAYERS["text"]), level=["layer", "other"])
    own = np.mean([texts[n] == texts[row.argmax()] for n, row in enumerate(scores)])
    assert last["retrieval", "image_to_text"] == pytest.approx(own)
    assert last["retrieval", "image_to_text"] > 0.5
    assert last["cosine", "matched"] > last["cosine", "mismatched"] + 0.2
    assert "cross:matched_cosine" in results.headline


def test_the_document_names_both_stacks(results):
    assert [(stack["name"], stack["num_layers"]) for stack in results.meta["stacks"]] == [("image", 3), ("text", 2)]
    assert {site.split(":")[0] for site in results.table.site} == {"image", "text", "cross"}
    figures = results.figures()
    assert "displacement:Image" in figures
    assert any(name.startswith("cross") for name in figures)


def test_captions_are_one_to_one(clip, folder, tmp_path):
    rows = [{"image": str(file), "text": caption(0)} for file in sorted(folder.glob("*.png"))[:3]]
    with pytest.raises(FulldepthError, match="has no text"):
        fulldepth.measure(str(clip), [*rows, {"image": rows[0]["image"], "text": None}], progress=False)
    one = fulldepth.measure(str(clip), rows, progress=False)
    cross = one.table[(one.table.site == "cross") & (one.table.measure == "retrieval")]
    assert set(cross.value) == {1.0}, "equal texts are one text"
    with pytest.raises(FulldepthError, match="columns image and text"):
        fulldepth.measure(str(clip), [{"image": row["image"]} for row in rows], progress=False)


def test_towers_that_pool_in_a_way_of_their_own_are_not_compared(clip, folder, tmp_path):
    """SigLIP's image feature is an attention over the patches, so no layer has a feature in the common space."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokenizer = tf.AutoTokenizer.from_pretrained(clip)
    ids = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    text = {**shape, **ids, "max_position_embeddings": 32}
    vision = {**shape, "image_size": EDGE, "patch_size": 4}
    torch.manual_seed(0)
    tf.SiglipModel(tf.SiglipConfig(text_config=text, vision_config=vision)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = fulldepth.measure(str(tmp_path), folder, batch_size=16, progress=False)
    assert {site.split(":")[0] for site in found.table.site} == {"image", "text"}
    assert not any("projected" in site for site in found.table.site)
    assert "cross:matched_cosine" not in found.headline
    assert [each["reason"] for each in found.meta["left_out"] if "cross" in each["measure"]] == [
        "how SiglipModel maps its towers into one space is not known"
    ]
