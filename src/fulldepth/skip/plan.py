"""`Plan`: the blocks to remove, in order, with losses and scalars; a JSON file that can be checked against a model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, Required, get_args

import pydantic
from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt
from transformers import PreTrainedModel
from typing_extensions import TypedDict  # of `typing`, pydantic takes that of Python 3.12 only

from fulldepth.core.errors import FulldepthError, brief, one_line
from fulldepth.core.files import read_json, write_text
from fulldepth.core.uncertainty import identity
from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.execution import find_anatomy
from fulldepth.hf import Anatomy
from fulldepth.hf.model_hash import model_hash
from fulldepth.hf.scalars import FACTORS, ROLES, Block, blocks_of, factor_names
from fulldepth.settings import Settings, layer
from fulldepth.settings.loading import Amount
from fulldepth.settings.search import BlockName, Criterion, Granularity, Method

FILE = "plan.json"
SCHEMA_VERSION = 1
MOST_BYTES = 256 << 20
"""Largest file."""
UNHEALED: dict[str, Any] = {"scalars": {}, "healed_loss": None, "control_loss": None}
"""Entries of a plan without scalars."""
CRITERIA: tuple[str, ...] = get_args(Criterion)
"""Ranking of candidates: by loss, by loss after a short fit of the scalars, by divergence from the original model."""
SEARCHES: tuple[str, ...] = get_args(Method)

Hash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Loss = Amount
Factor = Annotated[float, Field(ge=-3.4e38, le=3.4e38)]
"""Within float32."""
LayerKey = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")]
Factors = dict[LayerKey, dict[Literal["b_att", "s_att", "b_mlp", "s_mlp"], Factor]]
"""Layer -> name -> factor."""
ENTRY = "heldout_rows"
HEALED = "healed_rows"
"""Entries of a plan's data: 16 hexadecimal digits for each distinct row, a hash of its token ids."""
DOCUMENTS = {ENTRY: "heldout_documents", HEALED: "healed_documents"}
"""Entry of rows -> that of the documents from which they were cut: text is cut elsewhere for another number of rows."""
DIGITS = 16
RowHashes = Annotated[str, Field(pattern=r"^[0-9a-f]*$")]
UNSEEING = ("given", "random", "last")
"""Searches that choose blocks without data."""
FROM_0 = "layers_from_0"
"""Entry of `plan.json` that is derived from `blocks`."""


