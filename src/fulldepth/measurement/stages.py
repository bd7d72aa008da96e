"""Measures a plain module, whose stages are named by the caller, in the place of a Transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from fulldepth.data import Sequences, prepare_arrays
from fulldepth.errors import FulldepthError, one_line
from fulldepth.execution import Verified
from fulldepth.execution.batching import batched, model_inputs
from fulldepth.execution.stream import is_close
from fulldepth.files import Fingerprint
from fulldepth.hf import (
    Checkpoint,
    StagedAnatomy,
    StagedModel,
    StageHead,
    device_of,
    first_broken_weight,
    logits_of,
    resolve_stages,
)
from fulldepth.hf.stages import STAGES
from fulldepth.measurement import tokens
from fulldepth.measurement.subject import MeasuredSubject
from fulldepth.settings.measure import MeasureSettings

UNCHECKED = (
    "The module is no Transformer, so the checks of the residual stream do not apply. Checked: every stage runs once, "
    "in the stated order, and the head gives the module's own output{head}. Not checked: whether the stages are all "
    "that changes the states, and whether a stage adds to its input."
)
POLICIES = ("all", "no-first", "cls", "last", "mean")


class StagedCheckpoint(Checkpoint):
    """A plain module; its configuration is its text form."""

    @property
    def config_hash(self) -> str:
        """sha256 of the module as PyTorch prints it."""
        return str(Fingerprint(str(self.model)))


@dataclass(frozen=True)
class VerifiedStages(Verified):
    """A module whose stages ran in order."""

    def describe(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The model's entry in `results.json`, with the width of every layer."""
        assert isinstance(self.anatomy, StagedAnatomy)
        own = {"class": checkpoint.name, "widths": list(self.anatomy.widths)}
        return {**super().describe(checkpoint), **own}


def prepare_stages(
    module: nn.Module,
    data: Any,
    settings: MeasureSettings,
    *,
    stages: Sequence[nn.Module | str],
    head: nn.Module | str | None,
) -> MeasuredSubject:
    """A plain module and its data; runs it once on two samples.

    Raises:
        FulldepthError: if a stage does not run, runs twice or out of order, or the head does not give the module's
            output.
    """
    model = StagedModel(module)
    if broken := first_broken_weight(module):
        raise FulldepthError(f"{type(module).__name__} has NaN or infinite weights (first: {broken}).")
    parts = resolve_stages(module, stages)
    head = module.get_submodule(head) if isinstance(head, str) else head
    policy = "all" if settings.token_policy == "auto" else settings.token_policy
    if policy not in POLICIES:
        raise FulldepthError(f"The token policy {policy} needs text; a plain module takes {', '.join(POLICIES)}.")
    sequences = data
    if not isinstance(data, Sequences):
        sequences = prepare_arrays(data, max_sequences=settings.max_sequences, seed=settings.seed)
    device = device_of(module)
    inputs = model_inputs(sequences.collate(range(min(2, len(sequences)))).inputs, device, model.dtype)
    given, gave, output = _followed(model, parts, inputs)
    shapes = tuple(tuple(state.shape[1:]) for state in (given[0], *gave))
    anatomy = StagedAnatomy(model, STAGES, stages=parts, shapes=shapes)  # type: ignore[arg-type]
    classifier = None if head is None else _checked_head(head, anatomy, gave[-1], output)
    pairs = zip(given[1:], gave[:-1], strict=True)
    gaps = [layer for layer, (x, y) in enumerate(pairs, start=2) if not is_close(x, y)]
    verified = VerifiedStages(
        anatomy,
        anatomy.width,
        chained=not gaps,
        branches=False,
        classifier=classifier,
        positions=shapes[0][0] if anatomy.is_sequence else 1,
        value_width=0,
        unproven={} if classifier else {"head": "none was given (head=)"},
    )
    sequences, batching = batched(anatomy, sequences, device)
    between = gaps and (
        f"Stage {gaps[0]} does not read what stage {gaps[0] - 1} gives ({len(gaps)} such gaps): something between "
        "them changes the states, and displacement and norm ratio count it to the later stage."
    )
    warnings = (UNCHECKED.format(head="" if classifier else " (none was given)"), between, batching)
    checkpoint = StagedCheckpoint(model, type(module).__name__)  # type: ignore[arg-type]
    return MeasuredSubject(
        checkpoint,
        verified,
        sequences,
        tokenizer=None,
        policy=policy,
        device=device,
        openings=tokens.Openings("", None, len(sequences)),
        warnings=tuple(line for line in warnings if line),
    )


