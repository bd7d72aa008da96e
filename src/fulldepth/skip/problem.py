"""`SearchProblem`: a model that can be scored, and its data in chunks, checked against each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from fulldepth.core.distributed import Processes
from fulldepth.core.errors import FulldepthError, first_reason
from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples, read_examples
from fulldepth.data.tokens import check_vocabulary, plain_ids
from fulldepth.execution.scoring import SCALED, ScoredBatch, Scorer, make_batches
from fulldepth.execution.verify import Verified
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import Switches
from fulldepth.settings.search import PLACES, CurveSettings, HeldoutSettings, SearchSettings
from fulldepth.skip.fit import check_fit
from fulldepth.skip.loss_cache import Chunk
from fulldepth.skip.plan import picks_of
from fulldepth.subject import Subject

SMALL_CHUNK = 4
"""Chunks of few held-out sequences are of this size, also where batches are larger, so that progress is stored often.
The greedy search, which may drop candidates after every chunk, goes down to single sequences."""


SENTENCE = "The cat sat on the mat and looked at the birds in the garden."
ROW_TOKENS = 8
"""Text of a row that stands for others, and the number of its tokens."""


@dataclass(frozen=True)
class SearchProblem:
    """A model that can be scored, with its data."""

    subject: Subject
    scorer: Scorer
    examples: Examples
    chunks: list[Chunk]
    settings: SearchSettings

    @classmethod
    @contextmanager
    def prepare(
        cls, subject: Subject, data: Any, settings: SearchSettings, *, heldout: Any = None
    ) -> Iterator[SearchProblem]:
        """Read the data, prove the model on them, and check both against the settings.

        Args:
            subject: from `open_for_search`; inside `with` its blocks can be switched.
            data: as for `search`.
            settings: of the search.
            heldout: as for `search`.

        Raises:
            FulldepthError: as `search`.
        """
        check_search_target(settings, subject.anatomy.num_layers)
        if data is None and heldout is None:
            raise FulldepthError("Blocks are chosen on data: a seeded fifth of --data, or all rows of --heldout.")
        if data is None and settings.fit:
            raise FulldepthError("Scalars are trained on --data. Give it, or leave them out: --no-fit.")
        examples = read_data(subject, data, settings, heldout=heldout)
        chunks = split(examples, settings, subject.anatomy.config)
        verified = subject.prove({name: rows[:2] for name, rows in chunks[0][0].inputs.items()})
        anatomy = verified.anatomy
        if not verified.finds(settings.granularity):
            whole = settings.granularity == "layer" and anatomy.not_serial is None
            raise FulldepthError(f"{subject.kind} cannot skip blocks: {_unremovable(verified, whole)}")
        _ = subject.identity  # computed here: switches change the names of weights
        with Switches(anatomy, kind := settings.granularity) as switches:
            scorer = Scorer(anatomy, subject.classifier, switches, chunks[0][0], keep=settings.keep)
            removable = scorer.costs.able
            if given := sorted(frozenset().union(*picks_of(settings.given or (), kind)) - {*removable}):
                part = "" if given[0].part == "layer" else f"{given[0].part} of "
                raise FulldepthError(f"There is no {part}layer {given[0].layer} to remove.")
            named = "block" if kind == "any" else kind if kind == "layer" else f"{kind} block"
            if not removable:
                outside = " outside the layers to keep" if settings.keep else ""
                raise FulldepthError(f"This model has no {named}{outside} that can be removed.")
            if (settings.num_blocks or 0) > len(removable) and not isinstance(settings, CurveSettings):
                raise FulldepthError(
                    f"Cannot remove {settings.num_blocks} blocks: this model has {len(removable)} {named}s that can be "
                    "removed."
                )
            if settings.fit or settings.criterion == SCALED or settings.search == "taylor":
                if settings.search != "taylor" or settings.fit:
                    check_fit(examples.train)
                switches.scalars = Scalars(anatomy.num_layers, (), kind)  # refused before the search
                scorer.plain()
            yield cls(subject, scorer, examples, chunks, settings)

    @property
    def batches(self) -> list[ScoredBatch]:
        """The held-out data."""
        return [batch for chunk in self.chunks for batch in chunk]

    @property
    def noted_settings(self) -> dict[str, Any]:
        """The settings that a plan records: all but those of the machine (`PLACES`)."""
        return self.settings.model_dump(exclude=PLACES)


def _unremovable(verified: Verified, whole: bool) -> str:
    """Return why parts, or `whole` layers, of a proven model have no place that they could be removed from."""
    if whole:
        return "its layers do not read the state that the layer before gives, so none can be left out."
    advice = " Skip whole layers: --granularity layer." if verified.chained else ""
    return f"its {verified.unknown_branches}.{advice}"


@contextmanager
def open_for_search(
    model: str | Path | PreTrainedModel, settings: SearchSettings, process: Processes, tokenizer: Any = None
) -> Iterator[Subject]:
    """The language model of a search; the tokenizer is opened when data are read.

    Raises:
        FulldepthError: as `Subject.open`; for settings that the model makes meaningless.
    """
    device = process.device(settings.device)
    needs = {"language", "head", "plain"}
    with Subject.open(model, None, settings, needs=needs, tokenizer=tokenizer, device=device) as subject:
        if subject.anatomy.not_serial is not None:
            refused = {
                f"{settings.target}: zeros save no time and no bytes; set the number of blocks": settings.target,
                "scalars: they have no place there; use --no-fit (fit=False)": settings.fit,
                "the criterion scaled: scalars have no place there; use loss or kl": settings.criterion == SCALED,
                "the search taylor: its gates are scalars, which have no place there": settings.search == "taylor",
            }
            if reason := first_reason(refused):
                raise FulldepthError(
                    f"{subject.kind} can be searched, with removed branches set to zero "
                    f"({subject.anatomy.not_serial}), but not with {reason}."
                )
        yield subject


@contextmanager
def prepared(
    model: str | Path | PreTrainedModel,
    data: Any,
    settings: SearchSettings,
    process: Processes,
    *,
    tokenizer: Any = None,
    heldout: Any = None,
) -> Iterator[SearchProblem]:
    """Open a model and prepare its search; arguments and errors are those of the two steps."""
    with (
        open_for_search(model, settings, process, tokenizer) as subject,
        SearchProblem.prepare(subject, data, settings, heldout=heldout) as problem,
    ):
        yield problem


def read_data(subject: Subject, data: Any, settings: HeldoutSettings, *, heldout: Any = None) -> Examples:
    """The examples of a search, a curve, a benchmark or a healing; their warnings begin with those of the checkpoint.

    Args:
        subject: whose tokenizer and positions the data are read for.
        data: as for `read_examples`; `Examples` are returned as they are.
        settings: of reading.
        heldout: as for `read_examples`.

    Raises:
        FulldepthError: as `read_examples`; if there is no tokenizer.
    """
    if isinstance(data, Examples):
        return data
    examples = read_examples(
        data,
        subject.tokenizer,
        subject.anatomy.max_positions,
        heldout=heldout,
        seed=settings.seed,
        sequence_length=settings.sequence_length,
        limit=settings.max_sequences,
        vocab_size=subject.anatomy.vocab_size,
        chat=settings.chat,
    )
    of_loading = subject.checkpoint.warnings  # such as weights that the model does not use; results state them here
    return replace(examples, meta={**examples.meta, "warnings": [*of_loading, *examples.meta["warnings"]]})


def stand_in(subject: Subject) -> Examples:
    """Two rows in place of text that the model has yet to write: whether it can be searched does not depend on them.

    Raises:
        FulldepthError: if there is no tokenizer, or it gives tokens that the model lacks.
    """
    if subject.tokenizer is None:
        raise FulldepthError("The model has no tokenizer, so that it cannot write text. Give one.")
    ids = (plain_ids(subject.tokenizer, SENTENCE) * ROW_TOKENS)[:ROW_TOKENS]  # some tokenizers give a single token
    check_vocabulary(max(ids, default=0), subject.tokenizer, subject.anatomy.vocab_size)
    rows = [Example.of(ids, 1, len(ids), document=number) for number in range(2)]
    return Examples(rows, rows)


def split(examples: Examples, settings: SearchSettings, config: Any) -> list[Chunk]:
    """The held-out examples in chunks of batches for a model: random parts of nearly equal size.

    Raises:
        FulldepthError: if no token of one counts.
    """
    heldout = examples.heldout
    order = np.random.default_rng(settings.seed).permutation(len(heldout))
    size = 1 if settings.search == "greedy" else min(settings.batch_size, SMALL_CHUNK)
    count = max(1, min(settings.chunks, len(heldout) // size))
    parts = np.array_split(order, count)
    return [make_batches([heldout[i] for i in part], settings.batch_size, config) for part in parts]


def check_search_target(settings: SearchSettings, depth: int) -> None:
    """Check before data are read that the settings say how much to remove, and name layers that a model can have.

    Raises:
        FulldepthError: if they do not.
    """
    if beyond := [layer for layer in settings.keep if layer > depth]:
        raise FulldepthError(f"There is no layer {beyond[0]} to keep; this model has the layers 1 to {depth}.")
    if settings.target is None and not settings.num_blocks:
        raise FulldepthError(
            "How much to remove? Set --blocks or a target (--target-speedup, --target-bytes, --target-cache, "
            "--max-loss), or name the blocks with --given."
        )
    picks = picks_of(settings.given or (), settings.granularity)
    if named_in_both := sorted({block.layer for pick in picks for block in pick} & {*settings.keep}):
        raise FulldepthError(
            f"--given removes from layer {named_in_both[0]}, of which --keep lets nothing be removed. Name it in one."
        )
