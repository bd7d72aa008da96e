"""Where the parts of each family are, against a table written from transformers' sources and its documentation."""

import math
from dataclasses import dataclass

import pytest
import torch
import transformers as tf
from torch import nn

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.execution import verify
from fulldepth.hf import FAMILIES, Anatomy, anatomy_candidates, first_broken_weight


@dataclass(frozen=True)
class Parts:
    """Full module names, from the model; those of a block from the block."""

    design: str
    blocks: str
    attention: str
    mlp: str
    adds: tuple[str, str]
    """Modules whose outputs are added to the stream."""
    final_norm: str | None
    value_width: int | None
    task: str
    head: bool = True
    max_positions: int | None = 64


LLAMA = Parts("pre", "model.layers", "self_attn", "mlp", ("self_attn", "mlp"), "model.norm", 16, "causal-lm")
GEMMA_ADDS = ("post_attention_layernorm", "post_feedforward_layernorm")
GPT2 = Parts("pre", "transformer.h", "attn", "mlp", ("attn", "mlp"), "transformer.ln_f", 32, "causal-lm")
NEOX = ("gpt_neox.layers", "attention", "mlp", ("attention", "mlp"), "gpt_neox.final_layer_norm", 32, "causal-lm")
BERT_ADDS = ("attention.output.dense", "output.dense")
VIT_PARTS = ("attention", "mlp", ("attention", "mlp"))
CLIP_PARTS = ("self_attn", "mlp", ("self_attn", "mlp"))
DETR = Parts(
    "post",
    "model.decoder.layers",
    "self_attn",
    "mlp",
    ("self_attn", "mlp"),
    "model.decoder.layernorm",
    32,
    "detection",
    max_positions=None,
)


def bert(blocks: str, task: str, *, head: bool = True, max_positions: int = 64) -> Parts:
    return Parts("post", blocks, "attention", "intermediate", BERT_ADDS, None, 32, task, head, max_positions)


def vit(name: str) -> Parts:
    return Parts("pre", f"{name}.layers", *VIT_PARTS, f"{name}.layernorm", 32, "image-classification", True, None)


def clip(tower: str, norm: str, *, task: str = "representation", bare: bool = False) -> Parts:
    prefix = "" if bare else f"{tower}_model."
    positions = 64 if tower == "text" else None
    blocks, norm = f"{prefix}encoder.layers", prefix + norm
    return Parts("pre", blocks, *CLIP_PARTS, norm, 32, task, task != "representation", positions)


