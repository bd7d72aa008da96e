"""`fulldepth.measure(...)` from Python: no side effects on the model, and results that survive saving."""

from __future__ import annotations

import copy
import re
import subprocess
import sys

import datasets
import pandas as pd
import pytest
import torch
import transformers as tf
from scipy.stats import spearmanr

import fulldepth
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher
from fulldepth.results import Results

HEADLINE = {
    "zeta_L": "%",
    "zeta_L-1": "%",
    "last_layer_displacement": "1",
    "mean_coherence": "1",
    "median_saturation": "layers",
    "effective_depth": "layers",
    "cosine_cka_order": "1",
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


def test_other_forms_of_data_are_the_same_data(trained, ragged_texts, ragged_tsv, tmp_path):
    rows = [{"text": text, "label": label} for text, label in ragged_texts]
    frame = pd.DataFrame(rows)
    frame.to_parquet(tmp_path / "rows.parquet")
    frame.to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    forms = [ragged_tsv, rows, datasets.Dataset.from_list(rows), tmp_path / "rows.parquet", tmp_path / "rows.jsonl"]
    options = {"measures": ["displacement", "nc1"], "sequence_length": 32}
    tables = [fulldepth.measure(trained, data, **options).table for data in forms]
    for table in tables[1:]:
        pd.testing.assert_frame_equal(table, tables[0])


def test_prompts_with_responses_are_read_at_the_response(trained, tokenizer, corpus):
    pairs = [{"prompt": corpus[n : n + 20], "response": corpus[n + 20 : n + 30 + n]} for n in range(6)]
    found = fulldepth.measure(trained, pairs, sequence_length=64)
    targets = sum(len(tokenizer(pair["response"])["input_ids"]) for pair in pairs)
    assert found.meta["sampling"]["lens_targets"] == targets
    assert set(found.table[found.table.measure == "lens_loss"]["count"]) == {targets}


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


def test_dropout_is_off_while_measuring(checkpoint, text_file, tokenizer):
    model = tf.GPT2LMHeadModel.from_pretrained(checkpoint("gpt2"), attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    options = {"tokenizer": tokenizer, "max_sequences": 4, "sequence_length": 12}
    evaluated = fulldepth.measure(model.eval(), str(text_file), **options).table
    trained = fulldepth.measure(model.train(), str(text_file), **options).table
    pd.testing.assert_frame_equal(evaluated, trained)


def test_half_precision(trained, text_file, results):
    for dtype in (torch.bfloat16, "float16"):
        half = fulldepth.measure(trained, text_file, max_sequences=12, sequence_length=16, dtype=dtype)
        assert half.meta["model"]["dtype"] == str(dtype).removeprefix("torch.")
        rounded, exact = (found.values("displacement", "mean", "residual") for found in (half, results))
        assert 0 < (rounded - exact).abs().max() < 0.02


def test_headline_is_the_tables(results):
    assert {name: entry["unit"] for name, entry in results.headline.items()} == HEADLINE
    saturation = results.values("saturation", "cumulative")
    pairs = results.table.query("site == 'residual' and layer < other").set_index(["layer", "other"])
    cosine = pairs.query("measure == 'cosine' and statistic == 'mean'").value
    cka = pairs.query("measure == 'cka' and statistic == 'debiased'").value
    expected = {
        "zeta_L": results.values("jump_rate", "value")[3],
        "zeta_L-1": results.values("jump_rate", "value")[2],
        "last_layer_displacement": results.values("displacement", "mean", "residual")[3],
        "mean_coherence": results.values("coherence", "mean_corrected", "residual").dropna().mean(),
        "median_saturation": saturation[saturation >= 0.5].index[0],
        "effective_depth": results.table.set_index("statistic").value["relative_eps=0.05"],
        "cosine_cka_order": spearmanr(cosine, cka[cosine.index]).statistic,
    }
    for name, entry in results.headline.items():
        assert entry["value"] == pytest.approx(expected[name], rel=1e-12), name
        said = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", entry["sentence"])]
        nothing = entry["value"] == 0 and ": no jump." in entry["sentence"]
        assert nothing or min(abs(number - entry["value"]) for number in said) <= 0.05, entry
        assert entry["sentence"].endswith(".")


def test_deeper_models_have_every_jump(tokenizer, text_file):
    import tiny_models

    config = tf.LlamaConfig(**{**tiny_models.DECODER, "num_hidden_layers": 5, "vocab_size": len(tokenizer)})
    found = fulldepth.measure(tf.LlamaForCausalLM(config), str(text_file), tokenizer=tokenizer, max_sequences=4)
    jumps = found.values("jump_rate", "value")
    for back, name in enumerate(("zeta_L", "zeta_L-1", "zeta_L-2")):
        assert found.headline[name]["value"] == jumps[5 - back]


def test_save_and_load(results, tmp_path):
    results.save(tmp_path / "out")
    loaded = Results.load(tmp_path / "out")
    pd.testing.assert_frame_equal(loaded.table, results.table, check_exact=True)
    assert loaded.headline == results.headline
    assert set(loaded.figures()) == set(results.figures())


def test_figures_have_data(results):
    figures = results.figures()
    assert len(figures) >= 8
    for name, figure in figures.items():
        assert figure.data, name
        arrays = [getattr(trace, axis, None) for trace in figure.data for axis in ("x", "y", "z")]
        assert any(values is not None and len(values) for values in arrays), name


def test_values_names_what_there_is(results):
    with pytest.raises(FulldepthError, match="displacement mean"):
        results.values("displacement", "median")


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measures": ["displacment"]}, r"displacment.*Did you mean 'displacement'"),
        ({"max_sequence": 3}, r"max_sequence.*Did you mean.*'max_sequences'"),
        ({"token_policy": "first"}, r"tokens: got .first.*all.*no-first"),
        ({"batch_size": 0}, r"batch_size: got 0"),
        ({"max_sequences": -1}, r"max_sequences: got -1"),
        ({"seed": "x"}, r"seed: got .x."),
        ({"dtype": "float12"}, r"float12.*float16"),
        ({"device": "gpu"}, r"gpu"),
        ({"anatomy": {"blcks": "model.layers"}}, r"blcks"),
    ],
)
def test_wrong_options(trained, text_file, options, words):
    with pytest.raises(FulldepthError, match=words):
        fulldepth.measure(trained, text_file, **options)


def test_a_model_without_its_tokenizer(model, text_file, tokenizer):
    model.name_or_path = ""
    with pytest.raises(FulldepthError, match="tokenizer"):
        fulldepth.measure(model, str(text_file))
