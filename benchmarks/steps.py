"""What the benchmarks of training run: models of one size, and steps on random tokens.

A step is forward, loss and backward. The optimiser's share is left out: it falls with the tokens of a batch, and would
make every ratio look better on batches as small as these.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fulldepth.architectures import DepthLlamaConfig, DepthLlamaForCausalLM
from fulldepth.losses import Objective


@dataclass(frozen=True)
class Size:
    """A model and a batch."""

    layers: int
    width: int
    batch: int
    length: int
    vocabulary: int = 8192

    @property
    def name(self) -> str:
        """As the goals call it."""
        return f"{self.layers} x {self.width}"

    def llama(self) -> LlamaConfig:
        """Llama with heads of 64 channels and an MLP of 8/3 of the width."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=8 * self.width // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.width // 64),
            max_position_embeddings=self.length,
            use_cache=False,
        )

    def tokens(self, device: str) -> dict[str, Tensor]:
        """A batch of random tokens, which are their own labels."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocabulary, (self.batch, self.length), generator=generator)
        return {"input_ids": ids.to(device), "labels": ids.to(device)}


def stock(size: Size, device: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A Llama of transformers."""
    torch.manual_seed(0)
    return LlamaForCausalLM(size.llama()).to(device, dtype).train()


def depth(size: Size, device: str, **switches: Any) -> DepthLlamaForCausalLM:
    """A `depth_llama` of the same size."""
    torch.manual_seed(0)
    return DepthLlamaForCausalLM(DepthLlamaConfig.from_llama(size.llama(), **switches)).to(device).train()


@dataclass
class Step:
    """One training step of a model, without the optimiser; a context that attaches the objective and gives itself."""

    model: nn.Module
    batch: dict[str, Tensor]
    objective: Objective | None = None
    autocast: bool = False

    def __enter__(self) -> Self:
        if self.objective is not None:
            self.objective.attach(self.model)
        return self

    def __exit__(self, *_: object) -> None:
        if self.objective is not None:
            self.objective.detach()
        self.model.zero_grad(set_to_none=True)

    def loss(self) -> Tensor:
        """The loss of a forward pass."""
        device = self.batch["input_ids"].device.type
        with torch.autocast(device, torch.bfloat16) if self.autocast else nullcontext():
            outputs = self.model(**self.batch)
            return outputs.loss if self.objective is None else self.objective(outputs, self.batch)[0]

    def __call__(self) -> None:
        """Forward and backward."""
        self.loss().backward()
