"""`quantise`: loss, size and time of quantisation and removal, alone and combined, in both orders.

Five models: the original; skipped (a plan, with its scalars); quantised to int8; quantised, then skipped (a new search
and fit on the quantised model); skipped, then quantised (the original's plan and its scalars). Parts are skipped in
place, scalars stay float32 and unquantised. The output is the results and the plan of the quantised model.

Rows are those of `bench` without memory: `loss` (healed if the plan is), `parameter_bytes` (in memory, without skipped
parts, with scalars), times and ratios of times of one batch and context.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fulldepth import launch
from fulldepth.data.examples import Examples
from fulldepth.distributed import Processes
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.execution.flops import Variant
from fulldepth.execution.latency import PHASES, Runner, check_positions, machine
from fulldepth.execution.memory import parameter_bytes
from fulldepth.execution.scoring import LOSS
from fulldepth.hf import Anatomy, evaluating, skipping
from fulldepth.progress import Watcher
from fulldepth.results import DOCUMENT, FRAMEWORKS, Finding, Results, finite, provenance
from fulldepth.settings.bench import QuantiseSettings
from fulldepth.settings.keywords import takes_settings
from fulldepth.skip.compared import Cell, HeldoutLosses, Measured, gap_finding, in_words, losses_of
from fulldepth.skip.outcome import settings_of
from fulldepth.skip.plan import FILE, Plan, plan_scalars
from fulldepth.skip.problem import SearchProblem, open_for, prepared
from fulldepth.skip.search import search_with

METHOD = "int8"
ORIGINAL, SKIPPED, QUANTISED = "original", "skipped", "quantised"
FIRST, SECOND = "quantised, then skipped", "skipped, then quantised"
SEARCHED = "quantised"
"""Folder inside the output with the search on the quantised model."""
MOVED = 1e-3
"""Relative difference from the plan's loss above which a warning is given."""


@takes_settings(QuantiseSettings)
def quantise(
    model: str | Path | PreTrainedModel,
    plan: Plan | str | Path,
    data: Any,
    *,
    settings: QuantiseSettings,
    watcher: Watcher,
    output: str | Path | None = None,
    tokenizer: Any = None,
    heldout: Any = None,
    resume: bool = False,
) -> Results:
    """Quantise a model to int8 before and after its blocks are removed, and measure every combination.

    Args:
        model: the checkpoint that the plan was made for, or the loaded model (not changed).
        plan: a plan, its file, or its folder.
        data: as for `search`; the data of the search give the same held-out tokens.
        settings: fields of `QuantiseSettings` as keywords; those of a search replace the plan's, for the search on the
            quantised model.
        watcher: receives progress.
        output: result folder; the plan of the quantised model is saved in its folder `quantised`. None = not saved.
        tokenizer: as for `search`.
        heldout: as for `search`.
        resume: continue an interrupted search on the quantised model.

    Raises:
        FulldepthError: if the plan is for another model, torchao is missing or cannot quantise this model, or
            a context with its new tokens exceeds its positions.
    """
    if find_spec("torchao") is None:
        raise FulldepthError("Quantisation needs torchao, not installed here: pip install 'fulldepth[quantise]'.")
    if launch.world() > 1:
        raise FulldepthError("Times are taken in one process: run `fulldepth skip quantise` without torchrun.")
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    settings = settings_of(plan, settings)
    process, folder = Processes(), None if output is None else Path(output)
    with process.holding(folder):
        for name in (DOCUMENT, *(() if resume else (f"{SEARCHED}/{FILE}",))):
            if folder is not None and (folder / name).exists():
                raise FulldepthError(f"{folder} already holds {name}. Choose another output folder.")
        owner = open_for(model, settings, process).model
        plan.check_model(owner)
        check_positions(find_anatomy(owner), max(settings.contexts), settings.max_new_tokens)
        opened = partial(prepared, settings=settings, process=process)
        with evaluating(owner):
            hashed = plan.model.hash  # as just checked
            with opened(owner, data, tokenizer=tokenizer, heldout=heldout, hashed=hashed) as problem:
                anatomy, examples = problem.scorer.anatomy, problem.examples
                sums, batches = {ORIGINAL: _sums(problem), SKIPPED: _sums(problem, plan)}, problem.batches
            watcher.say(f"Quantising ({METHOD}).")
            quantised = int8(anatomy)
            searched = None if folder is None else folder / SEARCHED
            again = opened(quantised.model, examples, tokenizer=None, heldout=None)
            with process.holding(searched), again as problem:
                second = search_with(problem, process, watcher, output=searched, resume=resume)
                sums |= {QUANTISED: _sums(problem), FIRST: _sums(problem, second), SECOND: _sums(problem, plan)}
            models = {
                ORIGINAL: (anatomy, None),
                SKIPPED: (anatomy, plan),
                QUANTISED: (quantised, None),
                FIRST: (quantised, second),
                SECOND: (quantised, plan),
            }
            sizes = {name: left_bytes(*each) for name, each in models.items()}
            measured = Measured(list(models), sizes, losses_of(sums, batches))
            runs = {name: (Runner(each[0].model), partial(_switched, *each)) for name, each in models.items()}
            cells = [Cell(batch, context) for batch in settings.batches for context in settings.contexts]
            watcher.begin("Timing", len(cells) * len(runs) * (settings.warmup + settings.repeats))
            for cell in cells:
                measured.take_times(cell, runs, anatomy, settings, watcher)
        results = Results(measured.table(), _document(models, measured, examples, settings))
        if folder is not None:
            results.save(folder)
        return results


