"""Two processes give the gradients of one: data parallel and sharded, CR's batch mean over both."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from transformers import TrainingArguments

from fulldepth.losses import DepthTrainer, Objective
from losses.trained_step import WEIGHTS, build, close, examples, gradient, plain_gradient
from refusals import refused
from tiny_models import BUILDERS, token_ids

TERMS = {
    "jump": 1.5,
    "similarity": 0.3,
    "coherence": {"weight": 0.5, "layers": [0, 1]},
    "orthogonality": {"weight": 0.5, "layers": [2]},
    "aligned": {"schedule": "always"},
}


def step(mode):
    """Loss and gradients of the whole model from this process's share of a batch; mode: alone, ddp, sharded."""
    torch.manual_seed(0)
    plain = BUILDERS["llama"]().float().train()
    ids = token_ids(4, 10, seed=5)
    objective = Objective(**TERMS).attach(plain)
    runner, rank, world = plain, 0, 1
    if mode != "alone":
        rank, world = distributed.get_rank(), distributed.get_world_size()
    if mode == "ddp":
        runner = DistributedDataParallel(plain)
    elif mode == "sharded":  # the rest of the model, too, is sharded again when the forward pass ends
        mesh = init_device_mesh("cpu", (world,))
        for block in plain.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(plain, mesh=mesh, reshard_after_forward=True)
    share = {"input_ids": ids[rank::world], "labels": ids[rank::world]}
    loss, _ = objective(runner(**share), share)
    loss.backward()
    found = {"loss": loss.detach() / world}
    if world > 1:
        distributed.all_reduce(found["loss"])
    for name, parameter in plain.named_parameters():
        slope = parameter.grad
        found[name] = slope.full_tensor() if hasattr(slope, "full_tensor") else slope
    return {name: value.numpy() for name, value in found.items()}


def tensors(values):
    return {name: torch.as_tensor(value) for name, value in values.items()}


@pytest.mark.parametrize("mode", ["ddp", "sharded"])
def test_two_processes_equal_one(mode, two_processes):
    """Orthogonality is a mean over sequences and all else over tokens or the global batch, so equal shares add up."""
    expected = tensors(step("alone"))
    for found in map(tensors, two_processes(step, mode)):
        assert_close(found, expected, rtol=1e-4, atol=1e-6)


def trained_step(kind, folder):
    """What a step of `DepthTrainer` with SGD takes away from the weights, in micro-batches of two rows."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return {n: g.numpy() for n, g in gradient(build(kind), examples(kind), WEIGHTS, folder, **options)[0].items()}


@pytest.mark.parametrize("kind", ["vit", "llama"])
def test_two_processes_are_one_large_batch(kind, two_processes, tmp_path):
    _, expected = plain_gradient(kind, examples(kind))
    for found in two_processes(trained_step, kind, str(tmp_path)):
        close(tensors(found), expected, 1e-6)


def exits_after_steps(world, folder, checkpointing):
    """The weights and exit heads after three steps of `DepthTrainer`, the second of which trains the heads."""
    torch.manual_seed(0)
    model = BUILDERS["llama"]().float()
    ids = token_ids(12, 10, seed=5)
    options = {"max_steps": 3, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.5}
    options |= {"per_device_train_batch_size": 4 // world, "adam_epsilon": 1e-3}
    if checkpointing:
        options |= {"gradient_checkpointing": True}
        options |= {"gradient_checkpointing_kwargs": {"use_reentrant": checkpointing == "reentrant"}}
    machine = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(folder, **options, **machine)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = DepthTrainer(model, arguments, train_dataset=rows, objective=Objective(multi_exit=1.0))
    trainer.train()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", ["", "plain", "reentrant"])
def test_two_processes_train_exit_heads_with_the_trainers_defaults(checkpointing, two_processes, tmp_path):
    """DDP must not take the heads, which the output does not depend on, for unused parameters."""
    expected = tensors(exits_after_steps(1, str(tmp_path), ""))
    assert any("exit_heads" in name for name in expected)
    for found in two_processes(exits_after_steps, 2, str(tmp_path), checkpointing):
        assert_close(tensors(found), expected, rtol=1e-5, atol=1e-5)


def test_ddp_s_search_for_unused_parameters_is_refused_beside_exit_heads(tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", ddp_find_unused_parameters=True)
    with refused("ddp_find_unused_parameters=True"):
        DepthTrainer(BUILDERS["llama"](), arguments, objective=Objective(multi_exit=1.0))
