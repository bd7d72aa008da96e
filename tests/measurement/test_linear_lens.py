"""The linear lens against scikit-learn's ridge and a plain loop over stock transformers; what it is fitted on."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose
from sklearn.linear_model import Ridge
from torch import nn

import tiny_models
from data.conftest import jsonl
from fulldepth.core.progress import Watcher
from fulldepth.data import open_source, prepare
from fulldepth.measurement import lens, linear_lens, measure
from fulldepth.measurement.effects import EffectPass
from fulldepth.metrics.linear_lens import STRENGTHS
from fulldepth.reporting.page import render
from fulldepth.results import PAGE, Results
from golden import tables
from measurement import causes, oracle
from refusals import refused

PLAIN = ["lens_accuracy", "lens_loss"]
LINEAR = ["linear_lens_accuracy", "linear_lens_loss"]
LENGTH = 48
WIDTH = 32


@pytest.fixture(scope="module")
def pages(corpus):
    """Sixty texts of 400 characters."""
    return [corpus[n : n + 400] for n in range(0, 24000, 400)]


@pytest.fixture
def fitted(monkeypatch):
    """The sequences of every fit as tuples of ids, and which of them chose the ridge."""
    calls = []
    choosing = linear_lens.choosing

    def watched(sequences, seed):
        held_out = choosing(sequences, seed)
        calls.append(([tuple(example.input_ids.tolist()) for example in sequences.examples], held_out))
        return held_out

    monkeypatch.setattr(linear_lens, "choosing", watched)
    return calls


def numbers(results, measure, statistic):
    """A statistic by layer, from the first."""
    return results.values(measure, statistic).to_numpy(np.float64)


def stock(folder):
    return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def states_of(model, sequences):
    """[L+1, N, D] stream of stock transformers at every token but the last of each sequence, run one by one."""
    parts = [oracle.taps(model, "model.layers", {"input_ids": torch.tensor([ids])})[0][:, 0, :-1] for ids in sequences]
    return np.concatenate(parts, axis=1)


def test_numbers_are_those_of_scikit_learn_and_a_plain_loop(trained, tokenizer, pages, fitted, tmp_path):
    measured = [text[: 60 + 7 * n] for n, text in enumerate(pages[:12])]
    other = [text[: 90 + 5 * n] for n, text in enumerate(pages[12:50])]
    fit = tmp_path / "fit.jsonl"
    jsonl(fit, *({"text": text} for text in other))
    results = measure(
        trained, measured, measures=PLAIN + LINEAR, fit=str(fit), one_per_row=True, sequence_length=LENGTH,
        lens_tokens=None, dtype="float64", tokenizer=tokenizer, batch_size=5,
    )  # fmt: skip
    ((sequences, held_out),) = fitted
    ids = [tuple(tokenizer(text)["input_ids"][:LENGTH]) for text in other]
    assert set(sequences) <= set(ids)
    model = stock(trained)
    read = [tokenizer(text)["input_ids"][:LENGTH] for text in measured]
    entry = results.meta["linear_lens"]
    assert (entry["data"]["name"], entry["data"]["documents"]) == ("fit.jsonl", len(sequences))
    choosers = np.repeat(held_out, [len(sequence) - 1 for sequence in sequences])  # [N]
    assert entry["held_out"] == {"clusters": int(held_out.sum()), "positions": int(choosers.sum())}
    assert entry["positions"] == len(choosers) >= 5 * WIDTH
    train, test = states_of(model, sequences), states_of(model, read)
    targets = torch.tensor([token for ids in read for token in ids[1:]])
    depth = len(train) - 1
    for layer in range(depth + 1):
        mapped = test[layer]
        if layer < depth:
            x, y = train[layer], train[-1]
            alphas = [np.square(x[~choosers] - x[~choosers].mean(0)).sum() / WIDTH * s for s in STRENGTHS]
            tried = [Ridge(alpha, solver="svd").fit(x[~choosers], y[~choosers]) for alpha in alphas]
            errors = [np.square(fit.predict(x[choosers]) - y[choosers]).sum() for fit in tried]
            strength = STRENGTHS[int(np.argmin(errors))]
            alpha = strength * np.square(x - x.mean(0)).sum() / WIDTH
            assert entry["ridge_strength"][layer] == strength
            assert_allclose(entry["ridge"][layer], alpha, rtol=1e-8)
            spread = np.square(y[choosers] - y[~choosers].mean(0)).sum()
            assert_allclose(entry["unexplained"][layer], min(errors) / spread, rtol=1e-8)
            mapped = Ridge(alpha, solver="svd").fit(x, y).predict(mapped)
        for states, (accuracy, loss) in ((test[layer], PLAIN), (mapped, LINEAR)):
            with torch.no_grad():
                logits = model.lm_head(model.model.norm(torch.from_numpy(states)))
            right = [int(row.argmax()) == target for row, target in zip(logits, targets.tolist(), strict=True)]
            lost = [-float(row.log_softmax(0)[target]) for row, target in zip(logits, targets.tolist(), strict=True)]
            assert_allclose(numbers(results, accuracy, "mean")[layer], sum(right) / len(right), rtol=1e-12)
            assert_allclose(numbers(results, loss, "mean")[layer], sum(lost) / len(lost), rtol=1e-8)
    for plain, linear, sign in zip(PLAIN, LINEAR, (1, -1), strict=True):
        gain = sign * (numbers(results, linear, "mean") - numbers(results, plain, "mean"))
        assert gain[-1] == 0  # the last layer is read as it is
        assert_allclose(numbers(results, linear, "gain"), gain, rtol=1e-9, atol=1e-12)
        early = results.table[(results.table.measure == linear) & (results.table.statistic == "gain_of_early_layers")]
        assert_allclose(early.value.item(), gain[1 : depth // 2 + 1].mean(), rtol=1e-9)


class Turn(nn.Module):
    """A layer that rotates the stream."""

    attention_type = "full_attention"

    def __init__(self, rotation):
        super().__init__()
        self.rotation = nn.Parameter(rotation)

    def forward(self, hidden_states, *_, **__):
        return hidden_states @ self.rotation


def test_a_rotated_stream_is_known_to_the_linear_lens_and_not_to_the_plain_one(tokenizer, corpus):
    """Layers 3 to 8 hold the same states, each in another basis, so that a map from any gives the last one's."""
    model = tables.learnt(torch.float32, 1500)
    normal = torch.Generator().manual_seed(0)
    turns = [torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=normal))[0] for _ in range(5)]
    gain = model.model.norm.weight.data.clone()
    whole = torch.linalg.multi_dot(turns)
    head = model.lm_head.weight.data
    model.lm_head.weight.data = (head * gain) @ whole
    model.model.norm.weight.data.fill_(1.0)
    model.model.layers.extend(map(Turn, turns))
    model.config.num_hidden_layers = len(model.model.layers)
    results = measure(
        model, [corpus[n : n + 100] for n in range(0, 1500, 100)], tokenizer=tokenizer, measures=PLAIN + LINEAR,
        fit="corpus:builtin", sequence_length=LENGTH, one_per_row=True, lens_tokens=None,
    )  # fmt: skip
    plain, linear = (numbers(results, measure, "mean") for measure in (PLAIN[1], LINEAR[1]))
    assert_allclose(linear[3:], plain[-1], rtol=1e-3)
    assert (plain[3:-1] > plain[-1] + 1).all()
    finding = results.headline["linear_lens_gain"]
    assert finding["value"] > 2 * finding["standard_error"]
    assert finding["sentence"].startswith("Early layers (1 to 4) know")


