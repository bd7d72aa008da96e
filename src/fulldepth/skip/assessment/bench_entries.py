"""The models of a benchmark: loaded, named apart, with what exports say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fulldepth.execution import find_anatomy
from fulldepth.hf import open_model, pick_dtype
from fulldepth.settings.bench import BenchSettings
from fulldepth.skip.assessment.bench_table import SkippedBlocks
from fulldepth.skip.exports.export import NOTES, load, read_notes
from fulldepth.skip.exports.formats import FORMATS


@dataclass
class Entry:
    """A model that takes part."""

    label: str
    model: PreTrainedModel
    name: str
    notes: dict[str, Any] = field(default_factory=dict)
    """What an export says of itself: `format`, `plan`."""
    hash: str | None = None

    @property
    def skipped_blocks(self) -> SkippedBlocks | None:
        """What it does not compute of the original; None if that is not known."""
        if self.notes:
            plan = self.notes["plan"]
            computed = FORMATS[self.notes["format"]].computes_skipped
            return SkippedBlocks(plan["granularity"], frozenset(() if computed else plan["blocks"]))
        attention, mlp = (
            frozenset(getattr(self.model.config, f"skipped_{part}", None) or ()) for part in ("attention", "mlp")
        )
        if attention and not mlp:
            return SkippedBlocks("attention", attention)
        return SkippedBlocks("mlp", mlp) if mlp and not attention else None

    def describe(self, baseline: bool) -> dict[str, Any]:
        """Its entry in the document."""
        model, plan = self.model, self.notes.get("plan") or {}
        skipped_blocks = self.skipped_blocks
        return {
            "label": self.label,
            "baseline": baseline,
            "model": {
                "name": self.name,
                "class": type(model).__name__,
                "num_layers": find_anatomy(model).num_layers if baseline else _depth(model),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "dtype": str(model.dtype).removeprefix("torch."),
                "hash": self.hash,
            },
            "format": self.notes.get("format"),
            "granularity": None if skipped_blocks is None or baseline else skipped_blocks.granularity,
            "blocks": plan.get("blocks"),
            "not_computed": None if skipped_blocks is None or baseline else sorted(skipped_blocks.layers),
            "data": {"hash": (plan.get("data") or {}).get("hash")},
            "losses": plan.get("losses"),
            "healed_loss": plan.get("healed_loss"),
        }


def _depth(model: PreTrainedModel) -> int | None:
    found = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    return found if isinstance(found, int) else None


def open_entries(models: Sequence[str | Path | PreTrainedModel], settings: BenchSettings) -> list[Entry]:
    """Every model in memory, under a label of its own."""
    paths = [
        Path(model.name_or_path or type(model).__name__ if isinstance(model, PreTrainedModel) else model)
        for model in models
    ]
    return [Entry(label, *_opened(model, settings)) for label, model in zip(_labels(paths), models, strict=True)]


def _opened(
    model: str | Path | PreTrainedModel, settings: BenchSettings
) -> tuple[PreTrainedModel, str, dict[str, Any]]:
    """A model, its name, and what it says of itself as an export."""
    if isinstance(model, str | Path) and (Path(model) / NOTES).is_file():
        loaded = load(model, device=settings.device)
        dtype = pick_dtype(settings.dtype)
        if isinstance(dtype, torch.dtype):
            loaded.to(dtype)  # type: ignore[arg-type]
        return loaded, str(model), read_notes(Path(model))
    found = open_model(
        model,
        dtype=settings.dtype,
        device=settings.device,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )
    return found.model, found.name, {}


def _labels(paths: Sequence[Path]) -> list[str]:
    """As little of the end of each path as tells them apart; numbers where nothing does."""
    parts = [path.parts or (".",) for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label} ({labels[: index + 1].count(label)})" for index, label in enumerate(labels)]
