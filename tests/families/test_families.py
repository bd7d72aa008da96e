"""The table of model types: every row is made anew, and no accepted model is measured wrongly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fulldepth
from families import verdicts, zoo
from families.stock import word_tokenizer


@pytest.fixture(scope="module")
def page() -> str:
    return verdicts.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("task", "model_type"), verdicts.CASES)
def test_a_model_type_is_right_or_refused_as_the_page_says(task: str, model_type: str, page: str) -> None:
    verdict = verdicts.examine(task, model_type)
    assert verdict.verdict == verdicts.stated(task, model_type)
    assert verdict.row in page, "python tests/families/verdicts.py makes the page anew"


def test_the_page_has_a_row_for_every_case(page: str) -> None:
    assert page.count("\n| `") == len(verdicts.CASES)
    assert len({model_type for _, model_type in verdicts.CASES}) >= 150


@torch.no_grad()
@pytest.mark.parametrize("before", [True, False])
def test_a_map_to_another_width_behind_the_last_block_is_no_norm(before: bool) -> None:
    """OPT-350m: its decoder ends in `project_out`, to the width of its embeddings; without norms before the sums."""
    model = zoo.build("opt", "causal-lm", do_layer_norm_before=before)
    tokenizer, text = word_tokenizer(), "w7 w1 w30 w4 w4 w80 w2 w11"
    results = fulldepth.measure(model, [text], tokenizer=tokenizer, measures=["displacement", "lens_loss"])
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    last = model.model.decoder.layers[-1]
    stream = []
    hook = last.register_forward_hook(lambda _, inputs, output: stream.extend((inputs[0], output)))
    logits = model(input_ids=ids).logits
    hook.remove()
    ends = {"residual": stream[1]}
    if before:
        ends["final_normed"] = model.model.decoder.final_layer_norm(stream[1])
    assert set(results.table.site[results.table.measure == "displacement"]) == set(ends)
    for site, end in ends.items():
        expected = (1 - torch.cosine_similarity(stream[0].double(), end.double(), dim=-1)) / 2
        assert results.values("displacement", "mean", site).iloc[-1] == pytest.approx(float(expected.mean()), rel=1e-5)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert results.values("lens_loss", "mean").iloc[-1] == pytest.approx(float(loss), rel=1e-5)


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
