"""`results.json`: its first entries, findings, and the schema: types and ranges of the entries that are read.

Every entry may be missing or null, and other entries are allowed, so that documents of other versions can be read.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

from fulldepth import __version__
from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import read_json, validated

Number = Annotated[float, Field(allow_inf_nan=False)]
"""A number that is valid JSON."""


@dataclass(frozen=True)
class Finding:
    """One number of the headline, written by every command and read by pages and comparisons.

    The types are the schema of an entry of `headline` in `results.json`; they are checked when a document is read.
    """

    value: Number | None
    """None if it is not known."""
    unit: str = "1"
    sentence: str | None = None
    """Explanation of the value."""
    standard_error: Number | None = None
    """Standard error, in the unit of the value."""
    no_standard_error: str | None = None
    """Reason for a missing standard error or interval, for numbers that usually have one."""
    interval: tuple[Number, Number] | None = None
    """Ends of the 95 % interval of a step (a layer, a threshold), which has no standard error, or of a mean over
    seeds."""

    def document(self) -> dict[str, Any]:
        """The JSON object: `value`, `unit` and the entries that are not None.

        `standard_error` is null where `no_standard_error` gives the reason.
        """
        entries: dict[str, Any] = {"value": self.value, "unit": self.unit}
        if self.interval is not None:
            entries["interval"] = list(self.interval)
        elif self.standard_error is not None or self.no_standard_error is not None:
            entries["standard_error"] = self.standard_error
        texts = {"sentence": self.sentence, "no_standard_error": self.no_standard_error}
        return entries | {name: text for name, text in texts.items() if text is not None}


SCHEMA_VERSION = 1
MOST_LAYERS = 1024
"""Most layers of a model."""
MOST_BYTES = 256 << 20
"""Largest document in bytes. A series has a lens grid for every checkpoint, about 1 MB for the deepest models."""

Whole = Annotated[int, Field(ge=0, lt=1 << 63)]
Layer = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Counts = Annotated[list[Whole], Field(max_length=MOST_LAYERS)]
"""One count for each of the layers 1..L."""
Interval = Annotated[list[Number], Field(min_length=2, max_length=2)]
"""Lower and upper end of a 95 % interval."""
Object = dict[str, Any]
Texts = list[str | None]
Tokens = list[tuple[str | None, Number | None]]
"""Tokens with a number each."""


class Entries(pydantic.BaseModel):
    """A JSON object. Entries that are not listed may hold anything."""

    model_config = pydantic.ConfigDict(extra="allow")


class ModelEntry(Entries):
    """The model that was run."""

    name: str | None = None
    class_name: str | None = Field(default=None, alias="class")
    task: str | None = None
    dtype: str | None = None
    hash: str | None = None
    revision: str | None = None
    num_layers: Layer | None = None
    skips: list[Literal["attention", "layer"]] | None = None
    """Of `attention` and `layer`, what `fulldepth skip search` removes."""
    parameters: Whole | None = None
    training_flops: Ratio | None = None
    """Of a training run with all its steps, without penalties and evaluations."""


class SplitEntry(Entries):
    """One part of the data of a search."""

    name: str | None = None
    unit: str | None = None
    documents: Whole | None = None
    clusters: Whole | None = None


class DataEntry(Entries):
    """The data that the model read."""

    name: str | None = None
    path: str | None = None
    kind: str | None = None
    hash: str | None = None
    text_hash: str | None = None
    unit: str | None = None
    no_error: str | None = None
    sequences: Whole | None = None
    tokens: Whole | None = None
    documents: Whole | None = None
    train_sequences: Whole | None = None
    validation_sequences: Whole | None = None
    clusters: Whole | None = None
    independent: Ratio | None = None
    """The number of groups of clusters for Student's t, by their tokens."""
    heldout: SplitEntry | None = None
    train: SplitEntry | None = None


class SampleEntry(Entries):
    """One sequence of T tokens in a lens grid."""

    title: str | None = None
    tokens: Texts
    targets: Texts
    saturation: list[Whole | None]
    """[T] saturation layers."""
    grid: list[Tokens]
    """[L+1][T] most probable tokens with their probabilities."""
    more: list[list[Tokens]] | None = None
    """[L+1][T][k-1] the tokens of the next ranks."""

    @pydantic.model_validator(mode="after")
    def _rows_are_as_long_as_the_tokens(self) -> Self:
        rows: list[Sized] = [self.tokens, self.targets, self.saturation, *self.grid]
        lengths = {len(row) for row in rows}
        if len(lengths) > 1:
            raise ValueError(f"its rows have different lengths: {', '.join(map(str, sorted(lengths)[:4]))}")
        return self


class LensGrid(Entries):
    """Predictions of every layer for a few sequences."""

    samples: list[SampleEntry] | None = None
    linear: bool = False
    """Whether states are mapped to those of the last layer first (the linear lens)."""


