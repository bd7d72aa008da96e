"""Quantisation and removal: weights rounded by hand in float64, stock models, bytes counted."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors import safe_open
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from families import zoo
from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.errors import FulldepthError
from fulldepth.execution.memory import parameter_bytes
from fulldepth.hf import anatomy_candidates
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import skipping
from fulldepth.results import COLUMNS, Finding, Results
from fulldepth.skip.assessment import int8 as int8_module
from fulldepth.skip.assessment.compared import HeldoutLosses
from fulldepth.skip.assessment.int8 import folded_int8, int8
from fulldepth.skip.assessment.quantise import FIRST, ORIGINAL, SECOND, order, quantise, removed_bytes
from fulldepth.skip.exports.export import export, load
from fulldepth.skip.plan import Plan
from fulldepth.skip.selection.search import search
from skip import plain, planned
from skip.word_tokenizer import tokenizer
from tiny_models import LAYERS, build

pytest.importorskip("torchao", reason="needs torchao (the extra `quantise`)")
EXAMPLES = plain.examples(8, 10)
TIMES = {"contexts": [12], "max_new_tokens": 2, "repeats": 2}
CORNERS = ["original", "skipped", "quantised", "quantised, then skipped", "skipped, then quantised"]


def means(table):
    """The rows of mean losses, by model."""
    return table[(table.measure == "loss") & (table.statistic == "mean")].set_index("model")


@torch.no_grad()
def rounded(model):
    """A float64 copy, each output channel of each matrix in the blocks `s round(w / s)`, 256 steps from -128 to 127.

    Halves go where the packed model has them: the largest weight of a row is 127.5 s, a tie in exact arithmetic.
    """
    packed, model = quantised(model), copy.deepcopy(model).double()
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


def quantised(model):
    return int8(anatomy_candidates(model)[0]).model


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3"])
def test_the_loss_is_that_of_weights_rounded_by_hand(family) -> None:
    model = build(family)
    made = quantised(model)
    own, expected = (plain.loss(one, EXAMPLES.heldout, (), "attention") for one in (made, rounded(model)))
    plainly = plain.loss(model, EXAMPLES.heldout, (), "attention")
    assert own == pytest.approx(expected, rel=2e-6)
    assert abs(plainly - expected) > 3e-6 * expected  # what rounding does is more
    embeddings = made.get_input_embeddings().weight
    assert torch.equal(embeddings, model.get_input_embeddings().weight)


def test_the_model_that_is_given_stays_as_it_is() -> None:
    model = build("gpt2")
    ids = torch.arange(3, 13)[None]
    before, logits = copy.deepcopy(model.state_dict()), model(input_ids=ids).logits
    kinds = [type(module) for module in model.modules()]
    quantised(model)
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(input_ids=ids).logits, logits)


@pytest.mark.parametrize(
    ("family", "blocks"), [("llama", (1,)), ("gpt2", (2, 3)), ("gpt_neox", (1, 2, 3)), ("gemma3", (2, 3))]
)
def test_a_quantised_model_skips_and_decodes_with_a_cache(family, blocks) -> None:
    model = build(family)
    plan = planned.plan(model, blocks)
    made = int8(anatomy_candidates(model)[0])
    expected = planned.scaled(rounded(model), plan)
    ids = torch.arange(3, 15).view(2, 6)
    scalars = Scalars.from_dict(plan.scalars, LAYERS)
    with torch.no_grad(), skipping(made, blocks, scalars=scalars):
        assert all(p.dtype == torch.float32 for p in scalars.parameters())
        steps, cache = [], None
        for token in ids.split(1, dim=1):
            output = made.model(input_ids=token, past_key_values=cache, use_cache=True)
            steps.append(output.logits)
            cache = output.past_key_values
        whole = made.model(input_ids=ids).logits
        told = made.model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
        plainly = ids
        for _ in range(4):
            plainly = torch.cat([plainly, made.model(input_ids=plainly).logits[:, -1:].argmax(-1)], dim=1)
        oracle = expected(input_ids=ids).logits
    scale = oracle.abs().max()
    assert (torch.cat(steps, dim=1) - whole).abs().max() < 1e-4 * scale
    assert torch.equal(told, plainly)
    assert (whole - oracle).abs().max() < 1e-4 * scale


def fragile(layer: int) -> tf.PreTrainedModel:
    """A model whose attention of one layer has a weight in every row that nothing reaches, far larger than all others:
    in int8 the others are 0."""
    model = build("llama")
    attention = planned.layers(model)[layer - 1].self_attn
    with torch.no_grad():
        attention.v_proj.weight[0] = 0  # the first channel of the first value head, read by two query heads
        attention.o_proj.weight[:, [0, 8]] = 1e4
    return model


def own_words(model, count: int) -> Examples:
    """Sequences that the model itself finds likely, so that everything it has is worth something."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 96, (count, 1), generator=generator)
    with torch.no_grad():
        for _ in range(40):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    made = [Example(row, row.clone().index_fill_(0, torch.tensor([0]), -100), n) for n, row in enumerate(ids)]
    return Examples(made[::2], made[1::2], {"hash": "sha256:" + "2" * 64, "name": "own words", "kind": "text"})


