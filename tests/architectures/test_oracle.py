"""Logits, gradients, routed values and routing weights of the model against the plain form in `oracle`, in float64."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch.testing import assert_close

from architectures import oracle
from architectures.combinations import (
    EVERY,
    KINDS,
    SIZE,
    SWITCHES,
    build,
    configuration,
    frequencies,
    llama_configuration,
    padded,
    parameters,
    randomise,
    tokens,
)
from fulldepth.architectures import DepthLlamaForCausalLM

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def reference(model, ids, **options):
    leaves = parameters(model)
    return leaves, oracle.run(leaves, model.config, ids, frequencies=frequencies(model), **options)


@EVERY
def test_logits_and_gradients_equal_the_plain_form(name):
    model, ids = build(name).train(), tokens()
    output = model(input_ids=ids, labels=ids, use_cache=False)
    oracle.loss(output.logits, ids).backward()  # the model's own loss takes the logits to float32, as in transformers
    leaves, trace = reference(model, ids)
    expected = oracle.loss(trace.logits, ids)
    expected.backward()
    assert_close(output.logits, trace.logits, **CLOSE)
    assert_close(output.loss.double(), expected, rtol=1e-6, atol=1e-6)
    found = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert set(found) == set(leaves)
    for key, leaf in leaves.items():
        assert found[key] is not None, f"{key} has no gradient"
        scale = leaf.grad.abs().max()
        assert scale > 0, f"the test's oracle does not use {key}"
        assert_close(found[key] / scale, leaf.grad / scale, **CLOSE, msg=key)


@EVERY
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_positions_count_as_in_the_plain_form(name, side):
    batch = padded(side=side)
    ids, mask, positions = batch.values()
    model = build(name)
    with torch.no_grad():
        logits = model(**batch).logits
        _, trace = reference(model, ids, mask=mask, positions=positions)
    assert logits.isfinite().all()
    assert_close(logits[mask.bool()], trace.logits[mask.bool()], **CLOSE)


@EVERY
def test_documents_packed_in_one_row_do_not_see_each_other(name):
    model, ids = build(name), tokens(2, 11)
    positions = torch.tensor([[*range(4), *range(5), *range(2)], [*range(11)]])
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        for start, stop in ((0, 4), (4, 9), (9, 11)):
            alone = model(input_ids=ids[:1, start:stop], use_cache=False).logits
            assert_close(packed[:1, start:stop], alone, **CLOSE)
        _, trace = reference(model, ids, positions=positions)
    assert_close(packed, trace.logits, **CLOSE)


@KINDS
@torch.no_grad()
def test_the_states_and_attentions_that_transformers_hands_out(name):
    """h_0..h_{L-1} as layers pass them on (streams: their sum), then the final norm's output, as for every decoder."""
    model, ids = build(name, attention="eager"), tokens()
    output = model(ids, output_hidden_states=True, output_attentions=True)
    _, trace = reference(model, ids)
    assert len(output.hidden_states) == len(trace.states)
    for index, (found, expected) in enumerate(zip(output.hidden_states[:-1], trace.states[:-1], strict=True)):
        streams = model.config.num_streams if index == 0 else 1  # the oracle's h_0 is one of n equal streams
        total = expected.sum(2) if expected.dim() == 4 else expected * (streams if "hyper" in name else 1)
        assert_close(found, total, **CLOSE)
    assert_close(model.lm_head(output.hidden_states[-1]), trace.logits, **CLOSE)
    some = model(ids, output_hidden_states=[1]).hidden_states
    assert [index for index, state in enumerate(some) if state is not None] == [1]
    assert torch.equal(some[1], output.hidden_states[1])
    for weights in output.attentions:
        assert weights.shape == (2, 4, 9, 9)
        assert_close(weights.sum(-1), torch.ones(2, 4, 9, dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("name", ["serial", "serial-odd"])
def test_the_serial_form_is_llama(name):
    switches = SWITCHES[name]
    llama = randomise(tf.LlamaForCausalLM(llama_configuration(**switches))).eval()
    model = DepthLlamaForCausalLM(configuration(name)).eval()
    assert list(model.state_dict()) == list(llama.state_dict())
    model.load_state_dict(llama.state_dict())
    ids = padded()["input_ids"]
    for batch in ({"input_ids": ids}, padded()):
        ours, theirs = model(**batch, labels=ids), llama(**batch, labels=ids)
        assert_close(ours.logits, theirs.logits, rtol=1e-6, atol=1e-6)
        assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=1e-6)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    llama = tf.LlamaForCausalLM(llama_configuration(**switches, rope_parameters=scaled)).eval()
    model = DepthLlamaForCausalLM(configuration(name, rope_parameters=scaled)).eval()
    model.load_state_dict(llama.state_dict())
    assert_close(model(ids).logits, llama(ids).logits, rtol=1e-6, atol=1e-6)


def with_plain_weights(model):
    """Random Llama weights in `model`, whatever it adds left at its start; the Llama's parameters."""
    llama = randomise(tf.LlamaForCausalLM(llama_configuration())).double()
    missing, unexpected = model.load_state_dict(llama.state_dict(), strict=False)
    assert missing
    assert not unexpected
    return llama.state_dict()


def test_attention_and_mlp_start_from_different_streams():
    """At the start the first column of static alpha picks one stream, and it moves on from branch to branch."""
    model = DepthLlamaForCausalLM(configuration("hyper", num_streams=4))
    picked = []
    for layer in model.model.layers:
        for connection in (layer.attention_connection, layer.mlp_connection):
            (alpha,) = [p for p in connection.parameters() if p.shape == (4, 5)]
            assert torch.equal(alpha[:, 1:], torch.eye(4))
            assert sorted(alpha[:, 0].tolist()) == [0, 0, 0, 1]
            picked.append(int(alpha[:, 0].argmax()))
    assert set(picked) == {0, 1, 2, 3}
    assert all(first != second for first, second in zip(picked[::2], picked[1::2], strict=True))


@pytest.mark.parametrize(
    ("name", "changes"),
    [("kv", {}), *(("hyper", {"num_streams": n, "hyper_dynamic": n != 2}) for n in (1, 2, 7))],
)
def test_fresh_forms_are_the_prenorm_network(name, changes):
    """n equal streams are summed before the final norm: the same as its eps divided by n^2."""
    model, ids = DepthLlamaForCausalLM(configuration(name, **changes)).double().eval(), tokens()
    plain, final_eps = with_plain_weights(model), 1e-5 / changes.get("num_streams", 1) ** 2
    expected = oracle.run(plain, configuration(), ids, frequencies=frequencies(model), final_eps=final_eps)
    assert_close(model(ids).logits, expected.logits, **CLOSE)


def routers(model):
    return {r: layer.self_attn.router for r, layer in enumerate(model.model.layers, 1) if r > 1}


def test_routers_start_as_the_papers_say():
    changes = {"num_key_value_heads": 8, "num_attention_heads": 8, "num_hidden_layers": 24}
    static = DepthLlamaForCausalLM(configuration("static", **changes))
    weights = torch.cat([p.flatten() for router in routers(static).values() for p in router.parameters()])
    assert weights.numel() == 8 * sum(range(2, 25))
    assert weights.mean().abs() < 0.01
    assert abs(weights.std() - 0.1) < 0.005
    for r, router in routers(DepthLlamaForCausalLM(configuration("kv", **changes))).items():
        weight = next(router.parameters()).view(8, r, 8)
        assert torch.equal(weight[:, -1], torch.eye(8))
        assert not weight[:, :-1].any()
    for r, router in routers(DepthLlamaForCausalLM(configuration("kv", **changes, kv_init="public"))).items():
        older, bound = router.weight.detach()[:, :-1], (3 / (8 * r)) ** 0.5
        assert 0.9 * bound < older.abs().max() <= bound
        assert older.std() == pytest.approx(bound / 3**0.5, rel=0.2)
    dynamic = DepthLlamaForCausalLM(configuration("dynamic"))
    shapes = {r: [tuple(p.shape) for p in router.parameters()] for r, router in routers(dynamic).items()}
    assert shapes == {r: [(2 * r, SIZE["hidden_size"])] for r in range(2, 6)}


@pytest.mark.parametrize(("name", "p"), [("static", 0.5), ("tree-static", 0.9), ("dynamic-raw", 0.7)])
@torch.no_grad()
def test_pruned_routers_keep_the_smallest_set_above_p(name, p, tmp_path):
    model, ids = build(name), tokens()
    before = [w for w in reference(model, ids)[1].routing if w is not None]
    report = model.prune_routers(p=p)
    seen = {}
    for index, layer in enumerate(model.model.layers[1:]):
        layer.self_attn.router.register_forward_hook(lambda _, i, out, index=index: seen.update({index: out}))
    logits = model(input_ids=ids).logits
    # The first routed layer reads what it read before pruning, whatever the kind of router.
    assert_close(seen[0], oracle.top_p(before[0], p), **CLOSE)
    if model.config.memory == "static":
        for index, weights in enumerate(before):
            assert_close(seen[index], oracle.top_p(weights, p), **CLOSE)
        share = sum((w == 0).sum() for w in seen.values()) / sum(w.numel() for w in seen.values())
        assert any(abs(float(value) - float(share)) < 1e-6 for value in report.values() if isinstance(value, float))
    model.save_pretrained(tmp_path)
    again = DepthLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert_close(again(input_ids=ids).logits, logits, **CLOSE)


@pytest.mark.parametrize("name", ["static", "dynamic", "kv"])
def test_second_derivatives_are_refused(name):
    model, ids = build(name), tokens()
    loss = oracle.loss(model(ids).logits, ids)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
