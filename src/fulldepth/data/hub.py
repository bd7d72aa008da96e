"""Data sets of the Hugging Face Hub: their rows, and the classes that their information states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets

from fulldepth.data.columns import LABEL_COLUMNS
from fulldepth.errors import FulldepthError, one_line

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
"""A Hub data set: `name` or `owner/name`, and a configuration after a colon where it has several."""


def load_hub(name: str, config: str | None, split: str | None, streaming: bool, expected: str) -> tuple[str, str, Any]:
    """The repository of a Hub data set, its name with configuration and split, and what `load_dataset` gives.

    Args:
        name: matches `HUB_NAME`.
        config: configuration, if `name` has none.
        split: None = all splits.
        streaming: rows are read as a stream, not downloaded first.
        expected: what the data may be, for messages.

    Raises:
        FulldepthError: if it cannot be loaded, or `name` and `config` differ.
    """
    repository, config, full = _parts(name, config)
    with _loading(full, expected):
        data = datasets.load_dataset(repository, config, split=split, streaming=streaming)
    return repository, full if isinstance(data, dict) else f"{full}/{split}", data


def stated_classes(name: str, config: str | None, expected: str) -> tuple[str, ...]:
    """Names of the classes that the information on a Hub data set states; no row is downloaded.

    Returns:
        The names; empty if it states none.

    Raises:
        FulldepthError: as `load_hub`.
    """
    repository, config, full = _parts(name, config)
    with _loading(full, expected):
        features = datasets.load_dataset_builder(repository, config).info.features or {}
    column = features.get(next((label for label in LABEL_COLUMNS if label in features), ""))
    return tuple(column.names) if isinstance(column, datasets.ClassLabel) else ()


def _parts(name: str, config: str | None) -> tuple[str, str | None, str]:
    """Repository, configuration, and both together."""
    repository, _, configuration = name.partition(":")
    if config and configuration and config != configuration:
        raise FulldepthError(f"Two configurations were asked for: {configuration!r} in {name}, and {config!r}.")
    config = config or configuration or None
    return repository, config, ":".join(filter(None, [repository, config]))


@contextmanager
def _loading(full: str, expected: str) -> Iterator[None]:
    """Turn any exception of the network, or of readers of the repository's files, into a refusal."""
    try:
        yield
    except Exception as error:
        offline = " The Hub is switched off by HF_HUB_OFFLINE." if datasets.config.HF_HUB_OFFLINE else ""
        raise FulldepthError(
            f"{full} is no file or folder here, and loading it as a Hub data set failed: {one_line(error).rstrip('.')}."
            f"{offline} Expected {expected}."
        ) from error
