"""Early exit and self-speculative decoding."""

from fulldepth.execution.decoding import Decoder, DraftPlan, Generation, generate
from fulldepth.exit.generation import Written, generate_texts

__all__ = ["Decoder", "DraftPlan", "Generation", "Written", "generate", "generate_texts"]
