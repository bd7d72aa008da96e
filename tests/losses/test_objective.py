"""The objective on stock models, against the same loss written plainly with `output_hidden_states`."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import DataCollatorWithFlattening

from fulldepth.losses import (
    DepthTrainer,
    Objective,
    coherence_penalty,
    jump_penalty,
    orthogonality_penalty,
    similarity_penalty,
)
from fulldepth.losses.objective import CoherencePenalty, OrthogonalityPenalty
from losses.trained_step import (
    arguments,
    build,
    close,
    collate,
    examples,
    plain_jump,
    same_step,
    slopes,
    states_of,
    step,
)
from refusals import refused
from tiny_models import BUILDERS, seeded, token_ids


def batch(padded=False, rows=3):
    ids = token_ids(rows, 12, seed=3)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 9:] = 0
        mask[2, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def stock_llama():
    """A model in float32 and what it reads."""
    return BUILDERS["llama"](), batch()


@pytest.mark.parametrize(
    ("name", "alpha", "padded"),
    [
        *(("llama", math.inf, True), ("qwen3", 1.0, False), ("gpt2", 0.0, True), ("gemma2", 1.0, True)),
        *(("depth_llama-hyper", 1.0, False), ("depth_llama-tree", 1.0, False)),
    ],
)
def test_jreg_on_every_kind_of_decoder(name, alpha, padded):
    """Streams are summed before they are compared, so the gradient has to find its way into each of them."""
    model, inputs = build(name), batch(padded)
    blocks = model.transformer.h if name == "gpt2" else model.model.layers
    output, states = states_of(blocks, lambda: model(**inputs))
    states = [state.sum(2) if state.ndim == 4 else state for state in states]
    penalty = plain_jump(states, inputs["attention_mask"], alpha)
    objective = Objective(jump={"weight": 2.0, "alpha": alpha})
    parts = same_step(model, output.loss + 2.0 * penalty, objective, inputs)
    assert float(parts["jump"]) == pytest.approx(penalty.item(), rel=1e-9)
    assert float(parts["ce"]) == pytest.approx(output.loss.item(), rel=1e-6)


def test_similarity_and_aligned_on_a_stock_model():
    model, inputs = build("llama"), batch(padded=True)
    model.config.tie_last_hidden_states = False  # pre-norm states by transformers' own switch, not by our hooks
    output = model(**inputs, output_hidden_states=True)
    ce, states = output.loss, output.hidden_states
    depth, mask = len(states) - 1, inputs["attention_mask"].bool()
    lambdas = [2 * layer / (depth * (depth + 1)) for layer in range(1, depth + 1)]
    targets = inputs["labels"][:, 1:].flatten()
    aligned, similar = 0.0, 0.0
    for weight, state in zip(lambdas, states[1:], strict=True):
        logits = model.lm_head(model.model.norm(state))[:, :-1].flatten(0, 1).double()
        aligned = aligned + weight * F.cross_entropy(logits, targets)
        similar = similar + weight * (1 - torch.cosine_similarity(state, states[-1], dim=-1))[mask].mean()
    for terms, expected in (
        ({"similarity": 0.7}, ce + 0.7 * similar),
        ({"aligned": {"schedule": "always"}}, aligned),
        ({"aligned": {"schedule": "always", "weight": 2.0}, "similarity": 0.5}, 2 * aligned + 0.5 * similar),
    ):
        same_step(model, expected, Objective(**terms), inputs)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_cr_takes_the_attention_sub_layers(name):
    """x and x' recomputed by hand from the block's own modules; the pure functions have oracles of their own."""
    model, inputs = build(name), batch()
    seen = []
    blocks = model.transformer.h if name == "gpt2" else model.model.layers
    after = [b.ln_2 if name == "gpt2" else b.post_attention_layernorm for b in blocks]
    handles = [b.register_forward_pre_hook(lambda m, a: seen.append(a[0])) for b in blocks]
    handles += [m.register_forward_pre_hook(lambda m, a: seen.append(a[0])) for m in after]
    ce = model(**inputs).loss
    for handle in handles:
        handle.remove()
    pairs = list(zip(seen[0::2], seen[1::2], strict=True))  # x, x' of each layer in turn
    depth = len(pairs)
    coherence = sum(coherence_penalty(*pairs[layer], layer, depth, energy=True) for layer in (0, 2))
    expected = ce + 0.3 * coherence + 0.2 * orthogonality_penalty(pairs[1][1])
    objective = Objective(
        coherence={"weight": 0.3, "layers": [0, 2]}, orthogonality={"weight": 0.2, "layers": [1]}, energy_warmup=1
    )
    same_step(model, expected, objective, inputs)
    off, _ = step(model, objective, inputs)  # the second step is after the warm-up
    without = sum(float(coherence_penalty(*pairs[layer], layer, depth, energy=False)) for layer in (0, 2))
    assert off.item() == pytest.approx(float(expected - 0.3 * coherence) + 0.3 * without, rel=1e-6)


ALL = {
    "jump": 1.5,
    "coherence": {"weight": 0.5, "layers": [1]},
    "orthogonality": {"layers": [0]},
    "aligned": {"schedule": "always"},
    "similarity": 0.3,
}


def test_gradient_checkpointing_changes_nothing():
    model, inputs = build("gpt2"), batch()
    loss, parts = step(model, Objective(**ALL), inputs)
    expected = slopes(model, loss)
    model.activation_checkpointing_enable({"use_reentrant": False})
    again, same = step(model, Objective(**ALL), inputs)
    assert torch.equal(loss, again)
    assert {n: float(v) for n, v in parts.items()} == {n: float(v) for n, v in same.items()}
    close(slopes(model, again), expected, 1e-12)


@pytest.mark.thorough
def test_a_compiled_model_gives_the_same():
    model, inputs = build("llama"), batch()
    terms = {name: ALL[name] for name in ("jump", "coherence", "similarity")}
    loss, _ = step(model, Objective(**terms), inputs)
    expected = slopes(model, loss)
    with Objective(**terms).attach(model) as objective:
        again, _ = objective(torch.compile(model, backend="aot_eager")(**inputs), inputs)
        found = slopes(model, again)
    assert again.item() == pytest.approx(loss.item(), rel=1e-9)
    close(found, expected, 1e-9)


def test_penalties_of_large_float16_states_are_finite():
    """Sums of squares of these states would overflow in float16."""
    generator = seeded(0)
    states = [(3e4 * torch.randn(3, 8, 16, generator=generator).tanh()).half().requires_grad_() for _ in range(4)]
    for penalty in (
        jump_penalty(states),
        similarity_penalty(states),
        coherence_penalty(states[0], states[1], 0, 4, energy=True),
        orthogonality_penalty(states[2]),
    ):
        assert penalty.dtype == torch.float32
        assert penalty.isfinite()
        found = torch.autograd.grad(penalty, states, allow_unused=True)
        assert all(slope.isfinite().all() for slope in found if slope is not None)


def test_steps_are_counted_by_calls_or_by_the_optimiser():
    model, inputs = stock_llama()
    objective = Objective(aligned=1.0).attach(model)
    seen = ["aligned" in objective(model(**inputs), inputs)[1] for _ in range(4)]
    assert seen == [False, True, False, True]  # odd steps: the last layer's cross-entropy (App. B.3)
    objective.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    objective = Objective(aligned=1.0).attach(model, optimizer)
    seen = []
    for _ in range(3):
        for _ in range(2):
            loss, parts = objective(model(**inputs), inputs)
            loss.backward()
            seen.append("aligned" in parts)
        optimizer.step()
    assert seen == [False, False, True, True, False, False]
    fresh = Objective(aligned=1.0)
    fresh.load_state_dict(objective.state_dict())
    assert fresh.step == 4
    objective.detach()


def test_detach_heals_and_evaluation_records_nothing():
    model, inputs = stock_llama()

    def hooks():
        return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]

    before = hooks()
    objective = Objective(**ALL).attach(model)
    with torch.no_grad():
        model(**inputs)
    assert not objective._activations._seen
    loss, _ = objective(model(**inputs), inputs)
    assert not objective._activations._seen
    loss.backward()
    objective.detach()
    assert hooks() == before


def test_what_cannot_be_right_is_refused():
    model, inputs = stock_llama()
    objective = Objective(jump=1.0)
    with refused("attach"):
        objective(model(**inputs), inputs)
    objective.attach(model)
    with refused("attached already"):
        objective.attach(model)
    with refused("labels"):
        objective(model(input_ids=inputs["input_ids"]), inputs)
    loss, _ = objective(model(**inputs), inputs)
    loss.backward(retain_graph=True)
    with refused("ran twice"):
        loss.backward()
    loss, _ = objective(model(**inputs), inputs)
    with refused("second derivatives"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    objective.detach()
    with refused("got padding in 2 of 3"):
        step(model, Objective(coherence={"layers": [1]}), batch(padded=True))


def test_sequences_that_are_joined_to_one_row_keep_their_penalties_or_are_refused():
    """JREG is the mean over the tokens of the sequences alone; norms and frequencies of the joined row are not CR's."""
    model = build("llama")
    sequences = [{"input_ids": ids} for ids in batch(rows=4)["input_ids"].tolist()]
    joined = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(sequences)
    inputs = {name: joined[name] for name in ("input_ids", "labels", "position_ids")}
    inputs["use_cache"] = False  # with a cache transformers does not keep the sequences apart
    expected = 0.0
    for ids in batch(rows=4)["input_ids"]:
        _, states = states_of(model.model.layers, lambda ids=ids: model(input_ids=ids[None]))
        expected += plain_jump(states, torch.ones(1, len(ids)), 1.0).item() / 4
    with Objective(jump=1.0).attach(model) as objective:
        _, parts = objective(model(**inputs), joined)
    assert joined["input_ids"].shape[0] == 1
    assert float(parts["jump"]) == pytest.approx(expected, rel=1e-9)
    for name in ("orthogonality", "coherence"):
        with Objective(**{name: {"layers": [1]}}).attach(model) as objective, refused("a row of its own"):
            objective(model(**inputs), joined)


