"""`quantise`: loss, size and time of quantisation and removal, alone and combined, in both orders.

Five models: the original; skipped (a plan, with its scalars); quantised; quantised, then skipped (a new search and fit
on the quantised model); skipped, then quantised (the original's plan and its scalars). Parts are skipped in place,
scalars stay float32 and unquantised. The output is the results, the plan of the quantised model, and with `save`
the quantised models as checkpoints (`saved.py`).

Rows, with the columns `model` and `difference` (the value minus the original's): `loss` (mean nats over held-out
tokens, healed if the plan is), `parameter_bytes` (in memory, without skipped parts, with scalars), `prefill_time` and
`decode_time` (of one token; median, min, max, s), measured in rounds, each model once per round, in changing order, and
`time_ratio` and `other_load` as of `bench`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from fulldepth import launch
from fulldepth.data.examples import Examples
from fulldepth.distributed import Processes
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.execution.flops import Variant
from fulldepth.execution.latency import PHASES, Runner, check_positions, machine, random_tokens, time_in_rounds
from fulldepth.execution.scoring import LOSS
from fulldepth.hf import Anatomy, evaluating
from fulldepth.progress import Watcher
from fulldepth.results import DOCUMENT, FRAMEWORKS, Results, finite, provenance
from fulldepth.settings import layer as layered
from fulldepth.settings.bench import BenchSettings
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.assessment.calibrated import calibrated
from fulldepth.skip.assessment.outcome import settings_of
from fulldepth.skip.assessment.quantise_table import (
    FIRST,
    ORIGINAL,
    QUANTISED,
    SECOND,
    SKIPPED,
    Combination,
    headline,
    table_of,
)
from fulldepth.skip.assessment.quantisers import PACKAGES, check_method, int8
from fulldepth.skip.assessment.saved import Saver
from fulldepth.skip.plan import FILE, Plan, plan_scalars
from fulldepth.skip.selection.problem import SearchProblem, open_for, prepared
from fulldepth.skip.selection.search import search_with
from fulldepth.uncertainty import FEWEST_ROUNDS

SEARCHED = "quantised"
"""Folder inside the output with the search on the quantised model."""
MOVED = 1e-3
"""Relative difference from the plan's loss above which a warning is given."""


def quantise(
    model: str | Path | PreTrainedModel,
    plan: Plan | str | Path,
    data: Any,
    *,
    method: str = "int8",
    output: str | Path | None = None,
    save: str | Path | None = None,
    tokenizer: Any = None,
    heldout: Any = None,
    batch: int = 1,
    context: int = 128,
    new_tokens: int = 16,
    repeats: int = FEWEST_ROUNDS,
    resume: bool = False,
    watcher: Watcher | None = None,
    **options: Any,
) -> Results:
    """Quantise a model before and after its blocks are removed, and measure every combination.

    Args:
        model: the checkpoint that the plan was made for, or the loaded model (not changed).
        plan: a plan, its file, or its folder.
        data: as for `search`; the data of the search give the same held-out tokens.
        method: `int8` (torchao, weight-only), `gptq` or `awq` (4 bits, calibrated on the training part of the data).
        output: result folder; the plan of the quantised model is saved in its folder `quantised`. None = not saved.
        save: folder to create for the checkpoints that `saved.py` describes; None = no weights are saved.
        tokenizer: as for `search`; also saved with the checkpoints.
        heldout: as for `search`.
        batch: batch size of timed runs.
        context: length of the prompt in tokens.
        new_tokens: number of decoded tokens.
        repeats: number of rounds; fewer than 9 give no verdict on times.
        resume: continue an interrupted search on the quantised model.
        watcher: receives progress.
        **options: fields of `SearchSettings` that replace the plan's, for the search on the quantised model.

    Raises:
        FulldepthError: if the plan is for another model, the packages of the method are missing or cannot quantise this
            model here, its quantised weights cannot be saved, or a context with its new tokens exceeds its positions.
    """
    check_method(method)
    if launch.world() > 1:
        raise FulldepthError("Times are taken in one process: run `fulldepth skip quantise` without torchrun.")
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    settings = settings_of(plan, options)
    timed = {"batches": [batch], "contexts": [context], "new_tokens": new_tokens, "repeats": repeats}
    timing = layered(BenchSettings, {**timed, "seed": settings.seed})
    run = _Run(method, plan, settings, timing, None if output is None else Path(output), resume, watcher or Watcher())
    with run.process.holding(run.folder):
        run.check_folder()
        owner = open_for(model, settings, run.process).model
        plan.check_model(owner)
        check_positions(find_anatomy(owner), context, new_tokens)
        saver = None if save is None else run.saver(Path(save), owner, tokenizer, model)
        with evaluating(owner):
            combinations, examples = _measure(owner, data, run, saver, tokenizer=tokenizer, heldout=heldout)
            _time(combinations, timing, run.watcher)
        return run.results(combinations, examples, saver)


