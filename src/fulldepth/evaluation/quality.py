"""Quality of generated text at exit layers (Aligned training, App. C.2).

Rows of `generation_quality`, `layer` = exit layer. Site `data`: `accuracy` and `perplexity` of next tokens of the text
data, at all exit layers. Site `full model`, of texts that the first layers generate by nucleus sampling: `perplexity`
under the whole model, `diversity`, and with an embedder `coherence`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import Fingerprint, sha256_of
from fulldepth.core.progress import Watcher
from fulldepth.core.uncertainty import identity
from fulldepth.data.drawing import block_clusters, draw_windows
from fulldepth.data.opening import PIECES, open_data, sampled_texts
from fulldepth.data.tokens import padding_id
from fulldepth.evaluation.embedding import Embedder
from fulldepth.evaluation.harness import Answers, LayerReader
from fulldepth.evaluation.model import EvaluatedModel
from fulldepth.hf import end_tokens, plain_generation
from fulldepth.hf.truncation import truncated
from fulldepth.metrics.standard_errors import Mean
from fulldepth.results import Finding
from fulldepth.settings.evaluate import QUALITY, EvaluateSettings

MEASURE = "generation_quality"
DATA = "data"
FULL = "full model"
Row = tuple[Any, ...]
NGRAMS = (2, 3, 4)


class Quality:
    """Measures the quality of generated text of one model.

    Args:
        model: with the blocks of its plan skipped.
        settings: with `generation_quality`, the text data.
        exit_layers: those of `EvaluateSettings.exit_layers_of`; None = the data are read at all layers, and the whole
            model and the first quarters of its layers generate.

    Raises:
        FulldepthError: if the data cannot be read, the data are too short, the model has too few positions or blocks
            skipped in place, or the embedder embeds no texts.
    """

    def __init__(self, model: EvaluatedModel, settings: EvaluateSettings, exit_layers: list[int] | None) -> None:
        self.subject = model.subject
        self.identity = model.identity
        self.settings = settings
        depth = model.num_layers
        quarters = [max(1, round(depth * part / 4)) for part in (1, 2, 3)]
        self.layers = exit_layers or sorted({*([] if model.plan else quarters), depth})
        self.data_layers = exit_layers or list(range(1, depth + 1))
        if len(self.layers) > 1:
            model.check_can_be_cut()
        self.windows, self.clusters = self._windows()
        self.embedder: Embedder | None = None
        if settings.embedder is not None:
            device = model.subject.device
            self.embedder = Embedder(settings.embedder, device, trust_remote_code=settings.trust_remote_code)
            embedder_hash = str(Fingerprint(json.dumps(self.embedder.identity)))
            self.data |= {"embedder": str(settings.embedder), "embedder_hash": embedder_hash}
        # what the numbers depend on beside settings and model
        self.content: list[Any] = [self.windows.tolist(), self.embedder and self.embedder.identity]

    def _windows(self) -> tuple[Tensor, list[int]]:
        """A uniform sample of windows of `prefix_tokens + max_new_tokens` tokens, `[N, T]`, and the cluster of each.

        There are no clusters if no error is known.
        """
        settings = self.settings
        name = self.settings.generation_quality
        length = settings.prefix_tokens + settings.max_new_tokens
        limit = self.subject.anatomy.max_positions
        if limit is not None and length > limit:
            raise FulldepthError(
                f"{settings.prefix_tokens} tokens of a beginning and {settings.max_new_tokens} new ones are more than "
                f"the model's {limit} positions."
            )
        count = settings.prompts
        seed = settings.seed or 0
        sampled = sampled_texts(open_data(name, streaming=True), length, count, seed)
        documents = [(identity(text), text) for _, text in sampled]
        tokenizer = self.subject.tokenizer
        windows = draw_windows(
            documents,
            lambda text, starts, _: tokenizer(text, add_special_tokens=starts)["input_ids"],
            window=length,
            count=count,
            seed=seed,
            least=length,
        ).windows
        if not windows:
            raise FulldepthError(f"{name} has no text of {length} tokens; lower prefix_tokens or max_new_tokens.")
        clusters, unit, no_error = block_clusters(windows, [identity for identity, _ in documents])
        count = len({sampled[window.document][0] for window in windows})
        unit = PIECES if unit == "document" and count < len(set(clusters)) else unit
        present = np.unique(np.array([identity for identity, _ in documents], np.uint64))
        self.data = {
            "name": str(name),
            "hash": f"sha256:{sha256_of(present.astype('<u8').tobytes())}",
            "documents": count,
            "clusters": len(set(clusters)),
            "unit": unit,
            **settings.model_dump(include={"prompts", "prefix_tokens", "max_new_tokens", "top_p"}),
        }
        return torch.tensor([window.ids for window in windows]), [] if no_error else clusters

    def score(self, folder: Path | None, watcher: Watcher) -> list[Row]:
        """The rows of `generation_quality`.

        Args:
            folder: of finished parts of an interrupted run; None = nothing is kept.
            watcher: receives progress.
        """
        names = {"generation_quality", "exit_layers", "batch_size", "seed", *QUALITY}
        identity = {
            **self.identity,
            "content": self.content,
            **self.settings.model_dump(include=names),
        }
        with Answers(None if folder is None else folder / "generation-quality.jsonl", identity, 1) as answers:
            parts: dict[str, Callable[[], list[Row]]] = {DATA: self._data_rows}
            parts |= {str(layer): partial(self._text_rows, layer) for layer in self.layers}
            watcher.begin("Generation quality", len(parts))
            rows: list[Row] = []
            for name, compute in parts.items():
                if name not in answers:
                    answers.put({name: json.dumps(compute())})
                rows += [tuple(row) for row in json.loads(answers[name])]
                watcher.advance(1)
            return rows

    def _batches(self) -> Iterator[Tensor]:
        for batch in self.windows.split(self.settings.batch_size):
            yield batch.to(self.subject.device)

    @torch.no_grad()
    def _data_rows(self) -> list[Row]:
        """Accuracy and perplexity of the data's next tokens at every exit layer, one pass a batch."""
        readings = [self._read(self.data_layers, ids) for ids in self._batches()]
        values, hits = (torch.cat(column, 1).flatten(1) for column in zip(*readings, strict=True))  # [E, N]
        rows = []
        for layer, value, hit in zip(self.data_layers, values, hits, strict=True):
            rows.append(_row(DATA, layer, "accuracy", float(hit.double().mean()), len(hit)))
            rows.append(_row(DATA, layer, "perplexity", perplexity(value.double().tolist()), len(value)))
        return rows

    def _read(self, layers: Sequence[int], ids: Tensor, start: int = 1) -> tuple[Tensor, Tensor]:
        """`[E, B, T - start]` log-probabilities of the tokens `[B, T]` from a position on, and whether each is the most
        likely one, at E exit layers; on the CPU.
        """
        row, position = torch.ones(ids[:, start:].shape).nonzero().unbind(1)
        reader = LayerReader(self.subject.anatomy, self.subject.classifier, layers)
        values, hits = reader.read(
            lambda: self.subject.model(ids).logits,
            row,
            position + start - 1,
            ids[row, position + start],
            dtype=torch.float32,
        )
        return values.unflatten(1, (len(ids), -1)), hits.unflatten(1, (len(ids), -1))

    def _text_rows(self, layer: int) -> list[Row]:
        """Measures of the texts that the first layers generate."""
        texts, likelihoods = self._generated(layer)
        rows = [_row(FULL, layer, "perplexity", perplexity(likelihoods), len(likelihoods))] if likelihoods else []
        of_texts: dict[str, Iterable[float | None]] = {"diversity": map(diversity, texts)}
        if self.embedder is not None:
            prefixes = self.windows[:, : self.settings.prefix_tokens]
            prompts = (self.subject.tokenizer.decode(ids, skip_special_tokens=True) for ids in prefixes)
            of_texts["coherence"] = map(self.embedder.coherence, prompts, texts)
        for statistic, values in of_texts.items():
            if (mean := mean_of(values, self.clusters)) is not None:
                rows.append(_row(FULL, layer, statistic, mean.value, mean.samples))
                if mean.error is not None:
                    rows.append(_row(FULL, layer, f"{statistic}_stderr", mean.error, mean.samples))
        return rows

    @torch.no_grad()
    def _generated(self, layer: int) -> tuple[list[str], list[float]]:
        """Continuations of all prefixes, and the log-probabilities of their tokens under the whole model."""
        subject = self.subject
        start = self.settings.prefix_tokens
        model = subject.model if layer == subject.anatomy.num_layers else truncated(subject.anatomy, layer)
        texts: list[str] = []
        likelihoods: list[float] = []
        device = subject.device
        ends = end_tokens(model)
        padding = padding_id((subject.tokenizer.pad_token_id, *ends), subject.anatomy.vocab_size)
        seeded = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with seeded, plain_generation(model):
            torch.manual_seed(self.settings.seed or 0)
            for ids in self._batches():
                prefixes = ids[:, :start]
                sequences = model.generate(  # type: ignore[operator]
                    prefixes,
                    attention_mask=torch.ones_like(prefixes),
                    max_new_tokens=self.settings.max_new_tokens,
                    do_sample=True,
                    top_p=self.settings.top_p,
                    top_k=0,
                    temperature=1.0,
                    eos_token_id=ends or None,
                    pad_token_id=padding,
                )  # [B, prefix + new]
                likely, _ = self._read([subject.anatomy.num_layers], sequences, start)  # [1, B, new]
                for tokens, values in zip(sequences[:, start:], likely[0], strict=True):
                    ended = [at + 1 for at, token in enumerate(tokens.tolist()) if token in ends]
                    length = min(ended, default=len(tokens))
                    texts.append(subject.tokenizer.decode(tokens[:length], skip_special_tokens=True))
                    likelihoods += values[:length].double().tolist()
        return texts, likelihoods


