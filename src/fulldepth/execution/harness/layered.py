"""A model of lm-eval's interface that answers for every exit layer from one forward pass.

`HFLM` of the harness keeps everything but two methods: log-probabilities of continuations are read at all exit layers
of a pass (states `h_E` through final norm and head, at the continuation's positions only), and generation at exit layer
E runs the first E layers. The harness then evaluates its tasks once per layer on the answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError, one_line
from fulldepth.execution.harness.answers import Answers, Scored, key_of
from fulldepth.execution.harness.running import audible, quiet
from fulldepth.execution.hooks import capture
from fulldepth.hf import Anatomy, Classifier
from fulldepth.progress import Watcher

MOST_LOGITS = 1 << 25
"""Logits of one exit layer that exist at once."""
Request = tuple[Any, list[int], list[int]]
"""(texts, tokens of the context, tokens of the continuation)."""


class LayerReader:
    """Log-probabilities of tokens at several exit layers, from one forward pass.

    At the last layer they are computed from the model's own logits, as the harness does.

    Args:
        anatomy: a verified language model.
        classifier: its final norm and head.
        layers: exit layers, 1..L.
    """

    def __init__(self, anatomy: Anatomy, classifier: Classifier, layers: Sequence[int]) -> None:
        self.anatomy, self.classifier, self.layers = anatomy, classifier, list(layers)

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
            logits, states = run(), []
        else:
            with capture(self.anatomy, ["residual"]) as activations:
                logits = run()
            states = activations["residual"]  # L+1 states [B, T, D]
        read = []
        for layer in self.layers:
            source = logits if layer == depth else states[layer]
            chosen = source[row.to(source.device), position.to(source.device)]  # [N, V] or [N, D]
            read.append(self._predictions(chosen, token, dtype, None if layer == depth else self.classifier.at(layer)))
        values, hits = zip(*read, strict=True)
        return torch.stack(values), torch.stack(hits)

    def _predictions(
        self, chosen: Tensor, token: Tensor, dtype: torch.dtype | None, head: Classifier | None
    ) -> tuple[Tensor, Tensor]:
        """`[N]` log-probability of the tokens and whether they are the top ones, from logits, or states and a head."""
        classes = self.classifier.classes or self.anatomy.vocab_size or 1
        values, hits = [], []
        for part, wanted in zip(
            *(tensor.split(max(1, MOST_LOGITS // classes)) for tensor in (chosen, token)), strict=True
        ):
            logits = part if head is None else head.tokens(part.to(head.device or part.device))
            log_probabilities = torch.log_softmax(logits, -1, dtype=dtype)
            wanted = wanted.to(logits.device)
            values.append(log_probabilities.gather(1, wanted[:, None])[:, 0].cpu())
            hits.append((log_probabilities.argmax(-1) == wanted).cpu())
        return torch.cat(values), torch.cat(hits)


@dataclass
class TaskSession:
    """What a layered model reads and writes while the harness runs."""

    reader: LayerReader
    shortened: Callable[[int], PreTrainedModel]
    """Exit layer -> the model of the layers up to it."""
    layer: int
    """The exit layer for which requests are answered; 1..L."""
    answers: Answers = field(default_factory=lambda: Answers(None, {}, 0))
    watcher: Watcher = field(default_factory=Watcher)
    title: str = ""
    encoded: dict[tuple[str, str], tuple[list[int], list[int]]] = field(default_factory=dict)
    """Texts of requests -> their tokens."""
    cut: int = 0
    """Requests that are longer than the model's positions and were cut on the left."""


