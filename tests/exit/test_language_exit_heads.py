"""Language models with a head for every layer: every command reads layer l by the final norm and W_l.

The oracle (`language_heads.Plain`) is stock transformers in float64, one text at a time, and the matrices of the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

import fulldepth
from exit import plain
from exit.language_heads import ENCODERS, FAMILIES, HEADS, Plain, texts, write
from fulldepth.data import open_source, prepare
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.exit import Decoder, DraftPlan, export_layers, generate_texts, sweep
from fulldepth.exit.elastic import weight_bytes
from fulldepth.hf import open_model, save_exit_heads, truncated
from fulldepth.losses import Objective
from skip.word_tokenizer import tokenizer, words

LENGTH, NEW, LAYERS = 12, 8, 3
RULES = ["confidence", "margin", "entropy", "patience"]
DECODED = ["llama", "llama-tied", "gemma2", "granite", "cohere"]
TIED = ("gpt2", "llama-tied", "gemma2", "cohere")


class Case:
    """A checkpoint, its oracle, a text file, and the oracle's logits `[L, T, V]` of each window of the file."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.path, self.data = name, write(name, folder / "model"), folder / "text.txt"
        self.plain, self.tokenizer = Plain(self.path, name), str(folder / "tokenizer")
        self.data.write_text(" ".join(words(*(i - 10 for i in row)) for row in texts(self.plain, 8, LENGTH)))
        masked = name in ENCODERS
        sequences = prepare(
            open_source(self.data),
            task="masked-lm" if masked else "causal-lm",
            tokenizer=tf.AutoTokenizer.from_pretrained(self.tokenizer),
            sequence_length=LENGTH,
        )
        self.logits, self.targets = [], []
        for index in range(len(sequences)):
            batch = sequences.collate([index])
            assert batch.attention_mask is None or bool(batch.attention_mask.all())
            ids = (batch.inputs if batch.masked_inputs is None else batch.masked_inputs)["input_ids"][0].tolist()
            read = self.plain.layers(ids)
            if masked:
                assert batch.targets is not None
                target = batch.targets[0]
            else:
                read, target = read[:, :-1], torch.tensor(ids[1:])
            self.logits.append(read[:, target != -100])
            self.targets += target[target != -100].tolist()

    def decoder(self) -> Decoder:
        """In float64 but for Gemma 2, which gives NaN there with padding."""
        dtype = "float32" if self.name == "gemma2" else "float64"
        return Decoder(open_model(self.path, exit_heads=True, dtype=dtype).model)

    @property
    def samples(self) -> np.ndarray[Any, Any]:
        """[N, L, V] logits of every position with a target."""
        return torch.cat(self.logits, dim=1).transpose(0, 1).numpy()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Case] = {}

    def of(name: str) -> Case:
        if name not in made:
            made[name] = Case(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of


@pytest.mark.parametrize("name", [*FAMILIES, *ENCODERS])
def test_measure(cases: Any, name: str) -> None:
    case = cases(name)
    options = {"dtype": "float64", "sequence_length": LENGTH, "batch_size": 3, "exact": True}
    results = fulldepth.measure(
        str(case.path),
        str(case.data),
        measures=["lens_loss", "lens_accuracy", "saturation", "effective_depth"],
        **options,
    )
    samples, targets = case.samples, np.array(case.targets)
    predicted = samples.argmax(-1)  # [N, L]
    accuracy = (predicted == targets[:, None]).mean(0)
    loss = [
        -np.mean([np.log(plain.softmax(list(s[layer]))[t]) for s, t in zip(samples, targets, strict=True)])
        for layer in range(LAYERS)
    ]
    settled = np.array([next(n for n in range(LAYERS) if (row[n:] == row[-1]).all()) + 1 for row in predicted])
    for layer in range(1, LAYERS + 1):
        assert results.values("lens_accuracy", "mean")[layer] == pytest.approx(accuracy[layer - 1])
        assert results.values("lens_loss", "mean")[layer] == pytest.approx(loss[layer - 1], rel=1e-6)
        assert results.values("saturation", "count")[layer] == (settled == layer).sum()
    if name not in ENCODERS:  # whose texts are random
        depth = 1 + next(layer for layer in range(LAYERS) if accuracy[layer] >= 0.95 * accuracy[-1])
        assert results.meta["headline"]["effective_depth"]["value"] == depth
    assert results.meta["model"]["exit_heads"] == 2


@pytest.mark.parametrize("name", [*FAMILIES, *ENCODERS])
def test_exit(cases: Any, name: str) -> None:
    case = cases(name)
    samples = [[list(layer) for layer in sample] for sample in case.samples.tolist()]
    values = sorted(plain.certainty(sample[0], "confidence") for sample in samples)
    middle = len(values) // 2
    thresholds = [(values[middle - 1] + values[middle]) / 2, 0.5, 1.0]
    options = {"dtype": "float64", "sequence_length": LENGTH, "batch_size": 3, "lens_tokens": None, "prompts": 0}
    results = sweep(str(case.path), str(case.data), rule=RULES, thresholds=thresholds, **options)
    seen = [0, 0, 0]
    assert len(results.meta["exits"]) == len(RULES) * len(thresholds)
    for row in results.meta["exits"]:
        expected = plain.row(samples, case.targets, row["rule"], row["threshold"], 1)
        for key, value in expected.items():
            assert row[key] == pytest.approx(value, rel=1e-6), (row["rule"], row["threshold"], key)
        seen = [one + other for one, other in zip(seen, row["exits"], strict=True)]
    assert min(seen) > 0


def middle(case: Case, rule: str) -> float:
    """A threshold that half of the predictions of layer 1 exceed."""
    values = sorted(plain.certainty(list(sample[0]), rule) for sample in case.samples.tolist())
    return (values[len(values) // 2 - 1] + values[len(values) // 2]) / 2


def candidate_exit(layers: list[list[float]], rule: str, threshold: float, count: int) -> int:
    """The exit layer of a token where layers are read for candidates first."""
    chosen = range(len(layers[0]))
    for number, logits in enumerate(layers[:-1], start=1):
        if number > 1 and plain.certainty([logits[token] for token in chosen], rule) <= threshold:
            continue
        if plain.certainty(logits, rule) > threshold:
            return number
        chosen = sorted(range(len(logits)), key=lambda token, row=logits: -row[token])[:count]
    return len(layers)


def continued(case: Case, ids: list[int], policy: str, exit_of: Any) -> tuple[list[int], list[int]]:
    """New tokens and their exit layers, without a cache: every step runs the whole text."""
    ids, exits, prompt = list(ids), [], len(ids)
    case.plain.left = {}
    for _ in range(NEW):
        layers = case.plain.layers(ids)[:, -1].tolist()
        exits.append(exit_of(layers))
        if policy == "propagate" and len(ids) > prompt:
            case.plain.left[len(ids) - 1] = exits[-1]
        ids.append(int(np.argmax(layers[exits[-1] - 1])))
    case.plain.left = {}
    return ids[prompt:], exits


@pytest.mark.parametrize("policy", ["recompute", "propagate"])
@pytest.mark.parametrize("name", DECODED)
def test_generation_leaves_by_the_layers_own_heads(cases: Any, name: str, policy: str) -> None:
    case, ends = cases(name), {"eos_token_id": 96, "pad_token_id": 0}
    decoder = case.decoder()
    prompts, seen = [list(range(20, 29)), [60, 33, 12, 70, 41]], set()
    for rule in RULES:
        threshold = 0.4 if rule == "patience" else middle(case, rule)
        options = {"max_new_tokens": NEW, "threshold": threshold, "rule": rule, "policy": policy, **ends}
        for prompt in prompts:
            tokens, exits = continued(case, prompt, policy, lambda x, when=(rule, threshold): plain.leave(x, *when, 1))
            found = decoder.generate(torch.tensor([prompt]), **options)
            assert found.sequences[0, len(prompt) :].tolist() == tokens
            assert found.stats.exit_layers == [exits]
            seen |= {*exits}
            if rule in ("confidence", "margin"):
                chosen = continued(case, prompt, policy, lambda x, when=(rule, threshold): candidate_exit(x, *when, 4))
                found = decoder.generate(torch.tensor([prompt]), lens_candidates=4, **options)
                assert (found.sequences[0, len(prompt) :].tolist(), found.stats.exit_layers) == (chosen[0], [chosen[1]])
    assert len(seen) > 1
    for layer in (1, 2):
        tokens, _ = continued(case, prompts[0], policy, lambda _, layer=layer: layer)
        found = decoder.generate(torch.tensor(prompts[:1]), max_new_tokens=NEW, exit_layer=layer, **ends)
        assert found.sequences[0, 9:].tolist() == tokens


def speculated(case: Case, ids: list[int], early: int, length: int, new: int) -> tuple[list[int], int, int]:
    """Tokens, drafts and accepted drafts."""
    ids, prompt, drafted, accepted = list(ids), len(ids), 0, 0
    ids.append(int(case.plain.layers(ids)[-1, -1].argmax()))
    while (room := new + prompt - len(ids)) > 0:
        text = list(ids)
        for _ in range(min(length, room - 1)):
            text.append(int(case.plain.layers(text)[early - 1, -1].argmax()))
        right = case.plain.layers(text)[-1].argmax(-1).tolist()
        kept = next((n for n in range(len(ids), len(text)) if text[n] != right[n - 1]), len(text))
        drafted, accepted = drafted + len(text) - len(ids), accepted + kept - len(ids)
        ids = [*text[:kept], right[kept - 1]]
    return ids[prompt:], drafted, accepted


@pytest.mark.parametrize("name", DECODED)
def test_drafts_come_from_the_layers_own_head(cases: Any, name: str) -> None:
    case, counts = cases(name), []
    decoder = case.decoder()
    prompt = list(range(20, 29))
    for early in (1, 2):
        tokens, drafted, accepted = speculated(case, prompt, early, 3, 16)
        found = decoder.generate(
            torch.tensor([prompt]),
            max_new_tokens=16,
            speculate_from=early,
            draft_length=3,
            eos_token_id=96,
            pad_token_id=0,
        )
        assert found.sequences[0, 9:].tolist() == tokens == case.plain.greedy(prompt, 16)
        assert (found.stats.drafted, found.stats.accepted) == (drafted, accepted)
        counts.append((drafted, accepted))


@pytest.mark.parametrize("name", ["gpt2", "cohere", "bert"])
def test_a_cut_model_is_a_stock_checkpoint(cases: Any, name: str, tmp_path: Path) -> None:
    case, ids = cases(name), list(range(20, 32))
    expected, stored = case.plain.layers(ids), load_file(case.path / HEADS)
    export_layers(case.path, tmp_path / "2", export_layers=2, tokenizer=case.tokenizer)
    auto = tf.AutoModelForMaskedLM if name in ENCODERS else tf.AutoModelForCausalLM
    stock, report = auto.from_pretrained(tmp_path / "2", dtype=torch.float64, output_loading_info=True)
    assert not any(report.values())
    assert not stock.config.tie_word_embeddings
    with torch.no_grad():
        torch.testing.assert_close(stock(torch.tensor([ids])).logits[0], expected[1], rtol=1e-6, atol=1e-7)
    kept = load_file(tmp_path / "2" / HEADS)
    assert list(kept) == ["exit_heads.1.weight"]
    assert torch.equal(kept["exit_heads.1.weight"], stored["exit_heads.1.weight"])

    model = open_model(case.path, exit_heads=True, dtype="float64").model  # in memory, without a search for the head
    for layers in (1, 2, 3):
        short = truncated(model, layers)
        assert (short.get_output_embeddings().weight is short.get_input_embeddings().weight) == (
            layers == 3 and (name in TIED or name == "bert")
        )
        short.save_pretrained(tmp_path / f"short-{layers}")
        again = auto.from_pretrained(tmp_path / f"short-{layers}", dtype=torch.float64)
        for each in (short, again):
            with torch.no_grad():
                torch.testing.assert_close(
                    each(torch.tensor([ids])).logits[0], expected[layers - 1], rtol=1e-6, atol=1e-7
                )
    with torch.no_grad():  # the original is as it was
        torch.testing.assert_close(model(torch.tensor([ids])).logits[0], expected[2], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_number_of_layers_is_chosen_by_size_and_not_by_accuracy_without_an_error(
    cases: Any, name: str, tmp_path: Path
) -> None:
    case, sizes = cases(name), []
    model = open_model(case.path, exit_heads=True).model
    for layers in (1, 2, 3):
        short = truncated(model, layers)
        short.save_pretrained(tmp_path / f"{layers}")
        save_exit_heads(short, tmp_path / f"{layers}")
        files = [load_file(path) for path in (tmp_path / f"{layers}").glob("*.safetensors")]
        sizes.append(sum(tensor.nbytes for tensors in files for tensor in tensors.values()))
    assert weight_bytes(find_anatomy(model)) == sizes
    options = {"sequence_length": LENGTH, "lens_tokens": None, "dtype": "float64", "tokenizer": case.tokenizer}
    with pytest.raises(FulldepthError, match="nothing is advised"):  # one document has no standard error
        export_layers(case.path, tmp_path / "short", data=case.data, effective_depth=0.01, **options)


@pytest.mark.parametrize("name", ["gpt2", "granite", "bert"])
def test_files_and_models_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path / "model")
    heads = load_file(path / HEADS)
    one, two = sorted(heads)
    cases: dict[str, dict[str, Tensor]] = {
        r"is \[100, 32\], and the model's own output \[96, 32\]": {
            key: torch.cat([w, w[:4]]) for key, w in heads.items()
        },
        r"is \[32, 96\], and the model's own output \[96, 32\]": {key: w.T.contiguous() for key, w in heads.items()},
        r"need exit_heads, and these are for \[1\]": {one: heads[one]},
        "exit_heads.2.weight holds NaN": {one: heads[one], two: heads[two] * torch.nan},
    }
    for message, tensors in cases.items():
        save_file(tensors, path / HEADS)
        with pytest.raises(FulldepthError, match=message):
            open_model(path, exit_heads=True)
    save_file(heads, path / HEADS)
    model = open_model(path, exit_heads=True).model
    model.resize_token_embeddings(104)
    rows = ["w1 w2 w3 w4 w5 w6"] * 9
    options = {"tokenizer": str(tmp_path / "tokenizer"), "sequence_length": 6}
    refused: list[Any] = [
        lambda: fulldepth.measure(model, rows, **options),
        lambda: sweep(model, rows, **options),
        lambda: Objective(multi_exit=1.0).attach(model),
        lambda: save_exit_heads(model, tmp_path),
        lambda: truncated(model, 1),
    ]
    if name != "bert":
        refused.append(lambda: Decoder(model))
    for call in refused:
        with pytest.raises(FulldepthError, match=r"is \[96, 32\], and the model's own output \[104, 32\]"):
            call()


def test_texts_are_written_with_the_heads_and_a_plan_leaves_them_out(cases: Any, tmp_path: Path) -> None:
    case, prompt = cases("llama-tied"), list(range(20, 29))
    threshold = middle(case, "margin")
    options = {"tokenizer": case.tokenizer, "dtype": "float64", "max_new_tokens": NEW, "chat": False}
    written = generate_texts(
        case.path,
        [words(*(i - 10 for i in prompt))],
        threshold=threshold,
        rule="margin",
        output=tmp_path / "out",
        **options,
    )
    tokens, exits = continued(case, prompt, "recompute", lambda x: plain.leave(x, "margin", threshold, 1))
    assert written.generation.sequences[0, 9:].tolist() == tokens
    grid = written.results.meta["lens_grid"]["samples"][0]
    assert grid["exits"] == exits
    top = torch.softmax(case.plain.layers([*prompt, *tokens[:-1]])[:, -NEW:], -1).max(-1)
    shown = [[tuple(cell) for cell in row] for row in grid["grid"][1:]]
    names = tokenizer().convert_ids_to_tokens(list(range(90)))
    for layer in range(LAYERS):
        for place, (name, chance) in enumerate(shown[layer]):
            index = int(top.indices[layer, place])
            assert index >= len(names) or name == names[index].strip()
            assert chance == pytest.approx(float(top.values[layer, place]), abs=6e-5)
    drafted = generate_texts(case.path, ["w10 w11"], plan=lambda model: DraftPlan((2,), "attention"), **options)
    assert any(HEADS in warning for warning in drafted.results.meta["warnings"])
