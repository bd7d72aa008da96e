"""JREG on a stock model in a plain PyTorch loop: attach the objective, call it on the outputs, detach.

python examples/hand_written_loop.py
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.losses import Objective

STEPS, BATCH, LENGTH = 20, 8, 64


def main() -> list[dict[str, float]]:
    """Train a tiny Qwen3 from scratch; returns the loss's parts of every step."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(builtin_texts("train"), vocab_size=1024)
    ids = tokenizer(" ".join(builtin_texts("heldout")), return_tensors="pt").input_ids[0]
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=LENGTH,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))

    history = []
    objective = Objective(jump=1.0).attach(model)  # 1
    for step in range(STEPS):
        start = torch.randint(0, len(ids) - LENGTH, (BATCH,))
        windows = torch.stack([ids[s : s + LENGTH] for s in start.tolist()])
        batch = {"input_ids": windows, "labels": windows}
        loss, parts = objective(model(**batch), batch)  # 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append({name: float(value) for name, value in parts.items()})
        print(f"step {step + 1:3d}  cross-entropy {history[-1]['ce']:.3f}  displacement {history[-1]['jump']:.4f}")
    objective.detach()  # 3
    return history


if __name__ == "__main__":
    main()
