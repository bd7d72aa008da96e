"""Registers our model types with transformers' Auto classes without importing torch or transformers.

transformers has no entry point for models of other packages, and registering a class imports it together with torch,
which takes seconds. Registering only if transformers is already loaded would not work in scripts with sorted imports,
where `import fulldepth` comes first. Therefore one import hook waits for the Auto classes and then removes itself.
Subpackages that load models import `fulldepth.architectures` and do not need the hook.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

STOCK = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "olmo", "phi3", "smollm3", "deepseek_v3", "qwen3_moe"),
    *("starcoder2", "gpt_oss", "mixtral", "gemma2", "gemma3_text", "olmo2", "cohere", "phi", "falcon", "gpt2"),
    *("gpt_neox", "opt"),
)
"""`model_type` of stock decoders that have a class without skipped parts; listed because `LAYOUTS` needs torch."""
MODEL_TYPES = dict.fromkeys(
    ("depth_llama", *(f"fulldepth_skipped_{name}" for name in STOCK)), "fulldepth.architectures"
)
"""`model_type` in a checkpoint's config.json -> the module that registers its class."""
AUTO_CONFIG = "transformers.models.auto.configuration_auto"


def announce() -> None:
    """Register our model types with transformers' Auto classes, now or when those are imported."""
    if AUTO_CONFIG in sys.modules:
        _add_to(sys.modules[AUTO_CONFIG])
    elif not any(isinstance(finder, _Announcer) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Announcer())


class _Announced(dict[str, Any]):
    """The entries registered with `AutoConfig`, and our model types, whose module is imported on first access."""

    def __contains__(self, key: object) -> bool:
        return key in MODEL_TYPES or super().__contains__(key)

    def __missing__(self, key: str) -> Any:
        if key not in MODEL_TYPES:
            raise KeyError(key)
        importlib.import_module(MODEL_TYPES[key])  # registers its classes, including this entry
        return self[key]


class _Announcer(MetaPathFinder):
    """Finds one module with the default finder, and adds our model types after it is executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of `AUTO_CONFIG`; nothing for any other module."""
        spec = PathFinder.find_spec(name, path) if name == AUTO_CONFIG else None
        if spec is not None and spec.loader is not None:
            sys.meta_path.remove(self)
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _add_to(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _add_to(module: Any) -> None:
    """Without `AutoConfig`'s internal dictionary only `import fulldepth.architectures` registers the classes."""
    registered = getattr(module.CONFIG_MAPPING, "_extra_content", None)
    if type(registered) is dict:
        module.CONFIG_MAPPING._extra_content = _Announced(registered)
