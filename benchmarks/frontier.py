"""Loss added against time saved: this package's search beside published choices of what to remove, untrained.

    python benchmarks/frontier.py FOLDER MODEL [--gsm8k FOLDER_OF_GSM8K] [--targets 1.1,1.2,1.3] [--methods ...]

The model is timed whole, without its attention and without its MLPs, in turn; that gives each part's share of the time,
and with them the speed-up of any choice. Every method then removes what each target speed-up of decoding needs, chosen
on windows of `corpus:builtin/train`; the loss is read on windows of `corpus:builtin/heldout` and on answers of GSM8K,
rows that no choice saw. Some models are then healed on further windows of the training part: by this package's `refit`,
or by the map of ReplaceMe, which removes the groups of Gromov et al. (its least squares, here with the ridge of the
lowest loss on the windows that chose). The models of the target `--verify` are timed in turn, with their parts left out
in place; healing does not change times. Every measured point is a line of FOLDER/points.jsonl, so that a further run
measures only what is missing. The table is printed, and drawn in FOLDER/frontier.html.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from plotly import graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots
from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.core.distributed import processes
from fulldepth.core.progress import Watcher
from fulldepth.core.uncertainty import median_ratio
from fulldepth.execution import find_anatomy
from fulldepth.execution.heldout import HeldoutLosses, heldout_losses
from fulldepth.execution.latency import PHASES, OtherLoad, Runner, Trial, random_tokens, time_in_rounds
from fulldepth.hf import Block, load_checkpoint, load_tokenizer
from fulldepth.skip import Examples, Plan, SearchSettings, read_examples, refit, search, skipping
from fulldepth.skip.goal import count_goal
from fulldepth.skip.loss_cache import LossCache
from fulldepth.skip.problem import prepared
from fulldepth.skip.rankings import rank_blocks

PARTS, CONTEXTS, NEW_TOKENS, WINDOW, BATCH = ("attention", "mlp"), (128, 512), 16, 256, 8
SEEDS = range(5)


class Method(NamedTuple):
    """A way to choose what to remove."""

    granularity: str
    search: str | None = None
    """A search that ranks once; None = this package's own, for the target."""
    seeds: Sequence[int] = (0,)
    healed: Sequence[str] = ()
    """Ways to heal its models: `refit` of this package, or the `map` of ReplaceMe."""


METHODS = {
    "ours, any": Method("any", healed=("refit",)),
    "ours, attention": Method("attention"),
    "ours, layers": Method("layer", healed=("refit",)),
    "ShortGPT": Method("layer", "cosine"),
    "LLM-Drop, attention": Method("attention", "cosine"),
    "LLM-Drop, joint": Method("any", "cosine"),
    "Gromov, groups": Method("layer", "groups", healed=("map", "refit")),
    "last layers": Method("layer", "last"),
    "random layers": Method("layer", "random", SEEDS),
}
RIDGES = (0.1, 0.01, 1e-3, 1e-4, 1e-5)
"""Multiples of the mean eigenvalue, for the map of ReplaceMe."""


class Points:
    """Values by key, one JSON line each, appended as they are measured."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.values: dict[str, Any] = {point["key"]: point["value"] for point in map(json.loads, lines)}

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The value of a key, measured if it is not there."""
        if key not in self.values:
            start = time.perf_counter()
            self.values[key] = measure()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "value": self.values[key]}) + "\n")
            print(f"{key} ({time.perf_counter() - start:.0f} s)", flush=True)
        return self.values[key]


Lacking = dict[str, list[int]]
"""Part -> sorted layers without it."""


def lacking(picks: Iterable[Iterable[Block]]) -> Lacking:
    """What is gone after these removals."""
    gone = [block for pick in picks for block in pick]
    return {part: sorted(layer for layer, own in gone if own in (part, "layer")) for part in PARTS}


