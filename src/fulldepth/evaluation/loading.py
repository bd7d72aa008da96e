"""Finds tasks by name, and loads them with lm-eval's own task manager."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from fulldepth.core.errors import FulldepthError, needing, one_line, unknown
from fulldepth.core.files import Fingerprint, sha256_of_file
from fulldepth.evaluation.harness import SEED, quiet, seeded
from fulldepth.evaluation.local_tasks import LOCAL_TASKS, local_task
from fulldepth.settings.evaluate import EvaluateSettings

CODE = (".yaml", ".yml", ".py", ".jinja", ".txt")
"""Suffixes of the files that lm-eval reads from the folder of a user's tasks."""
DEFINITION = (
    *("output_type", "description", "doc_to_text", "doc_to_target", "doc_to_choice", "doc_to_image", "doc_to_audio"),
    *("target_delimiter", "gen_prefix", "process_results", "repeats", "filter_list"),
)
"""Entries of a task's configuration that decide what is asked about an example, and how the answer is read."""


class Suite(NamedTuple):
    """The tasks of a paper."""

    tasks: tuple[str, ...]
    """Names of tasks and groups of lm-eval."""
    num_fewshot: int | None
    """Solved examples in a prompt; None = each task's own number."""
    source: str


SUITES = {
    "jreg-suite": Suite(
        ("lambada_openai", "boolq", "arc_easy", "hellaswag", "piqa", "race", "social_iqa", "sciq", "swag"),
        None,
        "JREG, Sec. 5.2 and Table 3",
    ),
    "lime-suite": Suite(
        ("arc_easy", "arc_challenge", "winogrande", "copa", "multirc", "rte", "hellaswag", "piqa"),
        1,
        "LIME, Table 1 (one-shot)",
    ),
    "hopscotch-suite": Suite(
        ("gsm8k", "arc_challenge", "gpqa_main_zeroshot", "social_iqa", "pawsx"),
        None,
        "Hopscotch, poster, first table (gpqa: the main set without solved examples)",
    ),
}
"""Name -> suite."""


@dataclass(frozen=True)
class Loaded:
    """Tasks that are evaluated together: one task, a group with its members, or a tag."""

    tasks: dict[str, Any]
    """`tasks` and `groups`, as lm-eval's `evaluate` takes them."""
    content: str
    """Hash of what they are made of: configurations, code, rows and the version of lm-eval."""
    asked: dict[str, dict[str, Any]]
    """Task -> how its examples are asked, see `_asked`."""

    @property
    def generates(self) -> bool:
        """True if one of them generates text."""
        return any(task.OUTPUT_TYPE == "generate_until" for task in self.tasks["tasks"].values())


def units_of(names: list[str]) -> dict[str, int | None]:
    """Task or group, each once and those of suites apart -> solved examples in a prompt; None = as the task says."""
    units: dict[str, int | None] = {}
    for name in names:
        suite = SUITES.get(name, Suite((name,), None, ""))
        for member in suite.tasks:
            units.setdefault(member, suite.num_fewshot)
    return units


