"""`generate`: decoding with fewer layers, by early exit or with drafts of the model's own first layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fulldepth.errors import FulldepthError, names_of
from fulldepth.execution.decoding.choice import Choice
from fulldepth.execution.decoding.options import DraftPlan, Options
from fulldepth.execution.decoding.sequences import Sequences, Stop
from fulldepth.execution.decoding.session import Session
from fulldepth.execution.decoding.stats import Stats
from fulldepth.execution.decoding.strategy import decode
from fulldepth.execution.decoding_proof import decoding_runner
from fulldepth.execution.language_model import check_task
from fulldepth.execution.layer_runner import LayerRunner, positions
from fulldepth.execution.verify import verify
from fulldepth.hf import Anatomy, anatomy_candidates, device_of, evaluating

SHARED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position")
"""Arguments of `generate`'s decoding loops that are made here again."""
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
"""What `generate` adds to a returned dictionary, and this loop does not keep."""
LOOPS = ("prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha", "dola_layers")
"""Settings of `generate` that ask for another decoding loop."""
KEPT = "_fulldepth_decoder"
"""Attribute of a model with the decoder of `generate`."""


@dataclass(frozen=True)
class Generation:
    """Result of `generate`."""

    sequences: Tensor
    """[B, prompt + new] prompts and new tokens; sequences that ended early are padded on the right."""
    stats: Stats
    """Counts of layers, drafts and exits, and times."""


