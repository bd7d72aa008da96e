"""Early exit of a prepared model: rules, what all layers predict, what leaving early gives, and measured times."""

from fulldepth.early_exit.document import UNTIMED, Row, document, drop_sentence, no_advice, with_times
from fulldepth.early_exit.mean import Mean
from fulldepth.early_exit.outcome import Outcome, calibrated, candidates, outcome, splits
from fulldepth.early_exit.reading import read
from fulldepth.early_exit.readings import LayerNumber, Readings
from fulldepth.early_exit.rules import Exit
from fulldepth.early_exit.running import EarlyExit
from fulldepth.early_exit.subject import Subject, open_checkpoint, prepare_subject
from fulldepth.early_exit.timing import SpeedUp, Timed, batches_of, timed

__all__ = [
    "UNTIMED",
    "EarlyExit",
    "Exit",
    "LayerNumber",
    "Mean",
    "Outcome",
    "Readings",
    "Row",
    "SpeedUp",
    "Subject",
    "Timed",
    "batches_of",
    "calibrated",
    "candidates",
    "document",
    "drop_sentence",
    "no_advice",
    "open_checkpoint",
    "outcome",
    "prepare_subject",
    "read",
    "splits",
    "timed",
    "with_times",
]
