"""The fixture world: tiny models, small data files, and what the program's own commands make of them.

Everything is made in one folder and named relative to it, and cases run in a folder of the same absolute path: stored
paths in results and plans stay true. Two worlds differ in what the program stores about time and place; mutations name
places by their share of a file, so a seed means the same in both, up to a byte or two (`--root` keeps a world).
"""

from __future__ import annotations

WORDS = [f"w{i}" for i in range(48)]
MARKS = ["[UNK]", "[BOS]", "[EOS]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
WIDTH, LAYERS, POSITIONS = 16, 2, 32
OWNED = "foreign-code-ran"
"""A file of this name appears in the case's folder if code that a checkpoint carries is run."""

CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} [EOS] {% endfor %}"

TRAIN_RECIPE = """\
about: A recipe that trains in a second.
model:
  type: llama
  hidden_size: 16
  intermediate_size: 24
  num_hidden_layers: 2
  num_attention_heads: 2
  num_key_value_heads: 2
tokenizer: tokens
data:
  name: data/text.jsonl
  validation_share: 0.2
  validation_sequences: 4
objective:
  jump: {weight: 1.0, alpha: 0.5}
steps: 4
global_batch_size: 2
sequence_length: 16
learning_rate: 3e-3
warmup_steps: 1
eval_every: 2
save_every: 2
"""
MEASURE_RECIPE = """\
measures: [displacement, jump_rate, cosine]
max_sequences: 4
sequence_length: 16
token_policy: all
seed: 3
anatomy: null
"""
SEARCH_RECIPE = """\
blocks: 1
chunks: 4
epochs: 1
sequence_length: 16
max_sequences: 8
"""
FOREIGN = f"""\
open({OWNED!r}, "w").write("x")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = "foreign"
class Model(LlamaForCausalLM): config_class = Config
class Words(PreTrainedTokenizerFast): pass
"""
"""Code that a checkpoint carries. Nothing names it until a mutation does."""


def make(folder):
    """Write the files that no command of the program makes; deterministic."""
    import torch
    import transformers as tf
    from PIL import Image

    import gguf_files

    (folder / "data" / "images").mkdir(parents=True)
    (folder / "recipes").mkdir()
    tokens = _tokenizer()
    tokens.save_pretrained(folder / "tokens")
    for name, build in _models(tf).items():
        torch.manual_seed(len(name))
        model = build()
        model.save_pretrained(folder / name, max_shard_size="8KB" if name == "sharded" else "1GB")
        if name == "vit":
            tf.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder / name)
        else:
            tokens.save_pretrained(folder / name)
        if name == "model":
            llama = tf.LlamaForCausalLM(tf.LlamaConfig(**model.config.to_dict() | {"vocab_size": 300}))
            gguf_files.write(folder / "model.gguf", llama)
    (folder / "model" / "foreign.py").write_text(FOREIGN)
    _write_data(folder / "data")
    for label, colour in (("cat", 40), ("dog", 200)):
        (folder / "data" / "images" / label).mkdir()
        for i in range(3):
            picture = Image.new("RGB", (8, 8), (colour, 30 * i, 255 - colour))
            picture.save(folder / "data" / "images" / label / f"{i}.png")
    for name, text in (("train", TRAIN_RECIPE), ("measure", MEASURE_RECIPE), ("search", SEARCH_RECIPE)):
        (folder / "recipes" / f"{name}.yaml").write_text(text)


def _models(tf):
    size = {
        "vocab_size": len(WORDS) + len(MARKS),
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "max_position_embeddings": POSITIONS,
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    vision = {"image_size": 8, "patch_size": 4, "num_labels": 2, "hidden_size": WIDTH, "intermediate_size": 24}
    vision |= {"num_hidden_layers": LAYERS, "num_attention_heads": 2}
    llama = {**size, **ids, "num_key_value_heads": 2}
    return {
        "model": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**llama)),
        "other": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**llama)),
        "sharded": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**llama)),
        "bert": lambda: tf.BertForSequenceClassification(tf.BertConfig(**size, pad_token_id=3, num_labels=2)),
        "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**vision)),
    }


def _tokenizer():
    from data.conftest import splitting

    names = zip(["unk", "bos", "eos", "pad", "cls", "sep", "mask"], MARKS, strict=True)
    tokens = splitting({word: i for i, word in enumerate(MARKS + WORDS)}, **{f"{k}_token": v for k, v in names})
    tokens.chat_template = CHAT
    tokens.model_max_length = POSITIONS
    return tokens


