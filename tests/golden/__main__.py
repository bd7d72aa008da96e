"""Write the golden tables anew; see `tables`."""

from __future__ import annotations

import sys

import torch

from golden import tables

torch.set_num_threads(1)
for name in sys.argv[1:] or tables.MAKERS:
    tables.write(name)
    print(tables.path(name))