def blocks_of(removed: Lacking) -> list[Block]:
    """The same as blocks."""
    return [Block(layer, part) for part, layers in removed.items() for layer in layers]


class Without(Runner):
    """Runs a model without some of its blocks."""

    def __init__(self, model: PreTrainedModel, removed: Lacking) -> None:
        super().__init__(model)
        self.removed = blocks_of(removed)

    def run(self, ids: Tensor, context: int) -> Trial:
        """As `Runner.run`; switching is not timed."""
        with skipping(find_anatomy(self.model), self.removed, "any"):
            return super().run(ids, context)


class Subject:
    """A model, what was measured on it, and the rows to choose and to read on."""

    def __init__(self, args: argparse.Namespace) -> None:
        args.folder.mkdir(parents=True, exist_ok=True)
        self.points = Points(args.folder / "points.jsonl")
        self.model = load_checkpoint(args.model, device=args.device, dtype=args.dtype).model.eval()
        self.anatomy, self.context, self.repeats = find_anatomy(self.model), args.context, args.repeats
        self.pool, self.unhealed = args.pool, args.unhealed
        self.last: tuple[Any, Any] = None, None
        """The model healed last, behind how and what; it is read on several kinds of rows."""
        tokenizer = load_tokenizer(args.model)

        def rows(data: Any, limit: int, length: int = WINDOW) -> Examples:
            return read_examples(None, tokenizer, None, heldout=data, sequence_length=length, limit=limit)

        self.choose = rows("corpus:builtin/train", args.choose)
        drawn = rows("corpus:builtin/train", args.choose + args.fit).heldout
        known = {tuple(row.input_ids.tolist()) for row in self.choose.heldout}
        self.fit = [row for row in drawn if tuple(row.input_ids.tolist()) not in known][: args.fit]
        self.read = {"text": rows("corpus:builtin/heldout", args.read)}
        if args.gsm8k is not None:
            lines = map(json.loads, (args.gsm8k / "test.jsonl").read_text(encoding="utf-8").splitlines())
            pairs = [{"prompt": row["question"], "response": row["answer"]} for row in lines]
            short = [pair for pair in pairs if sum(map(len, pair.values())) < 2 * WINDOW]
            self.read["answers"] = rows(short, args.read, 2 * WINDOW)  # pairs are never cut

    def rounds(self, key: str, removed: Mapping[str, Lacking], context: int) -> dict[str, Any]:
        """`NAME PHASE` -> seconds of each round of batch 1; and the `other_load` of the machine."""

        def measure() -> dict[str, Any]:
            runs = {name: Without(self.model, own) for name, own in removed.items()}
            ids = random_tokens(self.anatomy, 1, context + NEW_TOKENS, 0)
            options: dict[str, Any] = {"repeats": self.repeats, "warmup": 1, "seed": 0, "advance": lambda count: None}
            load = OtherLoad()
            times = time_in_rounds(runs, ids, context, **options)
            seconds = {f"{name} {phase}": values for (name, phase), values in times.items()}
            return {**seconds, "other_load": load.share()}

        return self.points.get(f"{key}, context {context}", measure)

    def shares(self, context: int, phase: str) -> dict[str, float]:
        """Part -> the mean share of the model's time that one of them takes."""
        removed = {part: {part: list(self.anatomy.layers_with(part))} for part in PARTS}
        times = self.rounds("times of the parts", {"whole": {}, **removed}, context)
        left = {part: median_ratio(times[f"{part} {phase}"], times[f"whole {phase}"]).value for part in PARTS}
        return {part: (1 - left[part]) / len(removed[part][part]) for part in PARTS}

    def speedup(self, lacking: Lacking, context: int, phase: str) -> float:
        """Predicted time of the whole model over the time without these blocks."""
        shares = self.shares(context, phase)
        return 1 / (1 - sum(shares[part] * len(layers) for part, layers in lacking.items()))

    def choice(self, name: str, seed: int, target: float) -> Lacking | None:
        """What a method removes for a decode speed-up; None if all of its candidates do not reach it."""
        return self.points.get(
            f"removed by {name}, seed {seed}, for {target:g}", lambda: self.chosen(name, seed, target)
        )

    def chosen(self, name: str, seed: int, target: float) -> Lacking | None:
        """As `choice`, chosen here."""
        method, shares = METHODS[name], self.shares(self.context, "decode")
        kinds = {"any": [shares[part] for part in PARTS], "layer": [sum(shares.values())]}
        gains, depth = kinds.get(method.granularity) or [shares[method.granularity]], self.anatomy.num_layers
        if sum(gains) * depth < 1 - 1 / target:
            return None
        options: dict[str, Any] = {"granularity": method.granularity, "fit": False, "batch_size": BATCH, "seed": seed}
        if method.search is None:
            options |= {"target_speedup": target, "context": self.context, "pool": self.pool}
            plan = self.points.get(
                f"plan of ours, {method.granularity}, for {target:g}",
                lambda: search(self.model, self.choose, **options).document(),
            )
            return lacking(Plan.of(plan).picks)
        number = min(len(gains) * depth, math.ceil((1 - 1 / target) / min(gains)))
        options |= {"search": method.search, "blocks": number}
        key = f"{number} blocks by {method.search}, {method.granularity}, seed {seed}"
        picks = self.points.get(key, lambda: self.ranking(SearchSettings(**options)))
        beginnings = (lacking([[Block(*block)] for block in picks[:count]]) for count in range(1, number + 1))
        return next(own for own in beginnings if self.speedup(own, self.context, "decode") >= target)

    def ranking(self, settings: SearchSettings) -> list[Block]:
        """The blocks of a search that ranks once, without the losses that `search` adds for its plan."""
        with processes() as process, prepared(self.model, self.choose, settings, process) as problem:
            goal = count_goal(problem.scorer.costs, settings.blocks or 0)
            loss_cache = LossCache(problem.scorer, problem.chunks, process)
            return [
                block for pick in rank_blocks(loss_cache, settings.search, goal, seed=settings.seed) for block in pick
            ]

    def refitted(self, removed: Lacking) -> PreTrainedModel:
        """The model without these blocks, healed by `refit`."""
        names = [f"{block.part} {block.layer}" for block in blocks_of(removed)]
        row = Examples([], self.choose.heldout[:1], self.choose.meta)
        plan = search(self.model, row, 1, search="last", granularity="layer", fit=False)
        plan = plan.changed(granularity="any", blocks=names, losses=[0.0] * (len(names) + 1))  # only blocks are read
        rows = Examples(self.fit, self.choose.heldout, self.choose.meta)  # a fourth of `fit` is only read
        return refit(plan, self.model, rows, batch_size=BATCH).model

    @torch.no_grad()
    def mapped(self, removed: Lacking) -> PreTrainedModel:
        """The model without this run of layers, with the map of ReplaceMe in the MLP before it."""
        host, end = removed["mlp"][0] - 1, removed["mlp"][-1]
        seen: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            return lambda module, inputs, output: seen.update({name: output[0].double()})

        branch = self.anatomy.part(host, "mlp")
        assert branch is not None
        places = {"added": branch, "stream": self.anatomy.blocks[host - 1], "wanted": self.anatomy.blocks[end - 1]}
        hooks = [module.register_forward_hook(keep(name)) for name, module in places.items()]
        gram = cross = torch.zeros((), dtype=torch.float64)
        for row in self.fit:
            self.anatomy.body(input_ids=row.input_ids[None].to(self.model.device))
            gram = gram + seen["added"].T @ seen["added"]
            cross = cross + seen["added"].T @ (seen["wanted"] - seen["stream"])
        for hook in hooks:
            hook.remove()
        best, least = None, math.inf
        for ridge in RIDGES:
            change = torch.linalg.solve(gram + ridge * gram.diagonal().mean() * torch.eye(len(gram)).to(gram), cross)
            model = copy.deepcopy(self.model)
            weight = model.get_submodule(f"model.layers.{host - 1}.mlp.down_proj").weight
            weight += change.T.to(weight) @ weight
            with skipping(find_anatomy(model), blocks_of(removed), "any"):
                read = heldout_losses({"": model}, self.choose.heldout, BATCH, Watcher())["loss"]
            if read.mean("") < least:
                best, least = model, read.mean("")
        assert best is not None
        return best

    def losses(self, removed: Lacking, rows: str, healing: str = "") -> dict[str, list[float]]:
        """Summed losses of every row without these blocks, its tokens that count, and its document."""

        def measure() -> dict[str, list[float]]:
            if (healing, str(removed)) != self.last[0]:
                healed = {"": lambda _: self.model, "map": self.mapped, "refit": self.refitted}[healing](removed)
                self.last = (healing, str(removed)), healed
            model = self.last[1]
            whole = healing == "refit"  # its removed parts add zeros
            with nullcontext() if whole else skipping(find_anatomy(model), blocks_of(removed), "any"):
                read = heldout_losses({"": model}, self.read[rows].heldout, BATCH, Watcher())["loss"]
            values = {"sums": read.sums[""], "tokens": read.tokens, "documents": read.documents}
            return {name: array.tolist() for name, array in values.items()}

        key = f"losses on {rows} without {json.dumps(removed)}{f', {healing}' if healing else ''}"
        return self.points.get(key, measure)

    def added(self, removed: Lacking, rows: str, healing: str) -> tuple[float, float]:
        """Nats per token that these removals add, and the standard error over documents."""
        whole, without = self.losses({}, rows), self.losses(removed, rows, healing)
        sums = {"whole": np.array(whole["sums"]), "without": np.array(without["sums"])}
        losses = HeldoutLosses(sums, np.array(whole["tokens"]), np.array(whole["documents"]))
        difference = losses.added("without")
        return difference.mean, difference.standard_error


