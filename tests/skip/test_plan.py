"""Plans: what comes back and what is refused, against files written down by hand."""

import copy
import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulldepth.execution import find_anatomy
from fulldepth.skip.plan import CRITERIA, SEARCHES, Plan
from json_files import read_json, write_json
from refusals import refused
from skip import planned
from tiny_models import build

HASH = "sha256:" + "0123456789abcdef" * 4
FACTORS = ("b_att", "s_att", "b_mlp", "s_mlp")


def document(depth=4, blocks=(3, 1), granularity="attention", healed=True):
    """A valid plan, written down by hand."""
    keep = {"attention": FACTORS[2:], "mlp": FACTORS[:2], "layer": ()}[granularity]
    scalars = {
        str(layer): dict.fromkeys(keep if layer in blocks else FACTORS, 1.25)
        for layer in range(1, depth + 1)
        if not (granularity == "layer" and layer in blocks)
    }
    return {
        "schema_version": 1,
        "model": {"name": "somewhere/model", "class": "LlamaForCausalLM", "hash": HASH},
        "granularity": granularity,
        "criterion": "loss",
        "search": "greedy",
        "blocks": list(blocks),
        "losses": [2.0 + 0.1 * i for i in range(len(blocks) + 1)],
        "healed_loss": 2.05 if healed else None,
        "control_loss": {"scalars_only": 1.9} if healed else None,
        "scalars": scalars if healed else {},
        "data": {"hash": HASH, "name": "pairs.jsonl", "train": {"examples": 8}},
        "seed": 0,
        "versions": {"fulldepth": "0.1.0"},
        "cost": {"forwards": 12, "flops": 3.5e9, "seconds": 1.5, "unsure_rounds": [2]},
    }


finite = st.floats(allow_nan=False, allow_infinity=False, width=32).filter(lambda x: abs(x) < 3e38)


@st.composite
def plans(draw):
    depth = draw(st.integers(1, 6))
    blocks = draw(st.permutations(range(1, depth + 1)).map(lambda p: p[: draw(st.integers(1, depth))]))
    granularity = draw(st.sampled_from(["attention", "mlp", "layer"]))
    found = document(depth, blocks, granularity, draw(st.booleans()))
    for factors in found["scalars"].values():
        for name in factors:
            factors[name] = draw(finite)
    found["losses"] = draw(st.lists(st.floats(0, 1e6), min_size=len(blocks) + 1, max_size=len(blocks) + 1))
    found["criterion"], found["search"] = draw(st.sampled_from(CRITERIA)), draw(st.sampled_from(SEARCHES))
    found["model"]["name"] = draw(st.text(min_size=1))
    found["data"][draw(st.text())] = draw(st.recursive(st.none() | st.booleans() | st.text(), st.lists, max_leaves=3))
    found["data"]["hash"] = HASH
    return found


@given(plans())
def test_every_plan_comes_back_as_it_was(tmp_path_factory, found):
    folder = tmp_path_factory.mktemp("plan")
    path = Plan.of(found).save(folder / "a.json")
    stored = json.loads(path.read_text("utf-8"))
    assert stored.pop("layers_from_0") == {found["granularity"]: sorted(block - 1 for block in found["blocks"])}
    assert stored == found
    again = Plan.load(path)
    assert again == Plan.of(found)
    assert again.save(folder / "b.json").read_bytes() == path.read_bytes()


def test_the_file_has_its_keys_in_order(tmp_path):
    shuffled = dict(reversed(document(12).items()))
    shuffled["scalars"] = {key: dict(reversed(v.items())) for key, v in reversed(shuffled["scalars"].items())}
    Plan.of(shuffled).save(tmp_path)
    expected = []
    for name, value in document(12).items():
        expected += [(name, value)] + [("layers_from_0", {"attention": [0, 2]})] * (name == "blocks")
    assert json.dumps(read_json(tmp_path / "plan.json")) == json.dumps(dict(expected))


