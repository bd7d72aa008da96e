"""The same objective in transformers' Trainer: `DepthTrainer` with `objective=`.

python examples/trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.losses import DepthTrainer, Objective

STEPS, BATCH, LENGTH = 10, 8, 64


def main() -> list[dict[str, float]]:
    """Train a tiny Llama with JREG and a pull towards the last layer; returns the Trainer's logs."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(builtin_texts("train"), vocab_size=1024)
    ids = tokenizer(" ".join(builtin_texts("heldout")), return_tensors="pt").input_ids[0]
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=6,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = DepthTrainer(
            model,
            TrainingArguments(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=BATCH,
                learning_rate=2e-3,
                logging_steps=2,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": window, "labels": window} for window in windows],
            objective=Objective(jump=1.0, similarity=0.1),
        )
        trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