def sentence(start, length):
    """`length` words; the walk depends on `start` alone."""
    return " ".join(WORDS[(start * 7 + i * i * 3 + i) % len(WORDS)] for i in range(length))


def _write_data(folder):
    import pandas as pd

    from data.conftest import jsonl

    texts = [sentence(i, 24) for i in range(16)]
    rows = {
        "text": [{"text": text} for text in texts],
        "pairs": [{"prompt": sentence(i, 6), "response": sentence(i + 50, 5)} for i in range(12)],
        "heldout": [{"prompt": sentence(i, 6), "response": sentence(i + 90, 5)} for i in range(6)],
        "labelled": [{"text": sentence(i, 9), "label": i % 2} for i in range(12)],
        "chats": [
            {"messages": [{"role": r, "content": sentence(i + k, 5)} for k, r in enumerate(["user", "assistant"])]}
            for i in range(8)
        ],
    }
    rows["lambada_test"] = [{"context": sentence(i, 6), "target": f" {sentence(i + 3, 1)}"} for i in range(4)]
    rows["arc_easy_test"] = [
        {"question": sentence(i, 6), "choices": [sentence(i + k, 3) for k in range(3)], "gold": i % 3} for i in range(4)
    ]
    (folder / "text.txt").write_text("\n\n".join(texts) + "\n")
    for name, table in rows.items():
        jsonl(folder / f"{name}.jsonl", *table)
    pd.DataFrame(rows["text"]).to_parquet(folder / "text.parquet")
    pd.DataFrame(rows["pairs"]).to_parquet(folder / "pairs.parquet")
    pd.DataFrame(rows["labelled"]).to_csv(folder / "labelled.tsv", sep="\t", index=False)


FAST = "--max-sequences 4 --sequence-length 16"
QUICK = f"{FAST} --measures displacement,jump_rate,cosine"
CURVE = "--sequence-length 16 --set chunks=4 --batch-size 4"
SKIP = f"{CURVE} --set epochs=1"
SEARCH = f"skip search model --data data/pairs.jsonl {SKIP}"
TASKS = "--task-data data --limit 2 --set bootstrap_iters=10"

STEPS = {
    f"measure model --data data/text.txt --output out-a {FAST}": None,
    f"measure other --data data/text.txt --output out-b {FAST}": None,
    "compare out-a out-b --output cmp": None,
    "train recipes/train.yaml --output run": None,
    "train recipes/train.yaml --output run-b seed=1 steps=2": None,
    "train recipes/train.yaml --output run-0 seed=0 steps=2": None,
    "train recipes/train.yaml --output jump-0 seed=0 steps=2 objective.jump=1": None,
    "train recipes/train.yaml --output jump-1 seed=1 steps=2 objective.jump=1": None,
    "train recipes/train.yaml --output run-part": ("complete.json", 2),
    f"measure run --data data/text.txt --output out-series {QUICK}": None,
    f"measure run --data data/text.txt --output series-part {QUICK}": ("results.json", 2),
    f"{SEARCH} --blocks 1 --output plan": None,
    f"{SEARCH} --blocks 1 --granularity layer --output plan-layer": None,
    f"skip search model.gguf --data data/text.jsonl --blocks 1 --output plan-gguf {SKIP}": None,
    f"{SEARCH} --blocks 2 --output plan-part": ("progress.json", 3),
    f"{SEARCH} --blocks 1 --output answers-part --generate-responses 4 --max-new-tokens 4": ("progress.json", 2),
    f"evaluate model --tasks arc_easy_local --batch-size 1 --output answers-left {TASKS}": ("results.json", 1),
    "skip apply plan model --format folded --output folded": None,
    "skip heal plan model --data data/pairs.jsonl --steps 2 --global-batch-size 2 --rank 2 --output healed": (
        "complete.json",
        1,
    ),
    "skip bench model folded --batches 1 --contexts 8 --max-new-tokens 2 --repeats 2 --output bench": None,
    f"skip curve model --data data/pairs.jsonl --blocks 2 --output curve {CURVE}": None,
    f"skip curve model --data data/pairs.jsonl --blocks 2 --output curve-part {CURVE}": ("progress.json", 3),
}
"""Commands that make parts of the world, and when they are killed: as they rename something to a file of this name for
the so-many-th time."""
