"""`provenance`: the first entries of every `results.json`. Reads package versions without importing the packages."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from fulldepth import __version__

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
