"""Two processes, which copy or shard the weights, train, evaluate and resume like one.

accelerate gives CPU processes DDP where FSDP2 was asked for. Here it takes them for accelerators at that one place.
Classifiers have 33 rows to validate on, in batches of 32: the second process gets one row.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import yaml
from accelerate import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import distributed
from torch.testing import assert_close

from fulldepth.losses import ObjectiveMixin
from fulldepth.results import Results
from fulldepth.settings import layer
from fulldepth.training import TrainSettings, train
from json_files import read_json, write_json
from marks import thorough
from refusals import refused
from tiny_models import same_weights
from training.conftest import ENCODER, GPT2, interrupted, sentences, settings, train_by
from training.conftest import MODEL as LLAMA
from two_processes import fulldepth

STEPS = {"steps": 4, "learning_rate": 3e-3, "warmup_steps": 2, "eval_every": 2, "save_every": 2}
TIED = {"model": {**LLAMA, "tie_word_embeddings": True}, "objective": {"aligned": 1.0, "jump": 0.5}}
LANGUAGE = {**STEPS, "global_batch_size": 4, "sequence_length": 24}
# with an epsilon of 1e-8 gradients that are zero but for rounding (biases of keys) move weights, too
OTHERS = {**STEPS, "global_batch_size": 8, "adam_epsilon": 1e-3}
PLAIN = {name: value for name, value in ENCODER.items() if name != "intermediate_size"}
RECIPES = {
    "tree": {
        **LANGUAGE,
        "model": {**LLAMA, "type": "depth_llama", "residual": "tree", "tree": {1: [-1, 0], 2: [0, 1]}},
        "objective": {"coherence": {"weight": 0.5, "layers": [1, 2]}, "orthogonality": {"weight": 0.5, "layers": [3]}},
    },
    "lime": {
        **LANGUAGE,
        "model": {**LLAMA, "type": "depth_llama", "memory": "dynamic"},
        "router_learning_rate": 1e-2,
        "objective": {"aligned": {"schedule": "always"}, "similarity": 0.2},
    },
    "tied": {**LANGUAGE, **TIED, "micro_batch_size": 1, "gradient_checkpointing": True},
    "autocast": {**LANGUAGE, **TIED, "precision": "autocast"},
    "bfloat16": {**LANGUAGE, **TIED, "precision": "bfloat16"},
    "lora": {**LANGUAGE, "model": LLAMA, "lora": {"rank": 4}, "micro_batch_size": 1},
    "multi-exit": {**OTHERS, "sequence_length": 24, "model": GPT2, "method": "multi-exit", "micro_batch_size": 2},
    "vit": {
        **OTHERS,
        "task": "image-classification",
        "model": {"type": "vit", **ENCODER, "image_size": 8, "patch_size": 4},
        "data": {"name": "digits:builtin/train", "validation": "digits:builtin/test", "validation_sequences": 33},
        "method": "multi-exit",
        "micro_batch_size": 2,
    },
    "dinov2": {  # its mask token is for pretraining: no loss depends on it
        **OTHERS,
        "task": "image-classification",
        "model": {"type": "dinov2", **PLAIN, "mlp_ratio": 2, "image_size": 8, "patch_size": 4},
        "data": {"name": "digits:builtin/train", "validation": "digits:builtin/test", "validation_sequences": 33},
        "method": "multi-exit",
        "decay": "all",
        "micro_batch_size": 2,
    },
    "bert": {
        **OTHERS,
        "task": "text-classification",
        "sequence_length": 24,
        "model": {"type": "bert", **ENCODER},
        "tokenizer": "wordpiece:300",
        "method": "cos-regularised",
        "objective": {"jump": 0.5},
    },
}
MEASURES = (
    *("train_loss", "validation_loss", "validation_accuracy"),
    *("lens_accuracy", "lens_f1", "displacement", "learning_rate"),
)
RANDOM = {"rng_state.pth", "rng_state_0.pth", "rng_state_1.pth"}


@contextmanager
def sharding_on_cpus(seen):
    """accelerate makes FSDP2 of `fsdp=True`; notes the types of losses and of the gradients that are reduced."""
    init, loss_of = PartialState.__init__, ObjectiveMixin.compute_loss

    def as_accelerators(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    def compute_loss(self, *args, **kwargs):
        loss = loss_of(self, *args, **kwargs)
        seen["losses"].add(str(loss.dtype))
        return loss

    def noting(reduce):
        def reduce_scatter(output, input, *args, **kwargs):
            seen["reductions"].add(str(input.dtype))
            return reduce(output, input, *args, **kwargs)

        return reduce_scatter

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(PartialState, "__init__", as_accelerators))
        stack.enter_context(mock.patch.object(ObjectiveMixin, "compute_loss", compute_loss))
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):  # the first since torch 2.13
            if hasattr(distributed, name):
                stack.enter_context(mock.patch.object(distributed, name, noting(getattr(distributed, name))))
        yield


def by_two(recipe, output, sharded):
    """Train in this process and the other one; the types that were seen if they shard."""
    seen = defaultdict(set)
    if not sharded:
        train_by(recipe, output)
        return {}
    with sharding_on_cpus(seen):
        train(settings(recipe).model_copy(update={"fsdp": True}), output)
    return {name: sorted(types) for name, types in seen.items()}


def command(*arguments):
    """A command in this process and the other one, which shard."""
    with sharding_on_cpus(defaultdict(set)):
        return fulldepth(*arguments)


def alone(recipe):
    """Settings of a recipe for one process, which takes the whole batch at once."""
    return settings(recipe).model_copy(update={"micro_batch_size": None})


@pytest.fixture(scope="session")
def trained(made_once, sources, two_processes):
    """`trained(name, kind)`: a folder with a recipe trained by two processes (`two`; kind: copied, sharded), and by one
    (`one`)."""

    def folder_of(name, kind):
        def make(folder):
            recipe = {**RECIPES[name]}
            if recipe.get("task") == "text-classification":
                data = [str(sentences(folder / f"{seed}.jsonl", count, seed)) for seed, count in enumerate((60, 33))]
                recipe["data"] = dict(zip(("name", "validation"), data, strict=True))
            elif "data" not in recipe:
                recipe["data"] = {"name": str(sources[0]), "validation_share": 0.2, "validation_sequences": 9}
                recipe["tokenizer"] = str(sources[1])
            if "lora" in recipe:
                train(layer(TrainSettings, {**recipe, "lora": {}}), folder / "start")
                recipe["model"] = {"checkpoint": str(folder / "start")}
                recipe["objective"] = {"distillation": {"teacher": str(folder / "start"), "temperature": 2.0}}
            path = folder / "recipe.yaml"
            path.write_text(yaml.safe_dump(recipe))
            types = two_processes(by_two, path, folder / "two", kind == "sharded")
            write_json(folder / "types.json", types[0])
            train(alone(path), folder / "one")

        made = made_once(f"{name}-{kind}", make)
        return made

    return folder_of


def table(folder):
    """What was recorded of losses, penalties and accuracies, with their numbers of steps and validation rows."""
    rows = Results.load(folder).table.fillna({"layer": -1, "site": "", "count": -1})
    rows = rows[rows.measure.isin((*MEASURES, "penalty"))]
    keys = list(zip(rows.measure, rows.site, rows.layer, rows.step, strict=True))
    values = dict(zip(keys, rows.value, strict=True))
    are_counted = rows.measure.isin(("train_loss", "penalty", "validation_loss", "lens_accuracy"))
    return values | {
        ("count", *key): count for key, count, counts in zip(keys, rows["count"], are_counted, strict=True) if counts
    }


def weights(checkpoint):
    """The model's weights and those of its exit heads."""
    return {name: weight for path in checkpoint.glob("*.safetensors") for name, weight in load_file(path).items()}


