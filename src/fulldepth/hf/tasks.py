"""What a model's class predicts: its task, and in words where that is neither a token nor one class."""

from __future__ import annotations

from typing import Any

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.hf.families import rows_of
from fulldepth.hf.finder import refuse_unread

TASKS = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForPreTraining": "masked-lm",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
}
"""Ending of a model's class name -> its task; every other class is a `representation`.

`ForPreTraining` is a masked language model only with a head over the vocabulary: ELECTRA's and Funnel's detect
replaced tokens, others reconstruct images or sound."""
PREDICTIONS = {
    "ForImageClassificationWithTeacher": "averages the classes of two heads",
    "ForTokenClassification": "labels every token",
    "ForQuestionAnswering": "marks an answer in a text",
    "ForMultipleChoice": "chooses one of several texts",
    "ForNextSentencePrediction": "tells whether one text follows another",
    "ForObjectDetection": "detects objects",
    "Segmentation": "labels pixels",
    "ForDepthEstimation": "estimates depth",
    "ForMaskedImageModeling": "reconstructs images",
}
"""Ending of a model's class name -> what it predicts instead of tokens or one class, in words."""
INSTEAD = {
    "masked-lm": "`fulldepth measure`, `fulldepth lens` and `fulldepth exit` read masked language models",
    "text-classification": "`fulldepth measure` and `fulldepth exit` read classifiers, on labelled texts",
    "image-classification": "`fulldepth measure` and `fulldepth exit` read classifiers, on images in class folders",
    "detection": "`fulldepth measure` reads detectors, on images with boxes",
}
"""Task -> commands for its models."""


def task_of(model: Any) -> str:
    """The task of a model's head: a value of `TASKS`, `detection` for families with a box head, or `representation`."""
    name = type(model).__name__
    if name.endswith("ForObjectDetection"):
        rows = rows_of(model.config.model_type) or ()
        return "detection" if any(row.box_head is not None for row in rows) else "representation"
    task = next((task for suffix, task in TASKS.items() if name.endswith(suffix)), "representation")
    if name.endswith("ForPreTraining") and model.get_output_embeddings() is None:
        return "representation"
    generates = name.endswith("ForConditionalGeneration") and not model.config.is_encoder_decoder
    return "causal-lm" if generates else task  # a decoder that also accepts images


def no_single_class(config: Any) -> str | None:
    """The reason why a classifier with this configuration does not predict one class out of several (a regression, or
    several classes at a time); None if it does.
    """
    number = getattr(config, "num_labels", 2)
    problem = getattr(config, "problem_type", None)
    if number >= 2 and problem not in ("regression", "multi_label_classification"):
        return None
    return f"does not predict one class out of several (num_labels {number}, problem_type {problem})"


def unread_prediction(model: Any) -> str:
    """The reason why the predictions of a model's layers are not read, for a model of the task `representation`."""
    name = one_line(type(model).__name__, 100)
    for suffix, words in PREDICTIONS.items():
        if name.endswith(suffix):
            return f"{name} {words}; layers are read by predictions of tokens or of one class"
    return f"{name} has no language-model or classification head known here"


def refuse_without_tokens(model: Any) -> None:
    """Refuse a model for `fulldepth lens`, unless it predicts tokens of one text.

    Raises:
        FulldepthError: for other models, with the command that reads them.
    """
    task = task_of(model)
    name = one_line(type(model).__name__, 100)
    if task in ("causal-lm", "masked-lm"):
        return
    refuse_unread(model)
    if task == "detection":
        reason = f"{name} detects objects"
    elif getattr(model.config, "is_encoder_decoder", False):
        reason = f"{name} is an encoder-decoder, whose decoder reads a target beside the text"
    elif task.endswith("-classification"):
        reason = f"{name} predicts one class for a whole {task.partition('-')[0]}"
    else:
        reason = unread_prediction(model)
    raise FulldepthError(f"The lens shows the predictions at every token: {reason}. {instead_of_language(model)}")


def instead_of_language(model: Any) -> str:
    """A sentence on the commands for a model that is no causal language model."""
    if getattr(model.config, "is_encoder_decoder", False) and model.main_input_name == "input_ids":
        return "`fulldepth measure` reads encoder-decoders, on rows with input and target."
    return f"{INSTEAD.get(task_of(model), '`fulldepth measure` reads the layers of other models')}."