def test_a_collator_that_names_no_boundaries_is_found_by_its_single_row(tmp_path):
    trainer = DepthTrainer(
        BUILDERS["llama"](),
        arguments(tmp_path, per_device_train_batch_size=4),
        train_dataset=[{"input_ids": ids} for ids in batch(rows=4)["input_ids"].tolist()],
        data_collator=DataCollatorWithFlattening(),
        objective=Objective(orthogonality={"layers": [1]}),
    )
    with trainer.depth_objective, refused("a row of its own"):
        trainer.train()


@pytest.mark.parametrize(
    ("terms", "word"),
    [
        ({"jump": -1.0}, "jump.weight"),
        ({"energy_warmup": "x"}, "energy_warmup is 'x'"),
        ({"aligned": {"schedule": "sometimes"}}, "alternate"),
        ({"aligned": {"weights": [1.0]}}, "3 finite weights"),
        ({"coherence": {"layers": [3]}}, "coherence.layers"),
        ({"multi_exit": 1.0}, "add_exit_heads"),
        ({"multi_exit": 1.0, "aligned": 1.0}, "aligned"),
    ],
)
def test_terms_without_a_meaning_are_refused(terms, word):
    with refused(word):
        Objective(**terms).attach(BUILDERS["llama"]())


def test_the_paper_s_layers_are_the_default():
    assert CoherencePenalty().chosen_layers(12) == [2, 4, 6, 8]
    assert OrthogonalityPenalty().chosen_layers(12) == [3, 5, 7, 9, 10]


