"""Classes of a classifier or a detector: those that the settings declare, and those of the data."""

from __future__ import annotations

from fulldepth.data import Source, open_source
from fulldepth.data.labelled import check_kind, name_classes
from fulldepth.data.opening import hub_classes
from fulldepth.errors import FulldepthError, one_line
from fulldepth.training.settings import TrainSettings


def declared_classes(settings: TrainSettings) -> int | None:
    """`model.num_labels`; None if the data determine the number of classes.

    Raises:
        FulldepthError: if it is no number of classes that the task can have.
    """
    count = (settings.model.model_extra or {}).get("num_labels")
    least = 1 if settings.task == "detection" else 2
    if count is None or (isinstance(count, int) and not isinstance(count, bool) and count >= least):
        return count
    raise FulldepthError(
        f"model.num_labels is {one_line(repr(count), 60)}. Expected a whole number of at least {least}: the classes of "
        f"task: {settings.task}."
    )


def data_classes(source: Source, settings: TrainSettings) -> tuple[str, ...]:
    """Names of the classes of a run's training source; a detector's are those of the data's categories.

    Raises:
        FulldepthError: if the source has no classes, or not as many as the settings declare.
    """
    declared, names = declared_classes(settings), source.class_names
    if settings.task != "detection":
        return name_classes(source, declared)
    check_kind(source, settings.task)
    if declared not in (None, len(names)):
        raise FulldepthError(f"{source.name} names {len(names)} classes; model.num_labels is {declared}.")
    return names


def class_names(settings: TrainSettings) -> tuple[str, ...]:
    """Names of the classes, from `model.num_labels`, the information on a Hub data set, or the labels of files; no text
    or image is read.

    Raises:
        FulldepthError: if the data are not at hand, or name no classes.
    """
    declared, data = declared_classes(settings), settings.data
    if declared is not None:
        return tuple(f"LABEL_{number}" for number in range(declared))
    try:
        stated = None if settings.task == "detection" else hub_classes(data.name, data.config)
        if stated is not None and len(stated) < 2:
            raise FulldepthError(
                f"The information on {data.name} names fewer than two classes, and a dry run downloads no rows."
            )
        if stated is not None:
            return stated
        source = open_source(data.name, config=data.config, split=data.split, held_out=False, skip_bad=data.skip_bad)
    except FulldepthError as error:
        raise FulldepthError(f"{error} Without the data, model.num_labels=N states the number of classes.") from error
    return data_classes(source, settings)
