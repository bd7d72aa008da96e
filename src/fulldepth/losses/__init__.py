"""Training penalties that make a model use its depth, the objective that combines them, and a Trainer with it."""

from fulldepth.losses.aligned_loss import add_exit_heads, aligned_loss
from fulldepth.losses.coherence_penalty import coherence_penalty
from fulldepth.losses.distillation import distillation_loss
from fulldepth.losses.jump_penalty import jump_penalty, jump_weights
from fulldepth.losses.next_token import has_next_token_loss, sees_later_tokens, use_next_token_loss
from fulldepth.losses.objective import METHODS, TERMS, Objective, per_batch_terms
from fulldepth.losses.orthogonality_penalty import orthogonality_penalty
from fulldepth.losses.similarity_penalty import similarity_penalty
from fulldepth.losses.task import Detection, Task, use_detection_loss
from fulldepth.losses.term import Context, LayerTerm, Portion, Term
from fulldepth.losses.trainer import DepthTrainer, ObjectiveMixin, Tally

__all__ = [
    "METHODS",
    "TERMS",
    "Context",
    "DepthTrainer",
    "Detection",
    "LayerTerm",
    "Objective",
    "ObjectiveMixin",
    "Portion",
    "Tally",
    "Task",
    "Term",
    "add_exit_heads",
    "aligned_loss",
    "coherence_penalty",
    "distillation_loss",
    "has_next_token_loss",
    "jump_penalty",
    "jump_weights",
    "orthogonality_penalty",
    "per_batch_terms",
    "sees_later_tokens",
    "similarity_penalty",
    "use_detection_loss",
    "use_next_token_loss",
]
