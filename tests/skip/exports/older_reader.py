"""A program of its own: loads exports with whatever transformers is on the path, and writes their logits.

    python -P older_reader.py IDS.pt FOLDER...

Each folder gets `logits.pt` (with a cache, token by token after the first half) and `tokens.json` beside its files.
Token 0 is padding on the left.
Folders named `fast...` and `decilm...` are loaded with their code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def load(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype="auto",
        attn_implementation="eager",  # with the default, transformers 4 leaves out Gemma 2's cap of attention
        trust_remote_code=folder.name.startswith(("fast", "decilm")),
        output_loading_info=True,
    )
    wrong = {name: keys for name, keys in info.items() if keys}
    if wrong:
        raise SystemExit(f"{folder.name}: {wrong}")
    return model.eval()


@torch.no_grad()
def in_steps(model, ids):
    """Logits of half of the tokens at once, then of one after the other with the cache; and the cache."""
    half, found, cache = ids.shape[1] // 2, [], None
    mask = (ids != 0).long()
    places = (mask.cumsum(1) - 1).clamp(min=0)
    for begin, end in [(0, half), *((at, at + 1) for at in range(half, ids.shape[1]))]:
        given = {"attention_mask": mask[:, :end], "position_ids": places[:, begin:end], CACHE: cache}
        outputs = model(input_ids=ids[:, begin:end], use_cache=True, **given)
        cache = outputs[CACHE]
        found.append(outputs.logits)
    return torch.cat(found, dim=1), cache


def main(ids_file, *folders):
    sys.modules["fulldepth"] = None  # an export stands without it
    transformers.logging.set_verbosity_error()
    ids = torch.load(ids_file, weights_only=True)
    for folder in map(Path, folders):
        torch.save(in_steps(load(folder), ids)[0], folder / "logits.pt")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        (folder / "tokens.json").write_text(json.dumps(tokenizer("w5 w9").input_ids))
    print(transformers.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:])
