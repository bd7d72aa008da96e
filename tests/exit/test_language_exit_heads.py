"""Language models with a head for every layer: every command reads layer l by the final norm and W_l.

The oracle (`language_heads.Plain`) is stock transformers in float64, one text at a time, and the matrices of the file.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import transformers as tf
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file
from torch.testing import assert_close

import fulldepth
from exit import plain
from exit.language_heads import ENCODERS, FAMILIES, HEADS, Plain, texts, write
from exit.test_sweep import RULES, check
from fulldepth.data import open_source, prepare
from fulldepth.exit import Decoder, export_layers, sweep
from fulldepth.hf import exit_heads_of, open_model, save_exit_heads, truncated
from fulldepth.losses import Objective
from marks import thorough
from refusals import refused
from skip.word_tokenizer import words

LENGTH, NEW, LAYERS = 12, 8, 3
DECODED = [
    "llama-tied",
    "gemma2",
    "granite",
    *(thorough(n) for n in ("llama", "cohere")),
]
TIED = ("gpt2", "llama-tied", "gemma2", "cohere")


class Case:
    """A checkpoint, its oracle, a text file, and the oracle's logits `[L, T, V]` of each window of the file."""

    def __init__(self, name, folder):
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

    def decoder(self):
        """In float64 but for Gemma 2, which gives NaN there with padding."""
        dtype = "float32" if self.name == "gemma2" else "float64"
        return Decoder(open_model(self.path, exit_heads=True, dtype=dtype).model)

    @property
    def samples(self):
        """[N, L, V] logits of every position with a target."""
        return torch.cat(self.logits, dim=1).transpose(0, 1).numpy()


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made = {}

    def of(name):
        if name not in made:
            made[name] = Case(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of


@pytest.mark.parametrize("name", [*FAMILIES, *ENCODERS])
def test_exit(cases, name):
    case = cases(name)
    samples = [[list(layer) for layer in sample] for sample in case.samples.tolist()]
    thresholds = [middle(case, "confidence"), 0.5, 1.0]
    options = {"dtype": "float64", "sequence_length": LENGTH, "batch_size": 3, "lens_tokens": None, "prompts": 0}
    results = sweep(str(case.path), str(case.data), rule=RULES, threshold=thresholds, **options)
    check(results, samples, case.targets, 1)
    assert all(any(row["exits"][layer] for row in results.meta["exits"]) for layer in range(LAYERS))
    assert all(row["measured_speedup"] is None for row in results.meta["exits"])


@pytest.mark.parametrize("disk", [("model.embed_tokens",), ("lm_head",), ("model", "lm_head")])
def test_weights_on_disk_change_no_number(cases, disk):
    case = cases("llama")
    places = dict.fromkeys(("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places = {name: "disk" if name.startswith(disk) else place for name, place in places.items()}
    options = {"tokenizer": case.tokenizer, "sequence_length": LENGTH, "batch_size": 3, "lens_tokens": None}
    results = fulldepth.measure(str(case.path), str(case.data), measures=["lens_loss"], device_map=places, **options)
    predicted = torch.from_numpy(case.samples).log_softmax(-1)  # [N, L, V]
    expected = -predicted[torch.arange(len(predicted)), :, case.targets].mean(0)
    assert results.values("lens_loss", "mean").tolist()[-LAYERS:] == pytest.approx(expected.tolist(), rel=1e-5)


def test_exit_heads_of_the_hub_are_downloaded_with_the_model(cases, tmp_path, monkeypatch):
    case, snapshot = cases("llama"), tmp_path / "models--some--model" / "snapshots" / ("0" * 40)

    def download(repository, name, **options):
        if not (case.path / name).exists():
            raise EntryNotFoundError(name)
        snapshot.mkdir(parents=True, exist_ok=True)
        shutil.copy(case.path / name, snapshot / name)

    (tmp_path / "models--some--model" / "refs").mkdir(parents=True)
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", download)
    heads = exit_heads_of(open_model("some/model", exit_heads=True).model)
    stored = load_file(case.path / HEADS)
    assert {f"exit_heads.{layer}.weight" for layer in heads} == set(stored)
    assert all(torch.equal(head.weight, stored[f"exit_heads.{layer}.weight"]) for layer, head in heads.items())


def middle(case, rule):
    """A threshold that half of the predictions of layer 1 exceed."""
    return float(np.median([plain.certainty(list(sample[0]), rule) for sample in case.samples.tolist()]))


def continued(case, ids, exit_of):
    """New tokens and their exit layers, without a cache: every step runs the whole text."""
    ids, exits, prompt = list(ids), [], len(ids)
    for _ in range(NEW):
        layers = case.plain.layers(ids)[:, -1].tolist()
        exits.append(exit_of(layers))
        ids.append(int(np.argmax(layers[exits[-1] - 1])))
    return ids[prompt:], exits


@pytest.mark.parametrize("name", DECODED)
def test_generation_leaves_by_the_layers_own_heads(cases, name):
    case, ends = cases(name), {"eos_token_id": 96, "pad_token_id": 0}
    decoder = case.decoder()
    prompts, seen = [list(range(20, 29)), [60, 33, 12, 70, 41]], set()
    for rule in RULES:
        threshold = 0.4 if rule == "patience" else middle(case, rule)
        options = {"max_new_tokens": NEW, "threshold": threshold, "rule": rule, **ends}
        for prompt in prompts:
            tokens, exits = continued(case, prompt, lambda x, when=(rule, threshold): plain.leave(x, *when, 1))
            found = decoder.generate(torch.tensor([prompt]), **options)
            assert found.sequences[0, len(prompt) :].tolist() == tokens
            assert found.stats.exit_layers == [exits]
            seen |= {*exits}
    assert len(seen) > 1
    for layer in (1, 2):
        tokens, _ = continued(case, prompts[0], lambda _, layer=layer: layer)
        found = decoder.generate(torch.tensor(prompts[:1]), max_new_tokens=NEW, threshold=1e-9, min_layer=layer, **ends)
        assert found.sequences[0, 9:].tolist() == tokens


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@torch.no_grad()
def test_a_cut_model_is_a_stock_checkpoint(cases, name, tmp_path, without_fresh_process):
    case, ids = cases(name), list(range(20, 32))
    expected, stored = case.plain.layers(ids), load_file(case.path / HEADS)
    export_layers(case.path, tmp_path / "2", layers=2, tokenizer=case.tokenizer)
    auto = tf.AutoModelForMaskedLM if name in ENCODERS else tf.AutoModelForCausalLM
    stock, report = auto.from_pretrained(tmp_path / "2", dtype=torch.float64, output_loading_info=True)
    assert not any(report.values())
    assert not stock.config.tie_word_embeddings
    assert_close(stock(torch.tensor([ids])).logits[0], expected[1], rtol=1e-6, atol=1e-7)
    kept = load_file(tmp_path / "2" / HEADS)
    assert list(kept) == ["exit_heads.1.weight"]
    assert torch.equal(kept["exit_heads.1.weight"], stored["exit_heads.1.weight"])

    model = open_model(case.path, exit_heads=True, dtype="float64").model  # in memory, without a search for the head
    for layers in (1, 2, 3):
        short = truncated(model, layers)
        assert (short.get_output_embeddings().weight is short.get_input_embeddings().weight) == (
            layers == 3 and (name in TIED or name == "bert")
        )
        assert_close(short(torch.tensor([ids])).logits[0], expected[layers - 1], rtol=1e-6, atol=1e-7)
    assert_close(model(torch.tensor([ids])).logits[0], expected[2], rtol=1e-6, atol=1e-7)  # as it was


def test_models_that_do_not_fit_are_refused(tmp_path):
    path = write("gpt2", tmp_path / "model")
    model = open_model(path, exit_heads=True).model
    model.resize_token_embeddings(104)
    rows = ["w1 w2 w3 w4 w5 w6"] * 9
    options = {"tokenizer": str(tmp_path / "tokenizer"), "sequence_length": 6}
    for call in (
        lambda: fulldepth.measure(model, rows, **options),
        lambda: sweep(model, rows, **options),
        lambda: Objective(multi_exit=1.0).attach(model),
        lambda: save_exit_heads(model, tmp_path),
        lambda: truncated(model, 1),
        lambda: Decoder(model),
    ):
        with refused(r"\[96, 32\].*\[104, 32\]"):
            call()