def load_tasks(settings: EvaluateSettings) -> dict[str, Loaded]:
    """Name of each task or group -> its tasks with their data, set as `lm_eval.simple_evaluate` sets them.

    Args:
        settings: names of tasks and groups, folders of local data, and the number of examples before a question.

    Returns:
        The tasks with the fingerprint of their content, in the order of the settings.

    Raises:
        FulldepthError: if lm-eval is not installed, a name is unknown, a file or folder is missing, a task is not valid
            or its data cannot be read, or arguments of generation are given and no task generates.
    """
    units = units_of(settings.tasks or [])
    if not units:
        return {}
    with needing("lm-eval", "evaluate", "Scoring tasks"):
        from lm_eval.tasks import TaskManager  # noqa: PLC0415  # an extra

    local_tasks = {name: local_task(name, settings.task_data or []) for name in units if name in LOCAL_TASKS}
    include = {} if settings.include_path is None else {"include_path": settings.include_path}
    folder = Path(settings.include_path or ".")
    if not folder.is_dir():
        raise FulldepthError(f"There is no folder {folder} with YAML files of tasks (include_path).")
    with quiet():
        manager = TaskManager(include_defaults=False, **include)
        if {*units} - {*local_tasks} - {*manager.all_tasks}:
            manager = TaskManager(**include)  # reading all of lm-eval's tasks takes seconds
    for name in units:
        if name not in local_tasks and name not in manager.all_tasks:
            raise unknown("task", name, {*LOCAL_TASKS, *SUITES, *manager.all_tasks})
    files = sorted(file for file in folder.rglob("*") if file.suffix in CODE and file.is_file()) if include else []
    code = [(file.name, sha256_of_file(file)) for file in files]
    loaded = {}
    for name, shots in units.items():
        try:
            with quiet(), seeded(settings.seed):
                tasks = dict(manager.load([local_tasks.get(name, name)]))
                count = shots if settings.num_fewshot is None else settings.num_fewshot
                content = _prepared(tasks["tasks"], count, settings)
                asked = {key: _asked(task, settings) for key, task in tasks["tasks"].items()}
        except FulldepthError:
            raise
        except Exception as error:  # of any kind: data sets, templates, code of the task
            hint = " Tasks of lm-eval download their data; without a network, use the *_local tasks."
            text = one_line(error).rstrip(".") or type(error).__name__
            raise FulldepthError(
                f"The task {name} cannot be loaded: {one_line(text, 300)}.{'' if name in local_tasks else hint}"
            ) from error
        loaded[name] = Loaded(tasks, str(Fingerprint(version("lm-eval"), json.dumps(code), *content)), asked)
    if settings.gen_kwargs and not any(task.generates for task in loaded.values()):
        raise FulldepthError("gen_kwargs are for tasks that generate text, and none of these does; leave them out.")
    return loaded


def _prepared(tasks: dict[str, Any], num_fewshot: int | None, settings: EvaluateSettings) -> list[str]:
    """Set solved examples and arguments of generation; returns what the tasks are made of, as text.

    Tasks that fix the number of solved examples at 0 keep 0.
    """
    from lm_eval.utils import simple_parse_args_string  # noqa: PLC0415  # an extra

    options = settings.gen_kwargs
    options = simple_parse_args_string(options) if isinstance(options, str) else options
    parts: list[Any] = []
    for key, task in sorted(tasks.items()):
        default_shots = task.get_config("num_fewshot")
        if default_shots is None or (num_fewshot is not None and default_shots != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        if options and task.OUTPUT_TYPE == "generate_until":
            task.set_config(key="generation_kwargs", value=dict(options), update=True)
        shots = task.fewshot_docs() if task.get_config("num_fewshot") else ()
        parts += [key, task.dump_config(), *task.eval_docs, *shots]
    return [_written(part) for part in parts]


def _written(part: Any) -> str:
    """A part of a task as text, without the addresses of objects that are shown by their `repr`."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", json.dumps(part, sort_keys=True, default=str))


def _asked(task: Any, settings: EvaluateSettings) -> dict[str, Any]:
    """How the examples of a prepared task are asked, whatever the model: two results that differ in it did not take the
    same test. The place of the data and entries that are only names are left out.

    Returns:
        `num_fewshot` (solved examples in a prompt), `chat_template` (whether one is used), `system_instruction`,
        `generation` (arguments with lm-eval's defaults; None for tasks that generate no text), `definition` (hash of
        prompts, answers and filters), `solved_examples` (hash of the rows that they are drawn from; None without) and
        `seed` (with which they are drawn, and texts sampled).
    """
    from lm_eval.models.utils import normalize_gen_kwargs  # noqa: PLC0415  # an extra

    config = task.dump_config()
    shots = int(config.get("num_fewshot") or 0)
    generation = None
    if task.OUTPUT_TYPE == "generate_until":
        generation = json.loads(_written(dict(normalize_gen_kwargs(config.get("generation_kwargs") or {}))))
    solved = None
    if shots:
        sampler = config.get("fewshot_config")
        solved = str(Fingerprint(*map(_written, (config.get("fewshot_delimiter"), sampler, *task.fewshot_docs()))))
    return {
        "num_fewshot": shots,
        "chat_template": settings.apply_chat_template,
        "system_instruction": settings.system_instruction,
        "generation": generation,
        "definition": str(Fingerprint(*(_written(config.get(name)) for name in DEFINITION))),
        "solved_examples": solved,
        "seed": SEED if settings.seed is None else settings.seed,
    }
