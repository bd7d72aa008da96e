"""`DetectionHeads`: a detector's class head and box head applied to the states of any decoder layer."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from fulldepth.errors import FulldepthError
from fulldepth.hf.anatomy import Anatomy
from fulldepth.hf.exit_heads import BOXES, layer_heads
from fulldepth.hf.fsdp import GatheredModule, uses_fsdp
from fulldepth.hf.heads import Classifier


class DetectionHeads:
    """Applies a detector's final norm, class head and box head to residual states of its decoder.

    The last layer is read as the model does. In a DETR with `auxiliary_loss`, whose final norm also stands between
    layers, earlier layers are read as its auxiliary losses do: with the norm once, where the last layer has it twice.
    In a multi-exit model each of layers 1..L-1 is read by its own heads.

    Args:
        classifier: the model's class head; a `shared` one reads every layer by the last layer's heads.

    Raises:
        FulldepthError: if the model has no box head known here.
    """

    def __init__(self, classifier: Classifier) -> None:
        anatomy: Anatomy = classifier.anatomy
        if anatomy.family.box_head is None:
            raise FulldepthError(f"{type(anatomy.model).__name__} has no box head known here.")
        self.anatomy, self.classifier = anatomy, classifier
        self.box_head: Any = anatomy.model.get_submodule(anatomy.family.box_head)
        self.exits: dict[int, Any] = layer_heads(anatomy, BOXES) if classifier.exits else {}
        """1-based layer -> its own box head, in a multi-exit model."""

    def after_forward(self) -> Self:
        """Heads for use between the model's forward and backward pass, see `Classifier.after_forward`."""
        if uses_fsdp(self.anatomy.model):
            self.classifier, self.box_head = self.classifier.after_forward(), GatheredModule(self.box_head)
            self.exits = {layer: GatheredModule(module) for layer, module in self.exits.items()}
        return self

    def read(self, state: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """[..., Q, C+1] logits and [..., Q, 4] boxes in [0, 1] of a layer's states `[..., Q, D]`.

        Args:
            state: output of a decoder layer, before the final norm.
            layer: 1..L.
        """
        return self.classes(state, layer), self.boxes(state, layer)

    def classes(self, state: Tensor, layer: int) -> Tensor:
        """The logits of `read` alone."""
        logits: Tensor = self.classifier.at(layer).modules[-1](self._normed(state, layer))
        return logits

    def boxes(self, state: Tensor, layer: int) -> Tensor:
        """The boxes of `read` alone."""
        boxes: Tensor = self.exits.get(layer, self.box_head)(self._normed(state, layer)).sigmoid()
        return boxes

    def _normed(self, state: Tensor, layer: int) -> Tensor:
        last = layer == self.anatomy.num_layers
        return (self.anatomy.normalise if last else self.anatomy.normalise_once)(state, self.classifier.norm)
