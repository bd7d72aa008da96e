"""Class labels in the model's numbering, and class-balanced samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from fulldepth.data.objects import Objects
from fulldepth.data.sources import Record, Source
from fulldepth.errors import FulldepthError
from fulldepth.targets import IGNORE


class Labels(NamedTuple):
    """Labels of all records: class indices (-100 = none), number of classes (None = no labels), names, warnings."""

    ids: list[int]
    num_classes: int | None
    class_names: tuple[str, ...]
    warnings: list[str]


def numbering(classes: Mapping[int, str]) -> Callable[[str], int | None]:
    """The class of a name: the one spelled alike, else one that differs in case only, else None.

    Args:
        classes: class -> name.
    """
    exact = {name: index for index, name in classes.items()}
    folded = {name.casefold(): index for index, name in classes.items()}
    return lambda name: exact.get(name, folded.get(name.casefold()))


def align_labels(source: Source, task: str, label2id: Mapping[str, int] | None) -> Labels:
    """The labels of all records; `FulldepthError` if a classifier has fewer classes than the data.

    If all names occur in `label2id`, ignoring case, they are numbered as there; otherwise labels keep their numbers.
    """
    raw, names, warnings = [record.label for record in source.records], source.class_names, []
    model = {int(index): name for name, index in (label2id or {}).items()}
    classifier = task.endswith("-classification") and bool(model)
    number_of = numbering(model)
    to_id = [index for name in names if (index := number_of(name)) is not None]
    if names and len(to_id) == len(names):
        raw = [None if label is None else to_id[label] for label in raw]
        names = tuple(model.get(index, str(index)) for index in range(max(model) + 1))
    elif names and classifier and not all(name.startswith("LABEL_") for name in model.values()):
        warnings = [
            f"The data's classes ({_listed(names)}) are not the model's ({_listed(model.values())}); taken in order."
        ]
    present = [label for label in raw if label is not None]
    if not present:
        return Labels([IGNORE] * len(raw), None, (), warnings)
    if classifier and max(present) > max(model):
        where = source.records[raw.index(max(present))].where
        raise FulldepthError(
            f"{where}: {source.name} has labels up to {max(present)}, the model has {len(model)} classes: "
            f"{_listed(model.values())}."
        )
    ids = [IGNORE if label is None else label for label in raw]
    return Labels(ids, max(len(names), max(present) + 1), names, warnings)


def align_objects(source: Source, label2id: Mapping[str, int] | None) -> tuple[list[Objects | None], Labels]:
    """The objects of all records in the model's numbering of classes, and the classes.

    Raises:
        FulldepthError: if the data have more classes than the model.
    """
    labels = align_labels(
        replace(source, records=[Record(label=index) for index in range(len(source.class_names))]),
        "detection-classification",
        label2id,
    )
    renamed = [
        None if r.objects is None else replace(r.objects, classes=tuple(labels.ids[i] for i in r.objects.classes))
        for r in source.records
    ]
    return renamed, labels._replace(ids=[IGNORE] * len(renamed), num_classes=None)


def _listed(names: Iterable[str]) -> str:
    first = list(islice(names, 6))
    return ", ".join(first[:5]) + (", ..." if len(first) > 5 else "")


def sample(labels: Sequence[int], limit: int, seed: int) -> list[int]:
    """Indices of at most `limit` items: all if there are no more, else a seeded sample, the classes in turn."""
    if len(labels) <= limit:
        return list(range(len(labels)))
    shuffled = np.random.default_rng(seed).permutation(len(labels)).tolist()
    drawn: Counter[int] = Counter()
    turn = {}
    for index in shuffled:
        turn[index] = drawn[labels[index]]
        drawn[labels[index]] += 1
    return sorted(shuffled, key=turn.__getitem__)[:limit]  # stable: within a turn, the shuffled order
