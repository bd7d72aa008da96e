"""Builds the model of a run: configuration from settings, weights from a seed or a checkpoint."""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_OBJECT_DETECTION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForObjectDetection,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

import fulldepth.architectures  # noqa: F401  # registers this package's models with transformers
from fulldepth.core import launch
from fulldepth.core.errors import FulldepthError, unknown
from fulldepth.execution import find_anatomy
from fulldepth.hf import (
    anatomy_candidates,
    copy_to_exit_heads,
    find_exit_heads,
    full_attention_length,
    has_exit_heads,
    image_config,
    load_checkpoint,
    load_config,
    packaged,
    restore_exit_heads,
    rows_of,
    task_of,
    unused_positions,
)
from fulldepth.hf.asked_outputs import make_plain
from fulldepth.hf.exit_heads import output_layer
from fulldepth.hf.model_hash import TOKEN_IDS
from fulldepth.hf.promises import withdraw_promises
from fulldepth.hf.tying import UNTIED, state_untied, stores_apart
from fulldepth.losses import use_detection_loss
from fulldepth.losses.task import use_class_loss
from fulldepth.settings.train import SWITCHES, ModelSettings, TrainSettings
from fulldepth.training.frozen import freeze_features, keep_removed
from fulldepth.training.initial import draw_weights
from fulldepth.training.lora import add_adapters

WEIGHTS = {"float32": torch.float32, "autocast": torch.float32, "bfloat16": torch.bfloat16}
"""Precision of a run -> type of its weights, gradients and optimiser states."""
POSITIONS = "max_position_embeddings"
SIZE = re.compile(
    r"(hidden|vocab|image|patch)_size|head_dim|num_(hidden_)?layers|num_(attention|key_value)_heads|num_channels|"
    r"num_queries|d_model|n_embd|n_layers?|n_heads?|(en|de)coder_(layers|attention_heads)"
)
"""Names of options without which there is no model."""
TIED = "tie_word_embeddings"
NOT_OPTIONS = {
    "self",
    "kwargs",
    "transformers_version",
    "architectures",
    "output_hidden_states",
    "return_dict",
    "dtype",
}


class HeadKind(NamedTuple):
    """The models of one task."""

    auto: Any
    """Auto class that builds them."""
    mapping: Any
    """Configuration class -> model class."""
    noun: str
    common: tuple[str, ...]
    """Well-known model types, as examples in errors."""


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


class ModelOptions(NamedTuple):
    """The class of a model's configuration, what it starts from, and its options."""

    base: PreTrainedConfig | None
    """That of the checkpoint to start from."""
    kind: type[PreTrainedConfig]
    names: set[str]
    """Names of its options."""


def check_options(model: ModelSettings, task: str) -> ModelOptions:
    """Check before anything is made for the model that its type has the options that are given.

    Raises:
        FulldepthError: for an unknown type or option, or a checkpoint of another type.
    """
    try:
        base = None if model.checkpoint is None else load_config(model.checkpoint)
    except FulldepthError as error:
        raise FulldepthError(f"{error} model.checkpoint must name the checkpoint that training starts from.") from error
    kind = _kind(model, base, task)
    named = {field.name for field in fields(kind)} | set(inspect.signature(kind.__init__).parameters)
    known = {name for name in named | set(kind.attribute_map) if not name.startswith("_")} - NOT_OPTIONS
    for name in model.model_extra or {}:
        if name in known or (name == "num_labels" and task != "causal-lm"):
            continue
        if name in SWITCHES:
            raise FulldepthError(f"model.{name} is an option of model.type=depth_llama; {kind.model_type} has none.")
        raise unknown(f"option of {kind.model_type} under `model`", name, known)
    return ModelOptions(base, kind, known)


