"""Maps against least squares by numpy on states of stock models, and healed models against hooks on stock models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM

import tiny_models
from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.errors import FulldepthError
from fulldepth.healing import heal as heal_into
from fulldepth.results import Results
from fulldepth.skip import heal
from fulldepth.skip.plan import rows_of
from skip import plain, planned

STRENGTH = 0.1
RUNS = [
    ("llama", "layer", [2, 3], [((1, "mlp"), (3, "mlp"))]),
    ("llama", "attention", [2, 3], [((1, "mlp"), (2, "attention")), ((2, "mlp"), (3, "attention"))]),
    ("qwen2", "mlp", [3, 1], [((1, "attention"), (1, "mlp")), ((3, "attention"), (3, "mlp"))]),
    ("gpt2", "layer", [1, 3], [((2, "mlp"), (3, "mlp"))]),  # Conv1D with a bias; nothing precedes the first layer
    ("gpt_neox", "attention", [2], [((2, "mlp"), (2, "attention"))]),  # one sum takes both
    ("gpt_neox", "layer", [2], [((1, "mlp"), (2, "mlp"))]),
    ("granite", "layer", [2], [((1, "mlp"), (2, "mlp"))]),  # branches are scaled in the sum
    ("opt", "mlp", [2], [((2, "attention"), (2, "mlp"))]),
]


def texts(count: int, seed: int) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 14, (count,), generator=generator).tolist()
    drawn = [torch.randint(3, tiny_models.VOCAB, (length,), generator=generator) for length in lengths]
    return [Example.of(ids.tolist(), 1, len(ids), document=number) for number, ids in enumerate(drawn)]


def data(count: int = 60) -> Examples:
    return Examples(texts(count, 1), texts(12, 2), {"hash": "sha256:" + "1" * 64, "name": "texts", "kind": "text"})


@pytest.fixture
def always(monkeypatch):
    """The one map of a strength and an objective is taken, whatever the loss."""

    def take(objective: str, strength: float = STRENGTH) -> None:
        monkeypatch.setattr(heal, "OBJECTIVES", (objective,))
        monkeypatch.setattr(heal, "STRENGTHS", (strength,))
        monkeypatch.setattr(heal.Gap, "loss", lambda self, change=None: 1.0 - (change is not None))

    return take


class Streams:
    """Stock modules of a model, with what they pass on in one pass over a text."""

    def __init__(self, model, removed, maps) -> None:
        self.model, self.removed, self.maps = model, removed, maps
        self.gain = getattr(model.config, "residual_multiplier", 1.0)
        self.parallel = model.config.model_type == "gpt_neox"

    def __call__(self, ids, host, end):
        """[T, D] M of the host and the stream behind `end`, with branches removed and maps in place; logits."""
        seen, hooks = {}, []
        for number, block in enumerate(plain.blocks_of(self.model), start=1):
            hooks.append(
                block.register_forward_pre_hook(
                    lambda m, a, k, n=number: seen.update({(n, "in"): a[0] if a else k["hidden_states"]}),
                    with_kwargs=True,
                )
            )
            hooks.append(
                block.register_forward_hook(
                    lambda m, a, o, n=number: seen.update({(n, "out"): o[0] if isinstance(o, tuple) else o})
                )
            )
            for role, name in zip(("attention", "mlp"), plain.branches_of(self.model), strict=True):
                hooks.append(
                    block.get_submodule(name).register_forward_hook(
                        lambda m, a, o, key=(number, role): self.branch(seen, key, o)
                    )
                )
        logits = self.model(input_ids=ids[None]).logits[0]
        for hook in hooks:
            hook.remove()
        layer, role = end
        stream = seen[layer, "out"]
        if role == "attention" and not self.parallel:
            stream = seen[layer, "in"] + self.gain * seen[layer, "attention"]
        return self.gain * seen[host].view_as(stream)[0], stream[0], logits

    def branch(self, seen, key, output):
        value = output[0] if isinstance(output, tuple) else output
        if key in self.removed:
            value = torch.zeros_like(value)
        elif key in self.maps:
            value = value @ self.maps[key]
        seen[key] = value
        return (value, *output[1:]) if isinstance(output, tuple) else value


def least_squares(objective, added, own, wanted):
    """T by numpy on stacked rows, as the docstring of the module states it."""
    m, s, x = (np.concatenate(rows) for rows in (added, own, wanted))
    weight, aim = np.ones((len(m), 1)), x
    if objective == "cosine":
        size = np.linalg.norm(s, axis=1, keepdims=True)
        towards = x / np.linalg.norm(x, axis=1, keepdims=True)
        weight, aim = 1 / size**2, s + size * (towards - (s * towards).sum(1, keepdims=True) / size * s / size)
    ridge = STRENGTH * np.trace(m.T @ (weight * m)) / m.shape[1]
    identity, root = np.eye(m.shape[1]), np.sqrt(weight)
    rows = np.concatenate([root * m, np.sqrt(ridge) * identity])
    return np.linalg.lstsq(rows, np.concatenate([root * (aim - s + m), np.sqrt(ridge) * identity]))[0]


@pytest.mark.parametrize("objective", ["squares", "cosine"])
@pytest.mark.parametrize(("family", "granularity", "blocks", "runs"), RUNS)
@torch.no_grad()
def test_a_healed_model_computes_the_least_squares_maps(family, granularity, blocks, runs, objective, always):
    model = tiny_models.build(family, dtype=torch.float64)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    plan = planned.plan(model, blocks, granularity, None)
    always(objective)
    examples = data()
    healing = heal.merge_maps(plan, model, examples, progress=False)
    fitted = heal.split_rows(plan, examples, False, 0)[0]
    roles = ("attention", "mlp") if granularity == "layer" else (granularity,)
    stock, maps = Streams(model, (), {}), {}
    for host, end in runs:
        healed = Streams(model, {(layer, role) for layer in blocks for role in roles}, dict(maps))
        passes = [(stock(e.input_ids, host, end), healed(e.input_ids, host, end)) for e in fitted]
        rows = (
            [a.numpy() for a in part] for part in zip(*((own[0], own[1], ref[1]) for ref, own in passes), strict=True)
        )
        maps[host] = torch.from_numpy(least_squares(objective, *rows))
    ids = texts(1, 3)[0].input_ids
    expected = Streams(model, {(layer, role) for layer in blocks for role in roles}, maps)(ids, *runs[0])[2]
    removed = Streams(model, {(layer, role) for layer in blocks for role in roles}, {})(ids, *runs[0])[2]
    got = healing.model(input_ids=ids[None]).logits[0]
    assert torch.allclose(got, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert (got - removed).abs().max() > 1e-3 * removed.abs().max()
    assert [(m.host, m.end) for m in healing.maps] == [
        tuple(f"{role} of layer {layer}" for layer, role in run) for run in runs
    ]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@torch.no_grad()
def test_an_infinite_ridge_changes_nothing(always):
    model = tiny_models.build("llama", dtype=torch.float64)
    always("squares", 1e15)
    healed = heal.merge_maps(planned.plan(model, [2], "attention", None), model, data(), progress=False).model
    changed = [n for n, w in model.named_parameters() if (healed.get_parameter(n) - w).abs().max() > 1e-12]
    assert changed == ["model.layers.1.self_attn.o_proj.weight"]  # zero: removed


@torch.no_grad()
def test_a_removed_layer_that_is_linear_in_its_host_is_healed_exactly(always):
    """Layer 1 writes its MLP into channels that are empty before it; layer 2 adds a linear map of them."""
    model, half = tiny_models.build("llama", dtype=torch.float64), tiny_models.WIDTH // 2
    first, second = model.model.layers[:2]
    model.model.embed_tokens.weight[:, half:] = 0
    for zero in (first.self_attn.o_proj.weight, first.mlp.down_proj.weight[:half], second.self_attn.o_proj.weight):
        zero.zero_()
    second.post_attention_layernorm = torch.nn.Identity()
    second.mlp = torch.nn.Linear(tiny_models.WIDTH, tiny_models.WIDTH, bias=False).double()
    second.mlp.weight[:, :half] = 0
    always("squares", 1e-12)
    healing = heal.merge_maps(planned.plan(model, [2], "layer", None), model, data(), progress=False)
    ids = texts(1, 3)[0].input_ids[None]
    expected = model(input_ids=ids).logits
    assert torch.allclose(healing.model(input_ids=ids).logits, expected, rtol=0, atol=1e-6)
    assert healing.readings["kl"].mean("removed") > 1e-3
    assert healing.readings["kl"].mean("maps") < 1e-9
    assert healing.readings["greedy_agreement"].mean("maps") == 1


def test_the_choice_is_by_the_loss_of_rows_that_no_map_was_fitted_on():
    model = plain.trained(5, steps=200)
    plan, examples = planned.plan(model, [2, 3], "layer"), plain.examples(train=60)
    healing = heal.merge_maps(plan, model, examples, progress=False)
    (taken,) = healing.maps
    assert taken.after == pytest.approx(plain.loss(healing.model, examples.heldout, (), "layer"), abs=1e-5)
    assert taken.before == pytest.approx(
        plain.loss(planned.scaled(model, plan), examples.heldout, (), "layer"), abs=1e-4
    )
    assert taken.after < taken.before
    unseen = healing.examples.heldout
    for label, own in {"original": model, "removed": planned.scaled(model, plan), "maps": healing.model}.items():
        assert healing.readings["loss"].mean(label) == pytest.approx(plain.loss(own, unseen, (), "layer"), abs=1e-4)
    parts = heal.split_rows(plan, examples, False, 0)
    numbers = [{id(example) for example in part} for part in parts]
    assert len(set.union(*numbers)) == sum(map(len, numbers)) == len(examples.train) + len(examples.heldout)


def test_a_branch_behind_a_norm_stays_as_it_is():
    model = tiny_models.build("gemma3")
    healing = heal.merge_maps(planned.plan(model, [2], "layer", None), model, data(), progress=False)
    assert [(m.objective, m.reason) for m in healing.maps] == [
        (None, "its output is not that of one linear layer of its own")
    ]


@pytest.mark.parametrize(
    ("granularity", "family"), [("layer", "LlamaForCausalLM"), ("attention", "SkippedLlamaForCausalLM")]
)
def test_the_folder_is_a_checkpoint_with_results(granularity, family, tmp_path, unproven):
    model = tiny_models.build("llama")
    plan = planned.plan(model, [2], granularity, None)
    results = heal_into(plan, model, data(), tmp_path / "healed", steps=0, progress=False)
    config = json.loads((tmp_path / "healed" / "config.json").read_text())
    assert config["architectures"] == [family]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "healed")
    healed = heal.merge_maps(plan, model, data(), progress=False).model
    ids = texts(1, 3)[0].input_ids[None]
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, healed(input_ids=ids).logits, atol=1e-4)
    saved = Results.load(tmp_path / "healed")
    assert saved.headline == results.headline
    assert list(saved.values("loss", "mean", "model", model="maps")) == [
        results.values("loss", "mean", "model", model="maps").item()
    ]
    page = (tmp_path / "healed" / "report.html").read_text()
    assert "What healing brings" in page
    assert "mlp of layer 1" in page


def few() -> Examples:
    return Examples(texts(1, 1), texts(4, 2), {"hash": "sha256:" + "1" * 64})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": few()}, "no rows to fit maps on"),
        ({"model": tiny_models.build("llama", seed=1)}, "another LlamaForCausalLM"),
        ({"model": cpu_offload(tiny_models.build("llama"))}, "Offloaded"),
        ({"output": "."}, "exists already"),
        ({"heldout": "the rows of the search"}, "12 of 12 held-out rows also chose the blocks"),
    ],
)
def test_bad_input_is_refused(change, named, tmp_path):
    examples = data()
    given = {"model": tiny_models.build("llama"), "data": examples, "output": "healed", "heldout": None} | change
    plan = planned.plan(tiny_models.build("llama"), [2], "layer", None, search="greedy")
    plan = plan.changed(data={**plan.data, "heldout_rows": rows_of(examples.heldout)})
    with pytest.raises(FulldepthError, match=named):
        heal_into(plan, output=tmp_path / given.pop("output"), steps=0, progress=False, **given)
    assert not list(tmp_path.iterdir())
