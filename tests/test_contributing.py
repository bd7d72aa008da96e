"""The verb that CONTRIBUTING.md writes out, run and compared with stock transformers."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from places import ROOT
from skip.word_tokenizer import tokenizer, words
from tiny_models import build


def test_the_verb_of_the_contributing_guide_runs_and_agrees_with_a_plain_loop(tmp_path, monkeypatch):
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (tmp_path / "agreement.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    agree = importlib.import_module("agreement").agree
    model = build("llama", dtype=torch.float64)
    texts = [words(*(number * step % 80 for number in range(3, 3 + length))) for step, length in ((7, 12), (11, 9))]
    table = agree(model, texts, tokenizer=tokenizer(), bos="never", one_per_row=True).table
    hits = []
    for row in texts:
        inputs = tokenizer()(row, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            run = model(inputs, output_hidden_states=True)
            states = torch.cat(run.hidden_states[:-1])[:, :-1]  # what is left out has the final norm, or no target
            best = model.lm_head(model.model.norm(states)).argmax(-1)
        hits.append(best == run.logits[0, :-1].argmax(-1))
    expected = torch.cat(hits, dim=1).double().mean(1)
    means = table.query("measure == 'agreement' and statistic == 'mean'")
    assert means.layer.tolist() == [*range(model.config.num_hidden_layers + 1)]
    assert means.value.tolist() == pytest.approx([*expected.tolist(), 1.0])
    assert 0 < expected.mean() < 1
