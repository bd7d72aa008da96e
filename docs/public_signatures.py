"""Signatures and docstrings as a caller sees them: a Griffe extension.

Griffe reads the source, where the function of a command has the parameters `settings` and `watcher`.
`takes_settings` and `with_progress` give its callers keywords in their place.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import griffe

from fulldepth.settings import Settings

DECORATORS = {"takes_settings", "with_progress"}


class PublicSignatures(griffe.Extension):
    """Griffe: parameters and docstring of decorated functions as the decorators make them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if not isinstance(obj, griffe.Function):
            return
        if DECORATORS.isdisjoint(decorator.callable_path.rpartition(".")[2] for decorator in obj.decorators):
            return
        function = getattr(import_module(obj.module.path), obj.name)
        parameters = inspect.signature(function).parameters.values()
        obj.parameters = griffe.Parameters(*(_parameter(obj, parameter) for parameter in parameters))
        obj.docstring.value = inspect.getdoc(function)


def _parameter(function: griffe.Function, parameter: inspect.Parameter) -> griffe.Parameter:
    """A parameter of the source with its links to types, or a keyword that a decorator adds."""
    if parameter.name in function.parameters:
        return function.parameters[parameter.name]
    default = parameter.default
    shown = f"{type(default).__name__}()" if isinstance(default, Settings) else repr(default)
    annotation = inspect.formatannotation(parameter.annotation)
    kind = griffe.ParameterKind(parameter.kind.description)
    return griffe.Parameter(parameter.name, annotation=annotation.strip("'"), kind=kind, default=shown)
