"""`fulldepth.measure(...)` from Python: no side effects on the model, and results that survive saving."""

from __future__ import annotations

import copy
import re
import subprocess
import sys

import pandas as pd
import pytest
import torch
import transformers as tf

import fulldepth
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher

HEADLINE = {
    "zeta_L": "%",
    "zeta_L-1": "%",
    "last_layer_displacement": "1",
    "mean_coherence": "1",
    "median_saturation": "layers",
    "effective_depth": "layers",
}
"""With three layers there is no zeta_{L-2}: it would start at layer 1."""


@pytest.fixture
def model(trained):
    return tf.LlamaForCausalLM.from_pretrained(trained)


@pytest.fixture(scope="module")
def results(trained, text_file):
    return fulldepth.measure(trained, text_file, max_sequences=12, sequence_length=16)


def test_a_loaded_model_and_a_list_of_texts(model, tokenizer, corpus, trained, text_file):
    by_object = fulldepth.measure(model, [text_file.read_text()], tokenizer=tokenizer, sequence_length=16)
    by_name = fulldepth.measure(str(trained), str(text_file), sequence_length=16)
    pd.testing.assert_frame_equal(by_object.table, by_name.table)
    assert by_object.meta["data"]["hash"] == by_name.meta["data"]["hash"]


@pytest.mark.parametrize("training", [True, False])
def test_model_is_left_as_it_was(model, tokenizer, text_file, training):
    model.train(training)
    model.model.layers[1].train(not training)
    before = copy.deepcopy(model.state_dict())
    modes = {name: module.training for name, module in model.named_modules()}
    grads = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    kept = model.config.to_dict()
    fulldepth.measure(model, str(text_file), tokenizer=tokenizer, max_sequences=4, sequence_length=12)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == grads
    assert model.config.to_dict() == kept
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]
    assert not hooks
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()


def test_model_is_left_as_it_was_after_a_failure_too(model, tokenizer, text_file):
    model.train()
    with pytest.raises(FulldepthError, match="nc1"):
        fulldepth.measure(model, str(text_file), tokenizer=tokenizer, measures=["nc1"])
    assert model.training

    def stop(done):
        raise KeyboardInterrupt

    watcher = Watcher(advance=stop)
    with pytest.raises(KeyboardInterrupt):
        fulldepth.measure(model, str(text_file), tokenizer=tokenizer, watcher=watcher)
    assert model.training
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_headline_is_the_tables(results):
    assert {name: entry["unit"] for name, entry in results.headline.items()} == HEADLINE
    saturation = results.values("saturation", "cumulative")
    expected = {
        "zeta_L": results.values("jump_rate", "value")[3],
        "zeta_L-1": results.values("jump_rate", "value")[2],
        "last_layer_displacement": results.values("displacement", "mean", "residual")[3],
        "mean_coherence": results.values("coherence", "mean_corrected", "residual").dropna().mean(),
        "median_saturation": saturation[saturation >= 0.5].index[0],
        "effective_depth": results.table.set_index("statistic").value["relative_eps=0.05"],
    }
    for name, entry in results.headline.items():
        assert entry["value"] == pytest.approx(expected[name], rel=1e-12), name
        said = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", entry["sentence"])]
        nothing = entry["value"] == 0 and ": no jump." in entry["sentence"]
        assert nothing or min(abs(number - entry["value"]) for number in said) <= 0.05, entry
        assert entry["sentence"].endswith(".")


@pytest.mark.thorough
def test_the_public_function_is_the_same_however_it_was_imported():
    program = (
        "import fulldepth, types; first = fulldepth.measure; import fulldepth.measurement.run; "
        "from fulldepth import measure; from fulldepth.api.measuring import measure as function; "
        "assert first is measure is fulldepth.measure is function and isinstance(measure, types.FunctionType); "
        "assert fulldepth.Results and fulldepth.FulldepthError and callable(fulldepth.compare); "
        "import fulldepth.reporting; assert isinstance(fulldepth.report, types.FunctionType)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_prompts_with_responses_are_read_at_the_response(trained, tokenizer, corpus):
    pairs = [{"prompt": corpus[n : n + 20], "response": corpus[n + 20 : n + 30 + n]} for n in range(6)]
    found = fulldepth.measure(trained, pairs, sequence_length=64, measures=["lens_loss"])
    targets = sum(len(tokenizer(pair["response"])["input_ids"]) for pair in pairs)
    assert set(found.table["count"]) == {targets}
