"""Where the parts of each family are, against a table written from transformers' sources and its documentation."""

import math

import pytest
import torch
import transformers as tf
from torch import nn

import tiny_models
from families import zoo
from fulldepth.execution import verify
from fulldepth.hf import anatomy_candidates, first_broken_weight, load_checkpoint
from json_files import change_json
from refusals import refused

EXPECTED = {
    **dict.fromkeys(["llama", "granite", "gemma2", "olmo2", "opt", "gpt2"], ("pre", "causal-lm", 64)),
    **dict.fromkeys(["depth_llama-tree", "depth_llama-hyper"], ("pre", "causal-lm", 64)),
    **dict.fromkeys(["cohere", "gpt_neox"], ("parallel", "causal-lm", 64)),
    "falcon": ("parallel", "causal-lm", 2048),
    "llama-classifier": ("pre", "text-classification", 64),
    "bert": ("post", "masked-lm", 64),
    "bert-classifier": ("post", "text-classification", 64),
    "roberta": ("post", "masked-lm", 62),
    "distilbert": ("post", "masked-lm", 512),
    **dict.fromkeys(["vit", "clip-classifier"], ("pre", "image-classification", None)),
    **dict.fromkeys(["detr", "detr-auxiliary"], ("post", "detection", None)),
}
"""Model -> its design, task and most positions."""


def proven(name, tower=None):
    model = tiny_models.build(name)
    return model, verify(anatomy_candidates(model, tower=tower), tiny_models.inputs(model, tower=tower))


@pytest.mark.parametrize(("name", "tower"), tiny_models.DESIGNS)
def test_every_design_is_known_with_all_its_parts(name, tower):
    """That the parts are the right ones is tested with the sites, and by switching them off."""
    _, found = proven(name, tower)
    anatomy, positions = found.anatomy, 64 if tower == "text" else None
    facts = (anatomy.family.design, anatomy.task, anatomy.max_positions)
    assert facts == EXPECTED.get(name, ("pre", "representation", positions))
    assert (anatomy.num_layers, anatomy.width) == (3, 32)
    assert anatomy.has("value") is (name != "falcon")
    assert anatomy.branch_scale == (0.3 if name == "granite" else 1.0)
    # the blocks of that DETR read the normed state of the one before, those of a tree the sum of two earlier ones
    assert found.branches
    assert found.chained is (name not in ("detr-auxiliary", "depth_llama-tree"))
    assert (found.classifier is None) is (tower is not None)


@pytest.mark.parametrize(
    ("name", "dtype"), [("gemma2", torch.float16), ("bert", torch.bfloat16), ("detr", torch.bfloat16)]
)
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


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_layers_whose_weight_is_a_method_have_no_matrices():
    """torch's own 8-bit layers, whose `weight` has to be called."""
    model = torch.ao.quantization.quantize_dynamic(tiny_models.build("llama"), {nn.Linear})
    anatomy = anatomy_candidates(model)[0]
    assert not [*anatomy.projections(), *anatomy.expert_projections()]


def test_the_finder_takes_a_model_of_one_block():
    config = tf.Olmo2Config(**tiny_models.PLAIN | {"num_hidden_layers": 1})
    model = tf.Olmo2ForCausalLM(config).eval()
    assert verify(anatomy_candidates(model), tiny_models.inputs(model)).anatomy.num_layers == 1


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
        (lambda: tf.T5ForConditionalGeneration(zoo.config_for("t5")), {}, "encoder-decoder. Choose a stack"),
        (lambda: tf.WhisperForConditionalGeneration(zoo.config_for("whisper")), {}, "that reads input_features; of"),
        (lambda: Bare(tiny_models.ToyConfig()), {}, r"first \(Linear\)"),
        *(
            (lambda: tiny_models.build("llama"), {"override": {"blocks": "layers", **change}}, name)
            for change, name in (
                ({"atention": "self_attn"}, "'attention'"),
                ({"blocks": "layerz"}, "layerz"),
                ({"blocks": 3}, "blocks"),
                ({"final_norm": "nrm"}, "nrm"),
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
    with refused(name):
        anatomy_candidates(build(), **options)


@pytest.mark.parametrize(
    ("row", "fine"),
    [
        ([0.0, -math.inf, 1.0], True),
        ([-math.inf, -math.inf, -math.inf], False),
        ([0.0, math.inf, -math.inf], False),
        ([math.nan, 0.0, -math.inf], False),
    ],
)
@torch.no_grad()
def test_pruned_weights_are_not_broken_where_their_module_says_so(row, fine):
    """-inf prunes a weight of a static router; a router that has nothing left, and any other weight, is broken."""
    model = tiny_models.build("depth_llama-static")
    router = next(name for name, _ in model.named_parameters() if name.endswith("logits") and "layers.2" in name)
    model.get_parameter(router)[0] = torch.tensor(row)
    assert first_broken_weight(model) == (None if fine else router)
    model.get_parameter(router).zero_()
    model.model.norm.weight[3] = -math.inf
    assert first_broken_weight(model) == "model.norm.weight"


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_the_first_broken_weight_is_named(bad):
    model = tiny_models.build("llama").half()
    model.model.norm.weight.data[:] = 60000.0  # whose sum overflows
    assert first_broken_weight(model) is None
    model.model.layers[1].mlp.up_proj.weight.data[3, 4:6] = torch.tensor([bad, -bad])
    model.lm_head.weight.data[0, 0] = bad
    assert first_broken_weight(model) == "model.layers.1.mlp.up_proj.weight"


def test_a_model_without_layers_is_refused():
    config = tf.LlamaConfig(
        vocab_size=16, hidden_size=8, num_attention_heads=2, intermediate_size=8, num_hidden_layers=0
    )
    with refused("This LlamaForCausalLM has no layers: layers is empty"):
        anatomy_candidates(tf.LlamaForCausalLM(config))


def test_a_class_of_another_model_type_is_refused_by_both_names(tmp_path):
    """`architectures` chooses the class, which says nothing of the parts that `model_type` has."""
    tiny_models.build("llama").save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", model_type="gpt2")
    with refused("LlamaForCausalLM is not built as models of type gpt2 are", "config.json"):
        anatomy_candidates(load_checkpoint(tmp_path).model)
