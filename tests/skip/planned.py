"""Plans for tiny models, and the scaled model by its definition: hooks on the stock modules, nothing of ours."""

from __future__ import annotations

import copy
import random
import resource
import signal
from contextlib import contextmanager

import torch

import tiny_models
from fulldepth.core.distributed import Processes
from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.execution import find_anatomy
from fulldepth.hf.model_hash import model_hash
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.exports import fold
from fulldepth.skip.outcome import search_results
from fulldepth.skip.plan import Plan
from fulldepth.skip.problem import prepared
from refusals import refused
from skip.plain import blocks_of as layers
from skip.plain import branches_of

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_neox-serial"]
"""Tiny models of every family that has folding and the fast format."""
NAMES = ("b_att", "s_att", "b_mlp", "s_mlp")


def scalars(blocks, num_layers=3, granularity="attention", seed=0, low=0.7, high=1.4):
    """Scalars as a fit could leave them."""
    generator = random.Random(seed)
    pairs = [(b.split()[0], int(b.split()[1])) if isinstance(b, str) else (granularity, b) for b in blocks]
    gone = {"attention": NAMES[:2], "mlp": NAMES[2:], "layer": NAMES}
    found = {}
    for layer in range(1, num_layers + 1):
        names = [name for name in NAMES if not any(own == layer and name in gone[part] for part, own in pairs)]
        if names:
            # A fit leaves float32.
            found[str(layer)] = {name: torch.tensor(generator.uniform(low, high)).item() for name in names}
    return found


def analysed(model, plan, data, settings=None, **options):
    """The results of a plan without the search for it."""
    given = {"blocks": len(plan.blocks), "granularity": plan.granularity, **options}
    with prepared(model, data, settings or SearchSettings(**given), Processes()) as problem:
        return search_results(plan, problem)


def plan(model, blocks=(2,), granularity="attention", values="fitted", **entries):
    """A plan for a model; `values`: scalars, "fitted" for made-up ones, None for a plan that was not healed."""
    if values == "fitted":
        values = scalars(blocks, len(layers(model)), granularity)
    healed = None if values is None else 1.0
    document = {
        "schema_version": 1,
        "model": {"name": "tiny", "class": type(model).__name__, "hash": model_hash(model)},
        "granularity": granularity,
        "criterion": "loss",
        "search": "given",
        "blocks": list(blocks),
        "losses": [1.0] * (len(blocks) + 1),
        "healed_loss": healed,
        "control_loss": None if values is None else {"scalars_only": 1.0},
        "scalars": values or {},
        "data": {"hash": "sha256:" + "0" * 64},
        "seed": 0,
        "versions": {},
        "cost": {"forwards": 0, "flops": 0, "seconds": 0.0},
    }
    return Plan.of(document | entries)


def texts(vocabulary, **entries):
    """Forty rows of twelve drawn tokens below `vocabulary`, ten of them held out; `entries`: more of their facts."""
    drawn = tiny_models.token_ids(40, 12, seed=1, most=vocabulary).tolist()
    rows = [Example.of(ids, 1, len(ids), document=number) for number, ids in enumerate(drawn)]
    return Examples(rows[:30], rows[30:], {"hash": "sha256:" + "1" * 64, "name": "texts", "kind": "text", **entries})


def scaled(model, plan):
    """A copy of a model, in float64, that computes the definition of a plan."""
    model, factors = copy.deepcopy(model).double(), {}
    for layer in range(1, len(layers(model)) + 1):
        factors[layer] = dict.fromkeys(NAMES, 1.0) | plan.scalars.get(str(layer), {})
        for part, name in (("attention", "b_att"), ("mlp", "b_mlp")):
            factors[layer] |= {name: 0.0} if layer in plan.lacking(part) else {}
    scale(model, factors)
    return model


def scale(model, factors):
    """Let a model compute `x' = b_att A + s_att x`, `y = b_mlp M + s_mlp x'` with `factors[layer][name]`.

    A block that multiplies what it adds by g adds `g (A + (s - 1) x / g)`. A parallel one adds `b_mlp M` to
    `s_mlp (b_att A + s_att x)`.
    """
    gain, stream = getattr(model.config, "residual_multiplier", 1.0), []

    def begin(module, args, kwargs):
        stream[:] = [args[0] if args else kwargs["hidden_states"]]

    def mix(output, b, s):
        branch = output[0] if isinstance(output, tuple) else output
        added = b * branch + (s - 1) / gain * stream[0].view_as(branch)
        stream[:] = [stream[0] + gain * added.view_as(stream[0])]
        return (added, *output[1:]) if isinstance(output, tuple) else added

    for block, own in zip(layers(model), factors.values(), strict=True):
        block.register_forward_pre_hook(begin, with_kwargs=True)
        for name, part in zip(branches_of(model), ("att", "mlp"), strict=True):
            b, s = own[f"b_{part}"], own[f"s_{part}"]
            block.get_submodule(name).register_forward_hook(lambda m, args, output, b=b, s=s: mix(output, b, s))


@contextmanager
def full_disk():
    """The system refuses to write more than 20,000 bytes into any file, and the block ends with the refusal."""
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with refused("Cannot write"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


@contextmanager
def folded(model, plan, most=None):
    """A model with the folded weights of a plan inside `with`."""
    folding = fold.prepare_folding(find_anatomy(model), plan, most=most)
    with fold.in_use(folding.changes.values()):
        yield folding
