"""`Decoder`: decoding with fewer layers, by early exit or with drafts of the model's own first layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fulldepth.errors import FulldepthError, names_of, unknown
from fulldepth.execution.decoding.loops import decode
from fulldepth.execution.decoding.options import Options
from fulldepth.execution.decoding.session import Choice, DecodingSession, Stats, TokenRows
from fulldepth.execution.layer_runner import LayerRunner, decoding_runner, positions
from fulldepth.execution.verify import check_task, verify
from fulldepth.hf import Anatomy, anatomy_candidates, device_of, evaluating

SHARED = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
    "synced_gpus",
)
"""Arguments of `generate`'s decoding loops that are made here again."""
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
"""What `generate` adds to a returned dictionary, and this loop does not keep."""
LOOPS = ("prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha", "dola_layers")
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
        """As `fulldepth.exit.generate`; `progress` is called with the new tokens of the longest sequence."""
        if not isinstance(input_ids, Tensor) or input_ids.is_floating_point():
            got = str(input_ids.dtype) if isinstance(input_ids, Tensor) else type(input_ids).__name__
            encode = "tokenizer(text, return_tensors='pt').input_ids"
            raise FulldepthError(f"input_ids is {got}; expected token ids [B, T]. Encode text with {encode}.")
        if input_ids.ndim != 2 or not input_ids.numel():
            raise FulldepthError(f"input_ids has shape {tuple(input_ids.shape)}; expected [B, T], not empty.")
        size, (smallest, largest) = self.anatomy.model.config.get_text_config().vocab_size, input_ids.aminmax()
        if not 0 <= smallest <= largest < size:
            raise FulldepthError(f"input_ids holds ids from {smallest} to {largest}; expected 0 to {size - 1}.")
        if not do_sample and (temperature, top_p, top_k) != (1.0, 1.0, 0):
            raise FulldepthError(
                "temperature, top_p and top_k are for sampling; set do_sample=True, or leave them out."
            )
        known = [field.name for field in fields(Options) if field.name != "num_layers"]
        if unlisted := options.keys() - set(known):
            raise unknown("option", min(unlisted), known)
        device = device_of(self.anatomy.model)
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": do_sample, "num_beams": 1}
        settings |= {"temperature": temperature, "top_p": top_p, "top_k": top_k} if do_sample else {}
        mask = None if attention_mask is None else torch.as_tensor(attention_mask, device=device)
        if mask is not None and mask.shape != input_ids.shape:
            raise FulldepthError(
                f"attention_mask has shape {tuple(mask.shape)}; expected {tuple(input_ids.shape)}, as input_ids."
            )
        given = {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id, "attention_mask": mask}
        settings |= {name: value for name, value in given.items() if value is not None}
        settings["return_dict_in_generate"] = False
        loop = partial(self, seed=seed, shown_by=streamer, progress=progress, **options)
        self.anatomy.model.generate(input_ids.to(device), custom_generate=loop, **settings)  # type: ignore[operator]
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
        exit_layer: int | None = None,
        speculate_from: int | str | None = None,
        draft_length: int | str = "auto",
        draft_threshold: float | None = None,
        seed: int | None = None,
        shown_by: Any = None,
        progress: Callable[[int], None] = lambda done: None,
        **prepared: Any,
    ) -> Any:
        """Decoding loop for `model.generate(custom_generate=decoder)`: `[B, prompt + new]`, or a dictionary.

        The result is also stored in `last`. `shown_by` is the streamer, which transformers does not hand on.
        """
        if model is not self.anatomy.model:
            raise FulldepthError("This decoder was made for another model object; make one for this model.")
        options = Options(
            num_layers=self.anatomy.num_layers,
            threshold=threshold,
            rule=rule,
            min_layer=min_layer,
            exit_layer=exit_layer,
            speculate_from=speculate_from,
            draft_length=draft_length,
            draft_threshold=draft_threshold,
        )
        _check(input_ids, generation_config, prepared)
        limit, prompt, most = self.anatomy.max_positions, input_ids.shape[1], int(generation_config.max_length)
        if limit is not None and most > limit:
            raise FulldepthError(
                f"A prompt of {prompt} tokens and {most - prompt} new ones exceed the model's {limit} positions; "
                "shorten the prompt, or generate fewer tokens."
            )
        if shown_by is not None and len(input_ids) > 1:
            raise FulldepthError("A streamer shows one sequence; generate one prompt at a time with it.")
        ends, criteria = generation_config._eos_token_tensor, stopping_criteria
        others = [each for each in criteria if type(each) not in (EosTokenCriteria, MaxLengthCriteria)]
        sequences = TokenRows(
            input_ids,
            prepared.get("attention_mask"),
            max_length=most,
            end_tokens=[] if ends is None else ends.tolist(),
            padding=0 if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor),
            stops=[lambda tokens, each=each: bool(each(tokens, None).all()) for each in others],  # type: ignore[misc]
            notify=(lambda token: None) if shown_by is None else lambda token: shown_by.put(torch.tensor([token])),
        )
        generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
        choice = Choice(sequences, logits_processor, bool(generation_config.do_sample), generator)
        session = DecodingSession(self.runner, sequences, choice, progress)
        if shown_by is not None:
            shown_by.put(input_ids.cpu())
        with evaluating(self.anatomy.model), torch.no_grad():
            decode(session, options)
        if shown_by is not None:
            shown_by.end()
        self.last = Generation(sequences.result(), session.stats)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=self.last.sequences)  # type: ignore[arg-type]
        return self.last.sequences


def _check(input_ids: Tensor, config: GenerationConfig, prepared: Mapping[str, Any]) -> None:
    """Refuse what a loop over single tokens with its own cache, from position 0 on, cannot follow."""
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
    others = [name for name, value in prepared.items() if name not in SHARED and value is not None]
    if others:
        raise FulldepthError(f"Decoding layer by layer takes text alone, not {names_of(others)}.")
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
