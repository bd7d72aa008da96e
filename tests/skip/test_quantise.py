"""Quantisation and removal: weights rounded by hand in float64, stock models, bytes counted."""

from __future__ import annotations

import copy
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
from transformers.pytorch_utils import Conv1D

from families import zoo
from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.errors import FulldepthError
from fulldepth.execution.memory import parameter_bytes
from fulldepth.hf import anatomy_candidates
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import skipping
from fulldepth.results import COLUMNS, Results
from fulldepth.skip.compared import HeldoutLosses
from fulldepth.skip.exports.export import export, load
from fulldepth.skip.plan import Plan
from fulldepth.skip.quantise import FIRST, ORIGINAL, SECOND, int8, left_bytes, order, quantise
from fulldepth.skip.search import search
from skip import plain, planned
from tiny_models import LAYERS, build

quantising = sys.modules["fulldepth.skip.quantise"]
pytest.importorskip("torchao", reason="needs torchao (the extra `quantise`)")
EXAMPLES = plain.examples(8, 10)
TIMES = {"contexts": [12], "max_new_tokens": 2, "repeats": 2}
CORNERS = ["original", "skipped", "quantised", FIRST, SECOND]
IDS = torch.arange(3, 15).view(2, 6)


def int8_of(model):
    return int8(anatomy_candidates(model)[0])


def loss(model, blocks=(), examples=EXAMPLES):
    return plain.loss(model, examples.heldout, blocks, "attention")


def means(table):
    """The mean losses by model."""
    return table[(table.measure == "loss") & (table.statistic == "mean")].set_index("model").value.to_dict()


@torch.no_grad()
def rounded(model):
    """A float64 copy, each output channel of each matrix in the blocks `s round(w / s)`, 256 steps from -128 to 127.

    Halves go where the packed model has them: the largest weight of a row is 127.5 s, a tie in exact arithmetic.
    """
    packed, model = int8_of(model).model, copy.deepcopy(model).double()
    for ours, block in zip(planned.layers(packed), planned.layers(model), strict=True):
        for name, module in block.named_modules():
            if isinstance(module, torch.nn.Linear | Conv1D):
                linear = isinstance(module, torch.nn.Linear)
                step = (module.weight.abs().amax(1 if linear else 0, keepdim=True) / 127.5).clamp(min=1e-30)
                scaled, held = module.weight / step, ours.get_submodule(name).weight.dequantize().double()
                held = ((held if linear else held.T) / step).round()
                whole, half = scaled.round().clamp(-128, 127), ((scaled - scaled.floor()) - 0.5).abs() < 1e-4
                assert ((held == whole) | half).all()
                assert (held - whole).abs().max() <= 1
                module.weight.copy_(step * held.where(half, whole))
    return model


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_the_loss_is_that_of_weights_rounded_by_hand_and_the_given_model_stays_as_it_is(family) -> None:
    model = build(family)
    before, kinds = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    made, expected = int8_of(model).model, loss(rounded(model))
    assert loss(made) == pytest.approx(expected, rel=2e-6)
    assert abs(loss(model) - expected) > 3e-6 * expected  # what rounding does is more
    assert torch.equal(made.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("family", "blocks"), [("llama", (1,)), ("gpt2", (2, 3)), ("gpt_neox", (1, 2, 3))])
@torch.no_grad()
def test_a_quantised_model_skips_and_decodes_with_a_cache(family, blocks) -> None:
    model = build(family)
    plan, made = planned.plan(model, blocks), int8_of(model)
    oracle = planned.scaled(rounded(model), plan)(input_ids=IDS).logits
    with skipping(made, blocks, scalars=Scalars.from_dict(plan.scalars, LAYERS)):
        steps, cache = [], None
        for token in IDS.split(1, dim=1):
            output = made.model(input_ids=token, past_key_values=cache, use_cache=True)
            steps.append(output.logits)
            cache = output.past_key_values
        whole = made.model(input_ids=IDS).logits
    assert (torch.cat(steps, dim=1) - whole).abs().max() < 1e-4 * oracle.abs().max()
    assert (whole - oracle).abs().max() < 1e-4 * oracle.abs().max()


