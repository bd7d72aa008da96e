"""Effects, contributions and fitted lenses by plain loops over transformers' models: nothing here comes from fulldepth.

Every document runs alone, without padding, in float64; a skipped part is a forward hook.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
WIDTH, LAYERS = 32, 4
LENGTHS = [9, 17, 30, 5, 12, 22, 8, 33, 11]
"""Words of documents, unequal, of at most four multiples of 8 each."""
MARKS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
PLAIN = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "intermediate_size": 48,
    **MARKS,
}
GROUPED = {**PLAIN, "num_key_value_heads": 2, "head_dim": 8}
WINDOWED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "final_logit_softcapping": 5.0,
}


@dataclass
class Family:
    """Where a family's blocks are, and the modules of a block whose output is added to the residual stream."""

    model: Any
    config: dict[str, Any]
    blocks: str = "model.layers"
    attention: str = "self_attn"
    mlp: str = "mlp"
    parallel: bool = False
    double: bool = True  # whether everything is computed in float64 (BLOOM's softmax is not)
    serial: bool = True  # whether a block reads the stream that the block before returns, and nothing else
    gain: float = 1.0  # what the block multiplies the outputs of these modules by before it adds them

    def build(self, seed=0):
        """A random model in float64 whose every part matters: large matrices, gains and biases away from 1 and 0."""
        torch.manual_seed(seed)
        model = self.model(self.model.config_class(**self.config)).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1:
                    weight.add_(0.2 * torch.randn_like(weight))
                elif "embed" in name or "wte" in name:
                    weight.mul_(15)
                else:
                    weight.mul_(5)
        return model.double()


POST_NORM = {"attention": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}
FAMILIES = {
    "llama": Family(tf.LlamaForCausalLM, GROUPED),
    "mistral": Family(tf.MistralForCausalLM, {**GROUPED, "sliding_window": None}),
    "qwen3": Family(tf.Qwen3ForCausalLM, GROUPED),
    "gemma2": Family(tf.Gemma2ForCausalLM, {**GROUPED, **WINDOWED}, **POST_NORM),
    "gemma3": Family(tf.Gemma3ForCausalLM, {**GROUPED, **WINDOWED}, **POST_NORM),
    "olmo2": Family(tf.Olmo2ForCausalLM, {**PLAIN, "num_key_value_heads": 2}, **POST_NORM),
    "glm4": Family(tf.Glm4ForCausalLM, GROUPED, attention="post_self_attn_layernorm", mlp="post_mlp_layernorm"),
    "granite": Family(
        tf.GraniteForCausalLM,
        {**PLAIN, "num_key_value_heads": 2, "residual_multiplier": 0.3, "logits_scaling": 4.0},
        gain=0.3,
    ),
    "cohere": Family(tf.CohereForCausalLM, {**PLAIN, "num_key_value_heads": 2, "logit_scale": 0.25}, parallel=True),
    "phi": Family(tf.PhiForCausalLM, PLAIN, parallel=True),
    "gpt_neox": Family(tf.GPTNeoXForCausalLM, PLAIN, "gpt_neox.layers", "attention", parallel=True),
    "gpt2": Family(
        tf.GPT2LMHeadModel,
        {"vocab_size": 64, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, **MARKS},
        "transformer.h",
        "attn",
    ),
    "opt": Family(
        tf.OPTForCausalLM,
        {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": WIDTH},
        "model.decoder.layers",
        mlp="fc2",
    ),
    "falcon": Family(
        tf.FalconForCausalLM,
        {"vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, **MARKS},
        "transformer.h",
        "self_attention",
        parallel=True,
    ),
    "bloom": Family(
        tf.BloomForCausalLM,
        {"vocab_size": 64, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": 4, **MARKS},
        "transformer.h",
        "self_attention.dense",
        "mlp.dense_4h_to_h",
        double=False,
    ),
}
"""Pre-norm, parallel, post-norm branches; rotary, learned and ALiBi positions."""
DESIGNS = {"llama", "gemma2", "gpt_neox", "gpt2"}
"""Pre-norm, post-norm branches, parallel, biases and learned positions; the other families are slow tests."""


def marked(names):
    """Parameters of a test, those outside `DESIGNS` marked slow."""
    return [pytest.param(name, marks=() if name in DESIGNS else pytest.mark.slow) for name in names]


def tokenizer():
    """A word is a token; nothing is added around a text."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=words, **marks)


def texts(lengths, seed=0):
    """Random documents of these numbers of words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=length)) for length in lengths]


