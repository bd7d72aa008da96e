"""The models of a benchmark: loaded, with distinct labels and the notes of exports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from fulldepth.execution import find_anatomy
from fulldepth.hf import open_model
from fulldepth.settings.bench import BenchSettings
from fulldepth.skip.exports.export import NOTES, load, read_notes
from fulldepth.skip.exports.formats import FORMATS


class SkippedBlocks(NamedTuple):
    """Blocks of the original that a model does not compute."""

    granularity: str
    layers: frozenset[int]


@dataclass
class Entry:
    """A model of the benchmark."""

    label: str
    model: PreTrainedModel
    name: str
    notes: dict[str, Any] = field(default_factory=dict)
    """Notes of an export: `format`, `plan`, ...; empty for other models."""
    hash: str | None = None

    @property
    def plan(self) -> dict[str, Any]:
        """The plan that it was exported with; empty if there is none."""
        return self.notes.get("plan") or {}

    @property
    def skipped_blocks(self) -> SkippedBlocks | None:
        """Blocks of the original that it does not compute; None if not known."""
        if self.notes:
            blocks = frozenset(self.plan["blocks"])
            return SkippedBlocks(self.plan["granularity"], blocks - FORMATS[self.notes["format"]].computed(blocks))
        skipped = {part: getattr(self.model.config, f"skipped_{part}", None) for part in ("attention", "mlp")}
        parts = [SkippedBlocks(part, frozenset(layers)) for part, layers in skipped.items() if layers]
        return parts[0] if len(parts) == 1 else None

    def describe(self, baseline: bool) -> dict[str, Any]:
        """Its entry in the document."""
        model, plan = self.model, self.plan
        depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
        skipped = None if baseline else self.skipped_blocks
        return {
            "label": self.label,
            "baseline": baseline,
            "model": {
                "name": self.name,
                "class": type(model).__name__,
                "num_layers": find_anatomy(model).num_layers if baseline else depth if isinstance(depth, int) else None,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "dtype": str(model.dtype).removeprefix("torch."),
                "hash": self.hash,
            },
            "format": self.notes.get("format"),
            "granularity": None if skipped is None else skipped.granularity,
            "blocks": plan.get("blocks"),
            "not_computed": None if skipped is None else sorted(skipped.layers),
            "data": {"hash": (plan.get("data") or {}).get("hash")},
            "losses": plan.get("losses"),
            "healed_loss": plan.get("healed_loss"),
        }


def open_entries(models: Sequence[str | Path | PreTrainedModel], settings: BenchSettings) -> list[Entry]:
    """Load every model, and give each a distinct label."""
    opened = [_opened(model, settings) for model in models]
    return [Entry(label, *each) for label, each in zip(_labels([name for _, name, _ in opened]), opened, strict=True)]


def _opened(
    model: str | Path | PreTrainedModel, settings: BenchSettings
) -> tuple[PreTrainedModel, str, dict[str, Any]]:
    """A model, its name, and its notes if it is an export."""
    if isinstance(model, str | Path) and (Path(model) / NOTES).is_file():
        exported = load(model, dtype=settings.dtype, device=settings.device)
        return exported, str(model), read_notes(Path(model))
    options = settings.model_dump(include={"dtype", "device", "revision", "trust_remote_code"})
    checkpoint = open_model(model, **options)
    return checkpoint.model, checkpoint.name, {}


def _labels(names: Sequence[str | Path]) -> list[str]:
    """The shortest endings of paths that differ; numbered if the paths are equal."""
    parts = [Path(name).parts or (".",) for name in names]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label} ({labels[: index + 1].count(label)})" for index, label in enumerate(labels)]
