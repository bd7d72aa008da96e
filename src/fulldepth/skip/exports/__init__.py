"""From a plan to a checkpoint that was read again elsewhere."""
