"""Measures one checkpoint or a series into a result folder; resumable, and never overwrites other results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fulldepth import launch
from fulldepth.data import Sequences
from fulldepth.distributed import processes
from fulldepth.errors import FulldepthError, one_line
from fulldepth.hf import find_checkpoints
from fulldepth.measurement.run import measure_once, measure_with
from fulldepth.measurement.series import (
    SeriesPoint,
    contents,
    digest,
    extends,
    fingerprints,
    measure_series,
    series_points,
)
from fulldepth.progress import Watcher
from fulldepth.results import DOCUMENT, PAGE, Results, TableMismatchError, check_free, claimed
from fulldepth.settings.keywords import takes_settings
from fulldepth.settings.measure import LensSettings, MeasureSettings
from fulldepth.subjects import read_source


@takes_settings(MeasureSettings, recipes="measure")
def measure(
    model: str | Path | torch.nn.Module,
    data: Any,
    *,
    settings: MeasureSettings,
    watcher: Watcher,
    output: str | Path | None = None,
    recipe: str | Path | None = None,
    tokenizer: Any = None,
    series: bool = True,
    overwrite: bool = False,
    stages: Sequence[torch.nn.Module | str] | None = None,
    head: torch.nn.Module | str | None = None,
) -> Results:
    """Measure what every layer of a model does, as `fulldepth measure`.

    All measures share one forward pass over the data. Layers are numbered 1..L, 0 is the embedding output; the last
    layer is read before the final norm (and after it, at the site `final_normed`). The folder of a training run gives a
    series: one measurement of every `checkpoint-N`, with the column `step`.

    ```python
    results = fulldepth.measure("path/to/checkpoint", "text.txt", max_sequences=64)
    series = fulldepth.measure("path/to/run", "corpus:builtin", output="out/")  # resumes; writes the page
    results = fulldepth.measure(model, ["some text", "more text"], tokenizer=tokenizer)
    results = fulldepth.measure(module, (inputs, labels), stages=[*module.blocks], head=module.classifier)
    ```

    Args:
        model: checkpoint folder, folder of a training run, GGUF file, Hub name, or a loaded model (left as it is).
        data: path (text, table, images), Hub data set, `corpus:builtin`, a list of texts or of mappings, a
            `datasets.Dataset`, or prepared `fulldepth.data.Sequences`.
        output: result folder, which also gets the page. An interrupted series resumes there; results of the same model,
            data and settings are read, not measured again. None = nothing is written.
        settings: fields of `MeasureSettings` as keywords, or an instance.
        watcher: receives messages and progress.
        recipe: name of a recipe (`quick`, `full`) or a YAML file; the other arguments override it.
        tokenizer: required with a loaded model; otherwise the one saved with the checkpoint.
        series: False = of a folder with checkpoints and a model, measure the model alone.
        overwrite: measure again, and replace results in `output`.
        stages: for a module that is no transformers model: its parts (or their names) whose outputs are layers 1..L, in
            order. `data` is then `(inputs, labels)` as arrays, inputs alone, or a map-style data set.
        head: with `stages`, the module that gives the class scores from the last stage's output.

    Returns:
        `.table` (tidy rows), `.headline`, `.values(...)`, `.figures()`, `.show()`, `.save(dir)`.

    Raises:
        FulldepthError: if model, data or settings are invalid, the anatomy is not proven, or `output` is taken.
    """
    by_name = isinstance(model, str | Path) and tokenizer is None and stages is None and head is None
    is_run = isinstance(model, str | Path) and series and bool(find_checkpoints(model))
    if is_run and tokenizer is not None:
        raise FulldepthError("A series takes a tokenizer by its folder or Hub name, not as an object.")
    if by_name and (is_run or output is not None):
        with TemporaryDirectory() if output is None else nullcontext(output) as folder:
            return measure_into(str(model), data, folder, settings, overwrite=overwrite, series=series, watcher=watcher)
    with claimed(output, overwrite):
        results = measure_once(model, data, settings, watcher, tokenizer=tokenizer, stages=stages, head=head)
        if output is not None and launch.is_main():
            results.save(output)
    return results


@takes_settings(LensSettings)
def lens(
    model: str | Path | torch.nn.Module,
    text: str | Sequence[str],
    *,
    settings: LensSettings,
    watcher: Watcher,
    tokenizer: Any = None,
    output: str | Path | None = None,
    overwrite: bool = False,
) -> Results:
    """The logit lens of texts: what a model would predict after every layer, as `fulldepth lens`.

    The final norm and the head are applied to the state after every layer, at the first 48 tokens of a text.

    ```python
    table = fulldepth.lens("path/to/checkpoint", "The capital of France is").lens()
    ```

    Args:
        model: as for `measure`; a model that predicts tokens.
        text: one or several.
        settings: fields of `LensSettings` as keywords, or an instance.
        watcher: receives messages and progress.
        tokenizer: required with a loaded model; otherwise the one saved with the checkpoint.
        output: result folder, which also gets the page. None = nothing is written.
        overwrite: replace results in `output`.

    Returns:
        `.lens()` is the table; the rest is that of a measurement of these texts.

    Raises:
        FulldepthError: as for `measure`, and if the model predicts no tokens.
    """
    texts = [text] if isinstance(text, str) else list(text)
    loading = settings.model_dump(exclude={"top_k"})
    chosen = MeasureSettings(
        **loading,
        measures=["lens_accuracy", "lens_loss", "saturation"],
        lens_tokens=None,
        one_per_row=True,
        order="first",
        batch_size=len(texts),
        grid_samples=len(texts),
        grid_top=settings.top_k,
    )
    results: Results = measure(
        model, texts, settings=chosen, watcher=watcher, tokenizer=tokenizer or settings.tokenizer, output=output,
        series=False, overwrite=overwrite,
    )  # fmt: skip
    if not results.meta.get("lens_grid"):
        raise FulldepthError("The lens reads models that predict tokens; this one predicts none.")
    return results


def measure_into(
    model: str | Path,
    data: Any,
    output: str | Path,
    settings: MeasureSettings | None = None,
    *,
    overwrite: bool = False,
    series: bool = True,
    watcher: Watcher | None = None,
) -> Results:
    """Measure a checkpoint, or every `checkpoint-N` of a training run, into a result folder.

    Results of the same model, data and settings (compared by content, not by name or time) are read, not measured
    again. An interrupted series resumes after its last finished checkpoint, and new checkpoints of a longer training
    run extend it. Results whose writing was interrupted are measured again. The folder is locked meanwhile. With
    several processes, each takes its share of the data and the first one writes.

    Args:
        model: checkpoint folder, Hub name, or a folder of `checkpoint-N`. A final model at the root of such a folder is
            the last point of the series, if its `trainer_state.json` says which step it is.
        data: as for `measure`.
        output: the result folder; created if absent.
        settings: what to measure.
        overwrite: measure everything again and replace existing results.
        series: False = if a folder holds checkpoints and a model, measure the model alone.
        watcher: receives messages and progress.

    Raises:
        FulldepthError: if the folder holds results of another run, belongs to another command, is held by another
            process, cannot be written, or the measurement fails.
    """
    settings, watcher, folder = settings or MeasureSettings(), watcher or Watcher(), Path(output)
    with processes(settings.device) as process, process.holding(folder):
        read = data if isinstance(data, Sequences) else read_source(data, settings)
        points, remarks = series_points(model, read, settings) if series and find_checkpoints(model) else ([], [])
        prints = [point.fingerprint for point in points] or fingerprints([contents(model)], read, settings)
        print_of_run = digest(prints)
        for remark in remarks:
            watcher.say(remark)
        if process.first(lambda: _is_there(folder, print_of_run, points, overwrite, watcher)):
            watcher.say(f"{folder} already holds this measurement; nothing to do.")
            results = Results.load(folder)
            if process.is_main and not (folder / PAGE).exists():  # interrupted before it was written
                results.save_page(folder)
            process.wait()
            return results
        if points:
            results = measure_series(points, read, folder, settings, process, watcher, overwrite=overwrite)
            results.meta["warnings"] = [*results.meta["warnings"], *remarks]
        else:
            results = measure_with(model, read, settings, process, watcher)
        results.meta["fingerprint"] = print_of_run
        if process.is_main:
            results.save(folder)
        process.wait()
        return results


def _is_there(folder: Path, print_of_run: str, points: list[SeriesPoint], overwrite: bool, watcher: Watcher) -> bool:
    """Whether the folder holds finished results of this run; False if it holds none, or a part of this series.

    Raises:
        FulldepthError: if it holds results of another run, or belongs to another command.
    """
    check_free(folder, overwrite=True)
    if overwrite or not (folder / DOCUMENT).exists():
        return False
    try:
        meta, complete = Results.load(folder).meta, True
    except TableMismatchError as error:
        meta, complete = error.meta, False
    except FulldepthError as error:
        raise FulldepthError(f"{error} Choose another --output, or replace it with --overwrite.") from error
    if meta.get("fingerprint") == print_of_run:
        if not complete:
            watcher.say(f"{folder} was interrupted while this measurement was written; it is measured again.")
        return complete
    if extends(points, meta):
        return False
    model, data = (one_line((meta.get(key) or {}).get("name") or "?", 200) for key in ("model", "data"))
    raise FulldepthError(
        f"{folder} holds the results of another run (model {model}, data {data}), or its model, data or "
        "settings have changed. "
        "Choose another --output, or replace it with --overwrite."
    )
