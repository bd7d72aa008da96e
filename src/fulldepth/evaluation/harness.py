"""lm-eval's model class, answering for every exit layer from one forward pass (extra `fulldepth[evaluate]`).

`HFLM` of the harness keeps everything but three things: log-probabilities of continuations are read at all exit layers
of a pass (states `h_E` through final norm and head, at the continuation's positions only), generation at exit layer E
runs the first E layers, and each text has one BOS, if the tokenizer writes any. The harness then evaluates its tasks
once per layer on the answers, which are kept on disk so that a killed run goes on.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import sha256_of, write_text
from fulldepth.core.progress import Watcher
from fulldepth.data.tokens import Frame
from fulldepth.execution.hooks import capture
from fulldepth.execution.predictions import read_predictions
from fulldepth.hf import Anatomy, Classifier
from fulldepth.hf.truncation import truncated
from fulldepth.hf.tying import keeping_ties

SEED = 1234
PYTHON_SEED = 0
"""lm-eval's default seeds: of few-shot examples, NumPy and torch; of Python's `random`."""
MOST_LINE = 64 << 20
"""Longest line of a file of answers in bytes."""
HarnessModel: Any = object
"""`HFLM`, which `LayeredAnswers` is put before."""
Request = tuple[Any, list[int], list[int]]
"""(texts, tokens of the context, tokens of the continuation)."""

Likelihoods = list[tuple[float, bool]]
"""Of one request, for each exit layer: the log-probability of the continuation, and whether it is the greedy one."""


class Answers(dict[str, Any]):
    """Key of a request -> answer: for log-likelihoods one pair per exit layer, for generation the text.

    Args:
        path: file of lines of JSON, the first with `identity`; None = in memory only.
        identity: what the answers depend on. A file with another identity, or a link, is replaced.
        layers: number of exit layers of a scored request.

    Use as a context manager; every batch is written at once.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any], layers: int) -> None:
        super().__init__()
        self.path = path
        self.identity = json.loads(json.dumps(identity))
        self.layers = layers
        self._file: Any = None
        self.reused = 0
        """Answers that were read from the file."""

    def __enter__(self) -> Self:
        if self.path is not None:
            if self.path.parent.is_symlink():
                raise FulldepthError(
                    f"{self.path.parent} is a link; remove it, so that answers are written in its place."
                )
            if not self.path.is_symlink():
                self._read(self.path)
            write_text(self.path, _lines([self.identity, *self.items()]))
            self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # what could not be written is an error of `put`
                self._file.close()

    def put(self, answers: Mapping[str, Any]) -> None:
        """Add answers, and write them.

        Raises:
            FulldepthError: if they cannot be written.
        """
        self.update(answers)
        if self._file is not None:
            try:
                self._file.write(_lines(answers.items()))
                self._file.flush()
            except OSError as error:
                raise FulldepthError(f"Cannot write {self.path}: {error.strerror or error}.") from error

    def _read(self, path: Path) -> None:
        """Add the answers of a file with this identity, up to the first damaged line."""
        likelihoods = Annotated[list[tuple[float, bool]], Field(min_length=self.layers, max_length=self.layers)]
        line: TypeAdapter[Any] = TypeAdapter(tuple[str, str | likelihoods])
        with suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
            if json.loads(file.readline(MOST_LINE)) == self.identity:
                self.update(map(line.validate_json, iter(partial(file.readline, MOST_LINE), b"")))
        self.reused = len(self)


def _lines(values: Iterable[Any]) -> str:
    """Lines of JSON."""
    return "".join(json.dumps(value) + "\n" for value in values)


