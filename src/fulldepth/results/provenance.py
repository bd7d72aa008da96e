"""Where results come from: the entries that every `results.json` begins with. Loads none of the packages it names."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from fulldepth import __version__

FRAMEWORKS = ("torch", "transformers")
"""Packages that the numbers of a model depend on."""


def versions(packages: Sequence[str] = FRAMEWORKS) -> dict[str, str]:
    """Versions that numbers may depend on: of fulldepth, of installed packages, and of Python.

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
        settings: resolved, as the command ran with them.
        packages: whose versions to note.
        **facts: what only some commands have, such as `seed` and `machine`.
    """
    return {
        "kind": kind,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "complete": True,
        "settings": dict(settings),
        "versions": versions(packages),
        **facts,
    }