def quality_findings(rows: list[Row], num_layers: int) -> dict[str, Finding]:
    """The whole model's numbers of the texts that it generates."""
    entries = {}
    for _, site, layer, _, statistic, value, count, _ in rows:
        if layer == num_layers and site != DATA and not statistic.endswith("_stderr"):
            unit = "tokens" if statistic == "perplexity" else "texts"
            sentence = f"Texts generated by all {num_layers} layers: {statistic} {value:.4g} ({count:,} {unit})."
            entries[f"generated_{statistic}"] = Finding(value, "1", sentence)
    return entries


def _row(site: str, layer: int, statistic: str, value: float, count: int) -> Row:
    return MEASURE, site, layer, None, statistic, value, count, "1"


def diversity(text: str) -> float | None:
    r"""Share of n-grams of words that are not repeated, from 0 to 1.

    .. math:: \prod_{n=2}^{4} \frac{|\text{unique n-grams}|}{|\text{total n-grams}|}

    Words are separated by white space. None for a text of fewer than four words, which has no 4-grams.

    Source: Aligned training, Eq. 22.
    """
    words = text.split()
    if len(words) < max(NGRAMS):
        return None
    ngrams = [[tuple(words[at : at + size]) for at in range(len(words) - size + 1)] for size in NGRAMS]
    return math.prod(len(set(of_size)) / len(of_size) for of_size in ngrams)


def perplexity(log_probabilities: Iterable[float]) -> float:
    """`exp` of the mean negative log-probability (nats) of tokens; infinite where float64 cannot hold it."""
    mean = -fmean(log_probabilities)
    return math.exp(mean) if mean < 700 else math.inf


def mean_of(values: Iterable[float | None], clusters: Sequence[int]) -> Mean | None:
    """Mean of the values that are not None, with its standard error over clusters; None if there are none.

    Args:
        values: of each text.
        clusters: unit of independence of each text, such as its document; empty = no error is known.
    """
    known = {at: value for at, value in enumerate(values) if value is not None}
    if not known:
        return None
    cluster = [clusters[at] if clusters else 0 for at in known]
    return Mean.of(torch.tensor([*known.values()], dtype=torch.float64), torch.tensor(cluster))