def ids_of(documents):
    """Ids of every document."""
    return tokenizer()(documents)["input_ids"]


def reading(**options):
    """Arguments of `fulldepth.measure` that make a sequence of each document, several of them padded in a batch."""
    usual = {"tokenizer": tokenizer(), "one_per_row": True, "sequence_length": 64, "batch_size": 4}
    return {**usual, **options}


def rows(results, measure):
    """(statistic, site, layer, other) -> value of one measure; `other` is None where there is none."""
    table = results.table[results.table.measure == measure]
    return {
        (row.statistic, row.site, row.layer, None if pd.isna(row.other) else row.other): row.value
        for row in table.itertuples()
    }


def zeroed(model, layers, paths=("self_attn.o_proj", "mlp.down_proj")):
    """The Llama with these matrices of these layers (1-based) set to zero."""
    with torch.no_grad():
        for layer in layers:
            for path in paths:
                model.model.layers[layer - 1].get_submodule(path).weight.zero_()
    return model


def first(output):
    """The tensor that a module returns, alone or first in a tuple."""
    return output[0] if isinstance(output, tuple) else output


def with_first(output, tensor):
    """The output with another first tensor."""
    return (tensor, *output[1:]) if isinstance(output, tuple) else tensor


@contextmanager
def hooked(*handles):
    """Hooks that exist inside the block only."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def skip_hooks(model, family, part, layer, start, stop):
    """Hooks under which `part` of `layer` (1-based) adds nothing at the positions start..stop - 1 (0-based).

    A layer that reads more than the stream before it is skipped by skipping its attention and its MLP.
    """
    block = model.get_submodule(family.blocks)[layer - 1]

    def zeros(module, args, output):
        rows = first(output).clone().flatten(0, -2)  # [T, D], a batch of one
        rows[start:stop] = 0
        return with_first(output, rows.reshape(first(output).shape))

    def unchanged(module, args, kwargs, output):
        states = first(output).clone()  # [1, T, D]
        before = args[0] if args else kwargs["hidden_states"]
        states[:, start:stop] = before[:, start:stop]
        return with_first(output, states)

    if part == "layer" and family.serial:
        return [block.register_forward_hook(unchanged, with_kwargs=True)]
    paths = [family.attention, family.mlp] if part == "layer" else [getattr(family, part)]
    return [block.get_submodule(path).register_forward_hook(zeros) for path in paths]


@torch.no_grad()
def run(model, family, ids, *skip):
    """One document with, or without, `skip` = (part, layer, start, stop): states [L+1, T, D] and logits [T, V]."""
    blocks = model.get_submodule(family.blocks)
    states: dict[int, torch.Tensor] = {}
    handles = skip_hooks(model, family, *skip) if skip else []

    def stream(tensor):  # [T, D]; Hyper-Connections have [T, N, D] parallel streams, whose sum is read
        return tensor[0].clone() if tensor.ndim == 3 else tensor[0].sum(-2)

    def reads(module, args, kwargs):
        states[0] = stream(args[0] if args else kwargs["hidden_states"])

    def gives(index):
        def hook(module, args, output):
            states[index] = stream(first(output))

        return hook

    handles.append(blocks[0].register_forward_pre_hook(reads, with_kwargs=True))
    handles += [block.register_forward_hook(gives(n)) for n, block in enumerate(blocks, start=1)]
    with hooked(*handles):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return torch.stack([states[n] for n in range(len(blocks) + 1)]).numpy(), logits.double().numpy()


def log_softmax(logits):
    """Natural logarithms of the probabilities along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def norm(vectors):
    """Euclidean norm along the last axis."""
    return np.sqrt((vectors * vectors).sum(-1))


