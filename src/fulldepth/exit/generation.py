"""`generate_texts`: prompts to texts, with statistics and a lens grid as results of the kind `generation`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.data import decode_ids
from fulldepth.data.rendering import encode_prompt
from fulldepth.errors import FulldepthError
from fulldepth.execution.decoding import Decoder, DraftPlan, Generation, Options, Stats, decoder_of
from fulldepth.execution.latency import machine
from fulldepth.exit.generation_grid import lens_grid
from fulldepth.hf import Checkpoint, checkpoint_of, depth_of, device_of, open_model, open_tokenizer
from fulldepth.hf.model_hash import model_hash
from fulldepth.progress import Watcher
from fulldepth.results import Results, claimed, provenance
from fulldepth.results.finding import Finding
from fulldepth.results.folder import finite
from fulldepth.results.table import tabulate
from fulldepth.settings import layer
from fulldepth.settings.generate import GenerateSettings


@dataclass(frozen=True)
class Written:
    """Texts that continue prompts."""

    prompts: list[str]
    texts: list[str]
    """New text of each prompt."""
    generation: Generation
    results: Results
    """Kind `generation`; with a lens grid if a folder was written."""


def generate_texts(
    model: str | Path | PreTrainedModel,
    prompts: str | Sequence[str],
    *,
    tokenizer: Any = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    plan: Callable[[PreTrainedModel], Any] | None = None,
    streams: bool = False,
    show: Callable[[str, bool], None] | None = None,
    watcher: Watcher | None = None,
    settings: GenerateSettings | None = None,
    **options: Any,
) -> Written:
    """Continue texts with a decoder, as `fulldepth generate` does.

    Args:
        model: checkpoint folder, GGUF file, `package:NAME`, Hub name, or a model.
        prompts: texts, generated as one batch; or one text.
        tokenizer: of a model that is passed in; None = as the settings say, or the checkpoint's.
        output: result folder, which also gets the page; None = nothing is written.
        overwrite: replace results in the output folder.
        plan: gives the skip plan whose model drafts, from the loaded model; None = the first layers draft.
        streams: whether `show` receives text while it is generated; for one prompt.
        show: called with new text, and whether it is the last.
        watcher: receives messages.
        settings: None = `options` on top of the defaults.
        **options: entries of `GenerateSettings`.

    Raises:
        FulldepthError: for an empty prompt, a prompt that exceeds the model's positions, a model that is no decoder or
            cannot be run layer by layer, layers out of range, and a folder that holds other results.
    """
    settings = settings or layer(GenerateSettings, options)
    watcher = watcher or Watcher()
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not prompts or any(not prompt.strip() for prompt in prompts):
        raise FulldepthError("A prompt is empty; give some text to continue.")
    if streams and len(prompts) > 1:
        raise FulldepthError("One prompt at a time can be streamed; leave out --stream, or the other prompts.")
    with claimed(output, overwrite):
        checkpoint = _opened(model, settings, drafts_by_plan=plan is not None)
        tokenizer = open_tokenizer(
            checkpoint,
            tokenizer if tokenizer is not None else settings.tokenizer,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
        )
        encoded = [_encode(tokenizer, prompt, settings.chat, number) for number, prompt in enumerate(prompts, start=1)]
        decoder = decoder_of(checkpoint.model)
        if not streams:
            watcher.begin("Generating", settings.max_new_tokens)
        advance = (lambda done: None) if streams else watcher.advance
        generation = _generate(decoder, encoded, tokenizer, settings, plan, show if streams else None, advance)
        width = max(map(len, encoded))
        counts = generation.stats.new_tokens
        added = [generation.sequences[row, width : width + counts[row]].tolist() for row in range(len(prompts))]
        texts = [decode_ids(tokenizer, ids, skip_special_tokens=True) for ids in added]
        grid = None if output is None else lens_grid(decoder, tokenizer, encoded, added, generation.stats)
        results = _results(checkpoint, prompts, texts, generation.stats, settings, grid)
        if output is not None:
            results.save(output)
    return Written(list(prompts), texts, generation, results)


def _layer_options(settings: GenerateSettings) -> dict[str, Any]:
    """The entries of `Options` that are settings."""
    names = {field.name for field in fields(Options)} - {"num_layers", "plan"}
    return {name: getattr(settings, name) for name in names}


def _opened(model: str | Path | PreTrainedModel, settings: GenerateSettings, *, drafts_by_plan: bool) -> Checkpoint:
    """The model; options that do not fit its configuration are refused before weights are loaded."""
    if isinstance(model, PreTrainedModel):
        return open_model(model)
    depth = depth_of(checkpoint_of(model), settings.revision, settings.trust_remote_code)
    if depth is not None:
        Options(num_layers=depth, plan=DraftPlan([]) if drafts_by_plan else None, **_layer_options(settings))
    options = settings.model_dump(include={"dtype", "device", "revision", "trust_remote_code"})
    return open_model(model, exit_heads=not drafts_by_plan, **options)


def _encode(tokenizer: Any, prompt: str, chat: bool | None, number: int) -> list[int]:
    """Token ids of a prompt, in the chat template if asked, or by default if there is one."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise FulldepthError("The tokenizer has no chat template; use --raw, or leave out --chat.")
    as_chat = has_template if chat is None else chat
    where = f"Prompt {number}"
    ids = encode_prompt(tokenizer, [{"role": "user", "content": prompt}] if as_chat else prompt, where)
    if not ids:
        raise FulldepthError(f"{where} has no tokens.")
    return ids