class Row(NamedTuple):
    """One method at one target."""

    method: str
    target: float
    removed: str
    """Numbers of attentions and MLPs."""
    predicted: dict[tuple[int, str], float]
    measured: dict[tuple[int, str], str]
    added: dict[str, tuple[float, float]]
    """Rows -> nats and their standard error; of several seeds, the mean and the standard deviation over seeds."""


def rows_of(subject: Subject, name: str, target: float, verified: Mapping[int, Mapping[str, Any]]) -> Iterator[Row]:
    """The rows of a method: as chosen, and healed; none if it does not reach the target."""
    choices = [own for seed in METHODS[name].seeds if (own := subject.choice(name, seed, target))]
    if not choices:
        return
    cells = [(context, phase) for context in CONTEXTS for phase in PHASES]
    measured = {}
    for context, phase in cells if verified else ():
        times = verified[context]
        ratio = median_ratio(times[f"whole {phase}"], times[f"{name} {phase}"])
        measured[context, phase] = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    predicted = {cell: subject.speedup(choices[0], *cell) for cell in cells}
    removed = " + ".join(str(len(choices[0][part])) for part in PARTS)
    for healing in ("", *(() if subject.unhealed else METHODS[name].healed)):
        added = {}
        for rows in subject.read:
            values = [subject.added(own, rows, healing) for own in choices]
            only = [value for value, _ in values]
            added[rows] = values[0] if len(values) == 1 else (mean(only), stdev(only))
        yield Row(f"{name} + {healing}" if healing else name, target, removed, predicted, measured, added)


