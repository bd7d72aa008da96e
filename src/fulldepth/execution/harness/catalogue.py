"""`Catalogue`: finds tasks by name, and loads them with lm-eval's own task manager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulldepth.errors import FulldepthError, one_line, unknown
from fulldepth.execution.harness.running import MISSING, quiet, reason, seeded


@dataclass(frozen=True)
class Unit:
    """What is evaluated together: a task, a group with its members, or a tag."""

    name: str
    num_fewshot: int | None = None
    """Solved examples in a prompt; None = as the settings or the task say."""


class Catalogue:
    """Tasks by name.

    Args:
        names: wanted names of tasks, groups or tags.
        own: name -> configuration of tasks that are not lm-eval's.
        include_path: folder with further YAML files of tasks; code that they name is run.
        known: further names, for the suggestions of errors.

    Raises:
        FulldepthError: if lm-eval is not installed, the folder is missing, or a name is unknown.
    """

    def __init__(
        self,
        names: Iterable[str],
        own: Mapping[str, Mapping[str, Any]] | None = None,
        include_path: str | Path | None = None,
        known: Sequence[str] = (),
    ) -> None:
        try:
            from lm_eval.tasks import TaskManager  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise FulldepthError(MISSING) from error
        if include_path is not None and not Path(include_path).is_dir():
            raise FulldepthError(f"There is no folder {include_path} with YAML files of tasks (--include-path).")
        self._own = dict(own or {})
        options = {} if include_path is None else {"include_path": str(include_path)}
        with quiet():
            self._manager = TaskManager(include_defaults=False, **options)
            further = [name for name in names if name not in self._own]
            if set(further) - set(self._manager.all_tasks):
                self._manager = TaskManager(**options)  # reading all of lm-eval's tasks takes seconds
        for name in further:
            if name not in self._manager.all_tasks:
                raise unknown("task", name, {*self._own, *known, *self._manager.all_tasks})

    def load(self, name: str, seed: int | None = None) -> dict[str, Any]:
        """The tasks and groups of a name, with their data, as lm-eval's `evaluate` takes them.

        Args:
            name: one of the wanted names.
            seed: of random choices while data are read; None = lm-eval's default.

        Raises:
            FulldepthError: if the task is not valid, or its data cannot be read.
        """
        try:
            with quiet(), seeded(seed):
                return dict(self._manager.load([dict(self._own[name]) if name in self._own else name]))
        except FulldepthError:
            raise
        except Exception as error:  # of any kind: data sets, templates, code of the task
            hint = " Tasks of lm-eval download their data; without a network, use the *_local tasks."
            text = one_line(reason(error), 300).rstrip(".")
            raise FulldepthError(
                f"The task {name} cannot be loaded: {text}.{'' if name in self._own else hint}"
            ) from error
