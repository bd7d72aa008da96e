"""`fulldepth.report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fulldepth.results import write_together


def report(
    folders: str | Path | Sequence[str | Path], output: str | Path | None = None, *, overwrite: bool = False
) -> Path:
    """Rebuild the page of a result folder, or put several folders on one page, as `fulldepth report`.

    ```python
    fulldepth.report("out/")
    fulldepth.report(["plan/", "bench/"], "page/")
    ```

    Args:
        folders: a result folder, or several of `fulldepth skip` about the same model.
        output: folder of the page, created if absent. None = the first of `folders`.
        overwrite: replace the page of a folder that holds other results.

    Returns:
        Path of the page.

    Raises:
        FulldepthError: if a folder holds no readable results, if they cannot share a page, or if `output` holds other
            results, is held by another process, or cannot be written.
    """
    chosen = [folders] if isinstance(folders, str | Path) else folders
    return write_together(chosen, output, overwrite=overwrite)
