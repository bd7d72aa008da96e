"""One way from a data argument to prepared sequences, whichever verb asks."""

from __future__ import annotations

import copy

import numpy as np
import peft
import pytest
import torch
import transformers as tf
from pandas.testing import assert_frame_equal
from PIL import Image

import fulldepth
import tiny_models
from families import zoo
from fulldepth import exit
from fulldepth.hf import refuse_without_tokens
from fulldepth.hf.model_hash import model_hash
from fulldepth.settings.exit import ExitSettings
from fulldepth.settings.loading import LoadingSettings
from fulldepth.settings.measure import MeasureSettings
from fulldepth.subject import Subject
from refusals import refused
from skip.word_tokenizer import tokenizer, words

BERT = tf.BertConfig(**tiny_models.ENCODER)


def test_measuring_and_leaving_early_read_the_same_sequences():
    model, rows = tiny_models.build("bert-classifier"), text_rows(9)
    options = {"max_sequences": 6, "sequence_length": 8, "seed": 3}
    subjects = []
    for settings, needs in ((MeasureSettings(**options), {}), (ExitSettings(**options), {"head", "targets"})):
        with Subject.open(model, rows, settings, needs=needs, tokenizer=tokenizer()) as subject:
            subjects.append(subject)
    assert subjects[0].sequences.hash == subjects[1].sequences.hash
    assert subjects[0].anatomy == subjects[1].anatomy


def test_what_the_model_does_not_read_is_refused():
    opening = Subject.open(
        tiny_models.build("bert-classifier"), "digits:builtin/test", ExitSettings(), tokenizer=tokenizer()
    )
    with refused("holds images, but BertForSequenceClassification reads text"), opening:
        pass


@pytest.mark.parametrize(
    ("name", "needs", "says"),
    [
        ("bert", {"language"}, "is no causal language model: it does not predict the next token"),
        ("vit", {"language"}, "is no causal language model: it does not predict the next token"),
        (
            "bert",
            {"language"},
            "`fulldepth measure`, `fulldepth lens` and `fulldepth exit` read masked language",
        ),
        ("vit", {"language"}, "`fulldepth measure` and `fulldepth exit` read classifiers, on images in class"),
        ("detr", {"language"}, "`fulldepth measure` reads detectors, on images with boxes"),
        ("bert-bare", {"targets"}, "BertModel has no language-model or classification head known here. .* reads the"),
        (
            "bert-tokens",
            {"targets"},
            "Predictions by layer are read of .*: BertForTokenClassification labels every token; layers are",
        ),
        ("detr", {"targets"}, "are read of a language model of one stack.* reads detectors, on images with boxes"),
        ("llama", {"tokenizer"}, "needs its tokenizer"),
    ],
)
def test_what_a_command_needs_is_refused_where_it_is_missing(name, needs, says):
    model = tf.BertForTokenClassification(BERT) if name == "bert-tokens" else tiny_models.build(name)
    with refused(says), Subject.open(model, None, LoadingSettings(), needs=needs):
        pass


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("WhisperForConditionalGeneration", "is an encoder-decoder that reads input_features; of encoder-decoders,"),
        ("Wav2Vec2ForCTC", "reads input_values; fulldepth feeds text .input_ids. and images only"),
        ("BartForSequenceClassification", "--set tower=encoder. reads that stack alone; other commands refuse it"),
        ("BertForMultipleChoice", "reads several texts at a time .*fulldepth.measure.model.bert, "),
    ],
)
def test_what_no_command_reads_has_one_message(kind, says):
    """None advises a command that refuses the model, too."""
    kind = getattr(tf, kind)
    model = kind(zoo.config_for(kind.config_class.model_type)).eval()
    for need in ("language", "targets"):
        with refused(says), Subject.open(model, None, LoadingSettings(), needs={need}):
            pass
    with refused(says):
        refuse_without_tokens(model)
    with refused(says):
        fulldepth.measure(model, [words(3, 4, 5)] * 3, tokenizer=tokenizer())


