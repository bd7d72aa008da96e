"""`fulldepth.compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fulldepth import comparison, launch
from fulldepth.results import Results, claimed


def compare(
    results: Sequence[Results | str | Path],
    *,
    names: Sequence[str] | None = None,
    baseline: int | str = 0,
    depth: str | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
) -> Results:
    """Compare measurements of several models, or several training runs, as `fulldepth compare`.

    The table holds the rows of every model, labelled in the column `model`; the column `difference` is the value minus
    the baseline's. See `fulldepth.comparison.compare` for how layers and steps are matched.

    ```python
    both = fulldepth.compare(["out-a", "out-b"], names=["plain", "tuned"], output="cmp/")
    both.values("displacement", "mean", "residual", model="tuned")
    ```

    Args:
        results: two or more result folders, or `Results`.
        names: one label for each. None = the folders' names, made unique.
        baseline: position or label of the one that the others are compared with.
        depth: `"layer"` compares equal layer numbers, `"relative"` equal shares l/L of the depth. None = relative where
            the numbers of layers differ.
        output: result folder, which also gets the page. None = nothing is written.
        overwrite: replace results in `output`.

    Raises:
        FulldepthError: if the results cannot be compared, or `output` holds other results.
    """
    with claimed(output, overwrite):
        compared = comparison.compare(results, names=names, baseline=baseline, depth=depth)
        if output is not None and launch.is_main():
            compared.save(output)
    return compared
