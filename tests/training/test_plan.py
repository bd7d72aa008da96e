"""The dry run: operations against torch's counter, bytes against what a step of AdamW holds."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Dinov2ForImageClassification

from fulldepth.execution.flops import TokenFlops, forward_flops
from fulldepth.settings import assignments, layer
from fulldepth.settings import layers as recipes
from fulldepth.settings.train import TrainSettings
from fulldepth.training.lora import add_adapters
from fulldepth.training.model import build_config, build_model, meta_model
from fulldepth.training.plan import dry_run_lines, plan, tokens_of_an_image
from refusals import refused
from tiny_models import token_ids

BATCH, TIME, VOCAB = 2, 32, 256
SIZES = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 6, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
TREE = {"1": [-1, 0], "2": [0, 1], "4": [0, 3]}
NAMES = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODELS = {
    "llama": SIZES,
    "wide-heads": SIZES | {"type": "qwen3", "head_dim": 24},
    "gpt2": {"type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "attn_pdrop": 0.0, **NAMES},
    "tree": SIZES | {"type": "depth_llama", "residual": "tree", "tree": TREE},
    "static": SIZES | {"type": "depth_llama", "memory": "static"},
    "dynamic": SIZES | {"type": "depth_llama", "memory": "dynamic"},
    "kv": SIZES | {"type": "depth_llama", "memory": "kv"},
    "hyper": SIZES | {"type": "depth_llama", "residual": "hyper"},
    "hyper-static": SIZES | {"type": "depth_llama", "residual": "hyper", "hyper_dynamic": False},
}
FEW = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


def asked(name, **over):
    return layer(TrainSettings, {"model": MODELS[name], "sequence_length": TIME, **over})


def config_of(settings):
    return build_config(settings.model, vocab_size=VOCAB, positions=settings.sequence_length)


def tokens(length=TIME):
    return token_ids(BATCH, length)


def counted(run, length=TIME):
    """Operations of a call as torch counts them, per token, and its result."""
    with FlopCounterMode(display=False) as counter:
        result = run()
    return counter.get_total_flops() / (BATCH * length), result


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_exactly_those_that_torch_counts(name):
    settings = asked(name, attention="eager")
    model, ids = build_model(config_of(settings), settings), tokens()
    flops = forward_flops(model, TIME)
    full = flops.forward - flops.attention + flops.attention_full
    forward, outputs = counted(lambda: model(input_ids=ids, labels=ids))
    assert forward == full
    backward, _ = counted(outputs.loss.backward)
    if name in ("static", "dynamic"):  # mixtures are made again, a tile at a time; no order of products is promised
        assert backward == pytest.approx(2 * full, rel=0.05)
    else:
        assert backward == 2 * full
    assert flops.training == 3 * flops.forward


def test_gradient_checkpointing_repeats_everything_but_the_head():
    settings = asked("kv", attention="eager")
    model, ids = build_model(config_of(settings), settings), tokens()
    model.activation_checkpointing_enable({"use_reentrant": False})
    flops = forward_flops(model, TIME)
    full = TokenFlops(**vars(flops) | {"attention": flops.attention_full})
    step, _ = counted(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward())
    # The last product of a block, down_proj, is not needed again, and checkpointing stops before it.
    assert step == full.training + full.forward - full.head - 6 * 2 * 64 * 172


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_memory_is_what_weights_gradients_and_optimiser_hold(precision):
    settings = asked("dynamic", precision=precision)
    model = build_model(config_of(settings), settings)
    optimiser = torch.optim.AdamW(model.parameters())
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimiser.step()
    held = [tensor for p in model.parameters() for tensor in (p, p.grad)]
    held += [s for state in optimiser.state.values() for s in state.values() if s.ndim]
    memory = sum(tensor.numel() * tensor.element_size() for tensor in held)
    assert plan(settings, model.config).memory == memory
    assert plan(asked("dynamic", precision=precision, fsdp=True), model.config, processes=2).memory == memory // 2


CLASSIFIERS = {
    "vit": {"type": "vit", **FEW, "intermediate_size": 172, "image_size": 16, "patch_size": 4},
    "bert": {"type": "bert", **FEW, "intermediate_size": 172},
    "gpt2": {"type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "pad_token_id": 0},
    "clip": {"type": "clip", "vision_config": {**FEW, "intermediate_size": 172, "image_size": 16, "patch_size": 4}},
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_operations_of_classifiers_are_those_that_torch_counts(name):
    images = name in ("vit", "clip")
    task = "image-classification" if images else "text-classification"
    settings = layer(TrainSettings, {"task": task, "model": CLASSIFIERS[name], "attention": "eager"})
    classes = [f"class {number}" for number in range(7)]
    config = build_config(settings.model, task=task, classes=classes, **({} if images else {"vocab_size": VOCAB}))
    model = build_model(config, settings).eval()
    length = tokens_of_an_image(meta_model(config, task)) if images else TIME
    assert length == (17 if images else TIME)
    inputs = {"pixel_values": torch.rand(BATCH, 3, 16, 16)} if images else {"input_ids": tokens()}
    batch = {**inputs, "labels": torch.tensor([1, 6])}
    flops = forward_flops(model, length)
    forward, _ = counted(lambda: model(**batch), length)
    assert forward == pytest.approx(flops.forward - flops.attention + flops.attention_full, rel=1e-12)
    assert (flops.attention == flops.attention_full) == (name != "gpt2")


def test_exit_heads_of_a_family_that_is_not_in_the_table_are_planned():
    """Its parts are found by arithmetic, which needs weights; drawing them must not change the numbers of a run."""
    sizes = {"type": "dinov2", **FEW, "mlp_ratio": 2, "image_size": 16, "patch_size": 4}
    settings = layer(TrainSettings, {"task": "image-classification", "method": "multi-exit", "model": sizes})
    config = build_config(settings.model, task=settings.task, classes=[f"class {number}" for number in range(7)])
    before = torch.get_rng_state()
    planned = plan(settings, config)
    assert torch.equal(torch.get_rng_state(), before)
    heads = (config.num_hidden_layers - 1) * 7 * 2 * config.hidden_size  # [CLS] beside the mean of the patches
    assert planned.parameters == Dinov2ForImageClassification(config).num_parameters() + heads


@pytest.mark.parametrize("kind", ["efficientnet", "mobilenet_v2"])
def test_a_classifier_of_convolutions_is_refused_by_what_it_lacks(kind):
    """In training mode its batch norm would refuse the single image with which it is planned."""
    settings = layer(TrainSettings, {"task": "image-classification", "model": {"type": kind, "image_size": 32}})
    config = build_config(settings.model, task=settings.task, classes=["class 1", "class 2"])
    with refused(f"A {kind} does not read an image as a sequence of tokens"):
        plan(settings, config)


@pytest.mark.parametrize("layers", [3, 8])
def test_operations_of_a_classifier_that_is_not_in_the_table_are_planned(layers):
    """DINOv2, against a count of what torch computes."""
    few = {**FEW, "num_hidden_layers": layers}
    sizes = {"type": "dinov2", **few, "mlp_ratio": 2, "image_size": 16, "patch_size": 4}
    given = {"task": "image-classification", "model": sizes, "attention": "eager"}
    settings = layer(TrainSettings, given)
    config = build_config(settings.model, task=settings.task, classes=[f"class {number}" for number in range(7)])
    model = build_model(config, settings).eval()
    forward, _ = counted(lambda: model(pixel_values=torch.rand(BATCH, 3, 16, 16), labels=torch.tensor([1, 6])), 17)
    planned = plan(settings, config)
    assert planned.flops.forward == pytest.approx(forward, rel=1e-12)
    assert planned.settings.sequence_length == 17
    names = [
        name for name, *_ in dry_run_lines(layer(TrainSettings, {**given, "data": {"name": "digits:builtin/train"}}))
    ]
    assert names[-4:] == ["tokens", "forward", "training", "total"]


def test_published_operations_of_the_four_models_of_lime():
    """Table 6, in teraoperations of a sequence. The authors count a multiplication with its addition once in linear
    layers and twice in attention, and some operations besides products (so theirs are a little higher)."""
    table_6 = {
        "lime-1.2b": 2.98,
        "lime-1.2b model.memory=none initializer.memory=model": 2.97,
        "lime-1.2b model.memory=dynamic": 3.01,
        "hyper-1.2b": 2.98,
    }
    for command, published in table_6.items():
        name, *changes = command.split()
        settings = layer(TrainSettings, recipes.read(name, "train"), assignments(changes))
        model = meta_model(build_config(settings.model, positions=settings.sequence_length))
        flops = forward_flops(model, settings.sequence_length)
        ours = ((flops.forward - flops.attention) / 2 + flops.attention_full) * settings.sequence_length
        assert ours / 1e12 == pytest.approx(published, rel=0.005)


def test_parameters_tokens_and_batches_of_a_run():
    settings = asked("gpt2", steps=10, global_batch_size=8, micro_batch_size=2, gradient_checkpointing=True)
    made = plan(settings, config_of(settings), processes=2)
    block = 12 * 64**2 + 13 * 64  # GPT-2: matrices, biases and norms of one block
    assert made.parameters_without_embeddings == 3 * block + 2 * 64
    assert made.parameters == made.trainable == 3 * block + 2 * 64 + (VOCAB + TIME) * 64
    own_heads = plan(asked("gpt2", method="multi-exit"), config_of(settings))
    assert own_heads.parameters == made.parameters + 2 * VOCAB * 64
    assert own_heads.parameters_without_embeddings == made.parameters_without_embeddings
    assert own_heads.flops == made.flops
    assert (made.tokens, made.micro_batch, made.accumulation, made.processes) == (80 * TIME, 2, 2, 2)
    blocks, head = 3 * (24 * 64**2 + 4 * 64 * (TIME + 1) / 2), 2 * 64 * VOCAB
    assert made.step_flops == 3 * (blocks + head) + blocks
    with refused("cannot share evenly"):
        plan(settings, config_of(settings), processes=3)
    for size, micro in ((5, 4), (7, 6), (None, 12)):
        uneven = asked("llama", global_batch_size=24, micro_batch_size=size)
        made = plan(uneven, config_of(uneven), processes=2)
        assert (made.micro_batch, made.accumulation) == (micro, 12 // micro)


def test_frozen_matrices_cost_two_passes(tmp_path):
    """Torch counts a little less: the first block's input has no gradient."""
    settings = asked("llama", attention="eager")
    config = config_of(settings)
    model = build_model(config, settings)
    adapted = {"model": {"checkpoint": str(tmp_path)}, "lora": {"rank": 4}}
    settings = layer(TrainSettings, settings.model_dump(exclude={"model"}), adapted)
    made = plan(settings, config)
    add_adapters(model, settings.lora)
    _, loss = counted(lambda: model(tokens(), labels=tokens()).loss)
    forward, _ = counted(lambda: model(tokens()))
    backward, _ = counted(loss.backward)
    further = made.flops.attention_full - made.flops.attention
    assert forward == pytest.approx(made.flops.forward + further, rel=1e-12)
    assert forward + backward == pytest.approx(made.step_flops + 3 * further, rel=0.03)


def test_the_lines_of_a_dry_run(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def told(name, **changes):
        settings = layer(TrainSettings, recipes.read(name, "train"), changes)
        return {key: (value, sentence) for key, value, sentence in dry_run_lines(settings)}

    aligned = told("tiny-llama", method="aligned")
    assert aligned["parameters"][0] == "2,636,928"
    assert aligned["tokens"][0] == f"{300 * 16 * 128:,}"
    assert aligned["memory"][0] == "0.04 GiB"  # four float32 numbers for each parameter
    paper = {"num_labels": 1000}  # Table 1 of the paper on aligned training
    assert told("deit-small-imagenet", model=paper)["parameters"][0] == "22,050,664"
    assert told("tiny-vit")["tokens"][0] == f"{400 * 64 * 17:,}"
    assert "forward" not in told("tiny-detr", model={"num_labels": 3})
    for number in (1, True, "many"):
        with refused("num_labels"):
            told("tiny-vit", model={"num_labels": number})
