"""Distillation: the model learns from labels and from the predictions of a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.core.targets import IGNORE
from fulldepth.execution import capture, find_anatomy
from fulldepth.hf import Anatomy, Classifier, device_of, evaluating, open_model
from fulldepth.losses.aligned_loss import Reader
from fulldepth.losses.term import Context, Term, check_states, statistics_dtype

CHUNK = 256
"""Number of positions whose teacher logits exist at a time."""


class Distillation(Term):
    r"""Mixture of the model's cross-entropy and its divergence from a teacher (`distillation_loss`).

    .. math:: L = (1 - w) \, L_{ce} + w \, L_{distillation}

    The teacher is loaded once, when the objective is attached, in its own precision; it moves to the device of the
    model's logits and runs in evaluation mode without gradients. It is not part of the model or its checkpoints.

    Source: Hinton et al. 2015 (arXiv 1503.02531), Sec. 2.
    """

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    name = "distillation"
    sites = ("residual",)
    unit = "nats"
    needs_logits = True
    teacher: str | Path | PreTrainedModel
    """Folder, Hub name, GGUF file, `package:NAME` or run folder of the teacher; in Python also a loaded model."""
    weight: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.5
    """The weight w of the formula: 0 = cross-entropy alone, 1 = teacher alone."""
    temperature: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 1.0
    """Divisor of both models' logits."""
    _teacher: Classifier | None = None

    @property
    def teacher_anatomy(self) -> Anatomy | None:
        """The anatomy of the teacher; None before it is loaded."""
        return None if self._teacher is None else self._teacher.anatomy

    def check(self, anatomy: Anatomy) -> None:
        """Load the teacher, and check that it predicts the model's tokens."""
        if anatomy.task not in ("causal-lm", "masked-lm"):
            raise FulldepthError(
                f"distillation is for causal and masked language models; {type(anatomy.model).__name__} is neither."
            )
        opened = open_model(self.teacher, device=device_of(anatomy.model))
        self._teacher = teacher = Classifier(find_anatomy(opened.model))
        ours = anatomy.vocab_size
        theirs = teacher.anatomy.vocab_size
        if ours != theirs or teacher.anatomy.task != anatomy.task:
            message = (
                f"The teacher {opened.name} predicts one of {theirs} tokens ({teacher.anatomy.task}), the model one of "
                f"{ours} ({anatomy.task}). Distillation needs a teacher with the same vocabulary."
            )
            if teacher.anatomy.task == anatomy.task:
                message += (
                    " If both have the same tokenizer, the larger vocabulary is padded with unused rows: enlarge the "
                    f"other (model.resize_token_embeddings({max(ours or 0, theirs or 0)}) of transformers) and save it."
                )
            raise FulldepthError(message)

    def check_length(self, length: int) -> None:
        """Refuse rows of `length` tokens that the teacher cannot read."""
        limit = None if self.teacher_anatomy is None else self.teacher_anatomy.max_positions
        if limit is not None and length > limit:
            raise FulldepthError(f"Rows of {length:,} tokens do not fit the teacher's {limit:,} positions.")

    def apply(self, loss: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Mix the divergence into the loss, which is the cross-entropy or the weighted losses of all layers."""
        value = self.value(context)
        share = self.weight * self.factor(context, value.device)
        return (1 - self.weight) * loss + share * value.to(loss.device), value.detach()

    def factor(self, context: Context, device: torch.device) -> Tensor | float:
        """The batch's share of the step's targets."""
        return context.portion.of_targets(context.task, context.batch)

    def value(self, context: Context) -> Tensor:
        """Mean divergence over the labelled positions.

        Raises:
            FulldepthError: if the batch has no labels, or rows that are longer than the teacher's positions.
        """
        labels = context.task.labels(context.batch)
        logits = context.logits
        teacher = self._teacher
        if labels is None or logits is None or teacher is None:
            raise FulldepthError("distillation needs `labels` in the batch, and a model that returns logits.")
        positions = context.batch.get("position_ids")  # several documents in a row have their own
        self.check_length(labels.shape[1] if positions is None else int(positions.max()) + 1)
        model = teacher.anatomy.model.to(logits.device)  # type: ignore[arg-type]
        inputs = {name: entry for name, entry in context.batch.items() if not name.endswith("labels")}
        with torch.no_grad(), evaluating(model), capture(teacher.anatomy, ["residual"]) as activations:
            teacher.anatomy.run_body(inputs)
            states = activations["residual"][-1]
        return distillation_loss(logits, states, teacher.tokens, labels, self.temperature)


def distillation_loss(
    logits: Tensor,
    states: Tensor,
    head: Reader,
    labels: Tensor,
    temperature: float = 1.0,
    ignore_index: int = IGNORE,
    chunk: int = CHUNK,
) -> Tensor:
    r"""Mean Kullback-Leibler divergence of a model's predictions `q` from those of a teacher `p`, in nats.

    .. math:: L_{distillation} = T^2 \, \mathrm{mean}_{n: y_n \ne ignored} \sum_v p_{nv} \log \frac{p_{nv}}{q_{nv}},
        \quad p_n = \mathrm{softmax}(t_n / T), \; q_n = \mathrm{softmax}(s_n / T)

    The factor `T^2` keeps the size of the gradient. The teacher's logits `t` exist for `chunk` positions at a time; the
    gradient is computed with the value.

    Args:
        logits: `s`, `[..., V]`; receives gradients.
        states: the teacher's states `[..., D]`, from which `head` computes `t`; they receive no gradients.
        head: the teacher's head, `[N, D] -> [N, V]`.
        labels: `[...]`, aligned with the positions; only `ignore_index` matters.
        temperature: T, above 0.
        ignore_index: label of positions that do not count.
        chunk: positions at a time.

    Returns:
        Scalar of at least 0, float32 (float64 for float64 logits), on the device of the logits; 0 if no position
        counts.

    Raises:
        FulldepthError: for labels of another shape, or a head that reads another vocabulary.

    Source: Hinton et al. 2015 (arXiv 1503.02531), Sec. 2 and 2.1.
    """
    counted = labels != ignore_index
    check_states([logits], counted)
    total = _Divergence.apply(logits, states, head, counted.to(logits.device), temperature, chunk)
    return temperature**2 * total / counted.sum().clamp(min=1).to(logits.device)


class _Divergence(torch.autograd.Function):
    """Sum of the divergences at the counted positions; the gradient is computed in the same pass.

    Other terms are recomputed in the backward pass. Here that would run the teacher's head and both softmaxes a second
    time (docs/log.md, 2026-11-27).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, states: Tensor, head: Reader, counted: Tensor, temperature: float, chunk: int
    ) -> Tensor:
        dtype = statistics_dtype(logits)
        slopes = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        total = torch.zeros((), dtype=dtype, device=logits.device)
        flat = [tensor.flatten(0, counted.dim() - 1) for tensor in (counted, states, logits, slopes)]
        chunks = zip(*(tensor.split(chunk) for tensor in flat), strict=True)
        for counts, teacher_states, model_logits, slope in chunks:
            teacher_logits = head(teacher_states[counts]).to(dtype)  # [n, V]
            if teacher_logits.shape[-1] != model_logits.shape[-1]:
                raise FulldepthError(
                    f"The teacher predicts one of {teacher_logits.shape[-1]:,} tokens, the model one of "
                    f"{model_logits.shape[-1]:,}; distillation needs equal vocabularies."
                )
            log_p = teacher_logits.div_(temperature).log_softmax(-1)
            log_q = model_logits[counts].to(dtype).div_(temperature).log_softmax(-1)
            total += F.kl_div(log_q, log_p, reduction="sum", log_target=True)
            slope[counts] = log_q.exp_().sub_(log_p.exp_()).div_(temperature).to(slope.dtype)
        ctx.save_for_backward(slopes)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return slope * ctx.saved_tensors[0], None, None, None, None, None