EXPECTED = {
    ("llama", None): LLAMA,
    ("llama-classifier", None): Parts(**{**LLAMA.__dict__, "task": "text-classification"}),
    **{(name, None): LLAMA for name in tiny_models.BUILDERS if name.startswith("depth_llama")},
    ("mistral", None): LLAMA,
    ("qwen2", None): LLAMA,
    ("qwen3", None): LLAMA,
    ("gemma2", None): Parts(**{**LLAMA.__dict__, "adds": GEMMA_ADDS}),
    ("gemma3", None): Parts(**{**LLAMA.__dict__, "adds": GEMMA_ADDS}),
    ("gpt2", None): GPT2,
    ("gpt2-classifier", None): Parts(**{**GPT2.__dict__, "task": "text-classification"}),
    ("gpt_neox", None): Parts("parallel", *NEOX),
    ("gpt_neox-serial", None): Parts("pre", *NEOX),
    ("bert", None): bert("bert.encoder.layer", "masked-lm"),
    ("bert-classifier", None): bert("bert.encoder.layer", "text-classification"),
    ("bert-pretraining", None): bert("bert.encoder.layer", "masked-lm"),
    ("bert-bare", None): bert("encoder.layer", "representation", head=False),
    ("roberta", None): bert("roberta.encoder.layer", "masked-lm", max_positions=62),
    ("roberta-classifier", None): bert("roberta.encoder.layer", "text-classification", max_positions=62),
    ("vit", None): vit("vit"),
    ("deit", None): vit("deit"),
    ("clip", "text"): clip("text", "final_layer_norm"),
    ("clip", "vision"): clip("vision", "post_layernorm"),
    ("clip-classifier", None): clip("vision", "post_layernorm", task="image-classification"),
    ("clip-text", None): clip("text", "final_layer_norm"),
    ("clip-vision", None): clip("vision", "post_layernorm", bare=True),
    ("detr", None): DETR,
    ("detr-auxiliary", None): DETR,
    ("olmo2", None): Parts(**{**LLAMA.__dict__, "adds": GEMMA_ADDS}),
    ("opt", None): Parts(
        "pre",
        "model.decoder.layers",
        "self_attn",
        "fc1",
        ("self_attn", "fc2"),
        "model.decoder.final_layer_norm",
        32,
        "causal-lm",
    ),
    ("phi3", None): Parts(**{**LLAMA.__dict__, "value_width": None}),
    ("granite", None): LLAMA,
    ("cohere", None): Parts(**{**LLAMA.__dict__, "design": "parallel"}),
    ("falcon", None): Parts(
        "parallel",
        "transformer.h",
        "self_attention",
        "mlp",
        ("self_attention", "mlp"),
        "transformer.ln_f",
        None,
        "causal-lm",
        max_positions=2048,
    ),
    ("electra", None): bert("electra.encoder.layer", "masked-lm"),
    ("distilbert", None): Parts(
        "post",
        "distilbert.transformer.layer",
        "attention",
        "ffn",
        ("attention", "ffn"),
        None,
        32,
        "masked-lm",
        True,
        512,
    ),
}


def proven(name: str, tower: str | None = None) -> tuple[tf.PreTrainedModel, Anatomy]:
    model = tiny_models.build(name)
    found = verify(anatomy_candidates(model, tower=tower), tiny_models.inputs(model, tower=tower))
    return model, found.anatomy


def test_the_table_expects_every_model():
    assert EXPECTED.keys() == set(tiny_models.CASES)


@pytest.mark.parametrize(("name", "tower"), tiny_models.CASES)
def test_every_part_is_the_module_that_plays_it(name, tower):
    model, anatomy = proven(name, tower)
    expected = EXPECTED[name, tower]
    assert anatomy.family.design == expected.design
    assert anatomy.task == expected.task
    assert anatomy.blocks is model.get_submodule(expected.blocks)
    assert (anatomy.num_layers, anatomy.width) == (3, 32)
    for layer in (1, 2, 3):
        block = model.get_submodule(f"{expected.blocks}.{layer - 1}")
        assert anatomy.part(layer, "attention") is block.get_submodule(expected.attention)
        assert anatomy.part(layer, "mlp") is block.get_submodule(expected.mlp)
        assert anatomy.part(layer, "attention_branch") is block.get_submodule(expected.adds[0])
        assert anatomy.part(layer, "mlp_branch") is block.get_submodule(expected.adds[1])
    assert anatomy.final_norm is (expected.final_norm and model.get_submodule(expected.final_norm))
    assert anatomy.has("value") is (expected.value_width is not None)
    assert (anatomy.head is not None) is expected.head
    assert anatomy.max_positions == expected.max_positions


@pytest.mark.parametrize(("name", "tower"), tiny_models.CASES)
def test_a_table_family_has_one_proven_verdict_and_the_finder_has_the_others(name, tower):
    model = tiny_models.build(name)
    candidates = anatomy_candidates(model, tower=tower)
    listed = name in tiny_models.BUILDERS
    assert (model.config.model_type in FAMILIES) is listed
    assert len(candidates) == 1 or not listed
    found = verify(candidates, tiny_models.inputs(model, tower=tower))
    assert found.branches
    # the blocks of that DETR read the normed state of the one before, those of a tree the sum of two earlier ones
    assert found.chained is (name not in ("detr-auxiliary", "depth_llama-tree", "depth_llama-dynamic"))
    assert (found.classifier is not None) is EXPECTED[name, tower].head


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "bert", "vit", "granite", "detr", "opt"])
def test_every_precision_is_proven_within_its_own_rounding(name, dtype):
    model = tiny_models.build(name, dtype=dtype)
    assert verify(anatomy_candidates(model), tiny_models.inputs(model)).branches


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gpt_neox", "gemma3", "bert", "roberta", "opt", "cohere", "distilbert", "clip-text"]
)
def test_vocabulary_is_what_the_embedding_accepts(name):
    model, anatomy = proven(name)
    last = torch.tensor([[1, 2, anatomy.vocab_size - 1]])
    model(input_ids=last)
    with pytest.raises(IndexError):
        model(input_ids=last + 1)


