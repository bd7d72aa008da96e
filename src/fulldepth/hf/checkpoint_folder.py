"""The folder of an export: written under a temporary name, and without references to foreign code."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fulldepth.errors import FulldepthError
from fulldepth.files import atomic_folder, remove_leftovers


def check_target(target: Path) -> None:
    """Refuse an existing file or folder.

    Raises:
        FulldepthError: if `target` exists.
    """
    if target.exists() or target.is_symlink():
        raise FulldepthError(f"{target} exists already; an export is never written over anything. Choose another name.")


@contextmanager
def folder_to_be(target: Path) -> Iterator[Path]:
    """A folder beside `target` that is renamed to it at the end, and removed on an error.

    Raises:
        FulldepthError: if it cannot be written (disk full, no permission).
    """
    new = [parent for parent in target.absolute().parents if not parent.exists()]
    try:
        remove_leftovers(target.absolute().parent)
        with atomic_folder(target) as part:
            yield part
            check_target(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FulldepthError(f"Cannot write the export to {target}: {reason}.") from error
    finally:
        with suppress(OSError):  # ends at the first folder that is not empty
            for parent in new:
                parent.rmdir()


def strip_foreign_code(folder: Path, *, carries_code: bool) -> None:
    """Remove `auto_map` from every configuration: it names code of the original model, which the export lacks.

    Args:
        folder: the export.
        carries_code: whether `config.json` names this package's own code, which stays.
    """
    for path in folder.glob("*.json"):
        if path.name == "config.json" and carries_code:
            continue
        text = path.read_text(encoding="utf-8")
        if "auto_map" not in text or path.name == "tokenizer.json":
            continue
        path.write_text(json.dumps(_without_code(json.loads(text)), indent=2, ensure_ascii=False) + "\n", "utf-8")


def _without_code(value: Any) -> Any:
    """Plain values without any key `auto_map`."""
    if isinstance(value, dict):
        return {key: _without_code(inner) for key, inner in value.items() if key != "auto_map"}
    return [_without_code(inner) for inner in value] if isinstance(value, list) else value


def count_parameters(folder: Path) -> int:
    """Number of elements in the weights on disk."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count
