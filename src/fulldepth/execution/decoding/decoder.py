"""`Decoder`: decoding with fewer layers, by early exit or with drafts of the model's own first layers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from fulldepth.core.errors import FulldepthError, names_of, one_line, unknown
from fulldepth.execution.decoding.loops import decode
from fulldepth.execution.decoding.options import Options
from fulldepth.execution.decoding.session import DecodingSession, Stats
from fulldepth.execution.latency import check_prompt_fits
from fulldepth.execution.layer_runner import LayerRunner, decoding_runner, positions
from fulldepth.execution.verify import prove
from fulldepth.hf import CACHE_NAMES, Anatomy, cache_in, device_of, evaluating, first_rotation_length

SHARED = (
    "position_ids",
    *CACHE_NAMES,
    "use_cache",
    "logits_to_keep",
    "cache_position",
    "synced_gpus",
)
"""Arguments of `generate`'s decoding loops that are made here again."""
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
"""What `generate` adds to a returned dictionary, and this loop does not keep."""
SEEDS = (-(2**63), 2**64 - 1)
"""Smallest and largest seed of a `torch.Generator`."""
LOOPS = (
    *("prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha", "dola_layers", "use_mtp", "is_assistant"),
    *("constraints", "force_words_ids"),
)
"""Settings of `generate` that ask for another decoding loop."""


@dataclass(frozen=True)
class Generation:
    """Result of `generate`."""

    sequences: Tensor
    """[B, prompt + new] prompts and new tokens; sequences that ended early are padded on the right."""
    stats: Stats
    """Counts of layers, drafts and exits, and times."""
    texts: list[str] | None = None
    """New text of each prompt, if the prompts were texts."""

    def __repr__(self) -> str:
        new = ", ".join(map(str, self.stats.new_tokens))
        return f"Generation({len(self.sequences)} sequences; new tokens: {new}; {self.stats.seconds:.2f} s)"


class Decoder:
    """A decoder whose layers are verified to run one by one; for several generations of one model.

    The object is also a decoding loop of transformers: `model.generate(ids, custom_generate=decoder,
    speculate_from=12)` takes the options of `Decoder.generate` by name and returns what `generate` returns.
    transformers passes no `streamer` to such loops; stream with `Decoder.generate`.

    Args:
        model: a decoder with a language-model head, or its anatomy. It is run in evaluation mode.

    Raises:
        FulldepthError: for other models, and decoders that cannot be run layer by layer with a cache, with the reason.
    """

    def __init__(self, model: PreTrainedModel | Anatomy) -> None:
        owner = model.model if isinstance(model, Anatomy) else model
        size = owner.config.get_text_config().vocab_size
        tokens = torch.arange(24, device=device_of(owner)).view(2, 12) % max(1, size - 1)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        with evaluating(owner):
            anatomy, _ = prove(model, inputs, optional=("branches",))
            self.runner: LayerRunner = decoding_runner(anatomy, inputs)
        self.last: Generation | None = None
        """Result of the last generation."""
        self._is_called = False
        """True once `model.generate` has accepted its settings and called this loop."""

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
        progress: Callable[[int], None] = lambda done: None,
        **options: Any,
    ) -> Generation:
        """Generate as `fulldepth.exit.generate` does; `progress` receives the new tokens of the longest sequence."""
        if not isinstance(input_ids, Tensor) or input_ids.is_floating_point():
            given_type = getattr(input_ids, "dtype", type(input_ids).__name__)
            encode = "tokenizer(text, return_tensors='pt').input_ids"
            raise FulldepthError(f"input_ids is {given_type}; expected token ids [B, T]. Encode text with {encode}.")
        if input_ids.ndim != 2 or not input_ids.numel():
            raise FulldepthError(f"input_ids has shape {tuple(input_ids.shape)}; expected [B, T], not empty.")
        size = self.anatomy.model.config.get_text_config().vocab_size
        smallest, largest = input_ids.aminmax()
        if not 0 <= smallest <= largest < size:
            raise FulldepthError(f"input_ids holds ids from {smallest} to {largest}; expected 0 to {size - 1}.")
        if not do_sample and (temperature, top_p, top_k) != (1.0, 1.0, 0):
            raise FulldepthError(
                "temperature, top_p and top_k are for sampling; set do_sample=True, or leave them out."
            )
        known = [field.name for field in fields(Options) if field.name != "num_layers"]
        if unlisted := options.keys() - set(known):
            raise unknown("option", min(unlisted), known)
        stated = self.anatomy.model.generation_config
        _refuse(
            stated,
            num_return_sequences=(stated.num_return_sequences or 1) > 1,
            token_healing=bool(stated.token_healing),
            stop_strings=bool(stated.stop_strings),  # generate hands no tokenizer to another loop
        )
        device = device_of(self.anatomy.model)
        try:
            mask = None if attention_mask is None else torch.as_tensor(attention_mask, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise FulldepthError(f"attention_mask is no tensor [B, T]: {one_line(str(error), 200)}.") from error
        if mask is not None and mask.shape != input_ids.shape:
            raise FulldepthError(
                f"attention_mask has shape {tuple(mask.shape)}; expected {tuple(input_ids.shape)}, as input_ids."
            )
        given = {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id, "attention_mask": mask}
        settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        settings["max_new_tokens"] = _whole("max_new_tokens", max_new_tokens, 1)
        if do_sample:
            settings["temperature"] = _number("temperature", temperature, lambda value: value > 0, "above 0")
            settings["top_p"] = _number("top_p", top_p, lambda value: 0 <= value <= 1, "from 0 to 1")
            settings["top_k"] = _whole("top_k", top_k, 0)
        self._is_called = False
        try:
            self.anatomy.model.generate(  # type: ignore[operator]
                input_ids.to(device),
                custom_generate=partial(self, seed=seed, progress=progress, **options),
                do_sample=do_sample,
                return_dict_in_generate=False,
                **settings,
            )
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            if self._is_called or isinstance(error, FulldepthError):
                raise
            raise FulldepthError(
                f"transformers refuses a setting of this generation: {one_line(str(error), 400)} Change the argument, "
                "or the entry of model.generation_config (generation_config.json)."
            ) from error
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
        min_layer: int = 1,
        speculate_from: int | str | None = None,
        draft_length: int | str = "auto",
        seed: int | None = None,
        progress: Callable[[int], None] = lambda done: None,
        **prepared: Any,
    ) -> Any:
        """Decoding loop for `model.generate(custom_generate=decoder)`: `[B, prompt + new]`, or a dictionary.

        The result is also stored in `last`.
        """
        self._is_called = True
        if model is not self.anatomy.model:
            raise FulldepthError("This decoder was made for another model object; make one for this model.")
        seed = _whole("seed", seed, *SEEDS)
        options = Options(self.anatomy.num_layers, threshold, rule, min_layer, speculate_from, draft_length)
        mask = prepared.pop("attention_mask", None)
        mask = torch.ones_like(input_ids) if mask is None else mask.long()
        _check(mask, generation_config, prepared)
        rows, prompt = input_ids.shape
        new_tokens = int(generation_config.max_length) - prompt
        check_prompt_fits(self.anatomy, prompt, new_tokens)
        _check_rotation(self.anatomy.config, prompt, new_tokens)
        if rows > 1 and speculate_from is not None:
            raise FulldepthError(f"speculate_from drafts for one sequence, not {rows}; generate one prompt at a time.")
        session = DecodingSession(
            self.runner,
            input_ids,
            mask,
            generation_config,
            logits_processor,
            stopping_criteria,
            generator=None if seed is None else torch.Generator(input_ids.device).manual_seed(seed),
            progress=progress,
        )
        with evaluating(self.anatomy.model), torch.no_grad():
            decode(session, options)
        self.last = Generation(session.result(), session.stats)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=self.last.sequences)  # type: ignore[arg-type]
        return self.last.sequences


