"""Skipping in place: against copies with zeroed weights or deleted blocks, with every kind of cache, and healed."""

import copy
from functools import partial

import pytest
import torch
import transformers as tf
from torch import nn
from torch.testing import assert_close

import tiny_models as tm
from execution import decoders  # noqa: F401  # lists Mistral with a window
from families import zoo
from fulldepth.execution import find_anatomy
from fulldepth.hf import GRANULARITIES, Scalars, Switches, anatomy_candidates, skipping
from fulldepth.hf.caches import CACHE
from refusals import refused

LLAMA_LIKE = ("self_attn.o_proj", "mlp.down_proj")
NEOX_LIKE = ("attention.dense", "mlp.dense_4h_to_h")
OUTPUTS = {
    **dict.fromkeys(["llama", "gemma3", "granite", "mistral-window", "cohere", "olmo2"], LLAMA_LIKE),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "gpt_neox": NEOX_LIKE,
    "opt": ("self_attn.out_proj", "fc2"),
    "falcon": ("self_attention.dense", "mlp.dense_4h_to_h"),
}
"""Model of each design -> the matrices that end its attention and its MLP."""


@torch.no_grad()
def logits_of(model, **inputs):
    return model(**(inputs or tm.inputs(model)), use_cache=False).logits


def zeroed(model, layers, matrix):
    """A copy whose layers' branch gives nothing, for the last matrix is zero."""
    other = copy.deepcopy(model)
    blocks = find_anatomy(other).blocks
    for layer in layers:
        for parameter in blocks[layer - 1].get_submodule(matrix).parameters():
            parameter.data.zero_()
    return other


def without_blocks(model, layers):
    """A copy that lacks whole blocks."""
    other = copy.deepcopy(model)
    blocks, config = find_anatomy(other).blocks, other.config
    types = getattr(config, "layer_types", None)
    for layer in sorted(layers, reverse=True):
        del blocks[layer - 1]
        if types:
            del types[layer - 1]
    if config.model_type != "gpt2":
        config.num_hidden_layers = len(blocks)
    return other


@torch.no_grad()
def test_layers_of_a_hybrid_are_skipped_whatever_their_attention_is_called():
    model = zoo.build("qwen3_next", "causal-lm")  # linear, full, linear attention
    anatomy = find_anatomy(model)
    assert anatomy.family.attention == "linear_attn|self_attn"
    inputs = zoo.inputs(model, seed=1)
    for layers, matrices in (([2], ["self_attn.o_proj"]), ([1, 2], ["linear_attn.out_proj", "self_attn.o_proj"])):
        with skipping(anatomy, layers, "attention"):
            actual = logits_of(model, **inputs)
        other = copy.deepcopy(model)
        for layer, matrix in zip(layers, matrices, strict=True):
            other.model.layers[layer - 1].get_submodule(matrix).weight.zero_()
        assert_close(actual, logits_of(other, **inputs))
        assert not torch.equal(actual, logits_of(model, **inputs))


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_skipped_branch_is_a_zeroed_matrix_and_a_skipped_layer_a_missing_block(name):
    model, stock = tm.build(name), tm.build(name)
    anatomy = find_anatomy(model)
    plain = logits_of(stock)
    for granularity in GRANULARITIES[:3]:
        with Switches(anatomy, granularity) as switches:
            assert torch.equal(logits_of(model), plain)
            for layers in ({1}, {2, 3}, {1, 2, 3}):
                switches.skip(layers)
                assert {layer for layer, _ in switches.skipped} == set(layers)
                if granularity == "layer":
                    expected = logits_of(without_blocks(stock, layers))
                else:
                    expected = logits_of(zeroed(stock, layers, OUTPUTS[name][granularity == "mlp"]))
                assert torch.equal(logits_of(model), expected)
                assert not torch.equal(expected, plain)
            switches.skip(())
            assert torch.equal(logits_of(model), plain)


def rollout(model, ids, steps):
    """Greedy tokens without any cache, and the logits that chose them."""
    chosen = []
    for _ in range(steps):
        chosen.append(logits_of(model, input_ids=ids)[:, -1])
        ids = torch.cat([ids, chosen[-1].argmax(-1, keepdim=True)], dim=1)
    return ids, torch.stack(chosen, 1)


@torch.no_grad()
def manual(model, ids, steps, cache=None):
    """The same in a loop of one's own over a cache, token by token."""
    past, chosen, step = cache, [], ids
    for _ in range(steps):
        out = model(input_ids=step, **{CACHE: past}, use_cache=True)
        past = out[CACHE]
        chosen.append(out.logits[:, -1])
        step = chosen[-1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, step], dim=1)
    return ids, torch.stack(chosen, 1)