class WordPlaces(Entries):
    """Occurrences of a word on a map."""

    word: str | None = None
    x: list[Number]
    y: list[Number]

    @pydantic.model_validator(mode="after")
    def _each_place_has_two_coordinates(self) -> Self:
        if len(self.x) != len(self.y):
            raise ValueError(f"it has {len(self.x)} x and {len(self.y)} y")
        return self


class WordMap(Entries):
    """Look-alike words in the states of one layer, placed in the plane by t-SNE."""

    site: str
    layer: Annotated[int, Field(ge=0, le=MOST_LAYERS)]
    words: list[WordPlaces]


class LeftOutEntry(Entries):
    """A measure that the model or the data do not allow."""

    measure: str | None = None
    reason: str | None = None


class RouterEntry(Entries):
    """Sources that one router of a memory reads most."""

    layer: Whole
    source: Whole
    head: Whole
    tokens: Tokens


class Routers(Entries):
    """The routers of a model with a memory."""

    of: Whole | None = None
    routers: list[RouterEntry] | None = None


class SettingsEntry(Entries):
    """The settings; only those that the page draws are checked."""

    objective: Object | None = None


class FitsEntry(Entries):
    """The trainings of a plan's scalars."""

    healed: Object | None = None


class CostEntry(Entries):
    """Cost of a search."""

    fit: FitsEntry | None = None


BlockName = Layer | Annotated[str, Field(pattern=r"^(attention|mlp|layer) [1-9][0-9]{0,4}$")]
"""A block as a plan names it."""


class SkippedEntry(Entries):
    """The blocks of a plan that were skipped while a model was evaluated."""

    granularity: str | None = None
    blocks: list[BlockName] | None = None
    healed: bool | None = None


class PlanEntry(Entries):
    """A plan: blocks in the order of their removal."""

    model: ModelEntry | None = None
    data: DataEntry | None = None
    granularity: str | None = None
    criterion: str | None = None
    search: str | None = None
    blocks: list[BlockName] | None = None
    losses: list[Number | None] | None = None
    healed_loss: Number | None = None
    control_loss: dict[str, Number | None] | None = None
    cost: CostEntry | None = None


class ExitEntry(Entries):
    """Early exit with one rule and threshold: over given sequences, or while generating."""

    rule: str | None = None
    split: str | None = None
    timing: str | None = None
    calibrated: bool | None = None
    threshold: Number | None = None
    loss: Number | None = None
    drop: Number | None = None
    accuracy: Share | None = None
    agreement: Share | None = None
    accuracy_stderr: Ratio | None = None
    loss_stderr: Ratio | None = None
    agreement_stderr: Ratio | None = None
    drop_stderr: Ratio | None = None
    theoretical_speedup: Ratio | None = None
    layers_computed: Ratio | None = None
    measured_speedup: Ratio | None = None
    drop_interval: Interval | None = None
    measured_speedup_interval: Interval | None = None
    exits: Counts | None = None
    tokens: Whole | None = None


class FullEntry(Entries):
    """The model without early exit, on the same data."""

    accuracy: Share | None = None
    chance: Share | None = None
    loss: Number | None = None
    accuracy_stderr: Ratio | None = None
    loss_stderr: Ratio | None = None
    seconds: Ratio | None = None
    no_advice: str | None = None


class StatsEntry(Entries):
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


class GeneratedEntry(Entries):
    """Prompts and their continuations."""

    prompts: Texts | None = None
    texts: Texts | None = None
    stats: StatsEntry | None = None


class AskedEntry(Entries):
    """How the examples of a task are asked; of a group of tasks, what its tasks have in common."""

    num_fewshot: Whole | None = None
    chat_template: bool | None = None
    system_instruction: str | None = None
    generation: Object | None = None
    definition: str | None = None
    solved_examples: str | None = None
    seed: Whole | None = None


class TaskEntry(Entries):
    """A task of an evaluation."""

    metric: str | None = None
    higher_is_better: bool | None = None
    advised: bool | None = None
    count: Whole | None = None
    chance: Number | None = None
    earliest: Layer | None = None
    earliest_by_estimate: Layer | None = None
    examples: str | None = None
    """Hash of the documents."""
    asked: AskedEntry | None = None
    paired: bool | None = None
    """Of a comparison: whether the main score is compared by example."""


class TestEntry(Entries):
    """A paired t-test over seeds of one number: means of both groups, and their difference."""

    name: str
    title: str
    unit: str
    pairs: Whole
    claim: str | None = None
    value: Number | None = None
    against: Number | None = None
    difference: Number | None = None
    bound: Number | None = None
    deviation: Ratio | None = None
    p: Share | None = None
    p_corrected: Share | None = None
    interval: Interval | None = None
    by_seed: list[Number] | None = None


