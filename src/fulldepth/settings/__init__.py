"""Settings of every command, layered: defaults < recipe (YAML) < `key=value`. Importing this does not load torch."""

from fulldepth.settings.layers import Settings, assigned, assignments, command_line, layer, merge, names, read

__all__ = ["Settings", "assigned", "assignments", "command_line", "layer", "merge", "names", "read"]
