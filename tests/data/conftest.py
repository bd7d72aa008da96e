"""Toy tokenizers whose every id is known by hand."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

NUMBERS = {"[UNK]": 0, "[EOS]": 1, **{f"w{i}": i + 2 for i in range(500)}}
"""w0 is 2, w1 is 3, ...: the test can write down any stream of ids."""


def talk(*contents):
    """Messages of a user and an assistant in turn."""
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def splitting(vocabulary, post_processor=None, **options):
    """A tokenizer that splits at white space."""
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if post_processor is not None:
        core.post_processor = post_processor
    return PreTrainedTokenizerFast(tokenizer_object=core, **{"unk_token": "[UNK]"} | options)


@pytest.fixture(scope="session")
def number_tokenizer():
    """`w7` -> 9; an EOS (1), nothing added, no pad token."""
    return splitting(NUMBERS, eos_token="[EOS]")


@pytest.fixture(scope="session")
def bare_tokenizer():
    """The same words, no EOS, BOS or pad token at all."""
    return splitting(NUMBERS)


@pytest.fixture(scope="session")
def bert_tokenizer():
    """[PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4, w0 = 5, w1 = 6, ...; [CLS] a [SEP] b [SEP] with token types."""
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names["mask_token"] = "[MASK]"
    frame = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    words = [*names.values(), *(f"w{i}" for i in range(500))]
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return splitting({word: i for i, word in enumerate(words)}, frame, model_input_names=inputs, **names)
