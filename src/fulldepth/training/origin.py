"""The origin of a run: data, order, environment. Stored in every checkpoint and compared on resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, TrainingArguments

from fulldepth.data import ORDER
from fulldepth.distributed import current
from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import read_json, reading
from fulldepth.losses import per_batch_terms
from fulldepth.results import FRAMEWORKS, versions
from fulldepth.training.resume import Origin
from fulldepth.training.settings import TrainSettings

NO_NUMBERS = {"transformers_version", "_name_or_path", "use_cache", "architectures", "auto_map", "dtype"}
NO_NUMBERS |= {"pad_token_id", "bos_token_id", "eos_token_id"}
"""Entries of `config.json` without effect on training, or that the Trainer sets from the tokenizer."""


def origin_of(settings: TrainSettings, data: str, arguments: TrainingArguments) -> Origin:
    """The origin of a run as it starts or resumes.

    Args:
        settings: the run's settings.
        data: hash of the training data.
        arguments: the Trainer's arguments.
    """
    return Origin(
        data=data,
        order=f"{ORDER} {settings.seed}",
        processes=arguments.world_size,
        micro_batch=arguments.per_device_train_batch_size,
        device=arguments.device.type,
        versions=versions((*FRAMEWORKS, "accelerate", "numpy")),
    )


def check_origin(
    now: Origin, before: Origin | None, config: PreTrainedConfig, settings: TrainSettings, checkpoint: Path | None
) -> list[str]:
    """Compare the origin of a resumed run to that of its checkpoint; every process must call this.

    Args:
        now: origin of this process.
        before: origin in the checkpoint; None if it has none.
        config: the model's configuration.
        settings: the run's settings.
        checkpoint: the checkpoint to resume from; None at the start.

    Returns:
        One sentence for each difference that may change numbers, the same in every process.

    Raises:
        FulldepthError: in every process, if numbers would differ: other data than before or than in another process,
            another order, another configuration, or other batches of a penalty that depends on them.
    """
    lines: list[str] = []
    problem = None
    everyone = current().gather(now.data)
    try:
        if len(set(everyone)) > 1:
            raise FulldepthError(
                f"The processes read different data: {_short(everyone[0])} in process 0, "
                f"{_short(next(data for data in everyone if data != everyone[0]))} in another. Give all of them the "
                "same files, for example in a shared data.cache."
            )
        if checkpoint is not None:
            _compare_configs(config, checkpoint)
            lines = _compared(now, before, settings, checkpoint)
    except FulldepthError as error:
        problem = str(error)
    problem, lines = current().gather((problem, lines))[0]  # only process 0 can be sure to read the checkpoint
    if problem is not None:
        raise FulldepthError(problem)
    return lines


def _compared(now: Origin, before: Origin | None, settings: TrainSettings, checkpoint: Path) -> list[str]:
    if before is None:
        return [
            f"{checkpoint.name} is of an earlier version, which noted no data hash: whether the data are the same "
            "could not be compared. The order of the sequences is another one from here on."
        ]
    if now.data != before.data:
        raise FulldepthError(
            f"The data are not those that {checkpoint} was trained on: their hash was {_short(before.data)}, and that "
            f"of {settings.data.name} is {_short(now.data)} now. Give back the text and the tokenizer that the run "
            "began with, or start a new run in another --output."
        )
    if now.order != before.order:
        raise FulldepthError(
            f"{checkpoint} was trained in the order {one_line(repr(before.order), 60)}, and this version would go on "
            f"in {now.order!r}, with sequences that were seen already. Resume with the version that the run began with "
            f"({one_line(before.versions.get('fulldepth', 'unknown'), 40)}), or start a new run in another --output."
        )
    return [*_batches(now, before, settings), *_places(now, before)]


def _batches(now: Origin, before: Origin, settings: TrainSettings) -> list[str]:
    """A sentence if processes or micro-batches changed; refused where a penalty depends on the batches."""
    shape, earlier = (now.processes, now.micro_batch), (before.processes, before.micro_batch)
    if shape == earlier:
        return []
    change = one_line(
        f"{earlier[0]} processes with {earlier[1]} sequences in a forward pass before, {shape[0]} with {shape[1]} now"
    )
    for name in per_batch_terms(settings.objective.terms):
        raise FulldepthError(
            f"{change}: {name} is a function of the sequences in a forward pass, so the run would minimise another "
            "loss. Resume with the same number of processes and micro_batch_size."
        )
    return [f"{change}: the batches are the same, but sums round otherwise, and dropout draws other numbers."]


def _places(now: Origin, before: Origin) -> list[str]:
    """Sentences on changes of device and versions."""
    lines = []
    if now.device != before.device:
        lines.append(f"The run was on {before.device} and is on {now.device} now: numbers may round otherwise.")
    names = sorted(now.versions.keys() | before.versions.keys())
    pairs = {name: (before.versions.get(name, "unknown"), now.versions.get(name, "unknown")) for name in names}
    changed = [f"{name} {was} -> {current}" for name, (was, current) in pairs.items() if was != current]
    if changed:
        lines.append(f"Versions changed since the checkpoint: {', '.join(changed)}. Numbers may differ.")
    return [one_line(line, 400) for line in lines]


def _compare_configs(config: PreTrainedConfig, checkpoint: Path) -> None:
    """Refuse a configuration other than the checkpoint's: `model.checkpoint` may have changed since the start."""
    path = checkpoint / "config.json"
    if not path.is_file():
        return
    stored = read_json(path)
    if not isinstance(stored, dict):
        raise FulldepthError(f"Cannot read {path}: it holds no configuration.")
    with reading(path):  # through the class, so that files of other versions have the same entries
        before = _entries(type(config).from_dict(stored))
    now = _entries(config)
    for name in sorted((before.keys() | now.keys()) - NO_NUMBERS):
        if before.get(name) != now.get(name):
            was, current = (one_line(repr(values.get(name)), 60) for values in (before, now))
            raise FulldepthError(
                f"{one_line(name, 60)} of the model was {was} in {path}, and is {current} now. Give back the "
                "configuration or the tokenizer that the run began with, or start a new run in another --output."
            )


def _entries(config: PreTrainedConfig) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return entries


def _short(data: str) -> str:
    """Prefix of a hash, for messages."""
    return one_line(data[:19], 40)
