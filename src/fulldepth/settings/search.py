"""Settings of `fulldepth skip search`; defaults < recipe < command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.settings.layers import SET, Applies
from fulldepth.settings.loading import SPREADING, Length, LoadingSettings, Rate, Seed, Share

Criterion = Literal["loss", "scaled", "kl"]
Method = Literal["greedy", "exact", "one-shot", "cosine", "groups", "taylor", "random", "last", "given"]
Granularity = Literal["attention", "mlp", "layer", "any"]
GgufType = Literal["f16", "bf16", "q8_0"]
ONE_PASS = ("cosine", "groups", "taylor")
"""Searches that rank blocks by one pass over the data, without losses."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

TARGETS = ("target_speedup", "target_bytes", "target_cache", "max_loss")
"""Settings that state what a search is for, in place of a number of blocks."""
OF_TARGETS = ("decode_share", "batch", "context")
"""Settings that describe the use for which a target is reached."""
CHOICE = ("search", "criterion", "blocks", *TARGETS, *OF_TARGETS, "budget", "pool", "exchanges", "confidence")
"""Settings of how blocks are chosen; a later source that gives the blocks drops what earlier ones say of it."""

Layer = Annotated[int, Field(ge=1, le=10_000)]
BlockName = Annotated[str, Field(pattern=r"^(attention|mlp|layer) [1-9][0-9]{0,8}$")]
"""A block of a plan with granularity `any`: `attention 7`, `mlp 12`, `layer 3`."""
Given = Annotated[Layer | BlockName, BeforeValidator(lambda v: int(v) if isinstance(v, str) and v.isdecimal() else v)]
Batch = Annotated[int, Field(ge=1, le=1_000_000)]
Rows = Annotated[int, Field(ge=1, le=10**12)]
Epochs = Annotated[int, Field(ge=1, le=100_000)]


def seconds_of(time: str) -> float:
    """The seconds of a time such as 90s, 10m or 2h.

    Raises:
        FulldepthError: for any other text, and for no time at all.
    """
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?) ?([smh])", time.strip())
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not seconds:
        raise FulldepthError(f"--budget is {one_line(repr(time), 60)}; expected a time such as 90s, 10m or 2h.")
    return seconds


def _a_time(text: str) -> str:
    seconds_of(text)
    return text


class SpreadSettings(LoadingSettings):
    """How a checkpoint is loaded that may be larger than a device."""

    device_map: str | dict[str, Any] | None = None
    """`auto` spreads a model over devices, CPU and disk; or a map of modules to devices and `disk`."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.device is not None and self.device_map is not None:
            raise FulldepthError("--device and --device-map contradict each other; leave one out.")
        return self


class HeldoutSettings(LoadingSettings):
    """How the data of a search, a curve or a benchmark are read."""

    batch_size: Batch = 8
    """Sequences in one forward pass when losses are computed."""
    sequence_length: Length | None = None
    """Tokens in a window of plain text; None = 256, or the model's positions if fewer."""
    max_sequences: Rows | None = None
    """Rows (or windows of text) to read; None = all."""
    chat: bool = True
    """Put prompts with responses into the tokenizer's chat template, if it has one; otherwise they are plain text.
    Chats always have the template."""
    seed: Seed = 0
    """Seed of the held-out fifth and of all other random choices."""


