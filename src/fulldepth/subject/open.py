"""`Subject`: a checkpoint with its data, opened and proven; what every command that runs a model opens first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import fulldepth.architectures  # noqa: F401  # registers this package's models with transformers
from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.data import Batch, Sequences, Source, input_texts, open_source, prepare
from fulldepth.data.labelled import usable_rows
from fulldepth.execution.batching import batched, model_inputs
from fulldepth.execution.verify import Verified, check_language, find_anatomy, verify
from fulldepth.hf import (
    Anatomy,
    Checkpoint,
    Classifier,
    anatomy_candidates,
    checkpoint_of,
    depth_of,
    device_of,
    evaluating,
    instead_of_language,
    load_processor,
    no_single_class,
    open_model,
    open_tokenizer,
    refuse_unread,
    sample_inputs,
    task_of,
    text_config,
    unread_prediction,
    unwrapped,
)
from fulldepth.hf.model_hash import configuration_hash, model_hash
from fulldepth.settings.loading import LoadingSettings, ReadingSettings

DEFAULT_LENGTH = 256
WHOLE = 1 << 20
"""Tokens up to which a classifier without a limit of positions reads a text."""
IMAGES = ("images", "objects")
"""Kinds of sources whose records are images."""
CLASSES = ("text-classification", "image-classification", "detection")
"""Tasks whose labels follow the model's names of classes."""
PREDICTING = ("causal-lm", "masked-lm", "text-classification", "image-classification")
"""Tasks whose predictions are compared with one target each."""
STARTS = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
"""Settings that name a decoder's first token, in order of preference."""
PROVEN_POSITIONS = 16
"""Tokens of each of two sequences that the proof runs on."""


