"""The table of model types: every row is made anew, and no accepted model is measured wrongly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image

import fulldepth
from families import verdicts, zoo


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


@torch.no_grad()
def test_siglip_without_a_processor_is_measured_at_its_own_size(tmp_path: Path) -> None:
    """Its head reads the mean of the patches, so that counts; against stock states of pictures scaled by hand."""
    pictures = []
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.png")
        pictures.append(torch.tensor(pixels).permute(2, 0, 1) / 127.5 - 1)
    model = zoo.build("siglip", "image-classification")
    model.save_pretrained(tmp_path / "model")
    results = fulldepth.measure(tmp_path / "model", tmp_path / "pictures", measures=["displacement"])
    hidden = model.vision_model(torch.stack(pictures), output_hidden_states=True).hidden_states
    states = torch.stack(hidden).double().mean(2)
    cosines = torch.nn.functional.cosine_similarity(states[:-1], states[1:], dim=-1)
    expected = ((1 - cosines) / 2).mean(1)
    assert results.values("displacement", "mean", "residual")[[1, 2]].tolist() == pytest.approx(
        expected[:2].tolist(), rel=1e-5
    )
    assert results.meta["token_policy"]["name"] == "mean"