def test_layers_count_from_0_too_and_a_plan_that_contradicts_itself_is_refused(tmp_path):
    """Plans without the entry load, and what changes the blocks changes the entry."""
    found = document(8, ["mlp 3", "attention 7", "layer 5", "mlp 7", "mlp 1"], "layer", healed=False)
    plan = Plan.of(found | {"granularity": "any"})
    assert plan.layers_by_part == {"layer": [5, 7], "mlp": [1, 3]}
    assert plan.layers_from_0 == {"layer": [4, 6], "mlp": [0, 2]}
    assert plan.what == "layers 5, 7 and the mlp of layers 1, 3"
    assert plan.changed(blocks=["mlp 2"], losses=[1.0, 1.0]).layers_from_0 == {"mlp": [1]}
    stored = plan.document()
    for wrong in ({"layer": [5, 7], "mlp": [1, 3]}, {"layer": [4, 6]}, {}, None, [4], "x" * 5000):
        write_json(tmp_path / "plan.json", stored | {"layers_from_0": wrong})
        with refused(r'plan\.json is no valid plan.*say \{"layer": \[4, 6\], "mlp": \[0, 2\]\}.*delete it'):
            Plan.load(tmp_path)
    stored["blocks"][0] = "mlp 4"
    with refused("layers_from_0 is .*, but blocks, which count from 1, say"):
        Plan.of(stored)
    del stored["layers_from_0"]
    assert Plan.of(stored).layers_from_0 == {"layer": [4, 6], "mlp": [0, 3]}


def test_removed_modules_have_the_names_of_the_model():
    """Against names written down by hand."""
    names = {
        "llama": ["model.layers.2", "model.layers.0.self_attn", "model.layers.1.mlp"],
        "gpt2": ["transformer.h.2", "transformer.h.0.attn", "transformer.h.1.mlp"],
        "gpt_neox": ["gpt_neox.layers.2", "gpt_neox.layers.0.attention", "gpt_neox.layers.1.mlp"],
    }
    for name, expected in names.items():
        model = build(name)
        plan = planned.plan(model, ["mlp 2", "layer 3", "attention 1"], "any", values=None)
        assert plan.module_names(find_anatomy(model)) == expected


NONSENSE = {
    "schema_version": [2],
    "model": ["gpt2"],
    "model.hash": ["sha256:12", HASH + "\n"],
    "model.size": [3],
    "granularity": ["atention"],
    "criterion": ["los"],
    "search": ["greddy"],
    "blocks": [[], [3, 3], [3, 0], [3, 1.0], [3, True], 3, [3, 1, 2], [3, 2], [3, 9]],
    "losses": [[2.0, 2.1]],
    "losses.1": [math.nan, -0.1, None],
    "healed_loss": [None, math.nan],
    "control_loss": [None, {}],
    "scalars": [{}],
    "scalars.03": [{"b_mlp": 1.0, "s_mlp": 1.0}],
    "scalars.6": [dict.fromkeys(FACTORS, 1.0)],
    "scalars.999999999": [dict.fromkeys(FACTORS, 1.0)],
    "scalars.3.b_att": [1.0],
    "scalars.2": [{"b_att": 1.0}, dict.fromkeys((*FACTORS[:3], "b_atn"), 1.0)],
    "scalars.2.b_att": [math.nan, 1e39, "1"],
    "data.hash": [7],
    "data.mean": [math.nan],
    "seed": [-1],
    "cost": [{"forwards": 1, "flops": 1}],
    "cost.flops": [-1, True, math.inf],
    "blcks": [[1]],
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in NONSENSE.items() for value in values])
def test_a_plan_edited_into_nonsense_is_refused(tmp_path, path, value):
    edited = inner = copy.deepcopy(document())
    *outer, last = path.split(".")
    for key in outer:
        inner = inner[key]
    inner[int(last) if isinstance(inner, list) else last] = value
    write_json(tmp_path / "plan.json", edited)
    with refused(r"plan\.json"):
        Plan.load(tmp_path)
    with refused() as caught:
        Plan.of(edited)
    assert path.partition(".")[0] in str(caught.value) or "scalars" in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"[1]", b'{"seed": 0, "seed": 1}', b"[" * 100_000, None])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "plan.json").write_bytes(text)
    with refused(r"plan\.json"):
        Plan.load(tmp_path)


def test_nothing_half_written(tmp_path, monkeypatch):
    plan = Plan.of(document())
    before = plan.save(tmp_path).read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for target in (tmp_path, tmp_path / "plan.json" / "below"):
        with refused("Cannot write"):
            plan.changed(seed=1).save(target)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_bytes() == before


def test_the_plan_of_a_model_takes_no_other():
    model, deeper = build("gpt2"), planned.scalars([2], 4)
    plan = planned.plan(model)
    plan.check_model(model)
    wrong = [(plan, build("mistral")), (plan, build("gpt2", seed=1))]
    wrong += [(planned.plan(model, values=deeper), model), (planned.plan(model, [9], values=None), model)]
    for made, other in wrong:
        with refused("plan"):
            made.check_model(other)