def test_the_order_matters_where_quantisation_changes_what_blocks_are_worth(tmp_path) -> None:
    """int8 takes all from one attention, so it goes first, and for nothing; the original loses another."""
    dear = 2
    model = fragile(dear)
    examples = own_words(model, 24)
    plan = search(model, examples, 1, search="exact", fit=False)
    assert plan.blocks != [dear]
    results = quantise(model, plan, examples, output=tmp_path / "out", **TIMES)
    rows = means(results.table)
    coarse = rounded(model)
    expected = {
        "original": plain.loss(model, examples.heldout, (), "attention"),
        "skipped": plain.loss(model, examples.heldout, plan.blocks, "attention"),
        "quantised": plain.loss(coarse, examples.heldout, (), "attention"),
        "quantised, then skipped": plain.loss(coarse, examples.heldout, (dear,), "attention"),
        "skipped, then quantised": plain.loss(coarse, examples.heldout, plan.blocks, "attention"),
    }
    assert rows.value.to_dict() == pytest.approx(expected, rel=1e-3)
    assert rows.value["quantised, then skipped"] == pytest.approx(rows.value["quantised"], rel=1e-6)
    assert expected["skipped, then quantised"] - expected["quantised, then skipped"] > 5e-4
    plans = {name: found["blocks"] for name, found in results.meta["plans"].items()}
    assert plans == {"skipped": plan.blocks, "quantised, then skipped": [dear]}
    assert "Quantising first is better" in results.headline["order"]["sentence"]
    assert Plan.load(tmp_path / "out" / "quantised").blocks == [dear]


