"""A new measure is one class and one registry entry: measuring, the table, results on disk and the page follow."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import fulldepth
from fulldepth.metrics import METRICS, Measure, Row
from fulldepth.results import write_page


class StreamNorm(Measure):
    """Mean Euclidean norm of every layer's state over the counted tokens."""

    name = "stream_norm"
    units = dict.fromkeys(("mean",), "1")

    def __init__(self, setup):
        super().__init__(setup)
        self.add_sum("sums", setup.num_layers + 1)
        self.add_sum("counts", 1)

    def update(self, observation):
        tokens = observation.tokens  # [L+1, N, D]
        self.sums += torch.linalg.vector_norm(tokens.double(), dim=-1).sum(-1)
        self.counts += tokens.shape[1]

    def compute(self):
        return {"mean": self.sums / self.counts}

    def rows(self):
        means = self.compute()["mean"].tolist()
        count = int(self.counts)
        return [Row(self.name, "residual", layer, None, "mean", mean, count, "1") for layer, mean in enumerate(means)]


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(METRICS, "stream_norm", StreamNorm)


@pytest.mark.usefixtures("registered")
def test_a_registered_measure_is_measured_and_stored(checkpoint, text_file, tmp_path):
    folder = checkpoint("llama")
    results = fulldepth.measure(folder, text_file, measures=["stream_norm", "displacement"], sequence_length=16)
    table = results.table[results.table.measure == "stream_norm"].sort_values("layer")
    model = tf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    last = []
    model.model.layers[-1].register_forward_hook(lambda module, inputs, output: last.append(output))
    ids = tf.AutoTokenizer.from_pretrained(folder)(text_file.read_text())["input_ids"]
    windows = torch.tensor(ids[: len(ids) // 16 * 16]).view(-1, 16)
    with torch.no_grad():  # hidden_states[-1] is after the final norm, so the last layer is hooked
        states = [*model(windows, output_hidden_states=True).hidden_states[:-1], last[0]]
    expected = [float(torch.linalg.vector_norm(state, dim=-1).mean()) for state in states]
    assert table["value"].tolist() == pytest.approx(expected, rel=1e-5)
    assert table["count"].tolist() == [windows.numel()] * len(states)
    results.save(tmp_path / "out")
    again = fulldepth.Results.load(tmp_path / "out").table
    assert again[again.measure == "stream_norm"]["value"].tolist() == table["value"].tolist()
    assert write_page(tmp_path / "out").is_file()