@dataclass(frozen=True)
class _Run:
    """One call of `quantise`."""

    method: str
    plan: Plan
    settings: SearchSettings
    timing: BenchSettings
    folder: Path | None
    resume: bool
    watcher: Watcher
    process: Processes = field(default_factory=Processes)

    def check_folder(self) -> None:
        """Refuse to overwrite results or plans."""
        for name in (DOCUMENT, *(() if self.resume else (f"{SEARCHED}/{FILE}",))):
            if self.folder is not None and (self.folder / name).exists():
                raise FulldepthError(f"{self.folder} already holds {name}. Choose another output folder.")

    def saver(self, folder: Path, owner: PreTrainedModel, tokenizer: Any, model: Any) -> Saver:
        """A `Saver`; refuses models that it cannot save."""
        source = model.name_or_path if isinstance(model, PreTrainedModel) else model
        places = (self.settings.tokenizer, self.plan.data.get("tokenizer"), source, self.plan.model.name)
        hub = {"revision": self.settings.revision, "trust_remote_code": self.settings.trust_remote_code}
        saver = Saver(folder, self.method, find_anatomy(owner), tokenizer, places, hub)
        saver.check(self.plan)
        for note in saver.notes:
            self.watcher.say(note)
        return saver

    def results(self, combinations: Sequence[Combination], examples: Examples, saver: Saver | None) -> Results:
        """The results, saved if there is a folder."""
        results = Results(table_of(combinations), _document(combinations, examples, self, saver))
        if self.folder is not None:
            results.save(self.folder)
        return results

    def quantised(
        self, anatomy: Anatomy, examples: Examples, plan: Plan | None = None, keep: Path | None = None
    ) -> Anatomy:
        """A quantised copy; calibration runs with the plan's blocks skipped."""
        self.watcher.say(f"Quantising ({self.method}).")
        if self.method == "int8":
            return int8(anatomy)
        return calibrated(anatomy, self.method, examples.train, plan, self.settings.seed, keep)


def _measure(
    owner: PreTrainedModel, data: Any, run: _Run, saver: Saver | None, *, tokenizer: Any, heldout: Any
) -> tuple[list[Combination], Examples]:
    """Every model with its loss; for int8 two models are in memory, and blocks are skipped in place."""
    plan = run.plan
    opened = {"tokenizer": tokenizer, "heldout": heldout, "hashed": plan.model.hash}  # as `quantise` has checked
    with prepared(owner, data, run.settings, run.process, **opened) as problem:
        combinations = [_combination(problem, ORIGINAL), _combination(problem, SKIPPED, plan)]
        anatomy, examples = problem.scorer.anatomy, problem.examples
    quantised = _quantised(anatomy, examples, run, saver)
    folder = None if run.folder is None else run.folder / SEARCHED
    again = partial(prepared, data=examples, settings=run.settings, process=run.process, tokenizer=None, heldout=None)
    with run.process.holding(folder), again(quantised.model) as problem:
        second = search_with(problem, run.process, run.watcher, output=folder, resume=run.resume)
        combinations += [_combination(problem, QUANTISED), _combination(problem, FIRST, second)]
        if run.method == "int8":  # rounding does not depend on skipped blocks
            combinations.append(_combination(problem, SECOND, plan))
    if saver is not None:
        saver.try_to_save(FIRST, quantised, second)
    if run.method != "int8":
        with again(run.quantised(anatomy, examples, plan).model) as problem:
            combinations.append(_combination(problem, SECOND, plan))
    return combinations, examples