def assert_same(one, two):
    """The same files and the same model in both checkpoints, and an optimiser that stepped the same parameters."""
    assert {path.name for path in one.iterdir()} ^ {path.name for path in two.iterdir()} <= RANDOM
    stepped, expected = (torch.load(each / "optimizer.pt", weights_only=True)["state"].keys() for each in (two, one))
    assert stepped == expected
    assert_close(weights(one), weights(two), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(
            ("tied", "sharded"),
            ("tree", "sharded"),
            ("multi-exit", "sharded"),
            ("vit", "copied"),
            ("dinov2", "copied"),
            ("lora", "sharded"),
            ("bert", "copied"),
        ),
        *(thorough(*each) for each in (("lime", "sharded"), ("multi-exit", "copied"))),
    ],
)
def test_two_processes_train_and_evaluate_like_one(name, kind, trained):
    folder = trained(name, kind)
    one, two = (table(folder / each) for each in ("one", "two"))
    assert one.keys() == two.keys()
    assert two == pytest.approx(one, rel=2e-5, abs=1e-6, nan_ok=True)
    assert_same(folder / "one" / "checkpoint-4", folder / "two" / "checkpoint-4")
    heads = any("exit_heads" in key for key in weights(folder / "two" / "checkpoint-4"))
    assert heads == (RECIPES[name].get("method") == "multi-exit")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autocast", thorough("bfloat16")])
