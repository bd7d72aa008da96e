"""`save_healed`: a healed model as an ordinary checkpoint, with the results of healing in its folder.

The docstring of `fulldepth.skip.heal.heal` describes the rows of the results.
"""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fulldepth.core import shell
from fulldepth.core.errors import FulldepthError, differences, one_line
from fulldepth.core.files import write_text
from fulldepth.core.number_format import plus_minus
from fulldepth.data.examples import is_seeded_fifth, units
from fulldepth.data.packing import write_tokens
from fulldepth.execution import find_anatomy
from fulldepth.execution.scoring import AGREEMENT, DIVERGENCE, LOSS
from fulldepth.hf import open_model
from fulldepth.hf.checkpoint_folder import folder_to_be
from fulldepth.results import (
    Finding,
    Results,
    difference_finding,
    difference_in_words,
    finite,
    provenance,
    stacked,
    tabulate,
)
from fulldepth.settings.heal import OF_SEARCH, HealSettings
from fulldepth.settings.loading import SPREADING
from fulldepth.skip.exports.export import NOTES, card_of, export, read_notes
from fulldepth.skip.exports.fold import fold
from fulldepth.skip.exports.formats import FORMATS
from fulldepth.skip.least_squares import Healing, format_for
from fulldepth.skip.own_text import FILE as OWN_TEXT
from fulldepth.skip.own_text import NOTES as OWN_NOTES
from fulldepth.skip.plan import HEALED, UNHEALED, Plan, in_sample, listing
from fulldepth.skip.tasks import CONTROL, ORIGINAL, TaskComparison
from fulldepth.subject import open_checkpoint

KIND = "heal"
FILE_ONLY = {"gguf", "gguf_type", *SPREADING} - {"dtype"}
"""Settings with which a GGUF file may be written after the healing."""
NAMES = {
    "removed": "without the removed blocks",
    "refitted": "refitted",
    "trained": "refitted, then trained",
    CONTROL: "control: the original, trained on the same tokens",
}
"""Model -> its name in sentences."""
TRAIN = "train-tokens"
VALIDATION = "validation-tokens"
"""Folders of the token ids that a healed model is trained on."""


def with_weights(healing: Healing, checkpoint: Path) -> Healing:
    """The healing whose model has the weights of a checkpoint that was trained from its export (`write_start`)."""
    _take_weights(healing.model, healing.plan, checkpoint)
    return replace(healing, plan=healing.plan.of_weights(healing.model))


def _take_weights(model: PreTrainedModel, plan: Plan, checkpoint: Path) -> None:
    """Fill a model, whose removed branches add zeros, with the weights of a checkpoint without them, in place."""
    trained = open_model(checkpoint, device="cpu").model
    state = trained.state_dict()
    anatomy = find_anatomy(model)
    prefix = anatomy.blocks_path
    if find_anatomy(trained).num_layers < anatomy.num_layers:  # those that stay, renumbered
        gone = {*plan.lacking("attention")} & {*plan.lacking("mlp")}
        remaining = [n for n in range(anatomy.num_layers) if n + 1 not in gone]
        parts = {f"{prefix}.{new}.": f"{prefix}.{old}." for new, old in enumerate(remaining)}
        state = {re.sub(rf"^{re.escape(prefix)}\.\d+\.", lambda match: parts[match[0]], n): w for n, w in state.items()}
    unknown = model.load_state_dict(state, strict=False).unexpected_keys  # removed branches have no trained weights
    assert not unknown, f"trained weights that the model does not have: {unknown[:3]}"


def write_start(healing: Healing, folder: Path, tokenizer: Any = None) -> Path:
    """Export the refitted model to train from, or take the export of the same model that is there.

    Raises:
        FulldepthError: as `export`; if the folder holds another model.
    """
    if not folder.exists():
        export(healing.plan, healing.model, format_for(healing.plan, healing.model), folder, tokenizer=tokenizer)
    elif read_notes(folder)["plan"] != healing.plan.document():
        raise FulldepthError(f"{folder} belongs to another healing. Delete {folder.parent}, or name another output.")
    return folder


def write_rows(healing: Healing, folder: Path) -> None:
    """Write the token ids of the rows that were fitted on, to train on, and of those that chose ridges, to validate."""
    for name, rows in {TRAIN: healing.fitting, VALIDATION: healing.choosing}.items():
        write_tokens([row.input_ids for row in rows], folder / name)


