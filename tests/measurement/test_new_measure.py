"""A new measure is one class and one registry entry: measuring, the table, results on disk and the page follow."""

from __future__ import annotations

import numpy as np
import torch
import transformers as tf
from numpy.testing import assert_allclose

import fulldepth
from fulldepth.metrics import METRICS, Measure, Row
from measurement import oracle


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


def test_a_registered_measure_is_measured_stored_and_shown(checkpoint, text_file, windows, tmp_path, monkeypatch):
    monkeypatch.setitem(METRICS, "stream_norm", StreamNorm)
    folder = checkpoint("llama")
    results = fulldepth.measure(
        folder, text_file, measures=["stream_norm"], sequence_length=16, output=tmp_path / "out"
    )
    ids = windows(results.meta["data"]["sequences"], 16)
    model = tf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    states, _ = oracle.taps(model, "model.layers", {"input_ids": ids})
    expected = np.linalg.norm(states, axis=-1).mean((1, 2))
    for found in (results, fulldepth.Results.load(tmp_path / "out")):
        assert_allclose(found.values("stream_norm", "mean"), expected, rtol=1e-5)
        assert set(found.table["count"]) == {ids.numel()}
    assert (tmp_path / "out" / "report.html").is_file()
