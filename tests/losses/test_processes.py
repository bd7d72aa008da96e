"""Two processes give the gradients of one: data parallel and sharded, CR's batch mean over both."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from fulldepth.losses import Objective
from losses.trained_step import WEIGHTS, build, close, examples, gradient, plain_gradient
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