@torch.no_grad()
def int8(anatomy: Anatomy) -> Anatomy:
    r"""A copy with the linear layers of all blocks in int8, weight-only, by torchao.

    A row of a matrix is stored as integers `q` in [-128, 127] and one factor `s` in the model's precision:
    `w ~ s q`, `q = round(w / s)`, symmetric about 0. Activations are not quantised; products use `q` in the model's
    precision. Embeddings, norms and the head are not quantised either, as with transformers' `TorchAoConfig`: a head
    that is tied to the embeddings would be stored twice.

    Args:
        anatomy: the verified model; not changed.

    Returns:
        The copy, on the same device, in evaluation mode.

    Raises:
        FulldepthError: if torchao cannot be imported, a layer of the model does not run with packed weights, or the
            matrices of experts are stored as one parameter.
    """
    try:
        with _quiet():
            from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415
    except (ImportError, RuntimeError, OSError) as error:
        raise FulldepthError(f"torchao cannot be used with torch {torch.__version__}: {error}") from error
    if stacked := sum(weight.numel() for _, _, weight in anatomy.expert_projections() if weight is not None):
        share = stacked / sum(weight.numel() for block in anatomy.block_list for weight in block.parameters())
        raise FulldepthError(
            f"int8 cannot quantise this {type(anatomy.model).__name__}: torchao packs linear layers, and {share:.0%} "
            "of the weights of its blocks are experts that are stored as one parameter for all."
        )
    quantised, targets = replace(anatomy, model=copy.deepcopy(anatomy.model).eval()), set()
    for block in quantised.blocks:
        for name, module in list(block.named_modules()):
            if isinstance(module, Conv1D):  # GPT-2's transposed matrices, which torchao does not know
                inputs, outputs = module.weight.shape
                linear = nn.Linear(inputs, outputs, device=module.weight.device, dtype=module.weight.dtype)
                linear.weight = nn.Parameter(module.weight.detach().T.contiguous())
                linear.bias = nn.Parameter(module.bias.detach())
                block.set_submodule(name, linear)
        targets |= {module for module in block.modules() if isinstance(module, nn.Linear)}
    with _quiet():
        quantize_(quantised.model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: module in targets)
    for module in targets:
        if type(module).forward is nn.Linear.forward:
            continue
        try:  # a linear layer of a custom class, such as Falcon's, may not run with packed weights
            module(torch.zeros(1, module.in_features, device=module.weight.device, dtype=module.weight.dtype))
        except NotImplementedError as error:
            raise FulldepthError(
                f"int8 cannot quantise this model: torchao packs linear layers, and its {type(module).__name__} "
                "multiplies in a way that packed weights do not know."
            ) from error
    return quantised


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torchao's messages on kernels for other machines."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _switched(anatomy: Anatomy, plan: Plan | None) -> AbstractContextManager[Any]:
    """A plan's blocks skipped and its scalars used, inside `with`."""
    if plan is None:
        return nullcontext()
    return skipping(anatomy, plan.blocks, plan.granularity, plan_scalars(plan, anatomy))


def left_bytes(anatomy: Anatomy, plan: Plan | None) -> int:
    """Bytes in memory of all weights that a plan leaves, and of its scalars: those that the format `fast` writes."""
    total, scalars = parameter_bytes(anatomy.model), plan_scalars(plan, anatomy)
    if plan is None:
        return total
    removed = nn.ModuleList()
    for layer in plan.blocks:
        if plan.granularity == "layer":
            removed.append(anatomy.blocks[layer - 1])
            continue
        shared = {anatomy.part(layer, f"{part}_norm") for part in ("attention", "mlp") if part != plan.granularity}
        roles = (plan.granularity, f"{plan.granularity}_norm", f"{plan.granularity}_branch")
        parts = (anatomy.part(layer, role) for role in roles)
        removed.extend(module for module in parts if module is not None and module not in shared)
    return total - parameter_bytes(removed) + (0 if scalars is None else parameter_bytes(scalars))


