"""`fulldepth.evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulldepth import evaluation
from fulldepth.api.running import nested, watching
from fulldepth.progress import Watcher
from fulldepth.results import Results
from fulldepth.skip import Plan


def evaluate(
    model: Any,
    tasks: str | list[str] | None = None,
    output: str | Path | None = None,
    *,
    plan: Plan | str | Path | None = None,
    tokenizer: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Results:
    """Score a language model on tasks, as `fulldepth evaluate`.

    See `fulldepth.evaluation.evaluate`, which this function calls.

    ```python
    results = fulldepth.evaluate("path/to/model", ["arc_easy_local"], "out/", task_data=["data/"])  # writes the page
    results.values("task_score", "acc", "arc_easy_local")  # exit layer -> accuracy
    ```

    Args:
        model: checkpoint folder, export of `fulldepth skip apply`, GGUF file, `package:NAME`, Hub name, or a loaded
            model (left on its device, in its mode).
        tasks: names of tasks, groups or suites, or one name.
        output: result folder, which also gets the page; None = nothing is written.
        plan: plan of `fulldepth skip search`, or its file: the model is evaluated with its blocks skipped.
        tokenizer: a tokenizer, its folder or Hub name; None = the one saved with the checkpoint.
        resume: continue an interrupted evaluation of the same model and tasks with the same settings.
        overwrite: replace results in the output folder.
        progress: None = a bar in a terminal, lines in a notebook; True = also lines in a log file; False = none.
        watcher: receives messages and progress instead.
        **settings: any other field of `EvaluateSettings` (`task_data`, `exit_layers`, `limit`, `batch_size`, ...).

    Raises:
        FulldepthError: as `fulldepth.evaluation.evaluate`.
    """
    loaded = Plan.load(plan) if isinstance(plan, str | Path) else plan
    with watching(progress, watcher) as shown:
        return evaluation.evaluate(
            model,
            tasks,
            output,
            plan=loaded,
            tokenizer=tokenizer,
            resume=resume,
            overwrite=overwrite,
            watcher=shown,
            **nested(settings),
        )
