"""Checkpoints of language models with a head for every layer, and their logits by transformers and the files alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

import tiny_models
from skip.word_tokenizer import tokenizer
from tiny_models import seeded

HEADS = "exit_heads.safetensors"
LLAMA = ("model.layers", "model.norm")
FAMILIES = {
    "gpt2": ("transformer.h", "transformer.ln_f"),
    "llama": LLAMA,
    "llama-tied": LLAMA,
    "gemma2": LLAMA,
    "granite": LLAMA,
    "cohere": LLAMA,
}
"""Decoder -> its blocks and its final norm; GPT-2, llama-tied, Gemma 2 and Cohere tie their heads to the embeddings."""
ENCODERS = {"bert": "bert.encoder.layer"}


def write(name, folder, *, scale=0.7):
    """Files of a model, a tokenizer and heads, written by transformers and safetensors."""
    model = tiny_models.build(name)
    own = model.get_output_embeddings().weight
    model.save_pretrained(folder)
    tokens = tokenizer()
    if name in ENCODERS:
        tokens.add_special_tokens({"mask_token": "w79"})
    tokens.save_pretrained(folder.parent / "tokenizer")  # beside the model, so that its type does not choose the class
    generator = seeded(5)
    noise = {n: scale * own.std() * torch.randn(own.shape, generator=generator) for n in (1, 2)}
    heads = {f"exit_heads.{n}.weight": (own.detach() + each) for n, each in noise.items()}
    save_file(heads, folder / HEADS)
    return folder


class Plain:
    """A stock model in float64 whose layers are read one text at a time."""

    def __init__(self, folder, name):
        auto = tf.AutoModelForMaskedLM if name in ENCODERS else tf.AutoModelForCausalLM
        self.model = auto.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
        self.name, self.config = name, self.model.config
        stored = load_file(folder / HEADS) if (folder / HEADS).exists() else {}
        self.matrices = [stored[key].double() for key in sorted(stored)]
        self.states = []
        self.blocks = self.model.get_submodule(ENCODERS.get(name) or FAMILIES[name][0])
        for block in self.blocks:
            block.register_forward_hook(self._keep)

    def _keep(self, module, args, output):
        self.states.append(output if isinstance(output, Tensor) else output[0])

    @torch.no_grad()
    def layers(self, ids):
        """[L, T, V] logits of every layer for one text."""
        self.states = []
        options = {} if self.name in ENCODERS else {"use_cache": False}
        own = self.model(torch.tensor([ids]), **options).logits[0]
        read = [self.read(state.reshape(-1, state.shape[-1])[-len(ids) :], n) for n, state in enumerate(self.states)]
        assert_close(read[-1], own, rtol=1e-9, atol=1e-9)
        return torch.stack(read)

    def read(self, state, index):
        """[T, V] logits of the state after block `index`, by its matrix."""
        if self.name in ENCODERS:
            return self._masked(state, index)
        head = self.model.get_output_embeddings()
        feature = self.model.get_submodule(FAMILIES[self.name][1])(state)
        logits = feature @ self._matrix(index, head).T
        if self.name == "gemma2":
            return torch.tanh(logits / self.config.final_logit_softcapping) * self.config.final_logit_softcapping
        if self.name == "granite":
            return logits / self.config.logits_scaling
        return logits * self.config.logit_scale if self.name == "cohere" else logits

    def _masked(self, state, index):
        inner, last = self.model.cls.predictions.transform, self.model.cls.predictions.decoder
        feature = inner.LayerNorm(F.gelu(inner.dense(state)))
        logits = feature @ self._matrix(index, last).T
        return logits if index < len(self.matrices) else logits + last.bias

    def _matrix(self, index, head):
        return self.matrices[index] if index < len(self.matrices) else head.weight


def texts(plain, count, length):
    """Texts of words as token ids; of a decoder each layer predicts some of the next tokens."""
    generator = seeded(3)
    rows = torch.randint(10, 89, (count, length), generator=generator).tolist()
    if plain.name not in ENCODERS:
        for at, row in enumerate(rows):
            for place in range(1, length):
                best = plain.layers(row[:place])[(at + place) % 3, -1]
                row[place] = 10 + int(best[10:89].argmax())
    return rows
