"""Capture changes nothing, heals always, and keeps the graph when asked to."""

import pytest
import torch
from torch.testing import assert_close

import tiny_models
from fulldepth.core.errors import FulldepthError
from fulldepth.execution import SITES, Activations, body_inputs, capture, find_anatomy
from fulldepth.hf import anatomy_candidates
from refusals import refused
from tiny_models import gradients


def anatomy_of(model):
    if isinstance(model, tiny_models.Toy):
        return anatomy_candidates(model, override=tiny_models.TOY_ANATOMY)[0]
    return find_anatomy(model)


def portrait(model):
    """Everything that a module keeps beside parameters, buffers and children, and the parameters with their state."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    modules = {
        name: (type(m), m.training, sorted(m.__dict__), [list(getattr(m, kind)) for kind in kinds])
        for name, m in model.named_modules()
    }
    tensors = {
        name: (t.dtype, t.device, t.requires_grad, t._version, t.tolist()) for name, t in model.named_parameters()
    }
    return modules, tensors, model.config.to_dict()


@pytest.mark.parametrize(("name", "training"), [("llama", True), ("gpt_neox", False), ("bert", True), ("opt", False)])
@torch.no_grad()
def test_nothing_of_the_model_changes(name, training):
    model = tiny_models.build(name).train(training)
    batch, before = tiny_models.inputs(model), portrait(model)

    def run():
        torch.manual_seed(3)
        return model(**batch).logits

    expected = run()
    with capture(anatomy_of(model), list(SITES)):
        assert portrait(model) != before
        assert torch.equal(run(), expected)
    assert portrait(model) == before
    assert torch.equal(run(), expected)


@pytest.mark.parametrize(
    ("name", "sites", "error", "words", "ids"),
    [
        ("llama", list(SITES), KeyError, "mine", None),
        ("llama", ["residual"], IndexError, "", 10_000),
        ("phi3", ["residual", "value"], FulldepthError, r"Layer 1 .*anatomy\.value", None),
    ],
)
def test_hooks_go_when_something_fails(name, sites, error, words, ids):
    """Inside `with`, in the model itself, and where capture cannot place them all."""
    model = tiny_models.build(name)
    before = portrait(model)

    def fail():
        with capture(anatomy_of(model), sites):
            if ids is None:
                raise KeyError("mine")
            model(input_ids=torch.tensor([[ids]]))

    with pytest.raises(error, match=words):
        fail()
    assert portrait(model) == before


def test_states_that_are_not_there_are_refused_by_name():
    model = tiny_models.build("llama")
    with refused("'residual'"), capture(anatomy_of(model), ["residuals"]):
        pass
    with capture(anatomy_of(model), ["residual", "value"]) as activations:
        for run in (False, True):
            if run:
                model(**tiny_models.inputs(model))
                assert len(activations["residual"]) == 4
                activations.clear()
            with refused("x of layer 1"):
                activations["residual"]
        with refused("Site 'mlp_branch' was not captured; captured: residual, value"):
            activations["mlp_branch"]


@torch.no_grad()
def test_hooks_of_others_stay_and_see_the_same():
    model, seen = tiny_models.build("llama"), []
    model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output))
    with capture(anatomy_of(model), ["residual"]) as activations:
        model(**tiny_models.inputs(model))
    assert torch.equal(seen[0], activations["residual"][2])
    model(**tiny_models.inputs(model))
    assert len(seen) == 2


# Gradients


def by_hand(model, batch):
    """x' and h_l of a tiny Llama by its submodules, in the graph."""
    body = model.model
    h, after = [body.embed_tokens(batch["input_ids"])], []
    positions = torch.arange(h[0].shape[1])[None]
    rotary = body.rotary_emb(h[0], positions)
    for block in body.layers:
        a = block.self_attn(
            hidden_states=block.input_layernorm(h[-1]), position_embeddings=rotary, attention_mask=None
        )[0]
        after.append(h[-1] + a)
        h.append(after[-1] + block.mlp(block.post_attention_layernorm(after[-1])))
    return h, after, body.norm(h[-1])


