"""Class labels in the model's numbering, and samples that are balanced by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from fulldepth.data.objects import Objects
from fulldepth.data.sources import Record, Source
from fulldepth.errors import FulldepthError, one_line
from fulldepth.targets import IGNORE
from fulldepth.uncertainty import distinct, ranks


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

    If all names occur in `label2id`, ignoring case where a name does not occur as it is written, they are numbered as
    there; otherwise labels keep their numbers.
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


def align_objects(
    source: Source, label2id: Mapping[str, int] | None, *, skip_bad: bool = False
) -> tuple[list[Objects | None], Labels]:
    """The objects of all records in the model's numbering of classes, and the classes.

    If a class of the data has the name of one of the model's, classes follow the names, and objects of the others are
    unknown; if none has, they are taken in order, with a warning.

    Args:
        source: from `open_source`.
        label2id: the model's classes.
        skip_bad: leave unknown objects out, and count them in the warnings.

    Raises:
        FulldepthError: without `skip_bad` for the first unknown object; if the data have more classes than the model.
    """
    names, model = source.class_names, {int(index): name for name, index in (label2id or {}).items()}
    number_of = numbering(model)
    numbers: list[int | None] = [number_of(name) for name in names]
    if any(index is not None for index in numbers):
        names, warnings = tuple(model.get(index, str(index)) for index in range(max(model) + 1)), []
    else:
        classes = [Record(label=index, where=f"category {name}") for index, name in enumerate(names)]
        found = align_labels(replace(source, records=classes), "detection-classification", label2id)
        numbers, names, warnings = [*found.ids], found.class_names, found.warnings
    unknown = [(record, index) for record in source.records for index in _unknown(record, numbers)]
    if unknown:
        record, index = unknown[0]
        first = (
            f"{record.where}: an object is a {one_line(source.class_names[index], 60)}, which is none of the "
            f"{len(model)} classes ({_listed(model.values())})."
        )
        if not skip_bad:
            raise FulldepthError(f"{first} --skip-bad leaves such objects out and counts them.")
        count = f"{len(unknown)} object{' is' if len(unknown) == 1 else 's are'}"
        warnings = [*warnings, f"{count} left out of {source.name}. The first: {first}"]
    aligned = [None if record.objects is None else record.objects.numbered(numbers) for record in source.records]
    return aligned, Labels([IGNORE] * len(aligned), None, names, warnings)


def _unknown(record: Record, numbers: Sequence[int | None]) -> list[int]:
    """The classes of a record's objects that have no number, once for each object."""
    return [] if record.objects is None else [index for index in record.objects.classes if numbers[index] is None]


def _listed(names: Iterable[str]) -> str:
    first = list(islice(names, 6))
    return ", ".join(first[:5]) + (", ..." if len(first) > 5 else "")


def balanced_sample(labels: Sequence[int], identities: Sequence[int], limit: int, seed: int) -> list[int]:
    """Indices, ascending, of at most `limit` items: all if there are no more, else a seeded sample of classes in turn.

    A mean over it is a mean over classes.
    """
    if len(labels) <= limit:
        return list(range(len(labels)))
    shuffled = ranks(distinct(identities), seed).argsort(kind="stable").tolist()
    drawn: Counter[int] = Counter()
    turn = {}
    for index in shuffled:
        turn[index] = drawn[labels[index]]
        drawn[labels[index]] += 1
    return sorted(sorted(shuffled, key=turn.__getitem__)[:limit])  # stable: within a turn, the shuffled order
