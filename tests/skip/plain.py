"""The plain way, to compare with: stock forward passes, one sequence at a time, branches zeroed by hooks, float64."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import cache

import torch
import transformers as tf

from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from tiny_models import seeded

BRANCHES = {
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma3_text": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gpt2": ("attn", "mlp"),
    "gpt_neox": ("attention", "mlp"),
    "falcon": ("self_attention", "mlp"),
    **dict.fromkeys(("opt", "mbart", "pegasus"), ("self_attn", "fc2")),
    "llama4_text": ("self_attn", "feed_forward"),
}
"""Model type -> the modules whose output a block adds to its stream, read in the source of transformers; of all others
`self_attn` and `mlp`."""
VOCAB = 19
BLANK = Example(torch.arange(3, 9), torch.full((6,), -100), 0)
"""None of its tokens counts."""


def blocks_of(model):
    body = getattr(model.base_model, "decoder", model.base_model)
    body = getattr(body, "model", body)  # Llama 4's prefix names no module
    return body.h if hasattr(body, "h") else body.layers


def branches_of(model):
    """Names of the modules of a block whose outputs, of attention and of MLP, are added to the stream."""
    return BRANCHES.get(model.config.model_type, ("self_attn", "mlp"))


def zero(model, removed, granularity=""):
    """Let branches of 1-based layers, or of pairs of a layer and a part, add nothing; the hooks that do it."""
    attention, mlp = branches_of(model)
    names = {"attention": (attention,), "mlp": (mlp,), "layer": (attention, mlp)}
    pairs = [one if isinstance(one, tuple) else (one, granularity) for one in removed]
    modules = (blocks_of(model)[layer - 1].get_submodule(name) for layer, part in pairs for name in names[part])
    return [module.register_forward_hook(_zeros) for module in modules]


@contextmanager
def zeroed(model, removed, granularity):
    """Branches that add nothing inside `with`."""
    hooks = zero(model, removed, granularity)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zeros(module, args, output):
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


@torch.no_grad()
def log_probabilities(model, example):
    """[R, V] float64 at the positions whose next token counts."""
    logits = model(input_ids=example.input_ids[None]).logits[0].double()
    return logits[:-1][example.labels[1:] != -100].log_softmax(-1)


def loss(model, examples, layers, granularity):
    """Mean nats over labelled tokens."""
    total, tokens = 0.0, 0
    with zeroed(model, layers, granularity):
        for example in examples:
            targets = example.labels[1:][example.labels[1:] != -100]
            total -= float(log_probabilities(model, example).gather(1, targets[:, None]).sum())
            tokens += len(targets)
    return total / tokens


def divergence(model, examples, layers, granularity):
    """Mean KL(base || variant) in nats over labelled positions."""
    total, tokens = 0.0, 0
    layers = list(layers)
    for example in examples:
        base = log_probabilities(model, example)
        with zeroed(model, layers, granularity):
            own = log_probabilities(model, example)
        total += float((base.exp() * (base - own)).sum())
        tokens += len(base)
    return total / tokens


def plain_loop(model, examples, blocks, granularity, measure=loss):
    """Picks, and the measure before and after each removal."""
    picks = []
    losses = [measure(model, examples, (), granularity)]
    for _ in range(blocks):
        scores = {
            layer: measure(model, examples, [*picks, layer], granularity)
            for layer in range(1, len(blocks_of(model)) + 1)
            if layer not in picks
        }
        picks.append(min(scores, key=scores.__getitem__))
        losses.append(scores[picks[-1]])
    return picks, losses


def sentences(count, seed, shortest=12, longest=28):
    """Sequences of a small language; half are pairs.

    A token depends on the two before it, so attention is needed, and earlier stretches come again.
    """
    generator = seeded(seed)
    chain = torch.randint(3, VOCAB, (VOCAB, VOCAB, 2), generator=seeded(7))
    made = []
    for number in range(count):
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        ids = torch.randint(3, VOCAB, (2,), generator=generator).tolist()
        while len(ids) < length:
            if len(ids) > 8 and len(ids) % 8 == 0:
                start = int(torch.randint(0, len(ids) - 5, (1,), generator=generator))
                ids += ids[start : start + 5]
            ids.append(int(chain[ids[-1], ids[-2], int(torch.rand(1, generator=generator) < 0.2)]))
        input_ids = torch.tensor(ids[:length])
        labels = input_ids.clone()
        labels[: length // 2 if number % 2 else 1] = -100
        made.append(Example(input_ids, labels, number))
    return made


def held_out(rows, digit="1", **entries):
    """Held-out rows, read with other training rows for every digit, so that the hash of all data is another one."""
    return Examples([], rows, {"hash": "sha256:" + digit * 64, **entries})


def examples(train=24, heldout=24, seed=0):
    return Examples(
        sentences(train, 2 * seed + 1),
        sentences(heldout, 2 * seed + 2),
        {"hash": "sha256:" + f"{seed:064x}", "name": "sentences", "kind": "pairs"},
    )


@cache
def trained_weights(layers, width, steps):
    model = fresh(layers, width)
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
    data = sentences(512, seed=99, shortest=28)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        ids = torch.stack([example.input_ids for example in data[step * 16 % 512 :][:16]])
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def fresh(layers, width):
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return tf.LlamaForCausalLM(config)


def trained(layers=5, width=32, steps=60):
    """A Llama that knows the small language somewhat."""
    model = fresh(layers, width)
    model.load_state_dict(trained_weights(layers, width, steps))
    return model.eval()