def _sums(problem: SearchProblem, plan: Plan | None = None) -> np.ndarray:
    """[N] summed loss of every held-out sequence, with a plan's blocks skipped and its scalars."""
    variant, scalars = Variant(() if plan is None else plan.blocks), plan_scalars(plan, problem.scorer.anatomy)
    parts = (problem.scorer.healed_sums(batch, variant, scalars)[LOSS] for batch in problem.batches)
    return np.array([value for part in parts for value in part])


def _document(
    models: Mapping[str, tuple[Anatomy, Plan | None]],
    measured: Measured,
    examples: Examples,
    settings: QuantiseSettings,
) -> dict[str, Any]:
    """The entries of `results.json`."""
    (anatomy, plan), (_, second) = models[SKIPPED], models[FIRST]
    assert plan is not None
    assert second is not None
    described = [
        {
            "label": name,
            "baseline": name == ORIGINAL,
            "model": {
                "class": type(own.model).__name__,
                "num_layers": own.num_layers,
                "dtype": str(own.model.dtype).removeprefix("torch."),
                "quantised": own is not anatomy,
            },
            "granularity": made and made.granularity,
            "blocks": made and made.blocks,
            "healed": made is not None and made.healed_loss is not None,
        }
        for name, (own, made) in models.items()
    ]
    run: dict[str, Any] = {
        "seed": settings.seed,
        "machine": machine(anatomy.model.device),
        "packages": (*FRAMEWORKS, "torchao"),
    }
    document = {
        **provenance("quantise", settings.model_dump(), **run),
        "method": METHOD,
        "baseline": ORIGINAL,
        "model": {**plan.document()["model"], "num_layers": anatomy.num_layers},
        "models": described,
        "data": examples.meta,
        "plans": {SKIPPED: plan.document(), FIRST: second.document()},
        "warnings": list(_warnings(plan, second, measured, examples)),
        "headline": dict(_headline(measured, {name: made for name, (_, made) in models.items()})),
    }
    return dict(finite(document))


def _warnings(plan: Plan, second: Plan, measured: Measured, examples: Examples) -> Iterator[str]:
    """Warnings about the reliability of the numbers."""
    assert measured.losses is not None
    loss = measured.losses.mean(SKIPPED)
    if examples.meta.get("hash") != plan.data.get("hash"):
        yield "Losses were read on other data than those that the plan was searched with."
    elif plan.healed_loss is not None and abs(loss - plan.healed_loss) > MOVED * plan.healed_loss:
        yield (
            f"The plan says a healed loss of {plan.healed_loss:.4f} nats, here it is {loss:.4f}: "
            "the device or the precision differ."
        )
    if any(each.healed_loss is not None for each in (plan, second)):
        yield (
            "Times of skipped models include their scalars, computed apart from the weights as they are here; an "
            "export with folded scalars does not compute them."
        )


def _headline(measured: Measured, plans: Mapping[str, Plan | None]) -> Iterator[tuple[str, Finding]]:
    """Findings by name: the difference between the orders, and cost and savings of every combination."""
    first, second, losses, not_compared = plans[FIRST], plans[SECOND], measured.losses, measured.busy()
    assert first is not None
    assert second is not None
    assert losses is not None
    yield "order", order(losses, first, second)
    for name in measured.labels[1:]:
        added, plan = losses.added(name), plans[name]
        healed = "" if plan is None else ", healed" if plan.healed_loss is not None else ", not healed"
        size = measured.parameter_bytes[name] / measured.parameter_bytes[ORIGINAL]
        loss = f"held-out loss {losses.mean(name):.4f} nats{healed}, {in_words(added, 'the original')}"
        parts = [f"{name[0].upper()}{name[1:]}: {loss}", f"{size:.1%} of its parameter bytes"]
        if not_compared is None:
            parts += [f"{phase} time: {measured.ratio_text(name, phase)}" for phase in PHASES]
        yield name, gap_finding(added, "; ".join(parts) + ".")
    if not_compared is not None:
        yield "times", not_compared


def order(losses: HeldoutLosses, first: Plan, second: Plan) -> Finding:
    """The loss of quantising first minus that of quantising last."""
    gap = losses.added(FIRST, SECOND)
    listed = [", ".join(map(str, plan.blocks)) for plan in (first, second)]
    which = f"they remove layers {listed[0]} and {listed[1]}"
    if set(first.blocks) == set(second.blocks):
        which = f"both remove layers {', '.join(map(str, sorted(first.blocks)))}"
    verdict = f"Quantising first: {in_words(gap, 'quantising last')}"
    if gap.measurable:
        better = "first" if gap.mean < 0 else "last"
        verdict = f"Quantising {better} is better by {abs(gap.mean):.4f} nats ± {gap.free_error:.4f}"
    last = losses.mean(SECOND)
    ends = f"quantise, then skip ends at {losses.mean(FIRST):.4f} nats, skip, then quantise at {last:.4f}"
    return gap_finding(gap, f"{verdict}; {ends}; {which}.")
