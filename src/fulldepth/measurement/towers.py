"""Measures both towers of a model of images and texts, and their similarity across modalities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fulldepth.data import Record, Source, choose, identities
from fulldepth.data.labelled import usable_rows
from fulldepth.errors import FulldepthError
from fulldepth.execution.batching import model_inputs
from fulldepth.execution.stream import check_close
from fulldepth.hf import Checkpoint
from fulldepth.measurement.stacks import Stack, combine_stacks
from fulldepth.measurement.subject import Subject
from fulldepth.metrics import METRICS, Setup
from fulldepth.metrics.cross import Projected, cross_rows, cross_similarity
from fulldepth.results import Finding, Results, finite, tabulate
from fulldepth.settings.measure import MeasureSettings

TOWERS = {"image": "vision", "text": "text"}
"""Name of a stack -> its tower."""
Extra = Callable[[Subject, Setup], "Projected | None"]
Measured = Callable[..., tuple[Results, Subject]]
"""Measures one stack: `measured(data, settings, extra)`, with a function that makes a further measure."""


def measure_towers(checkpoint: Checkpoint, source: Source, settings: MeasureSettings, measured: Measured) -> Results:
    """Both towers on the images and their texts, and, if the model projects them into one space, across modalities.

    Args:
        checkpoint: a model with two towers.
        source: images with a text each.
        settings: as for one tower.
        measured: measures one tower.

    Raises:
        FulldepthError: if an image has no text, or the projected features are not the model's own.
    """
    source = usable_rows(
        source,
        most=None if settings.balanced else settings.max_sequences,
        seed=settings.seed,
        skip_bad=settings.skip_bad,
    )
    records = _paired(source, settings)
    data = {
        "image": Source(source.name, "images", records, source.class_names, source.warnings),
        "text": Source(
            source.name, "labelled-text", [replace(record, image=None) for record in records], source.class_names
        ),
    }
    kept: dict[str, Projected] = {}
    stacks: list[Stack] = []
    subjects: dict[str, Subject] = {}
    for name, tower in TOWERS.items():
        results, subjects[name] = measured(
            data[name],
            settings.model_copy(update={"tower": tower}),
            lambda subject, setup, name=name: _projected(subject, setup, kept, name),
        )
        stacks.append(Stack(name, results))
    if len(kept) < len(TOWERS):
        combined = combine_stacks(stacks)
        reason = f"how {type(checkpoint.model).__name__} maps its towers into one space is not known"
        combined.meta["left_out"].append({"measure": "cross-modality cosine, retrieval", "reason": reason})
        return combined
    samples = {name: measure.compute() for name, measure in kept.items()}
    image, text = (samples[name].features.transpose(0, 1) for name in TOWERS)
    if not torch.equal(samples["image"].keys, samples["text"].keys):
        raise FulldepthError("The towers kept different sequences; this is a defect of fulldepth.")
    _check(subjects, {name: sample.features[:, -1] for name, sample in samples.items()}, samples["image"].keys)
    texts = [records[index].text for index in samples["text"].keys.tolist()]
    first = {text: number for number, text in reversed(list(enumerate(texts)))}
    numbers = cross_similarity(image, text, torch.tensor([first[text] for text in texts]))
    combined = combine_stacks(stacks, tabulate(list(cross_rows(numbers))))
    combined.meta["headline"] |= finite({name: finding.document() for name, finding in _headline(numbers).items()})
    return combined


def measure_each(names: Sequence[str], source: Source, settings: MeasureSettings, measured: Measured) -> Results:
    """Every stack of an encoder-decoder on pairs of input and target.

    Measures of predictions that are asked for by name are the decoder's.

    Raises:
        FulldepthError: if the data hold no pairs.
    """
    parts = []
    for name in reversed(names):  # the decoder first: it refuses other data
        asked = settings.measures
        if asked is not None and name == "encoder":
            asked = [measure for measure in asked if "targets" not in METRICS[measure].needs]
        if asked or not settings.measures:
            parts.append(
                Stack(name, measured(source, settings.model_copy(update={"tower": name, "measures": asked}))[0])
            )
    return combine_stacks(parts[::-1])


def _paired(source: Source, settings: MeasureSettings) -> list[Record]:
    """The chosen records, each an image with its text."""
    bare = next((n for n, record in enumerate(source.records, start=1) if not (record.text or "").strip()), None)
    if bare is not None:
        raise FulldepthError(f"Image {bare} of {source.name} has no text; the towers are measured on pairs.")
    names = identities(source)
    chosen = choose(names, settings.max_sequences, settings.seed, settings.order)
    return [replace(source.records[index], identity=names[index]) for index in chosen]


def _projected(subject: Subject, setup: Setup, kept: dict[str, Projected], name: str) -> Projected | None:
    """The further measure of a tower; None if the model has no projection known here."""
    anatomy = subject.anatomy
    projection = anatomy.projection
    if projection is None:
        return None
    if subject.policy not in ("cls", "eos", "last"):
        raise FulldepthError(f"--tokens {subject.policy}: the projection reads one token of each image and text.")
    parameter = next(projection.parameters())

    def project(states: Tensor) -> Tensor:
        normed = anatomy.normalise(states.to(parameter))
        features: Tensor = projection(normed)
        return features.to(states.device)

    with suppress(AttributeError):
        kept[name] = Projected(setup, project, int(projection.out_features))  # type: ignore[arg-type]
    return kept.get(name)


@torch.no_grad()
def _check(subjects: dict[str, Subject], features: dict[str, Tensor], keys: Tensor) -> None:
    """Compare the last layers' features of two pairs with the model's own embeddings, up to their length.

    Raises:
        FulldepthError: if they differ.
    """
    some = keys[:2].tolist()
    inputs: dict[str, Any] = {}
    for subject in subjects.values():
        own = subject.sequences.collate(some).inputs
        inputs |= model_inputs(own, subject.device, subject.checkpoint.model.dtype)
    output = subjects["image"].checkpoint.model(**inputs)
    for name, kept in features.items():
        expected = torch.nn.functional.normalize(output[f"{name}_embeds"].float(), dim=-1)
        got = torch.nn.functional.normalize(kept[: len(some)].to(expected.device), dim=-1)
        claim = f"the projected {name} features of the last layer miss the model's own embeddings"
        check_close(claim, got, expected, subjects[name].checkpoint.model.dtype)


def _headline(numbers: Any) -> dict[str, Finding]:
    """Findings on the last layers."""
    matched, mismatched = float(numbers.matched[-1, -1]), float(numbers.mismatched[-1, -1])
    to_text, to_image = float(numbers.image_to_text[-1, -1]), float(numbers.text_to_image[-1, -1])
    sentence = (
        f"At the last layers an image and its own text have a cosine of {matched:.3f}, with other texts "
        f"{mismatched:.3f}; the nearest text is the right one for {100 * to_text:.0f} % of {numbers.pairs} images, the "
        f"nearest image for {100 * to_image:.0f} % of the texts."
    )
    reason = "it is a mean over pairs, which share images and texts"
    return {"cross:matched_cosine": Finding(matched, "1", sentence, None, reason)}
