"""Writes rows of tasks as text: some to choose what is removed from a model, others to heal it on.

    python examples/task_rows.py lambada_local,arc_easy_local,piqa_local rows/ --task-data data/ --skip 500
    fulldepth skip search MODEL --heldout rows/choose.jsonl --no-chat --no-fit --target-speedup 1.1 --output plan/
    fulldepth skip heal plan/ MODEL --data rows/heal.txt --output healed/

Tasks are those of lm-eval, or the local ones of `fulldepth evaluate`; prompts and right answers are what lm-eval
scores. Rows are of the training part of a task. A task without one (LAMBADA) gives rows that are evaluated, but not the
first ones (`--skip`): read the model on those alone (`--task-limit`). Needs `fulldepth[evaluate]`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fulldepth.evaluation import EvaluateSettings, load_tasks


def pairs_of(task: Any, skip: int) -> Iterator[tuple[str, str]]:
    """The prompt and the right answer of every row of a task of lm-eval that may be learnt from."""
    rows = task.training_docs() if task.has_training_docs() else list(task.eval_docs)[skip:]
    for row in rows:
        prompt = task.doc_to_text(row)
        target = task.doc_to_target(row)
        if not isinstance(prompt, str):
            raise SystemExit(f"{task.task_name} puts its choices into the prompt, which this script does not write.")
        if isinstance(target, int):
            target = task.doc_to_choice(row)[target]
        delimiter = "" if task.OUTPUT_TYPE == "loglikelihood" else task.config.target_delimiter
        yield prompt, f"{delimiter}{target}"


def main() -> None:
    """Write `choose.jsonl` and `heal.txt`, which share no row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", help="comma-separated names")
    parser.add_argument("output", type=Path, help="folder to create")
    parser.add_argument("--task-data", help="comma-separated folders with the files of local tasks")
    parser.add_argument("--skip", type=int, default=500, help="first rows that are left to be read (default: 500)")
    parser.add_argument("--choose", type=int, default=80, help="rows of a task that choose (default: 80)")
    parser.add_argument("--heal", type=int, default=500, help="rows of a task to heal on (default: 500)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    folders = given.task_data.split(",") if given.task_data else None
    draw = random.Random(given.seed)
    choosing, healing = [], []
    for unit in load_tasks(EvaluateSettings(tasks=given.tasks.split(","), task_data=folders)).values():
        for task in unit.tasks["tasks"].values():
            pairs = list(pairs_of(task, given.skip))
            if len(pairs) < given.choose + given.heal:
                raise SystemExit(
                    f"{task.task_name} has {len(pairs)} rows to learn from: lower --choose or --heal, or --skip."
                )
            drawn = draw.sample(pairs, given.choose + given.heal)
            choosing += drawn[: given.choose]
            healing += drawn[given.choose :]
    draw.shuffle(choosing)
    draw.shuffle(healing)
    given.output.mkdir(parents=True)
    rows = [{"prompt": prompt, "response": answer} for prompt, answer in choosing]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (given.output / "choose.jsonl").write_text("".join(lines), encoding="utf-8")
    text = "\n\n".join(prompt + answer for prompt, answer in healing)
    (given.output / "heal.txt").write_text(text, encoding="utf-8")
    print(f"{given.output}: choose.jsonl with {len(choosing)} rows, heal.txt with {len(healing)} others")


if __name__ == "__main__":
    main()
