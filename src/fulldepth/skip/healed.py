"""`save_healed`: a healed model as an ordinary checkpoint, with the results of healing in its folder.

Rows, with the column `model` (`original`, `removed`, `maps`, and after training `trained` and `control`): `loss`
(`mean`: nats per token; `difference_stderr`: of the difference to the original, over `count` documents), `kl` (`mean`:
KL(original || model)) and `greedy_agreement` (`mean`: share of tokens for which both predict the same next token), of
the same held-out rows for every model.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fulldepth.architectures import SKIPPED
from fulldepth.execution.scoring import AGREEMENT, DIVERGENCE, LOSS
from fulldepth.files import read_json
from fulldepth.hf.checkpoint_folder import folder_to_be
from fulldepth.progress import Watcher
from fulldepth.results import Finding, Results, finite, provenance, tabulate
from fulldepth.skip.bench import gap_finding, heldout_losses, in_words
from fulldepth.skip.exports.export import NOTES, export
from fulldepth.skip.heal import READINGS, Healing
from fulldepth.skip.outcome import joined
from fulldepth.skip.plan import Plan, in_sample

KIND = "heal"
NAMES = {
    "removed": "without the removed blocks",
    "maps": "with maps",
    "trained": "with maps, then trained",
    "control": "control: the original, trained on the same tokens",
}
"""Model -> its name in sentences."""
WITHOUT_FILES = ("optimizer.pt", "scheduler.pt", "training_args.bin", "trainer_state.json")


def format_for(plan: Plan, model: PreTrainedModel) -> str:
    """The format that holds a plan's model without its removed parts, or else `folded`."""
    if plan.kind == "layer":
        return "layer"
    return "fast" if model.config.get_text_config(decoder=True).model_type in SKIPPED else "folded"


def with_model(healing: Healing, label: str, model: PreTrainedModel, watcher: Watcher) -> Healing:
    """The healing with the losses of a further model, in evaluation mode, on the held-out rows."""
    models, rows = {"original": healing.original, label: model}, healing.examples.heldout
    own = heldout_losses(models, rows, healing.settings.batch_size, watcher, READINGS)
    known = healing.readings.items()
    readings = {kind: replace(losses, sums={**losses.sums, **own[kind].sums}) for kind, losses in known}
    return replace(healing, readings=readings)


def save_healed(healing: Healing, plan: Plan, target: Path, checkpoint: Path | None = None, **options: Any) -> Results:
    """Write the healed model's folder: the checkpoint, `results.json`, `results.parquet` and `report.html`.

    Args:
        healing: with the losses of all models.
        plan: as given by the user, which the folder names.
        target: folder to create.
        checkpoint: folder of the trained model; None = the model in memory is exported.
        options: of `export`: `format` (None = `format_for`), `tokenizer`, `shard_size`.

    Raises:
        FulldepthError: as `export`.
    """
    results = outcome(healing, plan)
    with folder_to_be(target) as folder:
        if checkpoint is None:
            checkpoint = folder / "export"
            write_start(healing, checkpoint, **options)
        for path in sorted(checkpoint.iterdir()):
            if path.is_file() and path.name not in WITHOUT_FILES and not path.name.startswith("rng_state"):
                shutil.copy2(path, folder / path.name)
        shutil.rmtree(folder / "export", ignore_errors=True)
        if (folder / NOTES).exists():
            notes = read_json(folder / NOTES)
            notes |= {"plan": plan.document(), "notes": [*notes["notes"], "Healed: report.html in this folder."]}
            (folder / NOTES).write_text(json.dumps(notes, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        results.save(folder)
    return results


def write_start(healing: Healing, folder: Path, *, format: str | None = None, **options: Any) -> None:
    """Export the model with its maps; arguments as for `save_healed`."""
    export(healing.plan, healing.model, format or format_for(healing.plan, healing.model), folder, **options)


def outcome(healing: Healing, plan: Plan) -> Results:
    """A healing as results."""
    losses, tables = healing.readings[LOSS], []
    for label in losses.sums:
        rows: list[tuple[Any, ...]] = []
        for kind, unit in ((LOSS, "nats"), (DIVERGENCE, "nats"), (AGREEMENT, "1")):
            mean = healing.readings[kind].mean(label)
            rows.append((kind, "model", None, None, "mean", mean, losses.count, unit))
        added = losses.added(label)
        if label != "original" and math.isfinite(added.free_error):
            rows.append(("loss", "model", None, None, "difference_stderr", added.free_error, added.documents, "nats"))
        tables.append(tabulate(rows, model=label))
    warnings = list(healing.examples.meta.get("warnings", []))
    if plan.healed_loss is not None and plan.data["hash"] == healing.examples.meta.get("hash"):
        warnings.append("The plan's scalars were trained on some of the rows that healing is measured on.")
    if remark := in_sample(plan):
        warnings.append(f"Losses by number of removed blocks are the search's. {remark}")
    document = {
        **provenance(KIND, healing.settings.model_dump(), seed=healing.settings.seed),
        "model": {
            **plan.document()["model"],
            "num_layers": healing.original.config.get_text_config(decoder=True).num_hidden_layers,
        },
        "data": healing.examples.meta,
        "plan": plan.document(),
        "maps": [each._asdict() for each in healing.maps],
        "warnings": warnings,
        "headline": dict(headline(healing)),
    }
    return Results(joined(tables, model="str"), dict(finite(document)))


def headline(healing: Healing) -> Iterator[tuple[str, Finding]]:
    """The loss that each model adds to the original's, and what healing takes back."""
    losses = healing.readings[LOSS]
    labels = [label for label in losses.sums if label != "original"]
    for label in labels:
        added = losses.added(label)
        kl, agreement = (healing.readings[kind].mean(label) for kind in (DIVERGENCE, AGREEMENT))
        sentence = (
            f"{NAMES[label][0].upper()}{NAMES[label][1:]}: held-out loss {losses.mean(label):.4f} nats, "
            f"{in_words(added, 'the original')}; divergence from it {kl:.4f} nats, the same most likely token in "
            f"{agreement:.1%} of {losses.count} tokens."
        )
        yield f"loss_added {label}", gap_finding(added, sentence)
    last = "trained" if "trained" in labels else "maps"
    change = losses.added(last, "removed")
    yield "healing", gap_finding(change, f"Healing changes the loss by {in_words(change, 'the model without it')}.")
    if "control" in labels:
        net = losses.added(last, "control")
        sentence = f"Net cost of removal, against the control: {in_words(net, 'the control')}."
        yield "net_cost", gap_finding(net, sentence)
