"""Files as they are published, through the command line."""

from __future__ import annotations

import zipfile

import pytest

from fulldepth.results import Results

LM = {"lens_loss", "saturation"}


@pytest.mark.parametrize(
    ("family", "data", "kind", "has"),
    [
        ("llama", "tinyshakespeare", "text", LM | {"coherence"}),
        ("qwen3", "novels", "text", LM | {"coherence"}),
        ("gpt2", "gsm8k/test.jsonl", "pairs", set()),  # the prompts alone fill its 64 positions
        ("bert", "glue/sst2/dev.tsv", "labelled-text", LM | {"nc1"}),
        ("bert-classifier", "glue/sst2/dev.tsv", "labelled-text", LM | {"nc1"}),
        ("clip-vision", "cifar10", "images", {"coherence", "nc1"}),
    ],
)
def test_published_files(main, checkpoint, shared_data, tmp_path, family, data, kind, has):
    source = shared_data / data
    if data == "cifar10":
        with zipfile.ZipFile(source / "cifar10_images.zip") as archive:
            archive.extractall(
                tmp_path / data, [name for name in archive.namelist() if "test/" in name and "/000" in name]
            )
        source = tmp_path / data
    command = ["measure", checkpoint(family), "--data", source, "--output", tmp_path / "out"]
    outcome = main(*command, "--max-sequences", 20, "--truncate")
    assert outcome.code == 0, outcome.err
    results = Results.load(tmp_path / "out")
    assert results.meta["data"]["kind"] == kind
    assert results.meta["data"]["sequences"] == 20
    assert set(results.table.measure) >= has | {"displacement", "cka", "cosine", "norm_ratio", "renyi_entropy"}
