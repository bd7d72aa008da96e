"""The last layer's classifier, ready to read any layer: `Acc^(l)` and the logit lens stand on it."""

from __future__ import annotations

import torch
from torch import Tensor

from fulldepth.errors import FulldepthError
from fulldepth.hf.anatomy import Anatomy


class Classifier:
    """Applies a model's final norm and head to residual states of any layer.

    Args:
        anatomy: the model, which must have a head.

    Raises:
        FulldepthError: if the model has no head.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        if anatomy.head is None:
            raise FulldepthError(f"{type(anatomy.model).__name__} has no prediction head.")
        self.anatomy, self.head = anatomy, anatomy.head
        try:
            self.modules = [anatomy.model.get_submodule(path) for path in self.head.modules]
        except AttributeError as error:
            raise FulldepthError(f"{type(anatomy.model).__name__} has no head where expected: {error}.") from error
        config = anatomy.model.config
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        multiplier, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        self.scale = float(multiplier) if multiplier is not None else 1 / float(divisor) if divisor else 1.0

    @property
    def per_token(self) -> bool:
        """Whether the head predicts at every position (else once a sequence)."""
        return self.head.pool == "token"

    @property
    def dtype(self) -> torch.dtype:
        """Precision that the model's own logits have."""
        return next((p.dtype for p in self.modules[-1].parameters() if p.is_floating_point()), torch.float32)

    def tokens(self, states: Tensor) -> Tensor:
        """[N, V] logits of `states: [N, D]` (token heads only)."""
        return self._read(states)

    def sequences(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, C] logits of `states: [B, T, D]` with `attention_mask: [B, T]` (sequence heads only)."""
        if self.head.pool == "first":
            states = states[:, 0]
        elif self.head.pool == "last":
            position = torch.arange(attention_mask.shape[1], device=states.device)
            last = (position * attention_mask.to(states.device)).argmax(-1)
            states = states[torch.arange(len(states), device=states.device), last]
        elif self.head.pool == "mean-patches":
            states = states[:, 1:].mean(1)
        return self._read(states)

    def _read(self, states: Tensor) -> Tensor:
        """Final norm, head modules, scale and soft-cap."""
        if self.head.normed:
            states = self.anatomy.normalise(states)
        for module in self.modules:
            states = module(states)
        if self.scale != 1.0:
            states = states * self.scale
        if self.softcap is not None:
            states = torch.tanh(states / self.softcap) * self.softcap
        return states
