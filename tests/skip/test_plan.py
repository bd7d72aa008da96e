"""Plans: what comes back, what is refused and in which words; against files written down by hand."""

import copy
import json
import math
import os

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fulldepth.errors import FulldepthError
from fulldepth.hf import Scalars, anatomy_candidates
from fulldepth.skip.plan import CRITERIA, SEARCHES, Plan, model_hash
from tiny_models import build

HASH = "sha256:" + "0123456789abcdef" * 4
FACTORS = ("b_att", "s_att", "b_mlp", "s_mlp")
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox"]


def document(depth=4, blocks=(3, 1), granularity="attention", healed=True, per_channel=0):
    """A valid plan, written down by hand."""
    keep = {"attention": FACTORS[2:], "mlp": FACTORS[:2], "layer": ()}[granularity]
    value = [0.5] * per_channel if per_channel else 1.25
    scalars = {
        str(layer): {name: value for name in (keep if layer in blocks else FACTORS)}
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


def edited(path, value, source=None):
    """A valid plan with one entry exchanged (dots lead inside)."""
    found = copy.deepcopy(source or document())
    *outer, last = path.split(".")
    inner = found
    for key in outer:
        inner = inner[int(key) if isinstance(inner, list) else key]
    inner[int(last) if isinstance(inner, list) else last] = value
    return found


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
    found["seed"] = draw(st.integers(0, 2**63))
    found["model"]["name"] = draw(st.text(min_size=1))
    found["data"][draw(st.text())] = draw(st.recursive(st.none() | st.booleans() | st.text(), st.lists, max_leaves=3))
    found["data"]["hash"] = HASH
    return found


@given(plans())
def test_every_plan_comes_back_as_it_was(tmp_path_factory, found):
    folder = tmp_path_factory.mktemp("plan")
    path = Plan.of(found).save(folder / "a.json")
    assert json.loads(path.read_text("utf-8")) == found
    again = Plan.load(path)
    assert again == Plan.of(found)
    assert again.save(folder / "b.json").read_bytes() == path.read_bytes()


def test_file_has_the_keys_of_the_issue_in_its_order(tmp_path):
    keys = "schema_version model granularity criterion search blocks losses healed_loss control_loss scalars data seed"
    shuffled = dict(reversed(document().items()))
    shuffled["scalars"] = {key: dict(reversed(v.items())) for key, v in reversed(shuffled["scalars"].items())}
    Plan.of(shuffled).save(tmp_path)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert list(written) == [*keys.split(), "versions", "cost"]
    assert list(written["model"]) == ["name", "class", "hash"]
    assert list(written["scalars"]) == ["1", "2", "3", "4"]
    assert list(written["scalars"]["2"]) == list(FACTORS)
    assert Plan.load(tmp_path) == Plan.load(tmp_path / "plan.json") == Plan.of(document())
    deep = dict(reversed(document(12)["scalars"].items()))
    assert list(Plan.of({**document(), "scalars": deep}).document()["scalars"]) == [str(i) for i in range(1, 13)]


@pytest.mark.parametrize("granularity", ["attention", "mlp", "layer"])
@pytest.mark.parametrize("width", [None, 3])
def test_fits_the_scalars_of_the_surgery(granularity, width):
    scalars = Scalars(4, [3, 1], granularity, width)
    plan = Plan.of({**document(granularity=granularity), "scalars": scalars.as_dict()})
    assert Scalars.from_dict(plan.scalars, 4, granularity).as_dict() == scalars.as_dict()


def test_all_layers_may_go():
    assert Plan.of(document(2, (2, 1), "layer")).scalars == {}
    assert Plan.of(document(2, (2, 1))).scalars["1"] == {"b_mlp": 1.25, "s_mlp": 1.25}


NONSENSE = [
    ("schema_version", 2, "has schema version 2, this fulldepth reads 1"),
    ("schema_version", True, "has schema version True"),
    ("schema_version", "1", "has schema version '1'"),
    ("model", "gpt2", "model: got "),
    ("model.class", "", "model.class: got "),
    ("model.hash", "sha256:12", "model.hash: got "),
    ("model.hash", HASH + "\n", "model.hash: got "),
    ("model.size", 3, "Unknown entry 'model.size'"),
    ("granularity", "atention", "Unknown granularity 'atention'. Did you mean 'attention'?"),
    ("criterion", "los", "Unknown criterion 'los'. Did you mean 'loss'?"),
    ("search", "greddy", "Unknown search 'greddy'. Did you mean 'greedy'?"),
    ("blocks", [], "blocks is empty"),
    ("blocks", [3, 3], "blocks names layer 3 more than once"),
    ("blocks", [3, 0], "blocks.1: got 0 (integer), expected greater than 0"),
    ("blocks", [3, -1], "blocks.1: got -1"),
    ("blocks", [3, 1.0], "blocks.1: got 1.0 (number), expected an integer"),
    ("blocks", [3, True], "blocks.1: got true (true/false), expected an integer"),
    ("blocks", [3, "1"], 'blocks.1: got "1" (text), expected an integer'),
    ("blocks", [3, 1, 2], "losses has 3 numbers for 3 blocks; expected 4"),
    ("blocks", [3, 2], "scalars of layer 1: got b_mlp, s_mlp, expected b_att, s_att, b_mlp, s_mlp"),
    ("blocks", [3, 9], "scalars of layer 1: got"),
    ("blocks", 3, "blocks: got 3 (integer), expected a list"),
    ("losses", [2.0, 2.1], "losses has 2 numbers for 2 blocks; expected 3"),
    ("losses.1", math.nan, "losses.1: got NaN (number), expected a finite number"),
    ("losses.1", math.inf, "losses.1: got Infinity (number), expected a finite number"),
    ("losses.1", -0.1, "losses.1: got -0.1 (number), expected greater than or equal to 0"),
    ("losses.1", None, "losses.1: got null (nothing), expected a number"),
    ("healed_loss", None, "Of healed_loss and control_loss one is null"),
    ("healed_loss", math.nan, "healed_loss: got NaN"),
    ("control_loss", None, "Of healed_loss and control_loss one is null"),
    ("control_loss", {}, "control_loss.scalars_only: a value is required"),
    ("control_loss", {"scalars_only": 1.0, "more": 1.0}, "Unknown entry 'control_loss.more'"),
    ("scalars", {}, "scalars has nothing for layers 1, 2, 3"),
    ("scalars.03", {"b_mlp": 1.0, "s_mlp": 1.0}, "scalars names the layer '03'"),
    ("scalars.0", {}, "scalars names the layer '0'"),
    ("scalars.x", {}, "scalars names the layer 'x'"),
    ("scalars.6", dict.fromkeys(FACTORS, 1.0), "scalars has nothing for layer 5"),
    ("scalars.999999999", dict.fromkeys(FACTORS, 1.0), "scalars has nothing for layers 5, 6, 7, 8, 9, 10, 11, 12, ..."),
    (
        "scalars.3.b_att",
        1.0,
        "scalars of layer 3: got b_mlp, s_mlp, b_att, expected b_mlp, s_mlp, because its attention",
    ),
    ("scalars.2", {"b_att": 1.0}, "scalars of layer 2: got b_att, expected b_att, s_att, b_mlp, s_mlp"),
    ("scalars.2.b_atn", 1.0, "Unknown scalar of layer 2 'b_atn'. Did you mean 'b_att'"),
    ("scalars.2.b_att", math.nan, "scalars.2.b_att: got NaN"),
    ("scalars.2.b_att", 1e39, "scalars.2.b_att: got 1e+39"),
    ("scalars.2.b_att", "1", 'scalars.2.b_att: got "1" (text)'),
    ("scalars.2.b_att", [1.0], "scalars must be one number each, or lists of one length"),
    ("scalars.2.b_att", [], "scalars must be one number each, or lists of one length"),
    ("data", {}, "data.hash is None, expected sha256:"),
    ("data.hash", 7, "data.hash is 7, expected sha256:"),
    ("data.mean", math.nan, "data holds a number that is not finite"),
    ("seed", -1, "seed: got -1"),
    ("seed", 0.5, "seed: got 0.5"),
    ("versions", {"torch": 2}, "versions.torch: got 2 (integer), expected text"),
    ("cost", {"forwards": 1, "flops": 1}, "cost.seconds is None, expected a number from 0"),
    ("cost.flops", -1, "cost.flops is -1, expected a number from 0"),
    ("cost.flops", True, "cost.flops is True"),
    ("cost.flops", math.inf, "cost.flops is inf"),
    ("cost.extra", math.nan, "cost holds a number that is not finite"),
    ("blcks", [1], "Unknown entry 'blcks'. Did you mean 'blocks'?"),
]


@pytest.mark.parametrize(("path", "value", "message"), NONSENSE)
def test_plan_edited_into_nonsense(tmp_path, path, value, message):
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(edited(path, value)))
    with pytest.raises(FulldepthError) as caught:
        Plan.load(file)
    assert str(caught.value).startswith(str(file))
    finite = not isinstance(value, float) or math.isfinite(value)
    assert (message if finite else "is not valid JSON") in str(caught.value)
    assert len(str(caught.value)) < 1000
    with pytest.raises(FulldepthError) as caught:
        Plan.of(edited(path, value))
    assert message in str(caught.value)


