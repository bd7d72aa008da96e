"""`fulldepth.measure`, `compare`, `train` and `demo`: the commands as functions, with progress bars and pages.

They take what the commands take, and return `Results`. `fulldepth.report` is the fifth. Each is in a module of its own,
so that `fulldepth.compare` needs no torch.
"""
