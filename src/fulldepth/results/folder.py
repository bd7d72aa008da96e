"""`Results`: a verb's table and document, with figures; writes and reads the result folder."""

from __future__ import annotations

import json
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fulldepth import reporting
from fulldepth.core import launch
from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import atomic, locked, read_json, remove_leftovers, sha256_of, sha256_of_file, write_text
from fulldepth.core.progress import Watcher
from fulldepth.core.shell import word
from fulldepth.reporting.kinds import EXIT, KINDS, TOGETHER, Kind
from fulldepth.results import document, influences, table
from fulldepth.results.document import Finding
from fulldepth.results.table import REAL, select_values

if TYPE_CHECKING:
    import plotly.graph_objects as go

DOCUMENT = "results.json"
TABLE = "results.parquet"
GROUPS = "groups.parquet"
PAGE = "report.html"
STORED = {"table": TABLE, "influences": GROUPS}
"""Entry of the stored document -> file whose `sha256` and `bytes` it states. Not part of `Results.meta`."""
HELD = {
    "settings.yaml": "a training run",
    "plan.json": "a plan of fulldepth skip",
    "progress.json": "an unfinished search of fulldepth skip",
}
"""File -> contents of a folder with this file, into which other commands must not write results."""
OWN = {"settings.yaml": {"training"}, "plan.json": {"skip", "curve"}, "progress.json": {"skip", "curve"}}
"""The same files -> kinds of the results that belong beside them."""


class TableMismatchError(FulldepthError):
    """A data file of a folder is missing, or is not the one that its document was written with.

    Args:
        folder: the result folder.
        meta: the document.
        name: name of the file.
    """

    def __init__(self, folder: Path, meta: dict[str, Any], name: str) -> None:
        super().__init__(
            f"The results in {folder} do not belong together: {name} is not the file that {DOCUMENT} was written "
            "with. Writing was interrupted or is still going on, or a file was changed. Run "
            "the command again."
        )
        self.meta = meta