@dataclass(eq=False)
class Subject:
    """A model in evaluation mode, with its tokenizer and, if it was opened with data, the sequences prepared for it."""

    checkpoint: Checkpoint
    settings: LoadingSettings
    needs: frozenset[str] = frozenset()
    """As for `open`."""
    given_tokenizer: Any = None
    """As for `open`."""
    data: Sequences | None = None
    """The prepared sequences, batched so that the model's results do not change; None if opened without data."""
    note: str | None = None
    """A sentence on how batching is restricted; None if it is not."""
    origin: Any = None
    """The data as the caller named them, from which more can be read; None = they were prepared by the caller."""

    @classmethod
    @contextmanager
    def open(
        cls,
        model: str | Path | nn.Module | Checkpoint,
        data: Any,
        settings: LoadingSettings,
        *,
        needs: Collection[str] = (),
        tokenizer: Any = None,
        device: str | None = None,
        tower: str | None = None,
        anatomy: Mapping[str, Any] | None = None,
        words: Sequence[str] = (),
    ) -> Iterator[Self]:
        """Load a model, prepare data for it, and prove its anatomy on their first sequences.

        Inside `with` the model is in evaluation mode; on leaving, the mode of every module is restored.

        Args:
            model: a checkpoint folder, GGUF file, `package:NAME`, Hub name or loaded model; or the checkpoint of a
                subject that is open.
            data: as for `fulldepth.measure`, with `settings` that say how to read them (`ReadingSettings`); None = no
                data. The anatomy is then proven on a small artificial batch, when it is asked for.
            settings: how the model and its tokenizer are loaded.
            needs: what is refused if it is missing. `language`: a causal language model; `targets`: a model that
                predicts tokens or one class, and data with targets; `head`, `branches`: these parts proven, without
                data when `verified` is first asked for;
                `tokenizer`: a tokenizer, opened at once; `plain`: the checkpoint's own weights alone, without
                adapters around them and without exit heads. Without `plain`, exit heads are loaded, and proven with
                `head`.
            tokenizer: a tokenizer, its folder or Hub name; None = that of the settings, or the checkpoint's own.
            device: in place of the settings' device.
            tower: part of a model that has two (`anatomy_candidates`).
            anatomy: names of the model's parts, in place of the table of families.
            words: whose occurrences in the data are marked.

        Raises:
            FulldepthError: if the model cannot be loaded, has NaN or infinite weights or lacks what is needed, its
                anatomy is not proven, or the data cannot be read or do not fit the model.
        """
        checkpoint = open_checkpoint(model, settings, device=device, plain="plain" in needs)
        subject = cls(checkpoint, settings, frozenset(needs), tokenizer)
        with evaluating(subject.model):
            subject._check_task()
            if not isinstance(model, Checkpoint):
                checkpoint.check_weights()
            if data is not None:
                assert isinstance(settings, ReadingSettings), "settings that say how data are read"
                candidates = anatomy_candidates(subject.model, tower=tower, override=anatomy)
                subject._read(data, settings, candidates, words)
            elif "tokenizer" in needs:
                _ = subject.tokenizer
            yield subject

    @property
    def model(self) -> PreTrainedModel:
        """The model, in evaluation mode."""
        return self.checkpoint.model

    @property
    def kind(self) -> str:
        """The name of the model's class."""
        return one_line(type(self.model).__name__, 100)

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs."""
        return device_of(self.model)

    @property
    def sequences(self) -> Sequences:
        """The prepared data of a subject that was opened with data."""
        assert self.data is not None, "opened without data"
        return self.data

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of the checkpoint, of the data, and on batching."""
        of_data = () if self.data is None else self.data.warnings
        return (*self.checkpoint.warnings, *of_data, *(() if self.note is None else (self.note,)))

    @property
    def anatomy(self) -> Anatomy:
        """The anatomy: the proven one, or that of the family where nothing has been proven yet (`find_anatomy`)."""
        return self.verified.anatomy if "verified" in vars(self) else self._known_anatomy

    @cached_property
    def _known_anatomy(self) -> Anatomy:
        return find_anatomy(self.model)

    @property
    def classifier(self) -> Classifier:
        """The proven head of a subject that needs one."""
        assert self.verified.classifier is not None, "opened without the need of a head"
        return self.verified.classifier

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer as passed in, the named one, or the one saved with or beside the model, opened when it is asked
        for; None if it was opened with data that are no text.

        Raises:
            FulldepthError: if there is none.
        """
        return open_tokenizer(
            self.checkpoint,
            chosen_tokenizer(self.settings, self.given_tokenizer),
            revision=self.settings.revision,
            trust_remote_code=self.settings.trust_remote_code,
        )

    @cached_property
    def verified(self) -> Verified:
        """The anatomy, proven on the first sequences, or without data on a small artificial batch."""
        return self.prove(sample_inputs(self.anatomy))

    @cached_property
    def hash(self) -> str:
        """`model_hash` of the model."""
        return model_hash(self.model)

    @cached_property
    def identity(self) -> dict[str, str]:
        """The hashes of a model's weights and of its configuration, on which its numbers depend."""
        return {"model": self.hash, "configuration": configuration_hash(self.model)}

    def inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A batch's inputs on the model's device and in its precision."""
        return model_inputs(inputs, self.device, self.model.dtype)

    def prove(self, inputs: Mapping[str, Tensor], candidates: Sequence[Anatomy] | None = None) -> Verified:
        """Prove the anatomy on a batch, and keep the result as `verified`.

        Of a language model the beginnings are tried first, and all of the batch only if a part is not proven there.
        Sequence classifiers may need a token at the end, so they and models of images always run on all of it.

        Args:
            inputs: a small batch for the whole model.
            candidates: anatomies that may fit the model, best guess first; None = those of its family.

        Raises:
            FulldepthError: if no candidate is proven, or a part that is needed is not.
        """
        candidates = anatomy_candidates(self.model) if candidates is None else candidates
        inputs = self.inputs(inputs)
        optional = {"head", "branches"} - self.needs
        ids = inputs.get("input_ids")
        verified = None
        if ids is not None and ids.shape[1] > PROVEN_POSITIONS and candidates[0].task in ("causal-lm", "masked-lm"):
            beginnings = {
                name: value[:, :PROVEN_POSITIONS] if value.shape[:2] == ids.shape else value
                for name, value in inputs.items()
            }
            with suppress(FulldepthError):  # the message of the whole batch counts
                verified = replace(verify(candidates, beginnings, optional=optional), positions=ids.shape[1])
        if verified is None or verified.unproven:
            verified = verify(candidates, inputs, optional=optional)
        self.verified = verified
        if "head" in self.needs and self.verified.classifier is None:
            raise FulldepthError(f"{self.kind} has no head that could be applied to its layers.")
        return self.verified

    def unread(self, source: Source) -> Source:
        """The records of a source whose content is in none of the subject's own sequences; perhaps none."""
        read = self.sequences.contents
        return source.select(index for index, record in enumerate(source.records) if record.content not in read)

    def further(self, source: Source, settings: ReadingSettings) -> Sequences:
        """Sequences of other records for the same model, batched as the subject's own.

        Raises:
            FulldepthError: if they do not fit the model.
        """
        sequences = _sequences_for(self.checkpoint, self.anatomy, source, self.tokenizer, settings, ())
        return replace(sequences, batching=self.sequences.batching)

    def _check_task(self) -> None:
        """Refuse a model whose task is not one of those that are needed."""
        model = self.model
        task = "representation"
        if {"language", "targets"} & self.needs:
            refuse_unread(model)
            if task_of(model) != task:
                task = anatomy_candidates(model)[0].task
        if "language" in self.needs:
            check_language(model, task)
        if "targets" in self.needs and getattr(model.config, "is_encoder_decoder", False):
            raise FulldepthError(
                f"{self.kind} is an encoder-decoder; predictions by layer are read of a language model of one stack, "
                f"or of a classifier of texts or images. {instead_of_language(model)}"
            )
        if "targets" in self.needs and task not in PREDICTING:
            raise FulldepthError(
                "Predictions by layer are read of a language model, or of a classifier of texts or images: "
                f"{unread_prediction(model)}. "
                "`fulldepth measure` reads the layers of other models."
            )
        if "targets" in self.needs and task.endswith("-classification") and (reason := no_single_class(model.config)):
            raise FulldepthError(f"{self.kind} {reason}; the rules of early exit compare the probabilities of classes.")

    def _read(
        self,
        data: Any,
        settings: ReadingSettings,
        candidates: Sequence[Anatomy],
        words: Sequence[str],
    ) -> None:
        """Prepare the data, prove the anatomy on their first sequences, and find out how they can be batched."""
        guess = candidates[0]
        if isinstance(data, Sequences) or guess.family.modality != "text":
            self.tokenizer = None if isinstance(self.given_tokenizer, str | Path) else self.given_tokenizer
        if not isinstance(data, Sequences):
            self.origin = data.origin if isinstance(data, Source) else data
            data = _sequences_for(self.checkpoint, guess, data, self.tokenizer, settings, words)
        if "targets" in self.needs and not data.num_targets:
            raise FulldepthError(
                f"{data.name} has no labels, and {self.kind} predicts classes. Give texts with labels ({{'text': ..., "
                "'label': ...}), or images in class folders."
                if guess.classifies
                else f"{data.name} has no token to predict: {data.no_targets or 'its texts are too short'}."
            )
        self.prove(small_batch(data).inputs, candidates)
        self.data, self.note = batched(self.anatomy, data, self.device)


