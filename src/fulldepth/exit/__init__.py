"""Early exit and self-speculative decoding."""

from fulldepth.execution.decoding import Decoder, Generation, generate

__all__ = ["Decoder", "Generation", "generate"]
