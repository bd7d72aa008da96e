"""What a measurement says beside its numbers: policies that fit the model, BOS tokens, gaps, and when it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from tokenizers.processors import TemplateProcessing

import tiny_models
from fulldepth.data import train_tokenizer
from fulldepth.measurement import measure
from fulldepth.measurement.caveats import gaps, spans
from fulldepth.results import tabulate

FEW = {"max_sequences": 6, "sequence_length": 12}


@pytest.fixture(scope="module")
def with_bos(corpus):
    """A tokenizer that puts <s> before every text."""
    made = train_tokenizer([corpus], vocab_size=320)
    made.add_special_tokens({"bos_token": "<s>"})
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
    )
    return made


@pytest.fixture
def llama(tokenizer):
    model = tiny_models.build("llama")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model


def of(lines, words):
    return [line for line in lines if words in line]


@pytest.mark.parametrize(
    ("texts", "bos", "count"), [("windows", "auto", 12), ("windows", "never", 0), ("rows", "auto", 12)]
)
def test_how_many_sequences_begin_with_bos(with_bos, corpus, texts, bos, count):
    """Every window does where the tokenizer puts it before a text, unless it is asked not to."""
    model = tiny_models.build("llama")
    model.resize_token_embeddings(len(with_bos), mean_resizing=False)
    data = [corpus[:800]] if texts == "windows" else [{"text": corpus[n : n + 40], "label": n % 2} for n in range(12)]
    length = 48 if texts == "rows" else 16
    found = measure(model, data, tokenizer=with_bos, max_sequences=12, sequence_length=length, bos=bos)
    policy = found.meta["token_policy"]
    assert found.meta["data"]["sequences"] == 12
    assert policy["begin_with_bos"] == count
    said = "Every sequence begins" if count else "No sequence begins"
    assert policy["sentence"].endswith(f"{said} with the BOS token (<s>).")
    assert not of(found.meta["warnings"], "BOS token")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for name in ("LABEL_0", "LABEL_1"):
        (root / name).mkdir()
        for number in range(3):
            Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    """A vision tower without a class token: 16 patches, 16 positions."""
    folder = tmp_path_factory.mktemp("siglip")
    settings = {name: value for name, value in tiny_models.VISION.items() if name != "num_labels"}
    torch.manual_seed(0)
    tf.SiglipVisionModel(tf.SiglipVisionConfig(**settings)).save_pretrained(folder)
    tf.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def test_a_model_without_a_class_token_counts_its_patches(siglip, pictures):
    found = measure(siglip, pictures)
    assert found.meta["token_policy"]["name"] == "all"
    assert "CLS" not in found.meta["token_policy"]["sentence"]
    rows = found.table[(found.table.measure == "displacement") & (found.table.statistic == "mean")]
    assert set(rows["count"]) == {6 * 16}
    asked = measure(siglip, pictures, token_policy="cls", measures=["displacement"])
    assert asked.meta["token_policy"]["sentence"] == (
        "Only the first patch of each image counts; the model has no [CLS] token."
    )


def test_a_model_with_a_class_token_counts_it(checkpoint, pictures, ragged_tsv, tokenizer):
    for family in ("vit", "deit"):
        found = measure(checkpoint(family), pictures, measures=["displacement"]).meta["token_policy"]
        assert (found["name"], found["sentence"]) == ("cls", "Only the first token ([CLS]) of each image counts.")
    bert = measure(checkpoint("bert-classifier"), ragged_tsv, sequence_length=32, measures=["displacement"])
    assert bert.meta["token_policy"]["sentence"] == "Only the first token ([CLS]) of each sequence counts."
    plain = measure(checkpoint("llama"), ragged_tsv, token_policy="cls", measures=["displacement"], sequence_length=32)
    assert plain.meta["token_policy"]["sentence"] == "Only the first token of each sequence counts."


def test_weights_that_are_all_zero_are_named_with_what_they_undo(llama, text_file, tokenizer):
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.zero_()
    found = measure(llama, str(text_file), tokenizer=tokenizer, **FEW)
    lines = found.meta["warnings"]
    assert of(lines, "23 of 23 weight matrices hold only zeros (first: model.embed_tokens.weight)")
    assert of(lines, "displacement is not a number at layers 1-3: every state there")
    assert of(lines, "cosine is not a number at layers 0-3")
    left_out = {entry["measure"]: entry["reason"] for entry in found.meta["left_out"]}
    assert left_out["coherence"] == "the states do not vary along the sequence at any layer"
    assert "mean_coherence" not in found.headline, "what is 1 by construction copies nothing"
    assert "last_layer_displacement" not in found.headline


def test_nothing_finite_is_refused_before_anything_is_written(refused, checkpoint, text_file, tmp_path):
    folder = tmp_path / "zero"
    model = tf.LlamaForCausalLM.from_pretrained(checkpoint("llama"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(folder)
    tf.AutoTokenizer.from_pretrained(checkpoint("llama")).save_pretrained(folder)
    out = tmp_path / "out"
    refused(
        *("measure", folder, "--data", text_file, "--output", out, "--measures", "displacement,jump_rate"),
        says=["is a finite number", "only zeros", "displacement is not a number at layers 1-3"],
    )
    assert not list(out.glob("*"))


def test_gaps_are_named_by_layer_and_statistic():
    nan = float("nan")
    rows = [("nc1", "residual", n, None, "value", nan if n in (0, 1, 3) else 1.0, 4, "1") for n in range(5)]
    rows += [
        ("cka", "residual", a, b, "debiased", nan if 2 in (a, b) else 1.0, 4, "1") for a in range(4) for b in range(4)
    ]
    rows += [
        ("separability", "value", n, None, s, nan if s == "std" else 0.5, 4, "1")
        for n in (1, 2)
        for s in ("mean", "std")
    ]
    rows += [("norm_ratio", "residual", 1, None, "mean", float("inf"), 4, "1")]
    rows += [("displacement", "residual", n, None, "mean", 0.1, 4, "1") for n in (1, 2)]
    rows += [("coherence", "residual", n, None, "mean", 0.1, 4, "1") for n in (1, 3, 4)]
    assert gaps(tabulate(rows), 4) == [
        "nc1 is not a number at layers 0-1, 3: the means of the classes coincide there.",
        "cka is not a number at layer 2: the states there are equal for all tokens, or too few to estimate their "
        "similarity.",
        "separability (std) is not a number at layers 1-2: nothing finite came out there.",
        "norm_ratio is not a number at layer 1: the layer adds exactly nothing to any state, or the states are zero.",
        "coherence has no number at layer 2: the states there do not vary along the sequence.",
    ]  # fmt: skip
    assert spans([0, 1, 2, 5, 7, 8]) == "layers 0-2, 5, 7-8"
