"""`fulldepth` in CPU processes that really shard: what `fsdp=true` does on accelerators, with accelerate's own code.

accelerate gives CPU processes DDP where FSDP2 was asked for. Here it takes them for accelerators at that one place.

Usage: torchrun --nproc-per-node 2 sharded_train.py train RECIPE fsdp=true ...; or `launch` from a test.
With a folder in place of the command, every recipe NAME.yaml in it is trained in these processes, into NAME-sharded/,
and dtypes-RANK.json says for each which types its losses and the gradients that were reduced had, and which classes
were drawn. With FULLDEPTH_TEST_COPIES
set the processes copy the weights (DDP) instead, recipes into NAME-copied/.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import distributed

from fulldepth.cli import main
from fulldepth.losses import ObjectiveMixin
from fulldepth.settings import layer, read
from fulldepth.training import TrainSettings, train
from fulldepth.training import model as building

COPIES = "FULLDEPTH_TEST_COPIES"


def launch(*arguments: object, processes: int = 2, shards: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `fulldepth ARGUMENTS`, or the recipes of a folder, in processes that shard (or else copy) the weights."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {
        COPIES: "" if shards else "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [*torchrun, __file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)


def alone(recipe: Path) -> TrainSettings:
    """Settings of a recipe for one process, which takes the whole batch at once."""
    return layer(TrainSettings, read(recipe, "train")).model_copy(update={"micro_batch_size": None})


def shard_cpu_processes() -> None:
    """From now on accelerate makes FSDP2 of `fsdp=True` on CPUs."""
    plain = PartialState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init  # type: ignore[method-assign]


def train_all(folder: Path, kind: str) -> None:
    """Train every recipe of a folder into NAME-KIND/; starting a pair of processes takes longer than a tiny run."""
    seen: dict[str, set[str]] = {}
    loss_of = ObjectiveMixin.compute_loss

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = loss_of(self, *args, **kwargs)
        seen["losses"].add(str(loss.dtype))
        return loss

    def noting(reduce: Any) -> Any:
        def reduce_scatter(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
            seen["reductions"].add(str(input.dtype))
            return reduce(output, input, *args, **kwargs)

        return reduce_scatter

    def loading(model: Any, settings: Any) -> None:
        seen["loaded"].add(type(model).__name__)
        load(model, settings)

    load, building.draw_weights = building.draw_weights, loading
    ObjectiveMixin.compute_loss = compute_loss  # type: ignore[method-assign]
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):  # the first since torch 2.13
        if hasattr(distributed, name):
            setattr(distributed, name, noting(getattr(distributed, name)))
    types = {}
    for path in sorted(folder.glob("*.yaml")):
        seen = {"losses": set(), "reductions": set(), "loaded": set()}
        settings = layer(TrainSettings, read(path, "train")).model_copy(update={"fsdp": kind == "sharded"})
        train(settings, folder / f"{path.stem}-{kind}")
        types[path.stem] = {name: sorted(kinds) for name, kinds in seen.items()}
    if kind == "sharded":
        name = f"dtypes-{distributed.get_rank()}.json"
        (folder / name).write_text(json.dumps(types), encoding="utf-8")


if __name__ == "__main__":
    kind = "copied" if os.environ.get(COPIES) else "sharded"
    if kind == "sharded":
        shard_cpu_processes()
    if Path(sys.argv[1]).is_dir():
        train_all(Path(sys.argv[1]), kind)
    else:
        main()
