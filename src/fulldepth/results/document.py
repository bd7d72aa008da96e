"""`results.json`: its first entries, findings, and the schema: types and ranges of the entries that are read.

Every entry may be missing or null, and other entries are allowed, so that documents of other versions can be read.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, Field

from fulldepth import __version__
from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import read_json, validated

Number = Annotated[float, Field(allow_inf_nan=False)]
"""A number that is valid JSON."""


@dataclass(frozen=True)
class Finding:
    """One number of the headline, written by every verb and read by pages and comparisons.

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
Numbers = dict[str, Number | None]
Tokens = list[tuple[str | None, Number | None]]
"""Tokens with a number each."""


def entries(name: str, *typed: tuple[Any, str], required: str = "") -> Any:
    """The schema of a JSON object; entries that are not listed may hold anything.

    Args:
        name: of the schema, in messages.
        typed: types, with the names of the entries that have them.
        required: names of the entries that may not be missing or null.
    """
    fields: dict[str, Any] = {
        entry: (kind, ...) if entry in required.split() else (kind | None, None)
        for kind, names in typed
        for entry in names.split()
    }
    return pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="allow"), **fields)


def many(kind: Any) -> Any:
    """A list."""
    return list[kind]


def named(kind: Any) -> Any:
    """An object with any names."""
    return dict[str, kind]


def _rectangular(sample: Any) -> Any:
    """A sample, if the rows of its grid are as long as its tokens."""
    lengths = {len(row) for row in (sample.tokens, sample.targets, sample.saturation, *sample.grid)}
    if len(lengths) > 1:
        raise ValueError(f"its rows have different lengths: {', '.join(map(str, sorted(lengths)[:4]))}")
    return sample


MODEL = entries("Model", (str, "name class task dtype hash revision"), (Layer, "num_layers"), (Whole, "parameters"))
DATA = entries(
    "Data",
    (str, "name path kind hash text_hash unit no_error"),
    (Whole, "sequences tokens documents train_sequences validation_sequences clusters"),
    (entries("Split", (str, "name unit"), (Whole, "documents clusters")), "heldout train"),
)
SAMPLE = entries(
    "Sample",
    (str, "title"),
    (Texts, "tokens targets"),
    (list[Whole | None], "saturation"),
    (list[Tokens], "grid"),
    (list[list[Tokens]], "more"),
    required="tokens targets saturation grid",
)
"""One sequence of a lens grid: [T] tokens, targets and saturation layers, [L+1][T] (token, probability);
`more` has the tokens of the next ranks, [L+1][T][k-1].
"""
ROUTER = entries("Router", (Whole, "layer source head"), (Tokens, "tokens"), required="layer source head tokens")
FINDINGS = (dict[str, Finding], "headline")
LENS_GRID = (
    entries("LensGrid", (many(Annotated[SAMPLE, AfterValidator(_rectangular)]), "samples")),
    "lens_grid",
)
LEFT_OUT = (many(entries("LeftOut", (str, "measure reason"))), "left_out")
SETTINGS = (entries("Settings", (Object, "objective")), "settings")
PLAN = (
    (MODEL, "model"),
    (DATA, "data"),
    (str, "granularity criterion search"),
    (list[Layer | Annotated[str, Field(pattern=r"^(attention|mlp|layer) [1-9][0-9]{0,4}$")]], "blocks"),
    (list[Number | None], "losses"),
    (Number, "healed_loss"),
    (Numbers, "control_loss"),
    (entries("Cost", (entries("Fits", (Object, "healed")), "fit")), "cost"),
)
"""Entries of a plan: blocks in the order of their removal."""
EXIT = entries(
    "Exit",
    (str, "rule split timing"),
    (bool, "calibrated"),
    (Number, "threshold loss drop"),
    (Share, "accuracy agreement"),
    (Ratio, "accuracy_stderr loss_stderr agreement_stderr drop_stderr"),
    (Ratio, "theoretical_speedup layers_computed measured_speedup"),
    (Interval, "drop_interval measured_speedup_interval"),
    (Counts, "exits"),
    (Whole, "tokens"),
)
"""Early exit with one rule and threshold: over given sequences, or while generating."""
FULL = entries(
    "Full",
    (Share, "accuracy chance"),
    (Number, "loss"),
    (Ratio, "accuracy_stderr loss_stderr seconds"),
    (str, "no_advice"),
)
"""The model without early exit, on the same data."""
GENERATED = entries(
    "Generated",
    (Texts, "prompts texts"),
    (
        entries(
            "Stats",
            (str, "mode reason"),
            (Whole, "tokens"),
            (Ratio, "seconds tokens_per_second theoretical_speedup layers_computed"),
            (Counts, "prompt_positions layer_positions exits"),
        ),
        "stats",
    ),
)
TEST = entries(
    "Test",
    (str, "name title unit claim"),
    (Number, "value against difference bound"),
    (Ratio, "deviation"),
    (Share, "p p_corrected"),
    (Interval, "interval"),
    (many(Number), "by_seed"),
    (Whole, "pairs"),
    required="name title unit pairs",
)
"""A paired t-test over seeds of one number: means of both groups, and their difference."""
TASK = entries(
    "Task",
    (str, "metric"),
    (bool, "higher_is_better advised"),
    (Whole, "count"),
    (Number, "chance"),
    (Layer, "earliest earliest_by_estimate"),
)
"""A task of an evaluation."""
READ = (
    FINDINGS,
    LENS_GRID,
    LEFT_OUT,
    SETTINGS,
    (list[str], "warnings"),
    (entries("Policy", (str, "name sentence")), "token_policy"),
    (many(EXIT), "exits"),
    (FULL, "full"),
    (named(TASK), "tasks"),
    (str, "recipe"),
)
"""Entries of a document, and of each of several models that a document is of."""
DOCUMENT = entries(
    "Document",
    *READ,
    (MODEL, "model"),
    (DATA, "data quality_data"),
    (str, "kind created fingerprint of depth"),
    (bool, "complete"),
    (Whole, "seed step"),
    (Object, "versions memory sampling machine training"),
    (dict[str, str | int | None], "groups"),
    (entries("Timings", (Number, "load forward total")), "timings"),
    (entries("Routers", (Whole, "of"), (many(ROUTER), "routers")), "router_tokens"),
    (
        many(entries("Step", (Whole, "step"), (MODEL, "model"), FINDINGS, LENS_GRID, LEFT_OUT, required="step")),
        "steps",
    ),
    (
        many(
            entries(
                "Compared",
                *READ,
                *PLAN,
                (str, "label"),
                (DATA, "quality_data"),
                (bool, "baseline paired"),
                (list[Whole], "seeds"),
                (many(EXIT), "generation"),
            )
        ),
        "models",
    ),
    (entries("Next", (str, "why command")), "next"),
    (entries("Plan", *PLAN), "plan"),
    (many(TEST), "tests"),
    (many(entries("Refit", (str, "branch end reason"), (Number, "strength left"))), "refits"),
    (GENERATED | many(EXIT), "generation"),
)
"""`results.json` of any kind."""


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
    validated(path, value, DOCUMENT)
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
