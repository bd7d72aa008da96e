"""Settings of every command, layered: defaults < recipe (YAML) < `key=value`. Importing this does not load torch."""

from fulldepth.settings.layers import Settings, assignments, layer, merge, names, read

__all__ = ["Settings", "assignments", "layer", "merge", "names", "read"]
