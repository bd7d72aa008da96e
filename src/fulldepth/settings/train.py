"""Settings of `fulldepth train`; defaults < recipe < command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field

from fulldepth.core.errors import FulldepthError
from fulldepth.settings.layers import SET, Applies, Settings, layer, read
from fulldepth.settings.loading import Amount, Count, Length, Precision, Rate, Seed, Share

NonNegativeSteps = Annotated[int, Field(ge=0, le=10**9)]
Batch = Annotated[int, Field(ge=1, le=10_000_000)]
NonNegativeRate = Annotated[float, Field(ge=0, le=1e3)]
Workers = Annotated[int, Field(ge=0, le=1024)]


class ModelSettings(Settings):
    """The model: built from a configuration or loaded from a checkpoint. Other keys go to its configuration."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    type: str = "llama"
    """`model_type` of the configuration: depth_llama, llama, qwen3, gpt2, any causal language model of transformers."""
    checkpoint: str | None = None
    """Folder or Hub name of the weights to start from; keys beside it change its configuration. Sizes, tokenizer and
    image processor of a recipe that names no checkpoint, or another one, are left out."""


SETTINGS = "settings.yaml"
"""The file of a run folder that holds its settings."""
MAY_DIFFER = {
    "about",
    "source",
    "log_every",
    "report_to",
    "workers",
    "device",
    "keep_checkpoints",
    "eval_every",
    "save_every",
    "micro_batch_size",
    "fsdp",
    "data.cache",
}
"""Settings that a resumed run may change, and in which runs of one method may differ."""
SWITCHES = (
    "type",
    "residual",
    "tree",
    "num_streams",
    "hyper_dynamic",
    "memory",
    "kv_init",
    "router_input",
    "router_top_p",
    "norm_scaling",
)
"""Options of a `depth_llama` that change no size and that a checkpoint of another type lacks."""


class DataSettings(Settings):
    """Data to train and validate on."""

    described_by: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "name": ("column", "config", "split", "streaming", "articles", "validation", "tokens")
    }

    name: str = "corpus:builtin/train"
    """corpus:builtin/train, a .txt, .jsonl or .parquet file or a folder of them, or a Hub data set; for images
    digits:builtin/train, or a folder of images."""
    column: str | None = None
    """Column that holds the text; None = the usual names."""
    config: str | None = None
    """Configuration of a Hub data set, for example sample-100BT."""
    split: str | None = None
    """Split of a Hub data set."""
    streaming: bool = False
    """Read a Hub data set as a stream instead of downloading it first."""
    articles: bool = False
    """Rows are lines of articles, which are the documents: each begins with a heading ` = Title = ` (WikiText)."""
    image_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Detection: pixels of the shorter edge that images are scaled to, the longer one to at most 5/3 of it; None = as
    the image processor that is named or the checkpoint's, else 800."""
    skip_bad: bool = False
    """Classification and detection: leave bad rows out (a damaged image, a label outside the classes, a text that is
    too long, a box outside its image) and count them in the warnings, instead of refusing the data."""
    truncate: bool = False
    """Classification: cut texts of more than `sequence_length` tokens there instead of refusing them."""
    validation: str | None = None
    """Data for validation (of several splits the validation or test split), or a folder of tokens as for `tokens`; None
    = held-out documents or rows."""
    validation_share: Share = 0.05
    """Share of the documents that is held out for validation."""
    validation_sequences: Batch | None = None
    """Most sequences in each validation; None = 32 of text and conversations, a uniform sample of 1,000 labelled
    rows."""
    across_documents: bool = True
    """Whether attention may cross from one document of a window into the next."""
    end_of_text: bool = True
    """Whether documents end with the tokenizer's end-of-text token. False = they are parts of texts: none is added, and
    the first token of a document, which nothing announces, is no target."""
    tokens: str | None = None
    """Folder of tokens that datatrove's DocumentTokenizer wrote with the run's tokenizer; read in place of `name`."""
    cache: str | None = None
    """Folder of the token cache of all runs; None = `tokens/` under $FULLDEPTH_CACHE, else under ~/.cache/fulldepth."""


WARMUP = ("warmup", "warmup_steps")
"""The two ways to state the length of the warm-up."""
NO_BOXES = {
    "crop": "the boxes would not follow",
    "rotation": "a rotated box is no box",
}
"""Change of an image that detection does not offer -> reason."""


class AugmentationSettings(Settings):
    """Random changes of training images; the defaults change nothing. Detection has `flip` alone."""

    crop: int = Field(default=0, ge=0, le=1024)
    """Pixels of black border that are added on each side of the model's input before a random crop to its size."""
    flip: bool = False
    """Mirror each image, left to right, with probability one half; the boxes of a detector follow."""
    rotation: float = Field(default=0.0, ge=0, le=180)
    """Largest angle of a random rotation, in degrees."""

    @property
    def changes(self) -> list[str]:
        """Names of the changes that are made."""
        return [name for name in ("flip", *NO_BOXES) if getattr(self, name)]


