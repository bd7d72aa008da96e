"""HellaSwag's prompts as lm-eval's `hellaswag` makes them, from rows whose context is one text."""

from __future__ import annotations

import re
from typing import Any

UNFINISHED = re.compile(r"((?:[.?!][\"')]*|:)\s+)([^.?!]+)$")
"""The sentence that the choices finish (HellaSwag's `ctx_b`): what stands after the last finished sentence."""


def process_docs(dataset: Any) -> Any:
    """The data set with the prompt as the column `query`, and cleaned choices."""
    return dataset.map(
        lambda row: {"query": query(row["context"]), "choices": [cleaned(choice) for choice in row["choices"]]}
    )


def query(context: str) -> str:
    """The prompt: `Activity: context`, with the unfinished sentence capitalised.

    HellaSwag stores the context in two parts, of which lm-eval capitalises the second.
    """
    return cleaned(UNFINISHED.sub(lambda match: match[1] + match[2].capitalize(), context))


def cleaned(text: str) -> str:
    """The text without the marks of WikiHow's headings and steps."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
