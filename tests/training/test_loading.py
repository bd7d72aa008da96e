"""What a run reads: the seeded order in full batches, whatever the number of workers, processes and resumptions."""

from __future__ import annotations

import os
import subprocess

import torch
from pandas.testing import assert_frame_equal

from fulldepth.data import ShuffledSampler
from fulldepth.training import TrainSettings
from fulldepth.training.trainer import RunTrainer, worker_count
from training.conftest import train_by, without_times


def test_a_run_reads_the_order_in_full_batches_over_epochs(recipe, tmp_path, monkeypatch):
    seen = []
    windows = []
    compute = RunTrainer.compute_loss

    def note(self, model, inputs, *more, **options):
        seen.append(inputs["input_ids"].clone())
        windows[:] = [self.train_dataset]
        return compute(self, model, inputs, *more, **options)

    monkeypatch.setattr(RunTrainer, "compute_loss", note)
    path = recipe(sequence_length=96, steps=40, global_batch_size=12, micro_batch_size=4, eval_every=40, save_every=40)
    train_by(path, tmp_path / "run")
    (data,) = windows
    assert len(data) < 40 * 12  # more than one epoch
    assert len(data) % 12
    order = ShuffledSampler(len(data), seed=0).indices(0, 40 * 12)
    assert [len(batch) for batch in seen] == [4] * 120
    assert torch.equal(torch.cat(seen), torch.stack([data[int(i)]["input_ids"] for i in order]))


def test_workers_change_no_number_and_leave_sigterm_alone(recipe, tmp_path, monkeypatch):
    changes = {"steps": 12, "eval_every": 6, "save_every": 12, "model": {"attention_dropout": 0.1}}
    alone = train_by(recipe(**changes, workers=0), tmp_path / "alone")
    step = RunTrainer.training_step

    def with_signal(self, *arguments):
        if self.state.global_step == 2:  # as a scheduler does to every process of a job
            for worker in torch.multiprocessing.active_children():
                subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        return step(self, *arguments)

    monkeypatch.setattr(RunTrainer, "training_step", with_signal)
    shared = train_by(recipe(**changes, workers=2), tmp_path / "shared")
    assert_frame_equal(*(without_times(results.table) for results in (alone, shared)))


def test_workers_start_by_themselves_where_reading_is_long(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    long = TrainSettings(steps=100_000, global_batch_size=64, sequence_length=1024)
    assert [worker_count(long, processes) for processes in (1, 4, 8, 16)] == [4, 3, 1, 0]
    assert worker_count(TrainSettings(), 1) == 0
    assert worker_count(long.model_copy(update={"workers": 0}), 1) == 0
    assert worker_count(TrainSettings(workers=7), 4) == 7
