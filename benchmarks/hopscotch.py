"""Removing attention blocks from a real model: every way of choosing them, read on rows that none of them saw.

    python benchmarks/hopscotch.py FOLDER MODEL --gsm8k FOLDER_OF_GSM8K --stages prepare,curve,methods
    python benchmarks/hopscotch.py FOLDER MODEL --gsm8k FOLDER_OF_GSM8K --stages wikitext --wikitext valid.txt
    python benchmarks/hopscotch.py FOLDER MODEL --gsm8k FOLDER_OF_GSM8K --stages healed --plan FOLDER/heal

`prepare` writes GSM8K as pairs (`choose.jsonl`, `read.jsonl`: question and answer), 64 short prompts and 32 short pairs
for `fulldepth skip search` (`prompts.jsonl`, `answers.jsonl`), and task files for lm-eval (`--lm-eval FOLDER`); `curve`
removes up to 12 blocks greedily, on GSM8K's answers; `methods` compares every search for 4 and 8 blocks over three
seeds of the choosing rows; `wikitext` is the curve on text. Blocks are chosen on 16 rows, and losses are read on 40
others (written to `heldout.jsonl`): of GSM8K's train.jsonl and test.jsonl, of the two halves of the text. Only `healed`
has scalars: those of a plan of `fulldepth skip search --data FOLDER/own/responses.jsonl` (`--heldout` as there), and by
the same options those of the control and of the first 8 blocks. `--rows` changes the number of rows to choose with.
Everything measured is kept in FOLDER, so an interrupted run continues; tables are printed at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from fulldepth.core.distributed import processes
from fulldepth.hf import Scalars, Switches, anatomy_candidates, load_checkpoint, load_tokenizer
from fulldepth.settings.search import SearchSettings
from fulldepth.skip import Example, Examples, Plan, batches, fit_scales, read_examples, search
from fulldepth.skip.curve import find_breakpoint
from fulldepth.skip.goal import count_goal
from fulldepth.skip.loss_cache import LossCache
from fulldepth.skip.problem import prepared
from fulldepth.skip.rankings import rank_blocks

CHOOSE, READ, LONGEST, BATCH = 16, 40, 160, 4
SEARCHES = ("greedy", "one-shot", "cosine", "taylor", "last", "random")
CURVE = 12
OWN, ANSWERS = 64, 32
"""Short prompts that the model answers itself, and short rows with the answers of GSM8K, for `skip search`."""
QUESTIONS = {"arc_easy": "arc_easy_test", "arc_challenge": "arc_challenge_test"}


class Store:
    """Values by key in one JSON file, written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """The value of a key, made if it is not there."""
        if key not in self.values:
            start = time.perf_counter()
            self.values[key] = make()
            self.path.write_text(json.dumps(self.values))
            print(f"{key} ({time.perf_counter() - start:.0f} s)", flush=True)
        return self.values[key]


def prepare(folder: Path, gsm8k: Path, lm_eval: Path | None) -> None:
    """Write GSM8K as pairs, and lm-eval's task files beside local data."""
    folder.mkdir(parents=True, exist_ok=True)
    for source, target in (("train", "choose"), ("test", "read")):
        rows = map(json.loads, (gsm8k / f"{source}.jsonl").read_text(encoding="utf-8").splitlines())
        _write(folder / f"{target}.jsonl", [{"prompt": row["question"], "response": row["answer"]} for row in rows])
    lines = (folder / "choose.jsonl").read_text(encoding="utf-8").splitlines()
    short = [pair for pair in map(json.loads, lines) if len(pair["prompt"]) <= 200 and len(pair["response"]) <= 220]
    _write(folder / "prompts.jsonl", [{"prompt": pair["prompt"]} for pair in short[:OWN]])
    _write(folder / "answers.jsonl", short[OWN : OWN + ANSWERS])
    if lm_eval is None:
        return
    for task, file in QUESTIONS.items():
        choices = 'doc_to_text: "Question: {{question}}\\nAnswer:"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: gold\n'
        _task(folder, task, lm_eval / f"{file}.jsonl", choices)
    goal = 'doc_to_text: "Question: {{goal}}\\nAnswer:"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: gold\n'
    _task(folder, "piqa", lm_eval / "piqa_valid.jsonl", goal)
    ending = 'doc_to_text: "{{context}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: gold\n'
    _task(folder, "hellaswag", lm_eval / "hellaswag_val.jsonl", ending)


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _task(folder: Path, name: str, data: Path, questions: str) -> None:
    (folder / f"{name}.yaml").write_text(
        f"task: local_{name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data.resolve()}\n"
        f"test_split: test\noutput_type: multiple_choice\n{questions}"
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )


