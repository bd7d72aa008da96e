"""`Catalogue`: finds tasks by name, and loads them with lm-eval's own task manager."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fulldepth.errors import FulldepthError, one_line, unknown
from fulldepth.execution.harness.running import MISSING, lm_eval_version, quiet, reason, seeded

CODE = (".yaml", ".yml", ".py", ".jinja", ".txt")
"""Suffixes of the files that lm-eval reads from the folder of a user's tasks."""


@dataclass(frozen=True)
class Unit:
    """What is evaluated together: a task, a group with its members, or a tag."""

    name: str
    num_fewshot: int | None = None
    """Solved examples in a prompt; None = as the settings or the task say."""


@dataclass(frozen=True)
class Loaded:
    """The tasks of a unit."""

    tasks: dict[str, Any]
    """`tasks` and `groups`, as lm-eval's `evaluate` takes them."""
    content: str
    """Hash of what they are made of: configurations, code, rows and the version of lm-eval."""

    @property
    def generates(self) -> bool:
        """Whether one of them generates text."""
        return any(task.OUTPUT_TYPE == "generate_until" for task in self.tasks["tasks"].values())


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
            raise FulldepthError(f"There is no folder {include_path} with YAML files of tasks (include_path).")
        self._own = dict(own or {})
        options = {} if include_path is None else {"include_path": str(include_path)}
        self._folder = None if include_path is None else Path(include_path)
        with quiet():
            self._manager = TaskManager(include_defaults=False, **options)
            further = [name for name in names if name not in self._own]
            if set(further) - set(self._manager.all_tasks):
                self._manager = TaskManager(**options)  # reading all of lm-eval's tasks takes seconds
        for name in further:
            if name not in self._manager.all_tasks:
                raise unknown("task", name, {*self._own, *known, *self._manager.all_tasks})

    @cached_property
    def _code(self) -> list[tuple[str, str]]:
        """Name and hash of the files of the user's tasks: their settings and their code."""
        folder = self._folder
        files = [] if folder is None else sorted(file for file in folder.rglob("*") if file.suffix in CODE)
        return [(file.name, _hash([file.read_bytes()])) for file in files if file.is_file()]

    def load(
        self,
        name: str,
        *,
        num_fewshot: int | None = None,
        gen_kwargs: str | Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> Loaded:
        """The tasks of a name with their data, set as `lm_eval.simple_evaluate` sets them.

        Args:
            name: one of the wanted names.
            num_fewshot: solved examples in a prompt; None = each task's own number. Tasks that fix it at 0 keep 0.
            gen_kwargs: arguments of generation, on top of the tasks' own; text as `temperature=0.5,top_p=0.9`.
            seed: of random choices while data are read; None = lm-eval's default.

        Raises:
            FulldepthError: if the task is not valid, or its data cannot be read.
        """
        from lm_eval.utils import simple_parse_args_string  # noqa: PLC0415  # an extra

        try:
            with quiet(), seeded(seed):
                loaded = dict(self._manager.load([dict(self._own[name]) if name in self._own else name]))
                options = simple_parse_args_string(gen_kwargs) if isinstance(gen_kwargs, str) else gen_kwargs
                for task in loaded["tasks"].values():
                    own = task.get_config("num_fewshot")
                    if own is None or (num_fewshot is not None and own != 0):
                        task.set_config(key="num_fewshot", value=num_fewshot or 0)
                    if options and task.OUTPUT_TYPE == "generate_until":
                        task.set_config(key="generation_kwargs", value=dict(options), update=True)
                parts: list[Any] = [lm_eval_version(), self._code]
                for key, task in sorted(loaded["tasks"].items()):
                    shots = task.fewshot_docs() if task.get_config("num_fewshot") else ()
                    parts += [key, task.dump_config(), *task.eval_docs, *shots]
                texts = (json.dumps(part, sort_keys=True, default=str) for part in parts)
                # without the addresses of objects that are shown by their `repr`
                return Loaded(loaded, _hash(re.sub(r" at 0x[0-9a-fA-F]+", "", text).encode() for text in texts))
        except FulldepthError:
            raise
        except Exception as error:  # of any kind: data sets, templates, code of the task
            hint = " Tasks of lm-eval download their data; without a network, use the *_local tasks."
            text = one_line(reason(error), 300).rstrip(".")
            raise FulldepthError(
                f"The task {name} cannot be loaded: {text}.{'' if name in self._own else hint}"
            ) from error


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