def save_healed(
    healing: Healing,
    plan: Plan,
    target: Path,
    tokenizer: Any = None,
    work: Path | None = None,
    tasks: TaskComparison | None = None,
    given: Mapping[str, str] | None = None,
) -> Results:
    """Write the healed model's folder: the checkpoint, `results.json`, `results.parquet` and `report.html`.

    Args:
        healing: with the losses of all models.
        plan: as given by the user, which the folder names.
        target: folder to create.
        tokenizer: as for `export`.
        work: folder whose text of the model's own is kept in the healed model's folder.
        tasks: of the original, the healed model and the control.
        given: `data` and `heldout`, as the user named them.

    Raises:
        FulldepthError: as `export`.
    """
    results = healing_results(healing, plan, tasks)
    results.meta["given"] = dict(given or {})
    settings = healing.settings
    with folder_to_be(target) as folder:
        format = settings.format or format_for(healing.plan, healing.model)
        export(healing.plan, healing.model, format, folder / "export", tokenizer=tokenizer)
        shutil.copytree(folder / "export", folder, dirs_exist_ok=True)
        shutil.rmtree(folder / "export")
        notes = read_notes(folder)
        if work is not None:
            for stored in (work / OWN_TEXT, work / OWN_NOTES):
                if stored.exists():
                    shutil.copy(stored, folder)
        seen = plan.changed(data={**plan.data, **listing(healing.examples.train, HEALED)})
        notes |= {"plan": seen.document(), "notes": [*notes["notes"], "Healed: see report.html in this folder."]}
        write_text(folder / NOTES, json.dumps(notes, indent=1, ensure_ascii=False) + "\n")
        facts = (notes["logit_error"], notes["parameters"], notes["notes"])
        card_of(healing.plan, FORMATS[format], *facts, healed=card_numbers(healing, tasks)).write(folder)
        names = [plan.model.name, str(target), *([str(settings.gguf)] if settings.gguf else [])]
        command = f"fulldepth skip bench {shell.arguments(names)} --output bench/"
        results.meta["next"] = {"why": "time it beside the original:", "command": command}
        results.save(folder)
    if settings.gguf is not None:
        results = _write_gguf(healing.plan, healing.model, target, settings)
    return results


def finish_gguf(
    plan: Plan, model: Any, target: Path, settings: HealSettings, given: Mapping[str, str]
) -> Results | None:
    """Write the GGUF file that a finished healing lacks, from the checkpoint in its folder.

    Args:
        plan: as given by the user.
        model: the checkpoint that it was made for, or the loaded model, which does not change.
        target: the healed folder.
        settings: of the healing.
        given: `data` and `heldout`, as the user names them.

    Returns:
        The results in the folder; None if it is not the healing of this plan, or no GGUF file is missing.

    Raises:
        FulldepthError: as `export`; for other settings or data than those that the model was healed with.
    """
    if settings.gguf is None or Path(settings.gguf).exists() or not (target / NOTES).is_file():
        return None
    stored = {**read_notes(target)["plan"], "data": plan.data}
    if stored != plan.document():
        return None
    given_settings = settings.model_dump(include=settings.model_fields_set - FILE_ONLY)
    stated = {name: value for name, value in given_settings.items() if value is not None or name not in OF_SEARCH}
    document = Results.load(target).meta
    healed_with = document["settings"]
    if changed := differences({name: healed_with.get(name) for name in stated}, stated):
        raise FulldepthError(
            f"{target} was healed with other settings: {changed}. Leave them out to write its GGUF file, or choose "
            "another output."
        )
    if changed := differences(document.get("given", given), given):
        raise FulldepthError(f"{target} was healed with other data: {changed}. Choose another output.")
    dtype = plan.dtype if settings.dtype is None else settings.dtype
    opened = open_checkpoint(model, settings, dtype=dtype, plain=True)
    healed = copy.deepcopy(opened.model)
    fold(healed, plan)
    _take_weights(healed, plan, target)
    return _write_gguf(plan.of_weights(healed, **UNHEALED), healed, target, settings)


def _write_gguf(plan: Plan, model: PreTrainedModel, target: Path, settings: HealSettings) -> Results:
    """Write a healed model's GGUF file, and its size into the results; the folder stays if that fails."""
    assert settings.gguf is not None
    try:
        file = export(plan, model, "gguf", settings.gguf, gguf_type=settings.gguf_type)
    except FulldepthError as error:
        raise FulldepthError(
            f"{error} The healed checkpoint is kept in {target}: the same command, with another --gguf-type if that is "
            "the reason, writes the GGUF file alone and does not heal again."
        ) from error
    results = Results.load(target)
    sentence = f"{Path(settings.gguf).name}: {file.size}."
    results.meta["headline"]["gguf_size"] = Finding(file.bytes / 2**20, "MiB", sentence).document()
    results.save(target)
    return results


