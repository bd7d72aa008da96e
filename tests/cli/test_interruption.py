"""Ctrl-C while a series is measured or a model is trained: the command in the message goes on."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.results import Results

STEPS = 400
SECONDS = 300


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe for a model of a few thousand weights; returns its file and its text."""
    folder = tmp_path_factory.mktemp("recipe")
    paragraphs = [" ".join(p.split()) for p in builtin_texts("heldout")[0][:30_000].split("\n\n") if len(p) > 80]
    rows = "\n".join(json.dumps({"text": paragraph}) for paragraph in paragraphs)
    (folder / "text.jsonl").write_text(rows, encoding="utf-8")
    train_tokenizer(paragraphs, vocab_size=300).save_pretrained(folder / "tokenizer")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    settings = {
        "model": {**sizes, "num_attention_heads": 2, "num_key_value_heads": 2},
        "data": {"name": str(folder / "text.jsonl"), "validation_sequences": 4},
        "tokenizer": str(folder / "tokenizer"),
        "steps": STEPS,
        "global_batch_size": 4,
        "sequence_length": 16,
        "eval_every": 100,
        "save_every": 20,
        "keep_checkpoints": 3,
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return folder / "mine.yaml", folder / "text.jsonl"


def interrupted(arguments: list[str], log: Path, is_time: Callable[[], bool]) -> list[str]:
    """Start a command, press Ctrl-C when it is time; returns the arguments of the command that it advises."""
    with log.open("w") as stderr:
        running = subprocess.Popen(
            [sys.executable, "-m", "fulldepth", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # ignored where tests run in the background
        )
        end = time.monotonic() + SECONDS
        while not is_time() and running.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        code = running.wait(SECONDS)
    last = log.read_text().strip().splitlines()[-1]
    assert (code, last.partition(":")[0]) == (130, "Interrupted. Go on with"), log.read_text()
    words = shlex.split(last.partition(": ")[2])
    assert words[:3] == ["python", "-m", "fulldepth"]
    return words[3:]


@pytest.mark.slow
def test_the_advised_command_goes_on(main, recipe, tmp_path):
    settings, text = recipe
    run, log = tmp_path / "a run", tmp_path / "log"
    advised = interrupted(
        ["train", str(settings), "--output", str(run)],
        log,
        lambda: any(run.glob("checkpoint-*/trainer_state.json")),  # the first ones are soon removed
    )
    assert advised == ["train", str(settings), "--output", str(run), "--resume"]
    assert not (run / f"checkpoint-{STEPS}").exists(), "it was interrupted too late"
    code, _, err = main(*advised)
    assert code == 0, err
    assert Results.load(run).meta["complete"]

    out = tmp_path / "out"
    options = ["--measures", "displacement", "--max-sequences", "4", "--sequence-length", "16"]
    advised = interrupted(
        ["measure", str(run), "--data", str(text), "--output", str(out), *options],
        log,
        lambda: "Checkpoint 2 of" in log.read_text(),
    )
    assert advised == ["measure", str(run), "--data", str(text), "--output", str(out), *options]
    assert not (out / "results.json").exists(), "it was interrupted too late"
    code, _, err = main(*advised)
    assert code == 0, err
    assert f"Checkpoint 1 of 3: step {STEPS - 40} is measured already" in err
    assert set(Results.load(out).table.step) == {STEPS - 40, STEPS - 20, STEPS}
