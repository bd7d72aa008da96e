"""Schema of `results.json`: types and ranges of the entries that pages, figures and comparisons read.

Every entry may be missing or null, and other entries are allowed, so that documents of other versions can be read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field

from fulldepth.errors import FulldepthError
from fulldepth.files import read_json, validated
from fulldepth.results.finding import Finding, Number

MOST_LAYERS = 1024
"""Most layers of a model."""

Whole = Annotated[int, Field(ge=0, lt=1 << 63)]
Layer = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Counts = Annotated[list[Whole], Field(max_length=MOST_LAYERS)]
"""One count for each of the layers 1..L."""
Interval = Annotated[list[Number], Field(min_length=2, max_length=2)]
"""Lower and upper end of a 95 % interval."""
Mapping = dict[str, Any]

SCHEMA_VERSION = 1
MOST_BYTES = 256 << 20
"""Largest document in bytes. A series has a lens grid for every checkpoint, about 1 MB for the deepest models."""


class Part(pydantic.BaseModel):
    """A JSON object whose known entries are checked; others are allowed."""

    model_config = pydantic.ConfigDict(extra="allow")


class Model(Part):
    """A model that was measured, trained or modified."""

    name: str | None = None
    class_name: str | None = Field(default=None, alias="class")
    task: str | None = None
    dtype: str | None = None
    hash: str | None = None
    revision: str | None = None
    num_layers: Layer | None = None
    parameters: Whole | None = None


class Split(Part):
    """One part of the data of a search."""

    name: str | None = None


class Data(Part):
    """The data of a measurement, training or search."""

    name: str | None = None
    kind: str | None = None
    hash: str | None = None
    text_hash: str | None = None
    sequences: Whole | None = None
    tokens: Whole | None = None
    documents: Whole | None = None
    train_sequences: Whole | None = None
    validation_sequences: Whole | None = None
    heldout: Split | None = None
    clusters: Whole | None = None
    """Number of units of independence, from which standard errors are computed."""
    unit: str | None = None
    """What a cluster is."""
    no_error: str | None = None
    """Reason why no standard error can be stated."""


class Policy(Part):
    """The token policy."""

    name: str | None = None
    sentence: str | None = None


class Sample(Part):
    """One sequence of a lens grid: [T] tokens, targets and saturation layers, [L+1][T] (token, probability)."""

    title: str | None = None
    tokens: list[str | None]
    targets: list[str | None]
    saturation: list[Whole | None]
    grid: list[list[tuple[str | None, Number | None]]]

    @pydantic.model_validator(mode="after")
    def _rectangular(self) -> Sample:
        lengths = {len(self.tokens), len(self.targets), len(self.saturation), *(len(row) for row in self.grid)}
        if len(lengths) > 1:
            raise ValueError(f"its rows have different lengths: {', '.join(map(str, sorted(lengths)[:4]))}")
        return self


class LensGrid(Part):
    """Predictions of every layer at every position of a few sequences."""

    samples: list[Sample] | None = None


class LeftOut(Part):
    """A measure that was left out."""

    measure: str | None = None
    reason: str | None = None


class Router(Part):
    """A dynamic router and the tokens nearest to it."""

    layer: Whole
    source: Whole
    head: Whole
    tokens: list[tuple[str | None, Number | None]]


class Routers(Part):
    """Some of the dynamic routers of a model."""

    of: Whole | None = None
    routers: list[Router] | None = None


class Timings(Part):
    """Seconds."""

    load: Number | None = None
    forward: Number | None = None
    total: Number | None = None


class RunSettings(Part):
    """Settings of the run."""

    objective: Mapping | None = None


class Fits(Part):
    """Fits of a plan's scalars."""

    healed: Mapping | None = None


class Cost(Part):
    """Cost of a search."""

    fit: Fits | None = None


class Plan(Part):
    """Blocks in the order of their removal."""

    model: Model | None = None
    data: Data | None = None
    granularity: str | None = None
    criterion: str | None = None
    search: str | None = None
    blocks: list[Layer] | None = None
    losses: list[Number | None] | None = None
    healed_loss: Number | None = None
    control_loss: dict[str, Number | None] | None = None
    cost: Cost | None = None


class Checkpoint(Part):
    """One step of a series."""

    step: Whole
    model: Model | None = None
    headline: dict[str, Finding] | None = None
    lens_grid: LensGrid | None = None
    left_out: list[LeftOut] | None = None


