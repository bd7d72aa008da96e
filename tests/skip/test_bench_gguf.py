"""GGUF files in a benchmark: losses of llama.cpp against transformers', who is compared with whom, and refusals."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
import transformers as tf

import gguf_files
import tiny_models
from fulldepth.data.batches import Example
from fulldepth.execution.latency import OtherLoad, Runner, Trial
from fulldepth.execution.llama_cpp import LlamaCpp
from fulldepth.hf import anatomy_candidates, skipping
from fulldepth.skip.bench import bench
from refusals import refused
from skip import plain
from tiny_models import seeded

SMALL = {"batches": [1, 2], "contexts": [12], "max_new_tokens": 3, "repeats": 9}
GONE = {2}
KV = 2 * 2 * 8 * 2
"""Bytes of a token's keys and values in one layer: two, of 2 heads of 8 float16 numbers."""


def tiny(vocabulary=320):
    torch.manual_seed(3)
    options = tiny_models.DECODER | {"vocab_size": vocabulary, "intermediate_size": 64}
    return tiny_models.strengthened(tf.LlamaForCausalLM(tf.LlamaConfig(**options)), 6.0).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model as a GGUF file, as a folder, and without the attention of a layer as `deci`, which transformers lacks."""
    root = tmp_path_factory.mktemp("gguf")
    full = gguf_files.write(root / "full.gguf", tiny())
    gguf_files.without_attention(full, root / "small.gguf", GONE)
    gguf_files.write(root / "wide.gguf", tiny(330))
    tiny().save_pretrained(root / "folder")
    return root


@pytest.fixture(scope="module")
def held():
    """Sequences of different lengths in four documents; a mark that ends texts is one of the targets."""
    generator = seeded(0)
    rows = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in (9, 5, 12, 7, 7, 4, 11, 6)]
    rows[0][4] = 2
    examples = [Example.of(row, 1 + at % 3, len(row), document=at // 2) for at, row in enumerate(rows)]
    return plain.held_out(examples, name="rows", kind="text", warnings=[])


@pytest.fixture
def timed(monkeypatch):
    """Seconds of a run by its model, with 1 more in every round, and the order of the runs."""
    seconds, order = {"full.gguf": 100.0, "small.gguf": 50.0, "transformers": 7.0}, []

    def run(self, ids, context):
        name = self.path.name if isinstance(self, LlamaCpp) else "transformers"
        order.append((name, len(ids)))
        rounds = order.count(order[-1]) // (2 if name == "transformers" else 1)
        return Trial(seconds[name] + rounds, 2 * (seconds[name] + rounds))

    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    monkeypatch.setattr(sys.modules["fulldepth.skip.bench"], "memory", lambda *_: {})
    for kind in (LlamaCpp, Runner):
        monkeypatch.setattr(kind, "run", run)
    return order


def row(results, measure, model, statistic, site="model"):
    return results.table.query("measure == @measure and model == @model and statistic == @statistic and site == @site")


def test_losses_and_sizes_of_llama_cpp_are_those_of_the_model_in_the_file(files, held):
    options = {**SMALL, "batches": [1], "repeats": 1}
    results = bench(files / "full.gguf", [files / "small.gguf"], data=held, batch_size=3, **options)
    model, tokens = tiny(), sum(one.predicted for one in held.heldout)

    def sums(removed):
        with skipping(anatomy_candidates(model)[0], removed):
            return np.array([plain.loss(model, [one], (), "attention") * one.predicted for one in held.heldout])

    for name, removed in (("full.gguf", ()), ("full.gguf (llama.cpp)", ()), ("small.gguf", GONE)):
        (loss,) = row(results, "loss", name, "mean").value
        assert loss == pytest.approx(sums(removed).sum() / tokens, rel=2e-3)  # its cache holds float16
        layers = 3 - len(removed)
        wide = "(" not in name and not removed  # transformers' cache holds float32
        assert row(results, "kv_bytes_per_token", name, "value").value.tolist() == [layers * KV * (2 if wide else 1)]
    added = results.headline["loss_added small.gguf"]["value"]
    assert added == pytest.approx((sums(GONE) - sums(())).sum() / tokens, abs=5e-3)
    attention = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 32)  # float32: four projections and a norm
    sizes = [row(results, "parameter_bytes", name, "value").value.item() for name in ("full.gguf", "small.gguf")]
    assert sizes[0] - sizes[1] == attention
    assert not (results.table[results.table.model == "small.gguf"].measure == "peak_memory").any()
    programs = {entry["label"]: (entry["program"], entry["baseline"]) for entry in results.meta["models"]}
    assert programs == {
        "full.gguf": ("transformers", True),
        "full.gguf (llama.cpp)": ("llama.cpp", True),
        "small.gguf": ("llama.cpp", False),
    }


@pytest.mark.parametrize("original", ["full.gguf", "folder"])
def test_times_are_compared_within_a_program_in_common_rounds(files, timed, original):
    exports = [files / "small.gguf"] if original == "full.gguf" else [files / "full.gguf", files / "small.gguf"]
    results = bench(files / original, [tiny(), *exports], **SMALL, warmup=0)
    base = "full.gguf (llama.cpp)" if original == "full.gguf" else "full.gguf"
    expected = np.median([(50 + n) / (100 + n) for n in range(1, 10)])
    for phase in ("prefill", "decode"):
        assert row(results, "time_ratio", "small.gguf", "median", phase).value.tolist() == pytest.approx([expected] * 2)
        assert row(results, "time_ratio", base, "median", phase).empty
        assert len(row(results, "time_ratio", "LlamaForCausalLM", "median", phase)) == 3  # two cells, and the grid
        assert f"that of {base} (95 %" in results.headline[f"{phase}_time_ratio small.gguf"]["sentence"]
    # in every round of one sequence each of the four runs once; of two, transformers' two
    first, second = timed[: 9 * 4], timed[9 * 4 :]
    every = sorted([("full.gguf", 1), ("small.gguf", 1), *[("transformers", 1)] * 2])
    assert all(sorted(first[at : at + 4]) == every for at in range(0, 36, 4))
    assert second == [("transformers", 2)] * 18
    remarks = ["is no GGUF file"] * (original == "folder") + ["one sequence at a time"]
    assert all(text in line for text, line in zip(remarks, results.meta["warnings"], strict=True))


def test_llama_cpp_times_the_prompt_and_each_token_after_it(files):
    model = LlamaCpp(files / "small.gguf")
    asked, answer = [], {"timings": {"prompt_ms": 80.0, "predicted_ms": 60.0}}
    model._complete = lambda prompt, count, **_: asked.append((prompt, count)) or answer
    trial = model.run(torch.arange(8)[None], 5)
    # of the four tokens that it generates, the first comes with the prompt
    assert (asked, trial.prefill, trial.decode) == ([([0, 1, 2, 3, 4], 4)], 0.08, pytest.approx(0.02))


def unknown(files, tmp_path):
    return gguf_files.write(tmp_path / "odd.gguf", tiny(), architecture="oddity", rule=None)


@pytest.mark.parametrize(
    ("export", "options", "named"),
    [
        (lambda files, _: files / "wide.gguf", {}, "wide.gguf has a vocabulary of 330"),
        (lambda files, _: files / "small.gguf", {"batches": [2]}, "add 1 to the batches"),
        (unknown, {}, "odd.gguf.*oddity"),
        (lambda files, _: files / "nothing.gguf", {}, "nothing.gguf"),
    ],
)
def test_what_is_refused(files, tmp_path, export, options, named):
    with refused(named):
        bench(files / "folder", [export(files, tmp_path)], tmp_path / "out", **{**SMALL, **options})
    assert not (tmp_path / "out").exists()


def test_other_tokens_and_a_missing_llama_cpp_are_refused(files, tmp_path, monkeypatch):
    words = gguf_files.vocabulary
    monkeypatch.setattr(gguf_files, "vocabulary", lambda size: (words(size)[0][::-1], words(size)[1]))
    gguf_files.write(tmp_path / "other.gguf", tiny())
    with refused(r"other.gguf has other tokens than full.gguf \(llama.cpp\)"):
        bench(files / "full.gguf", [tmp_path / "other.gguf"], **SMALL)
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with refused("pip install xllamacpp"):
        bench(files / "full.gguf", [files / "small.gguf"], **SMALL)
