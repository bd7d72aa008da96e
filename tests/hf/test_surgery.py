"""Skipping in place: against copies with zeroed weights or deleted blocks, with every kind of cache, and healed."""

import copy

import pytest
import torch
import transformers as tf

import tiny_models as tm
from fulldepth.errors import FulldepthError
from fulldepth.execution import verify
from fulldepth.hf import GRANULARITIES, Anatomy, Scalars, Switches, anatomy_candidates, skipping

LLAMA_LIKE = ("self_attn.o_proj", "mlp.down_proj")
NEOX_LIKE = ("attention.dense", "mlp.dense_4h_to_h")
OUTPUTS = {
    **dict.fromkeys(["llama", "depth_llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite"], LLAMA_LIKE),
    **dict.fromkeys(["mistral", "mistral-window", "cohere"], LLAMA_LIKE),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "gpt_neox": NEOX_LIKE,
    "gpt_neox-serial": NEOX_LIKE,
    "opt": ("self_attn.out_proj", "fc2"),
    "falcon": ("self_attention.dense", "mlp.dense_4h_to_h"),
    "olmo2": LLAMA_LIKE,
}
"""Family -> the matrices that end its attention and its MLP."""
SETS = [set(), {1}, {1, 2}, {3}, {1, 2, 3}]
SHARED_NORM = ("cohere", "falcon")


def model_of(name, dtype=torch.float32):
    if name == "mistral-window":
        torch.manual_seed(0)
        return tf.MistralForCausalLM(tf.MistralConfig(**tm.DECODER, sliding_window=6)).to(dtype).eval()
    return tm.build(name, dtype=dtype)


def anatomy_of(model) -> Anatomy:
    candidates = anatomy_candidates(model)
    return candidates[0] if len(candidates) == 1 else verify(candidates, tm.inputs(model)).anatomy


@torch.no_grad()
def logits_of(model, **inputs):
    return model(**(inputs or tm.inputs(model)), use_cache=False).logits


def zeroed(model, layers, matrix):
    """A copy whose layers' branch gives nothing, for the last matrix is zero."""
    other = copy.deepcopy(model)
    blocks = anatomy_of(other).blocks
    for layer in layers:
        for parameter in blocks[layer - 1].get_submodule(matrix).parameters():
            parameter.data.zero_()
    return other


