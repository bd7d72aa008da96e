"""Chooses the blocks to remove: runs variants of a model, caches their held-out losses, and searches over them."""
