"""`bench_under_load`: exports and their original in servers, with several clients at once.

The docstring of `fulldepth.skip.bench` describes the rounds, the rows and the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.core.uncertainty import FEWEST_ROUNDS, Ratio, median_ratio
from fulldepth.data.examples import Examples, read_examples
from fulldepth.execution.latency import OtherLoad, order
from fulldepth.execution.llama_cpp import LlamaCpp
from fulldepth.execution.serving import Serves, check_vllm, in_llama_cpp, in_vllm
from fulldepth.hf import find_gguf, find_tokenizer, load_config, load_tokenizer, packaged, pick_device
from fulldepth.results import Finding, Results, unique_names
from fulldepth.settings.bench import BenchSettings
from fulldepth.skip.exports.export import NOTES, read_notes
from fulldepth.skip.timed import Cell, ComparedModel, TableRow, Timings, bench_document, with_fitting_contexts
from fulldepth.subject import chosen_tokenizer

P95 = 95
CAN_SERVE = "Served can be: .gguf files, by llama.cpp; folders of the formats folded, layer and decilm, by vLLM."


@dataclass(frozen=True)
class ServedModel(ComparedModel):
    """A model that a server can load."""

    llama: LlamaCpp | None = None
    """The GGUF file; None for a model of vLLM."""
    config: Any = None
    """Configuration of a model of vLLM."""

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size if self.llama is None else self.llama.vocab_size

    @property
    def positions(self) -> int | None:
        """Most tokens that it reads; None if it does not say."""
        if self.llama is not None:
            return self.llama.header.entries.get("context_length")
        return getattr(self.config, "max_position_embeddings", None)

    def about(self) -> dict[str, Any]:
        """Name, class and depth of the model."""
        if self.llama is not None:
            header = self.llama.header
            return {"name": self.name, "class": header.architecture, "num_layers": header.entries.get("block_count")}
        return {
            "name": self.name,
            "class": getattr(self.config, "model_type", None),
            "num_layers": getattr(self.config, "num_hidden_layers", None),
        }


@dataclass
class LoadTimes(Timings):
    """Measurements of all models; `times` has the `Load` of each round by (label, cell)."""

    new_tokens: int = 0
    """Tokens of every answer."""

    def rates(self, label: str, cell: Cell) -> list[float]:
        """New tokens per second in each round."""
        return [len(load.first_tokens) * self.new_tokens / load.seconds for load in self.times[label, cell]]

    def rate_ratio(self, label: str, other: str, cell: Cell) -> Ratio:
        """Rate of a model over that of another one."""
        seconds = [[load.seconds for load in self.times[name, cell]] for name in (other, label)]
        return median_ratio(*seconds)

    def first_token_ratio(self, label: str, other: str, cell: Cell) -> Ratio:
        """Time to the first token of a model over that of another one."""
        return median_ratio(
            *([median(load.first_tokens) for load in self.times[name, cell]] for name in (label, other))
        )

    def ratios(self, label: str, *cells: Cell) -> Iterator[tuple[str, str, Ratio]]:
        """Ratios over the baseline's in one cell."""
        (cell,) = cells
        base = self.baseline(label)
        yield "rate_ratio", "server", self.rate_ratio(label, base, cell)
        yield "first_token_ratio", "server", self.first_token_ratio(label, base, cell)

    def measured_rows(self, label: str, cell: Cell) -> Iterator[TableRow]:
        """Rows of a model's rate and times to the first token in a cell."""
        rates = self.rates(label, cell)
        first_tokens = [seconds for load in self.times[label, cell] for seconds in load.first_tokens]
        yield "output_rate", "server", None, None, "median", median(rates), len(rates), "tokens/s"
        for statistic, value in (("median", median(first_tokens)), ("p95", np.percentile(first_tokens, P95))):
            yield "first_token_time", "server", None, None, statistic, float(value), len(first_tokens), "s"

    def headline(self) -> Iterator[tuple[str, Finding]]:
        """Findings by name: which model answers with most tokens per second, then the ratios of each export."""
        if (not_compared := self.busy()) is not None:
            yield "times", not_compared
            return
        for program in dict.fromkeys(self.programs.values()):
            yield from self._most(program)
        for label in self.programs:
            base = self.baseline(label)
            if label == base:
                continue
            for name, what, ratio in (
                ("rate_ratio", "tokens per second over those of", self.rate_ratio),
                ("first_token_ratio", "time to the first token over that of", self.first_token_ratio),
            ):
                ratios = {cell: ratio(label, base, cell) for cell in self.other_load}
                texts = [f"{self._where(cell)} {_in_words(ratio)}" for cell, ratio in ratios.items()]
                sentence = f"{label}, {what} {base}: {'; '.join(texts)}."
                yield f"{name} {label}", Finding(ratios[max(ratios)].value, "1", sentence)

    def _most(self, program: str) -> Iterator[tuple[str, Finding]]:
        """Which of several exports gives most tokens per second in each cell, if that is measurable."""
        _, *exports = (label for label, other in self.programs.items() if other == program)
        if len(exports) < 2:
            return
        if self.rounds < FEWEST_ROUNDS:
            too_few = f"{self.rounds} rounds are too few to compare exports in {program} ({FEWEST_ROUNDS} are needed)."
            yield f"most_tokens {program}", Finding(None, "1", f"Not told: {too_few}")
            return
        texts = []
        for cell in self.other_load:
            best, *slower = sorted(exports, key=lambda label: -median(self.rates(label, cell)))
            ahead = [self.rate_ratio(best, other, cell) for other in slower]
            if all(ratio.low > 1 for ratio in ahead):
                texts.append(f"{self._where(cell)} {best}, {_in_words(ahead[0])} times {slower[0]}")
            else:
                level = [other for other, ratio in zip(slower, ahead, strict=True) if not ratio.low > 1]
                texts.append(f"{self._where(cell)} no measurable difference between {best} and {', '.join(level)}")
        yield f"most_tokens {program}", Finding(None, "1", f"Most tokens per second in {program}: {'; '.join(texts)}.")

    def _where(self, cell: Cell) -> str:
        """`at 8 clients`, with the length of the prompt if there are several."""
        several = len({other.context for other in self.other_load}) > 1
        clients = f"{cell.batch} client{'s' * (cell.batch > 1)}"
        return f"at {clients}" + f" and {cell.context} tokens" * several


