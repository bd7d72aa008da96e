"""Compares installed libraries with the versions that fulldepth was tested with, as stated in its metadata."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement


def untested_versions() -> dict[str, Requirement]:
    """Return the installed libraries whose version is outside the tested range: "transformers 5.30.0" -> its range.

    A library counts if its range has an upper end. Empty for a source folder that is not installed, which has no
    metadata.
    """
    try:
        declared = metadata.requires("fulldepth") or []
    except metadata.PackageNotFoundError:
        return {}
    outside = {}
    for requirement in map(Requirement, declared):
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:  # an extra that is not installed
            continue
        capped = any(part.operator == "<" for part in requirement.specifier)
        if capped and not requirement.specifier.contains(version, prereleases=True):
            outside[f"{requirement.name} {version}"] = requirement
    return outside


def untested_warning() -> str | None:
    """Return one message about all libraries outside the tested range; None if there are none."""
    outside = untested_versions()
    if not outside:
        return None
    ranges = " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement in outside.values())
    return (
        f"fulldepth was not tested with {', '.join(outside)}: commands may fail, and numbers may be wrong. "
        f"The tested versions: pip install {ranges}"
    )
