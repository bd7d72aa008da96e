"""Adds the names of transformers 4, which many servers still run, to a checkpoint's files.

transformers 5 writes rotary positions as `rope_parameters` alone. Earlier versions read `rope_theta`,
`rope_scaling` and similar entries; where these are missing they use defaults without a message, and compute another
model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from fulldepth.architectures.skipped import older_rope
from fulldepth.files import read_json

TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files that transformers reads tokenizers from."""
RENAMED = {"qwen3_moe": {"num_local_experts": "num_experts"}}
"""`model_type` -> entries of its configuration and their older names."""
TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Class of transformers 5 -> its earlier name, which transformers 5 also accepts."""


def publish_older_names(folder: Path) -> None:
    """Add the older names to a checkpoint's `config.json`, where transformers 5 reads the same from both."""
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    for config in (values, *(part for part in values.values() if isinstance(part, dict))):
        config |= older_names(config)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Entries with their names before transformers 5: rotary positions, type of the weights, number of experts."""
    names: dict[str, Any] = {}
    if isinstance(config.get("dtype"), str):
        names["torch_dtype"] = config["dtype"]
    if config.get("model_type") == "gpt2" and "n_positions" in config:
        names["n_ctx"] = config["n_positions"]  # read by mlx-lm and llama.cpp's converter
    kind = str(config.get("model_type")).removeprefix("fulldepth_skipped_")
    names |= {older: config[name] for name, older in RENAMED.get(kind, {}).items() if name in config}
    return names | older_rope(kind, config)


def copy_tokenizer(source: str, folder: Path, revision: str | None = None) -> bool:
    """Copy a checkpoint's tokenizer files unchanged; returns whether it has any.

    Args:
        source: the checkpoint: a folder, or a Hub name whose files are in the local cache.
        folder: destination.
        revision: branch, tag or commit, for a Hub name.
    """
    paths = {name: path for name in TOKENIZER_FILES if (path := stored_file(source, name, revision)) is not None}
    for name, path in paths.items():
        shutil.copyfile(path, folder / name)
    return bool(paths)


def publish_older_tokenizer(folder: Path) -> None:
    """Name the tokenizer's class and its additional special tokens as all versions of transformers do."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    values = read_json(path)
    if not isinstance(values, dict):
        return
    changed = dict(values)
    if (kind := changed.get("tokenizer_class")) in TOKENIZER_CLASSES:
        changed["tokenizer_class"] = TOKENIZER_CLASSES[kind]
    if isinstance(further := changed.get("extra_special_tokens"), list):
        changed["additional_special_tokens"] = further
        del changed["extra_special_tokens"]
    if changed != values:
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def stored_file(source: str, name: str, revision: str | None) -> Path | None:
    """The path of a checkpoint's file: in its folder, or in the Hub's local cache; None if there is none."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    try:
        cached = try_to_load_from_cache(source, name, revision=revision)
    except ValueError:  # not the name of a repository
        return None
    return Path(cached) if isinstance(cached, str) else None
