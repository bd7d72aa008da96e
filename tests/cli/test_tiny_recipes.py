"""Every tiny recipe with every method that it takes, in smoke size: trained, measured and left early by the command."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from drawn_shapes import shapes
from fulldepth.hf import EXIT_HEADS
from fulldepth.results import Results
from fulldepth.settings import read
from json_files import read_json

SMOKE = ("steps=2", "eval_every=2", "save_every=2", "global_batch_size=4")
METHODS = ("aligned", "multi-exit")
RECIPES = {
    "tiny-vit": (
        ("cos-regularised", "jreg", *METHODS),
        "digits:builtin/test",
        ("data.validation_sequences=20",),
    ),
    "tiny-bert": (("multi-exit",), "authors/test.tsv", ("data.validation_sequences=12", "tokenizer=wordpiece:300")),
    "tiny-gpt2": (("aligned",), "authors/test.tsv", ("data.validation_sequences=12", "tokenizer=bpe:300")),
    "tiny-detr": (
        ("aligned",),
        shapes("64x6/validation"),
        (f"data.name={shapes('64x8/train')}", f"data.validation={shapes('64x6/validation')}"),
    ),
}
AUTHORS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "authors.py"))["main"]
LAYERWISE = {"detection": "average_precision"}
"""Task -> measure of every layer; of classifiers the accuracy."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "method"),
    [
        pytest.param(name, method, marks=[] if method == methods[-1] else pytest.mark.thorough)
        for name, (methods, *_) in RECIPES.items()
        for method in methods
    ],
)
def test_a_tiny_recipe_is_trained_measured_and_left_early(main, tmp_path, made_once, monkeypatch, recipe, method):
    monkeypatch.chdir(made_once("authors", lambda folder: AUTHORS(folder / "authors")))
    _, data, changes = RECIPES[recipe]
    task = read(recipe, "train")["task"]
    code, _, err = main("train", recipe, "--method", method, *SMOKE, *changes, "--output", tmp_path / "run")
    assert code == 0, err
    layerwise = LAYERWISE.get(task, "lens_accuracy")
    assert layerwise in set(Results.load(tmp_path / "run").table.measure)

    run = ("--data", data, "--max-sequences", 6, "--set", "truncate=true", "--output")
    assert main("measure", tmp_path / "run" / "checkpoint-2", *run, tmp_path / "measured")[0] == 0
    table = Results.load(tmp_path / "measured").table
    depth = int(table[table.measure == layerwise].layer.max())
    assert depth == Results.load(tmp_path / "run").meta["model"]["num_layers"]
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert (checkpoint / EXIT_HEADS).is_file() == (method == "multi-exit")
    code, _, err = main("exit", checkpoint, *run, tmp_path / "exits", "--threshold", "0.2,1", "--repeats", 1)
    if task == "detection":
        assert code == 2
        assert "DetrForObjectDetection" in err
        return
    assert code == 0, err
    exits = {row["threshold"]: row for row in read_json(tmp_path / "exits" / "results.json")["exits"]}
    assert all(sum(row["exits"]) == 6 for row in exits.values())
    assert exits[1.0]["exits"][-1] == 6
