"""`fulldepth.train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulldepth import training
from fulldepth.api.running import nested, watching
from fulldepth.progress import Watcher
from fulldepth.results import Results, write_page
from fulldepth.settings import layer, read
from fulldepth.training import TrainSettings


def train(
    recipe: str | Path | Mapping[str, Any] | TrainSettings,
    output: str | Path,
    *,
    resume: bool = False,
    progress: bool | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Results:
    """Train a model into a run folder, as `fulldepth train`.

    The folder holds `settings.yaml`, checkpoints, `results.parquet` and `results.json` (losses, penalties, displacement
    and jump rates at every evaluation), and the page.

    ```python
    run = fulldepth.train("tiny-jreg", "jreg-run/", steps=300, objective={"jump": {"alpha": 0.3}})
    run.values("validation_loss", "mean")  # step -> nats
    fulldepth.measure("jreg-run/", "corpus:builtin").show()
    ```

    Args:
        recipe: name of a recipe (`fulldepth train --list`), a YAML file, a mapping of settings, or `TrainSettings`.
        output: the run folder; created if absent.
        resume: resume from the last complete checkpoint; without one, start at the beginning.
        progress: None = a bar in a terminal, lines in a notebook; True = also lines in a log file; False = none.
        watcher: receives messages and progress instead.
        **settings: fields of `TrainSettings`, which override the recipe; mappings are merged key by key.

    Raises:
        FulldepthError: if the settings are invalid or inconsistent, the folder holds another run, or the loss is not
            finite.
    """
    resolved = layer(TrainSettings, _settings_of(recipe), nested(settings))
    name = Path(recipe).stem if isinstance(recipe, str | Path) else "settings"
    with watching(progress, watcher) as shown:
        return training.train(resolved, output, resume=resume, recipe=name, watcher=shown, after_evaluation=write_page)


def _settings_of(recipe: str | Path | Mapping[str, Any] | TrainSettings) -> Mapping[str, Any]:
    """The settings of a recipe as plain values."""
    if isinstance(recipe, str | Path):
        return read(recipe, "train")
    return recipe.model_dump(mode="json", exclude_unset=True) if isinstance(recipe, TrainSettings) else recipe
