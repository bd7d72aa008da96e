"""Quality of generated text at exit layers (Aligned training, App. C.2).

Rows of `generation_quality`, `layer` = exit layer. Site `data`: `accuracy` and `perplexity` of next tokens of the text
data, at all exit layers. Site `full model`, of texts that the first layers generate by nucleus sampling: `perplexity`
under the whole model, `diversity`, and with an embedder `coherence`. Site of the judge's name: `perplexity` under it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.data import open_documents
from fulldepth.data.drawing import Text, block_clusters, draw_windows, thinned
from fulldepth.errors import FulldepthError
from fulldepth.evaluation.judges import Embedder, Judge, continuation_log_probabilities
from fulldepth.evaluation.subject import Subject, hash_tokenizer
from fulldepth.evaluation.text_quality import Mean, coherence, diversity, mean_of, perplexity
from fulldepth.execution.harness import Answers, LayerReader
from fulldepth.hf.model_hash import model_hash
from fulldepth.hf.truncation import truncated
from fulldepth.progress import Watcher
from fulldepth.results import Finding
from fulldepth.settings.evaluate import QUALITY, EvaluateSettings, parse_layers

MEASURE, DATA, FULL = "generation_quality", "data", "full model"
Row = tuple[Any, ...]


class Quality:
    """Measures the quality of generated text of one model.

    Args:
        subject: the model.
        settings: with `generation_quality`, the text data.

    Raises:
        FulldepthError: if data, judge or embedder cannot be read, the data are too short, or the model has too few
            positions or blocks skipped in place.
    """

    def __init__(self, subject: Subject, settings: EvaluateSettings) -> None:
        self.subject, self.settings = subject, settings
        depth = subject.num_layers
        quarters = [max(1, round(depth * part / 4)) for part in (1, 2, 3)]
        self.layers = parse_layers(settings.exit_layers, depth, [] if subject.plan else quarters)
        if len(self.layers) > 1 and subject.plan is not None:
            raise FulldepthError(
                "A model with blocks skipped in place cannot be cut to its first layers to generate. Export the plan "
                "(fulldepth skip apply), or use --exit-layers full."
            )
        self.windows, self.clusters = self._windows()
        self.judge = None if settings.judge is None else Judge(settings.judge, settings)
        self.embedder = None if settings.embedder is None else Embedder(settings.embedder, settings)

    def _windows(self) -> tuple[Tensor, list[int]]:
        """A uniform sample of windows of `prefix_tokens + new_tokens` tokens, `[N, T]`, and the cluster of each.

        There are no clusters if no error is known.
        """
        settings, name = self.settings, self.settings.generation_quality
        length = settings.prefix_tokens + settings.new_tokens
        limit = self.subject.anatomy.max_positions
        if limit is not None and length > limit:
            raise FulldepthError(
                f"{settings.prefix_tokens} tokens of a beginning and {settings.new_tokens} new ones are more than the "
                f"model's {limit} positions."
            )
        count, seed = settings.prompts, settings.seed or 0
        documents = thinned(open_documents(name), count=count, window=length, seed=seed)
        tokenizer = self.subject.tokenizer

        def tokenise(text: Text) -> list[int]:
            return list(tokenizer(text.text, add_special_tokens=text.starts)["input_ids"])

        windows = draw_windows(documents, tokenise, window=length, count=count, seed=seed, least=length).windows
        if not windows:
            raise FulldepthError(f"{name} has no text of {length} tokens; set fewer --prefix-tokens or --new-tokens.")
        clusters, _, no_error = block_clusters(windows, [identity for identity, _ in documents])
        return torch.tensor([window.ids for window in windows]), [] if no_error else clusters

    @cached_property
    def content(self) -> list[Any]:
        """What the numbers depend on beside settings and model: the text, and the models that judge it."""
        judges = [judge for judge in (self.judge, self.embedder) if judge is not None]
        hashes = [[model_hash(judge.checkpoint.model), hash_tokenizer(judge.tokenizer)] for judge in judges]
        return [self.windows.tolist(), hashes]

    def score(self, folder: Path | None, watcher: Watcher) -> list[Row]:
        """The rows of `generation_quality`.

        Args:
            folder: of finished parts of an interrupted run; None = nothing is kept.
            watcher: receives progress.
        """
        names = {"generation_quality", "exit_layers", "batch_size", "seed", *QUALITY}
        identity = {**self.subject.identity, "content": self.content, **self.settings.model_dump(include=names)}
        with Answers(None if folder is None else folder / "generation-quality.jsonl", identity, 1) as answers:
            return self._rows(answers, watcher)

    def _rows(self, answers: Answers, watcher: Watcher) -> list[Row]:
        """All rows; parts that `answers` holds are not computed again."""
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
            yield batch.to(self.subject.model.device)

    def _logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.subject.model(ids).logits
        return logits

    @torch.no_grad()
    def _data_rows(self) -> list[Row]:
        """Accuracy and perplexity of the data's next tokens at every exit layer, one pass a batch."""
        depth = self.subject.num_layers
        layers = parse_layers(self.settings.exit_layers, depth, list(range(1, depth + 1)))
        reader = LayerReader(self.subject.anatomy, self.subject.classifier, layers)
        values, hits = [], []
        for ids in self._batches():
            row, position = torch.ones(ids[:, 1:].shape).nonzero().unbind(1)
            run = partial(self._logits, ids)
            value, hit = reader.read(run, row, position, ids[row, position + 1], dtype=torch.float32)
            values.append(value)
            hits.append(hit)
        rows = []
        for layer, value, hit in zip(layers, torch.cat(values, 1), torch.cat(hits, 1), strict=True):  # [N] each
            rows.append(_row(DATA, layer, "accuracy", float(hit.double().mean()), len(hit)))
            rows.append(_row(DATA, layer, "perplexity", perplexity(value.double().tolist()), len(value)))
        return rows

    def _text_rows(self, layer: int) -> list[Row]:
        """Measures of the texts that the first layers generate."""
        texts, likelihoods = self._generated(layer)
        prefixes = self._prefixes
        rows = [_row(FULL, layer, "perplexity", perplexity(likelihoods), len(likelihoods))] if likelihoods else []
        if self.judge is not None and (judged := self.judge.log_probabilities(prefixes, texts)):
            rows.append(_row(self.judge.name, layer, "perplexity", perplexity(judged), len(judged)))
        rows += _mean_rows(layer, "diversity", mean_of(map(diversity, texts), self.clusters))
        if self.embedder is not None:
            written = [at for at, text in enumerate(texts) if text.strip()]
            if written:
                before, after = (self.embedder.embed([column[at] for at in written]) for column in (prefixes, texts))
                clusters = [self.clusters[at] for at in written] if self.clusters else []
                rows += _mean_rows(layer, "coherence", mean_of(coherence(before, after).tolist(), clusters))
        return rows

    @cached_property
    def _prefixes(self) -> list[str]:
        return [self.subject.tokenizer.decode(ids) for ids in self.windows[:, : self.settings.prefix_tokens]]

    @torch.no_grad()
    def _generated(self, layer: int) -> tuple[list[str], list[float]]:
        """Continuations of all prefixes, and the log-probabilities of their tokens under the whole model."""
        subject, start = self.subject, self.settings.prefix_tokens
        model = subject.model if layer == subject.num_layers else truncated(subject.anatomy, layer)
        texts: list[str] = []
        likelihoods: list[float] = []
        device = subject.model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.settings.seed or 0)
            for ids in self._batches():
                sequences = self._continued(model, ids[:, :start])  # [B, prefix + new]
                stated = continuation_log_probabilities(subject.model(sequences).logits, sequences, start)
                for tokens, values in zip(sequences[:, start:], stated, strict=True):
                    length = _length(tokens.tolist(), _ends(model))
                    texts.append(subject.tokenizer.decode(tokens[:length], skip_special_tokens=True))
                    likelihoods += values[:length].double().tolist()
        return texts, likelihoods

    def _continued(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        ends = _ends(model)
        padding = next((p for p in (self.subject.tokenizer.pad_token_id, *ends) if p is not None), 0)
        return model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.settings.new_tokens,
            do_sample=True,
            top_p=self.settings.top_p,
            top_k=0,
            temperature=1.0,
            pad_token_id=padding,
        )


