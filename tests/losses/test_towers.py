"""Objectives on a stack of an encoder-decoder, a tower of CLIP, and the text model of images and text; plain loops."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn.functional import cross_entropy

from fulldepth.losses import DepthTrainer, Objective
from losses.trained_step import plain_jump, same_step, states_of
from refusals import refused
from tiny_models import DECODER, seeded

SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def t5():
    torch.manual_seed(0)
    config = tf.T5Config(**SIZES, vocab_size=50, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return tf.T5ForConditionalGeneration(config).double().train()


def clip():
    torch.manual_seed(0)
    text = {**TOWER, "vocab_size": 50, "max_position_embeddings": 12, "eos_token_id": 49}
    vision = {**TOWER, "image_size": 16, "patch_size": 8}
    return tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).double().train()


def translation():
    numbers = seeded(1)
    ids, labels = torch.randint(3, 50, (2, 9), generator=numbers), torch.randint(3, 50, (2, 7), generator=numbers)
    mask = torch.ones_like(ids)
    mask[1, 6:], labels[0, 5:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def captions():
    numbers = seeded(2)
    ids, mask = torch.randint(3, 48, (2, 9), generator=numbers), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:], ids[0, 8], ids[1, 5] = 0, 49, 49
    images = torch.randn(2, 3, 16, 16, generator=numbers, dtype=torch.float64)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": images, "return_loss": True}


CASES = {
    "t5 encoder": (t5, translation, lambda m: m.encoder.block, lambda b: b["attention_mask"]),
    "t5 decoder": (t5, translation, lambda m: m.decoder.block, lambda b: (b["labels"] != -100).long()),
    "clip text": (clip, captions, lambda m: m.text_model.encoder.layers, lambda b: b["attention_mask"]),
    "clip vision": (clip, captions, lambda m: m.vision_model.encoder.layers, lambda b: torch.ones(2, 5)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_tower_is_penalised_by_its_own_states_and_mask(case):
    build, make, blocks, mask = CASES[case]
    model, batch = build(), make()
    output, states = states_of(blocks(model), lambda: model(**batch))
    expected = output.loss + 1.5 * plain_jump(states, mask(batch), 1.0)
    same_step(model, expected, Objective(jump=1.5), batch, tower=case.split()[1])


def test_every_layer_of_a_decoder_predicts_through_its_head():
    model, batch = t5(), translation()
    _, states = states_of(model.decoder.block, lambda: model(**batch))
    scale = 16**-0.5 if model.config.scale_decoder_outputs else 1.0
    logits = [model.lm_head(model.decoder.final_layer_norm(state) * scale) for state in states[1:]]
    losses = [cross_entropy(each.flatten(0, 1), batch["labels"].flatten()) for each in logits]
    expected = sum(layer / 6 * loss for layer, loss in enumerate(losses, start=1))
    same_step(model, expected, Objective(aligned={"schedule": "always"}), batch, tower="decoder")


def test_a_trainer_takes_an_objective_that_is_attached(tmp_path):
    model, batch = t5(), translation()
    rows = [{name: value[row] for name, value in batch.items()} for row in (0, 1)]
    objective = Objective(jump=1.5).attach(model, tower="decoder")
    arguments = tf.TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_strategy="no")
    with refused("attached to another model"):
        DepthTrainer(t5(), arguments, train_dataset=rows, objective=objective)
    trainer = DepthTrainer(model, arguments, train_dataset=rows, objective=objective)
    output, states = states_of(model.decoder.block, lambda: model(**batch))
    expected = float((output.loss + 1.5 * plain_jump(states, batch["labels"] != -100, 1.0)).detach())
    objective._activations.clear()  # of the pass of this test
    assert trainer.train().training_loss == pytest.approx(expected, rel=1e-6)


REFUSALS = {
    "no tower": (t5, {"jump": 1.0}, {}, "encoder or decoder"),
    "no tower of two": (clip, {"jump": 1.0}, {}, "text or vision"),
    "wrong tower": (t5, {"jump": 1.0}, {"tower": "vision"}, "vision"),
    "own": (lambda: nn.Linear(2, 2), {"jump": 1.0}, {}, "not a transformers model"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_advise_what_python_can_do(case):
    build, terms, options, message = REFUSALS[case]
    with refused(message) as error:
        Objective(**terms).attach(build(), **options)
    assert " --" not in str(error.value)


def test_the_text_model_of_images_and_text_is_trained():
    """Also where the vision tower is deeper; each sequence begins with an image, the second one ends in padding."""
    torch.manual_seed(0)
    image, vision = 90, {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4}
    config = tf.Gemma3Config(
        text_config=tf.Gemma3TextConfig(**{**DECODER, "num_hidden_layers": 2}, sliding_window=8),
        vision_config=tf.SiglipVisionConfig(**vision, image_size=16, patch_size=4),
        mm_tokens_per_image=4,
        image_token_index=image,
        boi_token_index=91,
        eoi_token_index=92,
    )
    model = tf.Gemma3ForConditionalGeneration(config).double().train()
    generator = seeded(3)
    ids = torch.cat([torch.full((2, 4), image), torch.randint(3, image - 1, (2, 8), generator=generator)], 1)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": (ids == image).long()}
    inputs["labels"] = ids.masked_fill((mask == 0) | (ids == image), -100)
    inputs["pixel_values"] = torch.randn(2, 3, 16, 16, generator=generator).double()
    blocks = model.get_decoder().layers
    output, states = states_of(blocks, lambda: model(**inputs))
    objective = Objective(jump=2.0)
    same_step(model, output.loss + 2.0 * plain_jump(states, mask, 1.0), objective, inputs)
    assert objective.anatomy is not None
    assert list(objective.anatomy.blocks) == list(blocks)