def sample(data: str, tokenizer: Any, seed: int, rows: int) -> list[Example]:
    """Seeded rows of at most `LONGEST` tokens; of text, windows of that length."""
    found = read_examples(data, tokenizer, None, sequence_length=None if data.endswith(".jsonl") else LONGEST)
    every = [example for example in (*found.train, *found.heldout) if len(example) <= LONGEST]
    return [every[index] for index in np.random.default_rng(seed).permutation(len(every))[:rows]]


@torch.inference_mode()
def read(
    model: PreTrainedModel, rows: Sequence[Example], skipped: Sequence[int], scalars: Any = None
) -> dict[str, list[float]]:
    """Summed loss and predicted tokens of every row, by a stock forward pass without these blocks."""
    sums: list[float] = []
    counts: list[float] = []
    with Switches(anatomy_candidates(model)[0]) as switches:
        switches.skip(skipped)
        if scalars is not None:
            switches.scalars = Scalars.from_dict(scalars, anatomy_candidates(model)[0].num_layers)
        for batch in batches(rows, BATCH):
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            labels = batch["labels"][:, 1:]
            for scores, label in zip(logits, labels, strict=True):
                counted = label != -100
                sums.append(float(functional.cross_entropy(scores[counted].float(), label[counted], reduction="sum")))
                counts.append(float(counted.sum()))
    return {"sums": sums, "counts": counts}


def added(base: dict[str, list[float]], other: dict[str, list[float]]) -> tuple[float, float]:
    """Nats a token added, and its standard error over rows (of a ratio of sums)."""
    counts = np.array(base["counts"])
    differences = np.array(other["sums"]) - np.array(base["sums"])
    value = differences.sum() / counts.sum()
    residuals = differences - value * counts
    rows = len(counts)
    return float(value), float(np.sqrt(rows / (rows - 1) * (residuals**2).sum()) / counts.sum())


class Subject:
    """A model with what was measured on it."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.tokenizer = load_tokenizer(name)
        self.model = load_checkpoint(name, device="cpu", dtype=dtype).model.eval()
        self.plans, self.losses = Store(folder / "plans.json"), Store(folder / "losses.json")
        self.rows = CHOOSE

    def plan(self, data: str, kind: str, search_by: str, seed: int, blocks: int) -> dict[str, Any]:
        """Blocks in the order of removal, chosen on the rows of a seed; a longer plan's beginning is the same."""
        fewer = "" if self.rows == CHOOSE else f" rows {self.rows}"
        for more in range(blocks, CURVE + 1):
            if found := self.plans.values.get(f"{kind} {search_by} {more} seed {seed}{fewer}"):
                return found | {"blocks": found["blocks"][:blocks], "losses": found["losses"][: blocks + 1]}

        def make() -> dict[str, Any]:
            rows = sample(data, self.tokenizer, seed, self.rows if search_by not in ("last", "random") else 1)
            chosen = Examples([], rows, {"hash": f"sha256:{'0' * 64}", "name": data})
            if search_by != "greedy":
                return {"blocks": self.ranking(chosen, search_by, seed, blocks), "losses": []}
            plan = search(self.model, chosen, blocks, search=search_by, fit=False, seed=seed, batch_size=BATCH)
            return {"blocks": plan.blocks, "losses": plan.losses, "cost": plan.cost}

        return self.plans.get(f"{kind} {search_by} {blocks} seed {seed}{fewer}", make)  # type: ignore[no-any-return]

    def ranking(self, chosen: Examples, search_by: str, seed: int, blocks: int) -> list[int]:
        """The blocks of a search that ranks once, without the losses that `search` adds for its plan."""
        settings = SearchSettings(blocks=blocks, search=search_by, fit=False, seed=seed, batch_size=BATCH)
        with processes() as process, prepared(self.model, chosen, settings, process) as problem:
            loss_cache = LossCache(problem.scorer, problem.chunks, process, criterion=settings.criterion)
            picks = rank_blocks(loss_cache, search_by, count_goal(loss_cache.costs, blocks), seed=seed)
            return [layer for pick in picks for layer, _ in pick]

    def loss(self, kind: str, rows: Sequence[Example], skipped: Sequence[int]) -> dict[str, list[float]]:
        """Losses of every reading row without these blocks."""
        key = f"{kind} " + ",".join(map(str, sorted(skipped)))
        return self.losses.get(key, lambda: read(self.model, rows, skipped))  # type: ignore[no-any-return]