def without_blocks(model, layers):
    """A copy that lacks whole blocks."""
    other = copy.deepcopy(model)
    blocks, config = anatomy_of(other).blocks, other.config
    types = getattr(config, "layer_types", None)
    for layer in sorted(layers, reverse=True):
        del blocks[layer - 1]
        if types:
            del types[layer - 1]
    if config.model_type != "gpt2":
        config.num_hidden_layers = len(blocks)
    return other


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_skipped_branch_is_a_zeroed_matrix_and_a_skipped_layer_a_missing_block(name):
    model, stock = model_of(name), model_of(name)
    anatomy = anatomy_of(model)
    plain = logits_of(stock)
    for granularity in GRANULARITIES:
        with Switches(anatomy, granularity) as switches:
            assert torch.equal(logits_of(model), plain)
            for layers in ({1}, {2, 3}, {1, 2, 3}):
                switches.skip(layers)
                assert switches.skipped == layers
                if granularity == "layer":
                    expected = logits_of(without_blocks(stock, layers))
                else:
                    expected = logits_of(zeroed(stock, layers, OUTPUTS[name][granularity == "mlp"]))
                assert torch.equal(logits_of(model), expected)
                assert not torch.equal(expected, plain)
            switches.skip(())
            assert torch.equal(logits_of(model), plain)


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_what_is_skipped_is_not_computed(name, granularity):
    model = model_of(name)
    anatomy = anatomy_of(model)
    block = anatomy.blocks[1]
    matrices = (
        block if granularity == "layer" else block.get_submodule(OUTPUTS[name][granularity == "mlp"].split(".")[0])
    )
    norms = [child for child in block.children() if "norm" in type(child).__name__.lower()]
    # Norms stand in the order that they are used in, before each part, behind each part, or around it.
    halves = {"attention": norms[: len(norms) // 2], "mlp": norms[len(norms) // 2 :], "layer": norms}
    removed = [matrices, *([] if name in SHARED_NORM else halves[granularity])]
    with skipping(anatomy, [2], granularity):
        expected = logits_of(model)
        weights = [parameter for module in removed for parameter in module.parameters()]
        for parameter in weights:
            parameter.data = torch.empty(0)  # whatever computed with it would raise
        assert len(weights) >= (2 if name in SHARED_NORM else 3)
        assert torch.equal(logits_of(model), expected)


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
        out = model(input_ids=step, past_key_values=past, use_cache=True)
        past = out.past_key_values
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
    ids = torch.randint(3, tm.VOCAB, (2, 5), generator=torch.Generator().manual_seed(3))
    steps = 6
    tokens, logits = rollout(model, ids, steps)
    for got_tokens, got_logits in (manual(model, ids, steps), generated(model, ids, steps)):
        assert torch.equal(got_tokens, tokens)
        torch.testing.assert_close(got_logits, logits, atol=1e-4, rtol=0)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    padded[1, :] = torch.cat([padded[1, 3:], padded[1, 3:6]])  # a longer neighbour
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    got_tokens, got_logits = generated(model, padded, steps, attention_mask=mask)
    assert torch.equal(got_tokens[0, 3:], tokens[0])
    torch.testing.assert_close(got_logits[0], logits[0], atol=1e-4, rtol=0)
    longer, longer_logits = rollout(model, padded[1:], steps)
    assert torch.equal(got_tokens[1:], longer)
    torch.testing.assert_close(got_logits[1:], longer_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_way_of_decoding_agrees_whatever_is_skipped(name):
    model = endless(model_of(name))
    with Switches(anatomy_of(model)) as switches:
        for layers in SETS:
            switches.skip(layers)
            check_decoding(model)


@pytest.mark.parametrize("granularity", ["mlp", "layer"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_every_way_of_decoding_agrees_for_other_granularities(name, granularity):
    model = endless(model_of(name))
    with Switches(anatomy_of(model), granularity) as switches:
        for layers in ({1}, {1, 2, 3}):
            switches.skip(layers)
            check_decoding(model)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_decoding_agrees_with_scalars(name):
    model = endless(model_of(name))
    scalars = Scalars(3, {1}, width=tm.WIDTH)
    with torch.no_grad():
        for factor in scalars.parameters():
            factor.uniform_(0.6, 1.4)
    with skipping(anatomy_of(model), [1], scalars=scalars):
        check_decoding(model)


@pytest.mark.parametrize("layers", [{1}, {1, 2, 3}])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window"])
def test_beams_static_caches_and_rollbacks_agree(name, layers):
    model = endless(model_of(name))
    ids = torch.randint(3, tm.VOCAB, (1, 5), generator=torch.Generator().manual_seed(4))
    with skipping(anatomy_of(model), layers):
        tokens, logits = rollout(model, ids, 6)
        assert torch.equal(manual(model, ids, 6, cache=tf.DynamicCache())[0], tokens)
        assert torch.equal(generated(model, ids, 6, use_cache=False)[0], tokens)
        static = generated(model, ids, 6, cache_implementation="static")
        assert torch.equal(static[0], tokens)
        torch.testing.assert_close(static[1], logits, atol=1e-4, rtol=0)
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


def test_the_cache_of_a_skipped_attention_holds_one_number_a_token():
    model = tm.build("llama")
    with skipping(anatomy_of(model), [1, 3]), torch.no_grad():
        past = model(input_ids=torch.arange(3, 10)[None], use_cache=True).past_key_values
    assert [tuple(layer.keys.shape) for layer in past.layers] == [(1, 1, 7, 1), (1, 2, 7, 8), (1, 1, 7, 1)]
    assert past.get_seq_length() == 7


def test_a_cache_filled_before_can_go_on_with_fewer_attentions():
    model = tm.build("llama")
    ids = torch.arange(3, 10)[None]
    with Switches(anatomy_of(model)) as switches, torch.no_grad():
        past = model(input_ids=ids, use_cache=True).past_key_values
        expected = copy.deepcopy(past)
        switches.skip([1])
        got = model(input_ids=ids[:, :1], past_key_values=past).logits
    changed = zeroed(model, [1], OUTPUTS["llama"][0])
    with torch.no_grad():
        torch.testing.assert_close(changed(input_ids=ids[:, :1], past_key_values=expected).logits, got)


def anatomy_of_modules(model):
    """Everything that surgery could leave behind: attributes, hooks and children of every module."""
    tables = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            nested = {k: id(v) for k, v in value.items()} if isinstance(value, dict) else None
            tables[name, key] = (id(value), nested)
    return tables


def break_inside(switches):
    """An error in the middle of a forward pass."""

    def broken(*_):
        raise RuntimeError("broken layer")

    with switches:
        switches.skip([1])
        switches.scalars = Scalars(3, [1], switches.granularity)
        handle = switches.anatomy.blocks[1].register_forward_pre_hook(broken)
        try:
            logits_of(switches.anatomy.model)
        finally:
            handle.remove()


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_model_is_healed_also_after_errors(name, granularity):
    model = model_of(name)
    anatomy = anatomy_of(model)
    logits = logits_of(model)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    before = anatomy_of_modules(model)

    with skipping(anatomy, [1, 3], granularity, Scalars(3, [1, 3], granularity)):
        logits_of(model)
        assert list(model.state_dict()) == list(weights)
    assert anatomy_of_modules(model) == before
    switches = Switches(anatomy, granularity)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken layer"):
            break_inside(switches)
        assert switches.skipped == frozenset()
        assert switches.scalars is None
        assert anatomy_of_modules(model) == before
    assert torch.equal(logits_of(model), logits)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_entering_leaves_random_numbers_and_the_mode_alone():
    model = tm.build("gpt2").train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with skipping(anatomy_of(model), [1]):
        assert torch.equal(torch.rand(3), expected)
        assert all(module.training for module in model.modules())


def test_what_offloading_put_into_a_module_comes_back():
    model = tm.build("llama")
    anatomy = anatomy_of(model)
    calls = []
    attention, stock = anatomy.part(1, "attention"), anatomy.part(1, "attention").forward

    def forward(*args, **kwargs):
        calls.append(1)
        return stock(*args, **kwargs)

    attention.forward = forward
    with skipping(anatomy, [1]):
        calls.clear()
        logits_of(model)
        assert not calls
    assert attention.forward is forward
    logits_of(model)
    assert calls == [1]


def test_one_surgery_at_a_time():
    model = tm.build("llama")
    switches, others = Switches(anatomy_of(model)), Switches(anatomy_of(model), "mlp")
    with pytest.raises(FulldepthError, match=r"inside their `with`"):
        switches.skip([1])
    with pytest.raises(FulldepthError, match=r"inside their `with`"):
        switches.scalars = Scalars(3)
    with switches:
        with pytest.raises(FulldepthError, match="already in use"), switches:
            pass
        with pytest.raises(FulldepthError, match="switched by other switches"), others:
            pass
        switches.skip([2])
        expected = logits_of(zeroed(tm.build("llama"), [2], OUTPUTS["llama"][0]))
        assert torch.equal(logits_of(model), expected)
    with others:
        others.skip([2])


@pytest.mark.parametrize("layers", [[0], [4], [1, 7], [-1], [1.5], [True], ["2"], "12", 3])
def test_layers_that_do_not_exist_are_refused_and_change_nothing(layers):
    with Switches(anatomy_of(tm.build("llama"))) as switches:
        switches.skip([2])
        with pytest.raises(FulldepthError, match="1 to 3"):
            switches.skip(layers)
        assert switches.skipped == {2}


ENCODER, POST = "it is an encoder", "norms follow the residual sums"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, ENCODER) for name in ("bert", "bert-bare", "bert-classifier", "roberta", "vit", "deit", "electra")),
        *((name, ENCODER) for name in ("distilbert", "clip-text", "clip-vision", "clip-classifier", "detr")),
        ("depth_llama-tree", "a tree of earlier outputs"),
        ("depth_llama-hyper", "several residual streams"),
        ("depth_llama-static", "a memory of earlier layers"),
        ("depth_llama-dynamic", "a tree of earlier outputs|a memory of earlier layers"),
        ("depth_llama-kv", "a memory of earlier layers"),
    ],
)
def test_models_that_cannot_skip_are_refused_with_the_reason(name, reason):
    model = tm.build(name)
    with pytest.raises(FulldepthError, match=f"{type(model).__name__} cannot skip: .*({reason})"):
        Switches(anatomy_candidates(model)[0])


def test_more_that_cannot_skip():
    opt = tf.OPTForCausalLM(
        tf.OPTConfig(
            vocab_size=tm.VOCAB,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            do_layer_norm_before=False,
        )
    ).eval()
    with pytest.raises(FulldepthError, match=POST):
        Switches(verify(anatomy_candidates(opt), tm.inputs(opt)).anatomy)
    # Taken for a pre-norm model, it shows when it runs.
    anatomy = next(a for a in anatomy_candidates(opt) if a.family.design == "pre")
    with pytest.raises(FulldepthError, match="does not read the stream"), Switches(anatomy):
        pass
    gpt2 = tf.GPT2LMHeadModel(tf.GPT2Config(**tm.GPT2, add_cross_attention=True))
    with pytest.raises(FulldepthError, match="also reads an encoder"):
        Switches(anatomy_of(gpt2))
    llama = tm.build("llama")
    anatomy = anatomy_of(llama)
    with pytest.raises(FulldepthError, match=r"Unknown granularity 'attn'.*attention"):
        Switches(anatomy, "attn")
    bare = Anatomy(llama, anatomy.family.from_mapping({"blocks": "layers"}))
    with pytest.raises(FulldepthError, match="are not known"):
        Switches(bare)
    llama.model.layers[0].compile(backend="eager")
    with pytest.raises(FulldepthError, match="compiled"), Switches(anatomy):
        pass


class MlpOnly(torch.nn.Module):
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
    anatomy = anatomy_of(model)
    with Switches(anatomy) as switches:
        with pytest.raises(FulldepthError, match="Layer 1 has no attention to skip"):
            switches.skip([1, 2])
        with pytest.raises(FulldepthError, match="every layer to have its attention; only layers 2, 3 do"):
            switches.scalars = Scalars(3)
        switches.skip([3])
        assert torch.equal(logits_of(model), logits_of(zeroed(stock, [3], OUTPUTS["llama"][0])))
    with skipping(anatomy, [1, 2], "mlp"):
        assert torch.equal(logits_of(model), logits_of(zeroed(stock, [1, 2], OUTPUTS["llama"][1])))
    with skipping(anatomy, [1], "layer"):
        assert torch.equal(logits_of(model), logits_of(without_blocks(stock, [1])))
    model.model.layers[2] = model.model.layers[1]
    with pytest.raises(FulldepthError, match="its layers share modules"):
        Switches(anatomy)


@pytest.mark.slow
def test_a_model_compiled_as_a_whole_notices_every_switch():
    model, scalars = tm.build("llama"), Scalars(3, [1])
    compiled = torch.compile(model, backend="eager")
    plain = logits_of(model)
    assert torch.equal(logits_of(compiled, **tm.inputs(model)), plain)
    with Switches(anatomy_of(model)) as switches:
        for layers in ([2], [1]):
            switches.skip(layers)
            assert torch.equal(logits_of(compiled, **tm.inputs(model)), logits_of(model))
        switches.scalars = scalars
        for number in (1.0, 0.5):
            scalars.get(2)["s_att"].data.fill_(number)
            torch.testing.assert_close(logits_of(compiled, **tm.inputs(model)), logits_of(model))
    assert torch.equal(logits_of(compiled, **tm.inputs(model)), plain)


def test_a_switched_model_is_not_saved(tmp_path):
    model = tm.build("llama")
    with Switches(anatomy_of(model)) as switches:
        model.save_pretrained(tmp_path / "plain")
        switches.skip([1])
        with pytest.raises(FulldepthError, match="would write the plain model"):
            model.save_pretrained(tmp_path / "skipped")
    assert not (tmp_path / "skipped").exists()
    reloaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits_of(reloaded), logits_of(model))


def test_classifiers_can_skip_too():
    model = tm.build("llama-classifier")
    with skipping(anatomy_of(model), [2]):
        got = model(**tm.inputs(model)).logits
    assert torch.equal(got, zeroed(model, [2], OUTPUTS["llama"][0])(**tm.inputs(model)).logits)