def test_fits_on_documents_that_are_not_read_whatever_their_order(trained, tokenizer, pages, fitted, tmp_path):
    """Copies of measured texts are not fitted on either; the texts are few, so that all of them are opened."""
    rows = [{"text": text} for text in pages] + [{"text": text} for text in pages[:30]]
    hashes = []
    for name, seed in (("one", None), ("other", 1)):
        path = tmp_path / name / "pages.jsonl"
        path.parent.mkdir()
        random.Random(seed).shuffle(rows) if seed else None
        jsonl(path, *rows)
        results = measure(trained, path, measures=LINEAR, max_sequences=24, sequence_length=LENGTH, lens_tokens=None)
        sequences, held_out = fitted[-1]
        (of_ridge,) = {frozenset(ids for ids, chosen in zip(sequences, held_out, strict=True) if chosen)}
        hashes.append((frozenset(sequences), of_ridge, numbers(results, LINEAR[1], "mean").round(9).tolist()))
        assert results.meta["linear_lens"]["data"]["name"] == "pages.jsonl"
    assert hashes[0] == hashes[1]
    with_texts = {text: tokenizer(text)["input_ids"] for text in pages}

    def documents(ids):
        """The pages that hold these ids."""
        needle = f",{','.join(map(str, ids))},"
        return {text for text, whole in with_texts.items() if needle in f",{','.join(map(str, whole))},"}

    fit_on = set().union(*(documents(ids) for ids in hashes[0][0]))
    source = open_source(str(path), limit=24, window=LENGTH)
    read = prepare(source, task="causal-lm", tokenizer=tokenizer, max_sequences=24, sequence_length=LENGTH)
    measured_texts = set().union(*(documents(example.input_ids.tolist()) for example in read.examples))
    assert len(read) == 24
    assert fit_on
    assert measured_texts
    assert not fit_on & measured_texts