def changes(original, skipped, ids):
    """Per position: change of every update [L, T], divergence [T], change of probabilities [T], added loss [T - 1]."""
    (states, logits), (states_skipped, logits_skipped) = original, skipped
    updates, updates_skipped = np.diff(states, axis=0), np.diff(states_skipped, axis=0)  # [L, T, D]
    relative = norm(updates - updates_skipped) / norm(updates)
    logs, logs_skipped = log_softmax(logits), log_softmax(logits_skipped)  # [T, V]
    divergence = (np.exp(logs) * (logs - logs_skipped)).sum(-1)
    output = norm(np.exp(logs) - np.exp(logs_skipped))
    targets = np.arange(len(ids) - 1), np.array(ids[1:])
    return relative, divergence, output, (logs[:-1] - logs_skipped[:-1])[targets]


def effects(model, family, documents, part, cuts, begin=1, layers=None):
    """Values of `layer_effect` for one part: (statistic, layer, other) -> value, and the same -> standard error.

    In the scope `all` the positions from `begin` on are skipped and read, but added losses are means over all positions
    with a target. A third mapping has the sums behind means: [2, C], over a document's positions, and their number.

    Args:
        model: a causal language model in float64.
        family: its `Family`.
        documents: ids of each document.
        part: layer, attention or mlp.
        cuts: function of a document's length: for each t, how many first positions the scope `future` skips.
        begin: first position (0-based) that is skipped.
        layers: those that are skipped (1-based); None = all.
    """
    depth = len(model.get_submodule(family.blocks))
    plain = [run(model, family, ids) for ids in documents]
    values, errors, sums = {}, {}, {}
    for layer in layers or range(1, depth + 1):
        kept = {}  # (statistic without its scope, scope, other) -> an array for each document
        for ids, original in zip(documents, plain, strict=True):
            of_document = {("loss_added", "all", None): []}
            for scope, cut in [("all", len(ids)), *(("future", cut) for cut in cuts(len(ids)))]:
                skipped = run(model, family, ids, part, layer, begin, cut)
                relative, divergence, output, loss = changes(original, skipped, ids)
                read = begin if scope == "all" else cut
                for other in range(layer + 1, depth + 1):
                    of_document.setdefault(("effect", scope, other), []).append(relative[other - 1, read:])
                of_document.setdefault(("divergence", scope, None), []).append(divergence[read:])
                of_document.setdefault(("output_change", scope, None), []).append(output[read:])
                if scope == "all":
                    of_document["loss_added", "all", None].append(loss)
            for key, arrays in of_document.items():
                kept.setdefault(key, []).append(np.concatenate(arrays))
        later: dict[str, list[Any]] = {"all": [], "future": []}
        for (statistic, scope, other), arrays in kept.items():
            pooled = np.concatenate(arrays)
            name = {"effect": f"mean_{scope}", "loss_added": "loss_added"}.get(statistic, f"{statistic}_{scope}")
            if statistic == "output_change":
                values[name, layer, other] = pooled.max()
                continue
            if statistic == "effect":
                place = f"q90_{scope}", layer, other
                values[place] = np.quantile(pooled, 0.9)
                errors[place] = quantile_error(arrays, 0.9)
                values[f"max_{scope}", layer, other] = pooled.max()
                later[scope].append(totals(arrays))
            values[name, layer, other] = pooled.mean()
            sums[name, layer, other] = totals(arrays)
        for scope, of_layers in later.items():
            if of_layers:
                of_all, counts = np.mean(of_layers, axis=0)
                values[f"later_{scope}", layer, None] = of_all.sum() / counts.sum()
                sums[f"later_{scope}", layer, None] = np.array([of_all, counts])
    errors |= {key: ratio_error(*of_documents) for key, of_documents in sums.items()}
    return values, errors, sums


def totals(arrays, others=None):
    """Sums and counts by document [2, C] of arrays [T], or of what they exceed `others` by."""
    differences = arrays if others is None else [a - b for a, b in zip(arrays, others, strict=True)]
    return np.array([(array.sum(), len(array)) for array in differences]).T


