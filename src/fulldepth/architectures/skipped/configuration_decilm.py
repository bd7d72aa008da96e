"""The configuration of DeciLM (`nemotron-nas`), as vLLM, llama.cpp's converter and mlx-lm read it.

Checkpoints in that layout carry it for `trust_remote_code`. It supports blocks without attention or MLP, but no other
variation: all blocks have the same grouped-query attention.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers.models.llama.configuration_llama import LlamaConfig

from .configuration_skipped import older_rope

AUTO_MAP = {
    "AutoConfig": "configuration_decilm.DeciLMConfig",
    "AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM",
}
"""The published names of the files and classes."""


class BlockConfigs:
    """Fields besides those of a Llama, in a separate class because transformers 5 generates `DeciLMConfig.__init__`."""

    block_configs: list[Any] | None
    num_hidden_layers: int

    def __init__(self, block_configs: list[Any] | None = None, **kwargs: Any) -> None:
        """Initialise under transformers 4. In transformers 5 configurations are dataclasses with `__post_init__`."""
        self.block_configs = [_attributes(block) for block in block_configs or []]
        rope = older_rope("llama", kwargs)  # a model that transformers 5 saved has the newer entry alone
        super().__init__(**({"auto_map": dict(AUTO_MAP)} | rope | kwargs))
        self._check()

    def __post_init__(self, **kwargs: Any) -> None:
        self.block_configs = [_attributes(block) for block in self.block_configs or []]
        super().__post_init__(**({"auto_map": dict(AUTO_MAP)} | kwargs))  # type: ignore[misc]
        self._check()

    def _check(self) -> None:
        """Refuse a list whose length is not the number of blocks."""
        number = len(self.block_configs or ())
        if number != self.num_hidden_layers:
            raise ValueError(f"{number} block_configs for {self.num_hidden_layers} blocks; expected one for each block")

    @property
    def skipped_attention(self) -> list[int]:
        """Numbers of the blocks without attention, 1..L."""
        return [n for n, block in enumerate(self.block_configs or [], start=1) if block.attention.no_op]

    @property
    def skipped_mlp(self) -> list[int]:
        """Numbers of the blocks without an MLP, 1..L."""
        return [n for n, block in enumerate(self.block_configs or [], start=1) if block.ffn.no_op]

    @property
    def stream_scale(self) -> None:
        """None: the layout has no such entry."""
        return None

    @property
    def scalars(self) -> None:
        """None: the layout has no such entry."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the stock entries, with blocks as plain dictionaries."""
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        values["block_configs"] = [_plain(block) for block in self.block_configs or []]
        return values


class DeciLMConfig(BlockConfigs, LlamaConfig):
    """Configuration of a Llama with a description of every block.

    Args:
        block_configs: for each block `attention` (`no_op`, `n_heads_in_group`, ...) and `ffn` (`no_op`, `ffn_mult`,
            ...); read as attributes, `block_configs[0].attention.no_op`.

    Raises:
        ValueError: unless there is one entry per block.
    """

    model_type = "nemotron-nas"
    has_no_defaults_at_init = True  # tells transformers 4 that block_configs is required
    block_configs: list[Any] | None = None


def _attributes(value: Any) -> Any:
    """Convert dictionaries, also inside, to objects with attributes."""
    return SimpleNamespace(**{k: _attributes(v) for k, v in value.items()}) if isinstance(value, dict) else value


def _plain(value: Any) -> Any:
    """Convert the result of `_attributes` back."""
    return {k: _plain(v) for k, v in vars(value).items()} if isinstance(value, SimpleNamespace) else value


__all__ = ["DeciLMConfig"]
