"""Fast conversion of texts to the token ids of documents."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fulldepth.data.cache.token_files import Encoded
from fulldepth.data.tokens import Frame, check_vocabulary, encode_texts
from fulldepth.errors import FulldepthError
from fulldepth.files import reading


@dataclass
class Encoder:
    """Tokenises documents, with the tokenizer's special tokens around each and end-of-text after it.

    Raises:
        FulldepthError: if the tokenizer has no end-of-text token.
    """

    tokenizer: Any
    vocab_size: int | None = None
    """Vocabulary size of the model: ids beyond it are refused; None = not checked."""
    frame: Frame = field(init=False)
    end: int = field(init=False)
    dtype: np.dtype = field(init=False)
    """Unsigned integer of two or four bytes, the smaller that holds every id."""
    _core: Tokenizer | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if self.tokenizer.eos_token_id is None:
            raise FulldepthError("The tokenizer has no end-of-text token (eos_token), which must end each document.")
        self.end = int(self.tokenizer.eos_token_id)
        self.frame = Frame.of(self.tokenizer, ["text"])
        highest = max(self.end, *self.tokenizer.get_vocab().values())
        self.dtype = np.dtype("<u2" if highest < 2**16 else "<u4")

    def __call__(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text; `FulldepthError` if the tokenizer fails or the model lacks an id."""
        flat, lengths = array("I"), []
        prefix, suffix = self.frame.prefix, self.frame.suffix
        for ids in self._encode(texts):
            start = len(flat)
            if ids:
                flat.extend(prefix)
                flat.extend(ids)
                flat.extend(suffix)
                if flat[-1] != self.end:
                    flat.append(self.end)
            lengths.append(len(flat) - start)
        all_ids = np.frombuffer(flat, np.uint32) if flat else np.zeros(0, np.uint32)
        check_vocabulary(int(all_ids.max(initial=0)), self.tokenizer, self.vocab_size)
        return Encoded(all_ids, np.array(lengths, np.int64))

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text without special tokens."""
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            encoded = encode_texts(self.tokenizer, list(texts), add_special_tokens=False, return_attention_mask=False)
            return list(encoded["input_ids"])
        if self._core is None:
            self._core = self._own_core()
        with reading(f"text with the tokenizer {self.tokenizer.name_or_path or type(self.tokenizer).__name__}"):
            return [encoding.ids for encoding in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _own_core(self) -> Tokenizer:
        """A copy of the Rust tokenizer without truncation and padding."""
        core = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        core.no_truncation()
        core.no_padding()
        core.encode_special_tokens = bool(getattr(self.tokenizer, "split_special_tokens", False))
        return core

    def fingerprint(self) -> str:
        """SHA-256 of everything in the tokenizer that determines ids."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            described: Any = [type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items())]
        else:
            described = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
        raw = getattr(self.tokenizer, "split_special_tokens", False)
        content = json.dumps([described, raw, self.end, self.frame.prefix, self.frame.suffix], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()
