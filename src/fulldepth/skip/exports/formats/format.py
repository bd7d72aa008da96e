"""`Format`: the interface of an export format: supported plans, writing, loading and checking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedModel

from fulldepth.execution.stream import TOLERANCE
from fulldepth.hf import Anatomy, load_checkpoint
from fulldepth.skip.exports.fold import Folding, prepare
from fulldepth.skip.exports.formats.checkpoint import Draft
from fulldepth.skip.plan import Plan


class Format(ABC):
    """An export format, registered in `formats.FORMATS` and, with a phrase for help, in `fulldepth.settings.search`."""

    name: ClassVar[str]
    granularities: ClassVar[tuple[str, ...]]
    """Granularities of the plans that it can hold."""
    reader: ClassVar[Literal["stock", "carried"]] = "stock"
    """The program that loads every export before its folder is renamed: transformers alone (`stock`), or with the code
    in the folder (`carried`), for classes that transformers does not have."""
    text_only: ClassVar[bool] = False
    """Whether it holds only the language model of a model that also reads images."""

    def check(self, model: PreTrainedModel, skipped: int) -> None:  # noqa: B027 (most models fit most formats)
        """Refuse a stock model that the format cannot hold; refuses none unless overridden.

        Args:
            model: of a class of transformers.
            skipped: number of blocks that the plan skips.

        Raises:
            FulldepthError: with the reason.
        """

    def keeps_scalars(self, model: PreTrainedModel) -> bool:
        """Whether the scalars of a stock model stay outside its weights, so that nothing is folded."""
        return False

    def folding(self, anatomy: Anatomy, plan: Plan) -> Folding:
        """The folding of a plan's scalars into the weights.

        Raises:
            FulldepthError: if they cannot be folded.
        """
        return prepare(anatomy, plan)

    def computed(self, blocks: Collection[int]) -> frozenset[int]:
        """The skipped blocks of a plan that an export still computes, with output weights of zero."""
        return frozenset()

    @abstractmethod
    def write(self, draft: Draft) -> list[str]:
        """Write the checkpoint without tokenizer and notes; returns the notes."""

    def tolerance(self, folding: Folding, dtype: torch.dtype) -> float:
        """Largest error of a logit of the export, relative to the largest logit."""
        return TOLERANCE[dtype] + folding.logit_error

    def verify(self, error_of: Callable[[str], float]) -> tuple[bool, list[str]]:
        """Whether the program that the format targets has loaded the export, and notes on it.

        Args:
            error_of: loads the export with a reader of `readers.READERS` and returns the error of its logits.
        """
        return True, []

    def is_saved_again(self, config: Mapping[str, Any]) -> bool:
        """Whether a `config.json` belongs to an export of this format that was saved again, without the notes."""
        return False

    def load(self, folder: Path, **options: Any) -> PreTrainedModel:
        """The model of an export, in evaluation mode, without running code from the folder.

        Args:
            folder: of the export.
            **options: `dtype`, `device` and `device_map` of `load_checkpoint`.

        Raises:
            FulldepthError: if the folder is broken.
        """
        return load_checkpoint(folder, **options).model


__all__ = ["Format"]
