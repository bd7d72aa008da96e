"""`layer_effect` against a plain loop in float64: stock models, their forward pass hooked by hand."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose

import fulldepth
import tiny_models
from families import zoo
from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from golden import tables
from refusals import refused

LENGTH = 28
PATHS = {
    "llama": ("model.layers", "self_attn", "mlp"),
    "gpt2": ("transformer.h", "attn", "mlp"),
    "gemma2": ("model.layers", "post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma3": ("model.layers", "post_attention_layernorm", "post_feedforward_layernorm"),
    "olmo2": ("model.layers", "post_attention_layernorm", "post_feedforward_layernorm"),
    "gpt_neox": ("gpt_neox.layers", "attention", "mlp"),
    "cohere": ("model.layers", "self_attn", "mlp"),
    "granite": ("model.layers", "self_attn", "mlp"),
}
"""Model -> its blocks, and in a block the modules whose outputs the block adds to the stream."""


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


@torch.no_grad()
def one_pass(model, name, ids, layer=None, part="layer", before=None, first=1):
    """[L+1, T, D] states and [T, V] logits of one sequence alone.

    The part of the 0-based layer adds nothing at the positions from `first` on and before `before` (None: all).
    """
    path, *branches = PATHS[name]
    blocks = model.get_submodule(path)
    positions = slice(first, before)
    states = {}
    hooks = []

    def of(output):
        return output[0] if isinstance(output, tuple) else output

    def keep(index):
        def hook(_, args, kwargs):
            states[index] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        return hook

    def keep_last(_, args, output):
        states[len(blocks)] = of(output)[0].clone()

    def silence(_, args, output):
        of(output)[:, positions] = 0.0
        return output

    def pass_on(_, args, kwargs, output):
        of(output)[:, positions] = (args[0] if args else kwargs["hidden_states"])[:, positions]
        return output

    if layer is not None and part == "layer":
        hooks.append(blocks[layer].register_forward_hook(pass_on, with_kwargs=True))
    elif layer is not None:
        branch = blocks[layer].get_submodule(branches[part == "mlp"])
        hooks.append(branch.register_forward_hook(silence))
    hooks += [block.register_forward_pre_hook(keep(n), with_kwargs=True) for n, block in enumerate(blocks)]
    hooks.append(blocks[-1].register_forward_hook(keep_last))
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return np.stack([states[n].numpy() for n in range(len(blocks) + 1)]), logits.numpy()


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def plain_loop(model, name, part, sequences, starts, first=1):
    """(statistic, s, l or None) -> number, from sequences run alone; `starts`: the positions t of each sequence."""
    values = {}

    def add(key, numbers):
        values.setdefault(key, []).extend(np.atleast_1d(numbers).tolist())

    for ids, of_sequence in zip(sequences, starts, strict=True):
        whole, logits = one_pass(model, name, ids)
        known = log_softmax(logits)
        layers = len(whole) - 1
        for layer, before in itertools.product(range(layers), [None, *of_sequence]):
            states, changed = one_pass(model, name, ids, layer, part, before, first)
            scope = "all" if before is None else "future"
            read = slice(first, None) if before is None else slice(before, None)
            guess = log_softmax(changed)
            for later in range(layer + 1, layers):
                update = whole[later + 1] - whole[later]
                other = states[later + 1] - states[later]
                ratio = np.sqrt(((update - other) ** 2).sum(-1)) / np.sqrt((update**2).sum(-1))
                add((scope, layer + 1, later + 1), ratio[read])
            add((f"divergence_{scope}", layer + 1), (np.exp(known) * (known - guess)).sum(-1)[read])
            gap = np.exp(known) - np.exp(guess)
            add((f"output_change_{scope}", layer + 1), np.sqrt((gap**2).sum(-1))[read])
            if before is None and len(ids) > 1:
                targets = np.arange(len(ids) - 1), np.array(ids[1:])
                add(("loss_added", layer + 1), known[targets] - guess[targets])
    numbers = {}
    for (kind, *layer), many in values.items():
        place = tuple(layer) if len(layer) == 2 else (layer[0], None)
        if kind in ("all", "future"):
            numbers[f"mean_{kind}", *place] = np.mean(many)
            numbers[f"q90_{kind}", *place] = np.quantile(many, 0.9)
            numbers[f"max_{kind}", *place] = np.max(many)
        else:
            numbers[kind, *place] = np.max(many) if kind.startswith("output") else np.mean(many)
    return numbers


def numbers_of(results, part):
    """(statistic, s, l or None) -> value of one part in the table, without errors and means over layers."""
    rows = results.table[(results.table.measure == "layer_effect") & (results.table.site == part)]
    return {
        (row.statistic, int(row.layer), None if pd.isna(row.other) else int(row.other)): row.value
        for row in rows.itertuples()
        if not row.statistic.startswith(("standard_error", "later")) and pd.notna(row.layer)
    }


def tokens_of(texts):
    """Token ids of each text, cut at the sequence length."""
    return [tables.tokenizer()(text)["input_ids"][:LENGTH] for text in texts]


CASES = [(name, part) for name in PATHS for part in ("layer", "attention", "mlp")]


@pytest.mark.parametrize(("name", "part"), CASES, ids=[f"{name}-{part}" for name, part in CASES])
def test_effects_equal_a_plain_loop_over_sequences_run_alone(name, part, texts):
    model = stock(name)
    results = measured(model, texts, effect_parts=part, effect_positions=64)
    sequences = tokens_of(texts)
    assert min(map(len, sequences)) < 9 < max(map(len, sequences))
    starts = [range(8, len(ids), 8) for ids in sequences]
    expected = plain_loop(model, name, part, sequences, starts)
    found = numbers_of(results, part)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert_allclose(found[key], value, rtol=1e-8, atol=1e-11, err_msg=str(key))
    layers = range(1, results.meta["model"]["num_layers"] + 1)
    later = [[expected["mean_future", layer, other] for other in layers[layer:]] for layer in layers[:-1]]
    suffix = "" if part == "layer" else f"_{part}"
    for headline, value in (
        ("effect_on_later", np.mean([np.mean(of_layer) for of_layer in later])),
        ("effect_on_prediction", np.mean([expected["divergence_all", layer, None] for layer in layers])),
    ):
        assert_allclose(results.headline[headline + suffix]["value"], value, rtol=1e-8)
        assert "of one layer" in results.headline[headline + suffix]["sentence"] or part == "layer"


def test_the_first_token_is_removed_on_request(texts):
    model = stock("llama")
    found = numbers_of(measured(model, texts, effect_first=True, effect_positions=64), "layer")
    sequences = tokens_of(texts)
    starts = [range(8, len(ids), 8) for ids in sequences]
    expected = plain_loop(model, "llama", "layer", sequences, starts, first=0)
    assert found.keys() == expected.keys()
    assert_allclose([found[key] for key in expected], [*expected.values()], rtol=1e-8, atol=1e-11)


def test_a_model_of_one_layer_has_no_later_layer(texts):
    config = stock("llama").config
    config.num_hidden_layers = 1
    model = type(stock("llama"))(config).double().eval()
    results = measured(model, texts, effect_parts="layer,attention")
    for part in ("layer", "attention"):
        losses = []
        for ids in tokens_of(texts):
            whole, without = (
                log_softmax(one_pass(model, "llama", ids, *removed, part=part)[1])[:-1] for removed in ((), (0,))
            )
            losses += (whole - without)[np.arange(len(ids) - 1), ids[1:]].tolist()
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
    for layer, value in enumerate(divergence):
        gaps = []
        for ids in tokens_of(texts):
            whole, without = (
                log_softmax(one_pass(model, "llama", ids, *removed, first=0)[1][0]) for removed in ((), (layer,))
            )
            gaps.append((np.exp(whole) * (whole - without)).sum())
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
