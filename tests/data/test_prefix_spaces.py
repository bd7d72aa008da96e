"""Responses behind their prompts, for tokenizers that put a space before every text that they are given."""

from __future__ import annotations

import string

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from fulldepth.data.examples import read_examples

WORDS = ["The", "cat", "sat", "on"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def prepending():
    """A normalizer that puts the mark of a space before every text, as in checkpoints of Llama 2."""
    words = [*WORDS, *(f"▁{word}" for word in WORDS)]
    tokens = dict.fromkeys(["<unk>", "<s>", "</s>", "▁", *words, *string.ascii_letters, *"<|>\n"])
    scores = [(token, -1.0 if len(token) > 1 else -5.0) for token in tokens]
    core = Tokenizer(models.Unigram(scores, unk_id=0))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def llama():
    """transformers' own class, which splits at the end-of-text token and puts the mark before the first piece alone."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", "▁", "<0x0A>"])}
    merges = []
    for letter in [*string.ascii_letters, *".:<>|"]:
        vocabulary[letter] = len(vocabulary)
    for word in [*WORDS, *(f"▁{word}" for word in WORDS)]:
        for end in range(1, len(word)):
            if (word[:end], word[end]) not in merges:
                merges.append((word[:end], word[end]))
            vocabulary.setdefault(word[: end + 1], len(vocabulary))
    return LlamaTokenizer(vocab=vocabulary, merges=merges, legacy=False)


@pytest.mark.parametrize("make", [prepending, llama])
def test_a_response_has_the_tokens_that_follow_the_prompt_in_the_text_of_both(make):
    tokenizer = make()
    row = read_examples([{"prompt": "The cat", "response": " sat on"}] * 6, tokenizer, 64, chat=False).train[0]
    whole = tokenizer("The cat sat on", add_special_tokens=False)["input_ids"]
    ids = row.input_ids.tolist()
    assert ids[len(ids) - len(whole) :] == whole
    assert [i for i in row.labels.tolist() if i >= 0] == whole[
        len(tokenizer("The cat", add_special_tokens=False)["input_ids"]) :
    ]


@pytest.mark.parametrize("make", [prepending, llama])
def test_an_answer_of_a_chat_has_the_tokens_of_the_template(make):
    tokenizer = make()
    tokenizer.chat_template = TEMPLATE
    row = read_examples([{"prompt": "The cat", "response": "sat on"}] * 6, tokenizer, 64).train[0]
    messages = [{"role": "user", "content": "The cat"}, {"role": "assistant", "content": "sat on"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    ids = row.input_ids.tolist()
    assert ids == whole[: len(ids)]
    assert ids[-1] == tokenizer.eos_token_id
