"""What other programs compute from exports of models with removed parts, and how fast: the table of docs/results.md.

    python benchmarks/readers.py FOLDER --reader stock=PYTHON --reader carried=PYTHON --reader mlx=PYTHON
        --reader vllm=PYTHON --reader llama.cpp=PYTHON --converter llama.cpp/convert_hf_to_gguf.py [--speed MODEL]

PYTHON is an interpreter that has the reader and torch: each may live in an environment of its own. FOLDER keeps the
exports of small random models (6 to 8 layers of 128 or 256 channels, attention sharp enough that positions matter),
what each reader made of them (`outcomes.json`; a reader that is in it is not run again), and the exports of MODEL, a
GGUF file whose decode speed is measured. Errors are the largest difference of a logit from that of the plan's
definition, computed by hooks on the unexported model, relative to the largest logit.

Speed is in processor seconds a token in one thread, of 32 tokens (llama.cpp: 128) after a prompt of 128, of the
original over that of the export: both are loaded at once and take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from folding import plan_of
from fulldepth.core.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.hf import load_checkpoint
from fulldepth.hf.rounding import relative_error
from fulldepth.skip import Plan, export
from fulldepth.skip.exports import export as exporting
from fulldepth.skip.exports.fold import scaled_logits

PROGRAM = Path(__file__).with_name("other_readers.py")
LAYERS, VOCABULARY, LENGTH = 6, 512, 24
WRONG = 0.02
"""Error above which a reader computes another model; with float32 weights rounding gives 5e-3 at most. llama.cpp rounds
the inputs of products with 4-bit weights: SmolLM2's own file has 0.025."""
TOKENS, ROUNDS = {"llama.cpp": 128}, 5
"""Tokens that are timed (32 unless named: processor seconds are counted in hundredths), and rounds after the first."""
REAL = "real-weights"
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
    "gemma3": ("gemma3_text", GEMMA | {"sliding_window": 8, "num_hidden_layers": 8}),
    "phi3": ("phi3", {"sliding_window": None}),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", {"rope_parameters": NEOX_ROPE, "num_key_value_heads": 4, "intermediate_size": 512}),
}
"""Name -> type of model and its settings."""


@dataclass(frozen=True)
class Row:
    """What is removed, and the formats that hold it."""

    name: str
    granularity: str
    blocks: tuple[int | str, ...]
    """Of the small models; none = the last two layers."""
    removed: tuple[int | str, ...]
    """Of the model with 30 layers whose speed is measured."""
    formats: tuple[str, ...]
    spread: float = 0.0
    """Of the scalars about 1."""


ROWS = (
    Row("nothing is dropped: zeros (`folded`)", "attention", (1, 3, 4), (), ("folded",), 0.1),
    Row("8 attentions", "attention", (1, 3, 4), tuple(range(10, 25, 2)), ("decilm", "fast", "gguf")),
    Row("8 MLPs", "mlp", (2, 4), tuple(range(10, 25, 2)), ("fast", "gguf")),
    Row("5 whole layers, the last ones", "layer", (), (26, 27, 28, 29, 30), ("layer", "fast", "gguf")),
    Row(
        "4 attentions, 4 MLPs and 2 whole layers",
        "any",
        ("attention 1", "mlp 3", "layer 5"),
        (
            *(f"attention {layer}" for layer in (10, 12, 14, 16)),
            *(f"mlp {layer}" for layer in (11, 13, 15, 17)),
            *("layer 20", "layer 22"),
        ),
        ("fast", "gguf"),
    ),
    Row("whole layers out of the period (`--by-list`)", "layer", (2,), (), ("layer", "gguf")),
)
FAMILIES = {
    "folded": tuple(KINDS),
    "decilm": ("llama", "llama3", "qwen2"),
    "fast": ("llama", "qwen3", "gemma3"),
    "layer": ("llama", "qwen2", "qwen3", "gemma2-window", "gemma3", "phi3"),
    "gguf": ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3"),
}
"""Format -> the models that it is tried with."""


