"""Tokens and logits of a GGUF file as fulldepth loads it, beside llama.cpp's.

    python benchmarks/gguf_files.py FILE.gguf --llama-cpp PYTHON

PYTHON is an interpreter that has `llama_cpp`. The text is the beginning of every built-in novel; logits are compared on
the first one's first tokens. llama.cpp rounds activations to 8 bits, so logits do not agree exactly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

from fulldepth.data import builtin_texts
from fulldepth.hf import load_checkpoint, load_tokenizer

CHARACTERS = 20_000
"""Of each novel."""
READER = """
import json, sys
import llama_cpp, numpy
path, folder, count = sys.argv[1:]
texts = json.load(open(folder + "/texts.json"))
model = llama_cpp.Llama(path, n_ctx=int(count), logits_all=True, verbose=False, n_threads=1)
tokens = [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
json.dump(tokens, open(folder + "/tokens.json", "w"))
model.eval(tokens[0][: int(count)])
numpy.save(folder + "/logits.npy", numpy.array(model.scores[: int(count)]))
"""


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--llama-cpp", required=True, metavar="PYTHON")
    parser.add_argument("--tokens", type=int, default=256, help="whose logits are compared (default: %(default)s)")
    options = parser.parse_args()
    texts = [text.strip()[:CHARACTERS] for part in ("train", "heldout") for text in builtin_texts(part)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "texts.json").write_text(json.dumps(texts))
        command = [options.llama_cpp, "-c", READER, options.file, folder, str(options.tokens)]
        subprocess.run(command, check=True)
        expected = json.loads(Path(folder, "tokens.json").read_text())
        reference = torch.from_numpy(np.load(Path(folder, "logits.npy"))).log_softmax(-1)
    tokenizer = load_tokenizer(options.file)
    own = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    equal = sum(first == second for first, second in zip(own, expected, strict=True))
    print(f"{options.file}: {equal} of {len(texts)} texts have llama.cpp's tokens ({sum(map(len, expected)):,} in all)")
    ids = torch.tensor([expected[0][: options.tokens]])
    with torch.no_grad():
        predicted = load_checkpoint(options.file, device="cpu").model(ids).logits[0].float().log_softmax(-1)
    divergence = (reference.exp() * (reference - predicted)).sum(-1).mean()
    losses = [-scores[:-1].gather(1, ids[0, 1:, None]).mean() for scores in (predicted, reference)]
    print(f"KL {divergence:.4f} nats; loss {losses[0]:.4f}, llama.cpp {losses[1]:.4f} nats ({ids.shape[1]} tokens)")


if __name__ == "__main__":
    main()
