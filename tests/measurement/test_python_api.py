"""`fulldepth.measure(...)` from Python: no side effects on the model, and a headline that is the table's."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext

import pytest
import torch
import transformers as tf
from pandas.testing import assert_frame_equal

import fulldepth
import tiny_models
from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.measurement import passes
from fulldepth.metrics import Cka
from tiny_models import same_weights


@pytest.fixture
def model(trained):
    return tf.LlamaForCausalLM.from_pretrained(trained)


def test_a_loaded_model_and_a_list_of_texts(model, tokenizer, trained, text_file):
    by_object = fulldepth.measure(model, [text_file.read_text()], tokenizer=tokenizer, sequence_length=16)
    by_name = fulldepth.measure(str(trained), str(text_file), sequence_length=16)
    assert_frame_equal(by_object.table, by_name.table)
    assert by_object.meta["data"]["hash"] == by_name.meta["data"]["hash"]


def test_a_model_of_images_that_comes_from_no_checkpoint(checkpoint, picture_folder):
    model = tiny_models.build("vit")
    assert not model.name_or_path
    tables = [fulldepth.measure(given, picture_folder).table for given in (model, checkpoint("vit"))]
    assert_frame_equal(*tables)


def test_an_optional_measure_beside_the_default_ones(trained, text_file):
    options = {"sequence_length": 16, "max_sequences": 4}
    default = fulldepth.measure(trained, text_file, **options)
    for measures in ("default,layer_effect", ["layer_effect", "default"]):
        both = fulldepth.measure(trained, text_file, measures=measures, effect_positions=1, **options)
        is_effect = both.table.measure == "layer_effect"
        assert is_effect.any()
        assert_frame_equal(both.table[~is_effect].reset_index(drop=True), default.table)
        assert [entry for entry in both.meta["left_out"] if entry["measure"] != "layer_effect (predictions)"] == (
            default.meta["left_out"]
        )


def stop(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("training", "options", "error"),
    [
        (True, {}, None),
        (False, {}, None),
        (True, {"measures": ["nc1"]}, FulldepthError),
        (True, {"watcher": Watcher(advance=stop)}, KeyboardInterrupt),
    ],
)
def test_model_is_left_as_it_was(model, tokenizer, text_file, training, options, error):
    model.train(training)
    model.model.layers[1].train(not training)

    def state():
        modes = {name: module.training for name, module in model.named_modules()}
        grads = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]
        return modes, grads, hooks, model.config.to_dict()

    before, weights = state(), copy.deepcopy(model.state_dict())
    options = {"max_sequences": 4, "sequence_length": 12, **options}
    with pytest.raises(error) if error else nullcontext():
        fulldepth.measure(model, str(text_file), tokenizer=tokenizer, **options)
    assert state() == before
    assert same_weights(model, weights)
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()


def test_headline_is_the_tables(trained, text_file):
    """With three layers there is no zeta_{L-2}: it would start at layer 1."""
    results = fulldepth.measure(trained, text_file, max_sequences=12, sequence_length=16)
    saturation = results.values("saturation", "cumulative")
    expected = {
        "zeta_L": (results.values("jump_rate", "value")[3], "%"),
        "zeta_L-1": (results.values("jump_rate", "value")[2], "%"),
        "last_layer_displacement": (results.values("displacement", "mean", "residual")[3], "1"),
        "mean_coherence": (results.values("coherence", "mean_corrected", "residual").dropna().mean(), "1"),
        "median_saturation": (saturation[saturation >= 0.5].index[0], "layers"),
        "effective_depth": (results.table.set_index("statistic").value["relative_eps=0.05"], "layers"),
    }
    assert {name: (entry["value"], entry["unit"]) for name, entry in results.headline.items()} == {
        name: (pytest.approx(value, rel=1e-12), unit) for name, (value, unit) in expected.items()
    }


@pytest.mark.parametrize("measures", [None, ["displacement"]], ids=["with a lens", "without"])
def test_bars_and_the_estimate_cover_the_whole_run(trained, text_file, monkeypatch, tmp_path, measures):
    monkeypatch.setattr(passes, "ESTIMATED", 0.0)
    monkeypatch.setattr(Cka, "forecast", lambda self: 7200.0)
    tasks, said = [], []
    watcher = Watcher(said.append, lambda *task: tasks.append([*task, []]), lambda done: tasks[-1][2].append(done))
    options = {"max_sequences": 5, "sequence_length": 16, "batch_size": 2, "measures": measures}
    results = fulldepth.measure(trained, text_file, watcher=watcher, output=tmp_path / "out", **options)
    assert all(total == sum(done) for _, total, done in tasks)
    *weights, (_, total, done), (_, statistics, steps), (_, files, _) = tasks
    layers = 1 + results.meta["model"]["num_layers"]
    assert total == 5 * layers
    assert done == ([2] * layers * 2 + [1] * layers if measures is None else [2 * layers] * 2 + [layers])
    measured = set(results.table["measure"])
    assert statistics == len(measured) + (Cka.steps - 1) * ("cka" in measured)
    assert len(steps) > len(measured) if measures is None else steps == [1]
    assert [total for _, total, _ in weights] == [n for n in [(results.table["measure"] == "spectral_norm").sum()] if n]
    assert files == len(list((tmp_path / "out").iterdir()))
    hours = 2 if measures is None else 0
    ends = rf"About {hours}:\d\d:\d\d to the end: the other 3 of 5 sequences, the statistics and the page\."
    assert re.fullmatch(ends, said[-1])