def generated(model, ids, steps, **options):
    out = model.generate(
        input_ids=ids,
        attention_mask=options.pop("attention_mask", torch.ones_like(ids)),
        max_new_tokens=steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits, 1)


def endless(model):
    """Generation of these models ends by length alone."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def check_decoding(model):
    """All ways of decoding agree on tokens and logits."""
    ids = tm.token_ids(2, 5, seed=3)
    steps = 6
    tokens, logits = rollout(model, ids, steps)
    for got_tokens, got_logits in (manual(model, ids, steps), generated(model, ids, steps)):
        assert torch.equal(got_tokens, tokens)
        assert_close(got_logits, logits, atol=1e-4, rtol=0)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    padded[1, :] = torch.cat([padded[1, 3:], padded[1, 3:6]])  # a longer neighbour
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    got_tokens, got_logits = generated(model, padded, steps, attention_mask=mask)
    assert torch.equal(got_tokens[0, 3:], tokens[0])
    assert_close(got_logits[0], logits[0], atol=1e-4, rtol=0)
    longer, longer_logits = rollout(model, padded[1:], steps)
    assert torch.equal(got_tokens[1:], longer)
    assert_close(got_logits[1:], longer_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "granularity", "scaled"),
    [
        *((name, "attention", False) for name in OUTPUTS),
        *(("llama", "layer", True), ("gemma3", "attention", True), ("gpt2", "mlp", True)),
    ],
)
def test_every_way_of_decoding_agrees_whatever_is_skipped(name, granularity, scaled):
    model, scalars = endless(tm.build(name)), Scalars(3, {1, 3}, granularity)
    for factor in scalars.parameters():
        factor.data.uniform_(0.6, 1.4)
    with skipping(find_anatomy(model), {1, 3}, granularity, scalars if scaled else None):
        check_decoding(model)


@pytest.mark.parametrize(("name", "layers"), [("llama", {1, 2, 3}), ("gemma3", {1}), ("mistral-window", {1, 2, 3})])
def test_beams_static_caches_and_rollbacks_agree(name, layers):
    model = endless(tm.build(name))
    ids = tm.token_ids(1, 5, seed=4)
    with skipping(find_anatomy(model), layers):
        tokens, logits = rollout(model, ids, 6)
        assert torch.equal(generated(model, ids, 6, use_cache=False)[0], tokens)
        static = generated(model, ids, 6, cache_implementation="static")
        assert torch.equal(static[0], tokens)
        assert_close(static[1], logits, atol=1e-4, rtol=0)
        made = tf.StaticCache(config=model.config, max_cache_len=16)
        made.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
        assert torch.equal(manual(model, ids, 6, cache=made)[0], tokens)
        beams = [
            model.generate(input_ids=ids, num_beams=3, max_new_tokens=6, do_sample=False, use_cache=use_cache)
            for use_cache in (True, False)
        ]
        assert torch.equal(*beams)
        looked_up = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=2)
        assert torch.equal(looked_up, tokens)


def anatomy_of_modules(model):
    """Everything that surgery could leave behind: attributes, hooks and children of every module."""
    tables = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            nested = {k: id(v) for k, v in value.items()} if isinstance(value, dict) else None
            tables[name, key] = (id(value), nested)
    return tables


@pytest.mark.parametrize(("name", "granularity"), [("llama", "attention"), ("gpt_neox", "any"), ("gemma3", "layer")])
def test_the_model_is_healed_also_after_errors(name, granularity):
    model = tm.build(name).train()
    anatomy, before, logits, random = (
        find_anatomy(model),
        anatomy_of_modules(model),
        logits_of(model),
        torch.get_rng_state(),
    )

    def fail(switches):
        with switches:
            switches.skip([1, 3])
            switches.scalars = Scalars(3, [1, 3], granularity)
            logits_of(model)
            raise RuntimeError("broken layer")

    switches = Switches(anatomy, granularity)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken layer"):
            fail(switches)
        assert (switches.skipped, switches.scalars) == (frozenset(), None)
        assert anatomy_of_modules(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(logits_of(model), logits)


def test_one_surgery_at_a_time(tmp_path):
    model = tm.build("llama")
    switches, others = Switches(find_anatomy(model)), Switches(find_anatomy(model), "mlp")
    with refused(r"inside their `with`"):
        switches.skip([1])
    with refused(r"inside their `with`"):
        switches.scalars = Scalars(3)
    with switches:
        with refused("already in use"), switches:
            pass
        with refused("switched by other switches"), others:
            pass
        model.save_pretrained(tmp_path / "plain")
        switches.skip([2])
        assert torch.equal(logits_of(model), logits_of(zeroed(tm.build("llama"), [2], OUTPUTS["llama"][0])))
        with refused("would write the plain model"):
            model.save_pretrained(tmp_path / "skipped")
        for layers in ([0], [1, 7], [1.5], [True], "12", 3.5):
            with refused("1 to 3"):
                switches.skip(layers)
            assert switches.skipped == {(2, "attention")}
    with others:
        others.skip([2])
    reloaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits_of(reloaded), logits_of(model))
    assert not (tmp_path / "skipped").exists()


def compiled(model):
    model.model.layers[0].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        *(
            (lambda name=name: tm.build(name), "cannot skip blocks: .*an encoder")
            for name in ("bert", "vit", "clip-text", "detr")
        ),
        (
            lambda: zoo.build("opt", "causal-lm", do_layer_norm_before=False),
            "norms follow|not read the stream|are not known",
        ),
        (
            lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**tm.GPT2, add_cross_attention=True)),
            "cannot skip blocks: .*also reads an encoder",
        ),
        (lambda: compiled(tm.build("llama")), "compiled"),
    ],
)
def test_models_that_cannot_skip_are_refused_with_the_reason(model, reason):
    for anatomy in anatomy_candidates(model()):
        with refused(reason), Switches(anatomy):
            pass


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("depth_llama-tree", "a tree"),
        ("depth_llama-hyper", "several residual streams"),
        *((f"depth_llama-{kind}", "a memory|a tree") for kind in ("static", "dynamic", "kv")),
    ],
)
def test_where_layers_read_more_than_the_one_before_a_skipped_layer_has_two_zeroed_matrices(name, reason):
    model, stock = endless(tm.build(name)), tm.build(name)
    anatomy, before = find_anatomy(model), anatomy_of_modules(model)
    for granularity in GRANULARITIES[:3]:
        matrices = {"attention": LLAMA_LIKE[:1], "mlp": LLAMA_LIKE[1:], "layer": LLAMA_LIKE}[granularity]
        for layers in ({1}, {2, 3}):
            expected = stock
            for matrix in matrices:
                expected = zeroed(expected, layers, matrix)
            with skipping(anatomy, layers, granularity) as switches:
                assert torch.equal(logits_of(model), logits_of(expected))
                with refused(f"takes no scalars: .*({reason})"):
                    switches.scalars = Scalars(3, layers, granularity)
    with skipping(anatomy, {1, 3}):
        check_decoding(model)
    assert anatomy_of_modules(model) == before
    assert torch.equal(logits_of(model), logits_of(stock))


class MlpOnly(nn.Module):
    """A block without attention, as hybrids have them."""

    def __init__(self, block):
        super().__init__()
        self.post_attention_layernorm, self.mlp = block.post_attention_layernorm, block.mlp

    def forward(self, hidden_states, **_):
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def test_layers_may_differ():
    model, stock = tm.build("llama"), tm.build("llama")
    for each in (model, stock):
        each.model.layers[0] = MlpOnly(each.model.layers[0])
    anatomy = find_anatomy(model)
    with Switches(anatomy) as switches:
        with refused("Layer 1 has no attention to skip"):
            switches.skip([1, 2])
        with refused("Scalars need the attention of every layer; only layers 2, 3 have one"):
            switches.scalars = Scalars(3)
        switches.skip([3])
        assert torch.equal(logits_of(model), logits_of(zeroed(stock, [3], OUTPUTS["llama"][0])))
    with skipping(anatomy, [1, 2], "mlp"):
        assert torch.equal(logits_of(model), logits_of(zeroed(stock, [1, 2], OUTPUTS["llama"][1])))
    with skipping(anatomy, [1], "layer"):
        assert torch.equal(logits_of(model), logits_of(without_blocks(stock, [1])))
    model.model.layers[2] = model.model.layers[1]
    with refused("its layers share modules"):
        Switches(anatomy)


@pytest.mark.thorough
def test_a_model_compiled_as_a_whole_notices_every_switch():
    model, scalars = tm.build("llama"), Scalars(3, [1])
    run = partial(logits_of, torch.compile(model, backend="eager"), **tm.inputs(model))
    plain = logits_of(model)
    assert torch.equal(run(), plain)
    with Switches(find_anatomy(model)) as switches:
        for layers in ([2], [1]):
            switches.skip(layers)
            assert torch.equal(run(), logits_of(model))
        switches.scalars = scalars
        for number in (1.0, 0.5):
            scalars.get(2)["s_att"].data.fill_(number)
            assert_close(run(), logits_of(model))
    assert torch.equal(run(), plain)
