"""JREG in TRL's SFTTrainer: the mixin gives any Trainer an `objective=` (pip install 'fulldepth[sft]').

python examples/sft.py
"""

import tempfile

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.losses import Objective, ObjectiveMixin


class JumpSFTTrainer(ObjectiveMixin, SFTTrainer):
    """TRL's trainer with an objective."""


def main() -> list[dict[str, float]]:
    """Fine-tune a tiny Llama on questions about sums; returns the Trainer's logs."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(builtin_texts("train"), vocab_size=1024)
    pairs = [{"prompt": f"What is {a} and {b}? ", "completion": f"It is {a + b}."} for a in range(8) for b in range(8)]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = JumpSFTTrainer(
            model,
            SFTConfig(
                output_dir=folder,
                max_steps=8,
                per_device_train_batch_size=8,
                learning_rate=2e-3,
                logging_steps=2,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                bf16=False,
            ),
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer,
            objective=Objective(jump=1.0),
        )
        trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