class LayerReader:
    """Log-probabilities of tokens at several exit layers, from one forward pass.

    At the last layer they are computed from the model's own logits, as the harness does.

    Args:
        anatomy: a verified language model.
        classifier: its final norm and head.
        layers: exit layers, 1..L.
    """

    def __init__(self, anatomy: Anatomy, classifier: Classifier, layers: Sequence[int]) -> None:
        self.anatomy = anatomy
        self.classifier = classifier
        self.layers = list(layers)

    def read(
        self,
        run: Callable[[], Tensor],
        row: Tensor,
        position: Tensor,
        token: Tensor,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read the predictions at N places.

        Args:
            run: one forward pass, which returns the model's logits `[B, T, V]`.
            row: `[N]` sequence of each place.
            position: `[N]` position of each place.
            token: `[N]` token whose log-probability is wanted.
            dtype: precision of the softmax; None = that of the logits.

        Returns:
            `[E, N]` log-probabilities in nats, and `[E, N]` whether the token is the most likely one; on the CPU.
        """
        depth = self.anatomy.num_layers
        if self.layers == [depth]:
            logits = run()
            states = []
        else:
            with capture(self.anatomy, ["residual"]) as activations:
                logits = run()
            states = activations["residual"]  # L+1 states [B, T, D]

        def keep(scores: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
            log_probabilities = torch.log_softmax(scores, -1, dtype=dtype)
            likelihood = log_probabilities.gather(1, wanted[:, None])[:, 0]
            return likelihood.cpu(), (log_probabilities.argmax(-1) == wanted).cpu()

        readings = []
        for layer in self.layers:
            source, head = (logits, None) if layer == depth else (states[layer], self.classifier.at(layer))
            rows_read = source[row.to(source.device), position.to(source.device)]  # [N, V] or [N, D]
            readings.append(read_predictions(head, rows_read, token, keep))
        values, hits = (torch.stack(column) for column in zip(*readings, strict=True))
        return values, hits


class LayeredAnswers(HarnessModel):
    """The methods that replace those of `HFLM`; see `layered_model`, which sets the further attributes."""

    cache_hook: Any
    _model: Any
    _texts: dict[str, str]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **options: Any
    ) -> list[int]:
        """Tokens of a text, behind what the tokenizer writes before a text if it is not there already; its tokens for
        the end of a text are left out, because a continuation follows.

        Inside `loglikelihood_rolling` nothing is before the text: the harness puts the first token there.
        """
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens), **options)
        first = [self.prefix_token_id]
        before = list(self.frame.prefix)
        if self._rolling:
            ids = ids[1:] if ids[:1] == first else ids
        elif add_special_tokens is None and ids[:1] != first and ids[: len(before)] != before:
            ids = [*before, *ids]
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_batch_encode(
        self, strings: Sequence[str], padding_side: str = "left", left_truncate_len: int | None = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Tokens `[B, T]` of several texts, each as from `tok_encode`, and their mask."""
        rows = [self.tok_encode(string, left_truncate_len=left_truncate_len) for string in strings]
        padded = self.tokenizer.pad({"input_ids": rows}, padding_side=padding_side, return_tensors="pt")
        return padded["input_ids"], padded["attention_mask"]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, each behind one BOS."""
        self._rolling = True
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self._rolling = False

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context and its continuation; every exit layer asks for them again."""
        if (pair := self._encoded.get((context, continuation))) is None:
            pair = self._encoded[context, continuation] = super()._encode_pair(context, continuation)
        return pair

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Answers of tokenised requests; those without an answer are read at all exit layers."""
        if bad := next((request for request in requests if not request[2]), None):
            context, continuation = bad[0] or ("", "")
            raise FulldepthError(
                f"{self.title}: with this tokenizer {one_line(repr(continuation), 80)} has no tokens of its own "
                f"after {one_line(repr(str(context)[-60:]), 80)}, so no likelihood (a missing space?)."
            )
        longest = max((len(request[2]) for request in requests), default=0)
        if longest > self.max_length:
            raise FulldepthError(
                f"{self.title}: a continuation of {longest:,} tokens is longer than the model's {self.max_length:,} "
                "positions, so it has no likelihood."
            )
        keys = [_key(request) for request in requests]
        if self._is_whole:
            lengths = {key: len(_input(request)) for key, request in zip(keys, requests, strict=True)}
            self.cut += sum(length > self.max_length for length in lengths.values())
        waiting = {key: request for key, request in zip(keys, requests, strict=True) if key not in self.answers}
        if waiting:
            counts_progress = override_bs is None  # else a window of `loglikelihood_rolling`
            self._score(list(waiting.values()), self.watcher if counts_progress else Watcher())
        place = self.reader.layers.index(self.layer)
        return [self.answers[key][place] for key in keys]

    def _score(self, requests: list[Request], watcher: Watcher) -> None:
        """Run the requests in the harness's own batches: longest first, one pass for those that share their input."""
        from lm_eval.models.utils import Collator  # noqa: PLC0415  # an extra

        together: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            together.setdefault(_input(request), []).append(request)
        grouping = {"group_by": "contexts", "group_fn": _input} if self.logits_cache else {}
        collator = Collator(requests, sort_fn=lambda r: (-len(r[1] + r[2]), tuple(r[1] + r[2])), **grouping)
        watcher.begin(self.title, len(requests))
        for chunk in collator.get_batched(n=self.batch_size, batch_fn=None):
            shared = [together[_input(request)] if self.logits_cache else [request] for request in chunk]
            self.answers.put(self._scored(shared))
            watcher.advance(sum(map(len, shared)))

    def _scored(self, batch: list[list[Request]]) -> dict[str, Likelihoods]:
        """Answers of one forward pass; the requests of a row have the same input."""
        rows = []
        for group in batch:
            whole = (group[0][1] + group[0][2])[:-1]
            rows.append(whole[-self.max_length :])
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.long, device=self.device)
        requests = [(number, request) for number, group in enumerate(batch) for request in group]
        row, position, token = torch.tensor(
            [
                (number, len(rows[number]) - len(tokens) + at, token)
                for number, (_, _, tokens) in requests
                for at, token in enumerate(tokens)
            ]
        ).unbind(1)
        with torch.no_grad():
            values, hits = self.reader.read(
                lambda: self._model_call(ids), row, position, token, dtype=self.softmax_dtype
            )
        lengths = [len(request[2]) for _, request in requests]
        parts = zip(requests, values.split(lengths, 1), hits.split(lengths, 1), strict=True)
        return {  # [E, tokens] each
            _key(request): [(float(losses.sum()), bool(right.all())) for losses, right in zip(value, hit, strict=True)]
            for (_, request), value, hit in parts
        }

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that the first layers, up to the exit layer, generate."""
        options = [self._options(request.args[1]) for request in requests]
        if self._is_whole:
            asked = zip(requests, options, strict=True)
            contexts = {(request.args[0], self.max_length - option["max_gen_toks"]) for request, option in asked}
            self.cut += sum(len(self.tok_encode(text)) > room for text, room in contexts)
        if any(option["do_sample"] for option in options):  # each draw is another text
            return self._generate(requests)
        keys = [self._text_key(request.args) for request in requests]
        waiting = {key: request for key, request in zip(keys, requests, strict=True) if key not in self.answers}
        if waiting:
            self.watcher.begin(f"{self.title}, exit layer {self.layer}", len(waiting))
            before = self.cache_hook
            self.cache_hook = self
            self._texts = {}
            try:
                texts = self._generate(list(waiting.values()))
            finally:
                self.cache_hook = before
            self.answers.put({k: text for k, text in zip(waiting, texts, strict=True) if k not in self.answers})
        return [self.answers[key] for key in keys]

    @property
    def _is_whole(self) -> bool:
        """True if the whole model answers, as it does once for every request, before its exit layers."""
        return bool(self.layer == self.reader.layers[-1])

    def _options(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of generation with the harness's defaults: a temperature above 0 alone turns sampling on."""
        from lm_eval.models.utils import normalize_gen_kwargs  # noqa: PLC0415  # an extra

        return dict(normalize_gen_kwargs(dict(arguments), self.max_gen_toks))

    def add_partial(self, kind: str, arguments: Any, text: str) -> None:
        """Called by the harness after each text, as its `cache_hook`: keeps the texts of complete batches."""
        self._texts[self._text_key(arguments)] = text
        self.watcher.advance(1)
        if len(self._texts) >= self.batch_size:
            self.answers.put(self._texts)
            self._texts = {}

    def _text_key(self, arguments: Any) -> str:
        text, options = arguments
        return key_of("generate_until", self.layer, text, json.dumps(options, sort_keys=True, default=str))

    def _generate(self, requests: list[Any]) -> list[str]:
        """Texts of the harness's own generation, with the model of the first layers in place of the model."""
        whole = self._model
        self._model = whole if self.layer == self.reader.anatomy.num_layers else self.shortened(self.layer)
        try:
            return super().generate_until(requests, disable_tqdm=True)
        finally:
            self._model = whole


