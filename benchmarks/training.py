"""What the methods add to a training step: time and memory, as ratios measured in turn in one run.

    python benchmarks/training.py                    # about ten minutes on two cores
    python benchmarks/training.py --quick            # a minute or two: one size, short sequences
    python benchmarks/training.py --only jreg,lime --sizes 12x768 --batch 4 --threads 2
    python benchmarks/training.py --device cuda --autocast --batch 16 --length 1024

Prints the tables behind `docs/log.md`. Goals are for 12 x 256 and 12 x 768; figures at other sizes stand alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from against_loop import against_loop
from fulldepth.losses import Objective
from meters import in_turn, kept_for_backward, peak, ratios
from naive_lime import naive_lime
from rows import MIB, Cost, Goal, percent, print_costs, print_goals, share
from steps import Size, Step, depth, stock

SMALL, LARGE = "12 x 256", "12 x 768"
PENALTIES = {"coherence": 0.01, "orthogonality": 0.01}
METHODS: dict[str, dict[str, Any]] = {
    "LIME static": {"memory": "static"},
    "LIME dynamic": {"memory": "dynamic"},
    "LIME kv": {"memory": "kv"},
    "Hyper-Connections": {"residual": "hyper"},
}
PAPER = "The paper on JREG reports +8.5 % memory at 170M (12 x 768), +15.5 % at 1B and +35.6 % at 3.4B (Table 11)."


@dataclass(frozen=True)
class Options:
    """How thoroughly, and on what."""

    sizes: Sequence[Size]
    device: str
    autocast: bool
    quick: bool

    def step(self, model: nn.Module, batch: dict[str, Tensor], objective: Objective | None = None) -> Step:
        """A step in the precision that was asked for."""
        return Step(model, batch, objective, self.autocast)

    def time(self, steps: dict[str, Step]) -> dict[str, list[float]]:
        """Seconds of steps in turn."""
        budget, least, most = (5.0, 2, 5) if self.quick else (45.0, 3, 25)
        return in_turn(steps, self.device, budget, least, most)

    def peak(self, step: Step) -> int:
        """Peak of one step, after a tiny one that makes what is made once."""
        with replace(step, batch={name: tensor[:2, :16] for name, tensor in step.batch.items()}) as first:
            first()
        with step:
            return peak(step, self.device)


def jreg(options: Options) -> Iterator[Goal]:
    """JREG on a stock Llama against the plain step."""
    modes = {
        "float32": (torch.float32, False, False, 1.02),
        "autocast": (torch.float32, True, False, 1.02),
        "gradient checkpointing": (torch.float32, False, True, 1.02),
        "pure bfloat16": (torch.bfloat16, False, False, 1.05),
    }
    for size in options.sizes:
        batch = size.tokens(options.device)
        for mode, (dtype, autocast, checkpointing, goal) in modes.items():
            model = stock(size, options.device, dtype)
            if checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
            plain = options.peak(Step(model, batch, autocast=autocast))
            ours = options.peak(Step(model, batch, Objective(jump=1.0), autocast))
            what = f"JREG: peak memory, {mode} ({plain / MIB:.0f} + {(ours - plain) / MIB:.2f} MiB)"
            yield Goal(what, size.name, [ours / plain], _at(size, {SMALL: goal, LARGE: goal}), percent)
        model = stock(size, options.device)
        steps = {"plain": options.step(model, batch), "jreg": options.step(model, batch, Objective(jump=1.0))}
        taken = options.time(steps)
        yield Goal("JREG: time", size.name, ratios(taken, "jreg", "plain"), _at(size, {SMALL: 1.03, LARGE: 1.03}))


def guided(options: Options) -> Iterator[Goal | Cost]:
    """Tree, CR and orthogonality against the serial model and against the tree alone."""
    for size in options.sizes:
        batch, tree = size.tokens(options.device), depth(size, options.device, residual="tree")
        steps = {
            "serial": options.step(depth(size, options.device), batch),
            "tree": options.step(tree, batch),
            "tree + CR + orthogonality": options.step(tree, batch, Objective(**PENALTIES, energy_warmup=0)),
            "tree + CR with energy + orthogonality": options.step(tree, batch, Objective(**PENALTIES)),
        }
        name = "tree + CR + orthogonality"
        taken, goal = options.time(steps), _at(size, {SMALL: 1.25, LARGE: 1.15})
        yield Goal(f"{name}: time, to serial", size.name, ratios(taken, name, "serial"), goal)
        yield Goal(f"{name}: time, to the tree", size.name, ratios(taken, name, "tree"), goal)
        yield from _costs(options, size, steps, taken, "serial")


def lime(options: Options) -> Iterator[Goal | Cost]:
    """LIME and Hyper-Connections against Llama."""
    for size in options.sizes:
        batch = size.tokens(options.device)
        models = {"Llama": stock(size, options.device), "depth_llama": depth(size, options.device)}
        models |= {name: depth(size, options.device, **switches) for name, switches in METHODS.items()}
        models["LIME static, naive"] = naive_lime(models["LIME static"])
        steps = {name: options.step(model, batch) for name, model in models.items()}
        _same_loss(steps["LIME static"], steps["LIME static, naive"])
        judged = options.time({name: steps[name] for name in ("Llama", "depth_llama", "LIME static")})
        goal = _at(size, {LARGE: 1.10 if options.device == "cuda" else 1.15})
        for reference in ("Llama", "depth_llama"):
            times = ratios(judged, "LIME static", reference)
            yield Goal(f"LIME static: time, to {reference}", size.name, times, goal)
        costs = list(_costs(options, size, steps, options.time(steps), "Llama"))
        added = {cost.what: cost.kept for cost in costs}
        ours, naive = (added[f"LIME static{form}, to Llama"] for form in ("", ", naive"))
        for title, whole in {"naive form": naive, "naive form's mixtures alone": _mixtures(options, size)}.items():
            what = f"LIME static: routing memory ({ours / MIB:.1f} MiB), to the {title} ({whole / MIB:.0f} MiB)"
            yield Goal(what, size.name, [ours / whole], _at(size, {SMALL: 0.1, LARGE: 0.1}), share)
        yield from costs


def trainer(options: Options) -> Iterator[Goal]:
    """`DepthTrainer` against a plain loop."""
    size = options.sizes[0]
    for title, jump in {"no objective": None, "JREG": 1.0}.items():
        times, apart = against_loop(size, 5 if options.quick else 15, jump, options.device)
        what = f"DepthTrainer, {title}: time, to a plain loop (weights {apart:.0e} apart)"
        yield Goal(what, size.name, times, _at(size, {SMALL: 1.03, LARGE: 1.03}))


def growth(options: Options) -> None:
    """Print how the ratios change with layers, tokens and channels."""
    titles = [
        "JREG memory",
        "JREG time",
        "tree + CR + orthogonality time",
        "LIME static time",
        "routing memory to naive",
    ]
    print("\n| model, tokens | " + " | ".join(titles) + " |\n|---|" + "---|" * len(titles))
    base = replace(options.sizes[0], layers=6, width=256, length=128)
    for size in (base, replace(base, layers=12), replace(base, length=512), replace(base, width=512)):
        batch, llama = size.tokens(options.device), stock(size, options.device)
        static = depth(size, options.device, memory="static")
        tree = depth(size, options.device, residual="tree")
        steps = {
            "llama": options.step(llama, batch),
            "jreg": options.step(llama, batch, Objective(jump=1.0)),
            "serial": options.step(depth(size, options.device), batch),
            "guided": options.step(tree, batch, Objective(**PENALTIES, energy_warmup=0)),
            "static": options.step(static, batch),
        }
        taken = options.time(steps)
        pairs = [("jreg", "llama"), ("guided", "serial"), ("static", "llama")]
        times = [f"{statistics.median(ratios(taken, *pair)):.2f}" for pair in pairs]
        memory = options.peak(steps["jreg"]) / options.peak(steps["llama"])
        plain, ours, naive = (
            _kept(step) for step in (steps["llama"], steps["static"], options.step(naive_lime(static), batch))
        )
        cells = [percent([memory]), *times, share([(ours - plain) / (naive - plain)])]
        print(f"| {size.name}, {size.batch} x {size.length} | {' | '.join(cells)} |", flush=True)


def _at(size: Size, goals: dict[str, float]) -> float | None:
    return goals.get(size.name)


def _costs(
    options: Options, size: Size, steps: dict[str, Step], taken: dict[str, list[float]], reference: str
) -> Iterator[Cost]:
    """Every step beside the reference."""
    peaks = {name: options.peak(step) for name, step in steps.items()}
    kept = {name: _kept(step) for name, step in steps.items()}
    for name in steps:
        if name != reference:
            relative, added = peaks[name] / peaks[reference], kept[name] - kept[reference]
            yield Cost(f"{name}, to {reference}", size.name, ratios(taken, name, reference), relative, added)


def _kept(step: Step) -> int:
    with step:
        return kept_for_backward(step.loss, step.model.parameters())


def _mixtures(options: Options, size: Size) -> int:
    """Bytes of one mixture `[B, T, D]` per head and layer from the second on: the least that App. E keeps."""
    heads, number = size.llama().num_key_value_heads, 2 if options.autocast else 4
    return number * (size.layers - 1) * heads * size.batch * size.length * size.width


def _same_loss(ours: Step, naive: Step) -> None:
    """Stop if the two forms do not compute the same."""
    with torch.no_grad():
        apart = float((replace(ours, autocast=False).loss() - replace(naive, autocast=False).loss()).abs())
    if not apart < 1e-4:
        raise SystemExit(f"The naive form's loss is {apart} from ours: this comparison would mean nothing.")


PARTS: dict[str, Callable[[Options], Iterator[Any]]] = {"jreg": jreg, "cr": guided, "lime": lime, "trainer": trainer}


def tables(options: Options, chosen: Sequence[str]) -> None:
    """Print what was asked for."""
    kind = "bfloat16 autocast" if options.autocast else "float32"
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, {kind}")
    for size in options.sizes:
        print(f"{size.name}: batches of {size.batch} x {size.length} tokens, vocabulary {size.vocabulary}")
    parts = [part for name, part in PARTS.items() if name in chosen]
    if parts and (costs := print_goals((row for part in parts for row in part(options)), not options.quick)):
        print_costs(costs)
    if "growth" in chosen:
        growth(options)
    if "jreg" in chosen:
        print(f"\n{PAPER}")


def parse() -> tuple[Options, list[str]]:
    """Settings out of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = [*PARTS, "growth"]
    parser.add_argument("--quick", action="store_true", help="12x256, short sequences, few rounds, no verdict on times")
    parser.add_argument("--only", default=",".join(everything), help="comma-separated (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", metavar="LxD", help="default: 12x256 12x768; quick: 12x256")
    parser.add_argument("--batch", type=int, help="sequences (default: 4; quick: 2)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (default: 256; quick: 128)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--autocast", action="store_true", help="steps under autocast to bfloat16")
    given = parser.parse_args()
    chosen = given.only.split(",")
    if unknown := set(chosen) - set(everything):
        parser.error(f"--only knows {', '.join(everything)}; got {', '.join(sorted(unknown))}")
    if given.threads:
        torch.set_num_threads(given.threads)
    sizes = []
    for text in given.sizes or (["12x256"] if given.quick else ["12x256", "12x768"]):
        layers, width = (int(number) for number in text.split("x"))
        batch = given.batch or (2 if given.quick else 4)
        length = given.length or (128 if given.quick else 256)
        sizes.append(Size(layers, width, batch, length, given.vocabulary))
    return Options(sizes, given.device, given.autocast, given.quick), chosen


if __name__ == "__main__":
    tables(*parse())
