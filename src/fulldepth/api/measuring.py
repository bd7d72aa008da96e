"""`fulldepth.measure`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fulldepth import launch, measurement
from fulldepth.api.running import nested, watching
from fulldepth.errors import FulldepthError
from fulldepth.hf import find_checkpoints
from fulldepth.measurement import MeasureSettings, measure_into
from fulldepth.progress import Watcher
from fulldepth.results import Results, claimed
from fulldepth.settings import layer, read


def measure(
    model: Any,
    data: Any,
    *,
    output: str | Path | None = None,
    recipe: str | Path | None = None,
    measures: str | list[str] | None = None,
    tokenizer: Any = None,
    max_sequences: int | None = None,
    sequence_length: int | None = None,
    batch_size: int | None = None,
    token_policy: str | None = None,
    device: Any = None,
    dtype: Any = None,
    series: bool = True,
    overwrite: bool = False,
    progress: bool | None = None,
    watcher: Watcher | None = None,
    stages: Sequence[Any] | None = None,
    head: Any = None,
    **settings: Any,
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
        recipe: name of a recipe (`quick`, `full`) or a YAML file; the other arguments override it.
        measures: names from `fulldepth.metrics.METRICS`, or one name; None = all that model and data allow.
        tokenizer: required with a loaded model; otherwise the one saved with the checkpoint.
        max_sequences: maximum number of sequences. None = 256.
        sequence_length: tokens per sequence. None = 256, or the model's maximum if smaller.
        batch_size: sequences per forward pass; it does not affect the results. None = 8.
        token_policy: as `MeasureSettings.token_policy`; padding never counts. None = `auto`.
        device: None = the first accelerator, else the CPU.
        dtype: None = the checkpoint's own.
        series: False = of a folder with checkpoints and a model, measure the model alone.
        overwrite: measure again, and replace results in `output`.
        progress: None = a bar in a terminal, lines in a notebook; True = also lines in a log file; False = none.
        watcher: receives messages and progress instead.
        stages: for a module that is no transformers model: its parts (or their names) whose outputs are layers 1..L, in
            order. `data` is then `(inputs, labels)` as arrays, inputs alone, or a map-style data set.
        head: with `stages`, the module that gives the class scores from the last stage's output.
        **settings: any other field of `MeasureSettings` (`words`, `reference`, `seed`, `tower`, ...).

    Returns:
        `.table` (tidy rows), `.headline`, `.values(...)`, `.figures()`, `.show()`, `.save(dir)`.

    Raises:
        FulldepthError: if model, data or settings are invalid, the anatomy is not proven, or `output` is taken.
    """
    given = {
        "measures": measures,
        "max_sequences": max_sequences,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "token_policy": token_policy,
        "device": None if device is None else str(device),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "tokenizer": str(tokenizer) if isinstance(tokenizer, str | Path) else None,
    }
    stated = {name: value for name, value in given.items() if value is not None}
    resolved = layer(MeasureSettings, read(recipe, "measure") if recipe else {}, stated, nested(settings))
    own = None if isinstance(tokenizer, str | Path) else tokenizer
    with watching(progress, watcher) as shown:
        is_run = isinstance(model, str | Path) and series and bool(find_checkpoints(model))
        if is_run and own is not None:
            raise FulldepthError("A series takes a tokenizer by its folder or Hub name, not as an object.")
        if isinstance(model, str | Path) and own is None and stages is None and (is_run or output is not None):
            with TemporaryDirectory() if output is None else nullcontext(output) as folder:
                return measure_into(model, data, folder, resolved, overwrite=overwrite, series=series, watcher=shown)
        options: dict[str, Any] = resolved.model_dump(exclude_unset=True)
        named = options.pop("tokenizer", None)
        with claimed(output, overwrite):
            results = measurement.measure(
                model, data, tokenizer=own or named, watcher=shown, stages=stages, head=head, **options
            )
            if output is not None and launch.is_main():
                results.save(output)
        return results