def build_config(
    model: ModelSettings,
    *,
    task: str = "causal-lm",
    vocab_size: int | None = None,
    positions: int | None = None,
    special_tokens: Mapping[str, int | None] | None = None,
    classes: Sequence[str] | None = None,
) -> PreTrainedConfig:
    """Build the configuration from settings; every key besides `type` and `checkpoint` is one of its options.

    With a checkpoint, the keys override the checkpoint's configuration, and `type: llama`, the default, means the
    checkpoint's own type. A class with switches also takes checkpoints of its stock family (`stock_model_type`).

    Args:
        model: the settings. Their keys override the arguments below.
        task: a key of `HEADS`, which determines the model's class.
        vocab_size: number of the tokenizer's tokens; None = given by the settings.
        positions: tokens in a sequence; without a checkpoint, the model gets exactly as many positions.
        special_tokens: `bos_token_id`, `eos_token_id` and `pad_token_id`, from `special_tokens(tokenizer)`.
        classes: names of the classes of a classifier or detector; None = given by the settings.

    Raises:
        FulldepthError: for an unknown type or option, values that the class refuses, fewer embeddings than the
            tokenizer has tokens, fewer positions than a sequence has tokens, or a checkpoint of another type.
    """
    base, kind, known = check_options(model, task)
    given = dict(model.model_extra or {})
    for name, size in given.items():
        if SIZE.fullmatch(kind.attribute_map.get(name, name)) and type(size) is int and size < 1:
            raise FulldepthError(f"model.{name} is {size}. Expected at least 1.")
    ids: dict[str, Any] = {name: value for name, value in (special_tokens or {}).items() if value is not None}
    if classes is not None:
        given.pop("num_labels", None)  # checked against the classes
        if task.endswith("-classification"):
            ids["problem_type"] = "single_label_classification"  # models set it in their first pass
        ids |= {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    try:
        if base is None:
            defaults = {"vocab_size": vocab_size, POSITIONS: positions}
            sizes = {name: size for name, size in defaults.items() if size is not None and name in known} | given
            limit = sizes.get("vocab_size") or math.inf
            # The class's default ids belong to the original tokenizer and may lie outside the vocabulary.
            default_ids = {field.name: field.default for field in fields(kind) if field.name in TOKEN_IDS}
            outside = {
                name: None for name, number in default_ids.items() if isinstance(number, int) and number >= limit
            }
            options = outside | sizes | ids | given
            config = kind(**options)
            _check_embeddings(config, vocab_size)  # before the class is built, which fails on padding without one
            if POSITIONS in sizes and POSITIONS not in given:
                config = kind(**options | {POSITIONS: sizes[POSITIONS] + _number_from(unused_positions, config, task)})
        else:
            changes = {kind.attribute_map.get(name, name): value for name, value in (ids | given).items()}
            identity = ("model_type", "architectures", "auto_map", "_name_or_path")  # of the checkpoint and its code
            options = {name: value for name, value in base.to_dict().items() if name not in identity}
            config = kind.from_dict(options | changes)
            _check_embeddings(config, vocab_size)
            if task == "causal-lm" and stores_apart(str(model.checkpoint), meta_model(config, task)):
                if changes.get(TIED):
                    raise FulldepthError(
                        f"{model.checkpoint} has a separate output layer, which model.{TIED}=true would drop. Leave "
                        f"model.{TIED} out."
                    )
                state_untied(config)
    except FulldepthError:
        raise
    except KeyError as error:  # the class looked a value up, such as the name of an activation function
        value = error.args[0]
        names = [f"model.{name} is" for name, stated in given.items() if stated == value] or ["A class looked up"]
        raise FulldepthError(
            f"The settings do not describe a {kind.model_type}: {names[0]} {value!r}, which it does not know."
        ) from error
    except (StrictDataclassError, ValueError, TypeError, AttributeError) as error:
        raise FulldepthError(f"The settings do not describe a {kind.model_type}: {_reason(error)}") from error
    make_plain(config)
    withdraw_promises(config, ())  # no class of transformers trains such layers
    _check_sizes(config, task, positions)
    if not config.architectures:  # some types have several classes for a task, such as DeiT with one head or two
        kinds = HEADS[task].mapping[type(config)]
        config.architectures = [(kinds[0] if isinstance(kinds, list | tuple) else kinds).__name__]
    return config


def tying_notes(config: PreTrainedConfig, settings: TrainSettings) -> list[str]:
    """Return a warning if the checkpoint's configuration ties weights that `config` does not, else nothing."""
    start = settings.model.checkpoint
    if start is None or TIED in (settings.model.model_extra or {}) or getattr(config, TIED, False):
        return []
    return [UNTIED] if getattr(load_config(start), TIED, False) else []


def special_tokens(tokenizer: Any) -> dict[str, int | None]:
    """Return the ids of the bos, eos and padding token by their names in a configuration.

    Padding is None if it equals one of the other two, because the embedding of a padding token is never trained.
    """
    ids = {name: getattr(tokenizer, name, None) for name in TOKEN_IDS}
    if ids["pad_token_id"] in (ids["bos_token_id"], ids["eos_token_id"]):
        ids["pad_token_id"] = None
    return ids


def build_model(config: PreTrainedConfig, settings: TrainSettings) -> PreTrainedModel:
    """Build the model on the CPU, in the run's precision and in training mode; a detector has transformers' loss.

    The loss of a classifier is float32 in every precision.

    If `built_once`, only the first process has its values, and hands out the shards.

    Weights are drawn from the seed by the rules of `initializer`, or loaded from the settings' checkpoint. Only weights
    that the model's switches add (`added_parameters`) may be missing there; they are drawn from the seed. The global
    random state is restored.

    Args:
        config: configuration from `build_config`.
        settings: the run's settings; seed, precision, attention, initializer and checkpoint are used.

    Raises:
        FulldepthError: if the attention is not available, the initializer does not apply to the model, or the
            checkpoint's weights do not fit, or lack some that adapters alone would leave as they are drawn.
    """
    start = settings.model.checkpoint
    with torch.random.fork_rng(devices=[]):
        if settings.fsdp and not launch.is_main():
            with init_empty_weights(include_buffers=False):
                empty = _from_config(config, settings)
            empty.tie_weights()
            if built_once(empty, settings):
                return _without_values(empty).train()
        torch.manual_seed(settings.seed)
        model = _from_config(config, settings)
        draw_weights(model, settings.initializer)
        if start is not None:
            _take_weights(model, start, settings)
            keep_removed(model, start)
        if settings.freezes_features:
            freeze_features(find_anatomy(model))
        torch.manual_seed(settings.seed)
        add_adapters(model, settings.lora)
    if settings.task.endswith("-classification"):
        use_class_loss(model)
    if settings.task == "detection":
        use_detection_loss(model)
        anatomy = find_anatomy(model)
        if anatomy.family.backbone is not None:  # transformers freezes all of its ResNet, which lacks timm's names
            anatomy.body.get_submodule(anatomy.family.backbone).requires_grad_(True)
    model.train()
    return model


def built_once(model: PreTrainedModel, settings: TrainSettings) -> bool:
    """Return True if only the first process needs the values of a model's weights before they are sharded.

    All processes need them if the model runs before it is sharded (to separate documents, or to check an anatomy that
    is not in the table), for exit heads, which start as copies, for adapters, and for saved buffers, which accelerate
    does not hand out.
    """
    try:
        anatomy = anatomy_candidates(model)[0]
    except FulldepthError:
        return False
    runs = rows_of(model.config.model_type) is None or anatomy.searches_head or not settings.data.across_documents
    adds = "multi_exit" in settings.objective.terms or bool(settings.lora.rank)
    buffers = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False))
    return settings.fsdp and not (runs or adds or buffers)


