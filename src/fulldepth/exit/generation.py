"""`generate_texts`: prompts to texts, with statistics as results of the kind `generation`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.data import decode_ids
from fulldepth.data.columns import list_of_texts
from fulldepth.data.conversations import encode_prompt
from fulldepth.data.tokens import padding_id
from fulldepth.execution.decoding import Decoder, Generation, Options, Stats
from fulldepth.execution.latency import machine
from fulldepth.hf import Anatomy, device_of
from fulldepth.results import Results, claimed, provenance
from fulldepth.results.document import Finding
from fulldepth.results.folder import finite
from fulldepth.results.table import tabulate
from fulldepth.settings.generate import GenerateSettings
from fulldepth.settings.keywords import takes_settings
from fulldepth.subject import Subject, stated_depth


@dataclass(frozen=True)
class Written:
    """Texts that continue prompts."""

    prompts: list[str]
    texts: list[str]
    """New text of each prompt."""
    generation: Generation
    results: Results
    """Kind `generation`."""


@takes_settings(GenerateSettings)
def generate_texts(
    model: str | Path | PreTrainedModel,
    prompts: str | Sequence[str],
    *,
    settings: GenerateSettings,
    watcher: Watcher,
    tokenizer: Any = None,
    output: str | Path | None = None,
    overwrite: bool = False,
) -> Written:
    """Continue texts with a decoder, as `fulldepth generate` does.

    Args:
        model: checkpoint folder, GGUF file, `package:NAME`, Hub name, or a model.
        prompts: texts, generated as one batch; or one text.
        settings: fields of `GenerateSettings` as keywords, or an instance.
        watcher: receives messages.
        tokenizer: a tokenizer, its folder or Hub name; None = the checkpoint's.
        output: result folder, which also gets the page; None = nothing is written.
        overwrite: replace results in the output folder.

    Returns:
        Prompts and new texts, the token ids with their statistics, and the results.

    Raises:
        FulldepthError: for an empty prompt, a prompt that exceeds the model's positions, a model that is no decoder or
            cannot be run layer by layer, layers out of range, and a folder that holds other results.
    """
    prompts = list_of_texts(prompts, "Prompt")
    if not prompts:
        raise FulldepthError("There are no prompts to continue.")
    if any(not prompt.strip() for prompt in prompts):
        raise FulldepthError("A prompt is empty; give some text to continue.")
    with ExitStack() as held:
        held.enter_context(claimed(output, overwrite))
        layers: dict[str, Any] = settings.model_dump(include={field.name for field in fields(Options)})
        depth = stated_depth(model, settings)
        if depth is not None:
            Options(num_layers=depth, **layers)  # options that do not fit are refused before weights are loaded
        needs = {"language", "tokenizer"}
        subject = held.enter_context(Subject.open(model, None, settings, needs=needs, tokenizer=tokenizer))
        if settings.chat is None and getattr(subject.tokenizer, "chat_template", None):
            watcher.say("The prompt is put into the chat template; --no-chat continues it as it is.")
        watcher.begin("Generating", settings.max_new_tokens)
        generation = generate(
            subject.model,
            prompts,
            tokenizer=subject.tokenizer,
            chat=settings.chat,
            max_new_tokens=settings.max_new_tokens,
            do_sample=settings.samples,
            temperature=(settings.temperature or 1.0) if settings.samples else 1.0,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=settings.seed,
            progress=watcher.advance,
            **layers,
        )
        texts = generation.texts or []
        results = _results(subject, prompts, texts, generation.stats, settings)
        if output is not None:
            results.save(output, overwrite=overwrite)
    return Written(prompts, texts, generation, results)


def generate(
    model: PreTrainedModel | Decoder,
    input_ids: Tensor | str | Sequence[str],
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    threshold: float | None = None,
    speculate_from: int | str | None = None,
    draft_length: int | str = "auto",
    tokenizer: Any = None,
    chat: bool | None = False,
    **options: Any,
) -> Generation:
    """Continue prompts, with fewer layers where that is possible.

    Drafts (`speculate_from`) keep the output, or its distribution; early exit (`threshold`) not. Every token stops at
    layer E with `threshold=1e-9, min_layer=E`.

    ```python
    made = fulldepth.exit.generate(model, "The capital of France is", tokenizer=tokenizer, max_new_tokens=8)
    made.texts[0]
    ```

    Args:
        model: a decoder, verified in every call; or a `Decoder`, verified once. Its generation configuration applies,
            except that the arguments here replace its lengths, `do_sample`, `temperature`, `top_p` and `top_k`.
        input_ids: `[B, P]` prompts, padded on the left; or a text, or several, continued as they are.
        attention_mask: `[B, P]`, 0 = padding; None as in `model.generate`.
        max_new_tokens: maximum number of new tokens for each sequence.
        threshold: in (0, 1]: a token leaves where the value of `rule` exceeds it; 1 is the full model.
        speculate_from: the first E layers draft for one prompt; `auto`: a third of the layers, where a short trial is
            faster.
        draft_length: largest number of drafts per round; `auto`: 4, where a short trial is faster.
        tokenizer: of texts.
        chat: put texts into the tokenizer's chat template; None = if it has one.
        **options: of early exit `rule` and `min_layer` (see `execution.decoding.Options`); `do_sample`, and with it
            `temperature` (above 0; 1), `top_p` (0 to 1; 1), `top_k` (0 = all) and `seed` (None = torch's global random
            numbers);
            `eos_token_id` (a token or several) and `pad_token_id` (None = the model's).

    Returns:
        The token ids with prompts, the statistics of layers and drafts, and, where prompts are texts, the new texts.

    Raises:
        FulldepthError: for models that cannot be decoded layer by layer, settings of the generation configuration that
            ask for something else (beams, guidance) or that transformers refuses, values out of range, and texts
            without a tokenizer or without tokens.
    """
    options |= {"threshold": threshold, "speculate_from": speculate_from, "draft_length": draft_length}
    given: Any = [input_ids] if isinstance(input_ids, str) else input_ids
    if isinstance(given, Sequence) and not given:
        raise FulldepthError("There is no prompt; give some text to continue.")
    texts = isinstance(given, Sequence) and all(isinstance(prompt, str) for prompt in given)
    if texts and tokenizer is None:
        raise FulldepthError("Texts need a tokenizer: generate(model, text, tokenizer=...).")
    decoder = model if isinstance(model, Decoder) else Decoder(model)
    if not texts:
        return decoder.generate(given, attention_mask, max_new_tokens=max_new_tokens, **options)
    ids, mask = _encode(tokenizer, given, chat, decoder.anatomy)
    generation = decoder.generate(ids, mask, max_new_tokens=max_new_tokens, **options)
    new = zip(generation.sequences[:, ids.shape[1] :].tolist(), generation.stats.new_tokens, strict=True)
    return replace(
        generation, texts=[decode_ids(tokenizer, row[:count], skip_special_tokens=True) for row, count in new]
    )


def _encode(tokenizer: Any, prompts: Sequence[str], chat: bool | None, anatomy: Anatomy) -> tuple[Tensor, Tensor]:
    """Token ids of the prompts and their mask, `[B, P]` each, padded on the left.

    A prompt is put into the chat template if asked, or by default if there is one.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise FulldepthError("The tokenizer has no chat template; use --no-chat, or leave out --chat.")
    rows = []
    for number, prompt in enumerate(prompts, start=1):
        as_chat = has_template if chat is None else chat
        row = encode_prompt(tokenizer, [{"role": "user", "content": prompt}] if as_chat else prompt, f"Prompt {number}")
        if not row:
            raise FulldepthError(f"Prompt {number} has no tokens.")
        rows.append(torch.tensor(row, device=device_of(anatomy.model)))
    padding = padding_id([tokenizer.pad_token_id], anatomy.vocab_size)
    ids = pad_sequence(rows, True, padding, "left")
    return ids, pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")


def _results(
    subject: Subject, prompts: list[str], texts: list[str], stats: Stats, settings: GenerateSettings
) -> Results:
    """Document and table."""
    seconds = stats.prompt_seconds + stats.seconds
    sentence = f"{stats.tokens:,} tokens in {seconds:.2f} s. {stats.reason}"
    findings = {"tokens": Finding(stats.tokens, "tokens", sentence)}
    if stats.tokens_per_second is not None:
        sentence = f"{stats.tokens_per_second:.1f} tokens a second after {stats.prompt_seconds:.2f} s for the prompts."
        findings["tokens_per_second"] = Finding(stats.tokens_per_second, "1", sentence)
    if stats.acceptance is not None:
        sentence = (
            f"{stats.accepted:,} of {stats.drafted:,} drafts were confirmed, in {stats.rounds:,} rounds of "
            f"{stats.tokens_per_round:.2f} tokens."
        )
        findings["acceptance"] = Finding(stats.acceptance, "1", sentence)
    if stats.theoretical_speedup is not None:
        left = sum((stats.exits or [])[:-1])
        sentence = (
            f"{left:,} of {stats.tokens:,} tokens left early. {stats.layers_computed:.1f} of {stats.num_layers} layers "
            "were computed for a position on average, prompts included."
        )
        findings["theoretical_speedup"] = Finding(stats.theoretical_speedup, "1", sentence)
    document = {
        **provenance("generation", settings.model_dump(), seed=settings.seed, machine=machine(subject.device)),
        "model": subject.checkpoint.describe() | {"task": "causal-lm", "num_layers": stats.num_layers},
        "timings": {"forward": stats.seconds, "total": seconds},
        "warnings": list(subject.warnings),
        "headline": {name: finding.document() for name, finding in findings.items()},
        "generation": {"prompts": prompts, "texts": texts, "stats": stats.as_dict()},
    }
    rows: list[Any] = [
        (measure, "residual", layer, None, "count", count, stats.tokens, unit)
        for measure, counts, unit in (("layer_positions", stats.layer_positions, "1"), ("exit", stats.exits, "tokens"))
        for layer, count in enumerate(counts or [], start=1)
    ]
    return Results(tabulate(rows), dict(finite(document)))
