"""Influences that come with the rows (the rows are in `golden`), and what a model's head leaves out."""

from __future__ import annotations

import pytest

from fulldepth.measurement import measure
from fulldepth.results import compare
from fulldepth.uncertainty import error_of

LM = {"lens_accuracy", "lens_loss", "saturation", "effective_depth"}
GENERAL = {"displacement", "jump_rate", "cosine", "cka", "norm_ratio", "spectral_norm"}


def test_influences_give_the_errors_of_the_table_and_are_small(checkpoint, documents_file, tmp_path):
    """Two models on the same text are paired; another text has other groups."""
    first, second, other = (
        measure(checkpoint("llama", seed), documents_file, max_sequences=n, sequence_length=12)
        for seed, n in ((0, 16), (1, 16), (0, 6))
    )
    assert first.meta["groups"] == second.meta["groups"] != other.meta["groups"]
    values = first.influences
    assert set(values.measure) >= {"coherence", "saturation"}
    groups = [name for name in values.columns if name.startswith("group_")]
    assert len(groups) == first.meta["groups"]["count"]
    errors = first.table.query("statistic == 'standard_error'").set_index(["measure", "site", "layer"])["value"]
    plain = values[values.statistic == values.measure.map({"jump_rate": "value"}).fillna("mean")]
    keys = list(zip(plain.measure, plain.site, plain.layer, strict=True))
    stated = {key: error for key, error in errors.items() if key in keys}
    assert {key[0] for key in stated} >= {"displacement", "jump_rate", "lens_accuracy", "lens_loss", "norm_ratio"}
    found = {key: error_of(row) for key, row in zip(keys, plain[groups].to_numpy(), strict=True) if key in stated}
    assert found == pytest.approx(stated, rel=1e-5, abs=1e-9)
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
