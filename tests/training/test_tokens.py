"""`fulldepth train data.tokens=FOLDER` on what datatrove wrote."""

from __future__ import annotations

import pandas as pd
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from pandas.testing import assert_frame_equal

from fulldepth.results import Results
from json_files import read_json

SMALL = [
    "steps=4",
    "global_batch_size=4",
    "sequence_length=24",
    "eval_every=2",
    "warmup=0.5",
    "data.validation_share=0.2",
    "data.validation_sequences=1000",
]
SMALL += ["model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=3"]


def test_the_output_of_datatrove_gives_the_losses_of_the_same_text(sources, tmp_path, main):
    """Two local tasks, one for each file."""
    lines, texts = sources[0].read_text().splitlines(), tmp_path / "texts"
    texts.mkdir()
    for number in range(2):
        (texts / f"{number}.jsonl").write_text("\n".join(lines[number::2]))
    end = read_json(sources[1] / "tokenizer_config.json")["eos_token"]
    tokenizer = DocumentTokenizer(
        output_folder=str(tmp_path / "tokens"),
        tokenizer_name_or_path=str(sources[1] / "tokenizer.json"),
        eos_token=end,
        shuffle_documents=False,
    )
    LocalPipelineExecutor([JsonlReader(str(texts)), tokenizer], tasks=2, logging_dir=str(tmp_path / "logs")).run()
    assert len(list((tmp_path / "tokens").glob("*.ds"))) == 2
    tables = []
    for data in (f"data.tokens={tmp_path / 'tokens'}", f"data.name={texts}"):
        run = tmp_path / data.partition("=")[0]
        code, _, error = main("train", "tiny-jreg", data, f"tokenizer={sources[1]}", *SMALL, "--output", run)
        assert code == 0, error
        tables.append(pd.read_parquet(run / "results.parquet"))
    one, other = (table[table.measure.isin(["validation_loss", "train_loss", "penalty"])] for table in tables)
    assert set(one.measure) == {"validation_loss", "train_loss", "penalty"}
    assert_frame_equal(one, other)
    record = Results.load(tmp_path / "data.tokens").meta
    assert record["data"]["name"] == str(tmp_path / "tokens")
    assert f"`{tmp_path / 'tokens'}`" in (tmp_path / "data.tokens" / "checkpoint-4" / "README.md").read_text()
    filled = record["data"]["validation_sequences"]
    assert record["warnings"] == [f"The validation text fills only {filled} of 1000 sequences."]