def ratio_error(sums, counts):
    """Standard error of sum(sums) / sum(counts) over independent documents, linearised; nan of a single one."""
    if len(sums) < 2:
        return np.nan
    share = sums.sum() / counts.sum()
    deviations = sums - share * counts
    return np.sqrt(len(sums) / (len(sums) - 1) * (deviations**2).sum()) / counts.sum()


def jackknife_error(sums, counts):
    """The same by leaving out one document after the other."""
    without = []
    for number in range(len(sums)):
        kept = np.arange(len(sums)) != number
        without.append(sums[kept].sum() / counts[kept].sum())
    without = np.array(without)
    return np.sqrt((len(sums) - 1) / len(sums) * ((without - without.mean()) ** 2).sum())


def quantile_error(arrays, share):
    """Woodruff's standard error of the pooled quantile of arrays by document.

    The share of values up to the quantile has the error e of a mean; the quantiles at share + e and share - e are two
    errors apart. It is nan of a single document.
    """
    if len(arrays) < 2:
        return np.nan
    pooled = np.concatenate(arrays)
    error = ratio_error(*totals([array <= np.quantile(pooled, share) for array in arrays]))
    low, high = np.quantile(pooled, np.clip([share - error, share + error], 0, 1))
    return (high - low) / 2


@torch.no_grad()
def branches(model, family, ids):
    """What attention and MLP of every layer add to the stream of one document: [L, T, D] each."""
    added = {"attention": [], "mlp": []}
    handles = []
    for block in model.get_submodule(family.blocks):
        for part, outputs in added.items():
            branch = block.get_submodule(getattr(family, part))
            keep = outputs.append
            handles.append(
                branch.register_forward_hook(lambda m, a, o, keep=keep: keep(first(o).flatten(0, -2).clone()))
            )
    with hooked(*handles):
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return (family.gain * torch.stack(added[part]).numpy() for part in ("attention", "mlp"))


def contributions(model, family, documents, begin=0):
    """(site, statistic, layer) -> sums over a document's positions [C] and counts [C].

    The statistics are |update| / |stream|, the cosine of the two, and that of the stream before and after (of layer and
    attention); positions before `begin` (0-based) do not count.
    """
    found = {}
    for ids in documents:
        states, _ = run(model, family, ids)
        attention, mlp = branches(model, family, ids)
        for layer in range(1, len(states)):
            before, a, m = states[layer - 1], attention[layer - 1], mlp[layer - 1]
            np.testing.assert_allclose(before + a + m, states[layer], rtol=1e-6, atol=1e-6)
            middle = before if family.parallel else before + a
            for site, update, stream in (("attention", a, before), ("mlp", m, middle), ("layer", a + m, before)):
                ratio = norm(update) / norm(stream)
                cosine = (update * stream).sum(-1) / (norm(update) * norm(stream))
                after = stream + update
                numbers_of = {"relative_norm": ratio, "cosine": cosine}
                if site != "mlp":
                    numbers_of["stream_cosine"] = (stream * after).sum(-1) / (norm(stream) * norm(after))
                for statistic, numbers in numbers_of.items():
                    sums = found.setdefault((site, statistic, layer), [])
                    sums.append((numbers[begin:].sum(), len(ids) - begin))
    return {key: np.array(sums).T for key, sums in found.items()}


@torch.no_grad()
def continued(model, family, ids, last):
    """Logits [T, V] of one document if the last block returned `last` [T, D]."""
    block = model.get_submodule(family.blocks)[-1]
    states = torch.from_numpy(np.asarray(last))[None]
    with hooked(block.register_forward_hook(lambda module, args, output: with_first(output, states))):
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().numpy()


def predicted(model, family, documents, states):
    """Whether the top token is right, and the loss in nats, by document and position with a target.

    Args:
        model: a causal language model in float64.
        family: its `Family`.
        documents: ids of each document.
        states: for each document, [T, D]: what the last block is made to return.
    """
    right, losses = [], []
    for ids, last in zip(documents, states, strict=True):
        logs, targets = log_softmax(continued(model, family, ids, last))[:-1], np.array(ids[1:])
        right.append((logs.argmax(-1) == targets).astype(float))
        losses.append(-logs[np.arange(len(targets)), targets])
    return right, losses
