"""What removal does inside: discrepancies by the formula in float64 on stock models, norms by singular values."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from fulldepth.skip.assessment.analysis import discrepancies, spectral_norms

from fulldepth import measure
from fulldepth.execution.language_model import prove
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import Switches
from fulldepth.skip.assessment.outcome import analyse
from fulldepth.skip.exports.fold import fold
from fulldepth.skip.scored_batches import make_batches
from skip import plain, planned
from skip.word_tokenizer import tokenizer, words
from tiny_models import LAYERS, build

CASES = [
    ("llama", (2,), "attention"),
    ("llama", (1, 2, 3), "attention"),
    ("gpt2", (3, 1), "attention"),
    ("gpt_neox", (2,), "attention"),
    ("gemma2", (1,), "mlp"),
    ("qwen3", (2,), "layer"),
]


def discrepancy(x: np.ndarray, y: np.ndarray) -> float:
    """Squared MMD as a V-statistic, the bandwidth the median distance of all different pairs of the pooled points."""
    points = np.concatenate([x, y])
    squared = ((points[:, None] - points[None]) ** 2).sum(-1)
    width = np.median(np.sqrt(squared[np.triu_indices(len(points), 1)]))
    kernel = np.exp(-squared / (2 * width**2))
    n = len(x)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


@torch.no_grad()
def streams(model, examples) -> np.ndarray:
    """[L+1, N, D] the stream at every token, one sequence at a time: into the first block, and out of each."""
    model, found = copy.deepcopy(model).double(), []
    blocks = planned.layers(model)
    for example in examples:
        seen: list[torch.Tensor] = []

        def note(module, given, seen=seen):
            seen.append(given[0])

        def after(module, given, output, seen=seen):
            seen.append(output[0] if isinstance(output, tuple) else output)

        hooks = [blocks[0].register_forward_pre_hook(note)] + [block.register_forward_hook(after) for block in blocks]
        model(input_ids=example.input_ids[None])
        for hook in hooks:
            hook.remove()
        found.append(torch.cat(seen))
    return torch.cat(found, dim=1).numpy()


def read(model, examples, plan, healed, **options):
    """The rows of `discrepancies`."""
    batches = make_batches(examples, 3)
    anatomy, _ = prove(model, batches[0].inputs)
    scalars = Scalars.from_dict(plan.scalars, LAYERS, plan.granularity) if healed else None
    with Switches(anatomy, plan.granularity) as switches:
        return discrepancies(switches, batches, frozenset(plan.blocks), scalars, **options)


@pytest.mark.parametrize("healed", [False, True], ids=["skipped", "healed"])
@pytest.mark.parametrize(("family", "blocks", "granularity"), CASES)
def test_the_discrepancy_is_that_of_stock_models(family, blocks, granularity, healed) -> None:
    model, examples = build(family), plain.sentences(7, seed=3)
    plan = planned.plan(model, blocks, granularity, values="fitted" if healed else None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(input_ids=examples[0].input_ids[None]).logits
    rows = read(model, examples, plan, healed)
    own, reference = streams(planned.scaled(model, plan), examples), streams(model, examples)
    expected = [discrepancy(x, y) for x, y in zip(own, reference, strict=True)]
    assert [row.layer for row in rows] == list(range(LAYERS + 1))
    assert {(row.measure, row.site, row.count) for row in rows} == {("mmd", "residual", sum(map(len, examples)))}
    np.testing.assert_allclose([row.value for row in rows], expected, rtol=1e-3, atol=1e-6)
    first = 1 if healed else min(blocks)
    assert expected[first] > 1e-3  # there is something to see
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(input_ids=examples[0].input_ids[None]).logits, logits)


def test_batches_do_not_matter_and_seeds_choose_the_sample() -> None:
    model, examples = build("llama"), plain.sentences(9, seed=5)
    plan = planned.plan(model, (2,))
    anatomy, _ = prove(model, make_batches(examples, 9)[0].inputs)
    with Switches(anatomy) as switches:

        def values(batch_size: int, seed: int) -> list[float]:
            batches = make_batches(examples, batch_size)
            rows = discrepancies(switches, batches, frozenset({2}), None, reservoir_tokens=20, seed=seed)
            assert {row.count for row in rows} == {20}
            return [row.value for row in rows]

        assert values(1, 0) == pytest.approx(values(9, 0), rel=1e-4)
        assert values(9, 1)[-1] != pytest.approx(values(9, 0)[-1], rel=1e-3)
    assert plan.blocks == [2]


def test_the_model_is_whole_after_an_error() -> None:
    model, examples = build("llama"), plain.sentences(3, seed=5)
    batches = make_batches(examples, 3)
    anatomy, _ = prove(model, batches[0].inputs)
    with Switches(anatomy) as switches:
        with pytest.raises(RuntimeError):
            discrepancies(switches, batches, frozenset({2}), Scalars(LAYERS, {2}), watcher=Breaking())
        assert not switches.skipped
        assert switches.scalars is None


class Breaking:
    def advance(self, count: int) -> None:
        raise RuntimeError


@pytest.mark.parametrize("tokens", [2048, 40], ids=["all tokens", "a sample"])
def test_measure_sees_the_same_in_the_folded_model(tokens, tmp_path) -> None:
    model, numbers = build("llama"), [[(7 * n + 3 * i * i) % 80 for i in range(12)] for n in range(6)]
    pairs = [{"prompt": words(*row[:5]), "response": " " + words(*row[5:])} for row in numbers]
    plan = planned.plan(model, (1, 3), values=None)
    model.save_pretrained(tmp_path / "original")
    found = analyse(
        model, plan, [words(1, 2, 3)], heldout=pairs, tokenizer=tokenizer(), reservoir_tokens=tokens, fit=False
    )
    folded = copy.deepcopy(model)
    fold(folded, plan)
    seen = measure(
        folded,
        pairs,
        measures=["mmd"],
        tokenizer=tokenizer(),
        reference=str(tmp_path / "original"),
        reservoir_tokens=tokens,
    )
    own = found.table[found.table.measure == "mmd"]
    assert own["count"].tolist() == seen.table["count"].tolist() == [min(tokens, 72)] * (LAYERS + 1)
    np.testing.assert_allclose(own["value"], seen.table["value"], rtol=1e-4, atol=1e-9)
    assert own[["measure", "site", "layer", "statistic", "unit"]].values.tolist() == (
        seen.table[["measure", "site", "layer", "statistic", "unit"]].values.tolist()
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_norms_are_the_largest_singular_values(family) -> None:
    model = build(family)
    anatomy, _ = prove(model, make_batches(plain.sentences(2, seed=1), 2)[0].inputs)
    with Switches(anatomy) as switches:
        switches.skip((1,))  # does not matter
        rows, unreadable = spectral_norms(switches)
    expected = {
        (name, layer): np.linalg.svd(module.weight.detach().double().numpy(), compute_uv=False)[0]
        for layer, block in enumerate(planned.layers(model), start=1)
        for name, module in block.named_modules()
        if getattr(getattr(module, "weight", None), "ndim", 0) == 2
    }
    assert not unreadable
    assert {(row.site, row.layer): row.value for row in rows} == pytest.approx(expected, rel=1e-9)
