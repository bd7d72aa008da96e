"""One text file is one document on every page and in every `results.json`, whatever it is cut into."""

from __future__ import annotations

import json
import re

import pytest

import fulldepth
from fulldepth.exit import sweep
from fulldepth.reporting.phrases import amount_of_text
from fulldepth.skip import bench, search
from golden.tables import MODEL
from skip.word_tokenizer import checkpoint, tokenizer, words

SMALL = {"batches": [1], "contexts": [12], "max_new_tokens": 2, "repeats": 1}
RECIPE = {
    "model": MODEL,
    "steps": 1,
    "global_batch_size": 2,
    "sequence_length": 24,
    "eval_every": 1,
    "save_every": 1,
    "warmup_steps": 0,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with results of every command on one text file."""
    root = tmp_path_factory.mktemp("documents")
    model, text = checkpoint(root / "model"), root / "text.txt"
    text.write_text("\n\n".join(words(*((7 * n + k * k) % 80 for k in range(700))) for n in range(60)))
    tokenizer().save_pretrained(root / "tokenizer")
    few = {"max_sequences": 12, "sequence_length": 32}
    for name in ("measure", "other"):
        fulldepth.measure(model, text, measures=["displacement"], output=root / name, **few)
    fulldepth.compare([root / "measure", root / "other"], output=root / "compare")
    sweep(model, text, output=root / "exit", **few)
    recipe = {**RECIPE, "data": {"name": str(text), "validation_share": 0.2}, "tokenizer": str(root / "tokenizer")}
    fulldepth.train(recipe, root / "train")
    search(model, text, blocks=1, output=root / "search", max_sequences=40, sequence_length=32)
    bench(model, [model], data=text, output=root / "bench", max_sequences=40, sequence_length=32, **SMALL)
    fulldepth.evaluate(
        model, output=root / "evaluate", generation_quality=str(text), prompts=4, prefix_tokens=8, max_new_tokens=4
    )
    return root


@pytest.mark.parametrize("command", ["measure", "compare", "exit", "train", "search", "bench", "evaluate"])
def test_a_text_file_is_one_document_everywhere(made, command):
    meta = json.loads((made / command / "results.json").read_text())
    whole = [entry["data"] for entry in meta.get("models", []) if "data" in entry] or [meta.get("data")]
    if command in ("search", "bench"):
        whole = [whole[0][part] for part in ("train", "heldout") if whole[0][part]["examples"]]
        assert {part["unit"] for part in whole} == {"piece of text"}
        assert all(part["clusters"] > 1 for part in whole)
    if command == "evaluate":
        whole = [meta["quality_data"]]
    assert [part["documents"] for part in whole] == [1] * len(whole)
    page = (made / command / "report.html").read_text()
    facts = re.findall(r"<dt><bdi>(?:Data|Text for generation)[^<]*</bdi></dt><dd><bdi>(.*?)</bdi></dd>", page)
    assert {count for fact in facts for count in re.findall(r"([\d,]+) documents?\b", fact)} == {"1"}, facts


def test_counts_of_earlier_versions_are_not_taken_for_documents():
    """They counted pieces, and lack the number of clusters."""
    assert amount_of_text({"documents": 24, "unit": "piece of text"}) == ""
    told = [(1, 24, "piece of text"), (12, 12, "document"), (7, 7, "row"), (1, 1, "block of 4,096 tokens")]
    assert [amount_of_text(dict(zip(("documents", "clusters", "unit"), one, strict=True))) for one in told] == [
        "1 document in 24 pieces of text",
        "12 documents",
        "7 rows",
        "1 document",
    ]