def open_checkpoint(
    model: str | Path | nn.Module | Checkpoint,
    settings: LoadingSettings,
    *,
    device: str | None = None,
    dtype: str | None = None,
    plain: bool = False,
) -> Checkpoint:
    """The model as passed in, without the wrappers around it, or loaded according to the settings.

    Args:
        model: as for `Subject.open`.
        settings: precision, device, revision; those of some commands also have a `device_map`.
        device: in place of the settings' device.
        dtype: in place of the settings' precision.
        plain: whether the heads of single layers are left out, and models inside wrappers refused.
    """
    if isinstance(model, Checkpoint):
        return model
    if isinstance(model, nn.Module) and not plain:
        model = unwrapped(model)
    return open_model(
        model,  # type: ignore[arg-type]  # other modules are refused
        exit_heads=not plain,
        dtype=settings.dtype if dtype is None else dtype,
        device=settings.device if device is None else device,
        device_map=getattr(settings, "device_map", None),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )


def stated_depth(model: Any, settings: LoadingSettings) -> int | None:
    """Number of layers that a checkpoint's configuration states, read before its weights; None of a loaded model, and
    where it states none.

    Raises:
        FulldepthError: as `load_config`.
    """
    if not isinstance(model, str | Path):
        return None
    return depth_of(checkpoint_of(model), settings.revision, settings.trust_remote_code)


def chosen_tokenizer(settings: LoadingSettings, tokenizer: Any = None) -> Any:
    """A tokenizer that was passed in, or else what the settings name; None = the checkpoint's own."""
    return settings.tokenizer if tokenizer is None else tokenizer


def read_source(data: Any, settings: ReadingSettings, *, held_out: bool = True) -> Source:
    """The records that a sample of the settings' size needs.

    Args:
        data: as for `open_source`.
        settings: how they are read.
        held_out: as for `open_source`.

    Raises:
        FulldepthError: as `open_source`.
    """
    return open_source(
        data,
        split=settings.split,
        skip_bad=settings.skip_bad,
        limit=settings.max_sequences,
        seed=settings.seed,
        order=settings.order,
        held_out=held_out,
        window=None if settings.one_per_row else settings.sequence_length or DEFAULT_LENGTH,
    )