def test_one_table_with_every_corner(tmp_path) -> None:
    model = build("gpt2")
    plan = planned.plan(model, (2,), data=EXAMPLES.meta)
    before = copy.deepcopy(model.state_dict())
    results = quantise(model, plan, EXAMPLES, output=tmp_path / "out", epochs=2, **TIMES)
    table = results.table
    assert list(table.columns) == [*COLUMNS, "model", "batch", "context"]
    assert list(table.model.unique()) == CORNERS
    loss = means(table).value
    healed = [planned.scaled(one, plan) for one in (model, rounded(model))]
    assert loss["skipped"] == pytest.approx(plain.loss(healed[0], EXAMPLES.heldout, (), "attention"), rel=1e-5)
    assert loss["skipped, then quantised"] == pytest.approx(
        plain.loss(healed[1], EXAMPLES.heldout, (), "attention"), rel=1e-3
    )
    second = results.meta["plans"]["quantised, then skipped"]
    assert loss["quantised, then skipped"] == pytest.approx(second["healed_loss"], rel=1e-6)
    assert second["model"]["hash"] != plan.model.hash
    assert len(second["blocks"]) == 1
    times = table[table.measure.isin(["prefill_time", "decode_time"])]
    assert (times.value > 0).all()
    assert set(times["count"]) == {2}
    assert len(times) == 2 * len(CORNERS)
    assert set(results.headline) - {"times"} == {"order", *CORNERS[1:]}  # the machine may be busy
    assert [entry["label"] for entry in results.meta["models"]] == CORNERS
    assert any("healed loss" in line for line in results.meta["warnings"])  # the plan's was made up
    assert Results.load(tmp_path / "out").meta["method"] == "int8"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_counted(tied) -> None:
    config = {"vocab_size": 19, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**config, **heads, tie_word_embeddings=tied)).eval()
    plan = planned.plan(model, (2,), data=EXAMPLES.meta)
    table = quantise(model, plan, EXAMPLES, fit=False, **TIMES).table
    found = table[table.measure == "parameter_bytes"].set_index("model").value.to_dict()
    attention, mlp, norms = 32 * (32 + 16 + 16 + 32), 3 * 32 * 48, 2 * 3 + 1
    words, rows, scalars = (1 if tied else 2) * 19 * 32, (32 + 16 + 16 + 32, 48 + 48 + 32), 2 * 4 + 2
    whole = 4 * (words + 3 * (attention + mlp) + 32 * norms)
    packed = 4 * (words + 32 * norms) + 3 * (attention + mlp + 4 * sum(rows))
    removed = {"float": 4 * (attention + 32), "int8": attention + 4 * rows[0] + 4 * 32}
    extra = removed_bytes(int8(anatomy_candidates(model)[0]), plan) - removed["int8"]  # zero points, kept per row
    assert extra in (0, rows[0])
    packed += 3 * (sum(rows) if extra else 0)
    assert found == {
        "original": whole,
        "skipped": whole - removed["float"] + 4 * scalars,
        "quantised": packed,
        "quantised, then skipped": packed - removed["int8"] - extra,
        "skipped, then quantised": packed - removed["int8"] - extra + 4 * scalars,
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2"])
def test_what_is_removed_is_what_the_fast_format_leaves_out(family, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fulldepth.skip.exports.export.prove", lambda *_: 0.0)
    model = build(family)
    plan = planned.plan(model, (1, 3), values=None)
    export(plan, model, "fast", tmp_path / "fast")
    left = parameter_bytes(model) - removed_bytes(anatomy_candidates(model)[0], plan)
    assert left == parameter_bytes(load(tmp_path / "fast"))


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("llama", {"contexts": [60], "max_new_tokens": 5}, "64 positions"),
        ("llama", {"seed": 1}, "another LlamaForCausalLM"),
        ("llama", {"output": "results"}, "results.json"),
        ("llama", {"save": "results"}, "exists already"),
        ("gpt2", {"save": "kept"}, "GPT2LMHeadModel"),
        ("llama", {"packages": None}, "torchao"),
        ("llama", {"processes": "2"}, "torchrun"),
    ],
)
def test_what_is_refused_before_the_work(family, options, named, tmp_path, monkeypatch) -> None:
    def work(*args, **kwargs):
        raise AssertionError("began to work")

    monkeypatch.setattr("fulldepth.skip.assessment.quantise.prepared", work)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "results.json").write_text("{}")
    plan = planned.plan(build(family), (2,), data=EXAMPLES.meta)
    places = {name: tmp_path / options[name] for name in ("output", "save") if name in options}
    if "packages" in options:
        monkeypatch.setattr(int8_module, "find_spec", lambda name: None)
    monkeypatch.setitem(os.environ, "WORLD_SIZE", options.get("processes", "1"))
    given = {name: options[name] for name in ("contexts", "max_new_tokens") if name in options}
    with pytest.raises(FulldepthError, match=named):
        quantise(build(family, seed=options.get("seed", 0)), plan, EXAMPLES, **{**TIMES, **given}, **places)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(("family", "named"), [("falcon", "FalconLinear"), ("mixtral", "MixtralForCausalLM")])
def test_layers_that_torchao_cannot_pack_are_refused(family, named) -> None:
    model = zoo.build("mixtral", "causal-lm") if family == "mixtral" else build(family)
    with pytest.raises(FulldepthError, match=named):
        int8(anatomy_candidates(model)[0])


