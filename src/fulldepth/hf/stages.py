"""`StagedAnatomy`: any module with the list of its stages, in the place of a Transformer with its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fulldepth.errors import FulldepthError
from fulldepth.hf.anatomy import Anatomy
from fulldepth.hf.families import Family
from fulldepth.hf.heads import Classifier

STAGES = Family("stages", blocks="", attention=None, mlp=None)


class StagedModel(nn.Module):
    """A module that reads one tensor, with the attributes of a transformers model that measurements use."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = SimpleNamespace(model_type="stages")

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the first floating-point weight; float32 without weights."""
        kinds = (parameter.dtype for parameter in self.module.parameters() if parameter.is_floating_point())
        return next(kinds, torch.float32)

    def forward(self, inputs: Tensor) -> Any:
        """The module's own output."""
        return self.module(inputs)


@dataclass(frozen=True)
class StagedAnatomy(Anatomy):
    """A plain module bound to its stages. Layer l is stage l, layer 0 is what stage 1 reads.

    States of one sample that are no sequence of vectors are flattened to one vector. Vectors that are shorter than the
    longest are padded with zeros, which changes neither norms nor inner products.
    """

    stages: tuple[nn.Module, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shape of one sample's state at layers 0..L; set once the module has run."""

    @property
    def task(self) -> str:
        """`classification`."""
        return "classification"

    @property
    def body(self) -> nn.Module:
        """The whole module, which also runs the head."""
        return self.model

    @property
    def config(self) -> Any:
        """A stand-in without entries."""
        return self.model.config

    @property
    def block_list(self) -> nn.ModuleList:
        """The stages."""
        return nn.ModuleList(self.stages)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The stages, one for each layer."""
        return self.stages

    @property
    def is_sequence(self) -> bool:
        """Whether the states of every layer are vectors at the same positions, `[T, D]` for a sample."""
        return len({(len(shape), shape[0]) for shape in self.shapes}) == 1 and len(self.shapes[0]) == 2

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of a state's vector at layers 0..L, without padding."""
        return tuple(shape[-1] if self.is_sequence else int(torch.Size(shape).numel()) for shape in self.shapes)

    @property
    def width(self) -> int:
        """D: channels of the widest layer."""
        return max(self.widths)

    @property
    def vocab_size(self) -> int | None:
        """None: the module reads no tokens."""
        return None

    def stream(self, states: Tensor) -> Tensor:
        """[B, T, D] states, flattened and padded; without `shapes`, in training, as they are.

        Raises:
            FulldepthError: in training, if a stage's states are no vectors at positions.
        """
        if not self.shapes:
            if states.ndim != 3:
                raise FulldepthError(
                    f"A stage reads or gives {list(states.shape)}; penalties need states [B, T, D]: channels last, "
                    "one position (T = 1) where there are none."
                )
            return states
        vectors = states if self.is_sequence else states.flatten(1)[:, None]
        return pad(vectors, (0, self.width - vectors.shape[-1]))


class StageHead(Classifier):
    """A module's own head on the states of any stage whose shape is that of the last one.

    Args:
        head: gives the class scores `[B, C]` from the last stage's output, in that output's own shape; in training
            also scores `[B, T, C]`.
        anatomy: with the shapes of the states.
    """

    def __init__(self, head: nn.Module, anatomy: StagedAnatomy) -> None:
        self.module, self.anatomy, self.stages, self.modules, self.exits = head, anatomy, anatomy, [head], {}

    @property
    def per_token(self) -> bool:
        """False: one prediction for each sample."""
        return False

    @property
    def device(self) -> torch.device | None:
        """Device of the head's weights; None without any."""
        return next((parameter.device for parameter in self.module.parameters()), None)

    def sample_mask(self, inputs: Mapping[str, Any], attention_mask: Tensor) -> Tensor:
        """The mask as it is: a module has no padding id."""
        return attention_mask

    def sequences(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, C] scores of `states: [B, T, D]`, padded as by `StagedAnatomy.stream`."""
        own = states[..., : self.stages.widths[-1]].reshape(len(states), *self.stages.shapes[-1])
        scores: Tensor = self.module(own)
        return scores


def resolve_stages(module: nn.Module, stages: Sequence[nn.Module | str]) -> tuple[nn.Module, ...]:
    """The stages as modules; names are paths inside the module.

    Raises:
        FulldepthError: if there are fewer than two, or one is not a part of the module.
    """
    if isinstance(stages, str) or len(stages) < 2:
        raise FulldepthError("stages lists the modules whose outputs are layers 1..L, in order; at least two.")
    parts = dict(module.named_modules())
    own = set(map(id, parts.values()))
    found = [parts.get(stage) if isinstance(stage, str) else stage for stage in stages]
    for number, (stage, part) in enumerate(zip(stages, found, strict=True), start=1):
        if not isinstance(part, nn.Module) or id(part) not in own:
            shown = repr(stage) if isinstance(stage, str) else type(stage).__name__
            raise FulldepthError(f"Stage {number} ({shown[:60]}) is not a part of the {type(module).__name__}.")
    return tuple(part for part in found if part is not None)