class LossEntry(Entries):
    """Validation loss of a group of training runs at one step: the mean over seeds with its 95 % interval."""

    flops: Ratio
    mean: Number
    low: Number | None = None
    high: Number | None = None


class PolicyEntry(Entries):
    """Which tokens count."""

    name: str | None = None
    sentence: str | None = None


class RefitEntry(Entries):
    """A branch that healing refitted by least squares, or left."""

    branch: str | None = None
    end: str | None = None
    reason: str | None = None
    strength: Number | None = None
    left: Number | None = None


class NextEntry(Entries):
    """The command to run next, and why."""

    why: str | None = None
    command: str | None = None


class TimingsEntry(Entries):
    """Seconds of a measurement."""

    load: Number | None = None
    forward: Number | None = None
    total: Number | None = None


class StepEntry(Entries):
    """One checkpoint of a series."""

    step: Whole
    model: ModelEntry | None = None
    headline: dict[str, Finding] | None = None
    lens_grid: LensGrid | None = None
    left_out: list[LeftOutEntry] | None = None


class StackEntry(Entries):
    """One of several stacks of layers that a measurement is of."""

    name: str
    num_layers: Layer | None = None


class Described(Entries):
    """Entries of a document, and of each of several models that a document is of."""

    model: ModelEntry | None = None
    data: DataEntry | None = None
    quality_data: DataEntry | None = None
    headline: dict[str, Finding] | None = None
    lens_grid: LensGrid | None = None
    left_out: list[LeftOutEntry] | None = None
    settings: SettingsEntry | None = None
    warnings: list[str] | None = None
    token_policy: PolicyEntry | None = None
    exits: list[ExitEntry] | None = None
    full: FullEntry | None = None
    tasks: dict[str, TaskEntry] | None = None
    skipped: SkippedEntry | None = None
    recipe: str | None = None


class ComparedEntry(Described, PlanEntry):
    """One of several models."""

    label: str | None = None
    baseline: bool | None = None
    paired: bool | None = None
    seeds: list[Whole] | None = None
    losses_by_flops: list[LossEntry] | None = None
    generation: list[ExitEntry] | None = None


class Document(Described):
    """`results.json` of any kind."""

    kind: str | None = None
    created: str | None = None
    fingerprint: str | None = None
    of: str | None = None
    depth: str | None = None
    complete: bool | None = None
    seed: Whole | None = None
    step: Whole | None = None
    versions: Object | None = None
    memory: Object | None = None
    sampling: Object | None = None
    machine: Object | None = None
    training: Object | None = None
    groups: dict[str, str | int | None] | None = None
    timings: TimingsEntry | None = None
    router_tokens: Routers | None = None
    word_maps: list[WordMap] | None = None
    linear_lens: Object | None = None
    steps: list[StepEntry] | None = None
    stacks: list[StackEntry] | None = None
    models: list[ComparedEntry] | None = None
    next: NextEntry | None = None
    plan: PlanEntry | None = None
    removed_modules: list[str] | None = None
    tests: list[TestEntry] | None = None
    refits: list[RefitEntry] | None = None
    generation: GeneratedEntry | list[ExitEntry] | None = None


def read_results_document(path: Path) -> dict[str, Any]:
    """The document in a file, as plain values.

    Raises:
        FulldepthError: if it cannot be read, was written by another version, or an entry is of the wrong type or out
            of range.
    """
    value = read_json(path, most=MOST_BYTES)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if type(version) is not int or version != SCHEMA_VERSION:
        stated_version = version if isinstance(version, int) else type(version).__name__
        raise FulldepthError(f"{path} has schema_version {stated_version}, this fulldepth reads {SCHEMA_VERSION}.")
    validated(path, value, Document)
    return dict(value)


FRAMEWORKS = ("torch", "transformers")
"""Packages whose versions may change the numbers of a model."""


def versions(packages: Sequence[str] = FRAMEWORKS) -> dict[str, str]:
    """Versions of fulldepth, of installed packages, and of Python.

    Raises:
        importlib.metadata.PackageNotFoundError: if a package is not installed.
    """
    installed = {name: metadata.version(name) for name in packages}
    return {"fulldepth": __version__, **installed, "python": platform.python_version()}


def provenance(
    kind: str, settings: Mapping[str, Any], packages: Sequence[str] = FRAMEWORKS, **facts: Any
) -> dict[str, Any]:
    """The first entries of a finished document: `kind`, `created` (UTC), `complete`, `settings`, `versions`.

    Args:
        kind: of the results.
        settings: the resolved settings.
        packages: packages whose versions are recorded.
        **facts: further entries, such as `seed` and `machine`.
    """
    return {
        "kind": kind,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "complete": True,
        "settings": dict(settings),
        "versions": versions(packages),
        **facts,
    }