def penalty(h, after, normed):
    """Some loss that needs every state."""
    total = (normed**2).mean()
    for layer, state in enumerate([*h, *after], start=1):
        total = total + layer * (state**3).mean() + state[:, :-1].sub(state[:, 1:]).square().mean()
    return total


def text(model):
    return {"input_ids": tiny_models.inputs(model)["input_ids"][:1]}


def test_gradients_through_captured_states_are_autograds():
    model = tiny_models.build("llama", dtype=torch.float64)
    penalty(*by_hand(model, text(model))).backward()
    expected = gradients(model)
    model.zero_grad()
    with capture(anatomy_of(model), ["residual", "attention_output", "final_normed"], grad=True) as activations:
        model(**text(model))
        penalty(activations["residual"], activations["attention_output"], activations["final_normed"][0]).backward()
    got = gradients(model)
    assert len(expected) > 25
    assert got.keys() == expected.keys()
    assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.fixture
def recorded(monkeypatch):
    """Every (site, layer) that any capture records, in order."""
    log = []
    plain = Activations.record

    def record(self, site, layer, state):
        log.append((site, layer))
        plain(self, site, layer, state)

    monkeypatch.setattr(Activations, "record", record)
    return log


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize(
    ("reentrant", "sites"),
    [
        (False, ["residual"]),
        (False, ["residual", "attention_output", "attention_branch", "mlp_branch", "value"]),
        (True, ["residual"]),
    ],
)
def test_checkpointing_records_once_with_grad(reentrant, sites, recorded):
    model = tiny_models.build("llama", dtype=torch.float64)
    batch = text(model)

    def loss(activations, logits):
        return logits.square().mean() + sum((layer**2).mean() for site in sites for layer in activations[site])

    with capture(anatomy_of(model), sites, grad=True) as activations:
        loss(activations, model(**batch, use_cache=False).logits).backward()
    expected, once = gradients(model), list(recorded)
    recorded.clear()
    model.zero_grad()

    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    runs = []
    handle = model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda *_: runs.append(1))
    with capture(anatomy_of(model), sites, grad=True) as activations:
        total = loss(activations, model(**batch, use_cache=False).logits)
        assert all(state.requires_grad for site in sites for state in activations[site])
        total.backward()
        assert len(runs) == 2  # the blocks really were run again
        assert sorted(recorded) == sorted(once)
    handle.remove()
    assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
def test_states_inside_reentrant_blocks_are_refused_rather_than_cut_off():
    """There the first run of a block has no graph: a loss on x' would silently train nothing."""
    model = tiny_models.build("llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})

    def states():
        with capture(anatomy_of(model), ["attention_output"], grad=True) as activations:
            model(**text(model), use_cache=False)
            return activations["attention_output"]

    with refused("reentrant"):
        states()


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "depth_llama-tree", "depth_llama-hyper"])
@torch.no_grad()
def test_states_that_are_copied_as_they_arise_are_the_same(name):
    """Two passes, the second over a smaller batch and then over the first one again: nothing of a pass stays behind."""
    model = tiny_models.build(name)
    anatomy = anatomy_of(model)
    sites = list(SITES)
    batches = [tiny_models.inputs(model, batch=size) for size in (3, 2, 3)]
    plain, direct = [], []
    for batch in batches:
        with capture(anatomy, sites) as activations:
            anatomy.body(**body_inputs(anatomy, batch))
            plain.append({site: activations.stack(site) for site in sites})
    with capture(anatomy, sites, stacked=torch.device("cpu")) as activations:
        for batch in batches:
            anatomy.body(**body_inputs(anatomy, batch))
            direct.append({site: activations.stack(site).clone() for site in sites})
            assert activations.stack("residual") is activations.stack("residual"), "no second copy"
            activations.clear()
    for expected, states in zip(plain, direct, strict=True):
        for site in sites:
            assert torch.equal(states[site], expected[site]), site
