"""Ctrl-C while a model is trained: the command in the message goes on."""

from __future__ import annotations

import shlex

import pytest
import transformers

from fulldepth.results import Results

SMOKE = ("--steps", "6", "eval_every=3", "save_every=2", "global_batch_size=2", "data.validation_sequences=4")


@pytest.mark.slow
def test_the_advised_command_goes_on(main, tmp_path, monkeypatch):
    run, step, steps = tmp_path / "a run", transformers.Trainer.training_step, []

    def interrupted(*arguments, **named):
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step(*arguments, **named)

    monkeypatch.setattr(transformers.Trainer, "training_step", interrupted)
    command = ["train", "tiny-vit", *SMOKE, "--output", str(run)]
    code, _, err = main(*command)
    last = err.strip().splitlines()[-1]
    assert (code, last.partition(":")[0]) == (130, "Interrupted. Go on with")
    advised = shlex.split(last.partition(": ")[2])
    assert advised == ["fulldepth", *command, "--resume"]
    code, _, err = main(*advised[1:])
    assert code == 0, err
    assert len(steps) == 4 + 4  # from the checkpoint of step 2
    assert Results.load(run).meta["complete"]
