"""Influences that come with the rows (the rows are in `golden`), and what a model's head leaves out."""

from __future__ import annotations

import pytest

from fulldepth.measurement import measure
from fulldepth.results import compare

LM = {"lens_accuracy", "lens_loss", "saturation", "effective_depth"}
GENERAL = {"displacement", "jump_rate", "cosine", "cka", "norm_ratio", "contribution", "spectral_norm"}


def test_influences_are_stored_small_and_pair_models_on_the_same_text(checkpoint, documents_file, tmp_path):
    """That they give the errors of the table: `metrics.test_errors`."""
    first, second, other = (
        measure(checkpoint("llama", seed), documents_file, max_sequences=n, sequence_length=12)
        for seed, n in ((0, 16), (1, 16), (0, 6))
    )
    assert first.meta["groups"] == second.meta["groups"] != other.meta["groups"]
    values = first.influences
    assert set(values.measure) >= {"coherence", "saturation"}
    assert values.filter(like="group_").shape[1] == first.meta["groups"]["count"]
    assert (first.save(tmp_path, page=False) / "groups.parquet").stat().st_size < 50_000
    assert compare([first, second]).meta["models"][1]["paired"] is True
    assert compare([first, other]).meta["models"][1]["paired"] is False


@pytest.mark.parametrize("family", ["detr", "bert-bare", "bert-pretraining"])
def test_what_a_head_leaves_out(checkpoint, documents_file, picture_folder, family):
    data = picture_folder if family == "detr" else documents_file
    results = measure(checkpoint(family), data, max_sequences=3, sequence_length=None if family == "detr" else 12)
    assert set(results.table.measure) >= GENERAL
    assert set(results.table.query("measure == 'norm_ratio'").layer) == {1, 2, 3}
    without = {entry["measure"] for entry in results.meta["left_out"]} & LM
    assert without == (set() if family == "bert-pretraining" else LM)
