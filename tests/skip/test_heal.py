"""Refitted weights against least squares by numpy on states of stock models, removed by hooks."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_models
from data.conftest import jsonl
from evaluation import small_world
from fulldepth.architectures import SKIPPED
from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples, read_examples
from fulldepth.data.packing import pack
from fulldepth.evaluation import evaluate
from fulldepth.execution import find_anatomy
from fulldepth.execution.heldout import heldout_losses
from fulldepth.results import Results
from fulldepth.skip import least_squares as module
from fulldepth.skip import load
from fulldepth.skip.exports.export import read_notes
from fulldepth.skip.heal import heal as heal_into
from fulldepth.skip.own_text import OwnText
from fulldepth.skip.plan import HEALED, listing, row_of
from fulldepth.skip.tasks import TaskComparison
from fulldepth.training import train
from json_files import read_json
from refusals import refused
from skip import plain, planned
from tiny_models import seeded

STRENGTH = 0.1
ATTENTIONS = [((1, "mlp"), (2, "attention")), ((2, "mlp"), (3, "attention")), ((3, "mlp"), (3, "mlp"))]
LAYER = [((1, "mlp"), (2, "mlp")), ((3, "attention"), (3, "attention")), ((3, "mlp"), (3, "mlp"))]
MLPS = [((1, "attention"), (1, "mlp")), *(((2, own), (2, own)) for own in ("attention", "mlp"))]
PAIRS = [
    ("llama", "layer", [2], LAYER),
    ("llama", "attention", [2, 3], ATTENTIONS),
    ("qwen2", "mlp", [3, 1], [*MLPS, ((3, "attention"), (3, "mlp"))]),
    ("gpt2", "layer", [1, 3], [((2, "attention"), (2, "attention")), ((2, "mlp"), (3, "mlp"))]),  # Conv1D with a bias
    ("gpt_neox", "attention", [2], [((2, "mlp"), (2, "attention")), ((3, "mlp"), (3, "mlp"))]),  # one sum takes both
    ("gpt_neox", "layer", [2], [LAYER[0], LAYER[2]]),
    ("granite", "layer", [2], LAYER),  # branches are scaled in the sum
    ("opt", "mlp", [2], [((2, "attention"), (2, "mlp")), *LAYER[1:]]),
]
"""Family, what is removed, and every refitted branch with the one behind which the stream is matched."""
PROJECTIONS = {
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "gpt_neox": ("attention.dense", "mlp.dense_4h_to_h"),
    "opt": ("self_attn.out_proj", "fc2"),
}


def texts(count, seed):
    generator = seeded(seed)
    lengths = torch.randint(6, 14, (count,), generator=generator).tolist()
    drawn = [torch.randint(3, tiny_models.VOCAB, (length,), generator=generator) for length in lengths]
    return [Example.of(ids.tolist(), 1, len(ids), document=number) for number, ids in enumerate(drawn)]


def data(train=60, heldout=12):
    return Examples(texts(train, 1), texts(heldout, 2), {"hash": "sha256:" + "1" * 64, "name": "texts", "kind": "text"})


def refit(model, blocks, granularity="layer"):
    """A healing of the texts without training."""
    return module.refit(planned.plan(model, blocks, granularity, None), model, data(), progress=False)


@pytest.fixture
def always(monkeypatch):
    """The change of one strength is taken, whatever it leaves."""

    def take(strength=STRENGTH):
        monkeypatch.setattr(module, "best_change", lambda own, others: (strength, 0.5, own.change(strength)))

    return take


class Streams:
    """A stock model without branches, and what its modules pass on in one pass over a text."""

    def __init__(self, model, removed=()):
        self.model, self.removed = model, removed
        self.gain = getattr(model.config, "residual_multiplier", 1.0)
        self.parallel = model.config.model_type == "gpt_neox"

    def projection(self, branch):
        names = PROJECTIONS.get(self.model.config.model_type, ("self_attn.o_proj", "mlp.down_proj"))
        return plain.blocks_of(self.model)[branch[0] - 1].get_submodule(names[branch[1] == "mlp"])

    def __call__(self, ids, branch, end):
        """[T, K] inputs of a branch's projection, times the gain; [T, D] the stream behind `end`; logits."""
        seen = {}
        projection = self.projection(branch)
        hooks = [projection.register_forward_pre_hook(lambda m, a: seen.update(inputs=a[0]))]
        for number, block in enumerate(plain.blocks_of(self.model), start=1):
            hooks.append(
                block.register_forward_hook(
                    lambda m, a, k, o, n=number: seen.update(
                        {(n, "in"): a[0] if a else k["hidden_states"], (n, "out"): o[0] if isinstance(o, tuple) else o}
                    ),
                    with_kwargs=True,
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
        return self.gain * seen["inputs"].reshape(len(ids), -1), stream[0], logits

    def branch(self, seen, key, output):
        value = output[0] if isinstance(output, tuple) else output
        seen[key] = value = torch.zeros_like(value) if key in self.removed else value
        return (value, *output[1:]) if isinstance(output, tuple) else value


def least_squares(inputs, own, wanted):
    """`W' - W` by numpy on stacked rows, as the docstring of the module states it."""
    a, s, x = (np.concatenate(rows) for rows in (inputs, own, wanted))
    root = 1 / np.linalg.norm(s, axis=1, keepdims=True)
    ridge = STRENGTH * ((root * a) ** 2).sum() / a.shape[1]
    rows = np.concatenate([root * a, np.sqrt(ridge) * np.eye(a.shape[1])])
    return np.linalg.lstsq(rows, np.concatenate([root * (x - s), np.zeros((a.shape[1], s.shape[1]))]))[0]


@pytest.mark.parametrize(("family", "granularity", "blocks", "pairs"), PAIRS)
@torch.no_grad()
def test_a_healed_model_has_the_weights_of_least_squares(family, granularity, blocks, pairs, always):
    model = tiny_models.build(family, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    always()
    healing = refit(model, blocks, granularity)
    fitted = module.split_rows(planned.plan(model, blocks, granularity, None), data(), False, 0)[0]
    roles = ("attention", "mlp") if granularity == "layer" else (granularity,)
    gone = {(layer, role) for layer in blocks for role in roles}
    stock, healed = Streams(model), Streams(copy.deepcopy(model), gone)
    for branch, end in pairs:
        passes = [(stock(e.input_ids, branch, end), healed(e.input_ids, branch, end)) for e in fitted]
        rows = (
            [a.numpy() for a in part] for part in zip(*((own[0], own[1], ref[1]) for ref, own in passes), strict=True)
        )
        change, projection = torch.from_numpy(least_squares(*rows)), healed.projection(branch)
        projection.weight += change.T if isinstance(projection, nn.Linear) else change
    ids = texts(1, 3)[0].input_ids
    expected, removed = (Streams(own, gone)(ids, *pairs[0])[2] for own in (healed.model, model))
    got = healing.model(input_ids=ids[None]).logits[0]
    assert torch.allclose(got, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert (got - removed).abs().max() > 1e-3 * removed.abs().max()
    assert [(own.branch, own.end) for own in healing.refits] == [
        tuple(f"{role} of layer {layer}" for layer, role in pair) for pair in pairs
    ]
    assert tiny_models.same_weights(model, before)


@torch.no_grad()
def test_a_removed_layer_that_is_linear_in_its_host_is_healed_exactly(always):
    """Layer 1 writes its MLP into channels that are empty before it; layer 2 adds a linear map of them."""
    model, half = tiny_models.build("llama", dtype=torch.float64), tiny_models.WIDTH // 2
    first, second = model.model.layers[:2]
    model.model.embed_tokens.weight[:, half:] = 0
    for zero in (first.self_attn.o_proj.weight, first.mlp.down_proj.weight[:half], second.self_attn.o_proj.weight):
        zero.zero_()
    second.post_attention_layernorm = nn.Identity()
    second.mlp = nn.Linear(tiny_models.WIDTH, tiny_models.WIDTH, bias=False).double()
    second.mlp.weight[:, :half] = 0
    always(1e-12)
    healing = refit(model, [2])
    ids = texts(1, 3)[0].input_ids[None]
    expected = model(input_ids=ids).logits
    assert torch.allclose(healing.model(input_ids=ids).logits, expected, rtol=0, atol=1e-6)
    assert healing.readings["kl"].mean("removed") > 1e-3
    assert healing.readings["kl"].mean("refitted") < 1e-9
    assert healing.readings["greedy_agreement"].mean("refitted") == 1


def test_the_strength_leaves_the_smallest_sum_on_rows_that_were_not_fitted():
    """Against the sums themselves, on rows of which half of what is wanted follows from the inputs."""
    generator = seeded(0)
    inputs, stream, noise = (torch.randn(2, 60, size, generator=generator).double() for size in (20, 6, 6))
    wanted = stream + inputs @ torch.randn(20, 6, generator=generator).double() / 4 + noise
    parts = module.RidgeSums(), module.RidgeSums()
    for own, rows in zip(parts, zip(inputs, stream, wanted, strict=True), strict=True):
        own.add(*rows)
    strength, left, change = module.best_change(*parts)
    weight = 1 / stream[1].norm(dim=-1, keepdim=True)

    def sum_left(change):
        return float((weight * (stream[1] + inputs[1] @ change - wanted[1])).square().sum())

    tried = {own: sum_left(parts[0].change(own)) / sum_left(torch.zeros(20, 6).double()) for own in module.STRENGTHS}
    assert strength == min(tried, key=tried.get)
    assert max(module.STRENGTHS) > strength > min(module.STRENGTHS)
    assert left == pytest.approx(tried[strength])
    assert torch.equal(change, parts[0].change(strength))
    unrelated = module.RidgeSums()
    unrelated.add(inputs[1], stream[1], stream[1] - inputs[1] @ change)
    assert module.best_change(parts[0], unrelated) == (None, 1.0, None)


@pytest.mark.parametrize("family", ["llama", "opt"])
@torch.no_grad()
def test_inputs_and_streams_of_zeros_change_nothing_and_end_nothing(family, always):
    """A dead MLP has no inputs to fit; a plan without blocks has nothing to heal; an empty stream counts nothing."""
    model = tiny_models.build(family, dtype=torch.float64)
    name = "up_proj" if family == "llama" else "fc1"
    dead = next(part for path, part in model.named_modules() if path.endswith(name))
    for weight in dead.parameters():
        weight.zero_()
    always()
    healed = refit(model, [2], "attention").model
    same = [torch.equal(own, model.get_parameter(path)) for path, own in healed.named_parameters() if ".0." in path]
    assert len(same) > 5
    assert all(same)
    assert not module.ends(find_anatomy(model), frozenset())
    inputs, stream, wanted = torch.ones(2, 3), torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.ones(2, 2)
    both, one = module.RidgeSums(), module.RidgeSums()
    both.add(inputs, stream, wanted)
    one.add(inputs[1:], stream[1:], wanted[1:])
    assert torch.equal(both.gram, one.gram)
    assert torch.equal(both.cross, one.cross)
    assert float(both.gap) == float(one.gap) == pytest.approx((2**2 + 3**2) / 25)


def test_losses_are_of_rows_that_neither_choice_nor_refit_saw():
    model = plain.trained(5, steps=200)
    plan, examples = planned.plan(model, [2, 3], "layer"), plain.examples(train=60)
    healing = module.refit(plan, model, examples, progress=False)
    unseen = healing.examples.heldout
    models = {"original": model, "removed": planned.scaled(model, plan), "refitted": healing.model}
    losses = {label: plain.loss(own, unseen, (), "layer") for label, own in models.items()}
    for label, loss in losses.items():
        assert healing.readings["loss"].mean(label) == pytest.approx(loss, abs=1e-4)
    assert losses["refitted"] < losses["removed"] - 0.1 * (losses["removed"] - losses["original"])
    parts = module.split_rows(plan, examples, False, 0)
    numbers = [{id(example) for example in part} for part in parts]
    assert len(set.union(*numbers)) == sum(map(len, numbers)) == len(examples.train) + len(examples.heldout)


def test_a_branch_behind_a_norm_stays_as_it_is():
    model = tiny_models.build("gemma3")
    healing = refit(model, [2])
    assert {(own.strength, own.reason) for own in healing.refits} == {
        (None, "its output is not that of one linear layer of its own")
    }


def test_a_model_that_no_format_holds_is_refused_before_the_refit(monkeypatch):
    kind = SKIPPED["llama"]
    monkeypatch.setattr(module, "_heal", lambda *_: pytest.fail("refitted"))
    with refused("SkippedLlamaForCausalLM is no class of transformers"):
        refit(kind(kind.config_class(**tiny_models.DECODER, skipped_attention=[2])).eval(), [1], "attention")


@pytest.mark.parametrize(
    ("granularity", "family"), [("layer", "LlamaForCausalLM"), ("attention", "SkippedLlamaForCausalLM")]
)
def test_the_folder_is_a_checkpoint_with_results(granularity, family, tmp_path, unproven):
    model = tiny_models.build("llama")
    plan = planned.plan(model, [2], granularity, None)
    results = heal_into(plan, model, data(), tmp_path / "healed", steps=0, progress=False)
    config = read_json(tmp_path / "healed" / "config.json")
    assert config["architectures"] == [family]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "healed")
    healed = refit(model, [2], granularity).model
    ids = texts(1, 3)[0].input_ids[None]
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, healed(input_ids=ids).logits, atol=1e-4)
    saved = Results.load(tmp_path / "healed")
    assert saved.headline == results.headline
    assert list(saved.values("loss", "mean", "model", model="refitted")) == [
        results.values("loss", "mean", "model", model="refitted").item()
    ]
    seen = read_notes(tmp_path / "healed")["plan"]["data"]
    rows_seen = listing([*data().heldout, *module.split_rows(plan, data(), False, 0)[0]], HEALED)
    assert {name: seen[name] for name in rows_seen} == rows_seen
    page = (tmp_path / "healed" / "report.html").read_text()
    assert "What healing brings" in page
    assert "mlp of layer 1" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": data(1, 4)}, "no rows to fit weights on"),
        ({"model": tiny_models.build("llama", seed=1)}, "another LlamaForCausalLM"),
        ({"model": cpu_offload(tiny_models.build("llama"))}, "Offloaded"),
        ({"output": "."}, "exists already"),
        ({"gguf_type": "f16"}, "--gguf-type has no effect without --gguf"),
        ({"rank": 4}, "--rank has no effect with --steps 0"),
        ({"heldout": "the rows of the search"}, "12 of 12 held-out rows also chose the blocks"),
        ({"model": "a/model", "steps": 1}, r"needs peft: pip install 'fulldepth\[lora\]'"),  # before the refit
    ],
)
def test_bad_input_is_refused(change, named, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    examples = data()
    given = {"model": tiny_models.build("llama"), "data": examples, "output": "healed", "heldout": None, "steps": 0}
    given |= change
    plan = planned.plan(tiny_models.build("llama"), granularity="layer", values=None, search="greedy")
    plan = plan.changed(data={**plan.data, **listing(examples.heldout)})
    with refused(named):
        heal_into(plan, output=tmp_path / given.pop("output"), progress=False, **given)
    assert not list(tmp_path.iterdir())


def test_tasks_are_read_beside_the_original_and_the_control(tmp_path, monkeypatch):
    """Scores are those of the folders when they are loaded; errors are of the differences of lm-eval's examples."""
    pytest.importorskip("lm_eval")
    model = small_world.model()
    model.save_pretrained(tmp_path / "model")
    small_world.tokenizer().save_pretrained(tmp_path / "model")
    folder = small_world.write_data(tmp_path / "data")
    rows = [{"question": f"What is {n}?", "choices": ["sun", "sea", "sky"], "gold": n % 3} for n in range(30)]
    jsonl(folder / "lm-eval" / "arc_easy_test.jsonl", *rows)
    tasks = {"tasks": ["arc_easy_local"], "task_data": [str(folder)]}
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"the {noun} is {n}. " * 4}) + "\n" for n, noun in enumerate("abc" * 9))
    )
    plan = planned.plan(model, [2], "attention", None)
    lines = []

    def train_and_keep(run, output, **options):
        trained = train(run, output, **options)
        if output.name == "control":  # the work folder is deleted
            shutil.copytree(output, tmp_path / "kept")
        return trained

    monkeypatch.setattr(sys.modules["fulldepth.skip.heal"], "train", train_and_keep)
    results = heal_into(
        plan,
        tmp_path / "model",
        f"own,{text}",
        tmp_path / "healed",
        max_sequences=40,
        sequence_length=48,
        steps=1,
        rank=0,
        **tasks,
        watcher=Watcher(say=lines.append),
    )
    own = [json.loads(line) for line in (tmp_path / "healed" / "own.jsonl").read_text().splitlines()]
    assert len(own) == 20
    assert not any("one kind of text" in line for line in lines)
    models = results.table["model"].unique()
    assert set(models) == {"original", "removed", "refitted", "trained", "control"}
    right = {}
    checkpoints = {"original": model, "trained": load(tmp_path / "healed"), "control": tmp_path / "kept"}
    for name, checkpoint in checkpoints.items():
        options = {"tokenizer": small_world.tokenizer(), "exit_layers": "full", "log_samples": True}
        evaluate(checkpoint, output=tmp_path / name, **tasks, **options)
        rows = map(json.loads, (tmp_path / name / "samples_arc_easy_local.jsonl").read_text().splitlines())
        right[name] = np.array([row["acc"] for row in sorted(rows, key=lambda row: row["doc_id"])])
        scores = results.table[(results.table["measure"] == "task_score") & (results.table["model"] == name)]
        assert scores.loc[scores["statistic"] == "acc", "value"].item() == right[name].mean()
    opening = [*results.headline.items()][:2]
    assert [name for name, _ in opening] == ["task arc_easy_local", "task_cost arc_easy_local"]
    for (_, finding), reference in zip(opening, ("original", "control"), strict=True):
        gap = right["trained"] - right[reference]
        assert gap.std() > 0
        assert finding["value"] == pytest.approx(gap.mean())
        assert finding["standard_error"] == pytest.approx(gap.std(ddof=1) / 30**0.5, rel=1e-5)
    assert "the original trained on the same tokens" in opening[1][1]["sentence"]
    page = (tmp_path / "healed" / "report.html").read_text()
    assert page.index("arc_easy_local") < page.index("the original trained on the same") < page.index("held-out loss")
    card = (tmp_path / "healed" / "README.md").read_text()
    assert card.index("Task arc_easy_local |") < card.index("Task arc_easy_local, net cost |")
    with refused("Unknown task"):
        heal_into(plan, tmp_path / "model", str(text), tmp_path / "other", tasks=["arc_eazy"], steps=0)
    with refused("Tasks of a loaded model need its tokenizer"):
        heal_into(plan, model, data(), tmp_path / "other", steps=0, **tasks)


