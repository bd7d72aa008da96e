"""Ctrl-C while a model is trained, or models are compared: the command in the message goes on."""

from __future__ import annotations

import os
import shlex

import pytest
import transformers

import fulldepth
from api.test_output_folders import small
from fulldepth import reporting
from fulldepth.results import DOCUMENT, PAGE, Results

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


@pytest.mark.parametrize(("moment", "overwrite"), [("document", True), ("page", False), ("page", True)])
def test_the_command_that_is_advised_after_an_interruption_works(main, tmp_path, monkeypatch, moment, overwrite):
    """Ctrl-C before the document of a comparison is renamed, and while its page is made."""
    folders = [small(value).save(tmp_path / f"{value}") for value in (1.0, 2.0)]
    output = tmp_path / "both"
    if overwrite:
        fulldepth.compare([folders[1], folders[0]], output=output)
    replace = os.replace

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    if moment == "document":
        monkeypatch.setattr(os, "replace", lambda a, b: interrupt() if str(b).endswith(DOCUMENT) else replace(a, b))
    else:
        monkeypatch.setattr(reporting, "render", interrupt)
    code, _, err = main("compare", *folders, "--output", output, *(["--overwrite"] if overwrite else []))
    assert code == 130, err
    assert not (output / PAGE).exists(), "the old page stands beside new numbers"
    monkeypatch.undo()
    advised = shlex.split(err.strip().splitlines()[-1].partition(": ")[2])
    code, _, err = main(*advised[1:])
    assert code == 0, err
    found = Results.load(output)
    assert [model["label"] for model in found.meta["models"]] == ["1.0", "2.0"]
    assert (output / PAGE).read_text(encoding="utf-8") == reporting.render(found.table, found.meta)