def test_the_order_matters_where_quantisation_changes_what_blocks_are_worth(tmp_path) -> None:
    """The attention of one layer has a weight in every row that nothing reaches, far larger than all others.

    In int8 the others are 0, so it goes first, and for nothing; the original loses another layer.
    """
    dear, model, generator = 2, build("llama"), torch.Generator().manual_seed(0)
    attention = planned.layers(model)[dear - 1].self_attn
    ids = torch.randint(3, 96, (24, 1), generator=generator)
    with torch.no_grad():
        attention.v_proj.weight[0] = 0  # the first channel of the first value head, read by two query heads
        attention.o_proj.weight[:, [0, 8]] = 1e4
        for _ in range(40):  # sequences that the model itself finds likely, so that all it has is worth something
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    made = [Example(row, row.clone().index_fill_(0, torch.tensor([0]), -100), n) for n, row in enumerate(ids)]
    examples = Examples(made[::2], made[1::2], {"hash": "sha256:" + "2" * 64, "name": "own words", "kind": "text"})
    plan = search(model, examples, 1, search="exact", fit=False)
    assert plan.blocks != [dear]
    results, coarse = quantise(model, plan, examples, output=tmp_path / "out", **TIMES), rounded(model)
    found, expected = (
        means(results.table),
        {
            ORIGINAL: loss(model, (), examples),
            "skipped": loss(model, plan.blocks, examples),
            "quantised": loss(coarse, (), examples),
            FIRST: loss(coarse, (dear,), examples),
            SECOND: loss(coarse, plan.blocks, examples),
        },
    )
    assert found == pytest.approx(expected, rel=1e-3)
    assert found[FIRST] == pytest.approx(found["quantised"], rel=1e-6)
    assert expected[SECOND] - expected[FIRST] > 5e-4
    plans = {name: found["blocks"] for name, found in results.meta["plans"].items()}
    assert plans == {"skipped": plan.blocks, FIRST: [dear]}
    assert "Quantising first is better" in results.headline["order"]["sentence"]
    assert Plan.load(tmp_path / "out" / "quantised").blocks == [dear]


def test_one_table_with_every_corner(tmp_path) -> None:
    model = build("gpt2").train()
    plan, before = planned.plan(model, (2,), data=EXAMPLES.meta), copy.deepcopy(model.state_dict())
    results = quantise(model, plan, EXAMPLES, output=tmp_path / "out", epochs=2, **TIMES)
    table, found, second = results.table, means(results.table), results.meta["plans"][FIRST]
    assert list(table.columns) == [*COLUMNS, "model", "batch", "context"]
    assert list(table.model.unique()) == [entry["label"] for entry in results.meta["models"]] == CORNERS
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    healed = {
        name: loss(planned.scaled(one.eval(), plan)) for name, one in (("skipped", model), (SECOND, rounded(model)))
    }
    assert {name: found[name] for name in healed} == pytest.approx(healed, rel=1e-3)
    assert found[FIRST] == pytest.approx(second["healed_loss"], rel=1e-6)
    assert second["model"]["hash"] != plan.model.hash
    times = table[table.measure.isin(["prefill_time", "decode_time"])]
    assert (times.value > 0).all()
    assert (set(times["count"]), len(times)) == ({2}, 2 * len(CORNERS))
    assert set(results.headline) - {"times"} == {"order", *CORNERS[1:]}  # the machine may be busy
    assert any("healed loss" in line for line in results.meta["warnings"])  # the plan's was made up
    assert Results.load(tmp_path / "out").meta["method"] == "int8"


