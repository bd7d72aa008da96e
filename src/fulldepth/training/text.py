"""The packed text and the tokenizer of a run, for training and for `fulldepth data prepare`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from fulldepth.data import Packed, builtin_texts, open_documents, pack, train_tokenizer, train_wordpiece
from fulldepth.errors import FulldepthError
from fulldepth.files import atomic_folder
from fulldepth.hf import load_tokenizer
from fulldepth.progress import Watcher
from fulldepth.training.model import build_config, special_tokens
from fulldepth.training.settings import TrainSettings

MOST_TOKENS = 1 << 20
"""Largest vocabulary of `builtin:N`."""
OWN = ("wordpiece", "bpe")
"""Kinds of tokenizers that are trained on the run's own texts."""
SMALL_CORPUS = 1 << 25
"""Tokens up to which a corpus is always tokenised completely."""


def run_tokenizer(settings: TrainSettings, home: Path, watcher: Watcher, texts: Iterable[str] | None = None) -> Any:
    """The tokenizer of a run; `builtin:N`, `wordpiece:N` and `bpe:N` are trained once, saved in `home` and loaded from
    there.

    Args:
        settings: of the run.
        home: where a newly trained tokenizer is.
        watcher: receives messages.
        texts: the run's own training texts, for `wordpiece:N` and `bpe:N`; None = the task has none.

    Raises:
        FulldepthError: if the settings name none, or it cannot be loaded.
    """
    name = settings.tokenizer or settings.model.checkpoint
    if name is None:
        raise FulldepthError("A model from scratch needs a tokenizer: tokenizer=builtin:2048, a folder or a Hub name.")
    kind, _, size = name.partition(":")
    if kind not in ("builtin", *(() if texts is None else OWN)):
        if kind in OWN:
            raise FulldepthError(f"tokenizer={name} is trained on labelled texts (task: text-classification).")
        tokenizer = load_tokenizer(name)
        tokenizer.init_kwargs.pop("auto_map", None)  # refers to remote code, which checkpoints must not name
        return tokenizer
    if not size.isdigit() or not 300 <= int(size) <= MOST_TOKENS:
        raise FulldepthError(f"tokenizer is {name!r}; expected {kind}:N with N tokens, 300 to {MOST_TOKENS:,}.")
    if not home.is_dir():
        watcher.say(f"Training a tokenizer of {size} tokens")
        with atomic_folder(home) as part:
            train = train_wordpiece if kind == "wordpiece" else train_tokenizer
            own = texts if kind in OWN and texts is not None else builtin_texts("train")
            train(own, int(size)).save_pretrained(part)
    return load_tokenizer(home)


def packed_text(
    settings: TrainSettings,
    tokenizer: Any,
    vocab_size: int,
    watcher: Watcher,
    *,
    whole: bool = False,
) -> Packed:
    """The text of a run as windows, tokenised where it is not cached; other arguments and errors as for `pack`.

    With `whole`, all of the text is tokenised, even if the run reads less.
    """
    data = settings.data
    opened = partial(open_documents, column=data.column, articles=data.articles)
    return pack(
        opened(data.name, config=data.config, split=data.split, streaming=data.streaming),
        tokenizer,
        sequence_length=settings.sequence_length,
        cache=Path(data.cache).expanduser() if data.cache else None,
        validation=opened(data.validation) if data.validation else None,
        max_tokens=None if whole else _budget(settings),
        validation_share=data.validation_share,
        validation_sequences=settings.most_validation,
        seed=settings.seed,
        across_documents=data.across_documents,
        vocab_size=vocab_size,
        watcher=watcher,
    )


def prepare_text(settings: TrainSettings, *, whole: bool = False, watcher: Watcher | None = None) -> Packed:
    """Tokenise the text of a run into the cache before training: `fulldepth data prepare`.

    Args:
        settings: the run's settings.
        whole: tokenise all of the text, even if the run reads less.
        watcher: receives progress.

    Returns:
        The text as the run reads it; with `whole`, all of it.

    Raises:
        FulldepthError: if the run fine-tunes on conversations, or as for `packed_text`.
    """
    if settings.task != "causal-lm":
        raise FulldepthError(f"task: {settings.task} reads its data when training starts. There is nothing to prepare.")
    if settings.stage != "pretrain":
        raise FulldepthError(
            "This recipe fine-tunes on conversations (stage: sft), which TRL tokenises when training starts. There is "
            "nothing to prepare."
        )
    watcher = watcher or Watcher()
    with tempfile.TemporaryDirectory(prefix="fulldepth-") as folder:
        tokenizer = run_tokenizer(settings, Path(folder) / "tokenizer", watcher)
    config = build_config(
        settings.model,
        vocab_size=len(tokenizer),
        positions=settings.sequence_length,
        special_tokens=special_tokens(tokenizer),
    )
    return packed_text(settings, tokenizer, config.vocab_size, watcher, whole=whole)


def _budget(settings: TrainSettings) -> int:
    """Most training tokens to make: all of a small corpus, of a large one as many as the run reads."""
    return max(SMALL_CORPUS, settings.steps * settings.global_batch_size * settings.sequence_length)
