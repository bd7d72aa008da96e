"""What comes with the rows: influences, what was left out, and the document; the rows are in `golden`."""

from __future__ import annotations

import pytest

from fulldepth.comparison import compare
from fulldepth.measurement import MeasureSettings, measure, measure_into
from fulldepth.uncertainty import error_of

LM = {"lens_accuracy", "lens_loss", "saturation", "effective_depth"}
GENERAL = {"displacement", "jump_rate", "cosine", "cka", "norm_ratio", "renyi_entropy", "spectral_norm"}


def left_out(results):
    return {entry["measure"] for entry in results.meta["left_out"]}


def test_influences_give_the_errors_of_the_table_and_are_small(checkpoint, documents_file, tmp_path):
    """Two models on the same text are paired; another text has other groups."""
    first, second, other = (
        measure(checkpoint("llama", seed), documents_file, max_sequences=n, sequence_length=12)
        for seed, n in ((0, 16), (1, 16), (0, 12))
    )
    assert first.meta["groups"] == second.meta["groups"] != other.meta["groups"]
    rows = first.table.set_index(["measure", "site", "layer", "statistic"])["value"]
    values = first.influences
    assert set(values.measure) >= {"displacement", "jump_rate", "lens_accuracy", "lens_loss", "coherence", "saturation"}
    groups = [name for name in values.columns if name.startswith("group_")]
    assert len(groups) == first.meta["groups"]["count"]
    for measure_, statistic in (("displacement", "mean"), ("lens_loss", "mean"), ("jump_rate", "value")):
        some = values[(values.measure == measure_) & (values.statistic == statistic)]
        for row, influence in zip(some.itertuples(), some[groups].to_numpy(), strict=True):
            error = rows.get((measure_, row.site, row.layer, "standard_error"))
            if error is not None:
                assert error_of(influence) == pytest.approx(error, rel=1e-5, abs=1e-9)
    assert (first.save(tmp_path, page=False) / "groups.parquet").stat().st_size < 50_000
    assert compare([first, second]).meta["models"][1]["paired"] is True
    assert compare([first, other]).meta["models"][1]["paired"] is False


def test_detr_is_measured_in_its_decoder(checkpoint, picture_folder):
    results = measure(checkpoint("detr"), picture_folder, max_sequences=3)
    assert {"displacement", "jump_rate", "cosine", "cka", "norm_ratio", "spectral_norm"} <= set(results.table.measure)
    assert left_out(results) >= LM
    assert set(results.table[results.table.measure == "norm_ratio"].layer) == {1, 2, 3}


@pytest.mark.parametrize("family", ["bert-bare", "bert-pretraining"])
def test_other_heads(checkpoint, documents_file, family):
    results = measure(checkpoint(family), documents_file, max_sequences=4, sequence_length=12)
    measured = set(results.table.measure)
    assert measured >= GENERAL | {"coherence"}
    without = [entry for entry in results.meta["left_out"] if entry["measure"] in LM]
    if family == "bert-bare":
        assert len(without) == 4
        assert all("head" in entry["reason"] for entry in without)
    else:
        assert not without


def test_the_document_says_everything_that_is_needed_to_repeat_the_run(checkpoint, documents_file, tmp_path):
    settings = MeasureSettings(max_sequences=4, sequence_length=12)
    results = measure_into(checkpoint("llama"), str(documents_file), tmp_path / "out", settings)
    meta = results.meta
    assert meta["kind"] == "measure"
    assert meta["complete"] is True
    assert meta["settings"] == settings.model_dump()
    assert (
        meta["model"].items()
        >= {
            "name": str(checkpoint("llama")),
            "class": "LlamaForCausalLM",
            "family": "llama",
            "task": "causal-lm",
            "num_layers": 3,
            "width": 32,
            "dtype": "float32",
            "revision": None,
        }.items()
    )
    assert meta["model"]["config_hash"].startswith("sha256:")
    assert meta["data"]["hash"].startswith("sha256:")
    assert (meta["data"]["sequences"], meta["data"]["tokens"]) == (4, 48)
    assert set(meta["versions"]) == {"fulldepth", "torch", "transformers", "python"}
    assert set(meta["timings"]) == {"load", "forward", "measures", "total"}
    assert meta["timings"]["total"] >= meta["timings"]["forward"] > 0
    assert meta["sampling"]["reservoir_tokens"] == meta["sampling"]["counted_tokens"] == 48
    assert meta["sampling"]["lens_targets"] == 4 * 11
    assert meta["memory"]["reservoirs"] >= 48 * 4 * 32 * 4
