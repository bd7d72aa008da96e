"""Models whose weights are spread over memory and disk: the same plan, losses and hash as the same model in memory."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

from fulldepth.execution import find_anatomy
from fulldepth.execution.flops import Variant
from fulldepth.execution.latency import Runner, random_tokens
from fulldepth.execution.memory import AllocationTracker
from fulldepth.execution.scoring import Scorer, make_batches
from fulldepth.execution.verify import prove
from fulldepth.hf import Switches, frozen, load_checkpoint
from fulldepth.hf.model_hash import model_hash
from fulldepth.hf.scalars import Scalars
from fulldepth.skip.search import search
from skip import plain

LAYERS, WIDTH = 4, 32
ENDS = dict.fromkeys(("model.embed_tokens", "lm_head", "model.norm", "model.rotary_emb"), "cpu")
EVERY_SECOND_BLOCK = ENDS | {f"model.layers.{i}": ("cpu", "disk")[i % 2] for i in range(LAYERS)}


@pytest.fixture(scope="module")
def model():
    return plain.trained(LAYERS, WIDTH, 60)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The checkpoint, in several files."""
    folder = tmp_path_factory.mktemp("offloading") / "model"
    model.save_pretrained(folder, max_shard_size="20KB")
    return str(folder)


def test_hash_of_a_model_that_accelerate_has_offloaded(model, tmp_path):
    split = copy.deepcopy(model).to(torch.bfloat16)
    expected = model_hash(split)
    accelerate.disk_offload(split, str(tmp_path))
    add_hook_to_module(split.model.layers[1].mlp.up_proj, ModelHook(), append=True)
    assert all(parameter.device.type == "meta" for parameter in split.parameters())
    assert model_hash(split) == expected
    changed = copy.deepcopy(model).to(torch.bfloat16)
    with torch.no_grad():
        changed.model.layers[2].mlp.down_proj.weight[0, 0] += 1
    accelerate.cpu_offload(changed)
    assert model_hash(changed) != expected


def test_the_plan_is_that_of_the_model_in_memory(model, folder):
    options = {"blocks": 2, "batch_size": 4, "epochs": 1, "criterion": "kl"}
    examples = plain.examples(train=8, heldout=24)
    expected = search(model, examples, **options)
    found = search(folder, examples, device_map=EVERY_SECOND_BLOCK, **options)
    assert (found.blocks, found.model.hash) == (expected.blocks, expected.model.hash)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.healed_loss == pytest.approx(expected.healed_loss, rel=1e-6)


def test_timed_tokens_are_those_of_the_model_in_memory(model, folder):
    split = load_checkpoint(folder, device_map={"": "disk"}).model
    ids = random_tokens(find_anatomy(split), 2, 8, seed=0)
    with torch.no_grad():
        torch.testing.assert_close(Runner(split).run(ids, 5)[-1], model(ids).logits[:, -1])


def test_a_training_step_holds_the_weights_of_one_block_at_a_time(tmp_path):
    """By itself autograd would keep all that were loaded, for the gradients of what they are multiplied with."""
    layers, peaks = 10, {}
    plain.fresh(layers, 64).save_pretrained(tmp_path)
    split = load_checkpoint(tmp_path, device_map={"": "disk"}).model
    batch = make_batches(plain.sentences(1, seed=3), 1)[0]
    anatomy, classifier = prove(split, batch.inputs)
    scalars = Scalars(layers, ())
    block = sum(parameter.nbytes for parameter in anatomy.blocks[0].parameters())
    with Switches(anatomy) as switches, frozen(split):
        scorer = Scorer(anatomy, classifier, switches, batch)
        for again in (None, False):
            scorer.states(batch, Variant(), scalars, checkpointing=again).sum().backward()
            with AllocationTracker([*split.buffers(), *scalars.parameters()]) as tracker:
                states = scorer.states(batch, Variant(), scalars, checkpointing=again)
                kept = tracker.now
                states.sum().backward()
            peaks[again] = kept, tracker.peak
    assert peaks[False][0] > layers * block
    assert peaks[None][0] < block
    assert peaks[None][1] < 3 * block  # with its activations
    assert all(parameter.device.type == "meta" for parameter in split.parameters())
