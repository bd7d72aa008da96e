"""`fulldepth.train` takes a recipe and keywords, and writes a page."""

from __future__ import annotations

import pytest

import fulldepth
from fulldepth import reporting
from fulldepth.results import PAGE, Results
from refusals import refused
from training.conftest import sources  # noqa: F401


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sources):  # noqa: F811
    """A run of four steps with two checkpoints, made by `fulldepth.train` from a recipe and keywords."""
    folder, (text, tokenizer) = tmp_path_factory.mktemp("api"), sources
    (folder / "mine.yaml").write_text("steps: 9\nseed: 5\nmodel: {hidden_size: 16, intermediate_size: 16}\n")
    results = fulldepth.train(
        folder / "mine.yaml",
        folder / "run",
        model={"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
        tokenizer=str(tokenizer),
        steps=4,
        eval_every=2,
        save_every=2,
        global_batch_size=4,
        sequence_length=16,
        **{"data.name": str(text), "data.validation_sequences": 4, "objective.jump": 0.5},
    )
    settings = results.meta["settings"]
    assert (settings["steps"], settings["seed"], settings["objective"]["jump"]) == (4, 5, 0.5)
    assert settings["model"]["hidden_size"] == 16
    assert settings["model"]["num_hidden_layers"] == 2
    assert results.values("validation_loss", "mean").index.tolist() == [0, 2, 4]
    assert results.meta["recipe"] == "mine"
    return folder


def test_training_writes_the_page_and_refuses_a_second_run(trained):
    found = Results.load(trained / "run")
    assert (trained / "run" / PAGE).read_text() == reporting.render(found.table, found.meta)
    with refused("already holds a run"):
        fulldepth.train(trained / "mine.yaml", trained / "run")
    with refused("Unknown setting 'stepz'"):
        fulldepth.train("tiny-llama", trained / "other", stepz=3)
