"""Files of a checkpoint in the words of transformers 4 as well, which most servers run.

transformers 5 writes rotary positions as `rope_parameters` alone. Earlier versions look for `rope_theta`,
`rope_scaling` and their kind, and where these are missing they take their defaults without a message: another model.
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
"""What tokenizers of transformers are read from."""
RENAMED = {"qwen3_moe": {"num_local_experts": "num_experts"}}
"""`model_type` -> entries of its configuration and their older names."""
TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Class of transformers 5 -> what it was called before, which transformers 5 knows too."""


def publish_older_names(folder: Path) -> None:
    """Add the older names to a checkpoint's `config.json`, where transformers 5 reads the same from both."""
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    for config in (values, *(part for part in values.values() if isinstance(part, dict))):
        config |= older_names(config)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Entries by the names before transformers 5: rotary positions, the type of the weights, the number of experts."""
    names: dict[str, Any] = {}
    if isinstance(config.get("dtype"), str):
        names["torch_dtype"] = config["dtype"]
    if config.get("model_type") == "gpt2" and "n_positions" in config:
        names["n_ctx"] = config["n_positions"]  # mlx-lm and llama.cpp's converter want it
    kind = str(config.get("model_type")).removeprefix("fulldepth_skipped_")
    names |= {older: config[name] for name, older in RENAMED.get(kind, {}).items() if name in config}
    return names | older_rope(kind, config)


def copy_tokenizer(source: str, folder: Path, revision: str | None = None) -> bool:
    """Copy the tokenizer's files of a checkpoint as they are; whether there were any.

    Args:
        source: the checkpoint: a folder, or a Hub name whose files are in the local cache.
        folder: where to.
        revision: branch, tag or commit, for a Hub name.
    """
    found = False
    for name in TOKENIZER_FILES:
        path = _tokenizer_file(source, name, revision)
        if path is not None:
            shutil.copyfile(path, folder / name)
            found = True
    return found


def publish_older_tokenizer(folder: Path) -> None:
    """Name the tokenizer's class, and its further special tokens, as every version knows them."""
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


def _tokenizer_file(source: str, name: str, revision: str | None) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    try:
        cached = try_to_load_from_cache(source, name, revision=revision)
    except ValueError:  # no name of a repository
        return None
    return Path(cached) if isinstance(cached, str) else None