def small_batch(sequences: Sequences) -> Batch:
    """The first two sequences, or one if a batch axis of size two could be confused with positions.

    Of images, the first and the next one of its shape.
    """
    first = sequences.collate(replace(sequences, batching="padded").groups(2)[0])
    square = first.attention_mask is not None and first.attention_mask.shape == (2, 2)
    return sequences.collate([0]) if square else first


def _sequences_for(
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    data: Any,
    tokenizer: Any,
    settings: ReadingSettings,
    words: Sequence[str],
) -> Sequences:
    """The data, prepared for this model.

    Raises:
        FulldepthError: if they cannot be read, or the model does not read their kind.
    """
    source = _source(checkpoint, anatomy, data, settings)
    config = checkpoint.model.config
    positions = anatomy.max_positions
    task = anatomy.task
    length = settings.sequence_length or min(DEFAULT_LENGTH, positions or DEFAULT_LENGTH)
    truncate = settings.truncate
    if task == "text-classification" and source.kind == "labelled-text":
        longest = positions or WHOLE
        length = settings.sequence_length or longest
        truncate |= settings.sequence_length is not None and length <= longest  # the length that was asked for
    pad = getattr(text_config(config), "pad_token_id", None)
    start, rotates = _decoder_start(checkpoint.model) if anatomy.family.tower == "decoder" else (None, False)
    processor = None
    if source.kind in IMAGES:
        trusted = settings.trust_remote_code
        processor = load_processor(
            checkpoint.model.name_or_path or None,
            anatomy.config,
            revision=checkpoint.revision,
            trust_remote_code=trusted,
        )
    return prepare(
        source,
        task="seq2seq-lm" if anatomy.family.tower == "decoder" else task,
        tokenizer=tokenizer,
        processor=processor,
        sequence_length=length,
        max_positions=positions if anatomy.family.modality == "text" else None,
        vocab_size=anatomy.vocab_size,
        pad_id=pad if task == "text-classification" and isinstance(pad, int) else None,
        start=start,
        rotates=rotates,
        words=tuple(words),
        truncate=truncate,
        max_sequences=settings.max_sequences,
        order=settings.order,
        seed=settings.seed,
        bos=settings.bos,
        one_per_row=settings.one_per_row,
        score=settings.score,
        chat=settings.chat,
        skip_bad=settings.skip_bad,
    )


def _decoder_start(model: Any) -> tuple[int | None, bool]:
    """The token with which an encoder-decoder's decoder begins, and whether that is the target's last one instead.

    It is what the class itself makes of labels for its loss; without such a method, or a configuration that it needs,
    the first of `STARTS` that is set.
    """
    config = model.config
    start = next((token for name in STARTS if (token := getattr(config, name, None)) is not None), None)
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        return start, False
    special = {getattr(config, name, None) for name in (*STARTS, "eos_token_id")}
    labels = [token for token in range(2 * len(special) + 3) if token not in special][:3]
    try:
        fed = shift(labels=torch.tensor([labels]))[0].tolist()
    except (AttributeError, TypeError, ValueError):  # the configuration lacks what the class needs
        return start, False
    if fed[1:] != labels[:-1]:
        raise FulldepthError(f"{type(model).__name__} does not shift targets by one token to predict the next.")
    return fed[0], fed[0] == labels[-1]


def _source(checkpoint: Checkpoint, anatomy: Anatomy, data: Any, settings: ReadingSettings) -> Source:
    """The records of the data, of a kind that the model reads; bad ones are refused or left out."""
    source = read_source(data, settings)
    reads = anatomy.family.modality
    kind = "images" if source.kind in IMAGES else source.kind
    if (reads == "images") != (kind == "images"):
        raise FulldepthError(f"{source.name} holds {kind}, but {type(checkpoint.model).__name__} reads {reads}.")
    if anatomy.family.tower == "encoder" and source.kind == "pairs":
        source = input_texts(source)
    names: dict[int, str] = {}
    if anatomy.task in CLASSES and no_single_class(config := checkpoint.model.config) is None:
        names = {int(index): name for name, index in (getattr(config, "label2id", None) or {}).items()}
    return usable_rows(
        source,
        tuple(names.get(index, str(index)) for index in range(max(names) + 1)) if names else None,
        most=settings.max_sequences,
        seed=settings.seed,
        skip_bad=settings.skip_bad,
    )
