"""Every site against the model taken apart by hand: a block's own submodules, called in the order of its source."""

import inspect
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.execution import SITES, body_inputs, capture, verify
from fulldepth.hf import anatomy_candidates

BLOCKS = {
    "llama": "model.layers",
    "llama-classifier": "model.layers",
    "mistral": "model.layers",
    "qwen2": "model.layers",
    "qwen3": "model.layers",
    "gemma2": "model.layers",
    "gemma3": "model.layers",
    "gpt2": "transformer.h",
    "gpt2-classifier": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    "gpt_neox-serial": "gpt_neox.layers",
    "bert": "bert.encoder.layer",
    "bert-classifier": "bert.encoder.layer",
    "bert-pretraining": "bert.encoder.layer",
    "bert-bare": "encoder.layer",
    "roberta": "roberta.encoder.layer",
    "roberta-classifier": "roberta.encoder.layer",
    "vit": "vit.layers",
    "deit": "deit.layers",
    "clip-text": "text_model.encoder.layers",
    "clip-vision": "encoder.layers",
    "clip-classifier": "vision_model.encoder.layers",
    "detr": "model.decoder.layers",
    "detr-auxiliary": "model.decoder.layers",
    "olmo2": "model.layers",
    "opt": "model.decoder.layers",
    "phi3": "model.layers",
    "granite": "model.layers",
    "cohere": "model.layers",
    "falcon": "transformer.h",
    "electra": "electra.encoder.layer",
    "distilbert": "distilbert.transformer.layer",
}
FINAL_NORMS = {
    "llama": "model.norm",
    "gpt2": "transformer.ln_f",
    "gpt_neox": "gpt_neox.final_layer_norm",
    "vit": "vit.layernorm",
    "deit": "deit.layernorm",
    "clip-text": "text_model.final_layer_norm",
    "clip-vision": "post_layernorm",
    "clip-classifier": "vision_model.post_layernorm",
    "detr": "model.decoder.layernorm",
    "opt": "model.decoder.final_layer_norm",
    "falcon": "transformer.ln_f",
}
LLAMA_LIKE = ("llama-classifier", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "phi3", "granite", "cohere")
FINAL_NORMS |= dict.fromkeys(LLAMA_LIKE, "model.norm")
FINAL_NORMS |= {"gpt2-classifier": "transformer.ln_f", "gpt_neox-serial": "gpt_neox.final_layer_norm"}


# Each function takes a block apart: (block, x, what else the block was given) -> branches A and M, x', y.


def llama(block, x, given, scale=1.0):
    a = scale * block.self_attn(hidden_states=block.input_layernorm(x), **given)[0]
    m = scale * block.mlp(block.post_attention_layernorm(x + a))
    return a, m, x + a, x + a + m


def granite(block, x, given):
    return llama(block, x, given, scale=0.3)


def gemma(block, x, given):
    a = block.post_attention_layernorm(block.self_attn(hidden_states=block.input_layernorm(x), **given)[0])
    m = block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(x + a)))
    return a, m, x + a, x + a + m


def olmo2(block, x, given):
    a = block.post_attention_layernorm(block.self_attn(hidden_states=x, **given)[0])
    m = block.post_feedforward_layernorm(block.mlp(x + a))
    return a, m, x + a, x + a + m


def cohere(block, x, given):
    normed = block.input_layernorm(x)
    a, m = block.self_attn(hidden_states=normed, **given)[0], block.mlp(normed)
    return a, m, x + a, x + a + m


def falcon(block, x, given):
    normed = block.input_layernorm(x)
    a, m = block.self_attention(normed, **given)[0].clone(), block.mlp(normed)
    return a, m, x + a, x + a + m


def gpt2(block, x, given):
    a = block.attn(block.ln_1(x), **given)[0]
    m = block.mlp(block.ln_2(x + a))
    return a, m, x + a, x + a + m


def neox(block, x, given):
    a = block.attention(block.input_layernorm(x), **given)[0]
    m = block.mlp(block.post_attention_layernorm(x))
    return a, m, x + a, x + a + m