class SearchSettings(SpreadSettings, HeldoutSettings):
    """Everything that determines the plan that a search returns."""

    options: ClassVar = {
        "The target": ("blocks", *TARGETS, "decode_share", "keep"),
        "The search": ("search", "criterion", "granularity", "given", "budget", "losses", "seed"),
        "Data": ("max_sequences", "sequence_length", "batch_size", "chat"),
        "Healing": ("fit",),
        "Loading the model": SPREADING,
    }
    applies: ClassVar = (
        Applies(("decode_share", "batch"), {"target_speedup": SET, "max_loss": SET}),
        Applies(("context",), {"target_speedup": SET, "target_cache": SET, "max_loss": SET}),
        Applies(("budget", "pool"), {"search": ("greedy",)}),
        Applies(("max_loss", "exchanges", "confidence"), {"search": ("greedy", "exact")}),
        Applies(("criterion",), {"search": ("greedy", "exact", "one-shot")}),
        Applies(("losses",), {"search": (*ONE_PASS, "random", "last", "given")}),
        Applies(("pool", "exchanges"), {"criterion": ("loss", "kl")}),
        Applies(("learning_rate", "epochs", "patience"), {"fit": SET}),
        Applies(("fit_batch_size", "gradient_checkpointing"), {"fit": SET, "criterion": ("scaled",)}),
    )

    blocks: Layer | None = None
    """How many blocks to remove; None = until the target, or the number of `given` blocks."""
    target_speedup: Annotated[float, Field(gt=1, le=1000)] | None = None
    """Remove blocks until the model is predicted to be this many times as fast, such as 1.2. The prediction adds the
    times of the parts, measured on this machine."""
    target_bytes: Share | None = None
    """Remove until this share of the weights' bytes is left, such as 0.8."""
    target_cache: Share | None = None
    """Remove until this share of the cache of keys and values is left."""
    max_loss: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Remove blocks, the most time saved per nat first, while the held-out loss grows by at most this many nats."""
    decode_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the time that a served model spends decoding; the rest reads prompts. Weighs the parts' times."""
    context: Length = 512
    """Tokens of the prompt with which parts are timed, and caches counted."""
    batch: Batch = 1
    """Sequences with which parts are timed."""
    keep: Annotated[list[Layer], Field(max_length=10_000)] = Field(default=[])
    """Layers of which nothing is removed: 1,2,30."""
    pool: Batch | None = None
    """Candidates of every round after the first of a greedy search: those that added least per gain when last scored.
    None = all. What `confidence` promises then holds among these."""
    exchanges: Annotated[float, Field(ge=0, le=100)] | None = None
    """Most FLOPs of the exchanges after a greedy or exact search (one block comes back, another goes), relative to the
    search; None = 0.25 with a target, else 0."""
    criterion: Criterion = "loss"
    """What candidates are ranked by on held-out data: loss (of the untrained candidate), scaled (the loss after one
    epoch of training the scalars on the other data), kl (divergence from the unmodified model)."""
    search: Method = "greedy"
    """greedy: one by one, dropping clearly worse candidates early; exact: one by one, all on all data; one-shot,
    cosine, taylor, random, last: ranked once; groups: the run of neighbouring layers that turns the stream least (of
    granularity layer); given: the layers of `given`."""
    granularity: Granularity = "attention"
    """What a removed block is: attention, mlp, layer, or any of these (the default with a target)."""
    given: Annotated[list[Given], Field(max_length=10_000)] | None = None
    """The layers to remove, 1-based, in order: 3,7 (granularity any: attention 3,mlp 7); implies `search: given`. What
    a recipe says of the choice of blocks (search, criterion, blocks, targets) is left out then."""
    chunks: Batch = 32
    """Chunks of the held-out data, after each of which greedy may drop candidates; at most one for each sequence. Other
    searches read few data in chunks of four sequences, or of a batch if that is smaller."""
    confidence: Share = 0.95
    """Probability that a greedy round keeps its best candidate; see "What `greedy` promises" in docs/skipping.md. Also
    that with which a round of `greedy` or `exact` is called sure, and an exchange is chosen."""
    budget: Annotated[str, AfterValidator(_a_time)] | None = None
    """Time (90s, 10m, 2h) for the rounds of a greedy search; the losses of the plan on all data and the fits come on
    top. A round that it ends is noted in the plan (`stopped_by_budget`), and its choice is uncertain."""
    losses: bool | None = None
    """Compute the held-out loss of the model and after each removal. None = yes, unless blocks are ranked by
    cosine, groups or taylor and no scalars are trained: the ranking alone costs one pass over the data."""
    fit: bool = True
    """Train the healing scalars, and the control "scalars only"."""
    learning_rate: Rate = 3e-3
    """Learning rate of the scalars."""
    epochs: Epochs = 10
    """Most passes over the training examples."""
    fit_batch_size: Batch = 32
    """Examples in an optimiser step."""
    patience: Epochs = 2
    """Epochs without a better held-out loss before the training ends."""
    gradient_checkpointing: bool | None = None
    """Keep one state per block while scalars are trained, and run each block again in the backward pass: less memory,
    1.5 times the computation, the same result. None: where autograd would keep more than about 4 GiB, and where
    weights are offloaded."""

    @classmethod
    def without_outdated(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
        """Earlier values; where a later source gives the blocks, without those of their choice (`CHOICE`)."""
        kept = super().without_outdated(below, above)
        return {key: value for key, value in kept.items() if key not in CHOICE} if above.get("given") else kept

    @model_validator(mode="before")
    @classmethod
    def _implied_settings(cls, values: Any) -> Any:
        """A target implies the granularity `any`, `given` the search `given`, and no `losses` no `fit`, unless these
        are stated.
        """
        if not isinstance(values, dict):
            return values
        if values.get("given") and "search" not in values:
            values = {**values, "search": "given"}
        if values.get("losses") is False and "fit" not in values:
            values = {**values, "fit": False}
        if "granularity" not in values and any(values.get(name) for name in TARGETS):
            values = {**values, "granularity": "any"}
        return values

    @model_validator(mode="after")
    def _one_search(self) -> Self:
        if self.given is None and self.search == "given":
            raise FulldepthError("--search given needs the blocks to remove, such as --given 3,7.")
        if self.given is not None and self.search != "given":
            raise FulldepthError(f"--given names the blocks to remove, but --search is {self.search}; leave one out.")
        if self.search == "groups" and self.granularity != "layer":
            raise FulldepthError(
                f"--search groups removes whole layers, got --granularity {self.granularity}; set --granularity layer."
            )
        if self.losses is False and self.fit:
            raise FulldepthError(
                "--no-losses and --fit contradict each other: the training of scalars ends by the held-out loss. Leave "
                "one of them out."
            )
        stated = [name for name in (*TARGETS, "given" if self.given else "blocks") if getattr(self, name)]
        if len(stated) > 1:
            options = " and ".join(map(self.option, stated))
            raise FulldepthError(f"{options} contradict each other: a search has one target. Leave all but one out.")
        if self.given is not None and self.blocks not in (None, len(self.given)):
            raise FulldepthError(
                f"--given names {len(self.given)} blocks, but --blocks is {self.blocks}; leave --blocks out."
            )
        return self

    @property
    def computes_losses(self) -> bool:
        """Return True if the loss after each removal is computed."""
        return self.fit or self.search not in ONE_PASS if self.losses is None else self.losses

    @property
    def num_blocks(self) -> int | None:
        """How many blocks to remove: `blocks`, or as many as are `given`; None = until the target."""
        return self.blocks if self.given is None else len(self.given)

    @property
    def target(self) -> str | None:
        """The setting of `TARGETS` that is set."""
        return next((name for name in TARGETS if getattr(self, name) is not None), None)


class CurveSettings(SearchSettings):
    """Everything that determines a curve."""

    options: ClassVar = {
        "The search": ("blocks", "search", "granularity", "seed"),
        "Data": ("max_sequences", "sequence_length", "batch_size", "chat"),
        "Loading the model": SPREADING,
    }

    blocks: Layer = 12
    """Most blocks to remove; fewer, with a message, if the model has fewer. Of `given` layers all are removed."""
    fit: bool = False
    """Heal the last plan with scalars."""
    losses: Literal[True] = True
    """Computed always: they are the curve."""

    @model_validator(mode="before")
    @classmethod
    def _all_given_layers(cls, values: Any) -> Any:
        """The number of `given` layers replaces the default of `blocks`; a target is refused, and what describes it."""
        stated = values if isinstance(values, dict) else {}
        defaults = {name: cls._default(name) for name in (*TARGETS, *OF_TARGETS)}
        if target := next((name for name in defaults if stated.get(name, defaults[name]) != defaults[name]), None):
            raise FulldepthError(
                f"A curve removes a number of blocks (--blocks) and has no target; leave {cls.option(target)} out."
            )
        given = stated.get("given")
        return {"blocks": len(given), **values} if isinstance(given, list) and given else values


PLACES = {"device", "device_map", "gradient_checkpointing", "tokenizer", "revision", "trust_remote_code"}
"""Settings that a resumed search may change."""


class ExportSettings(SpreadSettings):
    """How `fulldepth skip apply` loads the model and writes its weights."""

    options: ClassVar = {
        "Loading the model": SPREADING,
        "Writing": ("shard_size", "gguf_type", "by_list"),
    }
    applies: ClassVar = (
        Applies(("gguf_type",), {"format": ("gguf",)}),
        Applies(("by_list",), {"format": ("layer", "mergekit")}),
        Applies(("shard_size", "tokenizer"), {"format": ("folded", "fast", "decilm", "layer")}),
    )

    dtype: str | None = None  # type: ignore[assignment]
    """float32, bfloat16; None = as in the search."""
    tokenizer: str | None = None
    """Folder or name; None = the search's."""
    shard_size: str | int = "5GB"
    """Maximum size of one weight file, such as 2GB; a number is in bytes."""
    gguf_type: GgufType | None = None
    """Type of changed matrices in a GGUF; None = the source's, or q8_0 where that cannot be written."""
    by_list: bool = False
    """Write the `layer` folder even if llama.cpp and mlx-lm would compute another model from it; transformers and vLLM
    read it correctly."""
