"""Task lists of the papers, by name. Their data are downloaded by lm-eval."""

from __future__ import annotations

from typing import NamedTuple


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