def curve(subject: Subject, kind: str, choose: str, rows: Sequence[Example], most: int) -> str:
    """A table of the loss added by 1 to `most` blocks."""
    plan = subject.plan(choose, kind, "greedy", 0, most)
    read_losses = [subject.loss(kind, rows, plan["blocks"][:number]) for number in range(most + 1)]
    base = read_losses[0]
    lines = [
        f"{kind}: {sum(base['sums']) / sum(base['counts']):.4f} nats a token with nothing removed\n",
        "| k | layer | on the choosing rows | on others |",
        "|---|---|---|---|",
    ]
    for number in range(1, most + 1):
        value, error = added(base, read_losses[number])
        on_choosing = plan["losses"][number] - plan["losses"][0]
        lines.append(f"| {number} | {plan['blocks'][number - 1]} | {on_choosing:+.3f} | {value:+.3f} ± {error:.3f} |")
    sums = np.array([losses["sums"] for losses in read_losses])
    found = find_breakpoint((sums / np.array(base["counts"])).T, np.array(base["counts"]))
    return "\n".join([*lines, "", json.dumps(asdict(found))])


def methods(
    subject: Subject,
    choose: str,
    rows: Sequence[Example],
    sizes: Sequence[int],
    seeds: Sequence[int],
    searches: Sequence[str],
) -> str:
    """A table of the searches: mean over seeds and standard deviation, standard error over rows in brackets."""
    found: dict[tuple[str, int, int], tuple[float, float]] = {}
    for seed in seeds:
        for name in searches:
            for size in sorted(sizes, reverse=True):
                without = subject.loss("gsm8k", rows, subject.plan(choose, "gsm8k", name, seed, size)["blocks"])
                found[name, seed, size] = added(subject.loss("gsm8k", rows, ()), without)
    table = ["| search | " + " | ".join(f"k = {size}" for size in sizes) + " |", "|---|" + "---|" * len(sizes)]
    for name in searches:
        cells = []
        for size in sizes:
            values = [found[name, seed, size] for seed in seeds]
            spread = f" ± {stdev(value for value, _ in values):.3f}" if len(values) > 1 else ""
            cells.append(f"{mean(value for value, _ in values):+.3f}{spread} ({max(error for _, error in values):.3f})")
        table.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(table)