class Decoder:
    """A decoder whose layers are verified to run one by one; for several generations of one model.

    The object is also a decoding loop of transformers: `model.generate(ids, custom_generate=decoder,
    speculate_from=12)` takes the options of `generate` below by name and returns what `generate` returns. transformers
    passes no `streamer` to such loops; stream with `Decoder.generate`.

    Args:
        model: a decoder with a language-model head, or its anatomy. It is run in evaluation mode.

    Raises:
        FulldepthError: for other models, and decoders that cannot be run layer by layer with a cache, with the reason.
    """

    def __init__(self, model: PreTrainedModel | Anatomy) -> None:
        owner = model.model if isinstance(model, Anatomy) else model
        device = device_of(owner)
        tokens = torch.arange(24, device=device).view(2, 12) % max(1, owner.config.get_text_config().vocab_size - 1)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        candidates = [model] if isinstance(model, Anatomy) else anatomy_candidates(model)
        with evaluating(owner):
            anatomy = verify([check_task(each) for each in candidates], inputs, optional=("branches",)).anatomy
            self.runner: LayerRunner = decoding_runner(anatomy, inputs)
        self.last: Generation | None = None
        """Result of the last generation."""

    @property
    def anatomy(self) -> Anatomy:
        """The verified anatomy."""
        return self.runner.anatomy

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        seed: int | None = None,
        streamer: Any = None,
        progress: Callable[[int], None] = lambda done: None,
        **options: Any,
    ) -> Generation:
        """As the function `generate`; `progress` is called with the new tokens of the longest sequence."""
        self._check(input_ids, max_new_tokens, temperature, top_p)
        if not do_sample and (temperature, top_p, top_k) != (1.0, 1.0, 0):
            raise FulldepthError(
                "temperature, top_p and top_k are for sampling; set do_sample=True, or leave them out."
            )
        chosen = Options(num_layers=self.anatomy.num_layers, **options)
        device = device_of(self.anatomy.model)
        input_ids = input_ids.to(device)
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": do_sample, "num_beams": 1}
        settings["return_dict_in_generate"] = False
        if do_sample:
            settings |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        tokens = {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        settings |= {name: value for name, value in tokens.items() if value is not None}
        if attention_mask is not None:
            settings["attention_mask"] = attention_mask.to(device)
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)

        def loop(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Any:
            return self._loop(input_ids, prepared, chosen, generator, streamer, progress)

        self.anatomy.model.generate(input_ids, custom_generate=loop, **settings)  # type: ignore[operator]
        assert self.last is not None
        return self.last

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        threshold: float | None = None,
        rule: str = "confidence",
        policy: str = "recompute",
        min_layer: int = 1,
        exit_layer: int | None = None,
        lens_candidates: int | None = None,
        speculate_from: int | str | None = None,
        draft_length: int | str = "auto",
        draft_threshold: float | None = None,
        plan: DraftPlan | None = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decoding loop for `model.generate(custom_generate=decoder)`: `[B, prompt + new]`, or a dictionary."""
        if model is not self.anatomy.model:
            raise FulldepthError("This decoder was made for another model object; make one for this model.")
        chosen = Options(
            num_layers=self.anatomy.num_layers,
            threshold=threshold,
            rule=rule,
            policy=policy,
            min_layer=min_layer,
            exit_layer=exit_layer,
            lens_candidates=lens_candidates,
            speculate_from=speculate_from,
            draft_length=draft_length,
            draft_threshold=draft_threshold,
            plan=plan,
        )
        prepared = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "generation_config": generation_config,
            **model_kwargs,
        }
        generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
        return self._loop(input_ids, prepared, chosen, generator, None)

    def _loop(
        self,
        input_ids: Tensor,
        prepared: dict[str, Any],
        options: Options,
        generator: torch.Generator | None,
        streamer: Any,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Any:
        """Decode with what transformers' `generate` prepared; stores the result in `last`."""
        config: GenerationConfig = prepared["generation_config"]
        _check_config(config, prepared)
        _check_start(input_ids, prepared)
        ends = config._eos_token_tensor
        sequences = Sequences(
            input_ids,
            prepared.get("attention_mask"),
            max_length=int(config.max_length),
            end_tokens=[] if ends is None else ends.tolist(),
            padding=0 if config._pad_token_tensor is None else int(config._pad_token_tensor),
            stops=_stops(prepared["stopping_criteria"]),
            notify=None if streamer is None else lambda token: streamer.put(torch.tensor([token])),
        )
        self._check_positions(sequences)
        choice = Choice(sequences, prepared["logits_processor"], sample=bool(config.do_sample), generator=generator)
        if streamer is not None:
            if len(input_ids) > 1:
                raise FulldepthError("A streamer shows one sequence; generate one prompt at a time with it.")
            streamer.put(input_ids.cpu())
        session = Session(self.runner, sequences, choice)
        session.progress = progress
        with evaluating(self.anatomy.model), torch.no_grad():
            decode(session, options)
        if streamer is not None:
            streamer.end()
        self.last = Generation(sequences.result(), session.stats)
        if config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=self.last.sequences)  # type: ignore[arg-type]
        return self.last.sequences

    def _check(self, input_ids: Tensor, max_new_tokens: int, temperature: float, top_p: float) -> None:
        if not isinstance(input_ids, Tensor) or input_ids.is_floating_point():
            got = type(input_ids).__name__ if not isinstance(input_ids, Tensor) else str(input_ids.dtype)
            encode = "tokenizer(text, return_tensors='pt').input_ids"
            raise FulldepthError(f"input_ids is {got}; expected token ids [B, T]. Encode text with {encode}.")
        if input_ids.ndim != 2 or not input_ids.numel():
            raise FulldepthError(f"input_ids has shape {tuple(input_ids.shape)}; expected [B, T], not empty.")
        if max_new_tokens < 1:
            raise FulldepthError(f"max_new_tokens is {max_new_tokens}; expected 1 or more.")
        if not temperature > 0:
            raise FulldepthError(f"The temperature is {temperature}; expected a number above 0.")
        if not 0 < top_p <= 1:
            raise FulldepthError(f"top_p is {top_p}; expected a number in (0, 1].")

    def _check_positions(self, sequences: Sequences) -> None:
        limit, prompt = self.anatomy.max_positions, sequences.prompt_length
        if limit is None or sequences.max_length <= limit:
            return
        if prompt >= limit:
            raise FulldepthError(f"The prompt has {prompt} tokens, the model {limit} positions; shorten the prompt.")
        raise FulldepthError(
            f"A prompt of {prompt} tokens and {sequences.max_length - prompt} new ones exceed the model's {limit} "
            f"positions; generate {limit - prompt} new tokens or fewer."
        )