@pytest.mark.parametrize("name", ["vit", "clip-vision", "detr"])
def test_pictures_have_no_vocabulary(name):
    assert proven(name)[1].vocab_size is None


@pytest.mark.parametrize(
    "name", ["gpt2", "bert", "bert-classifier", "roberta", "roberta-classifier", "opt", "clip-text"]
)
def test_max_positions_is_the_longest_sequence_that_runs(name):
    model, anatomy = proven(name)
    longest = torch.full((1, anatomy.max_positions), 5)
    longest[0, -1] = 2  # CLIP looks for an end of text
    model(input_ids=longest)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        model(input_ids=torch.cat([longest[:, :1], longest], 1))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "llama",
            {
                "self_attn.q_proj": (32, 32),
                "self_attn.k_proj": (16, 32),
                "self_attn.v_proj": (16, 32),
                "self_attn.o_proj": (32, 32),
                "mlp.gate_proj": (48, 32),
                "mlp.up_proj": (48, 32),
                "mlp.down_proj": (32, 48),
            },
        ),
        (
            "gpt2",
            {
                "attn.c_attn": (32, 96),
                "attn.c_proj": (32, 32),
                "mlp.c_fc": (32, 128),
                "mlp.c_proj": (128, 32),
            },
        ),
        (
            "bert",
            {
                "attention.self.query": (32, 32),
                "attention.self.key": (32, 32),
                "attention.self.value": (32, 32),
                "attention.output.dense": (32, 32),
                "intermediate.dense": (48, 32),
                "output.dense": (32, 48),
            },
        ),
    ],
)
def test_projections_are_every_weight_matrix_of_every_block(name, expected):
    model, anatomy = proven(name)
    blocks = model.get_submodule(EXPECTED[name, None].blocks)
    seen = {}
    for projection, layer, module in anatomy.projections():
        assert module is blocks[layer - 1].get_submodule(projection)
        seen.setdefault(layer, {})[projection] = tuple(module.weight.shape)
    assert seen == {1: expected, 2: expected, 3: expected}


def test_the_towers_of_clip_have_to_be_chosen():
    model = tiny_models.build("clip")
    with pytest.raises(FulldepthError, match=r"CLIPModel has two towers; choose one by tower: text or vision"):
        anatomy_candidates(model)
    with pytest.raises(FulldepthError, match="has no audio where"):
        anatomy_candidates(model, tower="audio")


@pytest.mark.parametrize("tower", ["text", "vision"])
def test_both_towers_stand_the_tests_on_the_whole_models_inputs(tower):
    model = tiny_models.build("clip")
    everything = tiny_models.inputs(model) | tiny_models.inputs(model, tower="vision")
    assert verify(anatomy_candidates(model, tower=tower), everything).anatomy.family.tower == tower


def test_the_scale_of_granites_branches_is_the_configurations():
    assert proven("granite")[1].branch_scale == pytest.approx(0.3)
    assert proven("llama")[1].branch_scale == 1.0


class Bare(tf.PreTrainedModel):
    config_class = tiny_models.ToyConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.post_init()


def test_a_model_without_a_list_of_blocks_is_refused_with_what_it_holds():
    with pytest.raises(FulldepthError, match=r"No stack of blocks.*Bare.*first \(Linear\), second \(Linear\)") as error:
        anatomy_candidates(Bare(tiny_models.ToyConfig()))
    assert "anatomy.blocks" in str(error.value)