def quality_findings(rows: list[Row], num_layers: int) -> dict[str, Finding]:
    """The whole model's numbers of the texts that it generates."""
    found = {}
    for _, site, layer, _, statistic, value, count, _ in rows:
        if layer == num_layers and site != DATA and not statistic.endswith("_stderr"):
            under = f" under {site}" if statistic == "perplexity" else ""
            name = f"generated_{statistic}" + ("" if site == FULL else f" {site}")
            unit = "tokens" if statistic == "perplexity" else "texts"
            sentence = f"Texts generated by all {num_layers} layers: {statistic}{under} {value:.4g} ({count:,} {unit})."
            found[name] = Finding(value, "1", sentence)
    return found


def _row(site: str, layer: int, statistic: str, value: float, count: int) -> Row:
    return MEASURE, site, layer, None, statistic, value, count, "1"


def _mean_rows(layer: int, statistic: str, mean: Mean | None) -> list[Row]:
    if mean is None:
        return []
    rows = [_row(FULL, layer, statistic, mean.value, mean.texts)]
    return rows if mean.error is None else [*rows, _row(FULL, layer, f"{statistic}_stderr", mean.error, mean.texts)]


def _ends(model: PreTrainedModel) -> list[int]:
    """Tokens that end a text."""
    ends: Any = getattr(model.generation_config, "eos_token_id", None)
    return [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [int(ends)]


def _length(tokens: list[int], ends: list[int]) -> int:
    """Number of tokens up to and with the first that ends the text."""
    return next((at + 1 for at, token in enumerate(tokens) if token in ends), len(tokens))
