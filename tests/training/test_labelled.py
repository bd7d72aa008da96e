"""Classifiers: losses and accuracies are those of stock transformers, and a resumed run ends with the same weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CLIPConfig,
    CLIPForImageClassification,
)

import gguf_files
from fulldepth.data import ShuffledSampler, train_wordpiece
from fulldepth.hf import EXIT_HEADS
from fulldepth.settings import layer
from fulldepth.training import TrainSettings, train
from fulldepth.training.model import build_config, build_model, with_new_head
from fulldepth.training.trainer import multistep
from json_files import change_json
from refusals import refused
from tiny_models import DECODER, same_weights
from training.conftest import ENCODER, GPT2, SHORT, interrupted, jsonl, sentences

VIT = {
    "task": "image-classification",
    "model": {"type": "vit", **ENCODER, "hidden_dropout_prob": 0.1, "image_size": 8, "patch_size": 4},
    "data": {"name": "digits:builtin/train", "validation": "digits:builtin/test"},
    "steps": 6,
    "global_batch_size": 8,
    "micro_batch_size": 4,
    "learning_rate": 3e-3,
    "eval_every": 3,
    "save_every": 3,
}
BERT = {"type": "bert", **ENCODER}
HIDDEN = {"output_hidden_states": True}


def asked(recipe, **changes):
    return layer(TrainSettings, recipe, changes)


@pytest.fixture
def texts(tmp_path):
    return sentences(tmp_path / "texts.jsonl", 60)


def text_recipe(path, model, tokenizer, **changes):
    recipe = {"task": "text-classification", "model": model, "tokenizer": tokenizer, "data": {"name": str(path)}}
    return recipe | {"sequence_length": 32, "global_batch_size": 8, "steps": 1, "learning_rate": 1e-12} | changes


def value(results, measure, step):
    return results.table.query("measure == @measure and step == @step and site == 'model'").value.item()


def digits_of_the_test_part():
    data = load_digits()
    chosen = np.concatenate([np.flatnonzero(data.target == digit)[4::5] for digit in range(10)])
    return data.images[chosen], data.target[chosen]


def test_accuracy_and_loss_are_those_of_the_stock_model(tmp_path):
    results = train(asked(VIT, method="aligned"), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint-6"
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    assert model.config.id2label == {digit: str(digit) for digit in range(10)}
    images, labels = digits_of_the_test_part()
    assert len(labels) == 355
    rgb = [np.repeat(np.rint(image * 255 / 16).astype(np.uint8)[..., None], 3, -1) for image in images]
    with torch.no_grad():
        states = model(**processor(images=rgb, return_tensors="pt"), **HIDDEN)
    predicted = states.logits.argmax(-1).numpy()
    assert value(results, "validation_accuracy", 6) == pytest.approx(accuracy_score(labels, predicted), abs=1e-12)
    loss = F.cross_entropy(states.logits, torch.tensor(labels)).item()
    assert value(results, "validation_loss", 6) == pytest.approx(loss, rel=1e-5)
    layers = results.table.query("measure == 'lens_accuracy' and step == 6").sort_values("layer")
    for row, state in zip(layers.itertuples(), states.hidden_states, strict=True):
        with torch.no_grad():
            own = model.classifier(model.vit.layernorm(state)[:, 0]).argmax(-1).numpy()
        assert row.value == pytest.approx(accuracy_score(labels, own), abs=1e-12), row.layer
    figures = results.figures().keys()
    assert {"lens_accuracy", "lens_accuracy:f1", "steps_lens_accuracy", "steps_lens_accuracy:f1"} <= figures


def test_an_image_classifier_with_the_configuration_of_two_towers_is_trained_as_the_stock_model(tmp_path):
    torch.manual_seed(0)
    vision = {**ENCODER, "image_size": 8, "patch_size": 4}
    config = CLIPConfig(vision_config=vision, num_labels=10)
    CLIPForImageClassification(config).save_pretrained(tmp_path / "start")
    recipe = {**VIT, "model": {"checkpoint": str(tmp_path / "start")}, "method": "aligned", "steps": 2}
    results = train(asked(recipe), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint-2"
    model = CLIPForImageClassification.from_pretrained(folder).eval()
    images, labels = digits_of_the_test_part()
    rgb = [np.repeat(np.rint(image * 255 / 16).astype(np.uint8)[..., None], 3, -1) for image in images]
    with torch.no_grad():
        outputs = model(**AutoImageProcessor.from_pretrained(folder)(images=rgb, return_tensors="pt"), **HIDDEN)
        own = [model.classifier(state[:, 1:].mean(1)).argmax(-1).numpy() for state in outputs.hidden_states]
    loss = F.cross_entropy(outputs.logits, torch.tensor(labels)).item()
    assert value(results, "validation_loss", 2) == pytest.approx(loss, rel=1e-5)
    layers = results.table.query("measure == 'lens_accuracy' and step == 2").sort_values("layer")
    assert layers.value.tolist() == pytest.approx([accuracy_score(labels, predicted) for predicted in own])


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    changes = {"augmentation": {"crop": 1, "flip": True, "rotation": 15}}
    train(asked(VIT, **changes), tmp_path / "run")
    train(asked(VIT, workers=1, **changes), interrupted(tmp_path / "run", 6, tmp_path / "cut"), resume=True)
    whole, resumed = (load_file(tmp_path / name / "checkpoint-6" / "model.safetensors") for name in ("run", "cut"))
    assert same_weights(whole, resumed)


@pytest.mark.parametrize(("model", "tokenizer"), [(BERT, "wordpiece:300"), (GPT2, "bpe:300")], ids=["bert", "gpt2"])
def test_loss_of_a_step_is_the_stock_models(texts, tmp_path, model, tokenizer):
    recipe = text_recipe(texts, model, tokenizer, micro_batch_size=4, weight_decay=0.0)
    recipe["data"]["validation"] = str(texts)
    results = train(asked(recipe), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint-1"
    stock = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    reader = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in texts.read_text().splitlines()]
    assert stock.config.label2id == {"bad": 0, "good": 1}

    def loss(chosen):
        batch = reader([row["sentence"] for row in chosen], padding=True, return_tensors="pt")
        labels = torch.tensor([stock.config.label2id[row["label"]] for row in chosen])
        with torch.no_grad():
            return stock(**batch, labels=labels).loss.item()

    first = [rows[i] for i in ShuffledSampler(len(rows), seed=0, length=8)]
    assert value(results, "train_loss", 1) == pytest.approx(loss(first), rel=1e-5)
    assert value(results, "validation_loss", 1) == pytest.approx(loss(rows), rel=1e-5)


def test_a_new_head_is_put_on_a_checkpoints_body(texts, tmp_path):
    tokenizer = train_wordpiece(["a fine film", "a dull film"] * 3, 300)
    body = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **ENCODER))
    body.save_pretrained(tmp_path / "body")
    tokenizer.save_pretrained(tmp_path / "body")
    recipe = text_recipe(texts, {"checkpoint": str(tmp_path / "body")}, "", weight_decay=0.0) | {"tokenizer": None}
    train(asked(recipe, method="aligned"), tmp_path / "run")
    trained = load_file(tmp_path / "run" / "checkpoint-1" / "model.safetensors")
    for name, weight in body.state_dict().items():
        assert torch.allclose(trained[f"bert.{name}"], weight, atol=1e-6), name
    assert trained["classifier.weight"].shape == (2, 16)

    state = load_file(tmp_path / "body" / "model.safetensors")
    del state["encoder.layer.1.output.dense.weight"]
    body.save_pretrained(tmp_path / "body", state_dict=state)
    with refused(r"lacks 1 weights.*encoder\.layer\.1\.output"):
        train(asked(recipe), tmp_path / "other")


def test_a_head_is_kept_only_if_it_names_the_same_classes(tmp_path):
    def classifier(*names):
        return BertForSequenceClassification(BertConfig(**ENCODER, vocab_size=50, id2label=dict(enumerate(names))))

    stored = classifier("bad", "good")
    stored.save_pretrained(tmp_path / "stored")
    for names, kept in ((("Bad", "Good"), True), (("LABEL_0", "LABEL_1"), True), (("good", "bad"), False)):
        model = classifier(*names)
        given = with_new_head(model, str(tmp_path / "stored"), torch.float32)
        expected = stored if kept else model
        assert torch.equal(given["classifier.weight"], expected.classifier.weight), names
        assert torch.equal(given["bert.pooler.dense.weight"], stored.bert.pooler.dense.weight)


GOOD = [{"text": f"film {number}", "label": number % 2} for number in range(12)]


LONG = {"text": "so " * 40, "label": 1}
BAD = {
    "outside": ([*GOOD, {"text": "odd", "label": 7}], "a.jsonl line 13"),
    "unlabelled": ([*GOOD, {"text": "odd", "label": None}], "a.jsonl line 13"),
    "blank": ([*GOOD, {"text": " ", "label": 1}], "a.jsonl line 13"),
    "long": ([*GOOD, LONG], "a.jsonl line 13"),
    "one class": ([{**row, "label": 3} for row in GOOD], "a.jsonl"),
    "no labels": ([{"text": row["text"]} for row in GOOD], "a.jsonl"),
    "missing": (
        GOOD,
        r"a.jsonl has no row for 1 of the 3 classes .LABEL_2.. Add rows of every class, or set data.skip_b",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_texts_are_refused_with_their_line(case, tmp_path):
    rows, named = BAD[case]
    declared = {"outside": 2, "missing": 3}.get(case)
    model = BERT if declared is None else BERT | {"num_labels": declared}
    recipe = text_recipe(tmp_path, model, "wordpiece:300", data={"name": str(jsonl(tmp_path / "a.jsonl", *rows))})
    with refused(named):
        train(asked(recipe), tmp_path / "run")


def test_a_classifier_of_two_stacks_is_refused_before_it_runs(texts, tmp_path):
    recipe = text_recipe(texts, {"type": "t5", "d_model": 16, "num_layers": 2, "num_heads": 2}, "wordpiece:300")
    with refused("T5ForSequenceClassification is an encoder-decoder that classifies"):
        train(asked(recipe), tmp_path / "run")


def test_bad_rows_are_skipped_and_counted_if_asked(tmp_path):
    bad = [{"text": "odd", "label": 7}, LONG, {"text": "", "label": 1}]
    name, validation = (str(jsonl(tmp_path / f"{n}.jsonl", *GOOD, *more)) for n, more in (("a", bad), ("b", [])))
    data = {"name": name, "validation": validation, "skip_bad": True}
    recipe = text_recipe(tmp_path, BERT | {"num_labels": 2}, "wordpiece:300", data=data)
    warnings = " ".join(train(asked(recipe), tmp_path / "run").meta["warnings"])
    assert "2 bad rows are left out of a.jsonl" in warnings
    assert "1 text is too long and left out of a.jsonl: a.jsonl line 14 has 42 tokens" in warnings


def test_a_multistep_schedule_divides_by_ten_at_each_milestone():
    settings = asked(VIT, schedule="multistep", steps=200, warmup_steps=4, milestones=[0.5, 0.75])
    factors = [multistep(settings, step) for step in (0, 2, 4, 99, 100, 149, 150, 199)]
    assert factors == pytest.approx([0, 0.5, 1, 1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.slow
def test_fine_tuning_starts_from_the_exit_heads_of_a_checkpoint_of_the_same_classes(tmp_path):
    still = {**SHORT, "learning_rate": 1e-12, "weight_decay": 0.0, "seed": 3}
    train(asked(VIT, method="multi-exit"), tmp_path / "first")
    start = tmp_path / "first" / "checkpoint-6"
    recipe = VIT | still | {"model": {"checkpoint": str(start)}}
    again = train(asked(recipe, method="multi-exit"), tmp_path / "again")
    stored, taken = (load_file(folder / EXIT_HEADS) for folder in (start, tmp_path / "again" / "checkpoint-2"))
    assert all(torch.allclose(taken[name], weight, atol=1e-7) for name, weight in stored.items())
    assert f"The heads of layers 1 to L-1 are those of {start}." in again.meta["warnings"]
    change_json(start / "config.json", id2label={number: f"other {number}" for number in range(10)})
    other = train(asked(recipe, method="multi-exit"), tmp_path / "other")
    assert any("are for other classes" in line for line in other.meta["warnings"])
    fresh = load_file(tmp_path / "other" / "checkpoint-2" / EXIT_HEADS)
    assert not any(torch.allclose(fresh[name], weight, atol=1e-3) for name, weight in stored.items())


def test_a_new_head_is_put_on_the_body_in_a_gguf_file(tmp_path):
    options = DECODER | {"vocab_size": 300, "intermediate_size": 64}
    written = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **options))
    gguf_files.write(tmp_path / "model.gguf", written)
    config = AutoConfig.for_model("llama", **options, num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config)
    given = with_new_head(model, str(tmp_path / "model.gguf"), torch.float32)
    drawn = {"score.weight": model.score.weight}
    assert given.keys() == model.state_dict().keys()
    assert all(torch.equal(weight, (written.state_dict() | drawn)[name]) for name, weight in given.items())


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2"])
def test_the_loss_of_a_classifier_is_float32_in_bfloat16(name):
    """Near 2 nats bfloat16 has steps of 1/64. Oracle: the float64 cross-entropy of the model's own logits."""
    images = name == "vit"
    recipe = VIT if images else {"task": "text-classification", "model": BERT if name == "bert" else GPT2}
    settings = asked(recipe, precision="bfloat16")
    labels = torch.arange(32) % 7
    classes = [f"class {number}" for number in range(7)]
    further = {} if images else {"vocab_size": 40, "special_tokens": {"pad_token_id": 0}}
    model = build_model(build_config(settings.model, task=settings.task, classes=classes, **further), settings)
    inputs = (
        {"pixel_values": torch.rand(32, 3, 8, 8)}
        if images
        else {"input_ids": torch.arange(32 * 5).view(32, 5) % 39 + 1}
    )
    inputs = {key: value.bfloat16() if images else value for key, value in inputs.items()}
    output = model(**inputs, labels=labels)
    assert output.logits.dtype == torch.bfloat16
    expected = F.cross_entropy(output.logits.double(), labels)
    torch.testing.assert_close(output.loss, expected.float(), rtol=1e-6, atol=0)
    output.loss.backward()
    assert all(p.grad is None or p.grad.dtype == torch.bfloat16 for p in model.parameters())
