"""Where the parts of each family are, against a table written from transformers' sources and its documentation."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
import transformers as tf
from torch import nn

import tiny_models
from families import zoo
from fulldepth.errors import FulldepthError
from fulldepth.execution import Verified, verify
from fulldepth.hf import anatomy_candidates, first_broken_weight


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
    value: bool
    task: str
    head: bool = True
    max_positions: int | None = 64


LLAMA = Parts("pre", "model.layers", "self_attn", "mlp", ("self_attn", "mlp"), "model.norm", True, "causal-lm")
NORMED = ("post_attention_layernorm", "post_feedforward_layernorm")
BERT = Parts(
    "post",
    "bert.encoder.layer",
    "attention",
    "intermediate",
    ("attention.output.dense", "output.dense"),
    None,
    True,
    "masked-lm",
)
CLIP = Parts(
    "pre",
    "text_model.encoder.layers",
    "self_attn",
    "mlp",
    ("self_attn", "mlp"),
    "text_model.final_layer_norm",
    True,
    "representation",
    head=False,
)
VISION = {"blocks": "vision_model.encoder.layers", "final_norm": "vision_model.post_layernorm", "max_positions": None}
GPT2 = Parts("pre", "transformer.h", "attn", "mlp", ("attn", "mlp"), "transformer.ln_f", True, "causal-lm")
NEOX_NORM = "gpt_neox.final_layer_norm"
OPT = "model.decoder"
EXPECTED = {
    **{(name, None): LLAMA for name in ("llama", "granite", "depth_llama-tree", "depth_llama-hyper")},
    ("llama-classifier", None): replace(LLAMA, task="text-classification"),
    ("gemma2", None): replace(LLAMA, adds=NORMED),
    ("olmo2", None): replace(LLAMA, adds=NORMED),
    ("cohere", None): replace(LLAMA, design="parallel"),
    ("gpt2", None): GPT2,
    ("gpt_neox", None): replace(
        GPT2,
        design="parallel",
        blocks="gpt_neox.layers",
        attention="attention",
        adds=("attention", "mlp"),
        final_norm=NEOX_NORM,
    ),
    ("falcon", None): replace(
        GPT2,
        design="parallel",
        attention="self_attention",
        adds=("self_attention", "mlp"),
        value=False,
        max_positions=2048,
    ),
    ("opt", None): replace(
        LLAMA, blocks=f"{OPT}.layers", mlp="fc1", adds=("self_attn", "fc2"), final_norm=f"{OPT}.final_layer_norm"
    ),
    ("bert", None): BERT,
    ("bert-classifier", None): replace(BERT, task="text-classification"),
    ("roberta", None): replace(BERT, blocks="roberta.encoder.layer", max_positions=62),
    ("distilbert", None): replace(
        BERT, blocks="distilbert.transformer.layer", mlp="ffn", adds=("attention", "ffn"), max_positions=512
    ),
    ("vit", None): replace(
        CLIP,
        blocks="vit.layers",
        attention="attention",
        adds=("attention", "mlp"),
        final_norm="vit.layernorm",
        task="image-classification",
        head=True,
        max_positions=None,
    ),
    ("clip", "text"): CLIP,
    ("clip", "vision"): replace(CLIP, **VISION),
    ("clip-classifier", None): replace(CLIP, **VISION, task="image-classification", head=True),
    **dict.fromkeys(
        [("detr", None), ("detr-auxiliary", None)],
        replace(
            LLAMA,
            design="post",
            blocks=f"{OPT}.layers",
            final_norm=f"{OPT}.layernorm",
            task="detection",
            max_positions=None,
        ),
    ),
}


def proven(name: str, tower: str | None = None) -> tuple[tf.PreTrainedModel, Verified]:
    model = tiny_models.build(name)
    return model, verify(anatomy_candidates(model, tower=tower), tiny_models.inputs(model, tower=tower))


@pytest.mark.parametrize(("name", "tower"), tiny_models.DESIGNS)
def test_every_part_is_the_module_that_plays_it(name, tower):
    model, found = proven(name, tower)
    anatomy, expected = found.anatomy, EXPECTED[name, tower]
    assert (anatomy.family.design, anatomy.task) == (expected.design, expected.task)
    assert anatomy.blocks is model.get_submodule(expected.blocks)
    assert (anatomy.num_layers, anatomy.width) == (3, 32)
    for layer in (1, 2, 3):
        roles = ("attention", "mlp", "attention_branch", "mlp_branch")
        block = model.get_submodule(f"{expected.blocks}.{layer - 1}")
        for role, path in zip(roles, (expected.attention, expected.mlp, *expected.adds), strict=True):
            assert anatomy.part(layer, role) is block.get_submodule(path)
    assert anatomy.final_norm is (expected.final_norm and model.get_submodule(expected.final_norm))
    assert anatomy.has("value") is expected.value
    assert anatomy.branch_scale == (0.3 if name == "granite" else 1.0)
    # the blocks of that DETR read the normed state of the one before, those of a tree the sum of two earlier ones
    assert found.branches
    assert found.chained is (name not in ("detr-auxiliary", "depth_llama-tree"))
    assert (anatomy.head is not None, found.classifier is not None) == (expected.head, expected.head)
    assert anatomy.max_positions == expected.max_positions


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma2", "bert", "detr"])
def test_every_precision_is_proven_within_its_own_rounding(name, dtype):
    model = tiny_models.build(name, dtype=dtype)
    assert verify(anatomy_candidates(model), tiny_models.inputs(model)).branches


@pytest.mark.parametrize("name", ["gpt2", "roberta", "opt", "clip-text"])
def test_vocabulary_and_positions_are_what_the_embeddings_accept(name):
    model, found = proven(name)
    longest = torch.full((1, found.anatomy.max_positions), 5)
    longest[0, -2:] = torch.tensor([found.anatomy.vocab_size - 1, 2])  # CLIP looks for an end of text
    model(input_ids=longest)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        model(input_ids=torch.cat([longest[:, :1], longest], 1))
    with pytest.raises(IndexError):
        model(input_ids=longest + (longest == found.anatomy.vocab_size - 1))


def test_projections_are_every_weight_matrix_of_every_block():
    _, found = proven("gpt2")
    shapes = {(name, layer): tuple(module.weight.shape) for name, layer, module in found.anatomy.projections()}
    matrices = {"attn.c_attn": (32, 96), "attn.c_proj": (32, 32), "mlp.c_fc": (32, 128), "mlp.c_proj": (128, 32)}
    assert shapes == {(name, layer): shape for layer in (1, 2, 3) for name, shape in matrices.items()}


@pytest.mark.parametrize("tower", ["text", "vision"])
def test_both_towers_stand_the_tests_on_the_whole_models_inputs(tower):
    model = tiny_models.build("clip")
    everything = tiny_models.inputs(model) | tiny_models.inputs(model, tower="vision")
    assert verify(anatomy_candidates(model, tower=tower), everything).anatomy.family.tower == tower


def test_the_finder_takes_a_model_of_one_block():
    config = tf.Olmo2Config(
        **{k: v for k, v in tiny_models.DECODER.items() if k != "head_dim"} | {"num_hidden_layers": 1}
    )
    model = tf.Olmo2ForCausalLM(config).eval()
    assert verify(anatomy_candidates(model), tiny_models.inputs(model)).anatomy.num_layers == 1


T5 = tf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)


class Bare(tf.PreTrainedModel):
    config_class = tiny_models.ToyConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        self.first = nn.Linear(4, 4)
        self.post_init()


@pytest.mark.parametrize(
    ("build", "options", "name"),
    [
        (lambda: tiny_models.build("clip"), {}, "text or vision"),
        (lambda: tiny_models.build("clip"), {"tower": "audio"}, "audio"),
        (lambda: tf.T5ForConditionalGeneration(T5), {}, "encoder-decoder"),
        (lambda: Bare(tiny_models.ToyConfig()), {}, r"first \(Linear\)"),
        *(
            (lambda: tiny_models.build("llama"), {"override": {"blocks": "layers", **change}}, name)
            for change, name in (
                ({"atention": "self_attn"}, "'attention'"),
                ({"blocks": "layerz"}, "layerz"),
                ({"blocks": "norm"}, "norm"),
                ({"blocks": 3}, "blocks"),
                ({"final_norm": "nrm"}, "nrm"),
                ({"body": "modle"}, "modle"),
                ({"branch_scale": "multiplyer"}, "multiplyer"),
                ({"design": "sideways"}, "sideways"),
                ({"pool": "first"}, "head"),
            )
        ),
        (lambda: tiny_models.build("llama"), {"override": {"attention": "self_attn"}}, "blocks"),
        (lambda: tf.Wav2Vec2Model(zoo.config_for("wav2vec2")), {}, "input_values"),
    ],
)
def test_what_has_no_anatomy_is_refused_by_name(build, options, name):
    with pytest.raises(FulldepthError, match=name):
        anatomy_candidates(build(), **options)


def test_an_anatomy_in_the_settings_replaces_the_table():
    model = tiny_models.build("llama")
    (anatomy,) = anatomy_candidates(model, override={"blocks": "layers", "attention": "mlp", "name": "mine"})
    assert anatomy.family.name == "mine"
    assert anatomy.part(2, "attention") is model.model.layers[1].mlp
    assert anatomy.part(2, "mlp") is None
    assert not anatomy.has("mlp")


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


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_the_first_broken_weight_is_named(bad):
    model = tiny_models.build("llama").half()
    model.model.norm.weight.data[:] = 60000.0  # whose sum overflows
    assert first_broken_weight(model) is None
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4:6] = torch.tensor([bad, -bad])
        model.lm_head.weight[0, 0] = bad
    assert first_broken_weight(model) == "model.layers.1.mlp.up_proj.weight"