def generate(
    model: PreTrainedModel | Decoder,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    threshold: float | None = None,
    rule: str = "confidence",
    policy: str = "recompute",
    min_layer: int = 1,
    exit_layer: int | None = None,
    lens_candidates: int | None = None,
    speculate_from: int | str | None = None,
    draft_length: int | str = "auto",
    draft_threshold: float | None = None,
    plan: DraftPlan | None = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    seed: int | None = None,
    streamer: Any = None,
) -> Generation:
    """Continue prompts, with fewer layers where that is possible.

    Drafts (`speculate_from`, `plan`) keep the output, or its distribution; early exit (`threshold`, `exit_layer`) not.

    Args:
        model: a decoder, whose generation configuration applies, verified once; or a `Decoder`.
        input_ids: `[B, P]` prompts, padded on the left.
        attention_mask: `[B, P]`, 0 = padding; None as in `model.generate`.
        max_new_tokens: maximum number of new tokens for each sequence.
        threshold: see `Options`.
        rule: see `Options`.
        policy: see `Options`.
        min_layer: see `Options`.
        exit_layer: see `Options`.
        lens_candidates: see `Options`.
        speculate_from: see `Options`.
        draft_length: see `Options`.
        draft_threshold: see `Options`.
        plan: see `Options`.
        do_sample: draw tokens; else take the most probable.
        temperature: above 0, for sampling.
        top_p: nucleus in (0, 1], for sampling.
        top_k: number of most probable tokens to sample from; 0 = all.
        eos_token_id: token or tokens that end a sequence; None = the model's.
        pad_token_id: fills sequences that ended early; None = the model's.
        seed: of the sampling; None = torch's global random numbers.
        streamer: of transformers, receives tokens of a single sequence.

    Raises:
        FulldepthError: for models that cannot be decoded layer by layer, and values out of range.
    """
    exits = {"threshold": threshold, "rule": rule, "policy": policy, "min_layer": min_layer, "exit_layer": exit_layer}
    drafts: dict[str, Any] = {"speculate_from": speculate_from, "draft_length": draft_length, "plan": plan}
    drafts |= {"lens_candidates": lens_candidates, "draft_threshold": draft_threshold}
    sampling = {"do_sample": do_sample, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    ends = {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id, "streamer": streamer}
    decoder, options = model if isinstance(model, Decoder) else decoder_of(model), exits | drafts | sampling | ends
    return decoder.generate(input_ids, attention_mask, max_new_tokens=max_new_tokens, **options)


class _Kept:
    """A model's decoder and the parts that it was verified with, on the model; copies and pickles leave them out."""

    def __init__(self, decoder: Decoder | None = None, parts: Sequence[Any] = ()) -> None:
        self.decoder, self.parts = decoder, parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kept, ()


def decoder_of(model: PreTrainedModel) -> Decoder:
    """The decoder of a model, kept with it; verified again if its modules, hooks or `forward` methods were changed.

    Raises:
        FulldepthError: as `Decoder`.
    """
    parts = [
        (module, module.__dict__.get("forward"), *module._forward_hooks, *module._forward_pre_hooks)
        for module in model.modules()
    ]
    kept: _Kept = getattr(model, KEPT, _Kept())
    if kept.decoder is None or kept.parts != parts:
        kept = _Kept(Decoder(model), parts)
        setattr(model, KEPT, kept)
    assert kept.decoder is not None
    return kept.decoder


def _check_config(config: GenerationConfig, prepared: Mapping[str, Any]) -> None:
    """Refuse settings of `generate` that a loop over single tokens with its own cache cannot follow."""
    refused = {
        "num_beams": config.num_beams not in (None, 1),
        "guidance_scale": config.guidance_scale not in (None, 1),
        "watermarking_config": config.watermarking_config is not None,
        "cache_implementation": config.cache_implementation == "quantized",
        **{name: bool(getattr(config, name)) for name in LOOPS},
        **{name: bool(config.return_dict_in_generate and getattr(config, name)) for name in OUTPUTS},
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise FulldepthError(f"Decoding layer by layer cannot follow {', '.join(names)} of the generation settings.")
    prepares = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus")
    unknown = [name for name, value in prepared.items() if name not in (*SHARED, *prepares) and value is not None]
    if unknown:
        raise FulldepthError(f"Decoding layer by layer takes text alone, not {names_of(unknown)}.")


def _check_start(input_ids: Tensor, prepared: Mapping[str, Any]) -> None:
    """Refuse tokens that do not begin at position 0 with an empty cache."""
    cache, given, mask = (prepared.get(name) for name in ("past_key_values", "position_ids", "attention_mask"))
    if cache is not None and cache.get_seq_length():
        raise FulldepthError(
            "Decoding layer by layer begins with an empty cache; leave out past_key_values, and give the whole text."
        )
    mask = torch.ones_like(input_ids) if mask is None else mask
    if given is not None and bool(((given != positions(mask)) & (mask != 0)).any()):
        raise FulldepthError(
            "Decoding layer by layer counts positions from the first token that is not padding; leave out position_ids."
        )


def _stops(criteria: Collection[Any]) -> list[Stop]:
    """Stopping criteria besides end tokens and maximum length."""
    others = [each for each in criteria if type(each) not in (EosTokenCriteria, MaxLengthCriteria)]
    return [lambda tokens, each=each: bool(each(tokens, None).all()) for each in others]  # type: ignore[misc]


__all__ = ["Decoder", "Generation", "decoder_of", "generate"]