def _in_words(ratio: Ratio) -> str:
    """A ratio with its interval."""
    if not math.isfinite(ratio.low):
        return f"{ratio.value:.2f} (no interval: fewer than {FEWEST_ROUNDS} rounds)"
    return f"{'' if ratio.differs else '≈ '}{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def bench_under_load(
    original: Any,
    exports: Sequence[Any],
    settings: BenchSettings,
    watcher: Watcher,
    data: Any = None,
    heldout: Any = None,
    tokenizer: Any = None,
) -> Results:
    """Time models in servers, with every number of clients of `settings.concurrency`; rounds and ratios are as
    `fulldepth.skip.bench` describes.

    Args:
        original: GGUF file, checkpoint folder or Hub name.
        exports: the same.
        settings: of the benchmark; `contexts` are the lengths of the prompts.
        watcher: receives progress.
        data: as for `bench`: prompts are the beginnings of its held-out rows. None = random tokens, unless `heldout`
            is set.
        heldout: as for `bench`.
        tokenizer: as for `bench`.

    Raises:
        FulldepthError: if a model cannot be served, models have different vocabularies, prompts with new tokens exceed
            their positions, or no row of the data is long enough.
    """
    models = _opened([original, *exports], settings)
    limit = min((model.positions for model in models if model.positions), default=None)
    settings = with_fitting_contexts(settings, limit)
    longest = max(settings.contexts)
    if limit is not None and longest + settings.max_new_tokens > limit:
        raise FulldepthError(
            f"A context of {longest} tokens and {settings.max_new_tokens} new ones exceed the {limit} positions of the "
            "models. Use a shorter context or fewer new tokens."
        )
    assert settings.concurrency
    slots = max(settings.concurrency)
    positions = longest + settings.max_new_tokens + 1
    prompts, about = _prompts(models[0], longest, slots * settings.requests, settings, data, heldout, tokenizer)
    sizes = {
        model.label: {
            "parameter_bytes": model.llama.parameter_bytes,
            "kv_bytes_per_token": model.llama.kv_bytes_per_token,
        }
        for model in models
        if model.llama is not None
    }
    measured = LoadTimes({model.label: model.program for model in models}, sizes, new_tokens=settings.max_new_tokens)
    clients = sorted(set(settings.concurrency))
    cells = [Cell(count, context) for context in settings.contexts for count in clients]
    device = pick_device(settings.device)
    with ExitStack() as stack:
        served: list[Serves] = []
        for model in models:
            if model.llama is not None:
                served.append(stack.enter_context(in_llama_cpp(model.llama, slots, positions, device)))
            else:
                engine = in_vllm(
                    model.name,
                    slots=slots,
                    positions=positions,
                    models=len(models),
                    dtype=settings.dtype,
                    seed=settings.seed,
                    revision=settings.revision,
                    trust_remote_code=settings.trust_remote_code,
                )
                served.append(stack.enter_context(engine))
        watcher.begin("Benchmark under load", len(cells) * len(models) * (settings.repeats + settings.warmup))
        for cell in cells:
            texts = [prompt[: cell.context] for prompt in prompts[: cell.batch * settings.requests]]
            load = OtherLoad()
            for number in range(-settings.warmup, settings.repeats):
                for index in order(len(models), number, settings.seed):
                    result = served[index].serve(texts, settings.max_new_tokens, cell.batch)
                    if number >= 0:
                        measured.times.setdefault((models[index].label, cell), []).append(result)
                    watcher.advance(1)
            measured.other_load[cell] = load.share()
    return Results(measured.table(), _document(models, measured, settings, about, device))