class Exit(Part):
    """Early exit with one rule, threshold and cache policy: over given sequences, or while generating."""

    rule: str | None = None
    threshold: Number | None = None
    policy: str | None = None
    split: str | None = None
    calibrated: bool | None = None
    exits: Counts | None = None
    accuracy: Share | None = None
    accuracy_stderr: Ratio | None = None
    loss: Number | None = None
    loss_stderr: Ratio | None = None
    agreement: Share | None = None
    agreement_stderr: Ratio | None = None
    drop: Number | None = None
    drop_stderr: Ratio | None = None
    drop_interval: Interval | None = None
    tokens: Whole | None = None
    theoretical_speedup: Ratio | None = None
    layers_computed: Ratio | None = None
    measured_speedup: Ratio | None = None
    measured_speedup_interval: Interval | None = None
    timing: str | None = None


class Full(Part):
    """The model without early exit, on the same data."""

    accuracy: Share | None = None
    accuracy_stderr: Ratio | None = None
    loss: Number | None = None
    loss_stderr: Ratio | None = None
    seconds: Ratio | None = None
    chance: Share | None = None
    no_advice: str | None = None


class Speed(Part):
    """Speed at equal accuracy and accuracy at equal speed, of one of several models."""

    full: Number | None = None
    speedup: Ratio | None = None
    speedup_at_baseline: Ratio | None = None
    at: dict[str, Number | None] | None = None


class GenerationStats(Part):
    """Counts and times of a generation."""

    mode: str | None = None
    reason: str | None = None
    tokens: Whole | None = None
    seconds: Ratio | None = None
    tokens_per_second: Ratio | None = None
    theoretical_speedup: Ratio | None = None
    layers_computed: Ratio | None = None
    prompt_positions: Counts | None = None
    layer_positions: Counts | None = None
    exits: Counts | None = None


class Generated(Part):
    """Prompts, the texts that continue them, and numbers on the generation."""

    prompts: list[str | None] | None = None
    texts: list[str | None] | None = None
    stats: GenerationStats | None = None


class ScoredTask(Part):
    """A task of an evaluation."""

    metric: str | None = None
    higher_is_better: bool | None = None
    count: Whole | None = None
    chance: Number | None = None
    advised: bool | None = None
    earliest: Layer | None = None
    earliest_by_estimate: Layer | None = None


class Compared(Plan):
    """One of several models: of a comparison, a benchmark or a quantisation."""

    label: str | None = None
    baseline: bool | None = None
    paired: bool | None = None
    """Whether differences to the baseline are paired; null for the baseline."""
    token_policy: Policy | None = None
    headline: dict[str, Finding] | None = None
    lens_grid: LensGrid | None = None
    left_out: list[LeftOut] | None = None
    warnings: list[str] | None = None
    settings: RunSettings | None = None
    recipe: str | None = None
    not_computed: list[Whole] | None = None
    exits: list[Exit] | None = None
    full: Full | None = None
    generation: list[Exit] | None = None
    tasks: dict[str, ScoredTask] | None = None


class Document(Part):
    """`results.json` of any kind."""

    kind: str | None = None
    created: str | None = None
    complete: bool | None = None
    seed: Whole | None = None
    recipe: str | None = None
    fingerprint: str | None = None
    settings: RunSettings | None = None
    model: Model | None = None
    data: Data | None = None
    groups: dict[str, str | int | None] | None = None
    token_policy: Policy | None = None
    versions: Mapping | None = None
    timings: Timings | None = None
    memory: Mapping | None = None
    sampling: Mapping | None = None
    machine: Mapping | None = None
    left_out: list[LeftOut] | None = None
    warnings: list[str] | None = None
    headline: dict[str, Finding] | None = None
    lens_grid: LensGrid | None = None
    router_tokens: Routers | None = None
    steps: list[Checkpoint] | None = None
    of: str | None = None
    step: Whole | None = None
    depth: str | None = None
    models: list[Compared] | None = None
    plan: Plan | None = None
    plans: dict[str, Plan | None] | None = None
    exits: list[Exit] | None = None
    full: Full | None = None
    generation: Generated | list[Exit] | None = None
    speedups: dict[str, Speed] | None = None
    tasks: dict[str, ScoredTask] | None = None


def read(path: Path) -> dict[str, Any]:
    """The document in a file, as plain values.

    Raises:
        FulldepthError: if it cannot be read, was written by another version, or an entry is of the wrong type or out
            of range.
    """
    value = read_json(path, most=MOST_BYTES)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if type(version) is not int or version != SCHEMA_VERSION:
        shown = version if isinstance(version, int) else type(version).__name__
        raise FulldepthError(f"{path} has schema version {shown}, this fulldepth reads {SCHEMA_VERSION}.")
    validated(path, value, Document)
    return dict(value)
