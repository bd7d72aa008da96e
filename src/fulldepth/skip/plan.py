"""`Plan`: the blocks to remove, in order, with losses and scalars; a JSON file that can be checked against a model."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt
from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError, one_line, unknown
from fulldepth.execution import find_anatomy
from fulldepth.files import atomic, read_json
from fulldepth.hf import GRANULARITIES, Anatomy, Scalars, device_of
from fulldepth.hf.model_hash import model_hash
from fulldepth.hf.scalars import FACTORS, factor_names
from fulldepth.settings import Settings, layer

FILE = "plan.json"
SCHEMA_VERSION = 1
MOST_BYTES = 256 << 20
"""Largest file. A plan has at most four numbers for each layer and channel."""
CRITERIA = ("loss", "scaled", "kl")
"""Ranking of candidates: by loss, by loss after a short fit of the scalars, by divergence from the original model."""
SEARCHES = ("greedy", "exact", "one-shot", "cosine", "taylor", "random", "last", "given")
COSTS = ("forwards", "flops", "seconds")
HASH = re.compile(r"sha256:[0-9a-f]{64}")
HASH_FORM = "sha256: and 64 hexadecimal digits"
LAYER = re.compile(r"[1-9][0-9]{0,8}")

PER_CHANNEL = (
    "Scalars per channel cannot be folded: norms see the direction of the stream, and factors that differ by channel "
    "turn it. So no format of `skip apply` holds them; such a plan can only be used in place."
)
"""Error for plans with scalars per channel."""

FLOAT32 = 3.4e38
"""Largest scalar, slightly below the largest float32."""


def _must(is_right: Callable[[Any], bool], expected: str) -> pydantic.AfterValidator:
    """A check of one entry; errors contain `expected`."""

    def check(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(expected)
        return value

    return pydantic.AfterValidator(check)


Hash = Annotated[str, _must(lambda text: bool(HASH.fullmatch(text)), HASH_FORM)]
Loss = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Factor = Annotated[float, _must(lambda number: abs(number) <= FLOAT32, "a finite number (float32)")]
Factors = dict[str, dict[str, Factor | list[Factor]]]
"""Layer -> name -> factor (per channel: a list)."""


def _one_of(kind: str, choices: Collection[str]) -> pydantic.AfterValidator:
    """A check of a name; errors contain the nearest choice."""

    def check(name: str) -> str:
        if name not in choices:
            raise unknown(kind, name, choices)
        return name

    return pydantic.AfterValidator(check)


def _once_each(blocks: list[int]) -> list[int]:
    """Refuse an empty list, and a block that occurs twice."""
    if not blocks:
        raise FulldepthError("blocks is empty; a plan removes at least one block.")
    if twice := sorted(block for block, times in Counter(blocks).items() if times > 1):
        raise FulldepthError(f"blocks names {_listed(twice)} more than once; a block can be removed once.")
    return blocks


def _hashed(data: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Refuse data without a valid hash."""
    if not HASH.fullmatch(str(data.get("hash"))):
        raise FulldepthError(f"data.hash is {one_line(repr(data.get('hash')), 100)}, expected {HASH_FORM}.")
    return data