def _without_values(model: PreTrainedModel) -> PreTrainedModel:
    """Replace weights on the meta device by weights on the CPU that take address space and no memory, in place.

    accelerate tells weights apart by their addresses.
    """
    replaced: dict[Any, nn.Parameter] = {}  # a tied weight is replaced by one weight
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                empty = nn.Parameter(torch.empty_like(weight, device="cpu"), requires_grad=weight.requires_grad)
                module._parameters[name] = replaced.setdefault(weight, empty)
    return model


def _from_config(config: PreTrainedConfig, settings: TrainSettings) -> PreTrainedModel:
    """Build the model with the initial weights of its class."""
    head = HEADS[settings.task]
    attention = None if settings.attention == "sdpa" else settings.attention  # None: sdpa, or eager if it lacks sdpa
    try:
        return head.auto.from_config(
            config,
            dtype=WEIGHTS[settings.precision],
            attn_implementation={"": attention} if settings.task == "detection" else attention,  # not the backbone
            trust_remote_code=False,
        )
    except (ValueError, ImportError) as error:
        raise FulldepthError(f"Cannot build a {config.model_type}: {_reason(error)}") from error


def meta_model(config: PreTrainedConfig, task: str = "causal-lm") -> PreTrainedModel:
    """Build the model without storage, on the meta device: names and shapes only, whatever kernels it will run.

    It is in evaluation mode, in which batch norm accepts a single image.

    Args:
        config: the model's configuration, from `build_config`.
        task: a key of `HEADS`.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return HEADS[task].auto.from_config(config, trust_remote_code=False).eval()


def _kind(model: ModelSettings, base: PreTrainedConfig | None, task: str) -> type[PreTrainedConfig]:
    """Return the configuration class for the settings; refuse one that does not fit the task or the checkpoint."""
    head = HEADS[task]
    if base is not None and model.type in (base.model_type, ModelSettings.model_fields["type"].default):
        kind = type(base)
    elif model.type in CONFIG_MAPPING:
        kind = CONFIG_MAPPING[model.type]
    else:
        kinds = [config.model_type for config in head.mapping]
        raise unknown("model type", model.type, {*head.common, *get_close_matches(model.type, kinds, n=3)})
    if kind not in head.mapping:
        changes = [f"task={name}" for name, other in HEADS.items() if kind in other.mapping]
        if base is None:
            changes.append(f"model.type={head.common[0]}")
        advice = f" Set {' or '.join(changes)}." if changes else ""
        raise FulldepthError(
            f"Model type {kind.model_type!r} is no {head.noun} and cannot be trained for task: {task}.{advice}"
        )
    stock = getattr(kind, "stock_model_type", None)
    if base is not None and not isinstance(base, kind) and base.model_type != stock:
        also = f" or {stock}" if stock else ""
        raise FulldepthError(
            f"{model.checkpoint} is a {base.model_type}, but model.type: {kind.model_type} needs a checkpoint of type "
            f"{kind.model_type}{also}. Leave out model.type to keep the checkpoint's."
        )
    return kind


def _check_embeddings(config: PreTrainedConfig, vocab_size: int | None) -> None:
    """Refuse a model with fewer embeddings than the tokenizer has tokens."""
    embeddings = getattr(config.get_text_config(), "vocab_size", None)
    if vocab_size is not None and embeddings is not None and embeddings < vocab_size:
        raise FulldepthError(
            f"The tokenizer has {vocab_size:,} tokens, but the model has {embeddings:,} embeddings (model.vocab_size); "
            "it needs one for each token."
        )


def _check_sizes(config: PreTrainedConfig, task: str, positions: int | None) -> None:
    """Refuse a language model that reads later tokens, and one with too few positions."""
    if task == "causal-lm" and reads_later_tokens(config, HEADS[task].mapping[type(config)]):
        raise FulldepthError(
            f"A {config.model_type} reads the tokens that it should predict. Set model.is_decoder=true or another task."
        )
    images = image_config(config)
    image = getattr(images, "image_size", None)
    patch = getattr(images, "patch_size", None)
    if isinstance(image, int) and isinstance(patch, int) and image < patch:
        raise FulldepthError(f"model.image_size is {image}. Expected at least model.patch_size, which is {patch}.")
    text = config.get_text_config()  # differs from `config` for models that also read images
    room = getattr(text, POSITIONS, None)
    # XLNet's -1 means no limit
    if positions and room and 0 < room < positions + (unused := _number_from(unused_positions, config, task)):
        also = f", of which no token uses the first {unused:,}" if unused else ""
        raise FulldepthError(
            f"Sequences of {positions:,} tokens do not fit the model's {room:,} positions ({POSITIONS}){also}."
        )
    if positions and 0 < (longest := _number_from(full_attention_length, config, task)) < positions:
        raise FulldepthError(
            f"A {config.model_type} reads texts of more than {longest:,} tokens with sparse attention, and no longer "
            "does so once it has read a shorter one. Set sequence_length to this number or less, or "
            "model.attention_type=original_full."
        )


def _number_from(number: Callable[[nn.Module], int | None], config: PreTrainedConfig, task: str) -> int:
    """Return a number of the model that a configuration describes; 0 if it has none, or cannot be built."""
    try:
        return number(meta_model(config, task)) or 0
    except (ValueError, ImportError):  # `build_model` raises the error with its reason
        return 0


def _take_weights(model: PreTrainedModel, checkpoint: str, settings: TrainSettings) -> None:
    """Copy a checkpoint's weights into a model, and for a language model its generation settings.

    The model may have further weights of switches, or another head.
    """
    dtype = WEIGHTS[settings.precision]
    if settings.task != "causal-lm":
        source = with_new_head(model, checkpoint, dtype, frozen=settings.freezes_features)
    else:
        loaded = load_checkpoint(checkpoint, dtype=dtype, device="cpu").model
        source = loaded.state_dict()
        with suppress(ValueError, AttributeError):  # settings that transformers would refuse to save are not copied
            loaded.generation_config.validate(strict=True)
            model.generation_config = loaded.generation_config
    try:
        report = model.load_state_dict(source, strict=False)
    except RuntimeError as error:
        raise FulldepthError(
            f"The weights of {checkpoint} do not fit the model: {_reason(error)} Keys under `model` must not change "
            "the checkpoint's sizes."
        ) from error
    name = type(model).__name__
    if lacking := sorted(set(report.missing_keys) - getattr(model, "added_parameters", set)()):
        raise FulldepthError(
            f"{checkpoint} lacks {len(lacking)} weights that {name} needs (first: {lacking[0]}); they would be random."
        )
    if report.missing_keys and settings.lora.rank:
        raise FulldepthError(
            f"lora.rank trains adapters alone, and {checkpoint} lacks {len(report.missing_keys)} weights of the "
            f"model's switches (first: {report.missing_keys[0]}), which would stay as they are drawn. Leave lora.rank "
            "out, or start from a checkpoint that has them."
        )
    if unused := sorted(report.unexpected_keys):
        raise FulldepthError(
            f"{checkpoint} holds {len(unused)} weights that {name} does not use with these settings (first: "
            f"{unused[0]}); training would start from another model."
        )


def with_new_head(
    model: PreTrainedModel, checkpoint: str, dtype: torch.dtype, *, frozen: bool = False
) -> dict[str, Any]:
    """Return a checkpoint's weights for `model`: its body and, if it has one for the same classes, its head.

    A head that is missing, has another shape, or names other classes (or the same in another order) is replaced by that
    of `model`; so is the pooler of an encoder that was saved without one, as in stock fine-tuning.

    Args:
        model: the model to train, with a new head.
        checkpoint: folder, package or Hub name.
        dtype: type of the weights.
        frozen: whether only the last linear layer of the head will be trained; all else must be in the checkpoint.

    Raises:
        FulldepthError: if the checkpoint lacks weights of the body, or weights that will be frozen.
    """
    initial = model.state_dict()
    body = f"{model.base_model_prefix}."
    output = {*output_layer(find_anatomy(model))[2].parameters()} if frozen else set()
    trained = {name for name, weight in model.named_parameters() if weight in output}
    loaded = load_checkpoint(
        checkpoint,
        dtype=dtype,
        device="cpu",
        model_class=type(model),
        config=model.config,
        may_lack=lambda _, name: (
            name in trained or (not frozen and (not name.startswith(body) or "pooler" in name.split(".")))
        ),
    )
    fresh = set(loaded.fresh)
    if not frozen and not _same_classes(load_config(checkpoint), model.config):
        fresh |= {name for name in initial if not name.startswith(body)}
    return {name: initial[name] if name in fresh else weight for name, weight in loaded.model.state_dict().items()}


def start_exit_heads(model: PreTrainedModel, checkpoint: str) -> list[str]:
    """Fill the exit heads of a model with those stored beside the checkpoint that it starts from.

    In a language model whose checkpoint stores none, they start as copies of its own head.

    Args:
        model: the model to train, with exit heads if its method trains any.
        checkpoint: folder or Hub name.

    Returns:
        A sentence on the source of the exit heads; empty without any.

    Raises:
        FulldepthError: if the file is damaged, or holds heads of other layers.
    """
    path = find_exit_heads(packaged(checkpoint))
    if path is None and has_exit_heads(model) and task_of(model) == "causal-lm":
        copy_to_exit_heads(find_anatomy(model))
        return ["The heads of layers 1 to L-1 start as copies of the model's own."]
    if path is None or not has_exit_heads(model):
        return []
    stored = load_config(checkpoint)
    if stored.num_labels != model.config.num_labels or not _same_classes(stored, model.config):
        return [f"The exit heads of {checkpoint} are for other classes, so new ones are trained for layers 1 to L-1."]
    restore_exit_heads(model, path)
    return [f"The heads of layers 1 to L-1 are those of {checkpoint}."]


def _same_classes(stored: Any, wanted: Any) -> bool:
    """Return True if two configurations name the same classes in the same order, as far as both name any."""
    names = [
        [str(name).casefold() for _, name in sorted((config.id2label or {}).items())] for config in (stored, wanted)
    ]
    return names[0] == names[1] or any(all(name.startswith("label_") for name in classes) for classes in names)


def _reason(error: Exception) -> str:
    """Return the last line of an error message, where strict configurations state the cause."""
    return (str(error).strip().splitlines() or [repr(error)])[-1][:300].strip()


def reads_later_tokens(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> bool:
    """Return True if the model would read the tokens that it should predict.

    Encoders with a causal head (BERT's relatives) mask later tokens only if `is_decoder` is true. Other classes never
    read the option (GPT-NeoX), or set it themselves (decoders of BART's relatives).

    Args:
        config: the model's configuration.
        model_class: the model's class.
    """
    code = inspect.getsource(sys.modules[model_class.__module__])
    if getattr(config, "is_decoder", True) is not False or not re.search(r"config\.is_decoder\b(?! = )", code):
        return False
    return re.search(r"^ +(self\.)?config\.is_decoder = True", inspect.getsource(model_class), re.MULTILINE) is None