def full_disk(*_):
    raise FulldepthError("The disk is full.")


@pytest.mark.slow
def test_tasks_that_cannot_run_are_refused_before_the_refit_and_readings_and_warnings_are_kept(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    model = small_world.model()
    plan = planned.plan(model, [2], "attention", None)
    options = {"steps": 0, "tokenizer": small_world.tokenizer(), "tasks": ["lambada_local"], "progress": False}
    folders = []
    for name, row in (
        ("long", {"context": "a", "target": " b" * 1100}),
        ("cut", {"context": "a" * 3000, "target": "b"}),
    ):
        folders.append(tmp_path / name)
        (folders[-1] / "lm-eval").mkdir(parents=True)
        jsonl(folders[-1] / "lm-eval" / "lambada_test.jsonl", *[row] * 3)
    with monkeypatch.context() as patched, refused("longer than the model's 2,048 positions"):
        patched.setattr(module, "_heal", lambda *_: pytest.fail("refitted"))
        heal_into(plan, model, data(), tmp_path / "healed", task_data=[str(folders[0])], **options)
    with monkeypatch.context() as patched, refused("The disk is full"):
        patched.setattr(module, "_heal", full_disk)
        heal_into(plan, model, data(), tmp_path / "healed", task_data=[str(folders[1])], **options)
    stored = tmp_path / "healed-work" / "tasks-original" / "results.json"
    assert stored.is_file()
    stored.write_bytes(stored.read_bytes()[:100])  # damaged: read anew
    with monkeypatch.context() as patched, refused("The disk is full"):  # other tasks are read anew
        patched.setattr(module, "_heal", full_disk)
        heal_into(plan, model, data(), tmp_path / "healed", task_data=[str(folders[1])], task_limit=1, **options)
    assert read_json(stored)["settings"]["limit"] == 1
    results = heal_into(plan, model, data(), tmp_path / "healed", task_data=[str(folders[1])], **options)
    assert not (tmp_path / "healed-work").exists()
    assert [text for text in results.meta["warnings"] if "did not fit in the model's positions" in text] == [
        "Tasks: 1 request of lambada_local did not fit in the model's positions; beginnings were cut, as lm-eval does."
    ]


@pytest.mark.slow
def test_a_tokenizer_of_the_search_that_is_gone_is_named_with_the_option(tmp_path):
    model = small_world.model()
    plan = planned.plan(model, [2], "attention", None)
    plan = plan.changed(data={**plan.data, "tokenizer": str(tmp_path / "gone")})
    with refused(r"with the tokenizer \S+gone, which cannot be opened. Name its place with --tokenizer. No"):
        heal_into(plan, model, data(), tmp_path / "healed", steps=0, progress=False)
    heal_into(plan, model, data(), tmp_path / "healed", steps=0, tokenizer=small_world.tokenizer(), progress=False)


def test_warnings_of_tasks_name_the_model_unless_both_have_them():
    comparison = TaskComparison(None, None, None, None)
    for name, warnings in (("original", ["cut", "slow"]), ("refitted", ["none right", "cut"])):
        comparison.scores[name] = SimpleNamespace(meta={"warnings": warnings})
    named = ["Tasks of the original model: slow", "Tasks of the refitted model: none right"]
    assert comparison.warnings == ["Tasks: cut", *named]


@pytest.mark.slow
def test_own_text_outlives_a_healing_that_is_refused(tmp_path):
    model = small_world.model()
    plan = planned.plan(model, [2], "attention", None)
    options = {"tokenizer": small_world.tokenizer(), "sequence_length": 48, "steps": 0}
    with refused("none can be held out"):
        heal_into(plan, model, "own", tmp_path / "healed", max_sequences=2, **options)
    own = tmp_path / "healed-work" / "own.jsonl"
    written = own.read_text()
    assert len(written.splitlines()) == 2
    own.write_text(written.upper())
    with refused("has changed since it was written"):
        heal_into(plan, model, "own", tmp_path / "healed", max_sequences=2, **options)
    assert own.read_text() == written.upper()


@pytest.mark.slow
def test_a_plan_of_plain_pairs_is_healed_on_chats(tmp_path):
    """The plan's way of reading pairs holds for pairs; chats have the template, whatever it says."""
    model = small_world.model()
    tokens = small_world.tokenizer()
    tokens.chat_template = "{% for m in messages %}the {{ m['content'] }} {% endfor %}"
    plan = planned.plan(model, [2], "attention", None)
    plan = plan.changed(cost={**plan.cost, "settings": {"chat": False}})
    turns = [[{"role": "user", "content": f"sun is {n}"}, {"role": "assistant", "content": "a leaf"}] for n in range(9)]
    chats = jsonl(tmp_path / "chats.jsonl", *({"messages": turn} for turn in turns))
    pairs = jsonl(tmp_path / "rows.jsonl", *({"prompt": f"a leaf {n}", "response": " is the sun"} for n in range(9)))
    results = heal_into(plan, model, f"{chats},{pairs}", tmp_path / "healed", tokenizer=tokens, steps=0)
    assert results.meta["settings"]["chat"] is False
    assert results.meta["data"]["train"]["examples"] + results.meta["data"]["heldout"]["examples"] == 18


@pytest.mark.slow
def test_held_out_rows_that_chose_the_blocks_are_refused_before_the_model_writes(tmp_path, monkeypatch):
    model = small_world.model()
    texts_held = [{"text": "the sun is here " * 3}, {"text": "a leaf fell down " * 3}]
    held = str(jsonl(tmp_path / "held.jsonl", *texts_held))
    options = {"tokenizer": small_world.tokenizer(), "sequence_length": 48, "steps": 0}
    chose = read_examples(None, small_world.tokenizer(), 2048, heldout=held, sequence_length=48).heldout
    plan = planned.plan(model, [2], "attention", None)
    plan = plan.changed(data={**plan.data, **listing(chose)}, search="greedy")
    monkeypatch.setattr(OwnText, "write", lambda *_: pytest.fail("written"))
    with refused("3 of 3 held-out rows also chose the blocks"):
        heal_into(plan, model, "own", tmp_path / "healed", heldout=held, **options)


def test_healing_on_one_kind_of_text_says_what_is_unknown(tmp_path, unproven):
    """Without a tokenizer of its own, the healed model is read and written with the search's."""
    model = small_world.model()
    small_world.tokenizer().save_pretrained(tmp_path / "tokenizer")
    lines = []
    plan = planned.plan(model, [2], "layer", None)
    plan = plan.changed(data={**plan.data, "tokenizer": str(tmp_path / "tokenizer")})
    rows = [f"the {noun} is {n}." * 4 for n, noun in enumerate("abcdef" * 5)]
    heal_into(plan, model, rows, tmp_path / "healed", steps=0, watcher=Watcher(say=lines.append))
    assert any("losses on other text are unknown" in line for line in lines)
    saved = AutoTokenizer.from_pretrained(tmp_path / "healed")
    assert saved(rows[0]).input_ids == small_world.tokenizer()(rows[0]).input_ids


def test_a_row_that_is_measured_is_fitted_nowhere_though_the_data_hold_it_twice():
    plan = planned.plan(tiny_models.build("llama"), [2], "attention", None)
    examples = data()
    twice = [*examples.train, *[Example(e.input_ids, e.labels, e.document + 1000) for e in examples.train]]
    fitted, chose, measured = module.split_rows(plan, Examples(twice, examples.heldout), False, 0)
    assert not {row_of(e) for e in measured} & {row_of(e) for e in [*fitted, *chose]}
    assert len(measured) > 10
    assert len(fitted) > 10
    known = plan.changed(data={**plan.data, **listing(twice)})
    with refused("no rows to measure healing on: there are 120 .* and 30 of them chose the blocks"):
        module.split_rows(known, Examples(twice, examples.heldout), False, 0)


@pytest.mark.parametrize("changed", [{"limit": 9999}, {"limit": None, "sequence_length": 96}])
def test_no_part_of_a_measured_row_chose_the_blocks_however_the_text_is_cut(changed, tmp_path):
    """The oracle looks for runs of ten tokens that a row shares with one that the search was scored on."""
    numbers = np.random.default_rng(0).integers(0, 10**6, 20_000)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join(map(str, numbers[start : start + 50])) for start in range(0, 20_000, 50)))
    read = partial(read_examples, str(text), small_world.tokenizer(), 2048)
    reading = {"limit": 24, "sequence_length": 64}
    searched = read(**reading)
    plan = planned.plan(tiny_models.build("llama"), [2], "attention", None, search="greedy")
    plan = plan.changed(data={**plan.data, **searched.meta, **listing(searched.heldout)})
    healed = read(**reading | changed)
    fitted, chose, measured = module.split_rows(plan, healed, False, 0)
    scored = runs_of(searched.heldout)
    assert not scored & runs_of(measured)
    assert scored & runs_of([*fitted, *chose])
    assert len(measured) > 10
    known = [example for example in [*healed.train, *healed.heldout] if runs_of([example]) & scored]
    with refused(f"{len(known)} of {len(known)} held-out rows, or others of their documents, also chose the blocks"):
        module.check_unseen(plan, known)