def _counted(cost: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Refuse a cost that lacks one of `COSTS`."""
    for name in COSTS:
        value = cost.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise FulldepthError(f"cost.{name} is {one_line(repr(value), 100)}, expected a number from 0.")
    return cost


def _finite(entry: dict[str, JsonValue], info: pydantic.ValidationInfo) -> dict[str, JsonValue]:
    """Refuse an open entry that JSON cannot represent."""
    try:
        json.dumps(entry, allow_nan=False)
    except ValueError as error:
        raise FulldepthError(f"{info.field_name} holds a number that is not finite.") from error
    return entry


Name = Annotated[str, _must(lambda text: 0 < len(text) <= 4096, "text that is not empty, of 4,096 characters at most")]


class PlannedModel(Settings):
    """The model that a plan was made for."""

    name: Name
    """Folder or Hub name, as passed to the search."""
    class_name: Name = Field(alias="class")
    hash: Hash
    """`model_hash`."""


class ControlLoss(Settings):
    """Held-out losses of the controls."""

    scalars_only: Loss
    """Of the model with trained scalars and nothing skipped."""


class Plan(Settings):
    """The entries of `plan.json`, checked for consistency. `of` and `load` raise readable errors."""

    schema_version: int
    model: PlannedModel
    granularity: Annotated[str, _one_of("granularity", GRANULARITIES)]
    criterion: Annotated[str, _one_of("criterion", CRITERIA)]
    search: Annotated[str, _one_of("search", SEARCHES)]
    blocks: Annotated[list[PositiveInt], pydantic.AfterValidator(_once_each)]
    """1-based layers in the order of their removal."""
    losses: list[Loss]
    """Mean held-out loss in nats of the original model and after each removal, without scalars for every criterion."""
    healed_loss: Loss | None
    """The loss after all removals with the scalars; None if none were fitted."""
    control_loss: ControlLoss | None
    scalars: Factors
    """Of every remaining layer; empty if none were fitted."""
    data: Annotated[dict[str, JsonValue], pydantic.AfterValidator(_hashed), pydantic.AfterValidator(_finite)]
    """`hash` of the examples, and further entries on their origin."""
    seed: NonNegativeInt
    versions: dict[str, str]
    cost: Annotated[dict[str, JsonValue], pydantic.AfterValidator(_counted), pydantic.AfterValidator(_finite)]
    """`forwards`, `flops` and `seconds` of the search, and further entries."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Plan:
        if len(self.losses) != len(self.blocks) + 1:
            raise FulldepthError(
                f"losses has {len(self.losses)} numbers for {len(self.blocks)} blocks; expected "
                f"{len(self.blocks) + 1}: the model itself, then one after each removal."
            )
        if (self.healed_loss is None) != (self.control_loss is None):
            raise FulldepthError(
                "Of healed_loss and control_loss one is null and the other is not; scalars are fitted with their "
                "control."
            )
        check_scalars(self)
        return self

    @classmethod
    def of(cls, document: Any, where: str = "The plan") -> Plan:
        """A plan from the plain values of `plan.json`.

        Args:
            document: as returned by `document`.
            where: name of its source, for errors.

        Raises:
            FulldepthError: if an entry is missing, unknown, of the wrong type, or inconsistent with others.
        """
        if not isinstance(document, Mapping):
            raise FulldepthError(f"{where} is no plan: it holds {type(document).__name__}, expected a JSON object.")
        version = document.get("schema_version")
        if type(version) is not int or version != SCHEMA_VERSION:
            raise FulldepthError(
                f"{where} has schema version {one_line(repr(version), 60)}, this fulldepth reads {SCHEMA_VERSION}."
            )
        try:
            return layer(cls, document, lists_of_one=False)
        except FulldepthError as error:
            _, broken, why = str(error).partition("Invalid JSON: ")  # half a surrogate pair, or nested too deeply
            lines = [f"It is not JSON: {why}"] if broken else str(error).splitlines()
        text = "\n".join(one_line(line, 200) for line in lines[:4])
        text = text.replace("Unknown setting", "Unknown entry").replace("class_name", "class")
        raise FulldepthError(f"{where} is no valid plan. {text}")

    def changed(self, **entries: Any) -> Plan:
        """A copy with other entries (plain values, as in the file), checked again.

        Raises:
            FulldepthError: if they are not valid.
        """
        return Plan.of({**self.document(), **entries})

    @property
    def dtype(self) -> str:
        """Precision that the search loaded the model in; `auto` = the checkpoint's own."""
        settings = self.cost.get("settings")
        dtype = settings.get("dtype") if isinstance(settings, dict) else None
        return dtype if isinstance(dtype, str) else "auto"

    @property
    def warnings(self) -> list[str]:
        """Warnings from reading the data."""
        return [str(line) for line in _list(self.data.get("warnings"))]

    @property
    def unsure_rounds(self) -> list[int]:
        """Numbers of the rounds whose best two candidates do not differ significantly on the data."""
        return _list(self.cost.get("unsure_rounds"))

    def document(self) -> dict[str, Any]:
        """The entries as plain values, in the order of the file; layers are sorted by number."""
        document = self.model_dump(mode="json", by_alias=True)
        scalars = document["scalars"]
        document["scalars"] = {
            key: {name: scalars[key][name] for name in FACTORS if name in scalars[key]}
            for key in sorted(scalars, key=int)
        }
        return document

    def save(self, path: str | Path) -> Path:
        """Write the plan atomically; equal plans give equal bytes.

        Args:
            path: the file (its folder is created if absent), or an existing folder for `plan.json`.

        Raises:
            FulldepthError: if it cannot be written, or is no longer valid after changes in place.
        """
        document = Plan.of(self.document()).document()
        target = Path(path)
        target = target / FILE if target.is_dir() else target
        text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic(target) as part:
                part.write_text(text, encoding="utf-8")
        except OSError as error:
            raise FulldepthError(f"Cannot write the plan to {target}: {error.strerror or error}.") from error
        return target

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from its file, or from the folder that holds `plan.json`.

        Raises:
            FulldepthError: if there is none, or an entry is not valid.
        """
        target = Path(path)
        target = target / FILE if target.is_dir() else target
        if not target.exists():
            raise FulldepthError(f"There is no plan {target}. `fulldepth skip search` writes one.")
        try:
            document = read_json(target, most=MOST_BYTES)
        except FulldepthError as error:  # in the same form as errors of `of`
            why = str(error).removeprefix(f"Cannot read {target}: ")
            raise FulldepthError(f"{target} is no valid plan: {why}") from error
        return cls.of(document, str(target))

    def check_model(self, model: Anatomy | PreTrainedModel) -> None:
        """Refuse a model that the plan was not made for.

        Args:
            model: as loaded: nothing skipped, no scalars folded.

        Raises:
            FulldepthError: if it is of another class, lacks a layer of the plan, or has other weights.
        """
        anatomy = model if isinstance(model, Anatomy) else find_anatomy(model)
        kind, name = type(anatomy.model).__name__, one_line(self.model.name, 200)
        if kind != self.model.class_name:
            raise FulldepthError(
                f"The plan is for a {one_line(self.model.class_name, 100)} ({name}), this is a {kind}."
            )
        check_depth(self, anatomy)
        if model_hash(anatomy.model) != self.model.hash:
            raise FulldepthError(
                f"The plan is for another {kind}: the weights are not those of {name} that it was made for. "
                "Give the checkpoint that was searched, in the precision in which it was searched, or search again."
            )


def plan_scalars(plan: Plan | None, anatomy: Anatomy) -> Scalars | None:
    """A plan's scalars, float32, on the device of the model; None if none were fitted."""
    if plan is None or plan.healed_loss is None:
        return None
    return Scalars.from_dict(plan.scalars, anatomy.num_layers, plan.granularity).to(device_of(anatomy.model))


def check_scalars(plan: Plan) -> None:
    """Refuse scalars that do not match the blocks.

    Raises:
        FulldepthError: with the reason.
    """
    _check_names(plan)
    widths = {len(f) for factors in plan.scalars.values() for f in factors.values() if isinstance(f, list)}
    flat = any(not isinstance(f, list) for factors in plan.scalars.values() for f in factors.values())
    if len(widths) > 1 or 0 in widths or (widths and flat):
        raise FulldepthError("scalars must be one number each, or lists of one length (a number per channel).")
    if plan.healed_loss is None and not all(
        value == 1 for factors in plan.scalars.values() for f in factors.values() for value in _values(f)
    ):
        raise FulldepthError("Some scalars are not 1, but healed_loss is null: it is not known what they do.")
    if not plan.scalars and plan.healed_loss is None:
        return
    named = {int(key) for key in plan.scalars}
    depth = max(named | set(plan.blocks))
    covered = named | set(plan.blocks if plan.granularity == "layer" else ())
    if missing := list(islice((number for number in range(1, depth + 1) if number not in covered), 9)):
        raise FulldepthError(f"scalars has nothing for {_listed(missing)}; every layer that is left needs its own.")


def _check_names(plan: Plan) -> None:
    """Refuse scalars of unknown layers, and layers with the wrong scalars."""
    for key, factors in plan.scalars.items():
        if not LAYER.fullmatch(key):
            raise FulldepthError(f"scalars names the layer {one_line(key, 60)!r}; expected a number from 1.")
        if strange := sorted(set(factors) - set(FACTORS)):
            raise unknown(f"scalar of layer {key}", strange[0], FACTORS)
        skipped = int(key) in plan.blocks
        expected = factor_names(plan.granularity, skipped)
        if set(factors) != set(expected):
            part = {"layer": "it"}.get(plan.granularity, f"its {plan.granularity}")
            why = f"because {part} is skipped" if skipped else "because nothing of it is skipped"
            raise FulldepthError(
                f"scalars of layer {key}: got {_names(factors)}, expected {_names(expected)}, {why} (blocks)."
            )


def check_depth(plan: Plan, anatomy: Anatomy) -> None:
    """Refuse a model whose layers are not those of a plan.

    Raises:
        FulldepthError: if the model lacks blocks of the plan, or the scalars are not those of its layers.
    """
    depth = anatomy.num_layers
    if beyond := sorted(block for block in plan.blocks if block > depth):
        raise FulldepthError(f"The plan removes {_listed(beyond)}, but {_kind(anatomy)} has {depth} layers.")
    role = {"attention": "attention", "mlp": "mlp"}.get(plan.granularity)
    if role and (bare := sorted(set(plan.blocks) - set(anatomy.layers_with(role)))):
        raise FulldepthError(f"The plan removes the {role} of {_listed(bare)}, which {_kind(anatomy)} does not have.")
    if not plan.scalars:
        return
    planned = max({int(key) for key in plan.scalars} | set(plan.blocks))
    if planned != depth:
        raise FulldepthError(f"The plan has scalars for {planned} layers, but {_kind(anatomy)} has {depth}.")
    lists = (f for factors in plan.scalars.values() for f in factors.values() if isinstance(f, list))
    if (first := next(lists, None)) is not None and len(first) != anatomy.width:
        raise FulldepthError(f"The plan's scalars have {len(first)} channels, {_kind(anatomy)} has {anatomy.width}.")


def _list(entry: JsonValue) -> list[Any]:
    """The entry if it is a list, else an empty list."""
    return entry if isinstance(entry, list) else []


def _values(factor: float | list[float]) -> list[float]:
    return factor if isinstance(factor, list) else [factor]


def _listed(layers: Iterable[int]) -> str:
    numbers = list(map(str, islice(layers, 9)))
    shown = ", ".join(numbers[:8]) + (", ..." if len(numbers) > 8 else "")
    return f"{'layer' if len(numbers) == 1 else 'layers'} {shown}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _kind(anatomy: Anatomy) -> str:
    return f"this {type(anatomy.model).__name__}"
