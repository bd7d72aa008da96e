"""A run goes on with the data, the order and the configuration that it began with, or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from fulldepth.training.origin import check_origin
from transformers import LlamaConfig

from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher
from fulldepth.settings import layer, read
from fulldepth.training import TrainSettings, train
from fulldepth.training.resume import Origin, resume_notes
from fulldepth.training.sft import rows_hash

SHORT = {"steps": 2, "eval_every": 2, "save_every": 1}
ORIGIN = Origin(data="sha256:aa", order="o 0", processes=1, micro_batch=4, device="cpu", versions={"torch": "2.13"})


def settings(path: Path) -> TrainSettings:
    return layer(TrainSettings, read(path, "train"))


def interrupted(path: Path, run: Path) -> None:
    """A run that lacks its last checkpoint."""
    train(settings(path), run)
    shutil.rmtree(run / "checkpoint-2")


@pytest.mark.parametrize("changed", ["text", "validation", "tokenizer"])
def test_a_run_does_not_go_on_with_other_data(changed: str, recipe: Any, sources: Any, tmp_path: Path) -> None:
    paths = {"text": tmp_path / "text.jsonl", "validation": tmp_path / "validation.jsonl"}
    for path in paths.values():
        shutil.copy(sources[0], path)
    paths["tokenizer"] = shutil.copytree(sources[1], tmp_path / "tokenizer")
    data = {"name": str(paths["text"]), "validation": str(paths["validation"])}
    path = recipe(**SHORT, data=data, tokenizer=str(paths["tokenizer"]))
    interrupted(path, tmp_path / "run")
    before = resume_notes(tmp_path / "run" / "checkpoint-1").origin
    assert before is not None
    if changed == "tokenizer":  # the same name, the same number of tokens, other ids
        file = paths["tokenizer"] / "tokenizer.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        ids = content["model"]["vocab"]
        one, two = (token for token in ids if token in ("e", "t"))
        ids[one], ids[two] = ids[two], ids[one]
        file.write_text(json.dumps(content), encoding="utf-8")
    else:
        rows = paths[changed].read_text(encoding="utf-8").splitlines()
        paths[changed].write_text("\n".join(rows[::-1]) + "\n", encoding="utf-8")
    with pytest.raises(FulldepthError, match=f"not those that .*{before.data[:19]}.* is sha256:.* new run"):
        train(settings(path), tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "checkpoint-2").exists()


def test_an_earlier_checkpoint_is_not_compared_and_says_so(recipe: Any, tmp_path: Path) -> None:
    path = recipe(**SHORT)
    interrupted(path, tmp_path / "run")
    seal = tmp_path / "run" / "checkpoint-1" / "complete.json"
    content = json.loads(seal.read_text())
    del content["notes"]["origin"]
    seal.write_text(json.dumps(content))
    lines: list[str] = []
    results = train(settings(path), tmp_path / "run", resume=True, watcher=Watcher(say=lines.append))
    told = [line for line in lines if "could not be compared" in line]
    assert len(told) == 1
    assert results.meta["warnings"] == told
    assert resume_notes(tmp_path / "run" / "checkpoint-2").origin is not None


def compared(now: Origin, folder: Path, config: LlamaConfig | None = None, **changes: Any) -> list[str]:
    chosen = layer(TrainSettings, changes)
    return check_origin(now, ORIGIN, config or LlamaConfig(), chosen, folder)


def test_what_may_change_numbers_is_said_and_what_does_is_refused(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    assert compared(ORIGIN, tmp_path) == []
    with pytest.raises(FulldepthError, match="trained in the order 'o 0'"):
        compared(ORIGIN.model_copy(update={"order": "p 0"}), tmp_path)
    moved = ORIGIN.model_copy(update={"device": "cuda", "versions": {"torch": "2.14"}})
    assert [line.split(":")[0] for line in compared(moved, tmp_path)] == [
        "The run was on cpu and is on cuda now",
        "Versions changed since the checkpoint",
    ]
    split = ORIGIN.model_copy(update={"processes": 2, "micro_batch": 2})
    assert "dropout" in compared(split, tmp_path)[0]
    for term in ("coherence", "orthogonality"):
        with pytest.raises(FulldepthError, match=f"{term} is a function of the sequences in a forward pass"):
            compared(split, tmp_path, objective={term: 0.1})
    with pytest.raises(FulldepthError, match=r"rms_norm_eps of the model was 1e-06 in .* is 1e-05 now"):
        compared(ORIGIN, _with(tmp_path, rms_norm_eps=1e-6), LlamaConfig(rms_norm_eps=1e-5))


def _with(folder: Path, **values: Any) -> Path:
    LlamaConfig(**values).save_pretrained(folder / "other")
    return folder / "other"


def test_the_hash_of_conversations_is_of_what_is_read() -> None:
    rows = [{"input_ids": [1, 2, n], "labels": [-100, 2, n], "text": "a"} for n in range(5)]
    first, again = Dataset.from_list(rows), Dataset.from_list([{**row, "text": "b"} for row in rows])
    assert rows_hash(first) == rows_hash(again) == rows_hash(Dataset.from_list(rows[:2] + rows[2:]))
    others = [rows[::-1], rows[:4], [{**rows[0], "labels": [1, 2, 0]}, *rows[1:]]]
    assert len({rows_hash(Dataset.from_list(other)) for other in (rows, *others)}) == 4
    assert rows_hash(first, first.select([0])) != rows_hash(first.select([0]), first)
