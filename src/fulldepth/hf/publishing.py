"""Model cards of checkpoints that fulldepth writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import validate_repo_id

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.hf.gguf import find_gguf, read_header

CARD = "README.md"
PIPELINES = {
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "text-classification": "text-classification",
    "image-classification": "image-classification",
    "detection": "object-detection",
}
"""Task -> the Hub's name for it; others are `feature-extraction`."""


@dataclass(frozen=True)
class ModelCard:
    """A model card: metadata for the Hub, then a text in Markdown."""

    title: str
    method: str
    """What was done to the model, as one paragraph."""
    numbers: Mapping[str, str]
    """Name -> value with its unit; a table."""
    loading: str
    """Python code that loads the model."""
    source: str | None = None
    """Folder or Hub name of the model that this one was made from; the card states its licence."""
    tags: Iterable[str] = ()
    notes: Iterable[str] = field(default=())
    """Closing remarks, one paragraph or list each."""
    pipeline: str = "text-generation"
    """The Hub's name of the model's task."""

    def write(self, folder: Path) -> None:
        """Write the card as `README.md` of a folder."""
        (folder / CARD).write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """Return the file's text: YAML metadata between two lines of dashes, then Markdown."""
        metadata = ModelCardData(
            library_name="transformers",
            pipeline_tag=self.pipeline,
            tags=["fulldepth", *self.tags],
            **_inherited(self.source),
        )
        rows = [f"| {name} | {value} |" for name, value in self.numbers.items()]
        parts = [f"---\n{metadata.to_yaml()}\n---", f"# {self.title}", self.method]
        if rows:
            parts.append("\n".join(["| | |", "|---|---|", *rows]))
        parts += ["## How to load", f"```python\n{self.loading}\n```", *self.notes]
        return "\n\n".join(parts) + "\n"


def loading_code(model: str, processing: str | None = None, *, registered: bool = False, carried: bool = False) -> str:
    """Return Python code that loads a checkpoint of the folder PATH by transformers.

    Args:
        model: name of the class that loads it: its own if transformers has it, else an auto class.
        processing: auto class of the tokenizer or image processor; None = not loaded.
        registered: whether the model's class is one that fulldepth registers.
        carried: whether the code that the folder carries is run instead.
    """
    names = {"model": model} | ({} if processing is None else {"processing": processing})
    code = ", trust_remote_code=True" if carried else ""
    parts = [f"from transformers import {', '.join(names.values())}"]
    parts += ["import fulldepth.architectures  # registers this class"] * registered
    loads = [f'{name} = {kind}.from_pretrained("PATH"{code})' for name, kind in names.items()]
    return "\n\n".join([*parts, "\n".join(loads)])


def _inherited(source: str | None) -> dict[str, Any]:
    """Return metadata that follow from the original: its Hub name, and the licence and languages that it states."""
    if source is None:
        return {}
    try:
        gguf = find_gguf(source)
        card = Path(source) / CARD
        if gguf is not None:
            stated = read_header(gguf).metadata
            license_name = stated.get("general.license")
            languages = stated.get("general.languages")
        elif card.is_file():
            stated = metadata_load(card) or {}
            license_name = stated.get("license")
            languages = stated.get("language")
        else:
            validate_repo_id(source)  # a ValueError for other names
            return {"base_model": source} if source.count("/") == 1 and not Path(source).exists() else {}
    except (FulldepthError, ValueError, OSError, yaml.YAMLError):  # removed since it was loaded, or damaged
        return {}
    entries: dict[str, Any] = {}
    if isinstance(license_name, str) and license_name:
        entries["license"] = one_line(license_name, 60)
    listed = languages if isinstance(languages, list | tuple) else [languages]
    names = [name.decode(errors="replace") if isinstance(name, bytes) else name for name in listed]
    if names and all(isinstance(name, str) and name for name in names):
        entries["language"] = [one_line(name, 20) for name in names]
    return entries