@torch.no_grad()
def _followed(
    model: StagedModel, stages: Sequence[nn.Module], inputs: dict[str, Tensor]
) -> tuple[list[Tensor], list[Tensor], Any]:
    """What every stage read and gave in one pass, in their order, and the module's output."""
    calls: list[tuple[int, Tensor, Tensor]] = []
    kind = type(model.module).__name__
    numbers = {id(stage): number for number, stage in enumerate(stages, start=1)}
    if len(numbers) < len(stages):
        raise FulldepthError("A module stands for one stage only; the same one is listed twice.")

    def record(module: nn.Module, args: Any, output: Any) -> None:
        number = numbers[id(module)]
        given = _state(args[0] if args else None, f"Stage {number} reads")
        calls.append((number, given, _state(output, f"Stage {number} gives")))

    hooks = [stage.register_forward_hook(record) for stage in stages]
    try:
        output = model(**inputs)
    except FulldepthError:
        raise
    except Exception as error:
        raise FulldepthError(f"{kind} fails on two samples: {type(error).__name__}: {one_line(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()
    order = [number for number, _, _ in calls]
    if order != list(range(1, len(stages) + 1)):
        raise FulldepthError(
            f"The stages of {kind} run in the order {order[:20]}; expected each once, in the order of the list."
        )
    return [given for _, given, _ in calls], [gave for _, _, gave in calls], output


def _state(value: Any, what: str) -> Tensor:
    """A copy of what a stage reads or gives: a tensor of samples, or the first of several outputs."""
    value = value[0] if isinstance(value, tuple | list) and value else value
    if isinstance(value, Tensor) and value.ndim >= 2 and value.is_floating_point():
        return value.clone()
    shown = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise FulldepthError(f"{what} {shown}; expected a tensor of real numbers, one row for each sample.")


def _checked_head(head: nn.Module, anatomy: StagedAnatomy, last: Tensor, output: Any) -> StageHead:
    """The head, which must give the module's own output from the last stage's.

    Raises:
        FulldepthError: if it does not.
    """
    with torch.no_grad():
        try:
            scores = head(last)
        except Exception as error:
            raise FulldepthError(f"The head fails on the last stage's output: {one_line(error)}") from error
    output = output if isinstance(output, Tensor) else logits_of(output)
    if not isinstance(output, Tensor) or not isinstance(scores, Tensor) or not is_close(scores, output):
        raise FulldepthError(
            "The head applied to the last stage's output does not give the module's own output. What stands between "
            "them belongs to the head: head=torch.nn.Sequential(norm, classifier)."
        )
    if scores.ndim != 2:
        raise FulldepthError(f"The head gives {tuple(scores.shape)}; expected class scores [samples, classes].")
    return StageHead(head, anatomy)


def rows_that_fit(table: pd.DataFrame, widths: Sequence[int]) -> tuple[pd.DataFrame, list[dict[str, str]]]:
    """The rows that compare or classify states of one width only, and one reason for each measure with other rows.

    CKA, NC1 and the entropies exist for any widths. Cosine compares two layers, displacement and norm ratio a layer
    with the one before, the jump rate all layers from one on, and the head reads states of the last layer's width.
    """
    last = len(widths) - 1
    layer, other = (table[name].astype("Float64").fillna(-1).astype(int) for name in ("layer", "other"))
    width = {**dict(enumerate(widths)), -1: widths[-1]}
    all_equal_from = [len(set(widths[max(start - 2, 0) :])) == 1 for start in range(last + 1)]
    before = [False, *(x == y for x, y in pairwise(widths))]
    rules = {
        "cosine": [width[a] == width[b] for a, b in zip(layer, other, strict=True)],
        **{name: [a < 1 or before[a] for a in layer] for name in ("displacement", "norm_ratio")},
        "jump_rate": [a < 1 or all_equal_from[a] for a in layer],
        **{name: [width[a] == widths[-1] for a in layer] for name in ("lens_accuracy", "lens_loss")},
        **{name: [len(set(widths[1:])) == 1] * len(table) for name in ("saturation", "effective_depth")},
    }
    keep = pd.Series(True, index=table.index)
    for measure, fits in rules.items():
        keep &= (table.measure != measure) | pd.Series(fits, index=table.index)
    dropped = dict.fromkeys(table.measure[~keep])
    reason = f"states of different widths are compared there (layers 0..{last} have {', '.join(map(str, widths))})"
    return table[keep].reset_index(drop=True), [{"measure": f"{name} (in part)", "reason": reason} for name in dropped]
