"""Distillation against scipy and the plain formula; its teacher, which nothing changes and no checkpoint holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.special import rel_entr, softmax

from fulldepth.losses import Objective, distillation_loss
from losses.trained_step import build, close, collate, examples, gradient, gradients, kept, same_step
from refusals import refused
from tiny_models import BUILDERS, seeded, shaken, token_ids

VOCAB, TEMPERATURE = 50, 1.7


def drawn(dtype=torch.float64):
    """Logits, states of a teacher, its head and labels; states without a label are not finite."""
    generator = seeded(2)
    labels = torch.randint(0, VOCAB, (3, 7), generator=generator)
    labels[0, 3:], labels[1] = -100, -100
    states = torch.randn(3, 7, 6, generator=generator, dtype=dtype)
    states[labels == -100] = torch.nan
    weight = torch.randn(VOCAB, 6, generator=generator, dtype=dtype)
    logits = 2 * torch.randn(7, 3, VOCAB, generator=generator, dtype=dtype).transpose(0, 1)  # not contiguous
    return logits.requires_grad_(), states, lambda rows: rows @ weight.T, labels


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_value_and_gradient_are_those_of_the_formula(chunk):
    logits, states, head, labels = drawn()
    value = distillation_loss(logits, states, head, labels, TEMPERATURE, chunk=chunk)
    value.backward()
    counted = (labels != -100).numpy()
    q = softmax(logits.detach().numpy() / TEMPERATURE, axis=-1)
    p = softmax(head(states).numpy() / TEMPERATURE, axis=-1)
    expected = TEMPERATURE**2 * rel_entr(p, q).sum(-1)[counted].mean()
    assert value.item() == pytest.approx(expected, rel=1e-12)
    slope = TEMPERATURE * np.where(counted[..., None], q - p, 0) / counted.sum()
    assert_allclose(logits.grad.numpy(), slope, atol=1e-15)


def test_only_the_gradient_is_kept():
    logits, states, head, labels = drawn(torch.float32)
    _, saved = kept(lambda: distillation_loss(logits, states, head, labels, chunk=4))
    assert [tensor.shape for tensor in saved if tensor.dim()] == [logits.shape]
    nothing = distillation_loss(logits, states, head, torch.full_like(labels, -100))
    assert nothing.item() == 0.0


def other(name="llama"):
    """A teacher that is not the model."""
    torch.manual_seed(9)
    return shaken(BUILDERS[name]().double().train())


def plain(model, teacher, batch, weight, temperature=1.0):
    """The mixed loss with whole logits."""
    output, labels = model(**batch), batch["labels"][:, 1:]
    with torch.no_grad():
        expected = teacher(**batch).logits
    p, q = ((each[:, :-1][labels != -100] / temperature).softmax(-1) for each in (expected, output.logits))
    return (1 - weight) * output.loss + weight * temperature**2 * (p * (p / q).log()).sum(-1).mean()


@pytest.mark.parametrize(
    ("student", "teacher", "temperature"), [("llama", "gemma2", 1.0), ("gpt2", "llama", 1.0), ("gpt2", "llama", 2.5)]
)
def test_a_model_learns_from_labels_and_teacher(student, teacher, temperature):
    """Gemma 2 caps its logits; the batch is padded."""
    model, source, batch = build(student), other(teacher), collate(examples("llama"))
    options = {"teacher": source, "weight": 0.3, "temperature": temperature}
    parts = same_step(model, plain(model, source, batch, 0.3, temperature), Objective(distillation=options), batch)
    assert parts["distillation"] > 0.1
    assert source.training
    assert all(weight.requires_grad and weight.grad is None for weight in source.parameters())
    assert model.state_dict().keys() == build(student).state_dict().keys()


def test_a_teacher_with_the_models_weights_teaches_nothing(tmp_path):
    model, batch = build("llama"), collate(examples("llama"))
    model.save_pretrained(tmp_path)
    with Objective(distillation={"teacher": tmp_path, "weight": 1.0}).attach(model) as objective:
        loss, parts = objective(model(**batch), batch)
    loss.backward()
    assert abs(float(parts["distillation"])) < 1e-14
    assert max(float(slope.abs().max()) for slope in gradients(model).values()) < 1e-12


def test_documents_in_a_row_fit_the_teacher_as_far_as_their_positions_do():
    model, source = build("llama"), other()
    most = source.config.max_position_embeddings
    batch = dict.fromkeys(("input_ids", "labels"), token_ids(1, most + 20))
    with Objective(distillation={"teacher": source}).attach(model) as objective:
        for first in (most, most + 1):
            positions = torch.cat([torch.arange(first), torch.arange(most + 20 - first)])[None]
            rows = {**batch, "position_ids": positions}
            output = model(**rows, use_cache=False)
            if first == most:
                assert objective(output, rows)[1]["distillation"] > 0
                continue
            with refused(f"Rows of {most + 1} tokens do not fit the teacher's {most} positions"):
                objective(output, rows)


def trained_step(folder):
    """What a step of `DepthTrainer` takes away from the weights, in micro-batches of two rows with unlike labels."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    terms = {"distillation": {"teacher": other(), "weight": 0.7}}
    return {n: g.numpy() for n, g in gradient(build("llama"), examples("llama"), terms, folder, **options)[0].items()}


def test_two_processes_that_accumulate_are_one_large_batch(two_processes, tmp_path):
    model = build("llama")
    plain(model, other(), collate(examples("llama")), 0.7).backward()
    for found in two_processes(trained_step, str(tmp_path)):
        close({name: torch.as_tensor(value) for name, value in found.items()}, gradients(model), 1e-6)


def smaller():
    model = BUILDERS["llama"]()
    model.resize_token_embeddings(40)
    return model


@pytest.mark.parametrize(
    ("student", "options", "words"),
    [
        (
            "llama",
            lambda: {"teacher": smaller()},
            "LlamaForCausalLM predicts one of 40 tokens .* same vocabulary.*padded.*resize_token_embeddings.96",
        ),
        ("llama", lambda: {"teacher": BUILDERS["bert"]()}, "BertForMaskedLM .*masked-lm"),
        ("llama", lambda: {"teacher": "no/such/folder"}, "no/such/folder"),
        ("llama", lambda: {"teacher": 3}, "distillation.teacher is 3"),
        ("llama", lambda: {"weight": 0.5}, "distillation.teacher: Field required"),
        ("llama", lambda: {"teacher": "x", "weight": 1.5}, "distillation.weight is 1.5"),
        ("llama", lambda: {"teacher": "x", "temperature": 0.0}, "distillation.temperature is 0.0"),
        ("bert", lambda: {"teacher": "x"}, "BertForSequenceClassification"),
    ],
)
def test_what_cannot_teach_is_refused(student, options, words):
    with refused(words):
        Objective(distillation=options()).attach(build(student))