def notebook_display() -> Callable[..., Any] | None:
    """IPython's `display` in a notebook; None elsewhere, also in IPython's terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    display: Callable[..., Any] | None = getattr(sys.modules.get("IPython.display"), "display", None)
    return display if hasattr(shell, "kernel") else None


class Framed:
    """A page in a frame, as a notebook displays it; its scripts cannot reach the notebook."""

    def __init__(self, page: str) -> None:
        self.page = page

    def _repr_html_(self) -> str:
        source = escape(self.page, quote=True)
        return f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{source}" width="100%" height="800"></iframe>'


@dataclass(repr=False)
class Results:
    """Results of a command: `table` (tidy, one row per statistic) and `meta` (settings, model, data, headline, ...).

    `influences` states how much each group of clusters contributes to the deviation of a value (see
    `fulldepth.results.influences`); None if the results do not state it.

    `show()` opens their page.
    """

    table: pd.DataFrame
    meta: dict[str, Any] = field(default_factory=dict)
    influences: pd.DataFrame | None = None

    @property
    def headline(self) -> dict[str, dict[str, Any]]:
        """Name -> {value, unit, sentence}: the most important numbers, each with one sentence."""
        return dict(self.meta.get("headline") or {})

    @property
    def is_series(self) -> bool:
        """True if the rows belong to several training checkpoints (column `step`)."""
        return "step" in self.table.columns

    @property
    def is_comparison(self) -> bool:
        """True if the rows belong to several models (columns `model`, `difference`)."""
        return self.meta.get("kind") == "comparison"

    def figures(self) -> dict[str, go.Figure]:
        """Name -> plotly figure, for every figure that these results have data for."""
        return reporting.build(self.table, self.meta)

    def __repr__(self) -> str:
        """One line: kind, models, data, and number of rows."""
        meta = self.meta
        model, data = ((meta.get(key) or {}).get("name") or "" for key in ("model", "data"))
        models = ", ".join(str(entry.get("label")) for entry in meta.get("models") or [])
        about = " on ".join(one_line(part, 60) for part in (models or model, data) if part)
        kind = one_line(meta.get("kind") or "results", 30) + (f" of {about}" if about else "")
        return f"<Results: {kind}, {len(self.table):,} rows>"

    def show(self) -> Path | None:
        """Display the page in a notebook, elsewhere write it to a temporary file and open that in a browser.

        Returns:
            Path of the file; None in a notebook.
        """
        page = reporting.render(self.table, self.meta)
        if (display := notebook_display()) is not None:
            display(Framed(page))
            return None
        path = Path(tempfile.mkdtemp(prefix="fulldepth-")) / PAGE
        path.write_text(page, encoding="utf-8")
        webbrowser.open(path.as_uri())
        return path

    def values(
        self, measure: str, statistic: str, site: str | None = None, other: int | None = None, **where: Any
    ) -> pd.Series:
        """The values of one statistic by layer, for example `values("displacement", "mean", "residual")`.

        Numbers of the whole model over training, such as the validation loss, are returned by step.

        Args:
            measure: name of the measure.
            statistic: name of the statistic.
            site: where the states were read; needed if several sites have the statistic.
            other: the other layer, for measures of two.
            **where: required values of further columns: `step` of a series, `model` of a comparison.

        Raises:
            FulldepthError: if there is no such row, or several for one layer; the message lists the choices.
        """
        return select_values(self.table, measure, statistic, {"site": site, "other": other, **where})

    def lens(self) -> pd.DataFrame:
        """The lens of the sample texts: what the model would predict after every layer.

        One row for each text, position (from 1), layer (0 = embeddings) and rank (1 = most probable; more with the
        setting `grid_top`). Columns: `text`, `position`, `token` (at that position), `layer`, `rank`, `top_token` (the
        prediction of the next token), `probability` (rounded to 4 decimals). No rows for models that predict no tokens.
        """
        rows = [
            (sample["title"], position, token, layer, rank, *prediction)
            for sample in (self.meta.get("lens_grid") or {}).get("samples", [])
            for layer, row in enumerate(sample["grid"])
            for position, (token, first) in enumerate(zip(sample["tokens"], row, strict=True), start=1)
            for rank, prediction in enumerate(
                [first, *(sample["more"][layer][position - 1] if "more" in sample else [])], start=1
            )
        ]
        columns = ["text", "position", "token", "layer", "rank", "top_token", "probability"]
        return pd.DataFrame(rows, columns=columns)

    def save(
        self, directory: str | Path, *, page: bool = True, overwrite: bool = False, watcher: Watcher | None = None
    ) -> Path:
        """Write `results.json`, `results.parquet` and `report.html` into `directory` (created if absent), atomically.

        Influences are written to `groups.parquet`. The folder is locked meanwhile. An earlier page is removed first, so
        that an interruption never leaves a page with other numbers than the table. The document states the sha256 of
        both tables, so that `load` refuses a folder whose writing was interrupted.

        Args:
            directory: the result folder; results of the same kind there are replaced.
            overwrite: replace results of another kind, too.
            page: write the page; False for part of a folder that the caller has locked: the folder is then not locked.
            watcher: receives progress, file by file.

        Returns:
            The folder.

        Raises:
            FulldepthError: if the folder holds results of another kind or belongs to a training run or a plan, cannot
                be written, or another process is writing there.
        """
        folder = Path(directory)
        watcher = watcher or Watcher()
        meta = {"schema_version": document.SCHEMA_VERSION, **self.meta}
        try:
            tables = {"table": self.table, "influences": self.influences}
            files = {name: frame.to_parquet(index=False) for name, frame in tables.items() if frame is not None}
            stamps = {name: {"sha256": sha256_of(content), "bytes": len(content)} for name, content in files.items()}
            text = json.dumps(meta | stamps, indent=1, allow_nan=False, default=str)
            contents = {DOCUMENT: text.encode(), **{STORED[name]: content for name, content in files.items()}}
            watcher.begin(f"Writing results{' and page' * page}", len(contents) + page)
            with locked(folder) if page else nullcontext():
                check_replaceable(folder, self.meta.get("kind"), overwrite)
                folder.mkdir(parents=True, exist_ok=True)
                remove_leftovers(folder)
                (folder / PAGE).unlink(missing_ok=True)
                with ExitStack() as renamed_in_reverse:
                    for name, content in contents.items():
                        renamed_in_reverse.enter_context(atomic(folder / name)).write_bytes(content)
                        watcher.advance(1)
                if self.influences is None:
                    (folder / GROUPS).unlink(missing_ok=True)  # of earlier results; the new document does not name it
                if page:
                    self.save_page(folder)
                    watcher.advance(1)
        except OSError as error:
            raise FulldepthError(f"Cannot write results into {folder}: {error.strerror or error}.") from error
        return folder

    def save_page(self, directory: str | Path) -> Path:
        """Write `report.html` into the folder of these results, atomically.

        Returns:
            Path of the page.

        Raises:
            FulldepthError: if it cannot be written, or another process is writing into the folder.
        """
        path = Path(directory) / PAGE
        text = reporting.render(self.table, self.meta)
        with locked(path.parent):
            return write_text(path, text)

    @classmethod
    def load(cls, directory: str | Path) -> Results:
        """Read a result folder.

        Raises:
            TableMismatchError: if a data file is not the one that the document was written with.
            FulldepthError: if a file is missing, broken or too large, was written by a newer version, or holds values
                of the wrong type or out of range.
        """
        folder = Path(directory)
        for name in (DOCUMENT, TABLE):
            if not (folder / name).is_file():
                raise FulldepthError(f"{folder} is not a result folder: it has no {name}.")
        meta = document.read_results_document(folder / DOCUMENT)
        stamps = {name: stamp for name in STORED if (stamp := meta.pop(name, None)) is not None}
        for name, stamp in stamps.items():
            path = folder / STORED[name]
            if path.is_file() and stamp == {"sha256": sha256_of_file(path), "bytes": path.stat().st_size}:
                continue
            raise TableMismatchError(folder, meta, STORED[name])
        rows = table.read_table(folder / TABLE)
        groups = influences.read_influences(folder / GROUPS) if "influences" in stamps else None
        for reason in contradictions(meta, rows, groups):
            raise FulldepthError(f"Cannot read {folder}: {reason}.")
        return cls(rows, meta, groups)


def holder(folder: str | Path) -> str | None:
    """Description of the contents of a folder that belongs to something other than results; None for other folders."""
    return next((contents for name, contents in HELD.items() if (Path(folder) / name).exists()), None)


def check_free(folder: str | Path, overwrite: bool = False) -> None:
    """Check that results may be written into a folder.

    Raises:
        FulldepthError: if it belongs to another command, or holds results and `overwrite` is not set.
    """
    if content := holder(folder):
        raise FulldepthError(f"{folder} holds {content}, which needs its own results there. Choose another output.")
    if not overwrite and (Path(folder) / DOCUMENT).exists():
        page = "" if (Path(folder) / PAGE).exists() else f" Only their page is missing: fulldepth report {word(folder)}"
        raise FulldepthError(
            f"{folder} already holds results. Choose another output, or replace them with overwrite=True (--overwrite)."
            f"{page}"
        )


def check_replaceable(folder: Path, kind: str | None, overwrite: bool = False) -> None:
    """Check that results of a kind may be saved into a folder: it holds no results or those of the same kind, and no
    training run or plan that they do not belong to.

    Raises:
        FulldepthError: if it belongs to another command, or holds other results and `overwrite` is not set.
    """
    if not any(kind in kinds and (folder / name).exists() for name, kinds in OWN.items()):
        check_free(folder, overwrite=True)
    stored: Any = None
    with suppress(FulldepthError):  # absent or unreadable results are written anew
        stored = read_json(folder / DOCUMENT, most=document.MOST_BYTES)
    stored_kind = stored.get("kind") if isinstance(stored, dict) else kind
    if stored_kind != kind and not overwrite:
        raise FulldepthError(
            f"{folder} holds results of kind {one_line(stored_kind, 30)}, these are of kind {one_line(kind, 30)}. "
            "Choose another folder, or replace them with overwrite=True."
        )


@contextmanager
def claimed(folder: str | Path | None, overwrite: bool = False) -> Iterator[None]:
    """Lock a result folder until its results are saved; None locks nothing. Under torchrun the first process locks it.

    Raises:
        FulldepthError: as `check_free`, or if another process holds the folder or it cannot be written.
    """
    if folder is None:
        yield
        return
    with locked(folder) if launch.is_main() else nullcontext():
        check_free(folder, overwrite)
        yield


def finite(value: Any) -> Any:
    """`value` for JSON: findings as objects, NaN and infinities as None."""
    if isinstance(value, Finding):
        return finite(value.document())
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def contradictions(meta: Mapping[str, Any], table: pd.DataFrame, groups: pd.DataFrame | None = None) -> Iterator[str]:
    """Yield every contradiction between a document, its table and its influences (`groups`), as a clause.

    Contradictions are: a kind that no result folder has, a missing column or entry, several rows for one number, more
    layers in the table than in the model, counts by layer for another depth than the model's, or influences of another
    number of groups.
    """
    name = str(meta.get("kind"))
    kind = KINDS.get(name, Kind(name, "", ""))
    stated = (meta.get("groups") or {}).get("count")
    if groups is not None and (count := len(influences.groups_of(groups))) != stated:
        yield f"the influences are of {count} groups, the document states {stated}"
    if name == TOGETHER:
        yield f"{TOGETHER!r} is the kind of a page, not of a result folder"
    if missing := [column for column in kind.columns if column not in table.columns]:
        yield f"results of kind {name} lack the columns {', '.join(missing)}"
    numbers = table[[column for column in table.columns if column not in (*REAL, "count", "unit")]]
    if len(repeated := numbers[numbers.duplicated()]):
        where = ", ".join(str(value) for value in repeated.iloc[0] if not pd.isna(value))
        yield f"the table has several rows for one number: {one_line(where, 200)}"
    if name == "comparison":
        if not meta.get("models"):
            yield "a comparison lacks the entry `models`"
        if meta.get("of") == "training":
            yield "it compares single training runs; compare groups over seeds with fulldepth compare --against"
        if meta.get("of") == "groups" and "seed" not in table.columns:
            yield "a comparison of groups lacks the column seed"
    elif meta.get("models") and not kind.holds_models:
        yield f"results of kind {one_line(name, 60)} have the entry `models`"
    elif kind.is_layered:
        layers = (meta.get("model") or {}).get("num_layers")
        places = [frame[["layer", "other"]] for frame in (table, groups) if frame is not None]
        deepest = pd.concat(places).max().max()
        if layers is not None and not pd.isna(deepest) and deepest > layers:
            yield f"the table has layer {deepest} of a model of {layers} layers"
        if not kind.stops:
            return
        generation = meta.get("generation")
        if generation is not None and isinstance(generation, list) is not (name == EXIT):
            yield f"the entry `generation` is not that of results of kind {name}"
        runs = [*(meta.get("exits") or []), *(generation if isinstance(generation, list) else [])]
        stats = (generation.get("stats") or {}) if isinstance(generation, Mapping) else {}
        counts = [run.get("exits") for run in (*runs, stats)]
        counts += [stats.get(entry) for entry in ("layer_positions", "prompt_positions")]
        depths = {len(count) for count in counts if count is not None} | ({layers} if layers is not None else set())
        if len(depths) > 1:
            listed = ", ".join(map(str, sorted(depths)[:4]))
            yield f"counts by layer for {listed} layers in one document"
