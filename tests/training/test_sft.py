"""Fine-tuning on conversations: the loss of the responses, the penalty of every token that is not padding."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from fulldepth.settings import layer, read
from fulldepth.training import TrainSettings, train
from fulldepth.training.sft import TEMPLATE

pytestmark = pytest.mark.slow
pytest.importorskip("trl")

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"say {word}"},
            {"role": "assistant", "content": word * 2},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": word},
        ]
    }
    for word in ("one", "two", "house", "river", "stone", "bread", "light", "water", "paper", "glass")
]
PAIRS = [{"prompt": f"{n} and {n}?", "response": f"that is {2 * n}."} for n in range(12)]


def settings(path: Path) -> TrainSettings:
    return layer(TrainSettings, read(path, "train"))


@pytest.mark.parametrize("rows", [CHATS, PAIRS], ids=["chats", "pairs"])
def test_fine_tuning_reports_the_loss_of_the_responses(rows: Any, recipe: Any, tmp_path: Path) -> None:
    train(settings(recipe(steps=2, eval_every=2, save_every=2, sequence_length=48)), tmp_path / "base")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    base = tmp_path / "base" / "checkpoint-2"
    path = recipe(
        stage="sft",
        method="jreg",
        data={"name": str(data), "validation_share": 0.4, "validation_sequences": 4},
        **{"sequence_length": 48, "steps": 4, "eval_every": 2, "save_every": 2},
    )
    chosen = yaml.safe_load(path.read_text()) | {"model": {"checkpoint": str(base)}}
    path.write_text(yaml.safe_dump(chosen), encoding="utf-8")
    results = train(settings(path), tmp_path / "run")
    assert {"jump"} == set(results.table[results.table.measure == "penalty"].site)
    found = results.table[(results.table.measure == "validation_loss") & (results.table.step == 4)]

    # The held-out conversations again, by their content; the loss token by token.
    def order(row: dict[str, Any]) -> bytes:
        opening = json.dumps([0, _messages(row)[:2]], sort_keys=True)
        return hashlib.sha256(opening.encode()).digest()

    kept = sorted(rows, key=order)[:4]
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4").double().eval()
    total, count = 0.0, 0
    for row in kept:
        ids, counts = _tokens(row, tokenizer)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        for position in range(1, len(ids)):
            if counts[position]:
                total += float(torch.nn.functional.cross_entropy(logits[position - 1], torch.tensor(ids[position])))
                count += 1
    assert int(found["count"].iloc[0]) == count
    assert float(found.value.iloc[0]) == pytest.approx(total / count, rel=1e-4)


def _messages(row: dict[str, Any]) -> list[dict[str, str]]:
    return row.get("messages") or [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["response"]},
    ]


def _tokens(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Ids of a conversation under the plain template, and which of them the assistant says."""
    found = tokenizer.apply_chat_template(
        _messages(row), chat_template=TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(found["input_ids"]), [bool(flag) for flag in found["assistant_masks"]]
