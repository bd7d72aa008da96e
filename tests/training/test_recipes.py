"""Every recipe that ships: it loads strictly, its model has the paper's size, and its numbers are the papers'."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache

import pytest

from fulldepth.losses import METHODS
from fulldepth.settings import assignments
from fulldepth.settings import layers as recipes
from fulldepth.settings.train import TrainSettings
from fulldepth.training.folder import dump, saved_settings
from fulldepth.training.model import build_config, meta_model
from fulldepth.training.plan import dry_run_lines
from fulldepth.training.trainer import batch_split, resolved
from refusals import refused

JREG = ["jreg-170m", "jreg-1b", "jreg-3.4b"]
LIME = ["lime-1.2b", "hyper-1.2b", "lime-depth-32"]


def settings(command):
    """Of a recipe with changes: `lime-1.2b model.memory=none`."""
    name, *changes = command.split()
    return recipes.layer(TrainSettings, recipes.read(name, "train"), assignments(changes))


@cache
def parameters(command):
    asked = settings(command)
    vocab_size = 2048 if command.startswith("tiny") else None
    return meta_model(
        build_config(asked.model, vocab_size=vocab_size, positions=asked.sequence_length)
    ).num_parameters()


def llama(layers, width, ffn, vocab, tied):
    """Embeddings (and head), then per layer four squares, three MLP matrices and two norms; one norm at the end."""
    return vocab * width * (1 if tied else 2) + layers * (4 * width**2 + 3 * width * ffn + 2 * width) + width


def memory(layers, width, heads, kind):
    """Routers of layers 2..L, which read 2..L sources; static and dynamic ones with a norm each."""
    sources = range(2, layers + 1)
    if kind == "kv":
        return sum(r * heads * heads for r in sources)
    return sum(heads * r * (width if kind == "dynamic" else 1) + width for r in sources)


def hyper(layers, width, streams):
    """Two connections a layer: D (n + 2) + n^2 + 2 n + 2 parameters each."""
    return 2 * layers * (width * (streams + 2) + streams**2 + 2 * streams + 2)


TREE = 10  # norms: two for each of layers 1, 2, 4, 6, 8
SMALL, LARGE = llama(12, 128, 344, 2048, tied=True), llama(16, 2048, 8192, 50257, tied=True)
CR_BASE = llama(12, 768, 2048, 32000, tied=False)
SERIAL = "cr-12l model.residual=serial model.tree=null objective.coherence=null objective.orthogonality=null"
COUNTS = {
    **dict.fromkeys(["tiny-llama", "tiny-jreg", "tiny-scaled"], SMALL),
    "tiny-tree-cr": SMALL + TREE * 128,
    "tiny-lime": SMALL + memory(12, 128, 4, "static"),
    "tiny-lime model.memory=dynamic": SMALL + memory(12, 128, 4, "dynamic"),
    "tiny-lime model.memory=kv": SMALL + memory(12, 128, 4, "kv"),
    "tiny-hyper": SMALL + hyper(12, 128, 4),
    "jreg-170m": CR_BASE,
    "jreg-1b": llama(16, 2048, 5376, 32000, tied=False),
    "jreg-3.4b": llama(30, 3072, 8192, 32000, tied=False),
    SERIAL: CR_BASE,
    f"{SERIAL} model.num_hidden_layers=14": llama(14, 768, 2048, 32000, tied=False),
    "cr-12l": CR_BASE + TREE * 768,
    "lime-1.2b": LARGE + memory(16, 2048, 32, "static"),
    "lime-1.2b model.memory=none initializer.memory=model": LARGE,
    "lime-1.2b model.memory=dynamic model.router_input=normed": LARGE + memory(16, 2048, 32, "dynamic"),
    "hyper-1.2b": LARGE + hyper(16, 2048, 4),
    **{
        f"lime-depth-32 model.num_hidden_layers={n}": llama(n, 256, 1024, 50257, tied=True)
        + memory(n, 256, 8, "static")
        for n in (32, 64, 128)
    },
}
ADAM = {"weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "clip": 1.0}
FINEWEB = {"data.name": "HuggingFaceFW/fineweb-edu", "data.config": "sample-100BT", "data.column": "text"}
JREG_TABLE_9 = ADAM | {"global_batch_size": 512, "sequence_length": 1024, "schedule": "cosine", "warmup_length": 1000}
JREG_TABLE_9 |= FINEWEB | {"steps": 200_000, "method": "jreg"}  # Sec. 5.1
JREG_TABLE_9 |= {"decay": "all", "initializer.distribution": "truncated-normal", "initializer.output_scale": 1.0}
JREG_TABLE_9 |= {"model.rms_norm_eps": 1e-5}  # defaults of Meta Lingua, the paper's code base (App. A.2)
LIME_TABLE_3 = ADAM | {"learning_rate": 1e-3, "schedule": "cosine", "warmup_length": 200, "min_learning_rate": 1e-6}
LIME_TABLE_3 |= {"precision": "autocast", "sequence_length": 2048, "global_batch_size": 1024, "steps": 20_000}
LIME_TABLE_3 |= FINEWEB | {"decay": "matrices", "initializer.distribution": "model", "initializer.output_scale": 1.0}
ROUTED = {"router_learning_rate": 1e-2, "initializer.memory": "pseudocode"}
CR_SEC_4 = ADAM | {"global_batch_size": 512, "sequence_length": 1024, "data.name": "monology/pile-uncopyrighted"}
SFT_APP_A3 = {"stage": "sft", "learning_rate": 2e-5, "schedule": "linear", "adam_beta1": 0.9, "adam_beta2": 0.95}
SFT_APP_A3 |= {"global_batch_size": 512, "steps": 957, "data.name": "allenai/tulu-v1-sft-mixture", "method": "standard"}
APP_B = {"learning_rate": 0.1, "weight_decay": 1e-4, "global_batch_size": 256, "schedule": "multistep", "decay": "all"}
APP_B |= {"augmentation.flip": True, "augmentation.rotation": 15, "milestones": [0.5, 0.75], "method": "aligned"}
APP_B |= {"model.num_hidden_layers": 12, "steps": round(200 * 1_281_167 / 256)}  # Table 1; 200 epochs
APP_C2 = {"learning_rate": 2e-5, "sequence_length": 256, "method": "aligned"}
CARION = {"learning_rate": 1e-4, "backbone_learning_rate": 1e-5, "weight_decay": 1e-4, "clip": 0.1}
CARION |= {"global_batch_size": 64, "schedule": "multistep", "milestones": [0.66667], "augmentation.flip": True}
CARION |= {"initializer.distribution": "glorot", "steps": round(300 * 118_287 / 64), "data.image_size": 800}
CARION |= {f"model.{part}_layers": 6 for part in ("encoder", "decoder")}  # Carion et al. 2020, Sec. 4 and App. A.4
CARION |= {"model.d_model": 256, "model.num_queries": 100, "model.dropout": 0.1}
CARION |= {f"model.{part}_attention_heads": 8 for part in ("encoder", "decoder")}
CARION |= {f"model.{part}_ffn_dim": 2048 for part in ("encoder", "decoder")}


def jreg_numbers(rate, local):
    """Table 9: learning rate, a tenth of it at the end (lr_min_ratio), and the local batch, here in two halves."""
    return JREG_TABLE_9 | {"learning_rate": rate, "min_learning_rate": rate * 0.1, "micro_batch_size": local // 2}


PAPERS = {
    "deit-small-imagenet": APP_B,
    "bert-glue": APP_C2 | {"global_batch_size": 32},
    "gpt2-wikitext": APP_C2 | {"global_batch_size": 8, "steps": 40_000},
    "detr-coco": CARION,
    "jreg-170m": jreg_numbers(9e-4, 128),
    "jreg-1b": jreg_numbers(7e-4, 64),
    "jreg-3.4b": jreg_numbers(5e-4, 32),
    "jreg-sft": SFT_APP_A3,
    "cr-12l": CR_SEC_4,
    "lime-1.2b": LIME_TABLE_3 | ROUTED,
    "hyper-1.2b": LIME_TABLE_3,
    "lime-depth-32": LIME_TABLE_3 | ROUTED,
}
SHAPES = {  # JREG Table 8, LIME Table 4, Sec. 5.4: layers, width, MLP, heads
    "jreg-170m": (12, 768, 2048, 12),
    "jreg-1b": (16, 2048, 5376, 16),
    "jreg-3.4b": (30, 3072, 8192, 24),
    **dict.fromkeys(["lime-1.2b", "hyper-1.2b"], (16, 2048, 8192, 32)),
    "lime-depth-32": (32, 256, 1024, 8),
    "cr-12l": (12, 768, 2048, 12),
}
PROCESSES = {"jreg-170m": 4, "cr-12l": 1}
"""Accelerators of the papers' runs where not 8 (JREG App. A.2; CR Sec. 4)."""


