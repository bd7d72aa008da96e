"""The commands under test: their arguments, the files they read, and what they may change."""

from __future__ import annotations

from dataclasses import dataclass

from fuzz.world import CURVE, FAST, QUICK, SEARCH, SKIP, TASKS


@dataclass(frozen=True)
class Scenario:
    """One way to call the program."""

    argv: str
    inputs: str
    """Files and folders of the world that the case has; each is as likely to be mutated."""
    weight: float = 1.0
    grows: tuple[str, ...] = ()
    """Existing files (glob patterns) that the command may change, however it ends."""
    replaces: tuple[str, ...] = ()
    """Existing files that it may change if it succeeds."""
    writes: str = "results"
    """What a success leaves in the output folder: results, page, plan, checkpoint, run, nothing."""
    arguments: float = 0.15
    """Share of the mutations that change arguments rather than files."""


PAGE = ("*/report.html",)
TABLE = ("*/results.json", "*/results.parquet", "*/groups.parquet", "*/report.html")
RUN = (
    "run-part/checkpoint-4/*",
    "run-part/results.*",
    "run-part/report.html",
    "run-part/tokens/*",
    "run-part/settings.yaml",
    "*/lock",
)

MEASURE = {
    "measure text": Scenario(f"measure model --data data/text.txt --output new {FAST}", "model data/text.txt", 3),
    "measure jsonl": Scenario(f"measure model --data data/text.jsonl --output new {QUICK}", "data/text.jsonl", 2),
    "measure pairs": Scenario(f"measure model --data data/pairs.jsonl --output new {QUICK}", "data/pairs.jsonl"),
    "measure parquet": Scenario(f"measure model --data data/text.parquet --output new {QUICK}", "data/text.parquet", 2),
    "measure labels": Scenario(
        f"measure bert --data data/labelled.tsv --output new {FAST}", "bert data/labelled.tsv", 2
    ),
    "measure images": Scenario("measure vit --data data/images --output new", "vit data/images", 2),
    "measure shards": Scenario(f"measure sharded --data data/text.txt --output new {QUICK}", "sharded", 3),
    "measure recipe": Scenario(
        "measure model --data data/text.txt --output new --recipe recipes/measure.yaml", "recipes/measure.yaml", 2
    ),
    "measure reference": Scenario(
        f"measure model --data data/text.txt --output new --reference other {QUICK},mmd", "model other"
    ),
    "measure overwrite": Scenario(
        f"measure other --data data/text.txt --output out-a --overwrite {QUICK}",
        "other out-a data/text.txt",
        replaces=TABLE,
    ),
    "measure again": Scenario(
        f"measure model --data data/text.txt --output out-a {FAST}", "model out-a", replaces=PAGE
    ),
    "measure elsewhere": Scenario(f"measure other --data data/text.txt --output out-a {FAST}", "out-a", 0.5),
    "measure series": Scenario(f"measure run --data data/text.txt --output new {QUICK}", "run", 2),
    "measure series again": Scenario(
        f"measure run --data data/text.txt --output series-part {QUICK}", "run series-part", 3, grows=("series-part/*",)
    ),
    "measure series done": Scenario(
        f"measure run --data data/text.txt --output out-series {QUICK}",
        "out-series",
        grows=("out-series/report.html", "out-series/results.*"),
    ),
}
PAGES = {
    "compare": Scenario("compare out-a out-b --output new", "out-a out-b", 4),
    "compare series": Scenario("compare out-series out-a --output new --depth relative", "out-series out-a"),
    "compare groups": Scenario(
        "compare jump-0 jump-1 --against run-0 run-b --output new",
        "jump-0/results.json jump-0/results.parquet jump-1 run-0 run-b",
        2,
    ),
    "compare overwrite": Scenario(
        "compare out-a out-b --output cmp --overwrite", "out-a out-b cmp", 0.5, replaces=("cmp/*",)
    ),
    "report measure": Scenario("report out-a", "out-a", 3, replaces=("out-a/report.html",), writes="page"),
    "report series": Scenario("report out-series", "out-series", 2, replaces=("*/report.html",), writes="page"),
    "report run": Scenario("report run", "run/results.json run/results.parquet", replaces=PAGE, writes="page"),
    "report several": Scenario("report plan curve bench --output new", "plan curve bench", 3, writes="page"),
}
SKIPS = {
    "search": Scenario(f"{SEARCH} --blocks 1 --output new", "model data/pairs.jsonl", 2, writes="plan"),
    "search heldout": Scenario(
        f"{SEARCH} --blocks 1 --output new --heldout data/heldout.jsonl", "data/heldout.jsonl", writes="plan"
    ),
    "search parquet": Scenario(
        f"skip search model --data data/pairs.parquet --blocks 1 --output new {SKIP}",
        "data/pairs.parquet",
        writes="plan",
    ),
    "search chats": Scenario(
        f"skip search model --data data/chats.jsonl --blocks 1 --output new {SKIP}",
        "data/chats.jsonl model/tokenizer_config.json model/chat_template.jinja",
        writes="plan",
    ),
    "search recipe": Scenario(
        "skip search model --data data/text.jsonl --recipe recipes/search.yaml --output new",
        "recipes/search.yaml data/text.jsonl",
        2,
        writes="plan",
    ),
    "search target": Scenario(f"{SEARCH} --target-bytes 0.95 --output new", "model", writes="plan", arguments=0.5),
    "search gguf": Scenario(
        f"skip search model.gguf --data data/text.jsonl --blocks 1 --output new {SKIP}",
        "model.gguf model.gguf data/text.jsonl",
        writes="plan",
    ),
    "search resume": Scenario(
        f"{SEARCH} --blocks 2 --output plan-part --resume",
        "plan-part plan-part plan-part model data/pairs.jsonl",
        5,
        grows=("plan-part/*",),
        writes="plan",
    ),
    "search answers": Scenario(
        f"{SEARCH} --blocks 1 --output answers-part --generate-responses 4 --max-new-tokens 4 --resume",
        "answers-part answers-part model data/pairs.jsonl",
        3,
        grows=("answers-part/*",),
        writes="plan",
    ),
    "apply folded": Scenario(
        "skip apply plan model --format folded --output new", "plan/plan.json model", writes="checkpoint"
    ),
    "apply decilm": Scenario(
        "skip apply plan model --format decilm --output new", "plan/plan.json model", writes="checkpoint"
    ),
    "apply layer": Scenario(
        "skip apply plan-layer model --format layer --output new", "plan-layer/plan.json model", writes="checkpoint"
    ),
    "apply gguf": Scenario(
        "skip apply plan-gguf model.gguf --format gguf --output new.gguf", "plan-gguf model.gguf", writes="nothing"
    ),
    "heal refit": Scenario(
        "skip heal plan model --data data/pairs.jsonl --steps 0 --output new",
        "plan/plan.json model data/pairs.jsonl",
        writes="checkpoint",
    ),
    "heal": Scenario(
        "skip heal plan model --data data/pairs.jsonl --steps 2 --global-batch-size 2 --rank 2 --output new",
        "plan/plan.json model",
        writes="checkpoint",
        arguments=0.3,
    ),
    "heal again": Scenario(
        "skip heal plan model --data data/pairs.jsonl --steps 2 --global-batch-size 2 --rank 2 --output healed",
        "healed-work healed-work plan/plan.json model",
        grows=("healed-work/*",),
        writes="checkpoint",
    ),
    "bench": Scenario(
        "skip bench model folded --batches 1 --contexts 8 --max-new-tokens 2 --repeats 1 --output new",
        "model folded",
        2,
        arguments=0.4,
    ),
    "curve": Scenario(
        f"skip curve model --data data/pairs.jsonl --blocks 2 --output new {CURVE}", "model data/pairs.jsonl"
    ),
    "curve resume": Scenario(
        f"skip curve model --data data/pairs.jsonl --blocks 2 --output curve-part --resume {CURVE}",
        "curve-part",
        2,
        grows=("curve-part/*",),
    ),
}
TRAIN = {
    "train": Scenario(
        "train recipes/train.yaml --output new", "recipes/train.yaml data/text.jsonl tokens", 3, writes="run"
    ),
    "train settings": Scenario(
        "train recipes/train.yaml --output new steps=2 objective.jump.alpha=0.3 seed=4",
        "recipes/train.yaml",
        writes="run",
        arguments=0.7,
    ),
    "train resume": Scenario(
        "train recipes/train.yaml --output run-part --resume",
        "run-part run-part run-part data/text.jsonl recipes/train.yaml",
        5,
        grows=RUN,
        writes="run",
    ),
    "train dry run": Scenario(
        "train recipes/train.yaml --dry-run", "recipes/train.yaml tokens data/text.jsonl", 3, writes="nothing"
    ),
    "train checkpoint": Scenario(
        "train recipes/train.yaml --output new steps=2 model.checkpoint=other tokenizer=other",
        "other",
        writes="run",
    ),
    "train export": Scenario(
        "train export run-part --output new --dtype bfloat16", "run-part", 3, writes="checkpoint", arguments=0.3
    ),
    "train list": Scenario("train --list", "recipes/train.yaml", 0.3, writes="nothing", arguments=1.0),
}
EXIT = "--sequence-length 12 --max-sequences 4 --threshold 0.5 --max-new-tokens 2 --set prompts=1 --repeats 1"
EXITS = {
    "exit": Scenario(f"exit model --data data/text.txt --output new {EXIT}", "model data/text.txt", 2, arguments=0.4),
    "exit export": Scenario("exit export model --layers 1 --output new", "model", writes="checkpoint"),
}
GENERATE = "generate model --prompt w1 --no-chat --max-new-tokens 4"
GENERATES = {
    "lens": Scenario("lens model w1 --output new", "model", arguments=0.5),
    "generate": Scenario(f"{GENERATE} --output new", "model", 2, arguments=0.5),
    "generate drafts": Scenario(f"{GENERATE} --speculate-from 1 --set draft_length=2 --output new", "model"),
    "generate plan": Scenario(f"{GENERATE} --plan plan/plan.json --set draft_length=2 --output new", "plan", 2),
    "generate early": Scenario(f"{GENERATE} --threshold 0.1 --output new", "model", arguments=0.5),
}
EVALUATE = {
    "evaluate": Scenario(
        f"evaluate model --tasks lambada_local,arc_easy_local --output new {TASKS}",
        "data/lambada_test.jsonl data/arc_easy_test.jsonl model",
        2,
        arguments=0.3,
    ),
    "evaluate resume": Scenario(
        f"evaluate model --tasks arc_easy_local --batch-size 1 --output answers-left --resume {TASKS}",
        "answers-left answers-left data/arc_easy_test.jsonl model",
        3,
        grows=("answers-left/*",),
    ),
    "evaluate quality": Scenario(
        "evaluate model --generation-quality data/text.txt --set prompts=2 --set prefix_tokens=4 --max-new-tokens 4 "
        "--output new",
        "data/text.txt model",
        arguments=0.3,
    ),
}
DEMO = {"demo": Scenario("demo --output new --blocks 0", "", writes="nothing", arguments=1.0)}

SCENARIOS = {**MEASURE, **PAGES, **SKIPS, **TRAIN, **EXITS, **GENERATES, **EVALUATE, **DEMO}

ALWAYS = ["model", "data", "tokens", "recipes"]
"""Parts of the world that every case has, mutated or not."""