class LayeredAnswers:
    """The methods that replace those of `HFLM`; see `layered_model`."""

    session: TaskSession
    cache_hook: Any
    batch_size: int
    max_length: int
    logits_cache: bool
    softmax_dtype: Any
    device: Any
    _model: Any
    _model_call: Callable[[Tensor], Tensor]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probabilities of continuations at the session's exit layer."""
        with audible():
            return super().loglikelihood(requests, disable_tqdm=True)  # type: ignore[misc]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context and its continuation; every exit layer asks for them again."""
        encoded = self.session.encoded
        if (pair := encoded.get((context, continuation))) is None:
            pair = encoded[context, continuation] = super()._encode_pair(context, continuation)  # type: ignore[misc]
        return pair

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Answers of tokenised requests; those without an answer are read at all exit layers."""
        session = self.session
        if bad := next((request for request in requests if not request[2]), None):
            context, continuation = bad[0] or ("", "")
            raise FulldepthError(
                f"{session.title}: with this tokenizer {one_line(repr(continuation), 80)} has no tokens of its own "
                f"after {one_line(repr(str(context)[-60:]), 80)}, so no likelihood (a missing space?)."
            )
        longest = max((request[2] for request in requests), key=len, default=[])
        if len(longest) > self.max_length:
            raise FulldepthError(
                f"{session.title}: a continuation of {len(longest):,} tokens is longer than the model's "
                f"{self.max_length:,} positions, so it has no likelihood."
            )
        keys = [_key(request) for request in requests]
        waiting = {key: request for key, request in zip(keys, requests, strict=True) if key not in session.answers}
        if waiting:
            shown = override_bs is None  # else a window of `loglikelihood_rolling`
            self._score(list(waiting.values()), session.watcher if shown else Watcher())
        place = session.reader.layers.index(session.layer)
        return [session.answers[key][place] for key in keys]

    def _score(self, requests: list[Request], watcher: Watcher) -> None:
        """Run the requests in the harness's own batches: longest first, one pass for those that share their input."""
        from lm_eval.models.utils import Collator  # noqa: PLC0415  # an extra

        together: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            together.setdefault(_input(request), []).append(request)
        grouping = {"group_by": "contexts", "group_fn": _input} if self.logits_cache else {}
        collator = Collator(requests, sort_fn=lambda r: (-len(r[1] + r[2]), tuple(r[1] + r[2])), **grouping)
        watcher.begin(self.session.title, len(requests))
        for chunk in collator.get_batched(n=self.batch_size, batch_fn=None):
            shared = [together[_input(request)] if self.logits_cache else [request] for request in chunk]
            self.session.answers.put(self._scored(shared))
            watcher.advance(sum(map(len, shared)))

    def _scored(self, batch: list[list[Request]]) -> dict[str, Scored]:
        """Answers of one forward pass; the requests of a row have the same input."""
        rows = [(rows[0][1] + rows[0][2])[-(self.max_length + 1) :][:-1] for rows in batch]
        self.session.cut += sum(
            len(group) for row, group in zip(rows, batch, strict=True) if len(row) < len(group[0][1] + group[0][2]) - 1
        )
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.long, device=self.device)
        places: list[tuple[int, int, int]] = []  # row, position, token
        lengths, keys = [], []
        for number, (row, group) in enumerate(zip(rows, batch, strict=True)):
            for request in group:
                tokens = request[2]
                places += [(number, len(row) - len(tokens) + at, token) for at, token in enumerate(tokens)]
                lengths.append(len(tokens))
                keys.append(_key(request))
        row_numbers, positions, wanted = torch.tensor(places).unbind(1)
        with torch.no_grad():
            values, hits = self.session.reader.read(
                lambda: self._model_call(ids), row_numbers, positions, wanted, dtype=self.softmax_dtype
            )
        scored: dict[str, Scored] = {}
        parts = zip(keys, values.split(lengths, 1), hits.split(lengths, 1), strict=True)
        for key, value, hit in parts:  # [E, tokens] each
            scored[key] = [(float(one.sum()), bool(right.all())) for one, right in zip(value, hit, strict=True)]
        return scored

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts at the session's exit layer, in the harness's windows."""
        session = self.session
        session.watcher.begin(session.title, 1)  # the number of windows is known to the harness alone
        with audible():
            values = super().loglikelihood_rolling(requests, disable_tqdm=True)  # type: ignore[misc]
        session.watcher.advance(1)
        return list(values)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that the first layers, up to the session's exit layer, generate."""
        session = self.session
        keys = [_generation_key(request.args, session.layer) for request in requests]
        if any(request.args[1].get("do_sample") for request in requests):  # each draw is another text
            with audible(), self._leaving_at(session.layer):
                return super().generate_until(requests, disable_tqdm=True)  # type: ignore[misc]
        waiting = {key: request for key, request in zip(keys, requests, strict=True) if key not in session.answers}
        if waiting:
            session.watcher.begin(f"{session.title}, exit layer {session.layer}", len(waiting))
            before, self.cache_hook = self.cache_hook, _Keeper(session, self.batch_size)
            try:
                with audible(), self._leaving_at(session.layer):
                    texts = super().generate_until(list(waiting.values()), disable_tqdm=True)  # type: ignore[misc]
            finally:
                self.cache_hook = before
            session.answers.put({k: text for k, text in zip(waiting, texts, strict=True) if k not in session.answers})
        return [session.answers[key] for key in keys]

    @contextmanager
    def _leaving_at(self, layer: int) -> Iterator[None]:
        """The model of the first layers in place of the model."""
        whole = self._model
        self._model = whole if layer == self.session.reader.anatomy.num_layers else self.session.shortened(layer)
        try:
            yield
        finally:
            self._model = whole


class _Keeper:
    """Receives each text as soon as the harness has it, and keeps those of complete batches."""

    def __init__(self, session: TaskSession, batch_size: int) -> None:
        self.session, self.batch_size = session, batch_size
        self.texts: dict[str, str] = {}

    def add_partial(self, kind: str, arguments: Any, text: str) -> None:
        """Called by the harness after each text."""
        self.texts[_generation_key(arguments, self.session.layer)] = text
        self.session.watcher.advance(1)
        if len(self.texts) >= self.batch_size:
            self.session.answers.put(self.texts)
            self.texts = {}


def layered_model(model: PreTrainedModel, tokenizer: Any, session: TaskSession, batch_size: int) -> Any:
    """A model for `lm_eval.evaluate` that answers for `session.layer`.

    Args:
        model: in evaluation mode.
        tokenizer: a copy that may be changed: the harness adds a padding token.
        session: reader and answers; its `layer` may be changed between evaluations.
        batch_size: requests in a forward pass.
    """
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415  # an extra

    kind: Any = type("LayeredHFLM", (LayeredAnswers, HFLM), {})
    with quiet():
        lm = kind(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    lm.session = session
    return lm


def _input(request: Request) -> tuple[int, ...]:
    """The tokens that the model reads for a request, before they are cut."""
    return tuple(request[1] + request[2][:-1])


def _key(request: Request) -> str:
    return key_of("loglikelihood", request[1], request[2])


def _generation_key(arguments: Any, layer: int) -> str:
    text, options = arguments
    plain: Mapping[str, Any] = options if isinstance(options, Mapping) else {}
    return key_of("generate_until", layer, text, json.dumps(plain, sort_keys=True, default=str))
