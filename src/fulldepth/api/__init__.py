"""`fulldepth.measure`, `compare`, `train`, `report`, `demo`: the commands as functions, with progress bars and pages.

Each is in a module of its own, so that `fulldepth.compare` and `fulldepth.report` need no torch.
"""