def card_numbers(healing: Healing, tasks: TaskComparison | None = None) -> dict[str, str]:
    """Numbers on the model card of a healed model: tasks, the losses of all models, the net cost, and the text."""
    losses = healing.readings[LOSS]
    healed = last_label(healing)
    numbers: dict[str, str] = {}
    if tasks is not None:
        numbers |= {f"Task {reading.task}": reading.sentence for reading in tasks.of(healed)}
        numbers |= {f"Task {reading.task}, net cost": reading.sentence for reading in tasks.of(healed, CONTROL)}
    titles = {"original": "Held-out loss of the original", **NAMES}
    for label in losses.sums:
        added = losses.added(label)
        gap = "" if label == "original" else f" ({added.mean:+.4f} {plus_minus(added.standard_error, 4)})"
        numbers[titles[label]] = f"{losses.mean(label):.4f}{gap} nats a token"
    if CONTROL in losses.sums:
        net = losses.added("trained", CONTROL)
        numbers["Net cost of removal, against the control"] = (
            f"{net.mean:+.4f} {plus_minus(net.standard_error, 4)} nats a token"
        )
    about = f"{losses.count:,} tokens of {text_of(healing)}, which neither chose the blocks nor healed the model"
    return numbers | {"Held-out text": one_line(about, 300).replace("|", r"\|"), "Loss on other text": "unknown"}


def text_of(healing: Healing) -> str:
    """The name of the text that losses are of: that of `--heldout`, or else that of the data, of which some rows were
    kept apart; how many rows the sources have says nothing of these.
    """
    meta = healing.examples.meta
    name = str(meta.get("name") or "the data") if is_seeded_fifth(meta) else str(meta["heldout"]["name"])
    return re.sub(r" \([\d,]+ rows\)", "", name)


def healing_results(healing: Healing, plan: Plan, tasks: TaskComparison | None = None) -> Results:
    """A healing as results."""
    losses = healing.readings[LOSS]
    tables = []
    for label in losses.sums:
        rows = [*losses.rows(label)]
        for kind, unit in ((DIVERGENCE, "nats"), (AGREEMENT, "1")):
            mean = healing.readings[kind].mean(label)
            rows.append((kind, "model", None, None, "mean", mean, losses.count, unit))
        for reading in [] if tasks is None else tasks.of(label):
            key = ("task_score", reading.task, None, None)
            rows.append((*key, reading.metric, reading.score, reading.examples, "1"))
            if label != ORIGINAL and math.isfinite(reading.error):
                rows.append((*key, "difference_stderr", reading.error, reading.examples, "1"))
        tables.append(tabulate(rows, model=label))
    warnings = list(healing.examples.meta.get("warnings", []))
    if plan.healed_loss is not None and plan.data["hash"] == healing.examples.meta.get("hash"):
        warnings.append("The plan's scalars were trained on some of the rows that healing is measured on.")
    if plan.losses and (remark := in_sample(plan)):
        warnings.append(f"Losses by number of removed blocks are the search's. {remark}")
    headline: dict[str, Finding] = {}
    if tasks is not None:
        healed = last_label(healing)
        headline |= {f"task {reading.task}": reading.finding() for reading in tasks.of(healed)}
        headline |= {f"task_cost {reading.task}": reading.finding() for reading in tasks.of(healed, CONTROL)}
        warnings += tasks.warnings
    document = {
        **provenance(KIND, healing.settings.model_dump(), seed=healing.settings.seed),
        **plan.about(find_anatomy(healing.original)),
        "data": healing.examples.meta,
        "refits": [refit._asdict() for refit in healing.refits],
        "warnings": warnings,
        "headline": headline | dict(healing_headline(healing)),
    }
    return Results(stacked(tables, model="str"), dict(finite(document)))


def last_label(healing: Healing) -> str:
    """The name of the healed model: `trained`, or without training `refitted`."""
    return "trained" if "trained" in healing.readings[LOSS].sums else "refitted"


def healing_headline(healing: Healing) -> Iterator[tuple[str, Finding]]:
    """The loss that the healed model adds to the original's, what of it removal costs, and the same of the others."""
    losses = healing.readings[LOSS]
    held = units(healing.examples.meta)
    labels = [label for label in losses.sums if label != "original"]
    last = last_label(healing)
    other_text = f" Measured on {text_of(healing)}: the loss on other text is unknown."
    if CONTROL in labels:
        net = losses.added("trained", CONTROL)
        cost = difference_in_words(net, "the control, the original trained on the same tokens", held)
        sentence = f"Net cost of removal: {cost}."
        yield "net_cost", difference_finding(net, sentence + other_text, held)
        other_text = ""
    for label in sorted(labels, key=lambda name: name != last):
        added = losses.added(label)
        kl, agreement = (healing.readings[kind].mean(label) for kind in (DIVERGENCE, AGREEMENT))
        sentence = (
            f"{NAMES[label][0].upper()}{NAMES[label][1:]}: held-out loss {losses.mean(label):.4f} nats, "
            f"{difference_in_words(added, 'the original', held)}; divergence from it {kl:.4f} nats, the same most "
            f"likely token in {agreement:.1%} of {losses.count} tokens.{other_text * (label == last)}"
        )
        yield f"loss_added {label}", difference_finding(added, sentence, held)
    change = losses.added(last, "removed")
    sentence = f"Healing, in held-out loss: {difference_in_words(change, 'the model without it', held)}."
    yield "healing", difference_finding(change, sentence, held)
