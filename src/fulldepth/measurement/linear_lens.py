"""Fits the linear lens: chooses the text, checks that it suffices, and sums over it what the maps need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fulldepth.core.distributed import Processes
from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.core.targets import IGNORE
from fulldepth.core.uncertainty import counted, plural, sample
from fulldepth.data import Sequences, Source
from fulldepth.data.corpus import CORPUS
from fulldepth.execution import capture
from fulldepth.hf import available_memory
from fulldepth.metrics import LinearMaps, MapSums
from fulldepth.settings.measure import MeasureSettings
from fulldepth.subject import Subject
from fulldepth.subject.open import DEFAULT_LENGTH, read_source

WANTED = 20
"""Positions for each channel that are fitted on by default."""
ENOUGH = 5
"""Positions for each channel below which a warning says that the maps are poor."""
HELD_OUT = 5
"""One in so many documents chooses the ridge."""
OTHER_TEXT = f"Name other text to fit on, such as --fit {CORPUS}."
OTHER_PAIRS = "Name other pairs to fit on, such as --fit pairs.jsonl."


@dataclass(frozen=True)
class LinearLens:
    """Fitted maps, and what they were fitted on."""

    maps: LinearMaps
    sequences: Sequences
    positions: int
    """Positions that the maps rest on."""
    held_out: dict[str, int]
    """Documents and positions, among these, that chose the ridge."""
    width: int

    def document(self) -> dict[str, Any]:
        """The entry `linear_lens` of `results.json`; lists are by layer 0..L-1."""
        return {
            "data": self.sequences.describe(),
            "positions": self.positions,
            "held_out": self.held_out,
            "ridge_strength": self.maps.strengths,
            "ridge": self.maps.ridges,
            "unexplained": self.maps.unexplained,
            "sentence": self.sentence,
        }

    @property
    def sentence(self) -> str:
        """A sentence on what the maps rest on."""
        entry = self.sequences.describe()
        unit = self.sequences.unit
        return (
            f"The linear lens is fitted on {self.positions:,} positions ({self.positions / self.width:.1f} for each of "
            f"{self.width} channels) in {counted(len(self.sequences), 'sequence')} of "
            f"{counted(entry['clusters'], unit)} of {entry['name']} that are not measured; "
            f"{self.held_out['clusters']:,} of these {plural(unit)} chose the ridge."
        )

    @property
    def warnings(self) -> list[str]:
        """A warning if the positions are few."""
        if self.positions >= ENOUGH * self.width:
            return []
        return [
            f"The linear lens rests on {self.positions:,} positions, fewer than {ENOUGH} for each of {self.width} "
            f"channels ({ENOUGH * self.width:,}): its maps are poor and its numbers too low. {self.enough}"
        ]

    @property
    def enough(self) -> str:
        """How many sequences would suffice."""
        return enough(self.sequences, self.positions, self.width)


def enough(sequences: Sequences, positions: int, width: int) -> str:
    """A sentence on the number of sequences that hold `ENOUGH` positions for each channel."""
    needed = math.ceil(ENOUGH * width * len(sequences) / max(1, positions))
    return (
        f"About {needed:,} sequences like these would suffice: name more text by --fit, or raise fit_sequences where "
        "it limits them."
    )


def cannot_be_fitted(reason: str) -> FulldepthError:
    """The error for a linear lens that was asked for and cannot be fitted."""
    return FulldepthError(f"The linear lens was asked for but cannot be fitted: {reason}")


def _other_data(subject: Subject) -> str:
    """Which other data the maps can be fitted on."""
    return OTHER_PAIRS if subject.anatomy.task == "seq2seq-lm" else OTHER_TEXT


def fitting_sequences(subject: Subject, settings: MeasureSettings) -> Sequences:
    """Sequences to fit on, of documents that the measurement does not read: a seeded, uniform sample.

    They are prepared as the measured ones. Documents with the content of a measured one are left out.

    Raises:
        FulldepthError: if no document is left.
    """
    measured = subject.sequences
    data = subject.origin if settings.fit is None else settings.fit
    if data is None or not measured.contents:
        raise cannot_be_fitted(
            f"the documents of {measured.name} are not known, so none can be left for it. {_other_data(subject)}"
        )
    wanted = WANTED * subject.verified.width
    length = settings.sequence_length or min(DEFAULT_LENGTH, subject.anatomy.max_positions or DEFAULT_LENGTH)
    count = settings.fit_sequences or math.ceil(wanted / max(1, length - 1))
    for _ in range(2):  # a second time if sequences hold fewer positions than their length
        unread = _unread(subject, data, settings, count)
        sequences = subject.further(unread, settings.model_copy(update={"max_sequences": count, "split": None}))
        if settings.fit_sequences is not None or len(sequences) < count or sequences.num_targets >= wanted:
            break
        count = math.ceil(1.1 * count * wanted / max(1, sequences.num_targets))
    if shared := sequences.contents & measured.contents:
        raise FulldepthError(f"{len(shared)} documents are fitted on and measured; this is a defect of fulldepth.")
    return sequences


def _unread(subject: Subject, data: Any, settings: MeasureSettings, count: int) -> Source:
    """Records that hold `count` sequences or more, if there are so many, and that are not measured.

    Raises:
        FulldepthError: if all are measured.
    """
    measured = subject.sequences
    for limit in (count, count + len(measured)):  # more only where some of them are measured
        reading = {"max_sequences": limit, "split": settings.split if settings.fit is None else None}
        source = read_source(data, settings.model_copy(update=reading), held_out=settings.fit is None)
        unread = subject.unread(source)
        if len(unread) == len(source):
            return unread
    if not len(unread):
        documents = counted(len(source), "document")
        raise cannot_be_fitted(f"all {documents} of {source.name} are measured. {_other_data(subject)}")
    return unread


def choosing(sequences: Sequences, seed: int) -> np.ndarray:
    """[N] bool: sequences that choose the ridge, a seeded fifth of the documents (or blocks) with all of theirs.

    Raises:
        FulldepthError: if there are fewer than two.
    """
    clusters = np.array(sequences.clusters)
    every = np.unique(clusters)
    if len(every) < 2:
        raise cannot_be_fitted(
            f"its ridge is chosen on held-out {plural(sequences.unit)}, which takes two at least, and "
            f"{sequences.name} leaves one. Read more of it (--set fit_sequences), or name more text by --fit."
        )
    drawn = every[sample(every.tolist(), max(1, len(every) // HELD_OUT), seed)]
    return np.isin(clusters, drawn)


class FittingText(NamedTuple):
    """Text to fit the maps on."""

    sequences: Sequences
    held_out: np.ndarray
    """[N] bool: those that choose the ridge."""


def fitting_text(subject: Subject, settings: MeasureSettings) -> FittingText:
    """The text that the maps are fitted on, enough for them.

    Raises:
        FulldepthError: if there is too little.
    """
    width = subject.verified.width
    sequences = fitting_sequences(subject, settings)
    positions = sequences.num_targets
    if positions < width:
        raise cannot_be_fitted(
            f"it takes {width:,} positions at least, one for each channel, and {ENOUGH * width:,} for good maps; "
            f"there are {positions:,} in {counted(len(sequences), 'sequence')} of {sequences.name}. "
            f"{enough(sequences, positions, width)}"
        )
    return FittingText(sequences, choosing(sequences, settings.seed))


@torch.inference_mode()
def fit_linear_lens(
    subject: Subject,
    text: FittingText,
    settings: MeasureSettings,
    process: Processes,
    watcher: Watcher,
    device: torch.device,
) -> LinearLens:
    """Fit the maps of layers 0..L-1 to layer L on positions with a target, as the lens reads them.

    The sums of products of a layer take `4 D^2` float64 numbers. If those of all layers do not fit into half of the
    free memory, layers are summed in groups, with a pass over the text for each.

    Args:
        subject: model and data.
        text: from `fitting_text`.
        settings: batch size.
        process: this process, which runs its share of the batches.
        watcher: receives messages and progress.
        device: of the sums.

    Raises:
        FulldepthError: if memory does not suffice, or an activation is NaN or infinite.
    """
    layers = subject.anatomy.num_layers
    width = subject.verified.width
    sequences, held_out = text
    together = layers_at_once(layers, width, subject.model.dtype, device, process, watcher)
    groups = [range(layers)[start : start + together] for start in range(0, layers, together)]
    share = sequences.groups(settings.batch_size)[process.rank :: process.world]
    watcher.begin("Fitting the linear lens, sequences", len(groups) * sum(map(len, share)))
    parts = []
    for group in groups:
        sums = MapSums(len(group), width, device)
        add_states(subject, sequences, torch.from_numpy(held_out), group, sums, settings, process, watcher)
        if not bool(torch.isfinite(sums.squares).all()) or not bool(torch.isfinite(sums.sums).all()):
            raise FulldepthError(
                f"Activations are NaN or infinite in the text that the linear lens is fitted on ({sequences.name}); "
                "the weights are broken or the precision is too low (try --dtype float32)."
            )
        parts.append(sums.compute().to(torch.promote_types(subject.model.dtype, torch.float32)))
    choosers = [example for example, held in zip(sequences.examples, held_out, strict=True) if held]
    counts = {
        "clusters": len({example.document for example in choosers}),
        "positions": sum(example.predicted for example in choosers),
    }
    linear_lens = LinearLens(LinearMaps.joined(parts), sequences, sequences.num_targets, counts, width)
    watcher.say(linear_lens.sentence)
    return linear_lens


def layers_at_once(
    layers: int, width: int, dtype: torch.dtype, device: torch.device, process: Processes, watcher: Watcher
) -> int:
    """Number of layers whose sums are held at a time, the same in every process.

    Solving, and merging the sums of several processes, takes memory as well: a process plans with one more copy of the
    sums than there are processes.

    Raises:
        FulldepthError: if the maps of all layers and the sums of one exceed the free memory.
    """
    free = min(process.gather(available_memory(device)))
    of_layer = MapSums.bytes_of_layer(width)
    of_maps = layers * width * width * torch.promote_types(dtype, torch.float32).itemsize
    together = min(layers, (free - of_maps) // ((process.world + 1) * of_layer))
    needed, maps, left = (f"{size / (1 << 20):,.1f} MiB" for size in (layers * of_layer, of_maps, free))
    if together < 1:
        raise cannot_be_fitted(
            f"the maps of {layers} layers take {maps}, and the sums of one layer {of_layer / (1 << 20):,.1f} MiB at "
            f"least twice; free: {left}. Use a device with more memory."
        )
    passes = math.ceil(layers / together)
    in_groups = f" {counted(together, 'layer')} at a time, in {passes} passes over the text." if passes > 1 else ""
    watcher.say(f"Memory of the linear lens: sums of products {needed}, maps {maps}, free {left}.{in_groups}")
    return together


def add_states(
    subject: Subject,
    sequences: Sequences,
    held_out: torch.Tensor,
    layers: range,
    sums: MapSums,
    settings: MeasureSettings,
    process: Processes,
    watcher: Watcher,
) -> None:
    """Add the states of some layers at every position with a target to their sums, for this process's batches.

    Args:
        subject: the model.
        sequences: the text.
        held_out: `[N]` bool, sequences that choose the ridge.
        layers: numbers of the layers, from 0.
        sums: updated in place.
        settings: batch size.
        process: this process.
        watcher: receives progress.
    """
    device = sums.sums.device
    with capture(subject.anatomy, ["residual"], stacked=device) as activations:
        for batch in sequences.batches(settings.batch_size, process.rank, process.world):
            assert batch.targets is not None, "a head that predicts tokens"
            inputs = subject.inputs(batch.inputs if batch.masked_inputs is None else batch.masked_inputs)
            subject.anatomy.run(inputs)
            states = activations.stack("residual", device)  # [L+1, B, T, D]
            activations.clear()
            where = (batch.targets != IGNORE).to(device)  # [B, T]
            row = where.nonzero()[:, 0].to(held_out.device)
            part = states[layers.start : layers.stop]
            sums.update([state[where] for state in part], states[-1][where], held_out[batch.sequence][row].to(device))
            watcher.advance(len(batch))
