"""Ctrl-C while models are compared: the command in the message works."""

from __future__ import annotations

import os
import shlex

import pytest

import fulldepth
from api.test_output_folders import small
from fulldepth import reporting
from fulldepth.results import DOCUMENT, PAGE, Results


@pytest.mark.parametrize(("moment", "overwrite"), [("document", True), ("document", False), ("page", True)])
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
    assert (output / PAGE).read_text() == reporting.render(found.table, found.meta)