def stock_logits(folder, ids):
    """[B, T, V] logits of a checkpoint as transformers alone loads it."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.double()


@pytest.mark.parametrize(("family", "healed"), [("llama", False), ("gemma3", True), ("gpt_neox", True)])
def test_scalars_go_into_packed_weights(family, healed) -> None:
    """Where a branch ends in a matrix (Llama, NeoX, whose layers are parallel) and in a norm (Gemma)."""
    model = build(family)
    original = anatomy_candidates(model)[0]
    measured = int8(original)
    plan = planned.plan(model, (2,), values="fitted" if healed else None)
    ids = torch.arange(3, 15).view(2, 6)
    before = [value.clone() for value in measured.model.parameters()]
    made = folded_int8(measured, original, plan, ids).model
    with torch.no_grad():
        expected = planned.scaled(rounded(model), plan)(input_ids=ids).logits
        assert (made(input_ids=ids).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    kept = zip(before, measured.model.parameters(), strict=True)
    assert all(torch.equal(dense(old), dense(now)) for old, now in kept)


def dense(weight):
    return weight.dequantize() if hasattr(weight, "dequantize") and hasattr(weight, "qdata") else weight


@pytest.mark.slow
def test_what_is_saved_is_what_was_measured(tmp_path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    plan = planned.plan(model, (2,), data=EXAMPLES.meta)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    results = quantise(loaded, plan, EXAMPLES, output=tmp_path / "out", save=tmp_path / "kept", epochs=2, **TIMES)
    assert [one["model"] for one in results.meta["saved"]] == [CORNERS[2], CORNERS[4], CORNERS[3]]
    second = Plan.load(tmp_path / "out" / "quantised")
    ids = torch.arange(3, 15).view(2, 6)
    coarse, folders = rounded(model), [Path(one["path"]) for one in results.meta["saved"]]
    oracles = [coarse, planned.scaled(coarse, plan), planned.scaled(coarse, second)]
    for folder, oracle, saved in zip(folders, oracles, results.meta["saved"], strict=True):
        with torch.no_grad():
            expected = oracle(input_ids=ids).logits
        found = stock_logits(folder, ids)
        assert (found - expected).abs().max() < 2e-4 * expected.abs().max()
        assert 0 <= saved["logit_error"] < 2e-4
        assert saved["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
        assert AutoTokenizer.from_pretrained(folder)("w3 w4").input_ids == tokenizer()("w3 w4").input_ids
        with safe_open(folder / "model.safetensors", "pt") as file:
            kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert "I8" in kinds
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {path.name for path in folders}
    unlike = stock_logits(folders[0], ids) - stock_logits(folders[1], ids)
    assert unlike.abs().max() > 1e-3
    table = means(results.table).value
    again = AutoModelForCausalLM.from_pretrained(folders[1]).eval()
    assert plain.loss(again, EXAMPLES.heldout, (), "attention") == pytest.approx(table[CORNERS[4]], rel=1e-4)


def verdict(gap: np.ndarray, tokens: np.ndarray, documents: np.ndarray) -> Finding:
    """Of two orders whose summed losses differ by `gap` in each sequence."""
    plan: Any = SimpleNamespace(blocks=[2])
    sums = {ORIGINAL: 2.0 * tokens, FIRST: 3.0 * tokens + gap, SECOND: 3.0 * tokens}
    return order(HeldoutLosses(sums, tokens, documents), plan, plan)


def drawn(documents: int, truth: float, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows, 4 to 16 a document, whose difference has an intraclass correlation of 0.5."""
    owner = np.repeat(np.arange(documents), generator.integers(4, 17, documents))
    tokens = generator.integers(60, 129, len(owner)).astype(float)
    noise = generator.normal(size=documents)[owner] + generator.normal(size=len(owner))
    return tokens * (truth + 0.1 * noise), tokens, owner


@pytest.mark.parametrize("documents", [5, 20])
def test_equal_orders_are_not_told_apart(documents) -> None:
    generator, draws = np.random.default_rng(0), 1000
    found = [verdict(*drawn(documents, 0.0, generator)) for _ in range(draws)]
    better = sum("is better" in str(one.sentence) for one in found)
    assert stats.binom.sf(better - 1, draws, 0.06) > 0.001
    assert sum(abs(one.value or 0) > 0.01 for one in found) > 0.6 * draws


def test_a_difference_is_found_with_the_error_of_its_formula() -> None:
    gap, tokens, documents = drawn(20, 0.2, np.random.default_rng(1))
    found = verdict(gap, tokens, documents)
    rate, squares = sum(gap) / sum(tokens), 0.0
    for owner in set(documents.tolist()):
        at = np.flatnonzero(documents == owner)
        squares += sum(gap[i] - rate * tokens[i] for i in at) ** 2
    assert found.value == pytest.approx(rate)
    assert found.standard_error == pytest.approx((20 / 19 * squares) ** 0.5 / sum(tokens))
    assert f"Quantising last is better by {rate:.4f} nats ± {found.standard_error:.4f}" in str(found.sentence)
    order = np.random.default_rng(2).permutation(len(gap))
    again = verdict(gap[order], tokens[order], 9**17 - 7 * documents[order])
    assert (again.value, again.standard_error) == pytest.approx((found.value, found.standard_error))


def test_two_documents_give_no_verdict() -> None:
    found = verdict(*drawn(2, 5.0, np.random.default_rng(1)))
    assert "is better" not in str(found.sentence)
    assert (found.standard_error, found.no_standard_error) == (None, "too few documents")
