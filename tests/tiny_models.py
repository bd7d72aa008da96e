"""Tiny random models of every supported family, built from config; no download, a few milliseconds each."""

from __future__ import annotations

import torch
import transformers as tf
from torch import nn

from fulldepth.architectures import DepthLlamaConfig, DepthLlamaForCausalLM

VOCAB, WIDTH, HEADS, LAYERS = 96, 32, 4, 3

SIZES = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {**SIZES, **MARKS, "vocab_size": VOCAB, "num_key_value_heads": 2, "max_position_embeddings": 64}
DECODER = {**PLAIN, "head_dim": 8}
ENCODER = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 64, "num_labels": 3}
VISION = {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 3}
CLIP_TEXT = {**ENCODER, **MARKS, "projection_dim": 16}
GEMMA = {**DECODER, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}


def _detr(**options):
    backbone = tf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = tf.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_queries=7,
        num_labels=3,
        **options,
    )
    return tf.DetrForObjectDetection(config)


def _clip(name):
    config = tf.CLIPConfig(text_config=CLIP_TEXT, vision_config={**VISION, "projection_dim": 16}, projection_dim=16)
    config.num_labels = 3
    return getattr(tf, name)(config)


def _depth_llama(**switches):
    model = DepthLlamaForCausalLM(DepthLlamaConfig(**DECODER, **switches))
    for parameter in model.parameters():
        if not parameter.any():  # what starts as a Llama has parts that do nothing yet
            parameter.data.normal_(std=0.05)
    return model


GPT2 = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "pad_token_id": 0}
NEOX = {**SIZES, **MARKS, "vocab_size": VOCAB, "max_position_embeddings": 64}


def built(kind, **options):
    """A function that makes a model from its configuration."""
    return lambda: kind(kind.config_class(**options))


BUILDERS = {
    "llama": built(tf.LlamaForCausalLM, **DECODER),
    "llama-classifier": built(tf.LlamaForSequenceClassification, **DECODER, num_labels=3),
    "depth_llama": _depth_llama,
    "depth_llama-scaled": lambda: _depth_llama(norm_scaling=True),
    "depth_llama-tree": lambda: _depth_llama(residual="tree", tree={1: (-1, 0), 2: (0, 1)}),
    "depth_llama-hyper": lambda: _depth_llama(residual="hyper", num_streams=2),
    "depth_llama-static": lambda: _depth_llama(memory="static"),
    "depth_llama-dynamic": lambda: _depth_llama(memory="dynamic", residual="tree"),
    "depth_llama-kv": lambda: _depth_llama(memory="kv", kv_init="public"),
    "mistral": built(tf.MistralForCausalLM, **DECODER),
    "qwen2": built(tf.Qwen2ForCausalLM, **DECODER),
    "qwen3": built(tf.Qwen3ForCausalLM, **DECODER),
    "gemma2": built(tf.Gemma2ForCausalLM, **GEMMA, final_logit_softcapping=3.0),
    "gemma3": built(tf.Gemma3ForCausalLM, **GEMMA),
    "gpt2": built(tf.GPT2LMHeadModel, **GPT2),
    "gpt2-classifier": built(tf.GPT2ForSequenceClassification, **GPT2, num_labels=3),
    "gpt_neox": built(tf.GPTNeoXForCausalLM, **NEOX),
    "gpt_neox-serial": built(tf.GPTNeoXForCausalLM, **NEOX, use_parallel_residual=False),
    "bert": built(tf.BertForMaskedLM, **ENCODER),
    "bert-classifier": built(tf.BertForSequenceClassification, **ENCODER),
    "bert-pretraining": built(tf.BertForPreTraining, **ENCODER),
    "bert-bare": built(tf.BertModel, **ENCODER),
    "roberta": built(tf.RobertaForMaskedLM, **ENCODER),
    "roberta-classifier": built(tf.RobertaForSequenceClassification, **ENCODER),
    "vit": built(tf.ViTForImageClassification, **VISION),
    "deit": built(tf.DeiTForImageClassification, **VISION),
    "clip": lambda: _clip("CLIPModel"),
    "clip-classifier": lambda: _clip("CLIPForImageClassification"),
    "clip-text": built(tf.CLIPTextModelWithProjection, **CLIP_TEXT),
    "clip-vision": built(tf.CLIPVisionModel, **VISION),
    "detr": _detr,
    "detr-auxiliary": lambda: _detr(auxiliary_loss=True),
}
"""Families of the table, with the heads that each row knows."""

UNLISTED = {
    "olmo2": built(tf.Olmo2ForCausalLM, **PLAIN),
    "opt": built(
        tf.OPTForCausalLM,
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        ffn_dim=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
    ),
    "llama-tied": built(tf.LlamaForCausalLM, **DECODER, tie_word_embeddings=True),
    "phi3": built(tf.Phi3ForCausalLM, **PLAIN),
    "granite": built(tf.GraniteForCausalLM, **PLAIN, residual_multiplier=0.3, logits_scaling=4.0),
    "cohere": built(tf.CohereForCausalLM, **PLAIN, logit_scale=0.25),
    "falcon": built(
        tf.FalconForCausalLM, vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS
    ),
    "electra": built(tf.ElectraForMaskedLM, **ENCODER, embedding_size=WIDTH),
    "distilbert": built(
        tf.DistilBertForMaskedLM, vocab_size=VOCAB, dim=WIDTH, hidden_dim=48, n_layers=LAYERS, n_heads=HEADS
    ),
}
"""Families that only the structural finder can know."""