def test_a_model_that_chooses_among_texts_is_refused_and_its_body_is_read():
    """The body of a model whose batch has one dimension more than a text."""
    model = tf.BertForMultipleChoice(BERT).eval()
    opening = {"data": [words(*range(1, 9))] * 3, "settings": MeasureSettings(), "tokenizer": tokenizer()}
    with refused("reads several texts at a time .*fulldepth.measure.model.bert, "), Subject.open(model, **opening):
        pass
    with Subject.open(model.bert, **opening) as subject:
        assert subject.anatomy.num_layers == BERT.num_hidden_layers


@pytest.mark.parametrize("needs", [set(), {"language", "head", "branches"}, {"plain"}])
def test_weights_are_checked_whatever_is_needed(needs):
    model = tiny_models.build("llama")
    model.lm_head.weight.data[1, 2] = float("nan")
    with (
        refused("NaN or infinite weights .first: lm_head.weight"),
        Subject.open(model, None, LoadingSettings(), needs=needs),
    ):
        pass


def test_the_model_is_in_evaluation_mode_inside_alone():
    """Also if the command fails."""
    model = tiny_models.build("llama").train()
    model.lm_head.eval()
    before = [module.training for module in model.modules()]
    with pytest.raises(ZeroDivisionError), Subject.open(model, None, LoadingSettings()) as subject:
        _ = subject.model.training / 0
    with Subject.open(model, None, LoadingSettings()) as subject:
        assert not any(module.training for module in subject.model.modules())
    assert [module.training for module in model.modules()] == before


def test_without_data_the_anatomy_is_proven_on_a_small_batch():
    model = tiny_models.build("gpt2")
    needs = {"language", "head", "branches"}
    with Subject.open(model, None, LoadingSettings(), needs=needs) as subject, torch.no_grad():
        assert subject.anatomy == subject.verified.anatomy
        ids = torch.tensor([[3, 5, 7]])
        states = model.transformer(ids).last_hidden_state  # after the final norm
        assert torch.allclose(subject.classifier.anatomy.model.lm_head(states), model(ids).logits)
        assert subject.verified.branches
        assert subject.hash == model_hash(model)


def test_a_model_inside_adapters_is_opened_unless_its_own_weights_are_needed():
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_models.build("llama"), config).eval()
    merged = copy.deepcopy(adapted).merge_and_unload()
    written = [
        exit.generate_texts(model, words(3, 4, 5), tokenizer=tokenizer(), max_new_tokens=8).generation.sequences
        for model in (adapted, merged)
    ]
    assert torch.equal(*written)
    with refused("merge_and_unload"), Subject.open(adapted, None, LoadingSettings(), needs={"plain"}):
        pass


def text_rows(count):
    return [{"text": words(*range(3, 5 + n)), "label": f"LABEL_{n % 3}"} for n in range(count)]


def image_rows(count):
    pixels = np.random.default_rng(0).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    return [{"image": Image.fromarray(each), "label": n % 2} for n, each in enumerate(pixels)]


@pytest.mark.parametrize(
    ("name", "make"), [("bert-classifier", text_rows), ("gpt2-classifier", text_rows), ("vit", image_rows)]
)
def test_batches_without_any_label_change_nothing(name, make, tmp_path):
    model, rows = tiny_models.build(name), make(6)
    model.save_pretrained(tmp_path)
    options = {"measures": ["lens_accuracy", "lens_loss"], "batch_size": 1}
    options |= {} if make is image_rows else {"tokenizer": tokenizer()}
    some = [row if n % 2 else {**row, "label": None} for n, row in enumerate(rows)]
    partly, alone = (fulldepth.measure(tmp_path, data, **options).table for data in (some, rows[1::2]))
    means = [table[~table.statistic.str.contains("error")] for table in (partly, alone)]
    assert_frame_equal(*means, rtol=1e-5)
