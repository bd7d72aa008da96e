"""One way from a data argument to prepared sequences, whichever verb asks."""

from __future__ import annotations

import pytest

import tiny_models
from fulldepth import early_exit
from fulldepth.errors import FulldepthError
from fulldepth.measurement.subject import prepare_subject
from fulldepth.settings.exit import ExitSettings
from fulldepth.settings.measure import MeasureSettings
from skip.word_tokenizer import tokenizer, words


def test_measuring_and_leaving_early_read_the_same_sequences():
    model = tiny_models.build("bert-classifier")
    rows = [{"text": words(*range(3, 5 + n)), "label": f"LABEL_{n % 3}"} for n in range(9)]
    options = {"max_sequences": 6, "sequence_length": 8, "seed": 3}
    measured = prepare_subject(model, rows, MeasureSettings(**options), tokenizer=tokenizer(), device=None)
    settings = ExitSettings(**options)
    leaving = early_exit.prepare_subject(early_exit.open_checkpoint(model, settings), rows, settings, tokenizer())
    assert measured.sequences.hash == leaving.sequences.hash
    assert measured.anatomy == leaving.anatomy


def test_what_the_model_does_not_read_is_refused():
    model, settings = tiny_models.build("bert-classifier"), ExitSettings()
    checkpoint = early_exit.open_checkpoint(model, settings)
    with pytest.raises(FulldepthError, match="holds images, but BertForSequenceClassification reads text"):
        early_exit.prepare_subject(checkpoint, "digits:builtin/test", settings, tokenizer())