def _quantised(anatomy: Anatomy, examples: Examples, run: _Run, saver: Saver | None) -> Anatomy:
    """The quantised model, saved if there is a saver: before the second search, which takes longest."""
    if saver is None:
        return run.quantised(anatomy, examples)
    with TemporaryDirectory() as folder:
        source = None if run.method == "int8" else Path(folder) / "quantised"
        quantised = run.quantised(anatomy, examples, keep=source)
        saver.save(QUANTISED, quantised, source=source)
    saver.try_to_save(SECOND, quantised, run.plan)
    return quantised


def _combination(problem: SearchProblem, name: str, plan: Plan | None = None) -> Combination:
    """A model with its loss over all held-out tokens."""
    scorer, batches = problem.scorer, problem.batches
    variant = Variant(() if plan is None else plan.blocks)
    scalars = plan_scalars(plan, scorer.anatomy)
    sums = np.array([value for batch in batches for value in scorer.healed_sums(batch, variant, scalars)[LOSS]])
    tokens = np.array([count for batch in batches for count in batch.tokens])
    documents = np.array([document for batch in batches for document in batch.documents])
    return Combination(name, scorer.anatomy, plan, sums, tokens, documents)


def _time(combinations: Sequence[Combination], timing: BenchSettings, watcher: Watcher) -> None:
    """Prefill and decoding of every model, once a round, in an order that changes from round to round."""
    context = timing.contexts[0]
    ids = random_tokens(combinations[0].anatomy, timing.batches[0], context + timing.new_tokens, timing.seed)
    runs = {each.name: (Runner(each.anatomy.model), each.switched) for each in combinations}
    watcher.begin("Timing", len(runs) * (timing.warmup + timing.repeats))
    options = timing.model_dump(include={"repeats", "warmup", "seed"})
    rounds = time_in_rounds(runs, ids, context, **options, advance=watcher.advance)
    for each in combinations:
        each.times |= {phase: rounds.seconds[each.name, phase] for phase in PHASES}
        each.other_load = rounds.other_load


def _document(
    combinations: Sequence[Combination], examples: Examples, run: _Run, saver: Saver | None
) -> dict[str, Any]:
    """The entries of `results.json`."""
    anatomy, plan = combinations[0].anatomy, run.plan
    plans = {each.name: each.plan.document() for each in combinations if each.plan is not None}
    document = {
        **provenance(
            "quantise",
            {**run.settings.model_dump(), "timing": run.timing.model_dump()},
            packages=(*FRAMEWORKS, *PACKAGES[run.method]),
            seed=run.settings.seed,
            machine=machine(anatomy.model.device),
        ),
        "method": run.method,
        "baseline": ORIGINAL,
        "model": {**plan.document()["model"], "num_layers": anatomy.num_layers},
        "models": [each.document() for each in combinations],
        "data": examples.meta,
        "saved": [] if saver is None else [asdict(checkpoint) for checkpoint in saver.saved],
        "plans": {SKIPPED: plans[SKIPPED], FIRST: plans[FIRST]},
        "warnings": [*_warnings(combinations, plan, examples), *([] if saver is None else saver.notes)],
        "headline": headline(combinations),
    }
    return dict(finite(document))


def _warnings(combinations: Sequence[Combination], plan: Plan, examples: Examples) -> Iterator[str]:
    """Warnings about the reliability of the numbers."""
    if examples.meta.get("hash") != plan.data.get("hash"):
        yield "Losses were read on other data than those that the plan was searched with."
    elif plan.healed_loss is not None and abs(combinations[1].loss - plan.healed_loss) > MOVED * plan.healed_loss:
        yield (
            f"The plan says a healed loss of {plan.healed_loss:.4f} nats, here it is {combinations[1].loss:.4f}: "
            "the device or the precision differ."
        )
    if any(combination.scalars is not None for combination in combinations):
        yield (
            "Times of skipped models include their scalars, computed apart from the weights as they are here; an "
            "export with folded scalars does not compute them."
        )
