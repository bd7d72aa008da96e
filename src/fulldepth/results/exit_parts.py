"""Schema of the entries on early exit, generation and evaluation in `results.json`."""

from __future__ import annotations

from fulldepth.results.finding import Number
from fulldepth.results.parts import Counts, Interval, Layer, Part, Ratio, Share, Whole


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