def test_too_little_text(trained, pages, tmp_path, checkpoint):
    short = tmp_path / "short.jsonl"
    jsonl(short, {"text": pages[30][:20]}, {"text": pages[31][:20]})
    options = {"measures": LINEAR, "sequence_length": LENGTH}
    with refused("all 12 documents of texts are measured", "fit"):
        measure(trained, pages[:12], **options)
    with refused("takes 32 positions at least", "160 for good maps", "sequences like these would suffice"):
        measure(trained, pages[:12], fit=str(short), one_per_row=True, **options)
    three = tmp_path / "three.jsonl"
    jsonl(three, *({"text": text} for text in pages[50:53]))
    one = tmp_path / "one.jsonl"
    jsonl(one, {"text": pages[40] + pages[41]})
    with refused("leaves one"):
        measure(trained, pages[:12], fit=str(one), **options)
    few = measure(trained, pages[:12], fit=str(three), one_per_row=True, **options)
    (warning,) = [line for line in few.meta["warnings"] if "linear lens" in line]
    assert f"rests on {3 * (LENGTH - 1)} positions, fewer than 5 for each of 32 channels (160)" in warning
    with refused("--fit has no effect without linear_lens_accuracy or linear_lens_loss"):
        measure(trained, pages[:12], measures=PLAIN, fit="corpus:builtin")
    with refused("linear_lens_loss was asked for but cannot be measured", "predicts one class"):
        labelled = [{"text": text[:40], "label": n % 2} for n, text in enumerate(pages[:6])]
        measure(checkpoint("bert-classifier"), labelled, measures=LINEAR[1:])


def test_too_little_text_is_refused_before_layers_are_removed(trained, pages, monkeypatch):
    monkeypatch.setattr(EffectPass, "run", lambda *_: pytest.fail("removed layers"))
    with refused("all 12 documents of texts are measured"):
        measure(trained, pages[:12], measures=["layer_effect", *LINEAR], sequence_length=LENGTH)


@pytest.mark.parametrize("named", [True, False])
def test_results_for_another_text_to_fit_on_are_not_taken(named, trained, pages, tmp_path):
    """A file in a subfolder of `--fit`, or rows of the data beside those that are measured."""
    folder = tmp_path / "fit" / "sub"
    folder.mkdir(parents=True)
    data = jsonl(tmp_path / "data.jsonl", *({"text": text} for text in pages[:30]))
    settings = {"measures": LINEAR[1:], "max_sequences": 6, "sequence_length": LENGTH, "one_per_row": True}
    settings |= {"order": "first", "output": tmp_path / "out", "progress": False}
    for texts in (pages[30:50], pages[30:50], pages[40:60]):
        if named:
            jsonl(folder / "a.jsonl", *({"text": text} for text in texts))
        else:
            jsonl(data, *({"text": text} for text in [*pages[:6], *texts]))
        fit = {"fit": str(tmp_path / "fit")} if named else {}
        changed = refused("have changed", "--overwrite") if texts == pages[40:60] else nullcontext()
        with changed:
            measure(trained, str(data), **settings, **fit)


def test_generated_steps_are_read_as_in_the_whole_text(trained, tokenizer):
    """The columns that predicted the new tokens, by maps that are fitted on the same text."""
    steps = 5
    options = {"linear": True, "top_k": 2, "fit": "corpus:builtin", "fit_sequences": 6}
    generated = lens(trained, "the cat sat on the mat", generate=steps, **options)
    (sample,) = generated.meta["lens_grid"]["samples"]
    ids = tokenizer("the cat sat on the mat")["input_ids"]
    model = stock(trained)
    for _ in range(steps):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    text = tokenizer.decode(ids)
    assert tokenizer(text)["input_ids"] == ids
    (whole,) = lens(trained, text, **options).meta["lens_grid"]["samples"]
    columns = slice(len(ids) - 1 - steps, -1)
    assert sample["grid"] == [row[columns] for row in whole["grid"]]
    for results, said in ((generated, True), (lens(trained, text), False)):
        assert ("Linear lens: the states of each layer" in render(results.table, results.meta)) is said
    assert sample["targets"] == [tokenizer.decode([token]) for token in ids[-steps:]]


