"""Tasks on local JSONL files: finds the files, checks every row, and gives lm-eval the configuration with the rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import yaml

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.data import files

FOLDER = Path(__file__).parent / "tasks"
LOCAL_TASKS = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
"""Names of the tasks on local files."""
TEXT_COLUMNS = {
    "lambada_local": ("context", "target"),
    "arc_easy_local": ("question",),
    "arc_challenge_local": ("question",),
    "piqa_local": ("goal",),
    "hellaswag_local": ("context",),
    "gsm8k_local": ("question", "answer"),
}
"""Task -> columns that hold text; multiple-choice tasks also have `choices` and `gold`."""
Row = Mapping[str, Any]
UNFINISHED = re.compile(r"((?:[.?!][\"')]*|:)\s+)([^.?!]+)$")
"""The sentence that the choices finish (HellaSwag's `ctx_b`): what stands after the last finished sentence."""


class _TaskLoader(yaml.SafeLoader):
    """Reads the package's own task files, which name one function."""


_TaskLoader.add_constructor("!function", lambda loader, node: hellaswag_prompts)


def local_task(name: str, folders: Sequence[str | Path]) -> dict[str, Any]:
    """The configuration of a local task for lm-eval, which then reads the rows of the files.

    Args:
        name: of `LOCAL_TASKS`.
        folders: where the files are looked for, by the names in the task's YAML file, with and without its folder.

    Raises:
        FulldepthError: if a file is missing.
    """
    config = yaml.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), Loader=_TaskLoader)
    files = config.pop("dataset_kwargs")["data_files"]
    paths = {split: find_file(file, folders, name) for split, file in files.items()}
    is_choice = config["output_type"] == "multiple_choice"

    def read(**options: Any) -> datasets.DatasetDict:
        """The data set, as lm-eval asks for it."""
        rows = {split: list(read_task_rows(path, TEXT_COLUMNS[name], is_choice)) for split, path in paths.items()}
        return datasets.DatasetDict({split: datasets.Dataset.from_list(listed) for split, listed in rows.items()})

    return {**config, "custom_dataset": read}


def find_file(file: str, folders: Sequence[str | Path], task: str) -> Path:
    """The first of `FOLDER/SUB/FILE` and `FOLDER/FILE` that exists.

    Raises:
        FulldepthError: if there is none, naming the file and the places.
    """
    if not folders:
        raise FulldepthError(
            f"{task} reads {Path(file).name}, and no folder with data of tasks is named: --task-data FOLDER."
        )
    places = [Path(folder) / name for folder in folders for name in (file, Path(file).name)]
    for place in places:
        if place.is_file():
            return place
    looked = ", ".join(str(place) for place in places)
    raise FulldepthError(f"{task} reads {Path(file).name}, which is not there. Looked for: {one_line(looked, 600)}.")


def read_task_rows(path: Path, texts: Sequence[str], is_choice: bool) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file, with the columns of a task.

    Raises:
        FulldepthError: for a row that lacks a column or holds something else there, naming file and line; for an empty
            file.
    """
    for place, row in files.read_rows(path):
        for column in texts:
            if not _is_text(row.get(column)):
                raise _bad(place, column, row.get(column), "text that is not empty")
        checked = {column: row[column] for column in texts}
        if is_choice:
            choices = row.get("choices")
            gold = row.get("gold")
            if not isinstance(choices, list) or len(choices) < 2 or not all(map(_is_text, choices)):
                raise _bad(place, "choices", choices, "a list of two texts or more, none empty")
            if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(choices):
                raise _bad(place, "gold", gold, f"the number of the right choice, 0 to {len(choices) - 1}")
            checked |= {"choices": choices, "gold": gold}
        yield checked


def _is_text(value: Any) -> bool:
    """Return True for text with letters and without halves of surrogate pairs, which no tokenizer accepts."""
    return isinstance(value, str) and bool(value.strip()) and not any(0xD800 <= ord(c) <= 0xDFFF for c in value)


def _bad(place: str, column: str, value: Any, expected: str) -> FulldepthError:
    return FulldepthError(f"{place}: {column} is {one_line(repr(value), 80)}; expected {expected}.")


def hellaswag_prompts(dataset: Any) -> Any:
    """HellaSwag with lm-eval's prompt as the column `query`, and cleaned choices."""
    return dataset.map(
        lambda row: {
            "query": hellaswag_query(row["context"]),
            "choices": [*map(without_marks, row["choices"])],
        }
    )


def hellaswag_query(context: str) -> str:
    """The prompt: `Activity: context`, with the unfinished sentence capitalised.

    HellaSwag stores the context in two parts, of which lm-eval capitalises the second.
    """
    return without_marks(UNFINISHED.sub(lambda match: match[1] + match[2].capitalize(), context))


def without_marks(text: str) -> str:
    """The text without the marks of WikiHow's headings and steps."""
    from lm_eval.tasks.hellaswag.utils import preprocess  # noqa: PLC0415  # an extra

    return str(preprocess(text))
