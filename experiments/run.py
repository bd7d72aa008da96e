"""Trains and measures the models behind docs/claims.md: every arm with every seed, one JSON line for each finished run.

    python experiments/run.py small --arms all --seeds 0,1,2,3,4 --data DATA --output runs/
    python experiments/run.py real --arms aligned,plain --seeds 0 --data DATA --output runs/
    python experiments/run.py real --timed --output runs/               # speeds of trained models
    python experiments/run.py small --arms llama,jreg --seeds 0 --device cuda --budget-seconds 500 --output runs/
    python experiments/run.py smoke --output runs/                        # the built-in corpus, seconds a run

DATA holds what the pool needs: `novels/*.txt` (the thirteen shortest are held out), `cifar10/cifar10_images.zip`,
`glue/sst2/*.tsv`. The same command goes on where it was stopped, by Ctrl-C, a kill or its budget; `OUTPUT/POOL.jsonl`
holds what is finished, for `experiments/verdicts.py`, and `OUTPUT/work` the trained models: a run whose line is removed
is measured again, not trained.
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
import runpy
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import torch

import fulldepth
from fulldepth.core.errors import StoppedError
from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.hf import load_checkpoint, load_tokenizer
from fulldepth.results import versions
from fulldepth.settings import assignments, layer, merge, read
from fulldepth.settings.train import TrainSettings
from probes import PROBES, Subject

DESIGN: dict[str, Any] = read(Path(__file__).with_name("pools.yaml"), "train")
POOLS: dict[str, dict[str, Any]] = DESIGN["pools"]


def arms_of(pool: str) -> dict[str, dict[str, Any]]:
    """The arms of a pool: name -> changes of its settings."""
    return DESIGN["arms"][POOLS[pool]["arms"]]


def settings_of(pool: str, arm: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `fulldepth.train` for an arm, without seed, device and places."""
    recipe = POOLS[pool].get("recipe")
    settings = merge(read(recipe, "train") if recipe else {}, DESIGN["common"])
    for more in (POOLS[pool]["settings"], changes, arms_of(pool)[arm]):
        settings = merge(settings, more)
    steps = settings["steps"]
    if arm == "quarter":
        settings |= {"steps": 4 * steps, "global_batch_size": settings["global_batch_size"] // 4}
    if arm == "tree-cr":  # the paper's share of steps with the energy penalty
        settings["objective"] = {**settings["objective"], "energy_warmup": round(0.04 * steps)}
    for name in ("about", "source", "data"):
        settings.pop(name, None)
    steps = settings["steps"]
    return settings | {"eval_every": steps // 4, "save_every": max(1, steps // 8)}


def prepare(pool: str, source: Path, home: Path) -> dict[str, str]:
    """Places of the pool's data: `train` and `heldout`; of texts also `choosing` and, for a model from scratch,
    `tokenizer`.

    Raises:
        SystemExit: if `source` lacks what the pool needs.
    """
    kind = POOLS[pool]["data"]
    if isinstance(kind, dict):
        places = {part: place if ":" in place else str(source / place) for part, place in kind.items()}
        for place in places.values():
            if ":" not in place and not Path(place).exists():
                raise SystemExit(f"There is no {place}; give its folder as --data.")
        return places
    vocabulary = POOLS[pool].get("vocabulary")
    folder = home / "data" / pool.partition("-")[0]
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        if kind == "cifar10":
            with zipfile.ZipFile(source / "cifar10" / "cifar10_images.zip") as archive:
                archive.extractall(part, [name for name in archive.namelist() if name.startswith(("train/", "test/"))])
        else:
            write_texts(texts_of(kind, source), part, vocabulary)
        part.rename(folder)
    if kind == "cifar10":
        return {"train": str(folder / "train"), "heldout": str(folder / "test")}
    return {place.name: str(place) for place in folder.iterdir()}


def texts_of(kind: str, source: Path) -> dict[str, list[str]]:
    """Documents of every part: of the novels, the ten shortest are held out, and the next three are to choose with."""
    if kind == "builtin":
        texts, held_out = ([text[:200_000] for text in builtin_texts(part)] for part in ("train", "heldout"))
        size = len(held_out[0]) // 11
        pieces = [held_out[0][start : start + size] for start in range(0, 11 * size, size)]
        return {"train": texts, "heldout": pieces[:8], "choosing": pieces[8:]}
    texts = sorted((path.read_text("utf-8") for path in (source / "novels").glob("*.txt")), key=len)
    if len(texts) < 20:
        raise SystemExit(f"{source / 'novels'} holds {len(texts)} .txt files; expected 20 novels or more.")
    return {"heldout": texts[:10], "choosing": texts[10:13], "train": texts[13:]}


def write_texts(parts: Mapping[str, list[str]], folder: Path, vocabulary: int | None) -> None:
    """Write the documents of every part, and a tokenizer that is trained on the first."""
    for name, documents in parts.items():
        (folder / name).mkdir()
        for number, text in enumerate(documents):
            (folder / name / f"{number:02}.txt").write_text(text, "utf-8")
    if vocabulary:
        train_tokenizer(parts["train"], vocabulary).save_pretrained(folder / "tokenizer")


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
class Order:
    """A run, and what is read of its model."""

    pool: str
    arm: str
    seed: int
    settings: dict[str, Any]
    data: dict[str, str]
    home: Path
    device: str
    probes: Sequence[str]

    @property
    def job(self) -> tuple[str, int]:
        """Arm and seed."""
        return self.arm, self.seed

    @property
    def folder(self) -> Path:
        """Checkpoints of the training, and readings of a run that is not finished."""
        return self.home / "work" / f"{self.pool}-{self.arm}-{self.seed}"

    @property
    def readings(self) -> Path:
        """What is read so far."""
        return self.folder / "readings.json"


def subject_of(order: Order, checkpoint: Path) -> Subject:
    """The trained model of a run."""
    pool = POOLS[order.pool]
    text = "choosing" in order.data
    length = {"sequence_length": order.settings["sequence_length"]} if text else {}
    labelled = order.settings.get("task") == "text-classification"
    return Subject(
        arm=order.arm,
        control=pool["control"],
        model=load_checkpoint(str(checkpoint), device=order.device).model if text else str(checkpoint),
        tokenizer=load_tokenizer(str(checkpoint)) if text or labelled else None,
        data=order.data,
        measures=DESIGN["measures"]["language" if text else "labelled"],
        common={"device": order.device, **length},
        sequences={"heldout": pool["windows"], "choosing": pool.get("choosing", pool["windows"])},
    )


def trained(order: Order) -> tuple[Path, dict[str, float], dict[str, Any]]:
    """Train a model, or find it trained: its checkpoint, numbers and facts of its training."""
    settings, data = order.settings, order.data
    text = "choosing" in data
    places: dict[str, Any] = {"name": data["train"], "validation": data["heldout"], "cache": str(order.home / "tokens")}
    if text:
        places["validation_sequences"] = 64
    if settings.get("task") == "text-classification":
        places["truncate"] = True
    changes: dict[str, Any] = {"data": places, "seed": order.seed, "device": order.device}
    if "tokenizer" in data:
        changes["tokenizer"] = data["tokenizer"]
    recipe = layer(TrainSettings, merge(settings, changes))
    results = fulldepth.train(recipe, order.folder, resume=True, progress=False)
    table = results.table
    steps = settings["steps"]
    last = table[table.step == steps]
    numbers: dict[str, Any] = {
        "validation_loss": last[last.measure == "validation_loss"].value.item(),
        "train_loss": last[last.measure == "train_loss"].value.item(),
        "train_seconds": last[last.measure == "elapsed"].value.item(),
        "peak_mib": table[table.measure == "peak_memory"].value.max(),
    }
    early = table[(table.step == settings["eval_every"]) & (table.measure == "jump_rate")].sort_values("layer").value
    numbers |= {f"quarter_zeta_{back}": value for back, value in enumerate(early.tolist()[::-1])}
    facts = {
        "versions": results.meta["versions"],
        "device": torch.cuda.get_device_name() if order.device == "cuda" else order.device,
        "parameters": results.meta["model"]["parameters"],
        "data": results.meta["data"]["hash"],
    }
    return order.folder / f"checkpoint-{steps}", {name: float(value) for name, value in numbers.items()}, facts


def stacked(order: Order, program: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers and facts of a network of plain modules, which an example trains and measures by itself."""
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / program))
    model = example["train"](order.arm == "residual", order.seed, order.settings["steps"])
    names = {"cosine": "cosine_to_last", "cka": "cka_to_last", "accuracy": "lens_accuracy"}
    numbers = {names[name]: values for name, values in example["measured"](model).items()}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return numbers, {"versions": versions(), "device": "cpu", "parameters": parameters, "data": "digits"}


def probed(order: Order, checkpoint: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Numbers of a trained model, and why a probe was refused. Each probe's are stored as it ends, so that a run that
    was killed goes on with the next.
    """
    subject = subject_of(order, checkpoint)
    state: dict[str, Any] = {
        "of": hash_of([order.settings, order.probes, versions()]),
        "done": [],
        "numbers": {},
        "refused": {},
        "chosen": [],
    }
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # a damaged file is made again
        stored = json.loads(order.readings.read_text("utf-8"))
        if stored["of"] == state["of"]:
            state = stored
    subject.chosen.update({(part, method): layers for part, method, layers in state["chosen"]})
    for name in order.probes:
        if name in state["done"]:
            continue
        try:
            state["numbers"] |= PROBES[name](subject)
        except StoppedError:
            raise
        except fulldepth.FulldepthError as error:
            state["refused"][name] = str(error)
        state["done"].append(name)
        state["chosen"] = [[*key, layers] for key, layers in subject.chosen.items()]
        part = order.readings.with_suffix(".part")
        part.write_text(json.dumps(state), "utf-8")
        part.replace(order.readings)
    return state["numbers"], state["refused"]


def execute(order: Order) -> dict[str, Any]:
    """Train one model and measure it; the line for the pool's file."""
    started = time.monotonic()
    refused: dict[str, str] = {}
    if program := POOLS[order.pool].get("program"):
        numbers, facts = stacked(order, program)
    else:
        checkpoint, numbers, facts = trained(order)
        readings, refused = probed(order, checkpoint)
        numbers |= readings
    run = {"pool": order.pool, "arm": order.arm, "seed": order.seed, "settings": hash_of(order.settings)}
    return {**run, **facts, "numbers": numbers, "refused": refused, "seconds": time.monotonic() - started}


def work(orders: Any, answers: Any, threads: int) -> None:
    """A process that executes runs until it receives None; it ends as by SIGTERM when the program that started it is
    gone.
    """

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # a training saves a checkpoint

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    for order in iter(orders.get, None):
        try:
            answers.put((order.job, execute(order)))
        except StoppedError:
            return
        except Exception as error:  # the other runs go on
            answers.put((order.job, f"{type(error).__name__}: {error}"))
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


def expected_seconds(arm: str, finished: Mapping[tuple[str, int], dict[str, Any]]) -> float:
    """Seconds of a run of an arm, by the runs so far; 0 where nothing is known."""
    own = [line["seconds"] for (name, _), line in finished.items() if name == arm]
    known = own or [line["seconds"] for line in finished.values()]
    return sum(known) / len(known) if known else 0.0


def run_all(
    left: list[Order], finished: dict[tuple[str, int], dict[str, Any]], path: Path, number: int, budget_seconds: float
) -> tuple[int, int]:
    """Execute the runs that are left, write a line for each and print what remains; how many are left, and failed."""
    started = time.monotonic()
    running: dict[tuple[str, int], Order] = {}
    failed = 0
    device = left[0].device if left else "cpu"
    with processes(min(number, len(left)), device) as (orders, answers, workers):
        while left or running:
            remaining = budget_seconds - (time.monotonic() - started)
            fitting = [order for order in left if expected_seconds(order.arm, finished) < remaining]
            if len(running) < len(workers) and fitting:
                order = fitting[0]
                left.remove(order)
                running[order.job] = order
                orders.put(order)
                continue
            if remaining <= 0 or not running or not all(worker.is_alive() for worker in workers):
                break  # of a process that was killed, the next call resumes the run
            try:
                job, line = answers.get(timeout=1)
            except Empty:
                continue
            order = running.pop(job)
            if isinstance(line, str):
                failed += 1
                print(f"FAILED {job[0]}, seed {job[1]}: {line}", flush=True)
                continue
            finished[job] = line
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(sealed(line)) + "\n")
            order.readings.unlink(missing_ok=True)
            unfinished = [*left, *running.values()]
            eta = sum(expected_seconds(order.arm, finished) for order in unfinished) / len(workers)
            known = {"validation_loss": "loss {:.3f}", "zeta_0": "zeta_L {:.2f} %"}
            shown = [form.format(line["numbers"][name]) for name, form in known.items() if name in line["numbers"]]
            parts = [f"{job[0]}, seed {job[1]}", *shown, f"{line['seconds']:.0f} s"]
            print(f"{', '.join(parts)}; {len(unfinished)} left, about {eta / 60:.0f} min", flush=True)
    return len(left) + len(running), failed


def main() -> None:
    """Run what is not finished yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pool", choices=[name for name in POOLS if not name.endswith("-cuda")])
    parser.add_argument("--arms", default="all", help="comma-separated names of experiments/pools.yaml")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FULLDEPTH_DATA", "data")))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--budget-seconds", type=float, default=math.inf)
    parser.add_argument("--timed", action="store_true", help="time the finished models; leave the machine alone")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes of the pool's settings")
    asked = parser.parse_args()
    pool = f"{asked.pool}-cuda" if asked.device == "cuda" and f"{asked.pool}-cuda" in POOLS else asked.pool
    arms = list(arms_of(pool)) if asked.arms == "all" else asked.arms.split(",")
    if unknown := sorted(set(arms) - set(arms_of(pool))):
        raise SystemExit(f"There is no arm {unknown[0]}; there are {', '.join(arms_of(pool))}.")
    asked.output.mkdir(parents=True, exist_ok=True)
    data = prepare(pool, asked.data, asked.output)
    settings = {arm: settings_of(pool, arm, assignments(asked.set)) for arm in arms_of(pool)}  # of stored arms, too
    path = asked.output / f"{pool}.jsonl"
    trained_already = finished_runs(path, settings)
    probes = POOLS[pool].get("probes") or DESIGN["probes"]["language" if "choosing" in data else "labelled"]
    finished = trained_already
    if asked.timed:
        probes = ["timed speculation", "timed exit"]
        path = asked.output / f"{pool}.timed.jsonl"
        finished = finished_runs(path, settings)
    jobs = [(arm, int(seed)) for seed in asked.seeds.split(",") for arm in arms]
    left = [
        Order(pool, arm, seed, settings[arm], data, asked.output, asked.device, probes)
        for arm, seed in jobs
        if (arm, seed) not in finished and (not asked.timed or (arm, seed) in trained_already)
    ]
    number = 1 if asked.timed else asked.processes or POOLS[pool].get("processes", 2)
    remaining, failed = run_all(left, finished, path, number, asked.budget_seconds)
    print(f"{len(finished)} finished, {remaining} left, {failed} failed: {path}", flush=True)
    raise SystemExit(1 if failed else 0)


def finished_runs(path: Path, settings: Mapping[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """The lines of a file by arm and seed.

    Raises:
        SystemExit: if a line is damaged, or an arm was run with other settings.
    """
    finished = {(line["arm"], line["seed"]): line for line in read_lines(path)}
    for (arm, seed), line in finished.items():
        if arm in settings and line["settings"] != hash_of(settings[arm]):
            raise SystemExit(f"{path} holds {arm}, seed {seed}, with other settings. Choose another --output.")
    return finished


if __name__ == "__main__":
    main()