def test_a_text_of_one_token_is_shown(trained, tokenizer):
    """No position has a target, so nothing can be measured; the columns are those of the token in a longer text."""
    (first,) = tokenizer("t")["input_ids"]
    longer = "t sat"
    assert tokenizer(longer)["input_ids"][0] == first
    options = {"linear": True, "top_k": 2, "fit": "corpus:builtin", "fit_sequences": 6}
    alone, beside = (lens(trained, text, **options).meta["lens_grid"]["samples"][0] for text in ("t", longer))
    assert alone["targets"] == [""]
    assert alone["grid"] == [row[:1] for row in beside["grid"]]


def test_is_measured_only_by_name(trained, pages):
    table = measure(trained, pages[:6], sequence_length=LENGTH).table
    assert not table.measure.str.startswith("linear").any()


def t5(tokenizer):
    """A tiny T5 in float64."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = tf.T5Config(**sizes, pad_token_id=0, eos_token_id=0, decoder_start_token_id=0)
    return tiny_models.shaken(tf.T5ForConditionalGeneration(config)).double().eval()


@pytest.mark.parametrize("kind", ["masked", "decoder"])
@torch.no_grad()
def test_masked_tokens_and_targets_of_a_decoder(kind, checkpoint, tokenizer, bert_tokenizer, pages, monkeypatch):
    """scikit-learn's ridge on stock states at the predicted tokens; a mapped state is read in place of the last one."""
    read = []

    def watched(subject, settings, prepared=linear_lens.fitting_sequences):
        read[:] = [subject.sequences.examples, prepared(subject, settings).examples]
        return prepared(subject, settings)

    monkeypatch.setattr(linear_lens, "fitting_sequences", watched)
    if kind == "masked":
        model = tf.BertForMaskedLM.from_pretrained(checkpoint("bert"), dtype=torch.float64).eval()
        data, blocks, own = [text[:120] for text in pages], "bert.encoder.layer", bert_tokenizer
    else:
        model, blocks, own = t5(tokenizer), "decoder.block", tokenizer
        data = [{"input": text[:60], "target": text[60:140]} for text in pages]
    results = measure(
        model, data, tokenizer=own, measures=PLAIN + LINEAR, max_sequences=8, lens_tokens=None, batch_size=3,
        fit_sequences=52,
    )  # fmt: skip

    def inputs(example):
        if kind == "masked":
            return {"input_ids": example.masked_ids[None]}
        return {"input_ids": example.encoder_ids[None], "labels": example.labels[None]}

    def states(example):  # [L+1, N, D]
        return oracle.taps(model, blocks, inputs(example))[0][:, 0, example.labels != -100]

    def losses(example, last):  # [N]
        known = example.labels != -100

        def replaced(_, args, output):
            states = causes.first(output).clone()
            states[0, known] = torch.from_numpy(last)
            return causes.with_first(output, states)

        with causes.hooked(model.get_submodule(blocks)[-1].register_forward_hook(replaced)):
            logits = model(**inputs(example)).logits[0, known]
        return nn.functional.cross_entropy(logits, example.labels[known], reduction="none").numpy()

    measured, fitted = read
    known = np.concatenate([states(example) for example in fitted], axis=1)
    entry = results.meta["linear_lens"]
    assert entry["positions"] == known.shape[1] >= 5 * WIDTH
    for layer, ridge in enumerate([*entry["ridge"], None]):
        plain = [states(example)[layer] for example in measured]
        fit = None if ridge is None else Ridge(ridge, solver="cholesky").fit(known[layer], known[-1])
        mapped = plain if fit is None else [fit.predict(of_example) for of_example in plain]
        for name, lasts in ((PLAIN[1], plain), (LINEAR[1], mapped)):
            expected = np.concatenate([losses(*pair) for pair in zip(measured, lasts, strict=True)]).mean()
            assert_allclose(numbers(results, name, "mean")[layer], expected, rtol=3e-6)


def test_rows_of_pairs_are_fitted_on_other_rows(trained, pages, fitted):
    """Of rows as many are opened as are measured, so that more are opened to fit on."""
    rows = [{"prompt": text[:20], "response": text[20:60]} for text in pages]
    results = measure(trained, rows, measures=LINEAR, max_sequences=8, lens_tokens=None)
    assert results.meta["data"]["sequences"] == 8
    entry = results.meta["linear_lens"]
    assert entry["data"]["sequences"] <= len(rows) - 8
    assert entry["positions"] >= 20 * WIDTH
    assert len(set(fitted[0][0])) == entry["data"]["sequences"]