def build(name, seed=0, dtype=torch.float32):
    """A tiny model in evaluation mode, with weights large enough that every part matters."""
    torch.manual_seed(seed)
    return strengthened((BUILDERS | UNLISTED)[name](), 4.0).to(dtype).eval()


@torch.no_grad()
def strengthened(model, factor):
    """The model with larger matrices, and gains and biases that are not 1 and 0, to catch a forgotten norm or bias."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif "embed" not in name:
            parameter.mul_(factor)
    return model


def ones(model):
    """The model with weights of 1, those that are trained with gradients of 0."""
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return model


@torch.no_grad()
def shaken(model, size=0.1):
    """The model, no weight of which is at its start."""
    for weight in model.parameters():
        weight.add_(size * torch.randn_like(weight))
    return model


def same_weights(one, other):
    """Whether two models, or two state dicts, hold the same weights bit by bit."""
    one, other = (held if isinstance(held, dict) else held.state_dict() for held in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], weight) for name, weight in other.items())


def gradients(model):
    """Name -> gradient of the weights that have one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


DESIGNS = [
    *(
        (name, None)
        for name in ("llama", "llama-classifier", "depth_llama-tree", "depth_llama-hyper", "gemma2", "gpt2")
    ),
    *((name, None) for name in ("gpt_neox", "cohere", "granite", "olmo2", "opt", "falcon", "bert", "bert-classifier")),
    *((name, None) for name in ("roberta", "distilbert", "vit", "clip-classifier", "detr", "detr-auxiliary")),
    ("clip", "text"),
    ("clip", "vision"),
]
"""One model for each design, with the tower to be chosen where it has two; all types are in `families`."""


def seeded(seed):
    """A generator of random numbers."""
    return torch.Generator().manual_seed(seed)


def token_ids(rows, length, seed=0, most=VOCAB):
    """[rows, length] ids without the special ones."""
    return torch.randint(3, most, (rows, length), generator=seeded(seed))


def inputs(model, batch=2, length=10, seed=1, tower=None):
    """A batch that the model (or one of its towers) accepts: text with a padded tail, or pictures."""
    generator = seeded(seed)
    if tower == "vision" or "pixel_values" in getattr(model, "main_input_name", "input_ids"):
        size = getattr(getattr(model.config, "vision_config", model.config), "image_size", 64)
        pixels = torch.randn(batch, 3, size, size, generator=generator)
        return {"pixel_values": pixels.to(model.dtype)}
    ids = torch.randint(3, VOCAB, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, length - 3 :] = 0
    ids[mask == 0] = model.config.get_text_config().pad_token_id or 0
    if model.config.model_type.startswith("clip"):
        ids[torch.arange(batch), mask.sum(1) - 1] = 2
    return {"input_ids": ids, "attention_mask": mask}


class ToyConfig(tf.PretrainedConfig):
    """Configuration of `Toy`."""

    model_type = "toy"

    def __init__(self, gives="tensor", num_hidden_layers=LAYERS, **options):
        self.gives, self.num_hidden_layers, self.hidden_size, self.pad_token_id = gives, num_hidden_layers, WIDTH, 0
        super().__init__(**options)


class ToyBlock(nn.Module):
    """x' = x + A(norm(x)), y = x' + M(norm(x')), with linear maps for attention and MLP."""

    def __init__(self, gives):
        super().__init__()
        self.gives = gives
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states):
        """A tensor, a tuple, or the input itself, overwritten."""
        if self.gives == "in-place":
            hidden_states += self.attention(self.norm1(hidden_states))
            hidden_states += self.mlp(self.norm2(hidden_states))
            return hidden_states
        middle = hidden_states + self.attention(self.norm1(hidden_states))
        out = middle + self.mlp(self.norm2(middle))
        return (out, None) if self.gives == "tuple" else out


class Toy(tf.PreTrainedModel):
    """The plainest stack of blocks; `config.gives`: what they give, a tensor, a tuple, or their input overwritten."""

    config_class = ToyConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(ToyBlock(config.gives) for _ in range(config.num_hidden_layers))
        self.post_init()

    def _init_weights(self, module):
        """torch's own."""

    def forward(self, input_ids, attention_mask=None):
        """[B, T, D] states after the last block."""
        states = self.embed(input_ids)
        for block in self.layers:
            states = block(states)
            states = states[0] if isinstance(states, tuple) else states
        return states


TOY_ANATOMY = {
    "blocks": "layers",
    "attention": "attention",
    "mlp": "mlp",
    "attention_norm": "norm1",
    "mlp_norm": "norm2",
    "value": "attention",
}
"""How settings describe `Toy`."""


def toy(gives="tensor", seed=0):
    """A `Toy` in evaluation mode."""
    torch.manual_seed(seed)
    return Toy(ToyConfig(gives=gives)).eval()
