"""Killed before any of its file operations and started again, a command leaves what it leaves when nothing happens."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

import lm_eval.tasks  # noqa: F401  # imported before the forks
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import tiny_models
from data.conftest import jsonl
from fulldepth.core.errors import FulldepthError
from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.evaluation import evaluate
from fulldepth.measurement.run import measure_into
from fulldepth.results import Results
from fulldepth.settings import layer, read
from fulldepth.settings.measure import MeasureSettings
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.exports import export as exporting
from fulldepth.skip.plan import Plan
from fulldepth.skip.search import search
from fulldepth.training import TrainSettings, train
from json_files import read_json
from kills.moments import differences, moments, resumed
from marks import thorough
from skip import planned, word_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]
SEARCH = SearchSettings(blocks=1, epochs=1, batch_size=4, chunks=2)


@pytest.fixture(scope="module", autouse=True)
def quick_pages():
    """Pages that only say whose they are."""
    with pytest.MonkeyPatch.context() as patched:
        written = lambda table, meta: f"{meta.get('created')} {table.to_csv(float_format=str)}"  # noqa: E731
        patched.setattr("fulldepth.reporting.render", written)
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A checkpoint with a tokenizer, pairs, a plan, a run of two checkpoints, text."""
    home = tmp_path_factory.mktemp("sources")
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for folder in (home / "model", home / "run" / "checkpoint-1", home / "run" / "checkpoint-2"):
        word_tokenizer.checkpoint(folder)
    rows = [
        {"prompt": word_tokenizer.words(n, n + 1), "response": word_tokenizer.words(*range(n, n + 5))}
        for n in range(16)
    ]
    jsonl(home / "pairs.jsonl", *rows)
    jsonl(home / "words.jsonl", *({"text": word_tokenizer.words(*range(n, n + 20))} for n in range(8)))
    questions = [
        {
            "question": word_tokenizer.words(n, n + 1),
            "choices": [word_tokenizer.words(n + k) for k in (3, 5, 8)],
            "gold": n % 3,
        }
        for n in range(6)
    ]
    jsonl(home / "arc_easy_test.jsonl", *questions)
    planned.plan(tiny_models.build("llama")).save(home / "plan.json")
    text = [" ".join(part.split()) for part in builtin_texts("heldout")[0][:8_000].split("\n\n")]
    text = [part for part in text if len(part.split()) > 20]
    jsonl(home / "text.jsonl", *({"text": part} for part in text))
    train_tokenizer(text, vocab_size=300).save_pretrained(home / "tokenizer")
    config = {"type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    recipe = {
        "model": {**config, "num_attention_heads": 2, "num_key_value_heads": 1},
        "data": {"name": "text.jsonl", "validation_share": 0.3, "validation_sequences": 2},
        "tokenizer": "tokenizer",
        **{"steps": 2, "eval_every": 2, "save_every": 1, "keep_checkpoints": 1, "warmup_steps": 1},
        **{"global_batch_size": 2, "sequence_length": 16},
    }
    (home / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    labelled = [{"text": f"{part[:40]} {n}", "label": "ab"[n % 2]} for n, part in enumerate(text[:14])]
    jsonl(home / "labelled.jsonl", *labelled)
    classifier = {
        "task": "text-classification",
        "method": "multi-exit",
        "model": {"type": "gpt2", "n_embd": 8, "n_layer": 3, "n_head": 2},
        "data": {"name": "labelled.jsonl", "validation_share": 0.3, "truncate": True},
        "tokenizer": "bpe:300",
    }
    (home / "classifier.yaml").write_text(yaml.safe_dump({**recipe, **classifier}))
    return home


def classifying(home, output):
    """A head for every layer, and a tokenizer that the run learns from its texts."""
    os.chdir(home)
    train(layer(TrainSettings, read(home / "classifier.yaml", "train")), output, resume=True)


def training(home, output, seed=0):
    os.chdir(home)  # the recipe names its files from there
    train(layer(TrainSettings, read(home / "recipe.yaml", "train"), {"seed": seed}), output, resume=True)


def evaluating(home, output, seed=0):
    files = {"task_data": [str(home)], "exit_layers": "2", "batch_size": 2, "bootstrap_iters": 10}
    evaluate(home / "model", ["arc_easy_local"], output, resume=True, **files, limit=None if seed == 0 else 5)


def series(home, output, seed=0):
    settings = MeasureSettings(measures=["displacement"], max_sequences=4, sequence_length=16, seed=seed)
    measure_into(home / "run", home / "words.jsonl", output, settings)


def searching(home, output, seed=0):
    settings = SEARCH.model_copy(update={"seed": seed})
    search(home / "model", str(home / "pairs.jsonl"), output=output, settings=settings, resume=True)


def responding(home, output):
    search(
        home / "model",
        str(home / "pairs.jsonl"),
        output=output,
        settings=SEARCH,
        responses=10,
        max_new_tokens=3,
        resume=True,
    )


def applying(home, output):
    """The export, without the fresh process that reads it: it writes nothing."""
    exporting.prove = lambda *_: 0.0
    if not (output / "out").exists():
        exporting.export(Plan.load(home), home / "model", "folded", output / "out")


@pytest.mark.parametrize(
    "command",
    [
        training,
        searching,
        *(thorough(rare) for rare in (classifying, series, responding, applying, evaluating)),
    ],
)
def test_a_run_killed_at_any_moment_comes_to_the_same_end(sources, tmp_path, command):
    output = tmp_path / "out"
    output.mkdir()

    def work():
        command(sources, output)

    whole, copies = moments(output, tmp_path / "copies", work)
    assert len(copies) > 5
    wrong = {}
    for copy in copies:
        found = list(differences(whole, resumed(output, copy, work)))
        if found:
            wrong[copy.name] = found
    assert not wrong


def altered(home, folder, change):
    """The sources with other weights or other data."""
    shutil.copytree(home, folder)
    for path in folder.rglob("model.safetensors") if change == "model" else ():
        tensors = load_file(path)
        name = next(name for name in tensors if name.endswith("layers.1.mlp.down_proj.weight"))
        save_file(tensors | {name: -3 * tensors[name]}, path, metadata={"format": "pt"})
    for path in folder.glob("*.jsonl") if change == "data" else ():
        rows = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*rows[2:], rows[0]]))
    if change == "model":
        recipe = (folder / "recipe.yaml").read_text()
        (folder / "recipe.yaml").write_text(recipe.replace("intermediate_size: 8", "intermediate_size: 12"))
    return folder


