"""Standalone program: loads a GGUF file with llama.cpp and computes log-probabilities of next tokens.

    python -P with_llama_cpp.py FILE INPUTS.pt OUTPUT.pt llama.cpp

INPUTS.pt holds `[B, T]` tokens. Writes `[B, V]` log-probabilities of the token after each sequence. The
cache is float32, so that only the file's types round. The last line of the printed text is the report of
`with_transformers.py`; llama.cpp has no other way than its cache.
"""

from __future__ import annotations

import json
import sys

import torch
import xllamacpp


def main(file: str, inputs_file: str, output_file: str, _: str) -> None:
    """Load the file, write its output, print the report."""
    inputs = torch.load(inputs_file, weights_only=True)
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = inputs.shape[1] + 8
    params.n_parallel = 1
    params.warmup = False
    params.fit_params = False
    params.cpuparams.n_threads = torch.get_num_threads()
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    rows = []
    for ids in inputs.tolist():
        # The log-probabilities are those before the bias. It makes llama.cpp choose a whole character: it gives none
        # for parts of one.
        asked = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 2**20, "logit_bias": [["e", 1000]]}
        tokens = server.handle_completions(asked)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        row = torch.full((len(tokens),), torch.nan)
        row[[token["id"] for token in tokens]] = torch.tensor([float(token["logprob"]) for token in tokens])
        rows.append(row)
    torch.save(torch.stack(rows), output_file)
    print(json.dumps({"class": "llama.cpp", "cache_error": 0.0}))


if __name__ == "__main__":
    main(*sys.argv[1:])