def test_an_encoder_decoder_is_refused():
    t5 = tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )
    with pytest.raises(FulldepthError, match="T5ForConditionalGeneration is an encoder-decoder"):
        anatomy_candidates(t5)


def test_the_finder_takes_a_model_of_one_block():
    config = tf.Olmo2Config(
        **{k: v for k, v in tiny_models.DECODER.items() if k != "head_dim"} | {"num_hidden_layers": 1}
    )
    model = tf.Olmo2ForCausalLM(config).eval()
    assert verify(anatomy_candidates(model), tiny_models.inputs(model)).anatomy.num_layers == 1


def test_an_anatomy_in_the_settings_replaces_the_table():
    model = tiny_models.build("llama")
    (anatomy,) = anatomy_candidates(model, override={"blocks": "layers", "attention": "mlp", "name": "mine"})
    assert anatomy.family.name == "mine"
    assert anatomy.part(2, "attention") is model.model.layers[1].mlp
    assert anatomy.part(2, "mlp") is None
    assert not anatomy.has("mlp")


def test_an_unknown_field_of_an_anatomy_is_corrected():
    with pytest.raises(FulldepthError, match=r"Unknown anatomy field 'atention'.*Did you mean 'attention'"):
        anatomy_candidates(tiny_models.build("llama"), override={"blocks": "layers", "atention": "self_attn"})


def test_an_anatomy_needs_blocks():
    with pytest.raises(FulldepthError, match="blocks"):
        anatomy_candidates(tiny_models.build("llama"), override={"attention": "self_attn"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks": "layerz"}, "layerz"),
        ({"blocks": "norm"}, "norm"),
        ({"blocks": 3}, "blocks"),
        ({"final_norm": "nrm"}, "nrm"),
        ({"body": "modle"}, "modle"),
        ({"branch_scale": "residual_multiplyer"}, "residual_multiplyer"),
        ({"design": "sideways"}, "sideways"),
        ({"value_part": "half"}, "half"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(change, words):
    model = tiny_models.build("llama")
    override = {"blocks": "layers", "attention": "self_attn", "mlp": "mlp", "mlp_norm": "post_attention_layernorm"}
    override |= {"final_norm": "norm", "value": "self_attn.v_proj"} | change
    with pytest.raises(FulldepthError, match=words):
        verify(anatomy_candidates(model, override=override), tiny_models.inputs(model))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_first_broken_weight_is_named(bad):
    model = tiny_models.build("llama")
    assert first_broken_weight(model) is None
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = bad
        model.lm_head.weight[0, 0] = bad
    assert first_broken_weight(model) == "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("row", "fine"),
    [
        ([0.0, -math.inf, 1.0], True),
        ([-math.inf, -math.inf, -math.inf], False),
        ([0.0, math.inf, -math.inf], False),
        ([math.nan, 0.0, -math.inf], False),
    ],
)
def test_pruned_weights_are_not_broken_where_their_module_says_so(row, fine):
    """-inf prunes a weight of a static router; a router that has nothing left, and any other weight, is broken."""
    model = tiny_models.build("depth_llama-static")
    router = next(name for name, _ in model.named_parameters() if name.endswith("logits") and "layers.2" in name)
    with torch.no_grad():
        model.get_parameter(router)[0] = torch.tensor(row)
    assert first_broken_weight(model) == (None if fine else router)
    with torch.no_grad():
        model.get_parameter(router).zero_()
        model.model.norm.weight[3] = -math.inf
    assert first_broken_weight(model) == "model.norm.weight"


def test_finite_weights_whose_sum_overflows_are_not_broken():
    layer = nn.Linear(4, 4).half()
    nn.init.constant_(layer.weight, 60000.0)
    assert first_broken_weight(layer) is None


def test_opposite_infinities_do_not_hide_each_other():
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[float("inf"), -float("inf")]]))
    assert first_broken_weight(layer) == "weight"
