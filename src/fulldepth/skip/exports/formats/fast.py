"""`fast`: skipped blocks do not exist, neither on disk nor in memory nor in the cache."""

from __future__ import annotations

from transformers import PreTrainedModel

from fulldepth.architectures import SKIPPED
from fulldepth.errors import FulldepthError
from fulldepth.skip.exports.formats.checkpoint import Draft, plain_values, save

GRANULARITIES = ("attention", "mlp")
PARTS = {
    "llama": (("self_attn", "input_layernorm"), ("mlp", "post_attention_layernorm")),
    "gpt2": (("attn", "ln_1"), ("mlp", "ln_2")),
    "gpt_neox": (("attention", "input_layernorm"), ("mlp", "post_attention_layernorm")),
    "gemma2": (
        ("self_attn", "input_layernorm", "post_attention_layernorm"),
        ("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}
PARTS |= dict.fromkeys(("mistral", "qwen2", "qwen3"), PARTS["llama"]) | {"gemma3_text": PARTS["gemma2"]}
"""`model_type` -> modules of a block that go with its attention, and with its MLP."""


def check(model: PreTrainedModel, skipped: int) -> None:
    """Refuse a family that has no such class.

    Raises:
        FulldepthError: with those that have one.
    """
    family, text = model.config.model_type, model.config.get_text_config(decoder=True)
    if text is not model.config:
        raise FulldepthError(
            f"A {type(model).__name__} also reads images, and fast is for text models alone. Save its text model as a "
            "checkpoint of its own and search that: text = AutoModelForCausalLM.from_config(model.config."
            "get_text_config()); text.base_model.load_state_dict(model.get_decoder().state_dict()); "
            "text.lm_head.load_state_dict(model.lm_head.state_dict()); text.save_pretrained(FOLDER)."
        )
    if family not in SKIPPED:
        raise FulldepthError(
            f"There is no class for {family} models without some of their parts. Available: "
            f"{', '.join(sorted(SKIPPED))}."
        )


def write(draft: Draft) -> list[str]:
    """Write a checkpoint of the class without the skipped parts, with its code."""
    family = draft.model.config.model_type
    kind = SKIPPED[family]
    attention = draft.plan.granularity == "attention"
    layers = sorted(draft.plan.blocks)
    config = kind.config_class(  # type: ignore[attr-defined]
        **plain_values(draft.model.config),
        skipped_attention=layers if attention else [],
        skipped_mlp=[] if attention else layers,
        stream_scale=list(draft.folding.stream_scale),
    )
    gone = tuple(
        f"{draft.blocks_name}.{layer - 1}.{name}." for layer in layers for name in PARTS[family][not attention]
    )
    weights = {name: weight for name, weight in draft.weights().items() if not name.startswith(gone)}
    save(draft, kind, config, weights)
    return [
        "The scalars are in the weights, and each norm's eps follows the scale of the stream that it reads.",
        f"transformers knows {config.model_type} only with trust_remote_code=True; fulldepth.skip.load needs nothing.",
    ]