def test_scalars_that_nothing_is_known_of():
    with pytest.raises(FulldepthError, match="Some scalars are not 1, but healed_loss is null"):
        Plan.of({**document(healed=False), "scalars": document()["scalars"]})
    ones = Scalars(4, [3, 1]).as_dict()
    assert Plan.of({**document(healed=False), "scalars": ones}).scalars == ones


def test_layer_plan_with_scalars_of_a_layer_that_is_gone():
    found = document(granularity="layer")
    found["scalars"]["3"] = {"b_mlp": 1.0, "s_mlp": 1.0}
    with pytest.raises(FulldepthError, match="scalars of layer 3: got b_mlp, s_mlp, expected none, because it is skip"):
        Plan.of(found)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(st.data())
def test_any_entry_edited_is_still_a_plan_or_refused_in_words(tmp_path_factory, data):
    """Whatever stands in the place of an entry: a readable error, or a plan whose file comes back."""
    paths = [".".join(map(str, path)) for path in leaves(document())]
    found = edited(data.draw(st.sampled_from(paths)), data.draw(json_values))
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_text(json.dumps(found))
    plan = message = None
    try:
        plan = Plan.load(file)
    except FulldepthError as error:
        message = str(error)
    if plan is None:
        assert message.startswith(str(file))
    else:
        assert plan.document() == json.loads(plan.save(file).read_text("utf-8"))
        assert len(plan.losses) == len(plan.blocks) + 1
        assert len(set(plan.blocks)) == len(plan.blocks)