def layered_model(
    reader: LayerReader,
    tokenizer: Any,
    answers: Answers,
    *,
    batch_size: int,
    title: str = "",
    watcher: Watcher | None = None,
) -> Any:
    """A model for `lm_eval.evaluate` that answers for its `layer`, the last one at first.

    `cut` counts the different requests that are longer than the model's positions and were cut on the left.

    Args:
        reader: of a model in evaluation mode, at its exit layers.
        tokenizer: a copy that may be changed: the harness adds a padding token.
        answers: known ones, and where new ones are kept.
        batch_size: requests in a forward pass.
        title: shown with the progress.
        watcher: receives progress.
    """
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415  # an extra

    kind: Any = type("LayeredHFLM", (LayeredAnswers, HFLM), {})
    with quiet(), keeping_ties(reader.anatomy.model):
        lm = kind(pretrained=reader.anatomy.model, tokenizer=tokenizer, batch_size=batch_size)
    lm.reader = reader
    lm.layer = reader.layers[-1]
    lm.answers = answers
    lm.title = title
    lm.cut = 0
    lm.watcher = watcher or Watcher()
    lm.shortened = lru_cache(None)(lambda layer: truncated(reader.anatomy, layer))
    lm._encoded = {}
    lm._texts = {}
    lm._rolling = False
    lm.frame = Frame.of(lm.tokenizer, ["a text"])
    return lm