def test_every_recipe_says_what_it_is():
    assert {*JREG, *LIME, *PAPERS} <= set(recipes.names("train"))
    for name in recipes.names("train"):
        assert settings(name).about
        assert len(settings(name).source) > 80


@pytest.mark.parametrize("command", COUNTS)
def test_models_have_the_papers_sizes(command):
    assert parameters(command) == COUNTS[command]


def test_totals_that_recipes_state_are_their_models():
    for name in JREG:
        source = settings(name).source
        assert f"{parameters(name):,}" in source
        assert f"{parameters(f'{name} model.tie_word_embeddings=true'):,}" in source


@pytest.mark.parametrize("name", PAPERS)
def test_numbers_are_the_papers(name):
    document = settings(name).model_dump() | {"warmup_length": settings(name).warmup_length}
    for key, number in PAPERS[name].items():
        value = document
        for part in key.split("."):
            value = value[part]
        assert value == pytest.approx(number) if isinstance(number, float) else value == number, key


def test_warm_up_follows_the_number_of_steps_unless_its_steps_are_given():
    commands = ["", "steps=20", "steps=20 warmup_steps=5", "warmup=0.0"]  # a tenth of 300 steps
    assert [settings(f"tiny-llama {changes}").warmup_length for changes in commands] == [30, 2, 5, 0]


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_the_papers_and_batches_divide_among_their_machines(name):
    asked, processes = settings(name), PROCESSES.get(name, 8)
    config = build_config(asked.model, positions=asked.sequence_length)
    shape = (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads)
    assert shape == SHAPES[name]
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.hidden_act == "silu"
    assert config.rms_norm_eps == (1e-5 if name in JREG else 1e-6)  # Meta Lingua; LlamaConfig, as in LIME's code
    assert config.rope_parameters["rope_theta"] == 10_000
    assert config.initializer_range == 0.02
    assert config.vocab_size == (50257 if name in LIME else 32000)
    assert config.max_position_embeddings == asked.sequence_length
    micro, accumulated = batch_split(asked, processes)
    assert micro * accumulated * processes == asked.global_batch_size


