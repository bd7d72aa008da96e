"""Measures the stacks of a model (two towers, or encoder and decoder), and towers across modalities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fulldepth.core.errors import FulldepthError
from fulldepth.core.number_format import in_percent
from fulldepth.data import ImageRecord, Source, TextRecord, choose, identities
from fulldepth.data.labelled import usable_rows
from fulldepth.hf import Checkpoint
from fulldepth.hf.rounding import check_close
from fulldepth.measurement.series import total_times
from fulldepth.measurement.tokens import Counting
from fulldepth.metrics import METRICS, Setup
from fulldepth.metrics.cosine import Projected, cross_rows, cross_similarity
from fulldepth.results import Finding, Results, finite, joined_influences, tabulate
from fulldepth.settings.measure import DEFAULT, MeasureSettings
from fulldepth.subject import Subject

TOWERS = {"image": "vision", "text": "text"}
"""Name of a stack -> its tower."""
Extra = Callable[[Subject, Counting, Setup], "Projected | None"]
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
    source = usable_rows(source, seed=settings.seed, skip_bad=settings.skip_bad, most=settings.max_sequences)
    pictures = source.of(ImageRecord)
    bare = next((n for n, record in enumerate(pictures, start=1) if not (record.caption or "").strip()), None)
    if bare is not None:
        raise FulldepthError(f"Image {bare} of {source.name} has no text; the towers are measured on pairs.")
    names = identities(source)
    pair_numbers = choose(names, settings.max_sequences, settings.seed, settings.order)
    records = [replace(pictures[index], identity=names[index]) for index in pair_numbers]
    captions = [
        TextRecord(
            text=record.caption or "",
            label=record.label,
            where=record.where,
            identity=record.identity,
            digest=record.digest,
        )
        for record in records
    ]
    data = {
        "image": Source(source.name, "images", records, source.class_names, source.warnings),
        "text": Source(source.name, "labelled-text", captions, source.class_names),
    }
    features: dict[str, Projected] = {}
    stacks: dict[str, Results] = {}
    subjects: dict[str, Subject] = {}
    for name, tower in TOWERS.items():
        stacks[name], subjects[name] = measured(
            data[name],
            settings.model_copy(update={"tower": tower}),
            lambda subject, counting, setup, name=name: _projected(subject, counting, setup, features, name),
        )
    if len(features) < len(TOWERS):
        combined = combine_stacks(stacks)
        reason = f"how {type(checkpoint.model).__name__} maps its towers into one space is not known"
        combined.meta["left_out"].append({"measure": "cross-modality cosine, retrieval", "reason": reason})
        return combined
    samples = {name: measure.compute() for name, measure in features.items()}
    image, text = (samples[name].features.transpose(0, 1) for name in TOWERS)
    if not torch.equal(samples["image"].keys, samples["text"].keys):
        raise FulldepthError("The towers kept different sequences; this is a defect of fulldepth.")
    _check(subjects, {name: sample.features[:, -1] for name, sample in samples.items()}, samples["image"].keys)
    texts = [captions[index].text for index in samples["text"].keys.tolist()]
    first = {text: number for number, text in reversed(list(enumerate(texts)))}
    numbers = cross_similarity(image, text, torch.tensor([first[text] for text in texts]))
    matched, mismatched, to_text, to_image = (float(values[-1, -1]) for values in numbers[:4])
    sentence = (
        f"At the last layers an image and its own text have a cosine of {matched:.3f}, with other texts "
        f"{mismatched:.3f}; the nearest text is the right one for {in_percent(to_text)} of {numbers.pairs} images, the "
        f"nearest image for {in_percent(to_image)} of the texts."
    )
    finding = Finding(matched, "1", sentence, None, "it is a mean over pairs, which share images and texts")
    combined = combine_stacks(stacks, tabulate(list(cross_rows(numbers))))
    combined.meta["headline"] |= finite({"cross:matched_cosine": finding.document()})
    return combined


def measure_each(names: Sequence[str], source: Source, settings: MeasureSettings, measured: Measured) -> Results:
    """Every stack of an encoder-decoder on pairs of input and target.

    Measures of predictions that are asked for by name are the decoder's.

    Raises:
        FulldepthError: if the data hold no pairs.
    """
    parts: dict[str, Results] = {}
    for name in reversed(names):  # the decoder first: it refuses other data
        asked = settings.measures
        if asked is not None and name == "encoder":
            asked = [measure for measure in asked if measure == DEFAULT or "targets" not in METRICS[measure].needs]
        if asked or not settings.measures:
            parts[name] = measured(source, settings.model_copy(update={"tower": name, "measures": asked}))[0]
    return combine_stacks(dict(reversed(parts.items())))


def _projected(
    subject: Subject, counting: Counting, setup: Setup, by_tower: dict[str, Projected], name: str
) -> Projected | None:
    """The further measure of a tower; None if the model has no projection known here."""
    anatomy = subject.anatomy
    projection = anatomy.projection
    if projection is None:
        return None
    if counting.policy not in ("cls", "eos", "last"):
        raise FulldepthError(
            f"--token-policy {counting.policy}: the projection reads one token of each image and text."
        )
    parameter = next(projection.parameters())

    def project(states: Tensor) -> Tensor:
        normed = anatomy.normalise(states.to(parameter))
        features: Tensor = projection(normed)
        return features.to(states.device)

    with suppress(AttributeError):
        by_tower[name] = Projected(setup, project, int(projection.out_features))  # type: ignore[arg-type]
    return by_tower.get(name)


@torch.no_grad()
def _check(subjects: dict[str, Subject], features: dict[str, Tensor], keys: Tensor) -> None:
    """Compare the last layers' features of two pairs with the model's own embeddings, up to their length.

    Raises:
        FulldepthError: if they differ.
    """
    first_keys = keys[:2].tolist()
    inputs: dict[str, Any] = {}
    for subject in subjects.values():
        inputs |= subject.inputs(subject.sequences.collate(first_keys).inputs)
    output = subjects["image"].model(**inputs)
    for name, projected in features.items():
        expected = torch.nn.functional.normalize(output[f"{name}_embeds"].float(), dim=-1)
        normalised = torch.nn.functional.normalize(projected[: len(first_keys)].to(expected.device), dim=-1)
        claim = f"the projected {name} features of the last layer miss the model's own embeddings"
        check_close(claim, normalised, expected, subjects[name].model.dtype)


def combine_stacks(stacks: Mapping[str, Results], further: pd.DataFrame | None = None) -> Results:
    """One table and document: sites and findings carry the stacks' names; times are summed.

    The stream has the stack's own name as its site, other sites are `STACK:SITE`. Influences are kept where all stacks
    have the same clusters.

    Args:
        stacks: name (`image`, `text`, `encoder`, `decoder`) -> results, in the order of the model's description.
        further: rows across stacks.
    """

    def named(stack: str, rows: pd.DataFrame | None) -> pd.DataFrame | None:
        if rows is None:
            return None
        plain = rows["site"].isna() | (rows["site"] == "residual")
        return rows.assign(site=(stack + ":" + rows["site"].astype("str")).mask(plain, stack))

    tables: list[Any] = [named(name, results.table) for name, results in stacks.items()]
    table = pd.concat([*tables, *([] if further is None else [further])], ignore_index=True)
    influences = joined_influences((results.meta, named(name, results.influences)) for name, results in stacks.items())
    return Results(table, _document({name: results.meta for name, results in stacks.items()}), influences)


def _document(metas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The last stack's document, with the parts of all."""
    last = list(metas.values())[-1]
    described = [{**meta["model"], "name": name} for name, meta in metas.items()]
    timings = total_times([*metas.values()])
    timings["measures"] = {
        f"{name}: {measure}": seconds
        for name, meta in metas.items()
        for measure, seconds in meta["timings"]["measures"].items()
    }
    grids = [meta["lens_grid"] for meta in metas.values() if meta["lens_grid"]]
    policies = {name: meta["token_policy"] for name, meta in metas.items()}
    keys = ("name", "num_layers", "width", "family", "task")
    return {
        **last,
        "model": {**last["model"], "num_layers": max(entry["num_layers"] for entry in described)},
        "stacks": [{key: entry[key] for key in keys} for entry in described],
        "token_policy": {
            "name": ", ".join(f"{name}: {policy['name']}" for name, policy in policies.items()),
            "sentence": " ".join(f"{name.capitalize()}: {policy['sentence']}" for name, policy in policies.items()),
            "begin_with_bos": None,
        },
        "timings": timings,
        "left_out": [
            {**entry, "measure": f"{name}: {entry['measure']}"}
            for name, meta in metas.items()
            for entry in meta["left_out"]
        ],
        "warnings": list(
            dict.fromkeys(f"{name.capitalize()}: {line}" for name, meta in metas.items() for line in meta["warnings"])
        ),
        "headline": {
            f"{name}:{key}": {**finding, "sentence": f"{name.capitalize()}: {finding['sentence']}"}
            for name, meta in metas.items()
            for key, finding in meta["headline"].items()
        },
        "lens_grid": grids[-1] if grids else None,
    }