def _input(request: Request) -> tuple[int, ...]:
    """The tokens that the model reads for a request, before they are cut."""
    return tuple(request[1] + request[2][:-1])


def _key(request: Request) -> str:
    return key_of("loglikelihood", request[1], request[2])


def key_of(kind: str, *parts: Any) -> str:
    """A key of a request: a hash of its kind and its parts (plain values)."""
    return sha256_of(json.dumps([kind, *parts], default=str))[:32]


@contextmanager
def seeded(seed: int | None, device: torch.device | None = None) -> Iterator[None]:
    """Seed the generators that tasks may use, as lm-eval does; on leaving, their states are restored.

    Args:
        seed: None = lm-eval's own seeds.
        device: of the model that draws the tokens of sampled texts; None if no model runs.
    """
    seed_of_torch = SEED if seed is None else seed
    accelerators = [device] if device is not None and device.type == "cuda" else []
    python = random.getstate()
    numpy = np.random.get_state()
    random.seed(PYTHON_SEED if seed is None else seed)
    np.random.seed(SEED if seed is None else seed)
    try:
        with torch.random.fork_rng(devices=accelerators):
            torch.random.default_generator.manual_seed(seed_of_torch)
            for accelerator in accelerators:
                with torch.cuda.device(accelerator):
                    torch.cuda.manual_seed(seed_of_torch)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence messages and bars of the harness, and let it compute standard errors in this process.

    Its pool of processes would copy a process that holds a model and threads.
    """
    logger = logging.getLogger("lm_eval")
    pool = os.environ.get("DISABLE_MULTIPROC")
    level = logger.level
    logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if pool is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = pool