def test_epochs_are_the_aligned_papers():
    assert settings("detr-coco").milestones[0] * 300 == pytest.approx(200, abs=0.01)  # Carion et al. 2020
    glue = {"SST-2": 67_349, "MRPC": 3_668, "QNLI": 104_743, "RTE": 2_490, "QQP": 363_846, "MNLI": 392_702}
    source = settings("bert-glue").source  # App. C.2: three epochs
    for task, rows in glue.items():
        assert f"steps={math.ceil(3 * rows / 32)}" in source or settings("bert-glue").steps == round(3 * rows / 32), (
            task
        )


@pytest.mark.parametrize(
    ("name", "schedule"),  # App. B.3 alternates from scratch; C.2 and B.5 train every step with the loss
    [("deit-small-imagenet", "alternate"), *((name, "always") for name in ("bert-glue", "gpt2-wikitext", "detr-coco"))],
)
def test_the_aligned_loss_is_the_papers(name, schedule, tmp_path):
    asked = settings(name)
    if asked.model.checkpoint is not None:  # not at hand: any folder stands for it
        asked = asked.model_copy(update={"model": asked.model.model_copy(update={"checkpoint": str(tmp_path)})})
    terms = resolved(asked).objective.terms
    assert terms == {"aligned": {"weight": 1.0, "weights": "linear", "schedule": schedule}}


