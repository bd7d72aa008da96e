"""Comparability of two evaluations: whether their scores are of the same examples, asked in the same way.

An evaluation states for each task a hash of its examples and how they are asked (`examples` and `asked` of an entry of
`tasks`), and for generated text the hash of the data and the lengths (`quality_data`). One model may be compared with
itself asked otherwise: then the difference is that of the asking.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fulldepth.core.errors import one_line
from fulldepth.results.differences import EVALUATED, TASK_SCORE
from fulldepth.results.reasons import Entry, unlike

COUNTS = (("the numbers of examples differ", "", "count"),)
EXAMPLES = (("the examples differ", "", "examples", ""),)
ASKED = (
    ("the numbers of solved examples differ", "asked", "num_fewshot"),
    ("only one of them uses a chat template", "asked", "chat_template", ""),
    ("the system instructions differ", "asked", "system_instruction", ""),
    ("the prompts, answers or filters are defined differently", "asked", "definition", ""),
)
"""Differences that make two scores of a task incomparable, see `reasons.unlike`."""
SOLVED = (("the solved examples are drawn from different rows", "asked", "solved_examples", ""),)
"""A further one of two scores with the same number of solved examples."""
QUALITY = (
    ("the texts differ", "quality_data", "hash", "name"),
    ("the numbers of texts differ", "quality_data", "prompts"),
    ("the lengths of their beginnings differ", "quality_data", "prefix_tokens"),
    ("the lengths of their continuations differ", "quality_data", "max_new_tokens"),
    ("the shares of nucleus sampling differ", "quality_data", "top_p"),
)
"""Differences that make two qualities of generated text incomparable."""
EMBEDDER = (("the embedders differ", "quality_data", "embedder_hash", "embedder"),)
"""A further one of two coherences."""
COHERENCE = "coherence"


class Unlike(NamedTuple):
    """Rows of two evaluations that did not take the same test."""

    measure: str
    site: str | None
    """None = every site."""
    statistic: str | None
    """None = every statistic."""
    title: str
    """What the rows are of."""
    reasons: str
    """How the tests differ."""

    def rows(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """`[rows]` which rows of a table are meant."""
        selected = table["measure"] == self.measure
        for column, value in (("site", self.site), ("statistic", self.statistic)):
            if value is not None:
                selected &= table[column].eq(value)
        return selected.to_numpy(bool)


def differing_tests(model: Entry, baseline: Entry) -> list[Unlike]:
    """The tasks of two evaluations, and the quality of generated text, that are not of the same test."""
    differing = []
    for task, scores, base_scores in shared(model, baseline):
        reasons = unlike(scores, base_scores, COUNTS, where_stated=True)
        reasons = reasons or unlike(scores, base_scores, EXAMPLES, where_stated=True)
        if scores.get("asked") and base_scores.get("asked"):
            reasons = "; ".join(filter(None, (reasons, _asked_otherwise(scores, base_scores))))
        if reasons:
            differing.append(Unlike(TASK_SCORE, task, None, task, reasons))
    if model.get("quality_data") and baseline.get("quality_data"):
        quality = EVALUATED[1]
        if reasons := unlike(model, baseline, QUALITY, where_stated=True):
            differing.append(Unlike(quality, None, None, "generated text", reasons))
        elif reasons := unlike(model, baseline, EMBEDDER, where_stated=True):
            differing.append(Unlike(quality, None, COHERENCE, f"{COHERENCE} of generated text", reasons))
    return differing


def refused(model: Entry, baseline: Entry) -> list[Unlike]:
    """The differing tests of two different models, whose scores are not compared."""
    return [] if is_one_model(model, baseline) else differing_tests(model, baseline)


def shared(model: Entry, baseline: Entry) -> list[tuple[str, Entry, Entry]]:
    """The tasks that both have: name and the entry of each, with the label of its model."""
    tasks, base_tasks = (entry.get("tasks") or {} for entry in (model, baseline))
    return [
        (
            task,
            {**(tasks[task] or {}), "label": model["label"]},
            {**(base_tasks[task] or {}), "label": baseline["label"]},
        )
        for task in tasks
        if task in base_tasks
    ]


def is_one_model(model: Entry, baseline: Entry) -> bool:
    """True if two results are of the same weights and configuration, with the same blocks skipped and without trained
    scalars. Results of an earlier version that do not state the hash of the weights are of two models.
    """
    hashes = [entry["model"].get("hash") for entry in (model, baseline)]
    configurations = [entry["model"].get("config_hash") for entry in (model, baseline)]
    skipped: list[dict[str, Any]] = [entry.get("skipped") or {"healed": False} for entry in (model, baseline)]
    is_healed = skipped[0].get("healed", True)
    is_equal = hashes[0] == hashes[1] and configurations[0] == configurations[1] and skipped[0] == skipped[1]
    return is_equal and None not in hashes and not is_healed


def notes(model: Entry, baseline: Entry) -> list[str]:
    """Warnings about the scores that are compared: what is not known of the tests, or differs by chance or on purpose.

    Tasks whose main metrics differ are compared by the metrics that both have.
    """
    pair = f"{model['label']} and {baseline['label']}"
    differing = differing_tests(model, baseline)
    lines = []
    if is_one_model(model, baseline):
        lines += [
            f"{unlike_rows.title}: {pair} are one model, and {unlike_rows.reasons}. The difference is that of the test."
            for unlike_rows in differing
        ]
    unknown = []
    for task, scores, base_scores in shared(model, baseline):
        if reasons := unlike(scores, base_scores, (("the main metrics differ", "", "metric"),), where_stated=True):
            lines.append(f"{task}: {reasons}.")
        if any(unlike_rows.title == task for unlike_rows in differing):
            continue
        asked = scores.get("asked")
        if not (asked and base_scores.get("asked")):
            unknown.append(task)
        elif asked.get("num_fewshot") != 0 or (asked.get("generation") or {}).get("do_sample"):
            seeds = (("the seeds of solved examples and sampled texts differ", "asked", "seed"),)
            if reasons := unlike(scores, base_scores, seeds, where_stated=True):
                lines.append(f"{task}: a small difference may have other reasons than the models: {reasons}.")
    if unknown:
        lines.append(
            f"{pair}: it is not known whether {one_line(', '.join(unknown), 200)} had the same examples and prompts, "
            "because results of an earlier version do not state them."
        )
    quality = [entry["quality_data"] for entry in (model, baseline) if entry.get("quality_data")]
    if len(quality) > 1 and not all(data.get("hash") for data in quality):
        lines.append(f"{pair}: it is not known whether generated texts continue the same texts.")
    return lines


def _asked_otherwise(scores: Entry, base_scores: Entry) -> str:
    """In what the ways of asking differ, as clauses; empty if they are the same."""
    reasons = [unlike(scores, base_scores, ASKED)]
    asked, base_asked = (entry["asked"] for entry in (scores, base_scores))
    if asked.get("num_fewshot") == base_asked.get("num_fewshot"):
        reasons.append(unlike(scores, base_scores, SOLVED))
    generation, base_generation = (entry.get("generation") or {} for entry in (asked, base_asked))
    if names := [name for name in generation | base_generation if generation.get(name) != base_generation.get(name)]:
        values = "; ".join(
            f"{entry['label']}: {_arguments(arguments, names)}"
            for entry, arguments in ((scores, generation), (base_scores, base_generation))
        )
        reasons.append(f"the arguments of generation differ ({values})")
    return "; ".join(filter(None, reasons))


def _arguments(arguments: Mapping[str, Any], names: list[str]) -> str:
    """Some arguments of generation, as text."""
    return ", ".join(
        f"{name} {one_line(repr(arguments[name]), 60) if name in arguments else 'not set'}" for name in names
    )
