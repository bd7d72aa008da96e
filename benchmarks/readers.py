"""What other programs compute from exports: the largest difference of a logit from transformers', relative.

    python benchmarks/readers.py FOLDER --mlx PYTHON
    python benchmarks/readers.py FOLDER --llama-cpp PYTHON --converter llama.cpp/convert_hf_to_gguf.py
    python benchmarks/readers.py FOLDER --vllm PYTHON [--model CHECKPOINT] [--only decilm-llama]

PYTHON is an interpreter that has the reader and torch: each may live in an environment of its own. FOLDER keeps the
exports of small random models (6 layers of 128 channels, attention sharp enough that positions matter), and of the
checkpoint, if one is given. Everything is float32. A reader that refuses an export says why.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from folding import plan_of
from fulldepth.execution.stream import relative_error
from fulldepth.hf import load_checkpoint
from fulldepth.skip import export, load

PROGRAM = Path(__file__).with_name("other_readers.py")
LAYERS, VOCABULARY, LENGTH = 6, 512, 24
CHECKPOINT_BLOCKS = (8, 9, 11)
"""Early layers of trained models matter so much that rounding shows."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 128, "n_layer": LAYERS, "n_head": 4, "n_positions": 128}
NEOX_ROPE = {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.25}
GEMMA = {"hidden_size": 256, "query_pre_attn_scalar": 32}
"""mlx-lm rounds the root of Gemma 3's width to bfloat16; that of 256 is exact."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
    "gemma2": ("gemma2", GEMMA | {"sliding_window": 64}),
    "gemma2-window": ("gemma2", GEMMA | {"sliding_window": 8}),
    "gemma3": ("gemma3_text", GEMMA | {"sliding_window": 8, "num_hidden_layers": 7}),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", {"rope_parameters": NEOX_ROPE, "num_key_value_heads": 4, "intermediate_size": 512}),
}
"""Name -> type of model and its settings."""
EXPORTS: dict[str, tuple[str, str, float, tuple[int, ...], tuple[str, ...]]] = {
    "folded": ("folded", "attention", 0.1, (1, 3, 4), tuple(KINDS)),
    "folded-unhealed": ("folded", "attention", 0.0, (1, 3, 4), ("llama",)),
    "decilm": ("decilm", "attention", 0.1, (1, 3, 4), ("llama", "llama3", "qwen2")),
    "layer": ("layer", "layer", 0.0, (3,), ("llama", "gemma2-window", "gemma3")),
    "original": ("", "", 0.0, (), ("gemma2-window", "gemma3", "gpt2")),
    "fast": ("fast", "attention", 0.1, (1, 3, 4), ("llama",)),
}
"""Name -> format, granularity, spread of the scalars about 1, what is skipped, and of which models.

`original` is the whole model as transformers saves it: what a reader gets wrong there is not the export's fault.
"""


@dataclass(frozen=True)
class Case:
    """An export, and what transformers computes from it."""

    name: str
    folder: Path
    ids: Tensor
    expected: Tensor


def built(kind: str) -> PreTrainedModel:
    """A random model whose logits depend on positions: rotary, and attention that is far from uniform."""
    model_type, options = KINDS[kind]
    config = transformers.AutoConfig.for_model(model_type, **(options if model_type == "gpt2" else SIZES | options))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # gains and biases that are not 1 and 0 catch a forgotten one
                weight.add_(0.2 * torch.randn_like(weight))
            elif "embed" in name or "wte" in name:
                weight.mul_(30.0 / (11.3 if model_type.startswith("gemma") else 1.0))
            else:
                weight.mul_(12.0 if any(part in name for part in ("q_proj", "k_proj", "query_key", "c_attn")) else 3.0)
    return model


def cases(folder: Path, checkpoint: str | None, only: str | None) -> Iterator[Case]:
    """Every export, made where it is missing."""
    for export_name, (format, granularity, spread, blocks, kinds) in EXPORTS.items():
        for kind in (*kinds, *(("checkpoint",) if checkpoint and format in ("folded", "decilm") else ())):
            name = f"{export_name}-{kind}"
            if only and not any(part in name for part in only.split(",")):
                continue
            target = folder / name
            if not target.exists():
                model = built(kind) if kind in KINDS else load_checkpoint(str(checkpoint), dtype="float32").model
                if format:
                    removed = blocks if kind in KINDS else CHECKPOINT_BLOCKS
                    plan = plan_of(model, model.config.num_hidden_layers, spread, 0, removed, granularity)
                    export(plan, model, format, target)
                else:
                    model.save_pretrained(target)
            model = load(target, device="cpu") if format else load_checkpoint(str(target), device="cpu").model
            size = model.config.vocab_size
            ids = torch.randint(3, size, (2, LENGTH), generator=torch.Generator().manual_seed(2))
            with torch.no_grad():
                expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            yield Case(name, target, ids, expected)


def read_all(cases: Sequence[Case], name: str, interpreter: str, *further: str) -> Iterator[str]:
    """What a reader computes from every case, in one process: most of the time goes into starting it."""
    with tempfile.TemporaryDirectory() as place, Path(place, "errors").open("w+", encoding="utf-8") as errors:
        jobs = []
        for case in cases:
            files = [str(Path(place) / f"{case.name}.{kind}.pt") for kind in ("ids", "logits")]
            torch.save(case.ids, files[0])
            carried = ["carried"] * (name == "vllm" and case.name.startswith(("decilm", "fast")))
            jobs.append([str(case.folder.absolute()), *files, *further, *carried])
        listed = Path(place, "jobs.json")
        listed.write_text(json.dumps(jobs), encoding="utf-8")
        command = [interpreter, "-W", "ignore", "-P", str(PROGRAM), name, str(listed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            lines = (line for line in process.stdout or () if line.startswith("{"))
            for case, job, line in zip(cases, jobs, lines, strict=False):
                said = json.loads(line)
                if "failed" in said:
                    yield f"{case.name:20} {name:10} failed: {said['failed']}"
                    continue
                error = relative_error(torch.load(job[2], weights_only=True), case.expected)
                cached = f"with a cache {said['cache_error']:.1e}"
                yield f"{case.name:20} {name:10} {error:.1e}, {cached} ({said['class']})"
        if process.returncode:
            errors.seek(0)
            yield f"{name} ended early: {errors.read()[-1000:]}"


def main() -> None:
    """Read every export with every reader."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="a checkpoint beside the small random models")
    parser.add_argument("--only", help="parts of the names of exports, with commas")
    parser.add_argument("--mlx", metavar="PYTHON")
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    parser.add_argument("--converter", help="absolute path of llama.cpp's convert_hf_to_gguf.py")
    parser.add_argument("--vllm", metavar="PYTHON")
    args = parser.parse_args()
    found = list(cases(args.folder, args.model, args.only))
    for name, *further in (("mlx", args.mlx), ("llama.cpp", args.llama_cpp, args.converter), ("vllm", args.vllm)):
        if further[0] is not None:
            for line in read_all(found, name, *further):
                print(line, flush=True)


if __name__ == "__main__":
    main()
