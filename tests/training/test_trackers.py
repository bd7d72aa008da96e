"""Trackers receive the numbers of every evaluation, equal to the rows of the run's results."""

from __future__ import annotations

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from refusals import refused
from training.conftest import train_by

DEPTH = 4


class Tracker(TrainerCallback):
    """A tracker that keeps what it is sent, as transformers' integrations receive it."""

    logs: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


def expected(results, step):
    """The numbers of one evaluation, from the table of the results alone."""
    rows = results.table.query("step == @step")
    numbers = {}
    for row in rows.itertuples():
        if row.measure == "validation_loss":
            numbers["eval_loss"] = row.value
        elif row.measure == "displacement":
            numbers[f"eval_displacement_layer_{row.layer}"] = row.value
        elif row.measure == "jump_rate":
            numbers["eval_zeta_L" if row.layer == DEPTH else f"eval_zeta_L-{DEPTH - row.layer}"] = row.value
        elif row.measure == "train_loss":
            numbers["cross_entropy"] = row.value
        elif row.measure == "penalty":
            numbers[f"penalty_{row.site}"] = row.value
    return numbers


def run(recipe, folder, tracker):
    path = recipe(objective={"jump": 0.5}, report_to=[tracker], log_every=3)
    return train_by(path, folder)


def test_every_evaluation_is_tracked(recipe, tmp_path, monkeypatch):
    Tracker.logs.clear()
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)
    results = run(recipe, tmp_path / "run", "tensorboard")
    evaluations = {step: logs for step, logs in Tracker.logs if "eval_loss" in logs}
    assert list(evaluations) == [0, 3, 6, 8]
    for step, logs in evaluations.items():
        logs.pop("epoch", None)
        assert logs == expected(results, step)
        assert set(logs) >= {"eval_loss", "eval_zeta_L", "eval_displacement_layer_4"}
    assert "penalty_jump" in evaluations[8]
    assert [step for step, logs in Tracker.logs if "loss_jump" in logs] == [3, 6], "the losses of steps are tracked too"


@pytest.mark.parametrize("tracker", ["tensorbord", "neptune"])
def test_a_tracker_that_is_absent_is_refused_before_the_run(recipe, tmp_path, tracker):
    with refused(tracker):
        run(recipe, tmp_path / "run", tracker)
    assert not (tmp_path / "run").exists()