def _opened(sources: Sequence[Any], settings: BenchSettings) -> list[ServedModel]:
    """Every model, with the shortest distinct endings of the names as labels.

    Raises:
        FulldepthError: see `bench_under_load`.
    """
    if loaded := [source for source in sources if isinstance(source, PreTrainedModel)]:
        raise FulldepthError(f"A loaded {type(loaded[0]).__name__} cannot be served; name its folder. {CAN_SERVE}")
    labels = unique_names([Path(str(source)) for source in sources])
    models: list[ServedModel] = []
    for label, source in zip(labels, sources, strict=True):
        name = packaged(str(source))
        file = find_gguf(name)
        if file is not None:
            models.append(ServedModel(label, str(file), "llama.cpp", {}, not models, LlamaCpp(file)))
            continue
        notes = read_notes(Path(name)) if (Path(name) / NOTES).is_file() else {}
        if notes.get("format") == "fast":
            raise FulldepthError(f"vLLM has no class for {name}, an export of the format fast. {CAN_SERVE}")
        check_vllm(name)
        whole = load_config(name, revision=settings.revision, trust_remote_code=settings.trust_remote_code)
        config = whole.get_text_config(decoder=True)
        models.append(ServedModel(label, name, "vLLM", notes, not models, config=config))
    first = models[0]
    for model in models[1:]:
        if model.vocab_size != first.vocab_size:
            raise FulldepthError(
                f"{model.label} has a vocabulary of {model.vocab_size}, {first.label} of {first.vocab_size}: not the "
                "same model."
            )
    return models


def _prompts(
    model: ServedModel,
    length: int,
    count: int,
    settings: BenchSettings,
    data: Any,
    heldout: Any,
    tokenizer: Any,
) -> tuple[list[list[int]], dict[str, Any] | None]:
    """`count` prompts of `length` token ids, and the origin of the data; rows are repeated if there are too few."""
    if data is None and heldout is None:
        ids = np.random.default_rng(settings.seed).integers(0, model.vocab_size, (count, length))
        return ids.tolist(), None
    examples = data if isinstance(data, Examples) else _read(model, settings, data, heldout, tokenizer)
    rows = [row.input_ids.tolist() for row in examples.heldout]
    long = [row[:length] for row in rows if len(row) >= length]
    if not long:
        raise FulldepthError(
            f"The longest held-out row has {max(map(len, rows))} tokens, and prompts need {length}. Set --contexts to "
            "shorter ones, or for plain text --sequence-length to more."
        )
    return [long[index % len(long)] for index in range(count)], examples.meta


def _read(model: ServedModel, settings: BenchSettings, data: Any, heldout: Any, tokenizer: Any) -> Examples:
    """The data, read by the tokenizer of a model."""
    tokenizer = chosen_tokenizer(settings, tokenizer)
    revision = settings.revision if tokenizer is None else None
    tokenizer = find_tokenizer(model.name) if tokenizer is None else tokenizer
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, revision=revision, trust_remote_code=settings.trust_remote_code)
    return read_examples(
        data,
        tokenizer,
        model.positions,
        heldout=heldout,
        seed=settings.seed,
        sequence_length=settings.sequence_length,
        limit=settings.max_sequences,
        vocab_size=model.vocab_size,
        chat=settings.chat,
    )


def _document(
    models: Sequence[ServedModel],
    measured: LoadTimes,
    settings: BenchSettings,
    data: dict[str, Any] | None,
    device: Any,
) -> dict[str, Any]:
    """The entries of `results.json`."""
    original = models[0]
    warnings = [
        f"{original.label} is served by {original.program}: models in {model.program} are compared with "
        f"{model.label}, the first one there."
        for model in models
        if not model.original and measured.baseline(model.label) == model.label
    ]
    described = [(model, model.about()) for model in models]
    return bench_document(described, settings, device, data, warnings, measured.headline())
