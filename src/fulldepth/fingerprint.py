"""Hashes that identify models, data and text."""

from __future__ import annotations

import hashlib


class Fingerprint:
    """SHA-256 over parts, each hashed with its length, so that their boundaries matter."""

    def __init__(self, *settings: str) -> None:
        self._sha = hashlib.sha256()
        for setting in settings:
            self.add(setting.encode())

    def add(self, part: bytes) -> None:
        """Add one part."""
        self._sha.update(len(part).to_bytes(8, "little"))
        self._sha.update(part)

    def __str__(self) -> str:
        return f"sha256:{self._sha.hexdigest()}"
