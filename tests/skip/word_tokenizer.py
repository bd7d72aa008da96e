"""Tokenizers whose every id is known by hand: `w7` -> 17, marks below 10, with and without a chat template."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tiny_models import build

MARKS = ["[UNK]", "[BOS]", "[EOS]", "[PAD]", "<system>", "<user>", "<assistant>", "<think>", "</think>", "\n"]
VOCABULARY = {mark: i for i, mark in enumerate(MARKS)} | {f"w{i}": i + len(MARKS) for i in range(80)}
TWO_WORDS = {f"w{i - 50} w{i - 49}" if i in range(59, 89) else word: i for word, i in VOCABULARY.items()}
"""A vocabulary in which some tokens stand for two words: their text has more tokens when it is read again."""
BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, NO_THINK, LINE = (VOCABULARY[m] for m in MARKS[1:3] + MARKS[4:])

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }} "
    "{% if m['role'] == 'assistant' %}[EOS]\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} [EOS]{% endgeneration %}"
    "{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = CHAT.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}")
"""Opens an answer with a mark that it does not write down with a finished one."""
COUNTING = "{{ messages | length }}" + CHAT
"""Writes the prompt differently once a response follows."""
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('A user must begin') }}{% endif %}" + CHAT


def tokenizer(template=None, bos=False, vocabulary=VOCABULARY):
    """Splits at spaces; special tokens are found anywhere."""
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    if bos:
        core.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", BOS)])
    found = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="[UNK]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        pad_token="[PAD]",
        additional_special_tokens=MARKS[4:],
    )
    found.chat_template = template
    return found


def words(*numbers):
    """`w3 w5 ...`."""
    return " ".join(f"w{number}" for number in numbers)


def ids(*numbers):
    """Their ids."""
    return [number + len(MARKS) for number in numbers]


def checkpoint(folder, name="llama"):
    """The folder, with a tiny model and the tokenizer."""
    build(name).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
