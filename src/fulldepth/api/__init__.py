"""`fulldepth.measure`, `compare`, `evaluate`, `train`, `report`, `demo`: commands as functions, with bars and pages.

Early exit has no function here, since `fulldepth.exit` is the subpackage: `fulldepth.exit.sweep` and `generate`.

Each is in a module of its own, so that `fulldepth.compare` and `fulldepth.report` need no torch.
"""