@given(st.data())
def test_any_entry_taken_away(data):
    path = data.draw(st.sampled_from([path for path in leaves(document()) if not isinstance(path[-1], int)]))
    assume(path != ("scalars", "4"))  # only the model shows that there is a fourth layer
    assume(path[0] not in ("versions", "data", "cost") or len(path) == 1 or path[1] in ("hash", "flops"))
    found = document()
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    with pytest.raises(FulldepthError):
        Plan.of(found)


def leaves(value, path=()):
    """Paths to everything inside a document."""
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        found += leaves(part, (*path, key))
    return found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "Expecting value: line 1 column 1"),
        (b'{"blocks": [1,', "Expecting value"),
        (b"\xff\xfe\xff", "codec"),
        (b"[1]", "is no plan: it holds list, expected a JSON object"),
        (b'{"seed": 0, "seed": 1}', "'seed' appears twice"),
        (b'{"schema_version": 1, "model": {"name": "\\ud800"}}', "is no valid plan. It is not JSON: unexpected"),
        (b'{"schema_version": 1, "data": ' + b"[" * 700 + b"]" * 700 + b"}", "nested deeper than 64 levels"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"schema_version": ' + b"9" * 4000 + b"}", "a number of 4,000 digits"),
        (b'{"schema_version": 1, ' + b", ".join(b'"x%d": 0' % n for n in range(999)) + b"}", "a value is required"),
    ],
)
def test_file_that_is_no_plan(tmp_path, text, message):
    file = tmp_path / "plan.json"
    file.write_bytes(text)
    with pytest.raises(FulldepthError, match=str(file)) as caught:
        Plan.load(file)
    assert message in str(caught.value)


