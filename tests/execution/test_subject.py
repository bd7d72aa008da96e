"""One way from a data argument to prepared sequences, whichever verb asks."""

from __future__ import annotations

import numpy as np
import pytest
from pandas.testing import assert_frame_equal
from PIL import Image

import fulldepth
import tiny_models
from fulldepth.exit import subject as early_exit
from fulldepth.measurement.subject import prepare_subject
from fulldepth.settings.exit import ExitSettings
from fulldepth.settings.measure import MeasureSettings
from refusals import refused
from skip.word_tokenizer import tokenizer, words


def test_measuring_and_leaving_early_read_the_same_sequences():
    model, rows = tiny_models.build("bert-classifier"), text_rows(9)
    options = {"max_sequences": 6, "sequence_length": 8, "seed": 3}
    measured = prepare_subject(model, rows, MeasureSettings(**options), tokenizer=tokenizer(), device=None)
    settings = ExitSettings(**options)
    leaving = early_exit.prepare_subject(early_exit.open_checkpoint(model, settings), rows, settings, tokenizer())
    assert measured.sequences.hash == leaving.sequences.hash
    assert measured.anatomy == leaving.anatomy


def test_what_the_model_does_not_read_is_refused():
    model, settings = tiny_models.build("bert-classifier"), ExitSettings()
    checkpoint = early_exit.open_checkpoint(model, settings)
    with refused("holds images, but BertForSequenceClassification reads text"):
        early_exit.prepare_subject(checkpoint, "digits:builtin/test", settings, tokenizer())


def text_rows(count):
    return [{"text": words(*range(3, 5 + n)), "label": f"LABEL_{n % 3}"} for n in range(count)]


def image_rows(count):
    pixels = np.random.default_rng(0).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    return [{"image": Image.fromarray(each), "label": n % 2} for n, each in enumerate(pixels)]


@pytest.mark.parametrize(
    ("name", "make"), [("bert-classifier", text_rows), ("gpt2-classifier", text_rows), ("vit", image_rows)]
)
def test_batches_without_any_label_change_nothing(name, make, tmp_path):
    model, rows = tiny_models.build(name), make(6)
    model.save_pretrained(tmp_path)
    options = {"measures": ["lens_accuracy", "lens_loss"], "batch_size": 1}
    options |= {} if make is image_rows else {"tokenizer": tokenizer()}
    some = [row if n % 2 else {**row, "label": None} for n, row in enumerate(rows)]
    partly, alone = (fulldepth.measure(tmp_path, data, **options).table for data in (some, rows[1::2]))
    means = [table[~table.statistic.str.contains("error")] for table in (partly, alone)]
    assert_frame_equal(*means, rtol=1e-5)