def healed(
    subject: Subject, folder: Path, rows: Sequence[Example], plan: Plan, sizes: Sequence[int], heldout: Path | None
) -> str:
    """A table of the loss without and with scalars, of no block and of the first of the curve's."""
    settings = plan.cost["settings"]
    assert isinstance(settings, dict)
    options = {name: settings[name] for name in ("learning_rate", "epochs", "patience", "seed")}
    answers = None if heldout is None else str(heldout)
    examples = read_examples(str(folder / "own" / "responses.jsonl"), subject.tokenizer, None, heldout=answers)
    if examples.meta["hash"] != plan.data["hash"]:
        raise SystemExit("The plan was fitted on other rows; give its --heldout.")
    blocks = subject.plans.values[f"gsm8k greedy {CURVE} seed 0"]["blocks"]
    if plan.blocks != blocks[: len(plan.blocks)]:
        print(f"the plan removes {plan.blocks}, the curve {blocks[: len(plan.blocks)]}")
    base = subject.loss("gsm8k", rows, ())
    table = ["| blocks removed | without scalars | with scalars | difference |", "|---|---|---|---|"]
    for size in sizes:
        removed = plan.blocks if size == len(plan.blocks) else blocks[:size]

        def fitted(removed: Sequence[int] = removed) -> dict[str, Any]:
            batch = settings["fit_batch_size"]
            fit = fit_scales(subject.model, removed, examples.train, examples.heldout, batch_size=batch, **options)
            return {"scalars": fit.scalars.as_dict(), "losses": fit.losses, "epoch": fit.epoch}

        key = f"scalars {','.join(map(str, removed))}"
        own = size == len(plan.blocks)
        scalars = plan.scalars if own else subject.plans.get(key, fitted)["scalars"]
        without = subject.loss("gsm8k", rows, removed)
        with_scalars = subject.losses.get(
            f"gsm8k healed {key}", lambda s=scalars, r=removed: read(subject.model, rows, r, s)
        )
        cells = [
            "{:+.3f} ± {:.3f}".format(*added(base, without)),
            "{:+.3f} ± {:.3f}".format(*added(base, with_scalars)),
            "{:+.3f} ± {:.3f}".format(*added(without, with_scalars)),
        ]
        table.append(f"| {', '.join(map(str, removed)) or 'none (the control)'} | {' | '.join(cells)} |")
    return "\n".join(table)


def main() -> None:
    """Run the stages asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--lm-eval", type=Path)
    parser.add_argument("--wikitext", type=Path)
    parser.add_argument("--stages", default="prepare,curve,methods")
    parser.add_argument("--dtype", default="float32", help="bfloat16 takes a third of the time on a CPU that has it")
    parser.add_argument("--sizes", default="4,8", help="numbers of blocks that methods are compared for")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--searches", default=",".join(SEARCHES))
    parser.add_argument("--most", type=int, default=CURVE, help="most blocks of a curve")
    parser.add_argument("--plan", type=Path, help="folder of a plan with scalars, for the stage healed")
    parser.add_argument("--heldout", type=Path, help="the held-out rows of that plan; a fifth of its data if not given")
    parser.add_argument("--rows", type=int, default=CHOOSE, help="rows that blocks are chosen on")
    args = parser.parse_args()
    stages = args.stages.split(",")
    if "prepare" in stages:
        prepare(args.folder, args.gsm8k, args.lm_eval)
    if stages == ["prepare"]:
        return
    subject = Subject(args.folder, args.model, args.dtype)
    subject.rows = args.rows
    choose = str(args.folder / "choose.jsonl")
    rows = sample(str(args.folder / "read.jsonl"), subject.tokenizer, 0, READ)
    lines = (args.folder / "read.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (args.folder / "heldout.jsonl").write_text("".join(lines[row.document] for row in rows), encoding="utf-8")
    if "curve" in stages:
        print(curve(subject, "gsm8k", choose, rows, args.most))
    if "methods" in stages:
        sizes, seeds = ([int(number) for number in given.split(",")] for given in (args.sizes, args.seeds))
        print(methods(subject, choose, rows, sizes, seeds, args.searches.split(",")))
    if "wikitext" in stages:
        text = args.wikitext.read_text(encoding="utf-8")
        halves = {"choose": text[: len(text) // 2], "read": text[len(text) // 2 :]}
        for name, half in halves.items():
            (args.folder / f"{name}.txt").write_text(half, encoding="utf-8")
        windows = sample(str(args.folder / "read.txt"), subject.tokenizer, 0, READ)
        print(curve(subject, "wikitext", str(args.folder / "choose.txt"), windows, args.most))
    if "healed" in stages:
        print(
            healed(
                subject, args.folder, rows, Plan.load(args.plan), [0, *map(int, args.sizes.split(","))], args.heldout
            )
        )


if __name__ == "__main__":
    main()
