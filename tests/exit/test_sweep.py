"""`sweep` against a loop over single samples with stock transformers, in float64."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import tiny_models
from evaluation import small_world
from exit import plain
from exit.conftest import LABELS, sharpened, taught
from fulldepth import exit
from fulldepth.core.console import finish
from fulldepth.core.progress import Watcher
from fulldepth.exit.readings import Exit, read_exits
from fulldepth.exit.served import EarlyExit
from fulldepth.measurement import measure
from fulldepth.results import Results
from fulldepth.settings.exit import ExitSettings
from fulldepth.subject import Subject
from measurement import oracle
from metrics.oracle import of_ratio
from pages import DOCS
from refusals import refused
from skip.word_tokenizer import tokenizer

RULES = ["confidence", "margin", "entropy", "patience"]
THRESHOLDS = [0.3, 0.5, 0.8, 1.0]
UNTIMED = {"measured_speedup", "measured_speedup_interval", "timing", "seconds"}
VERDICTS = {"differs", "no-difference", "busy", "few-rounds"}


def check(results, samples, targets, min_layer):
    """The sweep of all rules is that of a loop over samples, each a list of logits at layers 1..L."""
    rows, left = results.meta["exits"], 0
    assert {row["rule"] for row in rows} == set(RULES)
    for row in rows:
        expected = plain.row(samples, targets, row["rule"], row["threshold"], min_layer)
        assert row["exits"] == expected["exits"], (row["rule"], row["threshold"])
        for name in ("accuracy", "loss", "agreement", "theoretical_speedup"):
            assert row[name] == pytest.approx(expected[name], rel=1e-6), (row["rule"], row["threshold"], name)
        left += sum(row["exits"][:-1])
    assert left > 0
    full = plain.row(samples, targets, "confidence", 1.0, 1)
    assert results.meta["full"]["accuracy"] == pytest.approx(full["accuracy"])
    assert results.meta["full"]["loss"] == pytest.approx(full["loss"], rel=1e-6)
    for layer in range(1, len(samples[0]) + 1):
        stopped = plain.row([[sample[layer - 1]] for sample in samples], targets, "confidence", 1.0, 1)
        assert results.values("lens_loss", "mean")[layer] == pytest.approx(stopped["loss"], rel=1e-6)
        assert results.values("lens_accuracy", "mean")[layer] == pytest.approx(stopped["accuracy"])


def by_layer(model, rows):
    """Per text, the logits of stopping after layers 1..L, from the stock model on this text alone; and targets."""
    blocks = "bert.encoder.layer" if model.config.model_type == "bert" else "transformer.h"
    found = oracle.exits(model, blocks, *(tokenizer()(row["text"], return_tensors="pt") for row in rows))
    return [logits[1:, 0].tolist() for logits in found], [LABELS.index(row["label"]) for row in rows]


@pytest.mark.parametrize(
    ("name", "side", "min_layer"),
    [("bert-classifier", "right", 1), ("gpt2-classifier", "right", 2), ("gpt2-classifier", "left", 1)],
)
def test_a_classifier_of_texts(labelled, name, side, min_layer):
    """A decoder reads the last token that is not padding, on whichever side that is."""
    model, tokens = sharpened(name, 2.0), tokenizer()
    tokens.padding_side, model.config.pad_token_id = side, tokens.pad_token_id
    options = {"rule": RULES, "threshold": THRESHOLDS, "min_layer": min_layer, "tokenizer": tokens}
    results = exit.sweep(model, labelled, batch_size=7, repeats=1, **options)
    check(results, *by_layer(model, labelled), min_layer)
    assert all(row["measured_speedup"] > 0 for row in results.meta["exits"])
    assert results.meta["full"]["seconds"] > 0


def test_samples_leave_where_they_leave_alone(labelled):
    """The run with removed samples, in a mixed batch and one by one."""
    model = sharpened("bert-classifier", 2.0)
    opening = Subject.open(model, labelled, ExitSettings(), needs={"head", "targets"}, tokenizer=tokenizer())
    with opening as subject:
        early = EarlyExit(subject)
        targets = range(len(subject.sequences))
        texts, _ = by_layer(model, labelled)
        order = [int(subject.sequences.collate([index]).sequence[0]) for index in targets]
        for rule in RULES:
            when = Exit(rule, 0.6, 1, 3)
            together = early.run(subject.sequences.collate(list(targets)).inputs, when)
            alone = [early.run(subject.sequences.collate([index]).inputs, when) for index in targets]
            assert together[1].tolist() == [int(part[1][0]) for part in alone]
            assert_close(together[0], torch.cat([part[0] for part in alone]))
            assert sorted(together[1].tolist()) == sorted(plain.leave(texts[i], rule, 0.6, 1) for i in order)


def test_the_sample_of_positions_does_not_depend_on_batches(texts):
    model = tiny_models.build("llama")
    options = {"sequence_length": 8, "tokenizer": tokenizer(), "threshold": [0.5], "prompts": 0}
    few = exit.sweep(model, texts, lens_tokens=50, batch_size=2, **options)
    again = exit.sweep(model, texts, lens_tokens=50, batch_size=5, **options)
    assert few.meta["exits"][0]["samples"] == 50
    assert few.meta["exits"][0]["exits"] == again.meta["exits"][0]["exits"]
    assert few.meta["exits"][0]["loss"] == pytest.approx(again.meta["exits"][0]["loss"], rel=1e-6)


def test_a_sample_of_positions_is_stated_in_results_on_the_page_and_on_the_console(texts, labelled, tmp_path, capsys):
    """Packed texts give windows of 8 tokens, whose last has no target."""
    model = tiny_models.build("llama")
    options = {"sequence_length": 8, "tokenizer": tokenizer(), "threshold": [0.5], "prompts": 0}
    whole = exit.sweep(model, texts, lens_tokens=None, **options)
    targets = whole.meta["data"]["tokens"] - whole.meta["data"]["sequences"]
    assert whole.meta["sampling"] == {"lens_positions": targets, "lens_targets": targets, "sentence": None}
    assert sum(whole.meta["exits"][0]["exits"]) == targets
    few = exit.sweep(model, texts, lens_tokens=50, output=tmp_path, **options)
    sampling = few.meta["sampling"]
    assert (sampling["lens_positions"], sampling["lens_targets"]) == (50, targets)
    assert f"every layer reads 50 of {targets:,} positions with a target" in sampling["sentence"]
    finish(few)
    assert sampling["sentence"] in capsys.readouterr().out
    assert sampling["sentence"] in (tmp_path / "report.html").read_text("utf-8")
    bert = sharpened("bert-classifier", 2.0)
    of_classes = exit.sweep(bert, labelled, tokenizer=tokenizer(), repeats=0, lens_tokens=3).meta["sampling"]
    assert of_classes == {"lens_positions": len(labelled), "lens_targets": len(labelled), "sentence": None}


@torch.no_grad()
def test_generation_beside_the_sweep_is_compared_with_plain_greedy(texts):
    model = sharpened("llama", 4.0)
    options = {
        "threshold": [0.1, 0.2, 0.3, 0.999999, 1.0],
        "sequence_length": 16,
        "prompts": 3,
        "max_new_tokens": 6,
        "repeats": 1,
        "order": "first",
    }
    results = exit.sweep(model, texts, tokenizer=tokenizer(), **options)
    rows = results.meta["generation"]
    assert [row["threshold"] for row in rows] == [0.2, 0.3, 0.999999]
    joined = [t for text in texts for t in (*tokenizer()(text).input_ids, 2)]
    prompts = torch.tensor([joined[start : start + 8] for start in (0, 16, 32)])
    plain = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=6, eos_token_id=95 + 1)
    for row in rows:
        assert sum(row["exits"]) == row["tokens"] == 18
        assert row["measured_speedup"] > 0
        when = {"threshold": row["threshold"], "eos_token_id": 96, "pad_token_id": 0}
        alone = exit.generate(model, prompts, torch.ones_like(prompts), max_new_tokens=6, **when)
        assert row["exits"] == alone.stats.exits
        assert row["agreement"] == pytest.approx(float((alone.sequences == plain)[:, 8:].double().mean()))
    assert rows[2]["agreement"] == 1.0
    assert min(row["agreement"] for row in rows) < 1
    assert {row[name] for row in results.meta["exits"] for name in UNTIMED} == {None}
    paragraph = (DOCS / "exit.md").read_text().split("Of a decoder, ")[1].split("\n\n")[0]
    for_decoders, keys = (set(re.findall("`([^`]+)`", part)) for part in paragraph.split("with the keys"))
    assert for_decoders - {"exits", "generation"} | {"measured_speedup_interval"} == UNTIMED
    assert keys - VERDICTS == set(rows[0])


def test_results_are_saved_and_read(labelled, tmp_path):
    model = sharpened("bert-classifier", 2.0)
    known = taught(model, labelled)
    results = exit.sweep(
        model, known, tokenizer=tokenizer(), repeats=1, target_accuracy_drop=0.2, output=tmp_path / "out"
    )
    stored = Results.load(tmp_path / "out")
    assert json.loads(json.dumps(results.meta["exits"])) == stored.meta["exits"]
    assert stored.headline.keys() == {"effective_depth", "chosen_threshold", "speedup"}
    assert stored.headline["speedup"]["value"] is None  # one round
    untimed = exit.sweep(model, known, tokenizer=tokenizer(), repeats=0, target_accuracy_drop=0.2).headline
    assert untimed.keys() == {"effective_depth", "chosen_threshold", "theoretical_speedup"}
    assert untimed["theoretical_speedup"]["sentence"].startswith("Counted, not timed: ")
    assert stored.meta["full"]["no_advice"] is None
    for split in ("calibration", "report"):
        rows = [row for row in stored.meta["exits"] if row["split"] == split]
        assert len({row["samples"] for row in rows}) == 1
        assert {row["threshold"] for row in rows} >= {0.5, 0.9, 1.0}
        assert all(row["drop_interval"][0] < row["drop"] < row["drop_interval"][1] for row in rows)
    (full,) = [row for row in rows if row["threshold"] == 1 and not row["calibrated"]]  # of the reported part
    assert stored.meta["full"]["accuracy"] == full["accuracy"]


def test_nothing_is_advised_of_a_model_at_chance(labelled, texts):
    """Random weights and labels."""
    model = sharpened("bert-classifier", 2.0)
    results = exit.sweep(model, labelled, tokenizer=tokenizer(), repeats=0, target_accuracy_drop=0.01)
    [(name, finding)] = results.headline.items()
    assert name == "accuracy"
    assert finding["sentence"].endswith("nothing is advised.")
    options = {"sequence_length": 8, "tokenizer": tokenizer(), "threshold": [0.5], "prompts": 0}
    language = exit.sweep(tiny_models.build("llama"), texts, **options)
    assert language.headline.keys() == {"accuracy"}
    half = tiny_models.build("llama", dtype=torch.float16)
    half.model.embed_tokens.weight.data.add_(100)  # finite states, whose sum is beyond float16
    assert exit.sweep(half, texts, **options).headline.keys() == {"accuracy"}
    alike = [{**row, "label": LABELS[0]} for row in labelled]
    model.classifier.weight.data.zero_()
    model.classifier.bias.data.copy_(torch.tensor([9.0] + [0.0] * (len(LABELS) - 1)))
    [finding] = exit.sweep(model, alike, tokenizer=tokenizer(), repeats=0).headline.values()
    assert (finding["value"], finding["standard_error"]) == (1.0, None)
    assert "not all answered alike" in finding["no_standard_error"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert-classifier", {}, "has no labels"),
        ("bert-bare", {}, "BertModel"),
        ("detr", {}, "DetrForObjectDetection"),
        ("llama", {"min_layer": 4}, "min_layer is 4"),
        ("llama", {"prompts": 0, "max_new_tokens": 3}, "--max-new-tokens has no effect with --set prompts=0"),
        ("regression", {}, "BertForSequenceClassification"),
    ],
)
def test_what_cannot_leave_early_is_refused(texts, name, options, message):
    model = tiny_models.build("bert-classifier" if name == "regression" else name)
    if name == "regression":
        model.config.problem_type = "regression"
    with refused(message):
        exit.sweep(model, texts, tokenizer=tokenizer(), **options)


def test_where_a_measurement_states_no_error_a_sweep_states_none(tmp_path):
    """One row holds most of the tokens: an error would be of that row alone."""
    sizes = [150, *[2] * 9]
    rows = [{"prompt": f"the sun {number}", "response": " river" * size} for number, size in enumerate(sizes)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"tokenizer": small_world.tokenizer(), "sequence_length": 1024, "progress": False}
    reason = measure(small_world.model(), path, measures=["displacement"], **options).meta["data"]["no_error"]
    assert "one row of 10 holds" in reason
    results = exit.sweep(small_world.model(), path, repeats=0, prompts=0, threshold=[0.3], **options)
    assert f"No standard errors: {reason}." in results.meta["warnings"]
    assert not (results.table.statistic == "standard_error").any()
    for entry in (*results.meta["exits"], results.meta["full"]):
        assert {value for name, value in entry.items() if name.endswith(("_stderr", "drop_interval"))} == {None}


def test_a_round_takes_the_time_of_all_batches(labelled, monkeypatch):
    """A clock that is a second later at each reading: every forward pass of one of six batches takes a second."""
    ticks = itertools.count()
    monkeypatch.setattr("fulldepth.exit.served.now", lambda device: float(next(ticks)))
    options = {"tokenizer": tokenizer(), "batch_size": 7, "repeats": 3, "threshold": [0.5]}
    results = exit.sweep(sharpened("bert-classifier", 2.0), labelled, **options)
    assert results.meta["full"]["seconds"] == 6
    assert {row["seconds"] for row in results.meta["exits"]} == {6}


def test_the_headline_states_the_best_threshold_and_what_it_saves(labelled):
    model = sharpened("bert-classifier", 2.0)
    known = taught(model, labelled * 5)
    results = exit.sweep(model, known, tokenizer=tokenizer(), repeats=0, threshold=[0.35, 0.4, 0.5, 0.7, 0.9, 0.99])
    entries = [entry for entry in results.meta["exits"] if entry["threshold"] < 1]
    good = [entry for entry in entries if entry["drop_interval"][1] <= 0.01]
    chosen = results.headline["theoretical_speedup"]["value"]
    if good:
        best = max(good, key=lambda entry: entry["theoretical_speedup"])
        assert results.headline["best_threshold"]["value"] == best["threshold"]
    else:  # the one that loses least by its layers
        best = min(entries, key=lambda entry: entry["theoretical_speedup"])
        assert results.headline["best_threshold"]["value"] is None
    assert chosen == pytest.approx(best["theoretical_speedup"])
    layers = np.repeat(np.arange(1, 4), best["exits"])
    assert (
        f"samples leave after {layers.mean():.1f} of 3 layers on average"
        in results.headline["best_threshold"]["sentence"]
    )


def test_errors_are_over_documents(texts):
    """Windows of one document are one observation: the formula for a ratio of sums over documents, in a loop."""
    options = {"sequence_length": 8, "threshold": [0.3], "prompts": 0, "lens_tokens": None}
    model = sharpened("llama", 4.0)
    results = exit.sweep(model, texts, tokenizer=tokenizer(), **options)
    settings = ExitSettings(**options)
    with Subject.open(model, texts, settings, needs={"head", "targets"}, tokenizer=tokenizer()) as subject:
        read = read_exits(subject, settings.rule, settings, Watcher())
        documents = np.array(subject.sequences.clusters)
    owner = documents[read.sequence.numpy()]
    assert len(set(documents.tolist())) < len(documents), "documents of several windows"
    for layer in range(read.num_layers + 1):
        for name, values in (("lens_loss", read.loss[layer]), ("lens_accuracy", read.correct[layer].double())):
            stated = results.values(name, "standard_error")[layer]
            assert stated == pytest.approx(of_ratio(owner.tolist(), values.numpy(), np.ones(len(owner))), rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "changed", "words"),
    [
        (torch.float32, 0, None),
        (torch.float32, 1, "2.5% of the samples leave after another layer .*rule confidence, threshold 1e-09"),
        (torch.bfloat16, 2, None),
        (torch.bfloat16, 3, "7.5% of the samples leave after another layer"),
    ],
)
def test_few_samples_may_leave_elsewhere_when_they_are_timed(dtype, changed, words, labelled, monkeypatch):
    """Of 40 samples, all of which leave after the first layer: 1 % may leave elsewhere, in half precision 5 %."""
    run = EarlyExit.run

    def shifted(self, inputs, exit):
        answers, left = run(self, inputs, exit)
        left[:changed] += 1
        return answers, left

    monkeypatch.setattr(EarlyExit, "run", shifted)
    model = tiny_models.build("bert-classifier", dtype=dtype)
    options = {"tokenizer": tokenizer(), "batch_size": 40, "repeats": 1, "threshold": [1e-9]}
    if words is None:
        assert exit.sweep(model, labelled, **options).meta["exits"][0]["exits"] == [40, 0, 0]
        return
    with refused(words):
        exit.sweep(model, labelled, **options)
