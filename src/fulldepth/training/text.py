"""Training data of language models: packed documents, or conversations with a loss on the responses.

The module also makes the tokenizer of a run, and tests that attention does not cross documents in its model.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import atomic_folder
from fulldepth.core.progress import Watcher
from fulldepth.core.targets import IGNORE
from fulldepth.core.uncertainty import counted, sample
from fulldepth.data import builtin_texts, conversations, open_documents, pack, train_tokenizer, train_wordpiece
from fulldepth.data.batches import Example, padded_batch
from fulldepth.data.conversations import CUT_OFF, END, TOOLS, encode_pair, with_tools
from fulldepth.data.packing import holds_tokens
from fulldepth.hf import checkpoint_of, evaluating, find_tokenizer, load_tokenizer
from fulldepth.settings.train import TrainSettings
from fulldepth.training.folder import TOKENIZER
from fulldepth.training.model import build_config, check_options, special_tokens
from fulldepth.training.trainer import RunData, make_objective, window_collator

MOST_TOKENS = 1 << 20
"""Largest vocabulary of `builtin:N`."""
ON_RUN_TEXTS = ("wordpiece", "bpe")
"""Kinds of tokenizers that are trained on the run's texts."""
LEARNED = ("builtin", *ON_RUN_TEXTS)
"""Kinds of tokenizers that are trained for a run, with at most the number of tokens in their name."""
SMALL_CORPUS = 1 << 25
"""Tokens up to which a corpus is always tokenised completely."""
FLASH = "flash_attention_2"
PROBE = "fulldepth_varlen"
"""Name under which transformers finds `varlen_attention`."""
LENGTH = 6
"""Tokens of each of the two documents."""
LEAK = 1e-5
"""Largest difference, relative to the largest logit, between a document's logits after two other documents."""
SAME = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Precision -> largest difference, relative to the largest logit, between a document's logits in a row and alone, where
kernels for another shape may round differently; 0.05 in half precision."""
TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'].capitalize() + ':\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
"""Template for tokenizers without one. The prompt ends in a line end, which tokenizers do not merge with a word."""
READ = ["input_ids", "labels"]
"""Columns of tokenised conversations that determine batches and loss."""


def named_tokenizer(settings: TrainSettings) -> tuple[str, str, int]:
    """Return the name and kind of a run's tokenizer, and the number of tokens it is trained with; 0 if it is loaded.

    Raises:
        FulldepthError: if the settings name none, or a number of tokens out of range.
    """
    name = settings.tokenizer or settings.model.checkpoint
    if name is None:
        raise FulldepthError("A model from scratch needs a tokenizer: tokenizer=builtin:2048, a folder or a Hub name.")
    kind, _, size = name.partition(":")
    if kind not in LEARNED:
        return name, kind, 0
    if not size.isdigit() or not 300 <= int(size) <= MOST_TOKENS:
        raise FulldepthError(f"tokenizer is {name!r}; expected {kind}:N with N from 300 to {MOST_TOKENS:,} tokens.")
    return name, kind, int(size)


def run_tokenizer(
    settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher, texts: Iterable[str] | None = None
) -> Any:
    """Load the tokenizer of a run. The first process trains `builtin:N`, `wordpiece:N` and `bpe:N` and saves them in
    the run folder.

    Args:
        settings: the run's settings.
        folder: the run folder.
        arguments: the Trainer's arguments.
        watcher: receives messages.
        texts: the run's training texts, for `wordpiece:N` and `bpe:N`; None = the task has no labelled texts.

    Raises:
        FulldepthError: as `named_tokenizer`; or if it cannot be loaded.
    """
    name, kind, size = named_tokenizer(settings)
    if kind in ON_RUN_TEXTS and texts is None:
        raise FulldepthError(
            f"tokenizer={name} is trained on labelled texts, so it is for task: text-classification only. Use "
            "tokenizer=builtin:N, a folder or a Hub name."
        )
    saved = folder / TOKENIZER
    with arguments.main_process_first(desc="tokenizer"):
        if not size:
            tokenizer = load_tokenizer(name)
            tokenizer.init_kwargs.pop("auto_map", None)  # refers to remote code, which checkpoints must not name
            return tokenizer
        if not saved.is_dir():
            watcher.say(f"Training a tokenizer of {size} tokens")
            with atomic_folder(saved) as part:
                train = train_wordpiece if kind == "wordpiece" else train_tokenizer
                corpus = builtin_texts("train") if kind == "builtin" or texts is None else texts
                train(corpus, size).save_pretrained(part)
        return load_tokenizer(saved)


def language_model(
    settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher
) -> tuple[PreTrainedConfig, Any]:
    """Return the configuration of a language model and its tokenizer. The arguments are those of `packed_data`.

    Raises:
        FulldepthError: if a teacher has other tokens; as `run_tokenizer` and `build_config`.
    """
    check_options(settings.model, settings.task)  # before a tokenizer is trained
    tokenizer = run_tokenizer(settings, folder, arguments, watcher)
    distillation: Any = make_objective(settings).terms.get("distillation")
    source = distillation and find_tokenizer(checkpoint_of(distillation.teacher))
    if source and load_tokenizer(source).get_vocab() != tokenizer.get_vocab():
        raise FulldepthError(
            f"The teacher {distillation.teacher} has another vocabulary than the tokenizer of this run. Distillation "
            "compares predictions token by token: name a teacher with the same tokenizer."
        )
    config = build_config(
        settings.model,
        vocab_size=len(tokenizer),
        positions=settings.sequence_length,
        special_tokens=special_tokens(tokenizer),
    )
    return config, tokenizer


def packed_data(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> RunData:
    """Open packed text; the processes share the tokenising of what is not stored.

    Args:
        settings: the run's settings.
        folder: the run folder.
        arguments: the Trainer's arguments.
        watcher: receives messages.
    """
    config, tokenizer = language_model(settings, folder, arguments, watcher)
    data = settings.data
    opened = partial(open_documents, column=data.column, articles=data.articles)
    validation: Any = None
    if data.validation:
        folder_of_tokens = Path(data.validation).expanduser()
        validation = folder_of_tokens if holds_tokens(folder_of_tokens) else opened(data.validation, held_out=True)
    packed = pack(
        None if data.tokens else opened(data.name, config=data.config, split=data.split, streaming=data.streaming),
        tokenizer,
        sequence_length=settings.sequence_length,
        tokens=Path(data.tokens).expanduser() if data.tokens else None,
        cache=Path(data.cache).expanduser() if data.cache else None,
        validation=validation,
        max_tokens=max(SMALL_CORPUS, settings.steps * settings.units_per_step),
        validation_share=data.validation_share,
        validation_sequences=settings.most_validation,
        seed=settings.seed,
        across_documents=data.across_documents,
        end_of_text=data.end_of_text,
        vocab_size=getattr(config.get_text_config(), "vocab_size", None),
        watcher=watcher,
    )
    if packed.train.documents < arguments.world_size:
        raise FulldepthError(
            f"{packed.name} has {counted(packed.train.documents, packed.unit)} to train on, fewer than the "
            f"{arguments.world_size} processes. Use more text or fewer processes."
        )
    return RunData(
        config,
        tokenizer,
        packed.train,
        packed.validation,
        {
            "name": data.tokens or data.name,
            "hash": packed.hash,
            "tokens": packed.tokens,
            "documents": packed.sources,
            "clusters": packed.documents,
            "unit": packed.unit,
            "train_sequences": len(packed.train),
        },
        window_collator(settings),
        list(packed.warnings),
    )


@torch.no_grad()
def require_separate_documents(model: PreTrainedModel) -> None:
    """Refuse a model in which position ids do not keep documents apart.

    The model reads two documents in one row: the logits of the second must not depend on the tokens of the first, and
    must be those of the second document alone. Flash attention runs on accelerators only; in the test
    `varlen_attention` replaces it, which receives the same arguments and cuts a row at the same places.

    Raises:
        FulldepthError: if the model does not keep documents apart.
    """
    name = type(model).__name__
    advice = "Use data.across_documents=true, or another model."
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise FulldepthError(f"{name} takes no position_ids, so it cannot keep documents apart. {advice}")
    ids = torch.arange(3 * LENGTH).remainder(model.config.get_text_config().vocab_size).to(model.device)
    first, other, second = ids.split(LENGTH)
    attention = model.config._attn_implementation
    if attention == FLASH:
        AttentionInterface.register(PROBE, varlen_attention)
        AttentionMaskInterface.register(PROBE, ALL_MASK_ATTENTION_FUNCTIONS[FLASH])
        model.config._attn_implementation = PROBE
    try:
        with evaluating(model):
            after_first = _logits(model, torch.cat([first, second]))[LENGTH:]
            after_other = _logits(model, torch.cat([other, second]))[LENGTH:]
            alone = _logits(model, second)
    except Exception as error:  # the model's code may need a mask or another attention
        raise FulldepthError(f"{name} cannot read two documents in a row: {one_line(error, 200)}. {advice}") from error
    finally:
        model.config._attn_implementation = attention
    scale = alone.abs().max()
    if (after_first - after_other).abs().max() > LEAK * scale:
        raise FulldepthError(f"In {name} a document reads the one before it in spite of position_ids. {advice}")
    if (after_first - alone).abs().max() > SAME.get(model.dtype, 0.05) * scale:
        raise FulldepthError(
            f"In {name} a document's logits depend on its place in a row in spite of position_ids. {advice}"
        )


def _logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits `[N, V]` of a row of documents of `LENGTH` tokens."""
    positions = torch.arange(len(ids), device=ids.device) % LENGTH
    return model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]


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

    Query, key and value are `[1, H, T, D]` and the result `[1, T, H, D]`; the mask is None, because nothing is padded.
    Windows and soft caps in `options` have no effect on two documents of a few tokens.
    """
    length = query.shape[2]
    together = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if position_ids is not None:
        document = (position_ids[0] == position_ids.min()).cumsum(0)  # [T]
        together &= document[:, None] == document
    states = scaled_dot_product_attention(query, key, value, together, scale=scaling, enable_gqa=True)
    return states.transpose(1, 2), None


def conversation_data(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> RunData:
    """Open conversations: token ids with labels on the responses, and others to validate on, else a share held out.

    The arguments are those of `packed_data`. Prompt and response are tokenised apart (`encode_pair`), so that every
    label is a token that the model can produce after that prompt. A tokenizer without a chat template gets `TEMPLATE`.
    Warnings count the conversations that are cut or left out.

    Raises:
        FulldepthError: if the data hold fewer than two different conversations, no response begins within a sequence,
            or the chat template fails.
    """
    config, tokenizer = language_model(settings, folder, arguments, watcher)
    pad_id = padding_token(tokenizer)
    data = settings.data
    warnings = list[str]()
    if not tokenizer.chat_template:
        tokenizer.chat_template = TEMPLATE
    opened = partial(_answered_conversations, tokenizer=tokenizer, length=settings.sequence_length, warnings=warnings)
    rows, train, owner = opened(data.name, config=data.config, split=data.split, least=1 if data.validation else 2)
    documents = len(rows)
    if data.validation:
        validation_rows, validation, owner = opened(data.validation, held_out=True)
        identities = np.array([_key(row, 0, whole=True) for row in validation_rows], np.uint64)
        sampled = sample(identities, settings.most_validation, settings.seed)
        validation = validation.select(np.flatnonzero(np.isin(owner, sampled)))
        documents += len(sampled)
    else:
        count = min(max(1, round(documents * data.validation_share)), settings.most_validation)
        validates = held_out_rows(rows, count, settings.seed)
        if validates is None:
            raise FulldepthError(
                f"The {documents} conversations of {data.name} are all the same; training and validation need at least "
                "two different ones."
            )
        train, validation = (train.select(np.flatnonzero(validates[owner] == part)) for part in (False, True))
    counts = {"documents": documents, "clusters": documents, "unit": "row"}
    facts = {"hash": rows_hash(train, validation), "train_sequences": len(train), **counts}
    return RunData(config, tokenizer, train, validation, facts, partial(conversation_batch, pad_id=pad_id), warnings)


def padding_token(tokenizer: Any) -> int:
    """Return the id of the padding token. A tokenizer without one pads with its end of text from here on.

    Raises:
        FulldepthError: if the tokenizer has neither.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise FulldepthError(
                "The tokenizer has neither a padding token nor an end-of-text token; padding needs one of them."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return int(tokenizer.pad_token_id)


def conversation_batch(rows: list[dict[str, list[int]]], pad_id: int) -> dict[str, Tensor]:
    """Return `input_ids`, `attention_mask` and `labels` `[B, T]` of tokenised conversations, padded on the right."""
    return padded_batch([Example(torch.tensor(row["input_ids"]), torch.tensor(row["labels"])) for row in rows], pad_id)


def _answered_conversations(
    name: str,
    *,
    tokenizer: Any,
    length: int,
    warnings: list[str],
    config: str | None = None,
    split: str | None = None,
    held_out: bool = False,
    least: int = 1,
) -> tuple[Any, Any, np.ndarray]:
    """Return the conversations with a response that begins within `length` tokens, their examples, and their numbers.

    The numbers `[examples]` are those of each example's conversation. `warnings` receives what is cut or left out.

    Raises:
        FulldepthError: if there are fewer than `least` such conversations; as `conversations` and `chat_examples`.
    """
    watcher = Watcher(say=warnings.append)
    rows = conversations(name, tokenizer, config=config, split=split, held_out=held_out, watcher=watcher)
    encoded = rows.map(
        partial(_encoded, tokenizer=tokenizer, length=length, name=name),
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
    )
    row, size, answered = (np.array(encoded[key]) for key in ("row", "size", "answered"))
    usable, owner = np.unique(row[answered], return_inverse=True)
    if cut := len(np.unique(row[size > length])):
        warnings.append(
            f"{cut} of {len(rows)} conversations in {name} are longer than {length} tokens and are cut there (the "
            f"longest has {size.max()}); {len(rows) - len(usable)} of them are left out, because no response begins "
            "before the cut."
        )
    if len(usable) < least:
        raise FulldepthError(
            f"{name} holds {len(rows)} conversations, {len(usable)} of them with a response that begins within "
            f"sequence_length={length} tokens; at least {least} {'is' if least == 1 else 'are'} needed"
            + (", to train and to validate on." if least == 2 else ".")
        )
    return rows.select(usable), encoded.select_columns(READ).select(np.flatnonzero(answered)), owner


def _encoded(
    rows: dict[str, list[Any]], numbers: list[int], *, tokenizer: Any, length: int, name: str
) -> dict[str, list[Any]]:
    """Return the examples of conversations as columns.

    They are ids and labels cut to `length`, the conversation's number, the size before the cut, and whether a label
    remains.
    """
    examples: dict[str, list[Any]] = {key: [] for key in ("input_ids", "labels", "row", "size", "answered")}
    for place, number in enumerate(numbers):
        if "messages" in rows:
            messages = rows["messages"][place]
            first = 1
        else:
            prompt = rows["prompt"][place]
            messages = [*prompt, *rows["completion"][place]]
            first = len(prompt)
        cut_off, end, tools = (rows[key][place] if key in rows else None for key in (CUT_OFF, END, TOOLS))
        where = f"{name} conversation {number + 1}"
        for ids, labels in chat_examples(tokenizer, messages, where, first, cut_off=cut_off, end=end, tools=tools):
            answered = any(label != IGNORE for label in labels[:length])
            for key, value in zip(examples, (ids[:length], labels[:length], number, len(ids), answered), strict=True):
                examples[key].append(value)
    return examples


def chat_examples(
    tokenizer: Any,
    messages: list[dict[str, str]],
    where: str,
    first: int = 1,
    *,
    cut_off: bool | None = None,
    end: str | None = None,
    tools: str | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Return token ids and labels of a chat, as one example or several.

    A turn continues the example before it if its prompt begins with the ids of the previous prompt and response. It
    starts a further example if the template writes earlier turns differently.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the messages of the chat.
        where: name of the chat, for errors.
        first: index of the first message that may be a response with labels.
        cut_off: argument of `encode_pair`.
        end: argument of `encode_pair`.
        tools: functions that the template is given, a JSON list; None if the chat has none.
    """
    examples: list[tuple[list[int], list[int]]] = []
    for place in range(first, len(messages)):
        if messages[place]["role"] != "assistant" or not messages[place]["content"].strip():
            continue
        earlier_messages = with_tools(messages[:place], tools)
        prompt, answer, _ = encode_pair(tokenizer, earlier_messages, messages[place], where, cut_off=cut_off, end=end)
        ids = [*prompt, *answer]
        labels = [*[IGNORE] * len(prompt), *answer]
        if examples and prompt[: len(examples[-1][0])] == examples[-1][0]:
            earlier = examples.pop()[1]
            labels[: len(earlier)] = earlier
        examples.append((ids, labels))
    return examples


def held_out_rows(rows: Any, most: int, seed: int) -> np.ndarray | None:
    """Return [rows] bool: True for the rows that are held out for validation, at most `most` of them if possible.

    Rows are held out by content: conversations that begin with the same messages, up to the first answer, are in the
    same part, so neither a repeated row nor two responses of one chat are in both. If all begin alike, whole
    conversations are compared. The choice depends on content and seed, not on the rows' order.

    Args:
        rows: conversations from `conversations`.
        most: rows to hold out; the smallest group of equal beginnings is held out if it has more.
        seed: seed of the choice.

    Returns:
        None if all rows are the same conversation.
    """
    for whole in (False, True):
        keys = np.array([_key(row, seed, whole) for row in rows], np.uint64)
        groups, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)  # in the order of their hashes
        if len(groups) < 2:
            continue
        validates = np.zeros(len(groups), bool)
        room = most
        for number, size in enumerate(sizes.tolist()):
            if size <= room:
                validates[number] = True
                room = room - size
        if not validates.any():
            validates[sizes.argmin()] = True
        elif validates.all():
            validates[sizes.argmax()] = False
        return validates[group]
    return None


def _key(row: dict[str, Any], seed: int, whole: bool) -> int:
    """Return a hash of a conversation, or of its messages up to the first answer."""
    content = row["messages"] if "messages" in row else [row["prompt"], row["completion"]]
    if not whole and isinstance(content[0], list):
        content = content[0] + content[1]
    if not whole and isinstance(content[0], dict):
        answers = [place for place, message in enumerate(content) if message["role"] == "assistant"]
        content = content[: answers[0] + 1] if answers else content
    described = json.dumps([seed, content], sort_keys=True)
    return int.from_bytes(hashlib.sha256(described.encode()).digest()[:8])


def rows_hash(*parts: Any) -> str:
    """Return `sha256:...` over tokenised conversations: token ids and labels, row by row, of each part.

    Args:
        parts: data sets with the columns `READ`.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} {READ}\n".encode())
        for rows in part.select_columns(READ).with_format(None).iter(1000):
            for name in READ:
                digest.update(json.dumps(rows[name], separators=(",", ":")).encode())
    return f"sha256:{digest.hexdigest()}"
