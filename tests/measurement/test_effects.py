"""`layer_effect`: which models and sequences have it, what it costs. Its numbers: `test_causes_oracle`."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose
from transformers import BertForSequenceClassification, BertModel

import fulldepth
import tiny_models
from families import zoo
from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from golden import tables
from measurement import causes
from refusals import refused

LENGTH = 28
LLAMA = causes.FAMILIES["llama"]


@pytest.fixture(scope="module")
def texts(corpus):
    """Texts of very different lengths: of 2, 6, 9 and more tokens, so that batches hold padding."""
    ends = [3, 14, 40, 70, 33, 90, 61, 80]
    starts = np.cumsum([0, *ends])
    return [corpus[start : start + size].strip() + "." for start, size in zip(starts, ends, strict=False)]


def stock(name):
    """A tiny model in float64 with the vocabulary of the tokenizer."""
    model = tiny_models.build(name, 0, torch.float64)
    model.resize_token_embeddings(len(tables.tokenizer()), mean_resizing=False)
    return model.eval()


def measured(model, texts, **settings):
    """The results of `layer_effect`, one sequence for each text."""
    options = {"sequence_length": LENGTH, "one_per_row": True, "order": "first", "batch_size": 3, **settings}
    return fulldepth.measure(model, texts, tokenizer=tables.tokenizer(), measures=["layer_effect"], **options)


def tokens_of(texts):
    """Token ids of each text, cut at the sequence length."""
    return [tables.tokenizer()(text)["input_ids"][:LENGTH] for text in texts]


def test_a_sample_of_effects_is_told_also_where_the_policy_counts_means(texts):
    """The policy counts 8 means, fewer than the sample holds; effects are of single tokens."""
    sampling = measured(stock("llama"), texts, token_policy="mean", reservoir_tokens=20).meta["sampling"]
    number = sum(map(len, tokens_of(texts)))
    assert number > 20
    assert f"the 90 % quantile of layer_effect reads 20 of {number} tokens" in sampling["sentence"]


def test_a_model_of_one_layer_has_no_later_layer(texts):
    config = stock("llama").config
    config.num_hidden_layers = 1
    model = type(stock("llama"))(config).double().eval()
    results = measured(model, texts, effect_parts="layer,attention")
    for part in ("layer", "attention"):
        losses = []
        for ids in tokens_of(texts):
            whole, without = causes.run(model, LLAMA, ids), causes.run(model, LLAMA, ids, part, 1, 1, len(ids))
            *_, added = causes.changes(whole, without, ids)
            losses += added.tolist()
        (found,) = results.values("layer_effect", "loss_added", site=part)
        assert found == pytest.approx(np.mean(losses), rel=1e-8)
    assert not {"mean_all", "later_all"} & {*results.table.statistic}


def test_quantiles_are_of_all_tokens_also_where_other_measures_read_means(texts):
    model = stock("llama")
    kept = [measured(model, texts, exact=True, token_policy=policy).table for policy in ("no-first", "mean")]
    one, other = (table[table.statistic == "q90_all"].value.to_numpy() for table in kept)
    assert_allclose(one, other, rtol=1e-9)


def test_a_bidirectional_model_has_no_later_tokens():
    model = zoo.build("xlnet", "causal-lm")
    model.resize_token_embeddings(len(tables.tokenizer()), mean_resizing=False)
    with refused("layer_effect was asked for", "reads later tokens"):
        measured(model, ["the cat sat on the mat"] * 4)


def test_the_first_token_alone_has_effects_only_where_parts_are_removed_at_it(texts):
    """The token policy cls: of a single token only the removal at this token can be read."""
    model = stock("llama")
    results = measured(model, texts, token_policy="cls")
    assert set(results.table.statistic) == {"loss_added", "standard_error_of_loss_added"}
    said = {entry["measure"]: entry["reason"] for entry in results.meta["left_out"]}
    assert "set effect_first=true" in said["layer_effect (all)"]
    assert "no token precedes it" in said["layer_effect (future)"]
    results = measured(model, texts, token_policy="cls", effect_first=True)
    divergence = results.values("layer_effect", "divergence_all").to_numpy()
    assert [entry["measure"] for entry in results.meta["left_out"]] == ["layer_effect (future)"]
    for layer, value in enumerate(divergence, start=1):
        gaps = []
        for ids in tokens_of(texts):
            whole, without = causes.run(model, LLAMA, ids), causes.run(model, LLAMA, ids, "layer", layer, 0, len(ids))
            _, gap, _, _ = causes.changes(whole, without, ids)
            gaps.append(gap[0])
        assert value == pytest.approx(np.mean(gaps), rel=1e-7)


def test_effects_do_not_depend_on_batches_and_drawn_positions_are_a_part_of_all(texts):
    model = stock("gpt2")
    tables_by_size = [
        measured(model, texts, batch_size=size, effect_positions=2, effect_parts="layer,mlp").table for size in (1, 8)
    ]
    one, other = tables_by_size
    pd.testing.assert_frame_equal(one.drop(columns="value"), other.drop(columns="value"))
    assert_allclose(one.value, other.value, rtol=1e-9, atol=1e-12)
    drawn = one[(one.statistic == "mean_future") & (one.site == "layer")]["count"].unique()
    lengths = [len(ids) for ids in tokens_of(texts)]
    assert len(drawn) == 1
    assert sum(n - 8 for n in lengths if 8 < n <= 24) <= drawn[0] <= sum((n - 8) + (n - 16) for n in lengths if n > 8)


def test_models_whose_layers_are_not_run_one_by_one_take_whole_passes(texts):
    said = []
    model = stock("depth_llama-tree")
    results = measured(model, texts, effect_parts="layer", watcher=Watcher(say=said.append), effect_positions=1)
    assert any("each removal is a whole pass" in line for line in said)
    changes = results.table[results.table.statistic == "mean_all"]
    assert len(changes) == 3
    assert (changes.value > 0).all()


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_encoders_are_refused(name, texts, checkpoint, picture_folder):
    data = picture_folder if name == "vit" else texts
    with pytest.raises(FulldepthError, match=r"layer_effect was asked for but cannot be measured: .* is an encoder"):
        fulldepth.measure(checkpoint(name), data, measures=["layer_effect"])


@pytest.mark.parametrize("kind", [BertModel, BertForSequenceClassification])
@pytest.mark.parametrize("part", ["layer", "attention"])
def test_encoders_that_predict_no_tokens_are_refused_whatever_is_removed(kind, part, texts):
    model = kind(stock("bert").config).eval()
    with refused("layer_effect was asked for but cannot be measured: .* is an encoder"):
        measured(model, texts, effect_parts=part)


def test_a_model_whose_branches_are_not_proven_is_refused(texts):
    with pytest.raises(FulldepthError, match="attention and MLP are not known"):
        measured(stock("llama"), texts, anatomy={"blocks": "layers", "final_norm": "norm"}, effect_parts=["attention"])


def test_the_measure_is_left_out_unless_it_is_named(texts):
    results = fulldepth.measure(stock("llama"), texts, tokenizer=tables.tokenizer(), sequence_length=16)
    assert "layer_effect" not in set(results.table.measure)
    assert not any("layer_effect" in entry["measure"] for entry in results.meta["left_out"])


def test_short_sequences_have_no_effects_on_later_tokens(texts):
    results = measured(stock("llama"), texts, sequence_length=8)
    assert not results.table.statistic.str.endswith("_future").any()
    assert {"measure": "layer_effect (future)", "reason": "no sequence is longer than 8 tokens"} in results.meta[
        "left_out"
    ]


def test_the_cost_is_stated_before_the_progress_begins(texts):
    events = []
    watcher = Watcher(
        say=lambda line: events.append(line),
        begin=lambda title, total: events.append((title, total)),
        advance=lambda count: events.append(count),
    )
    measured(stock("llama"), texts, watcher=watcher, batch_size=8)
    cost = next(
        n for n, event in enumerate(events) if isinstance(event, str) and "forward passes over the data" in event
    )
    begun = next(n for n, event in enumerate(events) if isinstance(event, tuple) and event[0].startswith("Removing"))
    assert cost < begun
    steps = list(itertools.takewhile(lambda event: not isinstance(event, tuple), events[begun + 1 :]))
    assert sum(step for step in steps if isinstance(step, int)) == events[begun][1]


def test_a_series_of_checkpoints_is_measured_and_resumed_on_the_command_line(main, checkpoint, text_file, tmp_path):
    for step in (1, 2):
        shutil.copytree(checkpoint("llama", step), tmp_path / "run" / f"checkpoint-{step}")
    arguments = [
        "measure", tmp_path / "run", "--data", text_file, "--measures", "default,layer_effect",
        "--set", "effect_parts=attention,mlp", "--max-sequences", 4, "--sequence-length", 16,
        "--output", tmp_path / "out",
    ]  # fmt: skip
    assert main(*arguments)[0] == 0
    results = fulldepth.Results.load(tmp_path / "out")
    rows = results.table[results.table.measure == "layer_effect"]
    assert set(rows.site) == {"attention", "mlp"}
    assert rows.groupby("step").size().nunique() == 1
    assert {"effect_output", "effect_map_mlp:mean_future", "steps_effect_output"} <= results.figures().keys()
    written = (tmp_path / "out" / "steps" / "checkpoint-1" / "results.parquet").stat().st_mtime_ns
    shutil.copytree(checkpoint("llama", 3), tmp_path / "run" / "checkpoint-3")
    assert main(*arguments)[0] == 0
    assert (tmp_path / "out" / "steps" / "checkpoint-1" / "results.parquet").stat().st_mtime_ns == written
    assert set(fulldepth.Results.load(tmp_path / "out").table.step) == {1, 2, 3}