def _whole(name: str, value: Any, least: int, most: int | None = None) -> int | None:
    """Return an argument as a whole number in this range; None stays.

    Raises:
        FulldepthError: if it is none.
    """
    if value is None:
        return None
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    try:
        number = operator.index(number)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise FulldepthError(f"{name} is {one_line(repr(value), 60)}; expected a whole number {bounds}.")
    return number


def _number(name: str, value: Any, is_valid: Callable[[float], bool], words: str) -> float | None:
    """Return an argument as a number in the range that `words` describe; None stays.

    Raises:
        FulldepthError: if it is none.
    """
    if value is None:
        return None
    single = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    number = float(single) if isinstance(single, Real) else math.nan
    if not is_valid(number):
        raise FulldepthError(f"{name} is {one_line(repr(value), 60)}; expected a number {words}.")
    return number


def _refuse(config: GenerationConfig, **further: bool) -> None:
    """Refuse settings that a loop over single tokens cannot follow by name, and those `further` ones that are true."""
    refused = {
        "num_beams": config.num_beams not in (None, 1),
        "guidance_scale": config.guidance_scale not in (None, 1),
        "watermarking_config": config.watermarking_config is not None,
        "cache_implementation": config.cache_implementation == "quantized",
        **{name: bool(getattr(config, name, None)) for name in LOOPS},
        **further,
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise FulldepthError(
            f"Decoding layer by layer cannot follow {', '.join(names)} of the generation settings. Use model.generate "
            "alone, or set it to None in model.generation_config (generation_config.json)."
        )


def _check_rotation(config: Any, prompt: int, new_tokens: int) -> None:
    """Refuse a text that grows over the length at which a model rotates its keys in another way (LongRoPE).

    Some classes read the whole text again there, others keep the cache; drafts that reach over it would rotate
    confirmed positions, too.

    Raises:
        FulldepthError: if it does.
    """
    limit = first_rotation_length(config)
    if limit is not None and prompt <= limit < prompt + new_tokens:
        room = limit - prompt
        advice = f"ask for at most {room} new tokens" if room else "none can follow; give another prompt"
        raise FulldepthError(
            f"From {limit + 1} tokens on the model rotates its keys in another way (longrope), so that a text may "
            f"not grow over this length. After a prompt of {prompt} tokens {advice}."
        )


def _check(mask: Tensor, config: GenerationConfig, prepared: Mapping[str, Any]) -> None:
    """Refuse what a loop over single tokens with its own cache, from position 0 on, cannot follow."""
    _refuse(config, **{name: bool(config.return_dict_in_generate and getattr(config, name)) for name in OUTPUTS})
    other_inputs = [
        name
        for name, value in prepared.items()
        if name not in (*SHARED, *OUTPUTS)
        and value is not None
        and value != {}  # `mm_encoder_outputs` of a text without pictures
    ]
    if other_inputs:
        raise FulldepthError(f"Decoding layer by layer takes text alone, not {names_of(other_inputs)}.")
    cache = cache_in(prepared)
    given = prepared.get("position_ids")
    # transformers marks a caller's cache; `generate` makes one, too.
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        raise FulldepthError(
            "Decoding layer by layer keeps a cache of its own; leave the caller's out, and give the whole text."
        )
    if given is not None and bool(((given != positions(mask)) & (mask != 0)).any()):
        raise FulldepthError(
            "Decoding layer by layer counts positions from the first token that is not padding; leave out position_ids."
        )