def neox_serial(block, x, given):
    a = block.attention(block.input_layernorm(x), **given)[0]
    m = block.mlp(block.post_attention_layernorm(x + a))
    return a, m, x + a, x + a + m


def opt(block, x, given):
    a = block.self_attn(hidden_states=block.self_attn_layer_norm(x), **given)[0]
    m = block.fc2(F.relu(block.fc1(block.final_layer_norm(x + a))))
    return a, m, x + a, x + a + m


def bert(block, x, given):
    a = block.attention.output.dense(block.attention.self(x, **given)[0])
    middle = block.attention.output.LayerNorm(x + a)
    m = block.output.dense(block.intermediate(middle))
    return a, m, middle, block.output.LayerNorm(middle + m)


def distilbert(block, x, given):
    a = block.attention(x, **given)[0]
    middle = block.sa_layer_norm(x + a)
    m = block.ffn(middle)
    return a, m, middle, block.output_layer_norm(middle + m)


def vit(block, x, given):
    a = block.attention(block.layernorm_before(x), **given)[0]
    m = block.mlp(block.layernorm_after(x + a))
    return a, m, x + a, x + a + m


def clip(block, x, given):
    a = block.self_attn(hidden_states=block.layer_norm1(x), **given)[0]
    m = block.mlp(block.layer_norm2(x + a))
    return a, m, x + a, x + a + m


def detr(block, x, given):
    queries = given["object_queries_position_embeddings"]
    a = block.self_attn(x, position_embeddings=queries, attention_mask=given["attention_mask"])[0]
    middle = block.self_attn_layer_norm(x + a)
    crossed = block.encoder_attn(
        middle,
        key_value_states=given["encoder_hidden_states"],
        attention_mask=given["encoder_attention_mask"],
        position_embeddings=queries,
        encoder_position_embeddings=given["spatial_position_embeddings"],
    )[0]
    before_mlp = block.encoder_attn_layer_norm(middle + crossed)
    m = block.mlp(before_mlp)
    return a, m, middle, block.final_layer_norm(before_mlp + m)


BY_HAND = {
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "llama-classifier": llama,
    "gemma2": gemma,
    "gemma3": gemma,
    "gpt2": gpt2,
    "gpt2-classifier": gpt2,
    "gpt_neox": neox,
    "gpt_neox-serial": neox_serial,
    "bert": bert,
    "bert-bare": bert,
    "roberta": bert,
    "vit": vit,
    "deit": vit,
    "clip-text": clip,
    "clip-vision": clip,
    "detr": detr,
    "olmo2": olmo2,
    "opt": opt,
    "phi3": llama,
    "granite": granite,
    "cohere": cohere,
    "falcon": falcon,
    "electra": bert,
    "distilbert": distilbert,
}
ORDER = ("attention_branch", "mlp_branch", "attention_output", "residual")


@torch.no_grad()
def taken_apart(name, model, batch):
    """Each layer's A, M, x', y as `ORDER`, chained from h_0; only masks and positions come from the model."""
    given = []
    blocks = model.get_submodule(BLOCKS[name])

    def note(block, args, kwargs):
        bound = inspect.signature(block.forward).bind(*args, **kwargs).arguments
        given.append({**bound, **bound.pop("kwargs", {})})

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    model(**batch, **({"use_cache": False} if "input_ids" in batch and hasattr(model.config, "use_cache") else {}))
    for handle in handles:
        handle.remove()
    x = given[0].pop("hidden_states")
    embeddings, layers = x, []
    for block, rest in zip(blocks, given, strict=True):
        rest.pop("hidden_states", None)
        layers.append(BY_HAND[name](block, x, rest))
        x = layers[-1][-1]
    return embeddings, layers


@torch.no_grad()
def captured(model, batch, sites, tower=None):
    anatomy = verify(anatomy_candidates(model, tower=tower), batch).anatomy
    with capture(anatomy, sites) as activations:
        anatomy.body(**body_inputs(anatomy, batch))
        return anatomy, {site: activations[site] for site in sites}