def test_no_file_and_no_place(tmp_path):
    with pytest.raises(FulldepthError, match=r"There is no plan .*plan\.json"):
        Plan.load(tmp_path)
    with pytest.raises(FulldepthError, match="There is no plan"):
        Plan.load(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(FulldepthError, match="Cannot write the plan to"):
        Plan.of(document()).save(tmp_path / "file" / "plan.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_nothing_half_written(tmp_path, monkeypatch):
    plan = Plan.of(document())
    plan.save(tmp_path)
    before = (tmp_path / "plan.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FulldepthError, match="No space left on device"):
        plan.changed(seed=1).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_bytes() == before


def test_saving_checks_again(tmp_path):
    plan = Plan.of(document())
    plan.losses[1] = math.nan
    with pytest.raises(FulldepthError, match=r"losses.1: got NaN"):
        plan.save(tmp_path)
    assert not list(tmp_path.iterdir())


def plan_for(model, blocks=(2,), **options):
    depth = anatomy_candidates(model)[0].num_layers
    found = document(depth, blocks, **options)
    found["model"] |= {"class": type(model).__name__, "hash": model_hash(model)}
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("granularity", ["attention", "mlp", "layer"])
def test_plan_fits_its_own_model(name, granularity):
    model = build(name)
    for healed in (True, False):
        plan = Plan.of(plan_for(model, (3, 1), granularity=granularity, healed=healed))
        plan.check_model(model)
        plan.check_model(anatomy_candidates(model)[0])
    Plan.of(plan_for(model, per_channel=anatomy_candidates(model)[0].width)).check_model(model)


def test_plan_for_another_model():
    model = build("llama")
    plan = Plan.of(plan_for(model))
    with pytest.raises(FulldepthError, match=r"for a LlamaForCausalLM .*, this is a MistralForCausalLM"):
        plan.check_model(build("mistral"))
    with pytest.raises(FulldepthError, match="for another LlamaForCausalLM: the weights are not those of somewhere"):
        plan.check_model(build("llama", seed=1))
    with pytest.raises(FulldepthError, match="in the precision in which it was searched"):
        plan.check_model(build("llama").bfloat16())


def test_plan_of_another_depth_or_width():
    model = build("llama")
    for changes, message in [
        ({"blocks": [4], "scalars": {}, "healed_loss": None, "control_loss": None}, "removes layer 4, .* has 3 layers"),
        ({"scalars": document(2, (2,))["scalars"]}, "scalars for 2 layers, but this LlamaForCausalLM has 3"),
        ({"scalars": document(5, (2,))["scalars"]}, "scalars for 5 layers, but this LlamaForCausalLM has 3"),
        ({"scalars": document(3, (2,), per_channel=7)["scalars"]}, "7 channels, this LlamaForCausalLM has 32"),
    ]:
        with pytest.raises(FulldepthError, match=message):
            Plan.of({**plan_for(model), **changes}).check_model(model)
