"""Removes the blocks that do not pay, heals with scalars, and ships a checkpoint that is proven."""

from fulldepth.skip.examples import Example, Examples, batches, read_examples
from fulldepth.skip.identity import model_hash
from fulldepth.skip.plan import CRITERIA, SEARCHES, Plan
from fulldepth.skip.responses import generate_responses, read_prompts

__all__ = [
    "CRITERIA",
    "SEARCHES",
    "Example",
    "Examples",
    "Plan",
    "batches",
    "generate_responses",
    "model_hash",
    "read_examples",
    "read_prompts",
]