@dataclass(frozen=True)
class Case:
    """An export, and what the plan's definition computes."""

    row: int
    family: str
    format: str
    path: Path
    ids: Tensor
    expected: Tensor
    """[B, T, V] logits."""


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


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, one merge and unused ones. llama.cpp's converter counts special ones twice for Gemma."""
    tokens = ["<unk>", "<s>", "</s>", "<|endoftext|>", *sorted(ByteLevel.alphabet()), "th"]
    tokens += [f"<unused{number}>" for number in range(VOCABULARY - 3 - len(tokens))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = Tokenizer(BPE(vocab=vocabulary, merges=[("t", "h")], unk_token="<unk>"))
    model.pre_tokenizer = ByteLevel(add_prefix_space=False)
    model.decoder = Decoder()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


def source_of(folder: Path, family: str, gguf: bool, converter: Sequence[str]) -> Path:
    """The unchanged model: a folder, or a GGUF file that llama.cpp's converter made from it."""
    original = folder / f"original-{family}"
    if not original.exists():
        built(family).save_pretrained(original)
        tokenizer().save_pretrained(original)
    if not gguf:
        return original
    file = folder / f"original-{family}.gguf"
    if not file.exists():
        code = "import pathlib, sys, other_readers; other_readers.convert(*map(pathlib.Path, sys.argv[1:]))"
        interpreter, program = converter
        command = [interpreter, "-W", "ignore", "-c", code, str(original), program, str(file)]
        subprocess.run(command, check=True, cwd=PROGRAM.parent, capture_output=True)
    return file


def cases(folder: Path, converter: Sequence[str], only: Sequence[str]) -> Iterator[Case | tuple[int, str, str, str]]:
    """Every export, made where it is missing; in place of those that are refused, why."""
    for number, row in enumerate(ROWS):
        for format in row.formats:
            for family in FAMILIES[format]:
                if (
                    (only and format not in only)
                    or (format == "gguf" and not all(converter))
                    or (row is ROWS[-1] and not family.startswith("gemma"))
                ):
                    continue
                source = source_of(folder, family, format == "gguf", converter)
                model = load_checkpoint(str(source), device="cpu").model
                depth = model.config.num_hidden_layers
                plan = plan_of(model, depth, row.spread, 0, row.blocks or (depth - 1, depth), row.granularity)
                target = folder / f"{number}-{family}-{format}{'.gguf' * (format == 'gguf')}"
                try:
                    if not target.exists():
                        write_unread(plan, model, format, target)
                except FulldepthError as error:
                    yield number, family, format, str(error)
                    continue
                yield Case(number, family, format, target, *definition(model, plan))


def write_unread(plan: Plan, model: PreTrainedModel, format: str, target: Path) -> None:
    """Export without the check in a fresh process: the readers check it."""
    allowed: dict[str, Any] = {"by_list": True} if format == "layer" else {}
    with patch.object(exporting, "prove", return_value=0.0):
        export(plan, model, format, target, **allowed)


def definition(model: PreTrainedModel, plan: Plan) -> tuple[Tensor, Tensor]:
    """[B, T] tokens, and the logits of the plan's definition after them."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, model.config.vocab_size, (2, LENGTH), generator=generator)
    with torch.no_grad():
        return ids, scaled_logits(find_anatomy(model), plan, ids)


def read_all(cases: Sequence[Case], name: str, interpreter: str, further: Sequence[str]) -> list[dict[str, Any]]:
    """What a reader computes from every case, in one process: most of the time goes into starting it."""
    outcomes = []
    with tempfile.TemporaryDirectory() as place, Path(place, "errors").open("w+", encoding="utf-8") as errors:
        jobs = []
        for number, case in enumerate(cases):
            files = [str(Path(place) / f"{number}.{kind}.pt") for kind in ("ids", "logits")]
            torch.save(case.ids, files[0])
            jobs.append([str(case.path.absolute()), *files, *further])
        listed = Path(place, "jobs.json")
        listed.write_text(json.dumps(jobs), encoding="utf-8")
        command = [interpreter, "-W", "ignore", "-P", str(PROGRAM), name, "logits", str(listed)]
        environment = os.environ | {"HF_MODULES_CACHE": str(Path(place) / "modules"), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
            lines = (line for line in process.stdout or () if line.startswith("{"))
            for line in lines:
                outcome = json.loads(line)
                number = outcome.pop("job")
                case = cases[number]
                outcome |= {"row": case.row, "family": case.family, "format": case.format}
                if "failed" not in outcome:
                    logits = torch.load(jobs[number][2], weights_only=True)
                    after = case.expected[:, -1].log_softmax(-1)
                    outcome["error"] = relative_error(logits, after if logits.ndim == 2 else case.expected)
                outcomes.append(outcome)
                print(
                    name, *(outcome.get(key) for key in ("row", "family", "format", "error", "cache_error", "failed"))
                )
        if process.returncode:
            errors.seek(0)
            print(f"{name} ended early: {errors.read()[-1000:]}")
    return outcomes


def real_cases(folder: Path, model: str, name: str) -> list[Case]:
    """The exports of a GGUF file that a reader runs, with real weights."""
    formats = {"llama.cpp": ("gguf",), "stock": ("layer",), "carried": ("fast",)}
    formats |= dict.fromkeys(("mlx", "vllm"), ("decilm", "layer"))
    loaded = load_checkpoint(model, device="cpu").model.float()
    original = folder / REAL
    if not original.exists():
        loaded.save_pretrained(original)
    found = []
    for number, row in enumerate(ROWS):
        for format in (format for format in row.formats if format in formats[name] and row.removed):
            target = folder / f"{REAL}-{number}-{format}{'.gguf' * (format == 'gguf')}"
            plan = plan_of(loaded, loaded.config.num_hidden_layers, 0.0, 0, row.removed, row.granularity)
            if not target.exists():
                write_unread(plan, loaded, format, target)
            ids, expected = definition(loaded, plan)
            found.append(Case(number, REAL, format, target, ids, expected))
    return found


def ratio(paths: Sequence[Path], name: str, interpreter: str, further: Sequence[str]) -> dict[str, float]:
    """Decode speed of the second model over that of the first, and half the range of the middle half of the rounds."""
    with ExitStack() as stack, tempfile.TemporaryFile("w+") as errors:
        modules = stack.enter_context(tempfile.TemporaryDirectory())
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": modules}
        processes = []
        for path in paths:
            command = [interpreter, "-W", "ignore", "-P", str(PROGRAM), name, "speed", str(path.absolute()), *further]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            process = stack.enter_context(subprocess.Popen(command, env=environment, text=True, **pipes))
            processes.append(process)
        for process in processes:
            wait(process)

        def seconds(process: Any, count: int) -> float:
            before = processor_seconds(process.pid)
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
            wait(process)
            return processor_seconds(process.pid) - before

        tokens = TOKENS.get(name, 32)
        ratios = []
        for turn in range(ROUNDS + 1):
            order = processes if turn % 2 else processes[::-1]
            decoding = [seconds(process, tokens + 1) - seconds(process, 1) for process in order]
            before, after = decoding if turn % 2 else decoding[::-1]
            ratios.append(before / after)
        for process in processes:
            process.stdin.close()
    low, middle, high = statistics.quantiles(ratios[1:], n=4)  # the first round warms up
    return {"speed": middle, "spread": (high - low) / 2}


def processor_seconds(pid: int) -> float:
    """Processor seconds of a process and those that it started."""
    process = psutil.Process(pid)
    times = (one.cpu_times() for one in (process, *process.children(recursive=True)))
    return sum(taken.user + taken.system for taken in times)


def wait(process: Any) -> None:
    """Wait until a process prints a line of JSON."""
    if not any(line.startswith("{") for line in process.stdout):
        raise SystemExit(f"{process.args} ended")


def table(outcomes: dict[str, Any], refused: Sequence[Sequence[Any]]) -> Iterator[str]:
    """The lines of the Markdown table: a row for each kind of removal, a column for each reader."""
    names = {"stock": "transformers", "carried": "transformers, the folder's code", "mlx": "mlx-lm", "vllm": "vLLM"}
    readers = list(outcomes)
    titles = [f"{names.get(name, name)} {outcomes[name]['version']}" for name in readers]
    yield f"| removed | {' | '.join(titles)} |"
    yield f"|---|{'---|' * len(readers)}"
    for number, row in enumerate(ROWS):
        cells = [row.name]
        for name in readers:
            parts = []
            for format in row.formats:
                found = [o for o in outcomes[name]["logits"] if (o["row"], o["format"]) == (number, format)]
                unwritten = sorted({family for n, family, kind, _ in refused if (n, kind) == (number, format)})
                said = [described(found)] if found else []
                if unwritten and (found or format != "gguf" or name == "llama.cpp"):
                    said.append(f"no export ({', '.join(unwritten)})")
                for speed in outcomes[name].get("speed", ()):
                    if (speed["row"], speed["format"]) == (number, format):
                        said.append(f"**{speed['speed']:.2f}×** ± {speed['spread']:.2f}")
                if said:
                    parts.append(f"`{format}`: {', '.join(said)}")
            cells.append("<br>".join(parts) or "no format")
        yield f"| {' | '.join(cells)} |"
    for format, families in FAMILIES.items():
        yield f"`{format}`: {', '.join(families)}"


def described(found: Sequence[dict[str, Any]]) -> str:
    """What a reader made of the exports in one format: range of errors, which are wrong, and which are refused."""
    allowed = {("gguf", REAL): 2 * WRONG}
    right, wrong, failed = [], [], []
    errors = []
    for outcome in found:
        family = outcome["family"]
        if "failed" in outcome:
            failed.append(family)
            continue
        error = max(outcome["error"], outcome["cache_error"])
        if error > allowed.get((outcome["format"], family), WRONG):
            wrong.append(family)
        else:
            right.append(family)
            errors.append(error)
    named = len(right) < len(found)
    parts = []
    if right:
        low, high = (f"{error:.0e}".replace("e-0", "e-") for error in (min(errors), max(errors)))
        parts.append(f"{low} to {high}" + f" ({', '.join(right)})" * named)
    if wrong:
        parts.append(f"**another model** ({', '.join(wrong)})")
    if failed:
        parts.append("refused" + f" ({', '.join(failed)})" * bool(right or wrong))
    return ", ".join(parts)


def main() -> None:
    """Read every export with every reader, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reader", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--converter", help="absolute path of llama.cpp's convert_hf_to_gguf.py")
    parser.add_argument("--only", default="", help="formats, with commas")
    parser.add_argument("--speed", metavar="MODEL", help="a GGUF file with 30 layers")
    args = parser.parse_args()
    interpreters = dict(reader.split("=", 1) for reader in args.reader)
    stored = args.folder / "outcomes.json"
    args.folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {"readers": {}, "refused": []}
    if any(name not in outcomes["readers"] for name in interpreters):
        converter = (interpreters.get("llama.cpp", ""), args.converter or "")
        found = list(cases(args.folder, converter, [name for name in args.only.split(",") if name]))
        exports = [case for case in found if isinstance(case, Case)]
        outcomes["refused"] = [case for case in found if not isinstance(case, Case)]
    for name, interpreter in interpreters.items():
        further = [args.converter] if name == "llama.cpp" else []
        if name not in outcomes["readers"]:
            readable = [case for case in exports if (case.format != "gguf") or name == "llama.cpp"]
            logits = read_all(readable, name, interpreter, further)
            outcomes["readers"][name] = {"version": logits[0]["version"], "logits": logits}
            stored.write_text(json.dumps(outcomes, indent=1))
        if args.speed and "speed" not in outcomes["readers"][name]:
            real = real_cases(args.folder, args.speed, name)
            outcomes["readers"][name]["logits"] += read_all(real, name, interpreter, further)
            original = Path(args.speed) if name == "llama.cpp" else args.folder / REAL
            measured = []
            for case in real:
                found = ratio((original, case.path), name, interpreter, further)
                measured.append({"row": case.row, "format": case.format} | found)
                print(name, measured[-1], flush=True)
            outcomes["readers"][name]["speed"] = measured
            stored.write_text(json.dumps(outcomes, indent=1))
    print("\n".join(table(outcomes["readers"], outcomes["refused"])))


if __name__ == "__main__":
    main()
