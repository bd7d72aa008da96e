"""What a task means for the model: its classes in transformers, and a new head on a checkpoint's body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_OBJECT_DETECTION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForObjectDetection,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.hf import (
    copy_to_exit_heads,
    find_exit_heads,
    find_gguf,
    has_exit_heads,
    load_checkpoint,
    load_config,
    packaged,
    restore_exit_heads,
    task_of,
)


@dataclass(frozen=True)
class HeadKind:
    """The models of one task."""

    auto: Any
    """Auto class that builds them."""
    mapping: Any
    """Configuration class -> model class."""
    noun: str
    common: tuple[str, ...]
    """Well-known model types."""

    def names(self, config: Any) -> list[str]:
        """Names of the model classes of a configuration, the usual one first; empty without any."""
        kinds = self.mapping.get(type(config), ())
        return [kind.__name__ for kind in (kinds if isinstance(kinds, list | tuple) else (kinds,))]


HEADS = {
    "causal-lm": HeadKind(
        AutoModelForCausalLM,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        "causal language model",
        ("depth_llama", "llama", "qwen3", "gpt2", "mistral"),
    ),
    "image-classification": HeadKind(
        AutoModelForImageClassification,
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        "image classifier",
        ("vit", "deit"),
    ),
    "text-classification": HeadKind(
        AutoModelForSequenceClassification,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "text classifier",
        ("bert", "roberta", "gpt2", "llama"),
    ),
    "detection": HeadKind(AutoModelForObjectDetection, MODEL_FOR_OBJECT_DETECTION_MAPPING, "detector", ("detr",)),
}
"""`TrainSettings.task` -> its models."""


def with_new_head(model: PreTrainedModel, checkpoint: str, dtype: torch.dtype) -> dict[str, Any]:
    """A checkpoint's weights for `model`: its body and, if it has one of the same classes, its head.

    A head that is missing, has another shape, or names other classes (or the same in another order) is that of `model`;
    so is the pooler of an encoder that was saved without one, as in stock fine-tuning.

    Args:
        model: the model to train, with the head as it was drawn.
        checkpoint: folder, GGUF file, package or Hub name.
        dtype: of the weights.

    Raises:
        FulldepthError: if the checkpoint lacks weights of the body.
    """
    own, body = model.state_dict(), f"{model.base_model_prefix}."
    if find_gguf(packaged(checkpoint)) is not None:
        return own | _gguf_body(model, checkpoint, dtype)
    loaded = load_checkpoint(
        checkpoint, dtype=dtype, device="cpu", model_class=type(model), config=model.config, may_lack=is_of_head
    )
    fresh = set(loaded.fresh)
    if not _same_classes(load_config(checkpoint), model.config):
        fresh |= {name for name in own if not name.startswith(body)}
    return {name: own[name] if name in fresh else weight for name, weight in loaded.model.state_dict().items()}


def _gguf_body(model: PreTrainedModel, checkpoint: str, dtype: torch.dtype) -> dict[str, Any]:
    """The body's weights from a GGUF file, which is read as a language model, by their names in `model`.

    Raises:
        FulldepthError: if they are not all of the weights of the model's body.
    """
    body = f"{model.base_model_prefix}."
    stored = load_checkpoint(checkpoint, dtype=dtype, device="cpu").model.base_model.state_dict()
    found = {body + name: weight for name, weight in stored.items()}
    if different := sorted(found.keys() ^ {name for name in model.state_dict() if name.startswith(body)}):
        raise FulldepthError(
            f"The body of {checkpoint} is not that of a {type(model).__name__}: {len(different)} weights are in one of "
            f"them only (first: {different[0]}). Start from a safetensors folder."
        )
    return found


def start_exit_heads(model: PreTrainedModel, checkpoint: str, method: str) -> list[str]:
    """Fill the exit heads of a model with those stored beside the checkpoint that it starts from; those of a language
    model without stored ones with copies of its own head, which comes from the checkpoint.

    Args:
        model: to train, with exit heads if its method trains any.
        checkpoint: folder or Hub name.
        method: name of the method, for messages.

    Returns:
        A sentence on what became of the stored heads; empty without any.

    Raises:
        FulldepthError: if the file is damaged, or holds heads of other layers.
    """
    path = find_exit_heads(packaged(checkpoint))
    if path is None and has_exit_heads(model) and task_of(model) == "causal-lm":
        copy_to_exit_heads(find_anatomy(model))
        return ["The heads of layers 1 to L-1 start as copies of the model's own."]
    if path is None:
        return []
    if not has_exit_heads(model):
        return [f"{checkpoint} has a head for every layer; method={method} leaves out all but the last layer's."]
    stored = load_config(checkpoint)
    if stored.num_labels != model.config.num_labels or not _same_classes(stored, model.config):
        return [f"The exit heads of {checkpoint} are for other classes; those of layers 1 to L-1 start anew."]
    restore_exit_heads(model, path)
    return [f"The heads of layers 1 to L-1 are those of {checkpoint}."]


def _same_classes(stored: Any, wanted: Any) -> bool:
    """Whether two configurations name the same classes in the same order, as far as both name any."""
    names = [
        [str(name).casefold() for _, name in sorted((config.id2label or {}).items())] for config in (stored, wanted)
    ]
    unnamed = (all(name.startswith("label_") for name in each) for each in names)
    return names[0] == names[1] or any(unnamed)


def is_of_head(model: PreTrainedModel, name: str) -> bool:
    """Whether a weight belongs to the head (or the pooler before it) and not to the body."""
    body = f"{model.base_model_prefix}."
    return not name.startswith(body) or "pooler" in name.split(".")
