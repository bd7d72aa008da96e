"""`fulldepth` in processes that share no disk: each is alone on its machine, with a folder of its own.

Usage: torchrun --nproc-per-node 2 node_local_train.py train RECIPE --output HOME/NODE; or `launch` from a test.
"""

from __future__ import annotations

import os
import subprocess
import sys

from fulldepth.cli import main


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `fulldepth ARGUMENTS`; NODE in an argument becomes `node0` or `node1`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*torchrun, __file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)


if __name__ == "__main__":
    sys.argv = [argument.replace("NODE", f"node{os.environ['RANK']}") for argument in sys.argv]
    os.environ["LOCAL_RANK"] = "0"
    main()
