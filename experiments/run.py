"""Trains and measures the models behind docs/claims.md: every arm with every seed, one JSON line for each finished run.

    python experiments/run.py small --arms all --seeds 0,1,2,3,4 --data novels/ --output runs/
    python experiments/run.py small --arms llama,jreg --seeds 0 --device cuda --budget-seconds 500 --output runs/
    python experiments/run.py smoke --output runs/                        # the built-in corpus, seconds a run

DATA is a folder of `.txt` novels, of which the thirteen shortest are held out. The same command goes on where it was
stopped, by Ctrl-C, a kill or its budget; `OUTPUT/POOL.jsonl` holds what is finished, for `experiments/verdicts.py`, and
`OUTPUT/work` the trained models: a run whose line is removed is measured again, not trained.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

import torch

import fulldepth
from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.errors import StoppedError
from fulldepth.exit import Decoder, sweep
from fulldepth.hf import load_checkpoint, load_tokenizer
from fulldepth.settings import assignments, layer, merge, read
from fulldepth.settings.train import TrainSettings
from fulldepth.skip import search

DESIGN: dict[str, Any] = read(Path(__file__).with_name("pools.yaml"), "train")
POOLS, ARMS, MEASURES = (DESIGN[name] for name in ("pools", "arms", "measures"))


def settings_of(pool: str, arm: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `fulldepth.train` for an arm, without seed, device and places."""
    settings = merge(merge(DESIGN["common"] | POOLS[pool], changes), ARMS[arm])
    if arm == "quarter":
        settings |= {"steps": 4 * settings["steps"], "global_batch_size": settings["global_batch_size"] // 4}
    if arm == "tree-cr":  # the paper's share of steps with the energy penalty
        settings["objective"] = {**settings["objective"], "energy_warmup": round(0.04 * settings["steps"])}
    return settings | {"eval_every": settings["steps"] // 4, "save_every": max(1, settings["steps"] // 8)}


def prepare(pool: str, source: str, home: Path) -> Path:
    """The folder of the pool's data: `train`, `heldout` (ten novels) and `choosing` (three), and `tokenizer`."""
    folder = home / "data" / pool.partition("-")[0]
    if folder.exists():
        return folder
    if pool.startswith("smoke"):
        texts, held_out = ([text[:200_000] for text in builtin_texts(part)] for part in ("train", "heldout"))
        size = len(held_out[0]) // 11
        pieces = [held_out[0][start : start + size] for start in range(0, 11 * size, size)]
        held_out, choosing = pieces[:8], pieces[8:]
    else:
        texts = sorted((path.read_text("utf-8") for path in Path(source).glob("*.txt")), key=len)
        if len(texts) < 20:
            raise SystemExit(f"--data {source or '(none)'} holds {len(texts)} .txt files; expected 20 novels or more.")
        held_out, choosing, texts = texts[:10], texts[10:13], texts[13:]
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for name, documents in {"train": texts, "heldout": held_out, "choosing": choosing}.items():
        (part / name).mkdir(parents=True)
        for number, text in enumerate(documents):
            (part / name / f"{number:02}.txt").write_text(text, "utf-8")
    train_tokenizer(texts, DESIGN["vocabulary"][folder.name]).save_pretrained(part / "tokenizer")
    return part.rename(folder)


def sealed(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line with the hash of its other entries."""
    content = {name: value for name, value in line.items() if name != "sha256"}
    return content | {"sha256": hash_of(content)}


def hash_of(value: Any) -> str:
    """SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The finished runs in a file; none if there is no file.

    Raises:
        SystemExit: with the number of a line that is damaged or was edited.
    """
    lines = []
    for number, text in enumerate(path.read_text("utf-8").splitlines() if path.exists() else (), start=1):
        try:
            line = json.loads(text)
            whole = line == sealed(line)
        except (ValueError, AttributeError):
            whole = False
        if not whole:
            raise SystemExit(
                f"{path}, line {number}: damaged or edited, its hash does not fit. Remove it and run again."
            )
        lines.append(line)
    return lines


@dataclass(frozen=True)
class Subject:
    """A trained model, and how it is measured."""

    arm: str
    model: Any
    tokenizer: Any
    data: Path
    common: dict[str, Any]
    """Sequence length, number of windows, device."""

    def options(self, part: str = "heldout") -> dict[str, Any]:
        """Arguments of a command that measures this model on a part of the data."""
        return {"tokenizer": self.tokenizer, "progress": False, **self.common, "data": str(self.data / part)}


def measured(subject: Subject) -> dict[str, Any]:
    """Numbers by layer (those of states and the lens from layer 0 on), jump rates and depths."""
    names = sorted({measure for measure, _, _ in MEASURES.values()} | {"jump_rate", "effective_depth", "saturation"})
    results = fulldepth.measure(subject.model, measures=names, lens_tokens=None, **subject.options())
    table, depth = results.table, results.meta["model"]["num_layers"]
    numbers: dict[str, Any] = {}
    for name, (measure, site, statistic) in MEASURES.items():
        rows = table[(table.measure == measure) & (table.site == site) & (table.statistic == statistic)]
        rows = rows[rows.other.isna() | (rows.other == depth)].sort_values("layer")
        numbers[name] = [None if math.isnan(value) else value for value in rows.value.tolist()]
    losses = numbers["lens_loss"]
    numbers["near_final"] = next(layer for layer, loss in enumerate(losses) if loss <= 1.05 * losses[-1])
    for name in ("effective_depth", "median_saturation"):
        numbers[name] = results.headline.get(name, {}).get("value")
    jumps = table[(table.measure == "jump_rate") & (table.statistic == "value")].set_index("layer").value
    return numbers | {f"zeta_{back}": float(jumps[depth - back]) for back in range(3)}


def pruned(subject: Subject) -> dict[str, Any]:
    """Nats that pruning the routers of LIME adds; the model stays pruned."""
    if subject.arm != "lime":
        return {}
    losses = []
    for share in (1.0, 0.9):
        subject.model.prune_routers(p=share)
        results = fulldepth.measure(subject.model, measures=["lens_loss"], lens_tokens=None, **subject.options())
        losses.append(results.values("lens_loss", "mean").iloc[-1])
    return {"pruning_added": float(losses[1] - losses[0])}


def left_early(subject: Subject) -> dict[str, Any]:
    """Early exit at a loss of accuracy of 1 %: share of tokens that leave before the last layer, layers saved."""
    options = {"target_accuracy_drop": 0.01, "repeats": 0, "prompts": 0, "lens_tokens": None}
    results = sweep(subject.model, **options, **subject.options())
    [chosen] = [entry for entry in results.meta["exits"] if entry["calibrated"] and entry["split"] == "report"]
    leaving = 1 - chosen["exits"][-1] / chosen["samples"]
    return {"exit_share": leaving, "exit_speedup": chosen["theoretical_speedup"], "exit_drop": chosen["drop"]}


def removed(subject: Subject, part: str, method: str = "greedy") -> dict[str, Any]:
    """Nats that removing three attention blocks or layers adds; they are chosen on other documents."""

    def searched(data: str, **options: Any) -> Any:
        chosen = subject.options(data)
        chosen["heldout"] = chosen.pop("data")
        return search(subject.model, None, granularity=part, fit=False, **options, **chosen)

    plan = searched("choosing", blocks=3, search=method)
    losses = searched("heldout", search="given", given=plan.blocks).losses
    return {f"removed_{part}" + ("" if method == "greedy" else f"_{method}"): losses[-1] - losses[0]}


def selected(subject: Subject) -> dict[str, Any]:
    """Nats that attention blocks add which other searches choose, for plain Llama alone."""
    methods = ("one-shot", "cosine", "random") if subject.arm == "llama" else ()
    return {name: value for method in methods for name, value in removed(subject, "attention", method).items()}


def speculated(subject: Subject) -> dict[str, Any]:
    """Drafts of the first four layers that the others accept, of four a round; share of texts equal to plain ones."""
    decoder, stats, same = Decoder(subject.model), [], []
    tokens = subject.common["sequence_length"] // 4
    for path in sorted((subject.data / "heldout").glob("*.txt")):
        text = path.read_text("utf-8")
        ids = torch.tensor([subject.tokenizer.encode(text[len(text) // 2 :][:1000])[:tokens]])
        ids = ids.to(subject.common["device"])
        plain = decoder.generate(ids, max_new_tokens=tokens // 2)
        drafted = decoder.generate(ids, speculate_from=4, draft_length=4, max_new_tokens=tokens // 2)
        same.append(torch.equal(drafted.sequences, plain.sequences))
        stats.append(drafted.stats)
    accepted = sum(each.accepted for each in stats) / sum(each.rounds for each in stats)
    return {"accepted_a_round": accepted, "same_text": sum(same) / len(same)}


PROBES: dict[str, Callable[[Subject], dict[str, Any]]] = {
    "measure": measured,
    "exit": left_early,
    "attention": partial(removed, part="attention"),
    "layer": partial(removed, part="layer"),
    "selection": selected,
    "speculation": speculated,
    "pruning": pruned,
}


def execute(
    pool: str, arm: str, seed: int, settings: dict[str, Any], data: Path, home: Path, device: str
) -> dict[str, Any]:
    """Train one model and measure it; the line for the pool's file, without times of several runs at once."""
    folder = home / "work" / f"{pool}-{arm}-{seed}"
    places = {
        "name": data / "train",
        "validation": data / "heldout",
        "cache": home / "tokens",
        "validation_sequences": 64,
    }
    places = {name: value if isinstance(value, int) else str(value) for name, value in places.items()}
    started = time.monotonic()
    recipe = merge(settings, {"data": places, "tokenizer": str(data / "tokenizer"), "seed": seed, "device": device})
    results = fulldepth.train(layer(TrainSettings, recipe), folder, resume=True, progress=False)
    table, steps = results.table, settings["steps"]
    last = table[table.step == steps]
    numbers: dict[str, Any] = {
        "validation_loss": last[last.measure == "validation_loss"].value.item(),
        "train_loss": last[last.measure == "train_loss"].value.item(),
        "train_seconds": last[last.measure == "elapsed"].value.item(),
        "peak_mib": table[table.measure == "peak_memory"].value.max(),
    }
    early = table[(table.step == settings["eval_every"]) & (table.measure == "jump_rate")].sort_values("layer").value
    numbers |= {f"quarter_zeta_{back}": value for back, value in enumerate(early.tolist()[::-1])}
    numbers = {name: float(value) for name, value in numbers.items()}
    common = {
        "sequence_length": settings["sequence_length"],
        "max_sequences": DESIGN["windows"][pool],
        "device": device,
    }
    checkpoint = str(folder / f"checkpoint-{steps}")
    model, tokenizer = load_checkpoint(checkpoint, device=device).model, load_tokenizer(checkpoint)
    subject, refused = Subject(arm, model, tokenizer, data, common), {}
    for name in DESIGN["probes"].get(pool, PROBES):
        try:
            numbers |= PROBES[name](subject)
        except fulldepth.FulldepthError as error:
            refused[name] = str(error)
    facts = {"parameters": results.meta["model"]["parameters"], "data": results.meta["data"]["hash"]}
    return {
        **{
            "pool": pool,
            "arm": arm,
            "seed": seed,
            "settings": hash_of(settings),
            "versions": results.meta["versions"],
        },
        **{"device": torch.cuda.get_device_name() if device == "cuda" else device, **facts},
        **{"numbers": numbers, "refused": refused, "seconds": time.monotonic() - started},
    }


def work(orders: Any, answers: Any, threads: int) -> None:
    """A process that executes runs until it receives None."""
    torch.set_num_threads(threads)
    for order in iter(orders.get, None):
        try:
            answers.put((order[1:3], execute(*order)))
        except StoppedError:
            return
        except Exception as error:  # the other runs go on
            answers.put((order[1:3], f"{type(error).__name__}: {error}"))
        gc.collect()  # a Trainer holds itself
        torch.cuda.empty_cache()


@contextlib.contextmanager
def processes(number: int, device: str) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Queues of orders and answers, and the processes between them, which are ended: a training saves a checkpoint."""
    threads = 1 if device == "cpu" else max(1, (os.cpu_count() or 1) // number)
    os.environ |= {"OMP_NUM_THREADS": str(threads), "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    context = multiprocessing.get_context("spawn")
    orders, answers = context.Queue(), context.Queue()
    workers = [context.Process(target=work, args=(orders, answers, threads)) for _ in range(number)]
    for worker in workers:
        worker.start()
    try:
        yield orders, answers, workers
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join(20)
            worker.kill()


def main() -> None:
    """Run what is not finished yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pool", choices=["smoke", "small"])
    parser.add_argument("--arms", default="all", help="comma-separated: " + ", ".join(ARMS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--data", default=os.path.join(os.environ.get("FULLDEPTH_DATA", ""), "novels"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--budget-seconds", type=float, default=math.inf)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes of the pool's settings")
    asked = parser.parse_args()
    started, failed = time.monotonic(), []
    pool = f"{asked.pool}-cuda" if asked.device == "cuda" and f"{asked.pool}-cuda" in POOLS else asked.pool
    arms = list(ARMS) if asked.arms == "all" else asked.arms.split(",")
    if unknown := sorted(set(arms) - set(ARMS)):
        raise SystemExit(f"There is no arm {unknown[0]}; there are {', '.join(ARMS)}.")
    data = prepare(pool, asked.data, asked.output)
    settings = {arm: settings_of(pool, arm, assignments(asked.set)) for arm in arms}
    path = asked.output / f"{pool}.jsonl"
    finished = {(line["arm"], line["seed"]): line for line in read_lines(path)}
    for (arm, seed), line in finished.items():
        if arm in settings and line["settings"] != hash_of(settings[arm]):
            raise SystemExit(f"{path} holds {arm}, seed {seed}, with other settings. Choose another --output.")
    left = [(arm, int(seed)) for seed in asked.seeds.split(",") for arm in arms if (arm, int(seed)) not in finished]
    number = min(asked.processes or DESIGN["processes"][asked.device], max(1, len(left)))
    running: dict[tuple[str, int], float] = {}

    def expected(arm: str) -> float:
        """Seconds of a run of an arm, by the runs so far; 0 where nothing is known."""
        known = [line["seconds"] for (name, _), line in finished.items() if name == arm]
        known = known or [line["seconds"] for line in finished.values()]
        return sum(known) / len(known) if known else 0.0

    with processes(number, asked.device) as (orders, answers, workers):
        while left or running:
            remaining = asked.budget_seconds - (time.monotonic() - started)
            fitting = [job for job in left if expected(job[0]) < remaining]
            if len(running) < number and fitting:
                arm, seed = fitting[0]
                left.remove((arm, seed))
                running[arm, seed] = time.monotonic()
                orders.put((pool, arm, seed, settings[arm], data, asked.output, asked.device))
                continue
            if remaining <= 0 or not running or not any(worker.is_alive() for worker in workers):
                break
            try:
                job, line = answers.get(timeout=1)
            except Empty:
                continue
            del running[job]
            if isinstance(line, str):
                failed.append(f"{job[0]}, seed {job[1]}: {line}")
                print(f"FAILED {failed[-1]}", flush=True)
                continue
            finished[job] = line
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(sealed(line)) + "\n")
            unfinished = [*left, *running]
            eta = sum(expected(arm) for arm, _ in unfinished) / number
            loss, jump = line["numbers"]["validation_loss"], line["numbers"].get("zeta_0", math.nan)
            print(f"{job[0]}, seed {job[1]}: loss {loss:.3f}, zeta_L {jump:.2f} %, {line['seconds']:.0f} s", end="; ")
            print(f"{len(unfinished)} left, about {eta:.0f} s", flush=True)
    left += running
    print(f"{len(finished)} finished, {len(left)} left, {len(failed)} failed: {path}", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