def half_done(copies):
    """The last copy with progress that is stored, whole, and not yet results."""
    for copy in reversed(copies):
        finished = (copy / "plan.json", copy / "checkpoint-2" / "complete.json")
        if ((copy / "results.json").exists() and not (copy / "checkpoint-1").exists()) or any(
            p.exists() for p in finished
        ):
            continue
        with suppress(ValueError, FulldepthError):
            steps = [Results.load(path.parent) for path in copy.glob("steps/*/results.json")]
            losses = [read_json(path) for path in copy.glob("progress.json")]
            seals = [read_json(path) for path in copy.glob("checkpoint-1/complete.json")]
            lines = [path.read_text().count("\n") for path in copy.glob("answers/*.jsonl")]
            if steps or losses or seals or any(count > 2 for count in lines):
                return copy
    raise AssertionError("no copy has progress")


def verdict(fresh, again):
    """`refused`, or whether a resumed run comes to what a fresh one does, content by content: `same`, `wrong`."""
    if isinstance(again, str):
        return "refused"
    return "wrong" if fresh is None or list(differences(fresh, again)) else "same"


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        thorough(series, "refused"),
        thorough(searching, "refused"),
        (training, "refused"),
        (evaluating, "same"),
    ],
)
def test_progress_is_used_by_the_run_it_belongs_to_and_by_no_other(sources, tmp_path, command, outcome):
    """Resume = fresh, content by content: with other inputs a command refuses, or ends as a fresh one does."""
    output, empty = tmp_path / "out", tmp_path / "empty"
    output.mkdir()
    empty.mkdir()
    whole, copies = moments(output, tmp_path / "copies", lambda: command(sources, output))
    state = half_done(copies)

    def ended(start, home, seed=0):
        def work():
            try:
                command(home, output, seed)
            except FulldepthError as error:
                return str(error)
            return None

        return resumed(output, start, work)

    assert verdict(whole, ended(state, sources)) == "same"
    homes = {change: altered(sources, tmp_path / change, change) for change in ("model", "data", "settings")}
    fresh = {change: ended(empty, home, int(change == "settings")) for change, home in homes.items()}
    for change, content in fresh.items():
        assert not isinstance(content, str), content
        assert list(differences(whole, content)), f"{change}: the altered inputs give other numbers"
        assert verdict(content, ended(state, homes[change], int(change == "settings"))) == outcome, change