def test_bytes_are_counted() -> None:
    config = {"vocab_size": 19, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**config, **heads, tie_word_embeddings=True)).eval()
    table = quantise(model, planned.plan(model, (2,), data=EXAMPLES.meta), EXAMPLES, fit=False, **TIMES).table
    found = table[table.measure == "parameter_bytes"].set_index("model").value
    attention, mlp, kept = 32 * (32 + 16 + 16 + 32), 3 * 32 * 48, 4 * (19 * 32 + 32 * (2 * 3 + 1))  # kept: in float32
    rows, scalars = (32 + 16 + 16 + 32, 48 + 48 + 32), 4 * (2 * 4 + 2)
    assert found["original"] == kept + 4 * 3 * (attention + mlp)
    assert found["original"] - found["skipped"] == 4 * (attention + 32) - scalars
    packed = kept + 3 * (attention + mlp + 4 * sum(rows))
    zeros = found["quantised"] - packed  # a byte a row, in versions of torchao that keep zero points
    assert zeros in (0, 3 * sum(rows))
    removed = attention + (5 if zeros else 4) * rows[0] + 4 * 32
    assert found["quantised"] - found[FIRST] == removed
    assert found["quantised"] - found[SECOND] == removed - scalars


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2"])
def test_what_is_removed_is_what_the_fast_format_leaves_out(family, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fulldepth.skip.exports.export.prove", lambda *_: 0.0)
    model = build(family)
    plan = planned.plan(model, (1, 3), values=None)
    export(plan, model, "fast", tmp_path / "fast")
    assert left_bytes(anatomy_candidates(model)[0], plan) == parameter_bytes(load(tmp_path / "fast"))


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("llama", {"contexts": [60], "max_new_tokens": 5}, "64 positions"),
        ("llama", {"seed": 1}, "another LlamaForCausalLM"),
        ("llama", {"output": "results"}, "results.json"),
        ("llama", {"packages": None}, "torchao"),
        ("llama", {"processes": "2"}, "torchrun"),
    ],
)
def test_what_is_refused_before_the_work(family, options, named, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(quantising, "prepared", lambda *_, **__: pytest.fail("began to work"))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "results.json").write_text("{}")
    plan = planned.plan(build(family), (2,), data=EXAMPLES.meta)
    places = {name: tmp_path / options[name] for name in ("output",) if name in options}
    if "packages" in options:
        monkeypatch.setattr(quantising, "find_spec", lambda name: None)
    monkeypatch.setitem(os.environ, "WORLD_SIZE", options.get("processes", "1"))
    given = {name: options[name] for name in ("contexts", "max_new_tokens") if name in options}
    with pytest.raises(FulldepthError, match=named):
        quantise(build(family, seed=options.get("seed", 0)), plan, EXAMPLES, **{**TIMES, **given}, **places)


@pytest.mark.parametrize(("family", "named"), [("falcon", "FalconLinear"), ("mixtral", "MixtralForCausalLM")])
def test_layers_that_torchao_cannot_pack_are_refused(family, named) -> None:
    with pytest.raises(FulldepthError, match=named):
        int8_of(zoo.build(family, "causal-lm"))


@pytest.mark.parametrize(("shift", "documents"), [(0.2, 20), (-0.2, 20), (0.0, 20), (0.2, 2)])
def test_an_order_is_better_by_more_than_the_error_over_documents_only(shift, documents) -> None:
    noise, plan, tokens = np.random.default_rng(1).normal(size=20), SimpleNamespace(blocks=[2]), np.full(20, 100.0)
    gap = tokens * (shift + 0.01 * (noise - noise.mean()))
    sums = {ORIGINAL: 2 * tokens, FIRST: 3 * tokens + gap, SECOND: 3 * tokens}
    found = order(HeldoutLosses(sums, tokens, np.arange(20) % documents), plan, plan)  # type: ignore[arg-type]
    assert found.value == pytest.approx(shift, abs=1e-9)
    better = ("Quantising last is better" in found.sentence, "Quantising first is better" in found.sentence)
    assert better == (shift > 0 and documents > 2, shift < 0)
    assert (found.no_standard_error == "too few documents") == (documents == 2)
