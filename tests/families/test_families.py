"""The table of model types: every row is made anew, and no accepted model is measured wrongly."""

from __future__ import annotations

import pytest
import transformers as tf

from families import verdicts


@pytest.fixture(scope="module")
def page() -> str:
    return verdicts.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("task", "model_type"), verdicts.CASES)
def test_a_model_type_is_right_or_refused_as_the_page_says(task: str, model_type: str, page: str) -> None:
    verdict = verdicts.examine(task, model_type)
    if f"transformers {tf.__version__}," in page:  # the page is that of one version
        assert verdict.row in page, "python tests/families/verdicts.py makes the page anew"


def test_the_page_has_a_row_for_every_case(page: str) -> None:
    assert page.count("\n| `") == len(verdicts.CASES)
    assert len({model_type for _, model_type in verdicts.CASES}) >= 150
