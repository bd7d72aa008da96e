"""The packed text and the tokenizer of a run, and the test that attention does not cross documents in its model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from fulldepth.data import Packed, builtin_texts, open_documents, pack, train_tokenizer, train_wordpiece
from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import atomic_folder
from fulldepth.hf import evaluating, load_tokenizer
from fulldepth.progress import Watcher
from fulldepth.settings.train import TrainSettings
from fulldepth.training.folder import TOKENIZER
from fulldepth.training.model import build_config, special_tokens
from fulldepth.training.trainer import RunData, window_collator

MOST_TOKENS = 1 << 20
"""Largest vocabulary of `builtin:N`."""
OWN = ("wordpiece", "bpe")
"""Kinds of tokenizers that are trained on the run's own texts."""
SMALL_CORPUS = 1 << 25
"""Tokens up to which a corpus is always tokenised completely."""
FLASH = "flash_attention_2"
PROBE = "fulldepth_varlen"
"""Name under which transformers finds `varlen_attention`."""
LENGTH = 6
"""Tokens of each of the two documents."""
LEAK, SAME = 1e-5, {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest differences relative to the largest logit: between logits beside two other documents, and to those of the
document alone, by precision (half precision: 0.05), where kernels for another shape may round differently."""


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


def language_model(settings: TrainSettings, tokenizer: Any) -> PreTrainedConfig:
    """The configuration of a language model for a tokenizer."""
    return build_config(
        settings.model,
        vocab_size=len(tokenizer),
        positions=settings.sequence_length,
        special_tokens=special_tokens(tokenizer),
    )


def packed_data(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> RunData:
    """Packed text; all processes share in tokenising what is missing.

    Args:
        settings: of the run.
        folder: the run folder.
        arguments: of the trainer.
        watcher: receives messages.
    """
    with arguments.main_process_first(desc="tokenizer"):
        tokenizer = run_tokenizer(settings, folder / TOKENIZER, watcher)
    config = language_model(settings, tokenizer)
    packed = packed_text(settings, tokenizer, config.vocab_size, watcher)
    if packed.train.documents < arguments.world_size:
        raise FulldepthError(
            f"{packed.name} has {packed.train.documents} training documents, fewer than the {arguments.world_size} "
            "processes. Use more text or fewer processes."
        )
    facts = {"hash": packed.hash, "tokens": packed.tokens, "documents": packed.documents}
    facts["train_sequences"] = len(packed.train)
    return RunData(config, tokenizer, packed.train, packed.validation, facts, window_collator(settings))


def packed_text(settings: TrainSettings, tokenizer: Any, vocab_size: int, watcher: Watcher) -> Packed:
    """The text of a run as windows, tokenised where it is not cached; other arguments and errors as for `pack`."""
    data, steps = settings.data, settings.steps
    opened = partial(open_documents, column=data.column, articles=data.articles)
    text = None
    if data.tokens is None:
        text = opened(data.name, config=data.config, split=data.split, streaming=data.streaming)
    return pack(
        text,
        tokenizer,
        sequence_length=settings.sequence_length,
        tokens=Path(data.tokens).expanduser() if data.tokens else None,
        cache=Path(data.cache).expanduser() if data.cache else None,
        validation=opened(data.validation) if data.validation else None,
        max_tokens=max(SMALL_CORPUS, steps * settings.global_batch_size * settings.sequence_length),
        validation_share=data.validation_share,
        validation_sequences=settings.most_validation,
        seed=settings.seed,
        across_documents=data.across_documents,
        vocab_size=vocab_size,
        watcher=watcher,
    )


@torch.no_grad()
def require_separate_documents(model: PreTrainedModel) -> None:
    """Refuse a model in which position ids do not keep documents apart.

    Two documents in one row: the logits of the second must not depend on the first one's tokens, and must be those of
    the second document alone. Flash attention runs on accelerators only; `varlen_attention` replaces it in the test: it
    receives the same arguments and cuts a row at the same places.

    Raises:
        FulldepthError: if the model does not keep documents apart.
    """
    name = type(model).__name__
    advice = "Use data.across_documents=true, or another model."
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise FulldepthError(f"{name} takes no position_ids, so it cannot keep documents apart. {advice}")
    ids = torch.arange(3 * LENGTH).remainder(model.config.get_text_config().vocab_size).to(model.device)
    first, other, second = ids.split(LENGTH)
    with evaluating(model), _without_flash(model):
        try:
            beside, changed = (_logits(model, torch.cat([before, second]))[LENGTH:] for before in (first, other))
            alone = _logits(model, second)
        except Exception as error:  # from the model's code, which may need a mask or another attention
            raise FulldepthError(
                f"{name} cannot read two documents in a row: {one_line(error, 200)}. {advice}"
            ) from error
    scale = alone.abs().max()
    if (beside - changed).abs().max() > LEAK * scale:
        raise FulldepthError(f"In {name} a document sees the one before it in spite of position_ids. {advice}")
    if (beside - alone).abs().max() > SAME.get(model.dtype, 0.05) * scale:
        raise FulldepthError(f"In {name} a document depends on where it lies in a row, position_ids or not. {advice}")


def _logits(model: Any, ids: Tensor) -> Tensor:
    """[N, V] logits of a row of documents of `LENGTH` tokens."""
    positions = torch.arange(len(ids), device=ids.device) % LENGTH
    logits: Tensor = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    return logits


@contextmanager
def _without_flash(model: PreTrainedModel) -> Iterator[None]:
    """Replace flash attention by `varlen_attention`."""
    before = model.config._attn_implementation
    if before == FLASH:
        AttentionInterface.register(PROBE, varlen_attention)
        AttentionMaskInterface.register(PROBE, ALL_MASK_ATTENTION_FUNCTIONS[FLASH])
        model.config._attn_implementation = PROBE
    try:
        yield
    finally:
        model.config._attn_implementation = before


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention with the interface of flash attention: a batch of one row is cut where positions restart.

    Query, key and value are `[B, H, T, D]` and the result `[B, T, H, D]`; the mask is None, as without padding.
    Windows and soft caps in `options` have no effect on two documents of a few tokens.
    """
    cuts = [0, query.shape[2]]
    if position_ids is not None and len(query) == 1:
        starts = (position_ids[0] == position_ids.min()).nonzero()[:, 0].tolist()
        cuts = sorted({*cuts, *starts})
    parts = [
        scaled_dot_product_attention(
            query[:, :, start:stop],
            key[:, :, start:stop],
            value[:, :, start:stop],
            scale=scaling,
            is_causal=True,
            enable_gqa=True,
        )
        for start, stop in pairwise(cuts)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None