def runs_of(examples):
    """All runs of ten tokens of the examples."""
    ids = [example.input_ids.tolist() for example in examples]
    return {tuple(row[start : start + 10]) for row in ids for start in range(len(row) - 9)}


@pytest.mark.slow
def test_the_control_is_computed_in_the_precision_of_the_original(tmp_path, monkeypatch):
    model = small_world.model().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    small_world.tokenizer().save_pretrained(tmp_path / "model")
    plan = planned.plan(model, [2], "attention", None)
    dtypes = {}

    def watched(models, *arguments, **options):
        dtypes.update({name: each.dtype for name, each in models.items()})
        return heldout_losses(models, *arguments, **options)

    monkeypatch.setattr(module, "heldout_losses", watched)
    options = {"sequence_length": 8, "steps": 1, "rank": 0, "precision": "float32", "progress": False}
    heal_into(plan, tmp_path / "model", data(), tmp_path / "healed", **options)
    assert {"original", "trained", "control"} <= {*dtypes}
    assert {*dtypes.values()} == {torch.bfloat16}


def test_training_sees_the_rows_that_were_fitted_on_and_no_end_of_text(tmp_path, monkeypatch):
    """Rows of a text are cut anywhere: what ends them, or begins the next one, is nothing to learn."""
    model = small_world.model()
    model.save_pretrained(tmp_path / "model")
    small_world.tokenizer().save_pretrained(tmp_path / "model")
    plan = planned.plan(model, [2], "attention", None)
    packed = []

    def watched(*arguments, **options):
        packed.append(pack(*arguments, **options))
        return packed[-1]

    monkeypatch.setattr("fulldepth.training.text.pack", watched)
    options = {"sequence_length": 8, "steps": 1, "rank": 0, "control": False, "progress": False}
    heal_into(plan, tmp_path / "model", data(), tmp_path / "healed", **options)
    fitted, chose, _ = module.split_rows(plan, data(), False, 0)
    for rows, windows in ((fitted, packed[0].train), (chose, packed[0].validation)):
        ids = [token for row in rows for token in row.input_ids.tolist()]
        labels = [label for row in rows for label in [-100, *row.input_ids.tolist()[1:]]]
        count = len(ids) // 8
        assert windows.available == count > len(windows) / 2
        for number in range(len(windows)):
            window = slice(8 * (number * count // len(windows)), 8 * (number * count // len(windows)) + 8)
            assert windows[number]["input_ids"].tolist() == ids[window]
            assert windows[number]["labels"].tolist() == labels[window]