def _generate(
    decoder: Decoder,
    encoded: Sequence[Sequence[int]],
    tokenizer: Any,
    settings: GenerateSettings,
    plan: Callable[[PreTrainedModel], Any] | None,
    show: Callable[[str, bool], None] | None,
    advance: Callable[[int], None],
) -> Generation:
    """Decode the prompts as one batch, padded on the left."""
    width, device = max(map(len, encoded)), device_of(decoder.anatomy.model)
    padding = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0
    ids = torch.full((len(encoded), width), padding, device=device)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(encoded):
        ids[row, width - len(tokens) :] = torch.tensor(tokens, device=device)
        mask[row, width - len(tokens) :] = 1
    temperature = settings.temperature or 1.0
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if settings.samples else {}
    return decoder.generate(
        ids,
        mask,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        top_p=settings.top_p,
        top_k=settings.top_k,
        progress=advance,
        streamer=None if show is None else _Streamer(tokenizer, show),
        **({} if plan is None else {"plan": plan(decoder.anatomy.model)}),
        **sampling,
        **_layer_options(settings),
    )


class _Streamer:
    """Receives tokens as transformers' streamers do, and shows the text that they add."""

    def __init__(self, tokenizer: Any, show: Callable[[str, bool], None]) -> None:
        self._tokenizer, self._show = tokenizer, show
        self._ids: list[int] = []
        self._shown = 0
        self._is_prompt = True

    def put(self, tokens: Tensor) -> None:
        """Receive the prompt, then tokens."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._ids += tokens.flatten().tolist()
        text = self._text()
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character whose last bytes are missing
            self._show(text[self._shown :], False)
            self._shown = len(text)

    def end(self) -> None:
        """Show what is left."""
        self._show(self._text()[self._shown :], True)

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))


def _results(
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    texts: list[str],
    stats: Stats,
    settings: GenerateSettings,
    grid: dict[str, Any] | None,
) -> Results:
    """Document and table."""
    model = checkpoint.model
    document = {
        **provenance("generation", settings.model_dump(), seed=settings.seed, machine=machine(device_of(model))),
        "model": {
            "name": checkpoint.name,
            "class": type(model).__name__,
            "task": "causal-lm",
            "dtype": str(model.dtype).removeprefix("torch."),
            "num_layers": stats.num_layers,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "revision": checkpoint.revision,
            "hash": None if grid is None else model_hash(model),
        },
        "timings": {"forward": stats.seconds, "total": stats.prompt_seconds + stats.seconds},
        "warnings": list(checkpoint.warnings),
        "headline": _headline(stats),
        "generation": {"prompts": list(prompts), "texts": texts, "stats": stats.as_dict()},
        "lens_grid": grid,
        "speculation": _speculation(stats),
    }
    rows: list[Any] = [
        ("layer_positions", "residual", layer, None, "count", count, stats.tokens, "1")
        for layer, count in enumerate(stats.layer_positions, start=1)
    ]
    rows += [
        ("exit", "residual", layer, None, "count", count, stats.tokens, "tokens")
        for layer, count in enumerate(stats.exits or [], start=1)
    ]
    return Results(tabulate(rows), dict(finite(document)))


def _speculation(stats: Stats) -> dict[str, Any] | None:
    """The entry on speculation; None if it was not asked for."""
    if stats.speculate_from is None and not stats.candidates:
        return None
    entries = stats.candidates
    if stats.speculate_from is not None and not entries:
        used = {"layer": stats.speculate_from, "draft_length": stats.draft_length, "acceptance": stats.acceptance}
        entries = [used | {"tokens_per_round": stats.tokens_per_round, "predicted_speedup": None}]
    return {
        "speculate_from": stats.speculate_from,
        "draft_length": stats.draft_length,
        "chosen_by": stats.chosen_by,
        "paid": stats.paid,
        "reason": stats.reason,
        "acceptance": entries,
        "layer_positions": stats.layer_positions,
    }


def _headline(stats: Stats) -> dict[str, Any]:
    """The numbers that matter, each with a sentence."""
    found = {
        "tokens": Finding(stats.tokens, "tokens", f"New tokens of {stats.sequences} sequences. {stats.reason}"),
        "tokens_per_second": Finding(
            stats.tokens_per_second, "1", f"After the pass of the prompts, which took {stats.prompt_seconds:.2f} s."
        ),
    }
    if stats.acceptance is not None:
        sentence = f"Share of {stats.drafted:,} drafts that the full model confirmed, in {stats.rounds:,} rounds."
        found["acceptance"] = Finding(stats.acceptance, "1", sentence)
    if stats.theoretical_speedup is not None:
        found["theoretical_speedup"] = Finding(
            stats.theoretical_speedup,
            "1",
            f"{stats.layers_computed:.1f} of {stats.num_layers} layers were computed for a position on average, "
            "prompts included.",
        )
    return {name: finding.document() for name, finding in found.items()}