class ObjectiveSettings(Settings):
    """Penalties added to the cross-entropy.

    Other keys are the names of terms (`fulldepth.losses.TERMS`: `aligned`, `distillation`, `jump`, `coherence`,
    `orthogonality`, `similarity`), each a weight, or a mapping of options: the fields of the term's class, such as
    `weight`. None switches off a term of the method. `fulldepth.training` checks names and options.
    """

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)
    # Built-in names only: subclasses resolve this annotation in their own module.
    __pydantic_extra__: dict[str, float | dict[str, object] | None] = Field(init=False)

    number_is: ClassVar[str | None] = "weight"
    energy_warmup: NonNegativeSteps = 800
    """Optimiser steps with CR's energy penalty."""

    @property
    def terms(self) -> dict[str, float | dict[str, Any]]:
        """Enabled terms by name."""
        return {name: given for name, given in self.__pydantic_extra__.items() if given is not None}


class InitializerSettings(Settings):
    """Initialisation of weights that come from no checkpoint; the defaults are the model class's own."""

    distribution: Literal["model", "truncated-normal", "glorot"] = "model"
    """Distribution of matrices and embeddings. model: the class's own, normal with standard deviation
    model.initializer_range (0.02) in a llama; truncated-normal: standard deviation inputs**-0.5 (embeddings:
    channels**-0.5), cut at three of them (Meta Lingua); glorot: linear layers uniform with variance 2 / (inputs +
    outputs), embeddings N(0, 1) (DETR). Routers and Hyper-Connections keep their own initialisation."""
    output_scale: Rate = 1.0
    """Factor of the matrices that write into the residual stream (o_proj, down_proj): n**-0.5 for Hyper-Connections
    with n streams (arXiv 2409.19606, Sec. 4), (2 L)**-0.5 for a depth of L layers."""
    memory: Literal["model", "fan-in", "pseudocode"] = "model"
    """Initialisation of key and value projections that read a memory. model: as other matrices; fan-in: uniform within
    D**-0.5 (LIME's later code); pseudocode: uniform within (H_kv D d_h)**-0.5, kaiming_uniform of LIME App. E."""