@pytest.mark.parametrize("start", [None, "checkpoint"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"positions": 0.5}, {"positions": 0.5}),
        (2.0, {"weight": 2.0}),
        ({"schedule": "alternate"}, {"schedule": "alternate"}),
    ],
)
def test_an_option_keeps_the_methods_other_options(given, expected, start, tmp_path):
    """Fine-tuning uses the losses of all layers at every step, whatever else is set."""
    model = {"checkpoint": str(tmp_path)} if start else {"type": "llama"}
    asked = recipes.layer(TrainSettings, {"method": "aligned", "model": model, "objective": {"aligned": given}})
    preset = {"weight": 1.0, "weights": "linear", "schedule": "always" if start else "alternate"}
    assert resolved(asked).objective.terms == {"aligned": preset | expected}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 0}, "model.num_hidden_layers is 0. Expected at least 1"),
        ({"num_attention_heads": -2}, "model.num_attention_heads is -2. Expected at least 1"),
        ({"type": "gpt2", "n_layer": 0}, "model.n_layer is 0. Expected at least 1"),
    ],
)
def test_sizes_that_no_model_has_are_refused_by_name(change, reason):
    asked = recipes.layer(TrainSettings, {"model": {"vocab_size": 32} | change})
    with refused(reason):
        dry_run_lines(asked)


def test_images_smaller_than_a_patch_are_refused():
    with refused("model.image_size is 1. Expected at least model.patch_size, which is 2"):
        dry_run_lines(recipes.layer(TrainSettings, recipes.read("tiny-vit", "train"), {"model": {"image_size": 1}}))


def test_options_of_a_later_source_keep_the_weight_of_an_earlier_one():
    sources = {"objective": {"jump": 0.5}}, {"objective": {"jump": {"alpha": 0.3}}}
    for ordered in (sources, sources[::-1]):
        asked = recipes.layer(TrainSettings, *ordered)
        assert resolved(asked).objective.terms == {"jump": {"weight": 0.5, "alpha": 0.3}}


def test_a_weight_beside_options_of_one_source_is_refused():
    given = ["objective.jump=0.5", "objective.jump.alpha=0.3"]
    for ordered in (given, given[::-1]):
        with refused("objective.jump=0.5 and objective.jump.alpha exclude each other. Give keys inside objective.jump"):
            recipes.assignments(ordered)


@pytest.mark.parametrize(("name", "term"), [("jreg-170m", "jump"), ("cr-12l", "coherence")])
def test_the_penalties_are_the_papers(name, term):
    expected = {
        "jump": {"weight": 1.0, "alpha": 1.0},  # JREG Sec. 6, Table 12
        "coherence": {"weight": 0.01, "layers": [2, 4, 6, 8], "target": 0.35},  # CR Sec. 3.3
    }
    assert resolved(settings(name)).objective.terms[term] == expected[term]


NOT_AT_HAND = {"bert-glue", "deit-small-imagenet", "detr-coco", "gpt2-wikitext", "jreg-sft"}
NOT_AT_HAND |= {"tiny-bert", "tiny-detr", "tiny-gpt2"}
"""Recipes whose checkpoint or data a new machine lacks."""


@pytest.mark.parametrize("name", recipes.names("train"))
def test_a_dry_run_without_network_works_or_says_what_to_pass(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refused(r"model\.num_labels=N|model\.checkpoint") if name in NOT_AT_HAND else nullcontext():
        assert dry_run_lines(settings(name))


@pytest.mark.parametrize("name", recipes.names("train"))
def test_another_method_replaces_the_terms_that_a_recipe_writes_out(name):
    below = recipes.read(name, "train") | {"model": {}}  # its checkpoint may not be at hand
    for method in ("standard", "similarity"):
        asked = recipes.layer(TrainSettings, below, {"method": method})
        assert resolved(asked).objective.terms == METHODS[method]
    both = recipes.layer(TrainSettings, below, {"method": "standard", "objective": {"jump": 0.5}})
    assert resolved(both).objective.terms == {"jump": 0.5}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"method": "jreg", "objective": {"jump": None}}, {}),
        ({"method": "aligned", "objective": {"aligned": None, "multi_exit": 1.0}}, {"multi_exit": 1.0}),
        ({"method": "cr", "objective": {"orthogonality": None}}, {"coherence": METHODS["cr"]["coherence"]}),
    ],
)
def test_a_term_that_is_switched_off_stays_off_in_the_settings_of_a_run(changes, expected, tmp_path):
    once = resolved(recipes.layer(TrainSettings, changes))
    (tmp_path / "settings.yaml").write_text(dump(once))
    for again in (once, saved_settings(tmp_path)):
        assert resolved(again).objective.terms == expected
    assert resolved(once) == once
