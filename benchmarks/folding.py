"""How exact folding is on trained models: the largest change of a logit, relative to the largest logit.

    python benchmarks/folding.py MODEL... [--spread 0.1] [--seeds 5]

A model is a checkpoint, for example of a run of `experiments/run.py small`. Attention of layers 4 and 7 is skipped;
scalars are drawn evenly from 1 - spread to 1 + spread, so that every factor moves the stream.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Sequence

from transformers import PreTrainedModel

from fulldepth.hf import load_checkpoint
from fulldepth.skip import Plan, fold, model_hash

BLOCKS = (4, 7)


def plan_of(
    model: PreTrainedModel,
    num_layers: int,
    spread: float,
    seed: int,
    blocks: Sequence[int] = BLOCKS,
    granularity: str = "attention",
) -> Plan:
    """A plan whose scalars nobody fitted; with a spread of 0 it has none."""
    draw = random.Random(seed)
    names = {True: ("b_mlp", "s_mlp"), False: ("b_att", "s_att", "b_mlp", "s_mlp")}
    scalars = {
        str(layer): {name: draw.uniform(1 - spread, 1 + spread) for name in names[layer in blocks]}
        for layer in range(1, num_layers + 1)
    }
    document = {
        "schema_version": 1,
        "model": {"name": "drawn", "class": type(model).__name__, "hash": model_hash(model)},
        "granularity": granularity,
        "criterion": "loss",
        "search": "given",
        "blocks": list(blocks),
        "losses": [0.0] * (len(blocks) + 1),
        "healed_loss": 0.0 if spread else None,
        "control_loss": {"scalars_only": 0.0} if spread else None,
        "scalars": scalars if spread else {},
        "data": {"hash": "sha256:" + "0" * 64},
        "seed": seed,
        "versions": {},
        "cost": {"forwards": 0, "flops": 0, "seconds": 0.0},
    }
    return Plan.of(document)


def main() -> None:
    """Fold every model with every seed's scalars."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--spread", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    for name in args.models:
        model = load_checkpoint(name).model
        layers = model.config.num_hidden_layers
        errors = [
            fold(copy.deepcopy(model), plan_of(model, layers, args.spread, seed)).logit_error
            for seed in range(args.seeds)
        ]
        print(f"{name}: {min(errors):.1e} to {max(errors):.1e}", flush=True)


if __name__ == "__main__":
    main()