@pytest.mark.parametrize("name", BY_HAND)
def test_branches_and_stream_equal_the_block_taken_apart(name):
    model = tiny_models.build(name)
    batch = tiny_models.inputs(model)
    embeddings, layers = taken_apart(name, model, batch)
    _, states = captured(model, batch, ["embeddings", "attention_input", *ORDER])
    torch.testing.assert_close(states["embeddings"], [embeddings], rtol=0, atol=0)
    torch.testing.assert_close(states["residual"][0], embeddings, rtol=0, atol=0)
    torch.testing.assert_close(states["attention_input"], states["residual"][:-1], rtol=0, atol=0)
    for site, expected in zip(ORDER, zip(*layers, strict=True), strict=True):
        got = states[site][1:] if site == "residual" else states[site]
        torch.testing.assert_close(got, list(expected), rtol=1e-4, atol=1e-4, msg=lambda m, site=site: f"{site}: {m}")


@torch.no_grad()
def test_detr_with_auxiliary_losses_chains_through_its_norm():
    """The blocks give what the plain DETR's give, but each reads the state before it normalised."""
    model = tiny_models.build("detr-auxiliary")
    _, states = captured(model, tiny_models.inputs(model), ["residual", "attention_input", "final_normed"])
    norm = model.model.decoder.layernorm
    assert torch.equal(states["residual"][0], states["attention_input"][0])
    for read, given in zip(states["attention_input"][1:], states["residual"][1:-1], strict=True):
        torch.testing.assert_close(read, norm(given))
    torch.testing.assert_close(states["final_normed"][0], norm(norm(states["residual"][-1])))


@pytest.mark.parametrize(("name", "tower"), tiny_models.CASES)
@torch.no_grad()
def test_residual_is_stock_hidden_states_before_the_final_norm(name, tower):
    model = tiny_models.build(name)
    batch = tiny_models.inputs(model, tower=tower)
    _, states = captured(model, batch, ["residual", "final_normed"], tower)
    runner = getattr(model, f"{tower}_model") if tower else model
    for config in (model.config, getattr(model.config, "vision_config", None), runner.config):
        if config is not None:
            config.tie_last_hidden_states = False
    output = runner(**batch, output_hidden_states=True)
    expected = list(output.decoder_hidden_states if "decoder_hidden_states" in output else output.hidden_states)
    expected = [state.sum(2) if state.ndim == 4 else state for state in expected]  # of streams, their sum
    if name == "falcon":  # older code, which always keeps the normed state
        torch.testing.assert_close(states["final_normed"][0], expected.pop(), rtol=0, atol=0)
        states["residual"].pop()
    torch.testing.assert_close(states["residual"], expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "detr-auxiliary"])
@torch.no_grad()
def test_final_normed_is_the_last_state_through_the_models_final_norm(name):
    model = tiny_models.build(name)
    _, states = captured(model, tiny_models.inputs(model), ["residual", "final_normed"])
    norm = model.get_submodule(FINAL_NORMS[name]) if name in FINAL_NORMS else torch.nn.Identity()
    torch.testing.assert_close(states["final_normed"], [norm(states["residual"][-1])], rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gpt_neox", "bert", "vit", "gemma2", "cohere", "detr", "olmo2", "opt"]
)
def test_mlp_input_is_what_the_mlp_sub_layer_adds_to(name):
    model = tiny_models.build(name)
    _, states = captured(model, tiny_models.inputs(model), ["mlp_input", "mlp_branch", "residual", "attention_branch"])
    blocks = model.get_submodule(BLOCKS[name])
    for layer, block in enumerate(blocks):
        before, branch, after = states["mlp_input"][layer], states["mlp_branch"][layer], states["residual"][layer + 1]
        if name in ("gpt_neox", "cohere"):  # side by side: both branches add to x
            expected, total = states["residual"][layer], before + states["attention_branch"][layer] + branch
        elif name == "bert":
            expected, total = before, block.output.LayerNorm(before + branch)
        elif name == "detr":
            expected, total = before, block.final_layer_norm(before + branch)
        else:
            expected, total = states["residual"][layer] + states["attention_branch"][layer], before + branch
        torch.testing.assert_close(before, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(total, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [n for n in BLOCKS if n not in ("phi3", "falcon")])
@torch.no_grad()
def test_value_states_are_those_that_attention_is_given(name, monkeypatch):
    model = tiny_models.build(name)
    batch = tiny_models.inputs(model)
    kind = model.config._attn_implementation
    own_eager = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    plain = own_eager if kind == "eager" else ALL_ATTENTION_FUNCTIONS[kind]
    names = {module: path for path, module in model.named_modules()}
    seen = {}

    def spy(module, query, key, value, *args, **kwargs):
        seen[names[module]] = value.transpose(1, 2).flatten(2)  # [B, H, T, d] -> [B, T, H d]
        return plain(module, query, key, value, *args, **kwargs)

    anatomy = verify(anatomy_candidates(model), batch).anatomy
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {kind: spy})
    with capture(anatomy, ["value"]) as activations:
        model(**batch)
    own = [value for path, value in seen.items() if path.startswith(BLOCKS[name]) and "encoder_attn" not in path]
    assert len(own) == 3
    torch.testing.assert_close(activations["value"], own, rtol=0, atol=0)


