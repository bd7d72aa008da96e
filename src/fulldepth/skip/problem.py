"""`SearchProblem`: a model that can be scored, and its data in chunks, checked against each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

import fulldepth.architectures  # noqa: F401  # registers this package's models with transformers
from fulldepth.core.distributed import Processes
from fulldepth.core.errors import FulldepthError
from fulldepth.data.examples import Examples, read_examples
from fulldepth.execution import find_anatomy
from fulldepth.execution.scoring import SCALED, ScoredBatch, Scorer, make_batches
from fulldepth.execution.verify import check_task, prove
from fulldepth.hf import (
    Anatomy,
    Checkpoint,
    anatomy_candidates,
    evaluating,
    first_broken_weight,
    open_model,
    open_tokenizer,
)
from fulldepth.hf.model_hash import model_hash
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import Switches
from fulldepth.settings.search import PLACES, CurveSettings, HeldoutSettings, SearchSettings
from fulldepth.skip.fit import check_fit
from fulldepth.skip.loss_cache import Chunk
from fulldepth.skip.plan import picks_of

SMALL_CHUNK = 4
"""Chunks of few held-out sequences are of this size, also where batches are larger, so that progress is stored often.
The greedy search, which may drop candidates after every chunk, goes down to single sequences."""


@dataclass(frozen=True)
class SearchProblem:
    """A model that can be scored, with its data."""

    checkpoint: Checkpoint
    hash: str
    scorer: Scorer
    examples: Examples
    chunks: list[Chunk]
    settings: SearchSettings
    blocks: int | None
    """To remove; None = until the target."""

    @property
    def batches(self) -> list[ScoredBatch]:
        """The held-out data."""
        return [batch for chunk in self.chunks for batch in chunk]

    @property
    def noted_settings(self) -> dict[str, Any]:
        """The settings that a plan records: all but those of the machine (`PLACES`)."""
        return self.settings.model_dump(exclude=PLACES)


def open_for(model: str | Path | PreTrainedModel, settings: SearchSettings, process: Processes) -> Checkpoint:
    """The language model as passed in, or loaded by the settings of a search.

    Raises:
        FulldepthError: as `load_checkpoint`; for another model; for settings that it makes meaningless.
    """
    options = settings.model_dump(include={"dtype", "device_map", "revision", "trust_remote_code"})
    checkpoint = open_model(model, device=process.device(settings.device), **options)
    anatomy = check_task(anatomy_candidates(checkpoint.model)[0])
    if anatomy.not_serial is not None:
        refused = {
            f"{settings.target}: zeros save no time and no bytes; set the number of blocks": settings.target,
            "scalars: they have no place there; use --no-fit (fit=False)": settings.fit,
            "the criterion scaled: scalars have no place there; use loss or kl": settings.criterion == SCALED,
            "the search taylor: its gates are scalars, which have no place there": settings.search == "taylor",
        }
        if reason := next((text for text, holds in refused.items() if holds), None):
            raise FulldepthError(
                f"{type(checkpoint.model).__name__} can be searched, with removed branches set to zero "
                f"({anatomy.not_serial}), but not with {reason}."
            )
    return checkpoint


def tokenizer_of(checkpoint: Checkpoint, settings: HeldoutSettings, tokenizer: Any = None) -> Any:
    """The tokenizer as passed in, or the one that the settings name, or the checkpoint's own.

    Raises:
        FulldepthError: if there is none.
    """
    return open_tokenizer(
        checkpoint,
        settings.tokenizer if tokenizer is None else tokenizer,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )


@contextmanager
def prepared(
    model: str | Path | PreTrainedModel,
    data: Any,
    settings: SearchSettings,
    process: Processes,
    *,
    tokenizer: Any,
    heldout: Any,
    hashed: str | None = None,
) -> Iterator[SearchProblem]:
    """Load model and data, hash and verify them, and check them against each other.

    Args:
        model: as for `search`; restored on leaving.
        data: as for `search`.
        settings: of the search.
        process: the processes that share it.
        tokenizer: as for `search`.
        heldout: as for `search`.
        hashed: `model_hash` of the model, if the caller has computed it.

    Raises:
        FulldepthError: as `search`.
    """
    checkpoint = open_for(model, settings, process)
    owner = checkpoint.model
    if broken := first_broken_weight(owner):
        raise FulldepthError(f"{checkpoint.name} has NaN or infinite weights (first: {broken}).")
    with evaluating(owner):
        guess = check_task(find_anatomy(owner))
        blocks = _num_blocks(settings, guess.num_layers)
        data = read_data(checkpoint, guess, data, settings, tokenizer=tokenizer, heldout=heldout)
        chunks = split(data, settings)
        anatomy, classifier = prove(owner, chunks[0][0].inputs)
        hashed = hashed or model_hash(owner)
        with Switches(anatomy, kind := settings.granularity) as switches:
            scorer = Scorer(anatomy, classifier, switches, chunks[0][0], keep=settings.keep)
            able = scorer.costs.able
            if given := sorted(frozenset().union(*picks_of(settings.given or (), kind)) - {*able}):
                raise FulldepthError(f"There is no {given[0].part} of layer {given[0].layer} to remove.")
            if not able or ((blocks or 0) > len(able) and not isinstance(settings, CurveSettings)):
                raise FulldepthError(f"Cannot remove {blocks or 'any'} blocks: {len(able)} can be removed ({kind}).")
            blocks = blocks and min(blocks, len(able))
            if settings.fit or settings.criterion == SCALED or settings.search == "taylor":
                if settings.search != "taylor" or settings.fit:
                    check_fit(data.train)
                switches.scalars = Scalars(anatomy.num_layers, (), kind)  # refused before the search
                scorer.plain()
            yield SearchProblem(checkpoint, hashed, scorer, data, chunks, settings, blocks)


def read_data(
    checkpoint: Checkpoint, anatomy: Anatomy, data: Any, settings: HeldoutSettings, *, tokenizer: Any, heldout: Any
) -> Examples:
    """The examples of a search, a curve or a benchmark.

    Args:
        checkpoint: the model; its tokenizer is the default.
        anatomy: of that model.
        data: as for `read_examples`; `Examples` are returned as they are.
        settings: of reading.
        tokenizer: a tokenizer, its folder or Hub name; None = that of the settings.
        heldout: as for `read_examples`.

    Raises:
        FulldepthError: as `read_examples`; if there is no tokenizer.
    """
    if isinstance(data, Examples):
        return data
    return read_examples(
        data,
        tokenizer_of(checkpoint, settings, tokenizer),
        anatomy.max_positions,
        heldout=heldout,
        seed=settings.seed,
        sequence_length=settings.sequence_length,
        limit=settings.max_sequences,
        vocab_size=anatomy.vocab_size,
    )


def split(examples: Examples, settings: SearchSettings) -> list[Chunk]:
    """The held-out examples in chunks of batches: random parts of nearly equal size.

    Raises:
        FulldepthError: if no token of one counts.
    """
    heldout = examples.heldout
    order = np.random.default_rng(settings.seed).permutation(len(heldout))
    size = 1 if settings.search == "greedy" else min(settings.batch_size, SMALL_CHUNK)
    count = max(1, min(settings.chunks, len(heldout) // size))
    return [make_batches([heldout[i] for i in part], settings.batch_size) for part in np.array_split(order, count)]


def _num_blocks(settings: SearchSettings, depth: int) -> int | None:
    """k, checked before data are read; None with a target.

    Raises:
        FulldepthError: if the settings do not say how many, or the model has no such layers.
    """
    given = settings.given
    blocks = settings.blocks if given is None else len(given)
    if beyond := [layer for layer in settings.keep if layer > depth]:
        raise FulldepthError(f"There is no layer {beyond[0]} to keep; this model has the layers 1 to {depth}.")
    if settings.target is None and not blocks:
        raise FulldepthError(
            "How much to remove? Set blocks, a target (target_speedup, target_bytes, target_cache, max_loss), or name "
            "the layers in given."
        )
    if given is not None:
        picks_of(given, settings.granularity)
        if settings.blocks not in (None, blocks):
            raise FulldepthError(f"{blocks} layers are given, but blocks is {settings.blocks}.")
    return blocks
