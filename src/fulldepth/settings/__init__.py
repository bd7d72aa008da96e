"""Settings of every verb, and how they are layered: defaults < recipe (YAML) < `key=value`. No torch is loaded here."""

from fulldepth.settings.layers import Settings, assignments, layer, merge, names, read

__all__ = ["Settings", "assignments", "layer", "merge", "names", "read"]