@pytest.mark.parametrize("dtype", [torch.bfloat16, "autocast"])
def test_half_precision_stays_near_float32(dtype):
    model, inputs = stock_llama()

    def taken():
        loss, parts = step(model.train(), Objective(jump=4.0), inputs)
        return torch.cat([g.flatten().float() for g in slopes(model, loss).values()]), parts

    expected, _ = taken()
    autocast = dtype == "autocast"
    model = model if autocast else model.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, parts = taken()
    assert parts["jump"].dtype == torch.float32
    assert float(torch.cosine_similarity(got, expected, dim=0)) > 0.999


@pytest.mark.parametrize(("step", "same_as"), [(3, 100), (4, 0)])
def test_the_energy_penalty_ends_with_its_last_step(step, same_as):
    """A warm-up of three steps is on in the third, as one of 100 is, and off in the fourth, as one of none is."""
    batch = {name: value for name, value in collate(examples("llama")).items() if name != "attention_mask"}

    def value(warmup):
        model = build("llama")
        for layer in model.model.layers:  # attention that changes the power of the spectra by more than twice
            layer.self_attn.o_proj.weight.data *= 200
        with Objective(energy_warmup=warmup, coherence={"layers": [1]}).attach(model) as objective:
            objective.step = step
            return float(objective(model(**batch), batch)[1]["coherence"])

    assert value(3) == value(same_as)
    assert value(3) != value(100 - same_as)


def test_losses_of_layers_need_labels():
    model = build("llama")
    batch = {name: value for name, value in collate(examples("llama")).items() if name != "labels"}
    with Objective(aligned={"schedule": "always"}).attach(model) as objective:
        with refused("The model returned no loss; call it with `labels`"):
            objective(model(**batch), batch)
        model(**batch)
        with refused("The aligned loss needs `labels` in the batch"):
            objective(torch.tensor(1.0), batch)