def test_bfloat16(trained, pages):
    whole, half = (
        measure(trained, pages[:12], measures=LINEAR, fit="corpus:builtin", sequence_length=LENGTH, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    assert_allclose(numbers(half, LINEAR[1], "mean"), numbers(whole, LINEAR[1], "mean"), atol=0.05)


def test_every_checkpoint_of_a_series_has_maps_of_its_own(checkpoint, pages, tmp_path):
    run = tmp_path / "run"
    for step in (1, 2):
        shutil.copytree(checkpoint("llama", step), run / f"checkpoint-{step}")
    data, fit = tmp_path / "pages.jsonl", tmp_path / "fit.jsonl"
    jsonl(data, *({"text": text} for text in pages[:12]))
    jsonl(fit, *({"text": text} for text in pages[12:]))
    options = {"measures": LINEAR, "fit": str(fit), "sequence_length": LENGTH}
    series = measure(run, data, output=tmp_path / "out", **options)
    for step in (1, 2):
        alone = measure(run / f"checkpoint-{step}", data, **options)
        rows = series.table[series.table.step == step].drop(columns="step").reset_index(drop=True)
        assert_allclose(rows.value, alone.table.value)
        stored = Results.load(tmp_path / "out" / "steps" / f"checkpoint-{step}").meta["linear_lens"]
        assert stored == alone.meta["linear_lens"]
    with fit.open("a") as file:
        file.write(json.dumps({"text": pages[0]}) + "\n")
    with refused("holds the results of another run"):
        measure(run, data, output=tmp_path / "out", **options)


def test_layers_in_groups_give_the_same(trained, pages, monkeypatch):
    options = {"measures": LINEAR, "fit": "corpus:builtin", "sequence_length": LENGTH, "dtype": "float64"}
    said = []
    whole = measure(trained, pages[:6], **options)
    monkeypatch.setattr(linear_lens, "available_memory", lambda _: (4 * 4 + 3) * WIDTH**2 * 8)
    parts = measure(trained, pages[:6], watcher=Watcher(say=said.append), **options)
    assert any("2 layers at a time, in 2 passes" in line for line in said)
    for name in LINEAR:
        assert_allclose(numbers(parts, name, "mean"), numbers(whole, name, "mean"), rtol=1e-12)
    monkeypatch.setattr(linear_lens, "available_memory", lambda _: 1000)
    with refused("the maps of 3 layers take"):
        measure(trained, pages[:6], **options)


def test_page_shows_both_lenses_and_says_what_it_was_fitted_on(trained, pages, tmp_path):
    results = measure(
        trained, pages[:12], measures=PLAIN + LINEAR, fit="corpus:builtin", sequence_length=LENGTH,
        output=tmp_path / "out",
    )  # fmt: skip
    again = Results.load(tmp_path / "out")
    for name, values in (("lens_accuracy", LINEAR[0]), ("lens_loss", LINEAR[1])):
        _, linear = [trace for trace in again.figures()[name].data if trace.y is not None][:2]
        assert linear.name == "Linear lens"
        assert_allclose(linear.y, numbers(results, values, "mean"))
    assert "fitted on" in (tmp_path / "out" / PAGE).read_text()
    assert results.headline["linear_lens_gain"]["sentence"] in (tmp_path / "out" / PAGE).read_text()


def test_command(trained, main, tmp_path):
    text = "the cat sat on the mat"
    code, shown, said = main("lens", trained, text, "--linear", "--top-k", 2, "--json")
    rows = json.loads(shown)
    linear, plain = (lens(trained, text, top_k=2, linear=choice).lens() for choice in (True, False))
    assert (code, rows) == (0, linear.to_dict("records"))
    assert "corpus:builtin/train that are not measured" in said
    depth = int(plain.layer.max())
    assert linear[linear.layer == depth].equals(plain[plain.layer == depth])
    assert not linear[linear.layer == 0].equals(plain[plain.layer == 0])
    code, _, said = main("lens", trained, text, "--fit", "corpus:builtin")
    assert code == 2
    assert "--fit has no effect without --linear" in said
    code, _, said = main("lens", trained, text, "--linear", "--fit", tmp_path / "missing.txt")
    assert code == 2
    assert "There is no file or folder" in said
    data = ["--data", "corpus:builtin", "--max-sequences", 4, "--set", f"sequence_length={LENGTH}"]
    named = ["--measures", ",".join(PLAIN + LINEAR), "--fit", "corpus:builtin", "--output", tmp_path / "out"]
    code, shown, said = main("measure", trained, *data, *named)
    assert code == 0
    assert "of corpus:builtin/train that are not measured" in said
    assert "early layers (1)" in " ".join(shown.lower().split())
