"""`TaskScorer`: scores of loaded models on lm-eval's tasks, by the harness's own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError, unknown
from fulldepth.execution.harness.running import FAILURES, MISSING, Score, quiet, scores_of
from fulldepth.progress import Watcher

YAML = (".yaml", ".yml")


class TaskScorer:
    """Scores causal language models on tasks.

    Args:
        tasks: names of lm-eval's tasks, or YAML files of tasks (their data may be local files).
        tokenizer: of all the models.
        limit: most examples of each task, from the first; None = all.
        batch_size: requests per batch.
        seed: of few-shot examples.

    Raises:
        FulldepthError: if lm-eval is not installed, or there is no such task.
    """

    def __init__(
        self, tasks: Sequence[str], tokenizer: Any, limit: int | None = None, batch_size: int = 8, seed: int = 0
    ) -> None:
        self.tasks, self.tokenizer = list(tasks), tokenizer
        self.limit, self.batch_size, self.seed = limit, batch_size, seed
        try:
            from lm_eval.tasks import TaskManager  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise FulldepthError(MISSING) from error
        names = [task for task in tasks if not task.endswith(YAML)]
        for task in set(tasks) - set(names):
            if not Path(task).is_file():
                raise FulldepthError(f"There is no task file {task}.")
        with quiet():
            self._manager = TaskManager(include_defaults=bool(names))  # reading them takes seconds
        for task in names:
            if task not in self._manager.all_tasks:
                raise unknown("lm-eval task", task, self._manager.all_tasks)

    def scores(self, models: Mapping[str, PreTrainedModel], watcher: Watcher) -> dict[str, list[Score]]:
        """Label -> scores of the model on every task.

        Raises:
            FulldepthError: if a task cannot be run, or its data cannot be read.
        """
        watcher.begin("Tasks", len(models))
        scores = {}
        for label, model in models.items():
            scores[label] = self.score(model)
            watcher.advance(1)
        return scores

    def score(self, model: PreTrainedModel) -> list[Score]:
        """Scores of one model, which is not changed."""
        from lm_eval import simple_evaluate  # noqa: PLC0415  # an extra
        from lm_eval.models.huggingface import HFLM  # noqa: PLC0415

        try:
            with quiet():
                output = simple_evaluate(
                    model=HFLM(pretrained=model, tokenizer=self.tokenizer, batch_size=self.batch_size),
                    tasks=self.tasks,
                    task_manager=self._manager,
                    limit=self.limit,
                    log_samples=False,
                    random_seed=self.seed,
                    numpy_random_seed=self.seed,
                    torch_random_seed=self.seed,
                    fewshot_random_seed=self.seed,
                )
        except FAILURES as error:
            raise FulldepthError(f"lm-eval cannot run {', '.join(self.tasks)}: {error}") from error
        return scores_of(output)