def test_losses_and_reductions_are_float32(name, trained):
    """Near 6 nats bfloat16 has steps of 1/32: a loss in that type is off by up to 0.016."""
    folder = trained(name, "sharded")
    types = read_json(folder / "types.json")
    assert types == {"losses": ["torch.float32"], "reductions": ["torch.float32"]}
    states = torch.load(folder / "two" / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"]
    dtypes = {state[key].dtype for state in states.values() for key in ("exp_avg", "exp_avg_sq")}
    assert dtypes == {torch.bfloat16 if name == "bfloat16" else torch.float32}
    if name == "autocast":
        one, two = (table(folder / each) for each in ("one", "two"))
        losses = [key for key in one if key[0] in ("validation_loss", "train_loss")]
        assert [two[key] for key in losses] == pytest.approx([one[key] for key in losses], abs=2e-3)


@pytest.mark.slow
def test_a_sharded_run_is_resumed_to_the_same_bytes_and_by_other_processes(trained, two_processes, tmp_path):
    """A checkpoint of sharded weights by two processes and by one; one of whole weights by two that shard."""
    runs = trained("tied", "sharded")
    recipe, whole = runs / "recipe.yaml", runs / "one" / "checkpoint-4"
    for which in ("two", "one"):
        run = interrupted(runs / which, 4, tmp_path / which)
        for code, _, error in two_processes(command, "train", recipe, "fsdp=true", "--output", run, "--resume"):
            assert code == 0, error
        assert_same(run / "checkpoint-4", whole)
    again, before = (weights(run / "checkpoint-4") for run in (tmp_path / "two", runs / "two"))
    assert same_weights(again, before)
    run = interrupted(runs / "two", 4, tmp_path / "again")
    train(alone(recipe), run, resume=True)
    assert_same(run / "checkpoint-4", whole)


@pytest.mark.slow
def test_a_mean_over_a_resumption_by_another_number_of_processes_weights_steps_alike(recipe, two_processes, tmp_path):
    path = recipe(steps=3, eval_every=3, save_every=2, learning_rate=0.05, warmup_steps=0, objective={"jump": 0.5})
    train(alone(path), tmp_path / "one")
    two_processes(by_two, path, tmp_path / "two", False)
    expected = table(tmp_path / "one")
    assert expected["count", "train_loss", "model", -1, 3] == 3
    by_one = interrupted(tmp_path / "two", 3, tmp_path / "by-one")
    train(alone(path), by_one, resume=True)
    by_both = interrupted(tmp_path / "one", 3, tmp_path / "by-both")
    for code, _, error in two_processes(fulldepth, "train", path, "--output", by_both, "--resume"):
        assert code == 0, error
    for run in (tmp_path / "two", by_one, by_both):
        assert table(run) == pytest.approx(expected, rel=2e-4, abs=1e-6, nan_ok=True)


def test_what_cannot_be_sharded_is_refused(recipe, tmp_path):
    with refused("fsdp needs accelerators"):
        train(settings(recipe(fsdp=True)), tmp_path / "run")
    with refused("fsdp=true is for task: causal-lm"):
        layer(TrainSettings, {**RECIPES["vit"], "fsdp": True})