class PlannedModel(Settings):
    """The model that a plan was made for."""

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder or Hub name, as passed to the search."""
    class_name: Annotated[str, Field(min_length=1, max_length=4096, alias="class")]
    hash: Hash
    """`model_hash`."""


@pydantic.with_config(extra="allow")
class PlannedData(TypedDict, total=False):
    """Origin of the examples."""

    hash: Required[Hash]
    warnings: list[str]
    """Of reading them."""
    heldout_rows: RowHashes
    heldout_documents: RowHashes
    """Hashes of the held-out examples, and of the documents that they were cut from (`listing`)."""
    healed_rows: RowHashes
    healed_documents: RowHashes
    """In the folder of a healed model: those of the examples that weights were fitted on, and that chose ridges."""


@pydantic.with_config(extra="allow")
class Cost(TypedDict, total=False):
    """Cost and course of a search."""

    forwards: Required[NonNegativeInt]
    flops: Required[Amount]
    seconds: Required[Amount]
    settings: dict[str, JsonValue]
    unsure_rounds: list[int]
    """Numbers of the rounds whose best two candidates do not differ significantly on the data."""
    stopped_by_budget: list[str]
    """`round 2: stopped by budget after 48 of 160 sequences`, for each round that the time of the search ended."""


class ControlLoss(Settings):
    """Held-out losses of the controls."""

    scalars_only: Loss
    """Of the model with trained scalars and nothing skipped."""


class Plan(Settings):
    """The entries of `plan.json`, checked for consistency. `of` and `load` raise readable errors."""

    def __repr__(self) -> str:
        change = f"{self.losses[0]:.4f} to {self.losses[-1]:.4f} nats" if self.losses else "unknown"
        healed = "" if self.healed_loss is None else f", healed {self.healed_loss:.4f}"
        return f"Plan({self.model.name} without {self.what}; loss {change}{healed})"

    __str__ = __repr__

    schema_version: Literal[1]
    model: PlannedModel
    granularity: Granularity
    criterion: Criterion
    search: Method
    blocks: Annotated[list[PositiveInt | BlockName], Field(min_length=1)]
    """1-based layers in the order of their removal; of granularity `any`, `attention 7`, `mlp 12` or `layer 3`."""
    losses: list[Loss]
    """Mean held-out loss in nats of the original model and after each removal, without scalars for every criterion;
    empty for a ranking whose losses were not computed (`losses` of `SearchSettings`)."""
    healed_loss: Loss | None
    """The loss after all removals with the scalars; None if none were fitted."""
    control_loss: ControlLoss | None
    scalars: Factors
    """Of every remaining layer; empty if none were fitted."""
    data: PlannedData
    seed: NonNegativeInt
    versions: dict[str, str]
    cost: Cost

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Plan:
        picks_of(self.blocks, self.granularity)
        if len(self.losses) != len(self.blocks) + 1 and (self.losses or self.healed_loss is not None):
            raise FulldepthError(
                f"losses has {len(self.losses)} numbers for {len(self.blocks)} blocks; expected "
                f"{len(self.blocks) + 1}: the model itself, then one after each removal."
            )
        try:
            json.dumps([self.data, self.cost], allow_nan=False)
        except ValueError as error:
            raise FulldepthError("data or cost hold a number that is not finite.") from error
        return self

    @pydantic.model_validator(mode="after")
    def _scalars_of_every_layer(self) -> Plan:
        removed = self.removed
        fitted = self.healed_loss is not None
        if fitted != (self.control_loss is not None):
            raise FulldepthError("Of healed_loss and control_loss one is null: scalars are fitted with their control.")
        if not fitted and any(value != 1 for factors in self.scalars.values() for value in factors.values()):
            raise FulldepthError("Some scalars are not 1, but healed_loss is null, so nothing says what they change.")
        if self.scalars or fitted:
            for number in range(1, max({*map(int, self.scalars), *(block.layer for block in removed)}) + 1):
                scalars = self.scalars.get(str(number), {})
                expected = factor_names(removed, number)
                if set(scalars) != set(expected):
                    raise FulldepthError(
                        f"scalars of layer {number}: got {', '.join(scalars) or 'none'}, expected "
                        f"{', '.join(expected) or 'none'}; every layer that is left needs its own."
                    )
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
        try:
            plan = layer(cls, {name: value for name, value in document.items() if name != FROM_0}, lists_of_one=False)
            if FROM_0 in document and document[FROM_0] != plan.layers_from_0:
                raise FulldepthError(
                    f"{FROM_0} is {one_line(json.dumps(document[FROM_0], default=str), 200)}, but blocks, which count "
                    f"from 1, say {json.dumps(plan.layers_from_0)}. {FROM_0} is derived: correct blocks and delete it."
                )
        except FulldepthError as error:
            raise FulldepthError(f"{where} is no valid plan. {brief(str(error), 800)}") from error
        return plan

    def changed(self, **entries: Any) -> Plan:
        """A copy with other entries (plain values, as in the file), checked again.

        Raises:
            FulldepthError: if they are not valid.
        """
        return Plan.of({name: value for name, value in self.document().items() if name != FROM_0} | entries)

    def of_weights(self, model: PreTrainedModel, **entries: Any) -> Plan:
        """A copy for a model with other weights, whose hash it holds; `entries` as for `changed`."""
        return self.changed(model={**self.document()["model"], "hash": model_hash(model)}, **entries)

    @property
    def picks(self) -> list[frozenset[Block]]:
        """The blocks of each removal, in order."""
        return picks_of(self.blocks, self.granularity)

    @property
    def counts(self) -> list[int]:
        """How many blocks are removed before the first removal, 0, and after each: a layer of `any` counts twice."""
        return list(accumulate(map(len, self.picks), initial=0))

    @property
    def removed(self) -> frozenset[Block]:
        """Removed blocks; with granularity `any`, a whole layer counts as its attention and its MLP."""
        return frozenset().union(*self.picks)

    @property
    def kind(self) -> str:
        """The granularity, or for `any` the single one that would remove the same blocks, if there is one."""
        attention = self.lacking("attention")
        mlp = self.lacking("mlp")
        kinds = {"layer": attention == mlp, "attention": not mlp, "mlp": not attention}
        return next((kind for kind, fits in kinds.items() if fits), "any")

    @property
    def what(self) -> str:
        """Removed blocks in words: `the attention of layers 3, 7 and the mlp of layer 12`."""
        groups = []
        for part, layers in self.layers_by_part.items():
            of_part = "" if part == "layer" else f"the {part} of "
            groups.append(f"{of_part}layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}")
        return " and ".join(groups)

    @property
    def layers_by_part(self) -> dict[str, list[int]]:
        """Removed part (`layer`, `attention`, `mlp`) -> its sorted 1-based layers.

        A layer without attention and MLP counts as `layer` alone. Parts that stay in all layers have no entry.
        """
        attention, mlp = ({*self.lacking(part)} for part in ROLES)
        groups = {"layer": attention & mlp, "attention": attention - mlp, "mlp": mlp - attention}
        return {part: sorted(layers) for part, layers in groups.items() if layers}

    @property
    def layers_from_0(self) -> dict[str, list[int]]:
        """`layers_by_part` as transformers, mergekit and llama.cpp count: layer 1 is number 0."""
        return {part: [number - 1 for number in layers] for part, layers in self.layers_by_part.items()}

    def module_names(self, anatomy: Anatomy) -> list[str]:
        """Names of the removed modules in the model that the plan was made for, such as `model.layers.6.self_attn`."""
        names = {module: name for name, module in anatomy.model.named_modules()}
        modules = [
            anatomy.blocks[number - 1] if part == "layer" else anatomy.part(number, part)
            for part, layers in self.layers_by_part.items()
            for number in layers
        ]
        return [names[module] for module in modules if module in names]

    def lacking(self, part: str) -> list[int]:
        """Sorted 1-based layers without their `attention` or `mlp`; whole layers lack both."""
        return sorted({layer for layer, removed_part in self.removed if removed_part in (part, "layer")})

    @property
    def dtype(self) -> str:
        """Precision that the search loaded the model in; `auto` = the checkpoint's own."""
        dtype = self.cost.get("settings", {}).get("dtype")
        return dtype if isinstance(dtype, str) else "auto"

    def document(self) -> dict[str, Any]:
        """The entries as plain values, in the order of the file, with `layers_from_0`; layers are sorted by number."""
        entries = self.model_dump(mode="json", by_alias=True)
        scalars = entries["scalars"]
        entries["scalars"] = {
            key: {name: scalars[key][name] for name in FACTORS if name in scalars[key]}
            for key in sorted(scalars, key=int)
        }
        document = {}
        for name, value in entries.items():
            document[name] = value
            if name == "blocks":
                document[FROM_0] = self.layers_from_0
        return document

    def about(self, anatomy: Anatomy) -> dict[str, Any]:
        """Return what `results.json` states of this plan for its model."""
        document = self.document()
        return {
            "model": {**document["model"], "num_layers": anatomy.num_layers},
            "data": self.data,
            "plan": document,
            "removed_modules": self.module_names(anatomy),
        }

    def save(self, path: str | Path) -> Path:
        """Write the plan atomically; equal plans give equal bytes.

        Args:
            path: the file (its folder is created if absent), or an existing folder for `plan.json`.

        Raises:
            FulldepthError: if it cannot be written.
        """
        target = Path(path)
        target = target / FILE if target.is_dir() else target
        text = json.dumps(self.document(), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        return write_text(target, text)

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
        return cls.of(read_json(target, most=MOST_BYTES), str(target))

    def check_model(self, model: Anatomy | PreTrainedModel) -> None:
        """Refuse a model that the plan was not made for.

        Args:
            model: as loaded: nothing skipped, no scalars folded.

        Raises:
            FulldepthError: if it is of another class, lacks a layer of the plan, or has other weights.
        """
        anatomy = model if isinstance(model, Anatomy) else find_anatomy(model)
        kind = type(anatomy.model).__name__
        name = one_line(self.model.name, 200)
        depth = anatomy.num_layers
        if kind != self.model.class_name:
            raise FulldepthError(
                f"The plan is for a {one_line(self.model.class_name, 100)} ({name}), this is a {kind}."
            )
        for number, part in sorted(self.removed):
            if number > depth or (part != "layer" and number not in anatomy.layers_with(part)):
                where = f"layer {number}" if part == "layer" else f"the {part} of layer {number}"
                raise FulldepthError(f"The plan removes {where}, which this {kind} of {depth} layers does not have.")
        planned = max({int(key) for key in self.scalars} | {layer for layer, _ in self.removed})
        if self.scalars and planned != depth:
            raise FulldepthError(f"The plan has scalars for {planned} layers, but this {kind} has {depth}.")
        if model_hash(anatomy.model) != self.model.hash:
            raise FulldepthError(
                f"The plan is for another {kind}: the weights are not those of {name} that it was made for. "
                "Give the checkpoint that was searched, in the precision in which it was searched, or search again."
            )


def picks_of(names: Sequence[int | str], granularity: str) -> list[frozenset[Block]]:
    """The blocks that each entry of `Plan.blocks` removes.

    Raises:
        FulldepthError: if a name is of another granularity, or a block is named twice.
    """
    if wrong := [name for name in names if isinstance(name, str) is not (granularity == "any")]:
        raise FulldepthError(f"{wrong[0]!r} is no block of the granularity {granularity}.")
    blocks = [Block(int(layer), part) for part, layer in (f"{granularity} {name}".split()[-2:] for name in names)]
    picks = [blocks_of([block], granularity, block.layer) for block in blocks]
    if twice := [block for block, times in Counter(b for pick in picks for b in pick).items() if times > 1]:
        where = one_line(", ".join(f"the {part} of layer {layer}" for layer, part in sorted(twice)), 200)
        raise FulldepthError(f"The blocks name {where} more than once; a block can be removed once.")
    return picks


def name_of(pick: Collection[Block], granularity: str) -> int | str:
    """The entry of `Plan.blocks` for the blocks of one removal."""
    layer, part = min(pick)
    return layer if granularity != "any" else f"{part if len(pick) == 1 else 'layer'} {layer}"


def decided(plan: Plan) -> str | None:
    """Return the use that a plan made of its held-out rows, such as `chose the blocks`; None if it made none."""
    decisions = [] if plan.search in UNSEEING else ["chose the blocks"]
    if plan.healed_loss is not None:
        decisions.append("stopped the training of scalars")
    return " and ".join(decisions) or None


def in_sample(plan: Plan) -> str | None:
    """The sentence for a plan's own losses; None if its held-out rows decided nothing."""
    decision = decided(plan)
    return decision and f"Measured on the text that {decision}; expect slightly more loss on other text."


def overlap(plan: Plan, examples: Examples) -> str | None:
    """The sentence for losses of a plan's model on the held-out rows of `examples`; None if none of them decided it."""
    decision = decided(plan)
    sentence = in_sample(plan)
    if decision is None or plan.data["hash"] == examples.meta.get("hash"):
        return sentence
    if ENTRY not in plan.data:
        return f"It is not known whether the held-out rows also {decision}: the plan does not list its rows."
    known = listed_rows(plan)
    shared = [example for example in examples.heldout if is_listed(example, known)]
    if len(shared) == len(examples.heldout):
        return sentence
    if shared:
        return f"{share_of_rows(shared, examples.heldout, known)} also {decision}."
    lengths = [data.get("sequence_length") for data in (plan.data, examples.meta)]
    if DOCUMENTS[ENTRY] in plan.data or lengths[0] == lengths[1] or None in lengths:  # pairs of any length are not cut
        return None
    return (
        f"It is not known whether the held-out rows also {decision}: rows of {lengths[0]} tokens did, and these are "
        f"of {lengths[1]} (--sequence-length)."
    )


def healed_rows(plan: Plan) -> set[str]:
    """Hashes of the rows that healed a plan's model, except those that chose its blocks, which `overlap` names."""
    return listed_rows(plan, HEALED) - (listed_rows(plan) if decided(plan) else set())


def listed_rows(plan: Plan, entry: str = ENTRY) -> set[str]:
    """Hashes of the rows that a plan was made with, and of their documents; none if it does not list them."""
    listed = "".join(str(plan.data.get(name, "")) for name in (entry, DOCUMENTS[entry]))
    return {listed[start : start + DIGITS] for start in range(0, len(listed), DIGITS)}


def listing(examples: Sequence[Example], entry: str = ENTRY) -> dict[str, str]:
    """Entries of a plan's data that list rows and their documents: sorted hashes without separators."""
    documents = {document for example in examples if (document := document_of(example)) is not None}
    return {
        entry: "".join(sorted({row_of(example) for example in examples})),
        DOCUMENTS[entry]: "".join(sorted(documents)),
    }


def is_listed(example: Example, known: Collection[str]) -> bool:
    """Return True if the row, or the document that it was cut from, is among `known`, the `listed_rows` of a plan."""
    return row_of(example) in known or document_of(example) in known


def share_of_rows(shared: Sequence[Example], rows: Sequence[Example], known: Collection[str]) -> str:
    """The subject of a sentence on the rows that are listed: `3 of 13 held-out rows`."""
    subject = f"{len(shared)} of {len(rows)} held-out rows"
    return subject if all(row_of(row) in known for row in shared) else f"{subject}, or others of their documents,"


def row_of(example: Example) -> str:
    """Hash of a row's token ids."""
    return f"{identity(example.input_ids.numpy().astype('<i8').tobytes()):0{DIGITS}x}"


def document_of(example: Example) -> str | None:
    """Hash of the text of the document that a row was cut from; None if the row is no part of a longer text."""
    return None if example.cut_from is None else f"{example.cut_from:0{DIGITS}x}"
