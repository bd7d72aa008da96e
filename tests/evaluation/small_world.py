"""A tiny model that reads bytes, and a folder with files of tasks."""

from __future__ import annotations

import copy

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.conftest import jsonl
from tiny_models import DECODER

LAYERS = 4
NOUNS = ["sun", "river", "stone", "leaf", "cloud", "mouse", "wheel"]


def tokenizer():
    """One token for each byte, and three marks."""
    marks = ["<pad>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: index for index, token in enumerate([*marks, *letters])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def model(seed=0, dtype=torch.float32):
    """A Llama of four layers whose layers predict different things."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 259, "num_hidden_layers": LAYERS, "max_position_embeddings": 2048}
    config = LlamaConfig(**{**DECODER, **sizes}, initializer_range=0.3)
    return LlamaForCausalLM(config).to(dtype).eval()


def first_layers(whole, layers):
    """A copy of a model with its first layers only."""
    cut = copy.deepcopy(whole)
    cut.model.layers = cut.model.layers[:layers]
    cut.config.num_hidden_layers = layers
    return cut


def write_data(folder, rows=7):
    """The files of all local tasks; texts hold quotes, other scripts, and marks of templates."""
    choices = [
        [f"a {NOUNS[i % 7]}", f"the {NOUNS[(i + 2) % 7]} {{{{x}}}}", "été", "no"][: 2 + i % 3] for i in range(rows)
    ]
    gold = [i % len(c) for i, c in enumerate(choices)]
    asked = [f"What is {i}? Is it 'a' {NOUNS[i % 7]} & \"b\"" for i in range(rows)]
    files = {
        "lm-eval/lambada_test.jsonl": [
            {"context": f"{question}\n\nThey saw the", "target": f" {NOUNS[i % 7]}"} for i, question in enumerate(asked)
        ],
        "lm-eval/hellaswag_val.jsonl": [
            {"context": f"Row {i}: A man sits. {tail}", "choices": c, "gold": g}
            for i, (tail, c, g) in enumerate(zip(["the LADY", "He walks."] * rows, choices, gold, strict=False))
        ],
        "gsm8k/train.jsonl": [{"question": f"{i}+{i}?", "answer": f"It is {i}+{i}.\n#### {2 * i}"} for i in range(9)],
        "gsm8k/test.jsonl": [{"question": f"{i} times 3?", "answer": f"3 * {i}\n#### {3 * i}"} for i in range(rows)],
    }
    for name, column in (("arc_easy_test", "question"), ("arc_challenge_test", "question"), ("piqa_valid", "goal")):
        files[f"lm-eval/{name}.jsonl"] = [
            {column: q, "choices": c, "gold": g} for q, c, g in zip(asked, choices, gold, strict=True)
        ]
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        jsonl(path, *content)
    return folder