class LoraSettings(Settings):
    """Low-rank adapters (LoRA, arXiv 2106.09685): a linear layer becomes `W + alpha / rank B A`, and only A and B are
    trained. Every checkpoint holds the merged weights. Needs peft: `fulldepth[lora]`.
    """

    rank: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Rows of A and columns of B; None = no adapters, all weights are trained."""
    alpha: Rate | None = None
    """Scale of the adapters; None = twice the rank."""
    target_modules: list[str] | None = None
    """Ends of the names of the linear layers with adapters, such as q_proj; None = all in the blocks."""


OF_TEXT = ("column", "streaming", "articles", "tokens", "across_documents", "end_of_text")
"""Settings of the data of packed text."""
IMAGES = ("image-classification", "detection")


class TrainSettings(Settings):
    """Everything that determines a training run; saved with it."""

    options: ClassVar = {
        "What is trained": ("method", "steps", "global_batch_size", "sequence_length", "seed", "tokenizer"),
        "Optimiser": ("learning_rate",),
        "Machine": ("precision", "device", "gradient_checkpointing", "fsdp"),
        "Evaluation and checkpoints": ("eval_every", "save_every", "report_to"),
    }
    applies: ClassVar = (
        Applies(tuple(f"data.{name}" for name in OF_TEXT), {"task": ("causal-lm",)}),
        Applies(tuple(f"data.{name}" for name in OF_TEXT), {"stage": ("pretrain",)}),
        Applies(("data.skip_bad",), {"task": ("text-classification", *IMAGES)}),
        Applies(("data.truncate",), {"task": ("text-classification",)}),
        Applies(("data.image_size", "backbone_learning_rate"), {"task": ("detection",)}),
        Applies(("processor",), {"task": IMAGES}),
        Applies(("milestones",), {"schedule": ("multistep",)}),
        Applies(("min_learning_rate",), {"schedule": ("cosine",)}),
        Applies(("log_every",), {"report_to": SET}),
        Applies(("lora.alpha", "lora.target_modules"), {"lora.rank": SET}),
    )
    described_by: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "method": ("objective",),
        "schedule": ("milestones", "min_learning_rate"),
    }

    task: Literal["causal-lm", "image-classification", "text-classification", "detection"] = "causal-lm"
    """What the model learns: the next token, the class of an image or of a text, or the objects in an image."""
    about: str = ""
    """One sentence on the recipe; `fulldepth train --list` shows it."""
    source: str = ""
    """Source of the values, and the choices made where the source does not state them."""
    stage: Literal["pretrain", "sft"] = "pretrain"
    """Of causal-lm. pretrain: every token of packed text counts; sft: the responses of conversations."""
    method: str = "standard"
    """Preset of the objective: baseline (standard), jreg, cr, aligned, cos-regularised (similarity), multi-exit (a
    head for each layer). Terms under `objective` override it; another method in a later source, such as the command
    line, replaces them. frozen-features trains new linear heads, one for each layer, on the features of a classifier's
    checkpoint, which stays as it is."""
    model: ModelSettings = ModelSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    initializer: InitializerSettings = InitializerSettings()
    lora: LoraSettings = LoraSettings()
    data: DataSettings = DataSettings()
    augmentation: AugmentationSettings = AugmentationSettings()
    tokenizer: str | None = None
    """Folder or Hub name; builtin:N trains a tokenizer of N tokens on the built-in corpus, wordpiece:N (as BERT's)
    and bpe:N on the run's own labelled texts; None = the checkpoint's."""
    processor: str | None = None
    """Folder or Hub name of an image processor (size, mean and deviation of pixels); None = the checkpoint's, else a
    plain one of the model's image size."""

    steps: Count = 200
    """Optimiser steps."""
    global_batch_size: Batch = 16
    """Sequences in an optimiser step, over all processes and accumulated micro-batches."""
    micro_batch_size: Batch | None = None
    """Sequences in one forward pass of one process, at most: the largest number that divides its share of the batch;
    None = all of it."""
    sequence_length: Length = 128
    """Tokens in a sequence."""
    seed: Seed = 0
    """Seed of weights, data order and dropout."""

    learning_rate: Rate = 1e-3
    """Peak learning rate of AdamW."""
    backbone_learning_rate: Rate | None = None
    """Peak learning rate of a detector's backbone; None = `learning_rate`."""
    router_learning_rate: Rate | None = None
    """Peak learning rate of memory routers; None = `learning_rate`."""
    min_learning_rate: NonNegativeRate = 0.0
    """Learning rate at the end of the cosine."""
    schedule: Literal["cosine", "linear", "constant", "multistep"] = "cosine"
    """Learning rate after the warm-up: cosine, linear, constant, or multistep, a tenth from each milestone on."""
    milestones: list[Share] = Field(default_factory=lambda: [0.5, 0.75])
    """Shares of the steps after which a multistep schedule divides the learning rate by ten."""
    warmup: float = Field(default=0.0, ge=0, le=1)
    """Share of the steps over which the learning rate rises linearly, rounded to whole steps."""
    warmup_steps: NonNegativeSteps | None = None
    """Steps of linear warm-up; None = the share `warmup` of the steps."""
    weight_decay: NonNegativeRate = 0.1
    """Weight decay of the parameters that `decay` selects."""
    decay: Literal["matrices", "all", "routers"] = "matrices"
    """matrices: all but norms, biases, embeddings, static routers and static parts of Hyper-Connections; all: every
    parameter (Meta Lingua); routers: dynamic and kv routers only (LIME App. A, literally)."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of the gradients, as in AdamW of torch."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of the squared gradients."""
    adam_epsilon: Rate = 1e-8
    """Added to the root of that mean."""
    clip: Amount = 1.0
    """Largest gradient norm; 0 = no clipping, also set by frozen-features, whose heads a common norm would couple."""

    precision: Precision = "float32"
    """float32; autocast: bfloat16 products, float32 weights; bfloat16: everything. Losses are float32 in all three."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Implementation of attention, by its name in transformers."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, a third more time."""
    compile: bool = False
    """torch.compile."""
    fsdp: bool = False
    """Shard weights, gradients and optimiser over the processes (FSDP2) instead of copying them (DDP)."""
    device: str | None = None
    """cpu or cuda; None = the accelerator if there is one."""
    workers: Workers | None = None
    """Data loading processes of each training process; no effect on results. None = up to 4, one for each core, and 0
    in a run of fewer than 2**24 tokens."""

    eval_every: Count = 50
    """Steps between validations (loss, displacement, jump rate)."""
    save_every: Count = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Count | None = None
    """Checkpoints to keep, the latest ones; None = all, so that the run can be measured as a series."""
    log_every: Count = 10
    """Steps between the training losses that `report_to` receives; it receives every evaluation."""
    report_to: list[str] = Field(default_factory=list)
    """Comma-separated trackers: wandb, tensorboard, mlflow, trackio, or any other of transformers' Trainer."""

    @classmethod
    def without_outdated(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
        """Earlier values, without the model, tokenizer and processor that belong to another start.

        Of a recipe's model only the switches of a `depth_llama` apply to a checkpoint that a later source names. A
        later warm-up, as a share or in steps, replaces an earlier one.
        """
        below = super().without_outdated(below, above)
        if not above.keys().isdisjoint(WARMUP):
            below = {key: value for key, value in below.items() if key not in WARMUP}
        stated, named = (source.get("model") for source in (below, above))
        model: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
        start = named.get("checkpoint") if isinstance(named, Mapping) else None
        if start is None or start == model.get("checkpoint"):
            return below
        switches = {key: model[key] for key in SWITCHES if key in model} if model.get("type") == "depth_llama" else {}
        return {key: value for key, value in below.items() if key not in ("tokenizer", "processor")} | {
            "model": switches
        }

    @classmethod
    def option(cls, name: str, value: Any = None) -> str:
        """Return a setting as a recipe and the command line have it: `schedule=linear`."""
        return name if value is None else f"{name}={value if isinstance(value, str) else json.dumps(value)}"

    @pydantic.model_validator(mode="after")
    def _rates_fit(self) -> Self:
        if self.warmup and self.warmup_steps is not None:
            raise FulldepthError(
                f"warmup={self.warmup} and warmup_steps={self.warmup_steps} both state the warm-up's length. Leave "
                "one out."
            )
        if self.warmup_length > self.steps:
            raise FulldepthError(f"warmup_steps is {self.warmup_steps}. Expected at most steps, which is {self.steps}.")
        if self.min_learning_rate > self.learning_rate:
            raise FulldepthError(
                f"min_learning_rate ({self.min_learning_rate}) is above learning_rate ({self.learning_rate})."
            )
        return self

    @pydantic.model_validator(mode="after")
    def _stage_fits(self) -> Self:
        if self.fsdp and self.task != "causal-lm":
            raise FulldepthError(f"fsdp=true is for task: causal-lm; leave it out for task: {self.task}.")
        if self.processor is not None and self.data.image_size is not None:
            raise FulldepthError(
                f"processor={self.processor} and data.image_size={self.data.image_size} both state the size of images. "
                "Leave one out."
            )
        if self.stage != "pretrain" and self.task != "causal-lm":
            raise FulldepthError(f"stage: sft trains on conversations, with task: causal-lm; got task: {self.task}.")
        if self.lora.rank is not None and (self.model.checkpoint is None or self.task != "causal-lm"):
            raise FulldepthError("lora.rank needs a language model to start from: model.checkpoint=FOLDER.")
        if self.freezes_features and (self.model.checkpoint is None or not self.task.endswith("-classification")):
            raise FulldepthError(
                "method: frozen-features trains new heads on the features of a checkpoint: it needs "
                "model.checkpoint=FOLDER and labelled data (task: image-classification or text-classification)."
            )
        for name in self.augmentation.changes:
            if self.task == "detection" and name in NO_BOXES:
                raise FulldepthError(
                    f"augmentation.{name} is not offered in detection: {NO_BOXES[name]}. augmentation.flip is."
                )
            if self.task not in ("image-classification", "detection"):
                raise FulldepthError(f"augmentation.{name} changes images; the data of task: {self.task} have none.")
        return self

    @property
    def freezes_features(self) -> bool:
        """True if only new linear heads are trained, one for each layer."""
        return self.method == "frozen-features"

    @property
    def unit(self) -> str:
        """Unit in which amounts of data are counted: tokens, texts, images, or sequences (of conversations)."""
        if self.stage == "sft":
            return "sequences"  # which differ in length
        return {"causal-lm": "tokens", "text-classification": "texts"}.get(self.task, "images")

    @property
    def units_per_step(self) -> int:
        """Number of `unit` in an optimiser step."""
        return self.global_batch_size * (self.sequence_length if self.unit == "tokens" else 1)

    @property
    def most_validation(self) -> int:
        """`data.validation_sequences`, or its default for the task."""
        return self.data.validation_sequences or (32 if self.task == "causal-lm" else 1000)

    @property
    def warmup_length(self) -> int:
        """Steps of linear warm-up: `warmup_steps`, else the share `warmup` of `steps`."""
        return round(self.warmup * self.steps) if self.warmup_steps is None else self.warmup_steps


def settings_of_run(model: str | Path) -> dict[str, Any] | None:
    """The settings of the run that trained a model: a run folder or one of its checkpoints; None for other models."""
    place = Path(model)
    for folder in (place, place.parent if place.name.startswith("checkpoint-") else place):
        try:
            if (folder / SETTINGS).is_file():
                return layer(TrainSettings, read(folder / SETTINGS, "train"), left_out=[]).model_dump(mode="json")
        except (FulldepthError, OSError):  # a file of another program
            continue
    return None
