"""Checkpoints as a user has them (weights and a tokenizer in a folder), small data, the command line in-process."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from tokenizers.processors import TemplateProcessing

import tiny_models
from cli.conftest import main  # noqa: F401
from data.conftest import jsonl
from fulldepth.core.progress import Watcher
from fulldepth.measurement import measure_into
from golden import tables

SPECIAL = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


@pytest.fixture(scope="session")
def corpus():
    """A few pages of a novel."""
    return tables.text()


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level, nothing added around a text; ends and pads with <|endoftext|> (0)."""
    return tables.tokenizer()


@pytest.fixture(scope="session")
def bert_tokenizer():
    """[CLS] text [SEP], with a mask token."""
    made = tables.tokenizer()
    made.add_special_tokens(SPECIAL)
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(t, made.convert_tokens_to_ids(t)) for t in ("[CLS]", "[SEP]")]
    )
    return made


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tokenizer, bert_tokenizer):
    """(family, seed) -> folder with a tiny model of that family and a tokenizer that fits it."""
    made = {}

    def get(family, seed=0):
        if (family, seed) not in made:
            folder = tmp_path_factory.mktemp(family) / family
            chosen = bert_tokenizer if family.startswith(("bert", "roberta")) else tokenizer
            model = tiny_models.build(family, seed)
            if "input_ids" in model.main_input_name:
                model.resize_token_embeddings(len(chosen), mean_resizing=False)
                chosen.save_pretrained(folder)
            model.save_pretrained(folder)
            made[family, seed] = folder
        return made[family, seed]

    return get


@pytest.fixture(scope="session")
def trained(tmp_path_factory, tokenizer):
    """A Llama that has learnt something, so that accuracies, losses and saturation are not those of noise."""
    folder = tmp_path_factory.mktemp("trained") / "llama"
    tables.learnt(torch.float32, 1500).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory, corpus):
    """Plain text, which fills windows."""
    path = tmp_path_factory.mktemp("data") / "novel.txt"
    path.write_text(corpus[:1500])
    return path


@pytest.fixture(scope="session")
def windows(tokenizer, text_file):
    """`windows(N, T)`: ids [N, T] of the text as one stream, cut."""
    ids = torch.tensor(tokenizer(text_file.read_text())["input_ids"])
    return lambda count, length: ids[: count * length].view(count, length)


@pytest.fixture(scope="session")
def documents_file(tmp_path_factory, corpus):
    """Twelve texts of several windows each, so that standard errors can be stated."""
    path = tmp_path_factory.mktemp("data") / "pages.jsonl"
    jsonl(path, *({"text": corpus[n : n + 400]} for n in range(0, 4800, 400)))
    return path


@pytest.fixture(scope="session")
def overflowing(tmp_path_factory, checkpoint, text_file):
    """A GPT-2 in float16 whose weights are finite, but not the states of one token: it stands in window 5 (of 16)."""
    folder = tmp_path_factory.mktemp("overflow") / "gpt2"
    shutil.copytree(checkpoint("gpt2"), folder)
    ids = tf.AutoTokenizer.from_pretrained(folder)(text_file.read_text())["input_ids"]
    rare = next(i for i in ids[80:96] if i not in ids[:80])
    config = tf.GPT2Config.from_pretrained(folder, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
    model = tf.GPT2LMHeadModel(config)
    model.load_state_dict(tf.GPT2LMHeadModel.from_pretrained(folder).state_dict())
    model.transformer.wte.weight.data[rare, 0] = 60000
    for block in model.transformer.h:
        block.attn.c_proj.bias.data[0] = 6000
    model.half().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ragged_texts(corpus):
    """(text, class) of very different lengths, of three classes."""
    words = corpus.split()
    lengths = [3, 9, 1, 14, 5, 7, 2, 11, 4, 6, 13, 8]
    starts = np.cumsum([0, *lengths])
    return [(" ".join(words[s : s + n]), i % 3) for i, (s, n) in enumerate(zip(starts, lengths, strict=False))]


@pytest.fixture(scope="session")
def ragged_tsv(tmp_path_factory, ragged_texts):
    """The ragged texts as GLUE writes them."""
    path = tmp_path_factory.mktemp("data") / "train.tsv"
    path.write_text("sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in ragged_texts), "utf-8")
    return path


@pytest.fixture(scope="session")
def picture_folder(tmp_path_factory):
    """Four pictures in each of three class folders, of several sizes; each class has its own tint."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for index, name in enumerate(("LABEL_0", "LABEL_1", "LABEL_2")):
        (root / name).mkdir()
        for number in range(4):
            pixels = rng.integers(0, 120, (16, 16 + 2 * number, 3), dtype=np.uint8)
            pixels[..., index] += 120
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


@pytest.fixture
def into(text_file):
    """`into(model, output, settings, **options)`: measure into a folder; the results, and the lines that were said."""

    def measured(model, output, settings, data=None, **options):
        said = []
        options["watcher"] = Watcher(say=said.append)
        return measure_into(model, data or str(text_file), output, settings, **options), said

    return measured
