"""`search_into`: implements `fulldepth skip search`, from the name of a checkpoint to the folder with the plan."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fulldepth.data.examples import Examples
from fulldepth.distributed import processes
from fulldepth.errors import FulldepthError
from fulldepth.hf.model_hash import model_hash
from fulldepth.progress import Watcher
from fulldepth.results import DOCUMENT, Results
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.assessment.outcome import KIND, outcome
from fulldepth.skip.exports.possible import announce
from fulldepth.skip.plan import FILE, Plan
from fulldepth.skip.responses import FILE as RESPONSES
from fulldepth.skip.responses import generate_responses, read_prompts, stored_responses
from fulldepth.skip.selection.problem import open_for, prepared, tokenizer_of
from fulldepth.skip.selection.search import search_with

RUN_SETTINGS = "settings.yaml"
"""File of a training run's folder, in which results have the same names."""


def search_into(
    model: str | Path | PreTrainedModel,
    data: Any,
    output: str | Path,
    settings: SearchSettings,
    *,
    heldout: Any = None,
    responses: int | None = None,
    temperature: float = 0.0,
    max_new_tokens: int = 256,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> Plan:
    """Search for a plan; optionally generate responses with the unmodified model first.

    Args:
        model: checkpoint folder or Hub name.
        data: as `search`; with `responses`, rows with prompts to respond to.
        output: folder for `plan.json`, the results of `outcome`, and `responses.jsonl`.
        settings: of the search.
        heldout: data to score with; None = a random fifth of `data`.
        responses: number of prompts to respond to; None = the data hold responses.
        temperature: of the generation, 0 = greedy.
        max_new_tokens: most tokens of a response.
        resume: continue an interrupted search.
        watcher: receives progress and messages.

    Raises:
        FulldepthError: as `search` and `generate_responses`.
    """
    folder, watcher = Path(output), watcher or Watcher()
    if responses is not None and responses < 1:
        raise FulldepthError(f"The number of responses must be at least 1, got {responses}.")
    with processes() as process, process.holding(folder):
        process.first(lambda: _check_folder(folder, resume))
        checkpoint = open_for(model, settings, process)
        owner = checkpoint.model
        tokenizer = None if isinstance(data, Examples) else tokenizer_of(checkpoint, settings)
        hashed, generation = model_hash(owner), None
        if responses is not None:
            announce(owner, settings, settings.blocks or len(settings.given or ()))  # before responses are generated
            sampling = {"temperature": temperature, "seed": settings.seed, "max_new_tokens": max_new_tokens}

            def respond() -> dict[str, Any]:
                if isinstance(data, str | Path) and Path(data).resolve() == (folder / RESPONSES).resolve():
                    raise FulldepthError(
                        f"The prompts are in {data}, which the generated responses would replace. Choose another "
                        "output folder."
                    )
                prompts = read_prompts(data, tokenizer, responses, settings.seed)
                digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
                asked = {"model": hashed, "prompts": f"sha256:{digest}", "count": responses, **sampling}
                options: dict[str, Any] = {**sampling, "batch_size": settings.batch_size, "watcher": watcher}
                generate = partial(generate_responses, owner, tokenizer, prompts, **options)
                return stored_responses(folder, asked, generate)

            generation = process.first(respond)
        source = data if generation is None else str(folder / RESPONSES)
        opened = {"tokenizer": tokenizer, "heldout": heldout, "hashed": hashed}
        with prepared(owner, source, settings, process, **opened) as problem:
            plan = search_with(problem, process, watcher, output=folder, resume=resume, responses=generation)
            if process.is_main:
                if not (folder / DOCUMENT).exists():
                    outcome(plan, problem, watcher=watcher).save(folder)
                else:
                    results = Results.load(folder)
                    if results.meta.get("plan") != json.loads(json.dumps(plan.document())):
                        raise FulldepthError(f"{folder} holds other results. Choose another output folder.")
                    results.save_page(folder)
        process.wait()
    return plan


def _check_folder(folder: Path, resume: bool) -> None:
    """Refuse a folder with files of anything but a search to resume."""
    for name in (RUN_SETTINGS,) if resume else (FILE, DOCUMENT, RUN_SETTINGS):
        if (folder / name).exists():
            raise FulldepthError(f"{folder} already holds a {name}. Choose another output folder.")
    if (folder / DOCUMENT).exists():
        kind = Results.load(folder).meta.get("kind")
        if kind != KIND or not (folder / FILE).exists():
            raise FulldepthError(f"{folder} holds other results. Choose another output folder.")
