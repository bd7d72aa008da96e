"""One optimiser step of `DepthTrainer` with plain SGD, whose update is the gradient, and the same by hand."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as tf
from torch import nn

from fulldepth.losses import DepthTrainer, Objective
from tiny_models import BUILDERS, VOCAB, gradients, seeded

ROWS, LENGTH = 8, 10


def build(kind):
    """A tiny model in float64, in training mode without dropout."""
    torch.manual_seed(0)
    model = BUILDERS["bert-classifier" if kind == "bert" else kind]().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def examples(kind, rows=ROWS):
    """Rows of a batch, `labels` first; sequences are padded to different lengths."""
    generator = seeded(5)
    if kind == "vit":
        images = torch.randn(rows, 3, 16, 16, generator=generator, dtype=torch.float64)
        return [{"labels": torch.tensor(row % 3), "pixel_values": images[row]} for row in range(rows)]
    ids = torch.randint(3, VOCAB, (rows, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < (LENGTH - torch.arange(rows) % 5)[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100) if kind == "llama" else torch.arange(rows) % 3
    return [{"labels": labels[i], "input_ids": ids[i], "attention_mask": mask[i]} for i in range(rows)]


def collate(items):
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def arguments(folder, **options):
    fixed = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    fixed |= {"max_steps": 1, "logging_strategy": "no", "remove_unused_columns": False, "max_grad_norm": 0.0}
    return tf.TrainingArguments(output_dir=folder, **{**fixed, **options})


class OneStep(DepthTrainer):
    """Rows in their order."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(model, rows, terms, folder, optimizer=None, **options):
    """A trainer on these rows; the learning rate of an optimiser that is given stays."""
    schedule = optimizer and torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return OneStep(
        model,
        arguments(str(folder), **options),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collate,
        objective=Objective(**terms),
        optimizers=(optimizer, schedule),
    )


def gradient(model, rows, terms, folder, **options):
    """What a step of SGD with learning rate 1 takes away from the weights, and the means of the loss's parts."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    made = trainer(model, rows, terms, folder, torch.optim.SGD(model.parameters(), lr=1.0), **options)
    made.train()
    parts = {name: total / count for name, (total, count) in made.tallies["log"].take().items()}
    made.depth_objective.detach()
    return {name: before[name] - weight.detach() for name, weight in model.named_parameters()}, parts


def plain_loss(model, kind, rows, weights):
    """The loss of one large batch, written with transformers' own hidden states."""
    model.config.tie_last_hidden_states = False
    batch = collate(rows)
    out = model(**batch, output_hidden_states=True)
    states, depth = out.hidden_states, len(out.hidden_states) - 1
    counted = torch.ones(states[0].shape[:2]) if kind == "vit" else batch["attention_mask"]

    def mean(values):
        return (values * counted).sum() / counted.sum()

    jump = plain_jump(states, counted, 1.0)
    similar = 0.0
    for layer in range(1, depth + 1):
        distance = 1 - torch.cosine_similarity(states[layer], states[-1], dim=-1)
        sample = mean(distance) if kind == "llama" else distance[:, 0].mean()  # classifiers: the feature of [CLS]
        similar = similar + 2 * layer / (depth * (depth + 1)) * sample
    return out.loss + weights["jump"] * jump + weights["similarity"] * similar


WEIGHTS = {"jump": 1.5, "similarity": 0.3}


def plain_gradient(kind, rows):
    """That loss and its gradient."""
    model = build(kind)
    loss = plain_loss(model, kind, rows, WEIGHTS)
    loss.backward()
    return loss.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def close(got, expected, tolerance):
    """Gradients that differ by at most `tolerance` of the largest."""
    assert got.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    worst = max(float((got[n] - expected[n]).abs().max()) for n in expected)
    assert worst <= tolerance * scale, (worst, scale)


def same_step(model, expected, objective, batch, **options):
    """The parts of the loss of an objective, which is attached with the `options`, if it is the expected one to within
    1e-6 and has its gradients.
    """
    wanted = slopes(model, expected, retain_graph=True)
    loss, parts = step(model, objective, batch, **options)
    assert not objective.attached
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    close(slopes(model, loss), wanted, 1e-6)
    return parts


def slopes(model, loss, **options):
    """Name -> gradient of a loss, of the weights that have one."""
    model.zero_grad()
    loss.backward(**options)
    return gradients(model)


def step(model, objective, inputs, **options):
    """The loss of an objective, which is attached with the `options` for one forward pass, and its parts."""
    with objective.attach(model, **options):
        return objective(model(**inputs), inputs)


def leaves(states, dtype=torch.float64):
    return [state.detach().to(dtype, copy=True).requires_grad_() for state in states]


def is_value(value, expected, dtype):
    """A number of states of a type: float64 is exact, all others are summed in float32."""
    exact = dtype == torch.float64
    tolerance = 1e-10 if exact else 1e-6
    assert value.item() == pytest.approx(float(expected), rel=tolerance, abs=tolerance)
    assert value.dtype == (torch.float64 if exact else torch.float32)


def kept(run):
    """What a function gives, and the tensors that it keeps for the backward pass."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        return run(), saved


def plain_jump(states, mask, alpha):
    depth = len(states) - 1
    weights = torch.softmax(alpha * torch.arange(1, depth + 1).double(), 0) if alpha < math.inf else None
    total = 0.0
    for layer in range(1, depth + 1):
        cosine = torch.cosine_similarity(states[layer - 1].double(), states[layer].double(), dim=-1)
        psi = (1 - cosine) / 2
        weight = weights[layer - 1] if weights is not None else float(layer == depth)
        counted = mask * states[layer - 1].any(-1) * states[layer].any(-1)  # a zero vector has no direction
        total = total + weight * (psi * counted).sum() / counted.sum()
    return total


def states_of(blocks, run):
    """The output of a pass, and h_0..h_L by hooks of this test."""
    states = []
    first = blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: states.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    hooks = [
        b.register_forward_hook(lambda _, args, out: states.append(out[0] if isinstance(out, tuple) else out))
        for b in blocks
    ]
    output = run()
    for hook in (first, *hooks):
        hook.remove()
    return output, states
