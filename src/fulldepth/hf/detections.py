"""`DetectionHeads`: a detector's class head and box head applied to the states of any decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor

from fulldepth.errors import FulldepthError
from fulldepth.hf.anatomy import Anatomy
from fulldepth.hf.fsdp import GatheredModule, uses_fsdp
from fulldepth.hf.heads import Classifier


class DetectionHeads:
    """Applies a detector's final norm, class head and box head to residual states of its decoder.

    The last layer is read as the model does. In a DETR with `auxiliary_loss`, whose final norm also stands between
    layers, earlier layers are read as its auxiliary losses do: with the norm once, where the last layer has it twice.

    Args:
        classifier: the model's class head.

    Raises:
        FulldepthError: if the model has no box head known here.
    """

    def __init__(self, classifier: Classifier) -> None:
        anatomy: Anatomy = classifier.anatomy
        if anatomy.family.box_head is None:
            raise FulldepthError(f"{type(anatomy.model).__name__} has no box head known here.")
        self.anatomy, self.classifier = anatomy, classifier
        self.box_head: Any = anatomy.model.get_submodule(anatomy.family.box_head)
        self._norm: Callable[[Tensor], Tensor] | None = None

    def after_forward(self) -> Self:
        """Heads for use between the model's forward and backward pass, see `Classifier.after_forward`."""
        if uses_fsdp(self.anatomy.model):
            self.classifier, self.box_head = self.classifier.after_forward(), GatheredModule(self.box_head)
            self._norm = None if self.anatomy.final_norm is None else GatheredModule(self.anatomy.final_norm)
        return self

    def read(self, state: Tensor, *, last: bool) -> tuple[Tensor, Tensor]:
        """[..., Q, C+1] logits and [..., Q, 4] boxes in [0, 1] of a layer's states `[..., Q, D]`.

        Args:
            state: output of a decoder layer, before the final norm.
            last: whether the layer is the last one.
        """
        normed = self._normed(state, last)
        logits: Tensor = self.classifier.modules[-1](normed)
        boxes: Tensor = self.box_head(normed).sigmoid()
        return logits, boxes

    def classes(self, state: Tensor, *, last: bool) -> Tensor:
        """The logits of `read` alone."""
        logits: Tensor = self.classifier.modules[-1](self._normed(state, last))
        return logits

    def boxes(self, state: Tensor, *, last: bool) -> Tensor:
        """The boxes of `read` alone."""
        boxes: Tensor = self.box_head(self._normed(state, last)).sigmoid()
        return boxes

    def _normed(self, state: Tensor, last: bool) -> Tensor:
        return (self.anatomy.normalise if last else self.anatomy.normalise_once)(state, self._norm)
