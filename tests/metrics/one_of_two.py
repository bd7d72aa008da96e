"""One of two processes that measure together; started by test_accumulators.py as `python one_of_two.py FOLDER RANK`."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fulldepth.metrics import METRICS, Observation, Readout, Setup


def measure(setup, names, batches, weights):
    """The rows and influences of every measure in `names`, over what both processes saw."""
    shared = Setup(**setup)
    metrics = {name: METRICS[name](shared) for name in names}
    for batch in batches:
        lens = Readout(**batch.pop("readout"))
        observation = Observation(**batch, readout=lambda lens=lens: lens)
        for name in set(names) - {"spectral_norm"}:
            metrics[name].update(observation)
    for site, layer, weight in weights:
        metrics["spectral_norm"].update(site, layer, weight)
    rows = [row for name in names for row in metrics[name].rows()]
    return rows, [influence for name in names for influence in metrics[name].influences()]


def main(folder, rank):
    torch.set_num_threads(1)
    scenarios = torch.load(folder / "scenarios.pt")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    rows = [measure(s["setup"], s["names"], s["batches"][rank], s["weights"][rank]) for s in scenarios]
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"rows-{rank}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
