"""Whether a model class predicts the next token only if its configuration says `is_decoder`."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable
from functools import cache

from transformers import PreTrainedConfig, PreTrainedModel

FLAG = "is_decoder"


def reads_later_tokens(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> bool:
    """Whether the model would read the tokens that it is to predict.

    Encoders with a causal head (BERT's relatives) mask later tokens only if `is_decoder` is true. Other classes never
    read the option (GPT-NeoX), or set it themselves (decoders of BART's relatives).

    Args:
        config: of the model.
        model_class: its class.
    """
    return getattr(config, FLAG, True) is False and _obeys_flag(model_class.__module__, model_class.__name__)


@cache
def _obeys_flag(module: str, name: str) -> bool:
    """Whether the code of a class reads `config.is_decoder`, and the class does not set it."""
    try:
        code = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, SyntaxError):
        return True
    own = [node for node in code.body if isinstance(node, ast.ClassDef) and node.name == name]
    return _uses(ast.walk(code), ast.Load) and not any(_uses(ast.walk(node), ast.Store) for node in own)


def _uses(nodes: Iterable[ast.AST], context: type[ast.expr_context]) -> bool:
    """Whether `config.is_decoder` is read or set."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == FLAG
        and isinstance(node.ctx, context)
        and "config" in ast.unparse(node.value)
        for node in nodes
    )
