"""Writes pages: of one result folder, of several folders of `fulldepth skip` together, and an index page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from fulldepth import reporting
from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import write_text
from fulldepth.reporting.kinds import SKIPS, TOGETHER
from fulldepth.results.document import SCHEMA_VERSION
from fulldepth.results.folder import DOCUMENT, PAGE, Results
from fulldepth.results.table import COLUMNS


class Chapter(NamedTuple):
    """A result folder on the index page."""

    folder: str
    """Path relative to the index."""
    title: str
    command: str
    """Command that produces such a result."""


def report(
    folders: str | Path | Sequence[str | Path], output: str | Path | None = None, *, overwrite: bool = False
) -> Path:
    """Rebuild the page of a result folder, or put several folders of `fulldepth skip` on one page.

    ```python
    fulldepth.report("out/")
    fulldepth.report(["plan/", "bench/"], "page/")
    ```

    Args:
        folders: one folder of any kind, or several of the kinds `skip`, `heal`, `curve` and `bench` about the same
            model.
        output: folder of the page, created if absent; None = the first of `folders`.
        overwrite: replace the page of a folder that holds other results.

    Returns:
        Path of the page.

    Raises:
        FulldepthError: if a folder holds no readable results, if they cannot share a page, or if `output` holds
            results that are not on the page, is held by another process, or cannot be written.
    """
    paths = [Path(folder) for folder in ([folders] if isinstance(folders, str | Path) else folders)]
    if not paths:
        raise FulldepthError("A page needs at least one result folder.")
    target = paths[0] if output is None else Path(output)
    is_own_page = any(target.resolve() == path.resolve() for path in paths)
    if not (is_own_page or overwrite) and (target / DOCUMENT).exists():
        raise FulldepthError(
            f"{target} holds results of its own, and {PAGE} there is their page. Choose another --output, or replace "
            "the page with --overwrite."
        )
    results = together(paths) if len(paths) > 1 else Results.load(paths[0])
    return results.save_page(target)


def write_index(folder: str | Path, chapters: Sequence[Chapter], *, title: str) -> Path:
    """Write `index.html` for a measurement and the folders of `fulldepth skip` that followed.

    The page shows one picture, three sentences, the commands, and links to the pages of the folders.

    Args:
        folder: the folder that holds the result folders.
        chapters: the measurement, then the folders of `fulldepth skip`.
        title: title of the page.

    Raises:
        FulldepthError: if a folder holds no readable results, or the page cannot be written.
    """
    root = Path(folder)
    described = []
    for chapter in chapters:
        results = Results.load(root / chapter.folder)
        about = {"href": f"{chapter.folder}/{PAGE}", "title": chapter.title, "command": chapter.command}
        described.append({**about, "table": results.table, "meta": results.meta})
    return write_text(root / "index.html", reporting.index(title, described))


def together(folders: Sequence[str | Path]) -> Results:
    """The folders combined: kind `skips`, rows with the column `folder`, the documents in `parts`.

    Searches come first, then curves, then benchmarks; folders of one kind keep their order.

    Raises:
        FulldepthError: if a folder is named twice or cannot be read, if one is not a result of `fulldepth skip`, or if
            they are about different models.
    """
    paths = [Path(folder) for folder in folders]
    for index, path in enumerate(paths):
        if any(path.resolve() == other.resolve() for other in paths[:index]):
            raise FulldepthError(f"{path} is named twice. Name each folder once.")
    loaded = [
        (label, Results.load(path))
        for label, path in zip(unique_names([path.resolve() for path in paths]), paths, strict=True)
    ]
    _check(loaded)
    loaded.sort(key=lambda item: SKIPS.index(item[1].meta["kind"]))
    tables = [results.table.assign(folder=label) for label, results in loaded]
    columns = [*COLUMNS, *dict.fromkeys(name for table in tables for name in table.columns if name not in COLUMNS)]
    rows = pd.concat([table.dropna(axis=1, how="all") for table in tables], ignore_index=True)
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": TOGETHER,
        "parts": [{**results.meta, "label": label} for label, results in loaded],
    }
    integers = (name for table in tables for name in table.columns if pd.api.types.is_integer_dtype(table[name].dtype))
    types = {**dict.fromkeys(integers, "Int64"), "value": "float64"}  # integers also where some folders lack a column
    return Results(rows.reindex(columns=columns).astype(types), document)


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Names for paths: their shortest endings that differ from one another; equal paths are numbered."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    labels = [path.name for path in paths]
    return [f"{label} ({labels[: index + 1].count(label)})" for index, label in enumerate(labels)]


def _check(loaded: Sequence[tuple[str, Results]]) -> None:
    """Raise if the folders cannot share a page."""
    subjects = []
    for label, results in loaded:
        meta = results.meta
        kind = str(results.meta.get("kind"))
        if kind not in SKIPS:
            raise FulldepthError(
                f"{label} holds results of kind {kind}, which have a page of their own: expected folders of fulldepth "
                f"skip ({', '.join(SKIPS)}). `fulldepth compare` puts measurements and runs side by side."
            )
        model = meta.get("model") or (meta.get("plan") or {}).get("model") or {}
        precision = str((meta.get("settings") or {}).get("dtype") or "auto")  # as requested, not as resolved
        subjects.append((label, precision, str(model.get("class") or ""), str(model.get("hash") or "")))
    for (other, other_dtype, other_class, other_hash), (label, dtype, class_name, digest) in combinations(subjects, 2):
        other_weights = digest and other_hash and dtype == other_dtype and digest != other_hash
        if other_weights or (class_name and other_class and class_name != other_class):
            raise FulldepthError(
                f"{label} and {other} are about different models, a {class_name} with the hash {digest[:19]} and a "
                f"{other_class} with {other_hash[:19]}. Make one page for each."
            )