def table(rows: Sequence[Row], kinds: Sequence[str]) -> str:
    """The rows in Markdown."""
    cells = [(context, phase) for phase in reversed(PHASES) for context in CONTEXTS]
    heads = [*(f"nats added, {kind}" for kind in kinds), *(f"{phase} at {context}" for context, phase in cells)]
    lines = [f"| target | method | attention + MLP | {' | '.join(heads)} |", "|---|" + "---|" * (len(heads) + 2)]
    for row in rows:
        nats = ["{:+.3f} ± {:.3f}".format(*row.added[kind]) for kind in kinds]
        speed = [row.measured.get(cell) or f"{row.predicted[cell]:.2f}, predicted" for cell in cells]
        lines.append(f"| {row.target:g} | {row.method} | {row.removed} | {' | '.join([*nats, *speed])} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], kinds: Sequence[str], context: int, path: Path) -> None:
    """Added loss over the predicted decode speed-up: panels for rows, colours for choices, dashes for healing."""
    figure = make_subplots(
        cols=len(kinds), subplot_titles=kinds, x_title=f"predicted decode speed-up at {context} tokens"
    )
    lowest = min(row.added[kind][0] for row in rows for kind in kinds) / 2  # error bars end there on the log axis
    choices = list(dict.fromkeys(row.method.split(" + ")[0] for row in rows))
    for name in dict.fromkeys(row.method for row in rows):
        own, (choice, _, healing) = [row for row in rows if row.method == name], name.partition(" + ")
        number = choices.index(choice)
        look = {"color": qualitative.D3[number], "dash": {"": "solid", "refit": "dash", "map": "dot"}[healing]}
        for column, kind in enumerate(kinds, start=1):
            values, errors = zip(*(row.added[kind] for row in own), strict=True)
            below = [max(min(error, value - lowest), 0) for value, error in zip(values, errors, strict=True)]
            line = go.Scatter(
                x=[row.predicted[context, "decode"] for row in own],
                y=values,
                error_y={"array": errors, "arrayminus": below, "symmetric": False},
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                line={**look, "width": 3 if name.startswith("ours") else 1.5},
                marker={"symbol": number, "size": 9},
            )
            figure.add_trace(line, row=1, col=column)
    figure.update_yaxes(type="log", title="nats added")
    figure.update_layout(template="plotly_white", title="Loss added by removal, without training", height=800)
    figure.write_html(path)


def main() -> None:
    """Measure what is missing, print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("--gsm8k", type=Path, help="folder that holds test.jsonl")
    parser.add_argument("--targets", default="1.1,1.2,1.3", help="speed-ups of decoding")
    parser.add_argument("--verify", type=float, default=1.2, help="the target whose models are timed")
    parser.add_argument("--methods", default=";".join(METHODS), help="names, separated by semicolons")
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt for which targets are counted")
    parser.add_argument("--choose", type=int, default=16, help="windows that parts are chosen on")
    parser.add_argument("--pool", type=int, help="candidates that every round of our search reads; default: all")
    parser.add_argument("--fit", type=int, default=64, help="windows that weights are fitted on")
    parser.add_argument("--read", type=int, default=32, help="windows, and answers, that losses are read on")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of a timing")
    parser.add_argument("--dtype", default="float32", help="bfloat16 reads losses in half the time")
    parser.add_argument("--device", default="cpu", help="for the points that FOLDER lacks")
    parser.add_argument("--unhealed", action="store_true", help="heal no model")
    args = parser.parse_args()
    subject, rows = Subject(args), []
    for target in map(float, args.targets.split(",")):
        choices = {name: subject.choice(name, METHODS[name].seeds[0], target) for name in args.methods.split(";")}
        removed, verified = {name: own for name, own in choices.items() if own}, {}
        if target == args.verify:
            key = f"times of the models for {target:g}"
            verified = {context: subject.rounds(key, {"whole": {}, **removed}, context) for context in CONTEXTS}
        rows += [row for name in removed for row in rows_of(subject, name, target, verified)]
    print(table(rows, list(subject.read)))
    draw(rows, list(subject.read), args.context, args.folder / "frontier.html")


if __name__ == "__main__":
    main()