@torch.no_grad()
def test_value_states_by_hand_from_the_weights():
    """Fused thirds in GPT-2, thirds within each head in GPT-NeoX, two key/value heads of four in Llama."""
    for name in ("gpt2", "gpt_neox", "llama"):
        model = tiny_models.build(name)
        batch = tiny_models.inputs(model)
        _, states = captured(model, batch, ["residual", "value"])
        for layer, block in enumerate(model.get_submodule(BLOCKS[name])):
            x = states["residual"][layer]
            if name == "gpt2":
                fused = block.attn.c_attn
                expected = block.ln_1(x) @ fused.weight[:, 64:96] + fused.bias[64:96]
            elif name == "gpt_neox":
                fused = block.attention.query_key_value
                rows = [24 * head + 16 + channel for head in range(4) for channel in range(8)]
                expected = F.linear(block.input_layernorm(x), fused.weight[rows], fused.bias[rows])
            else:
                expected = block.input_layernorm(x) @ block.self_attn.v_proj.weight.T
                assert expected.shape[-1] == 2 * 8
            torch.testing.assert_close(states["value"][layer], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["phi3", "falcon"])
def test_a_value_projection_that_nobody_knows_is_named(name):
    model = tiny_models.build(name)
    anatomy = verify(anatomy_candidates(model), tiny_models.inputs(model)).anatomy
    with (
        pytest.raises(FulldepthError, match=r"Layer 1 .* has no known value.*anatomy\.value=PATH"),
        capture(anatomy, ["value"]),
    ):
        pass


def test_every_site_has_the_number_of_states_it_promises():
    model = tiny_models.build("llama")
    _, states = captured(model, tiny_models.inputs(model), list(SITES))
    counts = {site: len(values) for site, values in states.items()}
    assert counts == dict.fromkeys(SITES, 3) | {"embeddings": 1, "residual": 4, "final_normed": 1}


@pytest.mark.parametrize("gives", ["tensor", "tuple"])
@torch.no_grad()
def test_blocks_may_give_tensors_or_tuples(gives):
    model = tiny_models.toy(gives)
    batch = tiny_models.inputs(model)
    anatomy = verify(anatomy_candidates(model, override=tiny_models.TOY_ANATOMY), batch).anatomy
    with capture(anatomy, ["residual", "attention_output"]) as activations:
        out = model(**batch)
    h, after = [model.embed(batch["input_ids"])], []
    for block in model.layers:
        after.append(h[-1] + block.attention(block.norm1(h[-1])))
        h.append(after[-1] + block.mlp(block.norm2(after[-1])))
    torch.testing.assert_close(activations["residual"], h)
    torch.testing.assert_close(activations["attention_output"], after)
    assert torch.equal(activations["residual"][-1], out)


@torch.no_grad()
def test_the_states_stack_in_layer_order():
    model = tiny_models.build("gpt2")
    anatomy = anatomy_candidates(model)[0]
    with capture(anatomy, ["residual"]) as activations:
        model(**tiny_models.inputs(model))
        stacked = activations.stack("residual")
        on_cpu = activations.stack("residual", torch.device("cpu"))
    expected = torch.stack(activations["residual"])
    assert torch.equal(stacked, expected)
    assert torch.equal(on_cpu, expected)
