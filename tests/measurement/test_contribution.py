"""Contributions of layers, attention and MLP of BERT, whose norms stand in the stream; see `test_causes_oracle`."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import transformers as tf

from fulldepth.measurement import measure

T, N = 16, 6


def first(value):
    """The state in a module's output."""
    return value[0] if isinstance(value, tuple) else value


@torch.no_grad()
def updates_of(model, inputs):
    """(part, layer) -> update and stream that it is added to, `[B, T, D]` each; for `PART stream` the stream after the
    part and before it.
    """
    seen = {}
    handles = []

    def keep(module, key):
        handles.append(module.register_forward_hook(lambda _, args, output: seen.update({key: first(output).clone()})))

    def keep_input(_, args, kwargs, layer):
        seen["x", layer] = (args[0] if args else kwargs["hidden_states"]).clone()

    blocks = list(model.bert.encoder.layer)
    for layer, block in enumerate(blocks, start=1):
        handles.append(block.register_forward_pre_hook(partial(keep_input, layer=layer), with_kwargs=True))
        keep(block, ("y", layer))
        keep(block.attention.output.dense, ("attention", layer))
        keep(block.attention.output.LayerNorm, ("middle", layer))
        keep(block.output.dense, ("mlp", layer))
    model(**inputs)
    for handle in handles:
        handle.remove()
    found = {}
    for layer in range(1, len(blocks) + 1):
        x = seen["x", layer]
        middle = seen["middle", layer]
        found["layer", layer] = seen["y", layer] - x, x
        found["attention", layer] = seen["attention", layer], x
        found["mlp", layer] = seen["mlp", layer], middle
        found["layer stream", layer] = seen["y", layer], x
        found["attention stream", layer] = middle, x
    return found


def plain(update, stream):
    """Norm of an update over that of its stream, and their cosine, of one token."""
    norm = math.sqrt(math.fsum(value * value for value in update))
    size = math.sqrt(math.fsum(value * value for value in stream))
    return norm / size, math.fsum(a * b for a, b in zip(update, stream, strict=True)) / (norm * size)


def test_contributions_are_those_of_a_loop_over_hooked_states(checkpoint, text_file):
    folder = checkpoint("bert")
    results = measure(
        folder, text_file, measures=["contribution"], max_sequences=N, batch_size=4, sequence_length=T,
        dtype="float64", order="first",
    )  # fmt: skip
    model = tf.BertForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text_file.read_text(), add_special_tokens=False)["input_ids"]
    inside = T - 2
    rows = [[tokenizer.cls_token_id, *ids[n * inside : (n + 1) * inside], tokenizer.sep_token_id] for n in range(N)]
    expected = {}
    for (part, layer), (update, stream) in updates_of(model, {"input_ids": torch.tensor(rows)}).items():
        for suffix, start in (("", 0), (":no-first", 1)):
            pairs = zip(*(state[:, start:].flatten(0, 1).tolist() for state in (update, stream)), strict=True)
            numbers = [plain(*pair) for pair in pairs]
            norms, cosines = (math.fsum(values) / len(values) for values in zip(*numbers, strict=True))
            if part.endswith(" stream"):
                expected[part.removesuffix(" stream"), layer, f"stream_cosine{suffix}"] = cosines
            else:
                expected[part, layer, f"relative_norm{suffix}"] = norms
                expected[part, layer, f"cosine{suffix}"] = cosines
    table = results.table[~results.table.statistic.str.startswith("standard_error")]
    got = {(row.site, row.layer, row.statistic): row.value for row in table.itertuples()}
    assert got == pytest.approx(expected, rel=1e-8, abs=1e-8)


def test_without_proven_branches_the_layers_alone_are_measured(checkpoint, text_file):
    results = measure(
        checkpoint("llama"), text_file, measures=["contribution"], max_sequences=2, sequence_length=8,
        anatomy={"blocks": "layers"},
    )  # fmt: skip
    assert set(results.table.site) == {"layer"}
    (left_out,) = results.meta["left_out"]
    assert left_out["measure"] == "contribution (attention_output)"
