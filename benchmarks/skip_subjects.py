"""Trains the models on which searches are compared: small, but good enough that their blocks differ in worth.

    python benchmarks/skip_subjects.py FOLDER [--gsm8k train.jsonl] [--only llama,gpt2] [--seeds 0,1]

The demo's Llama (recipe `tiny-llama`); a Llama, a GPT-2 and a Qwen3 of 12 layers x 64 channels, trained longer on the
built-in novels; and that Llama fine-tuned on worked
school arithmetic (GSM8K: `question` and `answer`), all by `fulldepth.train`. A model that is there is left alone, one
that was cut short goes on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fulldepth.core.bars import watching
from fulldepth.hf import sealed_checkpoints
from fulldepth.settings import layers as recipes
from fulldepth.training import TrainSettings, train

LAYERS, WIDTH, VOCABULARY, POSITIONS, STEPS, TUNING = 12, 64, 512, 512, 1200, 400
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 168,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "type": "gpt2",
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": POSITIONS,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "qwen3": {
        "type": "qwen3",
        "hidden_size": WIDTH,
        "intermediate_size": 168,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
    },
}
COMMON = {
    "steps": STEPS,
    "global_batch_size": 16,
    "sequence_length": 128,
    "learning_rate": 2e-3,
    "min_learning_rate": 1e-4,
    "warmup_steps": 50,
    "eval_every": 200,
    "save_every": 200,
}
TUNED = {
    "stage": "sft",
    "steps": TUNING,
    "global_batch_size": 16,
    "sequence_length": 384,
    "learning_rate": 1e-3,
    "min_learning_rate": 0.0,
    "warmup_steps": 20,
    "weight_decay": 0.0,
    "eval_every": 100,
    "save_every": 100,
}


def checkpoint(run: Path) -> Path:
    """The last checkpoint of a run.

    Raises:
        FileNotFoundError: if it has none.
    """
    found = sealed_checkpoints(run)
    if not found:
        raise FileNotFoundError(f"{run} holds no checkpoint; train it with benchmarks/skip_subjects.py")
    return found[-1][1]


def pairs(source: Path, target: Path, tokenizer: Any = None) -> Path:
    """GSM8K's rows as prompts and responses; with a tokenizer those only that fit the models, chat marks included."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    made = [{"prompt": f"Question: {row['question']}\nAnswer: ", "response": row["answer"]} for row in rows]
    if tokenizer is not None:
        made = [row for row in made if len(tokenizer(row["prompt"] + row["response"])["input_ids"]) < POSITIONS - 32]
    target.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return target


def prepare(folder: Path, name: str, seed: int, gsm8k: Path | None) -> Path:
    """Train a model unless it is there; returns its run folder."""
    run = folder / f"{name}-{seed}"
    asked: dict[str, Any] = {"seed": seed}
    if name == "gsm8k":
        if gsm8k is None:
            raise SystemExit("gsm8k needs --gsm8k train.jsonl")
        base = checkpoint(prepare(folder, "llama", seed, gsm8k))
        data = pairs(gsm8k, folder / "gsm8k.jsonl")
        asked |= {**TUNED, "model": {"checkpoint": str(base)}, "data": {"name": str(data)}}
    elif name == "demo":
        asked |= recipes.read("tiny-llama", "train")
    else:
        asked |= {**COMMON, "model": MODELS[name], "tokenizer": f"builtin:{VOCABULARY}"}
    settings = recipes.layer(TrainSettings, asked)
    done = sealed_checkpoints(run)
    if not done or done[-1][0] < settings.steps:
        with watching() as watcher:
            train(settings, run, resume=run.exists(), watcher=watcher)
    return run


def main() -> None:
    """Train what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--only", default="demo,llama,gpt2,qwen3,gsm8k")
    parser.add_argument("--seeds", default="0")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for seed in map(int, args.seeds.split(",")):
        for name in args.only.split(","):
            print(prepare(args.folder, name, seed, args.gsm8k), flush=True)


if __name__ == "__main__":
    main()
