"""Every recipe that ships: it loads strictly, its model has the paper's size, and its numbers are the papers'."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fulldepth.errors import FulldepthError
from fulldepth.losses.terms import Aligned, Coherence, Jump, Orthogonality
from fulldepth.settings import layers as recipes
from fulldepth.training import plan as planning
from fulldepth.training.arguments import batch_split
from fulldepth.training.methods import make_objective, resolved
from fulldepth.training.model import build_config, meta_model
from fulldepth.training.plan import dry_run_lines, plan
from fulldepth.training.settings import ModelSettings, TrainSettings

METHODS = ["llama", "jreg", "tree", "tree-cr", "lime", "lime-dynamic", "lime-kv", "hyper", "aligned"]
TINY = [f"tiny-{method}" for method in METHODS]
JREG = [f"{method}-{size}" for method in ("jreg", "baseline") for size in ("170m", "1b", "3.4b")]
CR = ["base-12l", "base-14l", "tree-12l", "cr-12l"]
LIME = ["llama-1.2b", "lime-1.2b", "lime-dynamic-1.2b", "hyper-1.2b"]
DEPTH = [f"{model}-depth-{layers}" for model in ("llama", "lime") for layers in (32, 64, 128)]


TINY_CLASSIFIERS = ["tiny-vit", "tiny-bert", "tiny-gpt2"]
ALIGNED = ["deit-small-imagenet", "deit-base-imagenet", "bert-glue", "gpt2-wikitext"]


def settings(name: str) -> TrainSettings:
    return recipes.layer(TrainSettings, recipes.read(name, "train"))


@cache
def parameters(name: str, **over: Any) -> int:
    asked = recipes.layer(TrainSettings, recipes.read(name, "train"), {"model": over})
    vocab_size = 2048 if name in TINY else None
    return meta_model(
        build_config(asked.model, vocab_size=vocab_size, positions=asked.sequence_length)
    ).num_parameters()


def llama(layers: int, width: int, ffn: int, vocab: int, tied: bool) -> int:
    """Embeddings (and head), then per layer four squares, three MLP matrices and two norms; one norm at the end."""
    return vocab * width * (1 if tied else 2) + layers * (4 * width**2 + 3 * width * ffn + 2 * width) + width


def memory(layers: int, width: int, heads: int, kind: str) -> int:
    """Routers of layers 2..L, which read 2..L sources; static and dynamic ones with a norm each."""
    sources = range(2, layers + 1)
    if kind == "kv":
        return sum(r * heads * heads for r in sources)
    return sum(heads * r * (width if kind == "dynamic" else 1) + width for r in sources)


def hyper(layers: int, width: int, streams: int) -> int:
    """Two connections a layer: D (n + 2) + n^2 + 2 n + 2 parameters each."""
    return 2 * layers * (width * (streams + 2) + streams**2 + 2 * streams + 2)


TREE = 10  # norms: two for each of layers 1, 2, 4, 6, 8
SMALL = llama(12, 128, 344, 2048, tied=True)
LARGE = llama(16, 2048, 8192, 50257, tied=True)
COUNTS = {
    **dict.fromkeys(["tiny-llama", "tiny-jreg", "tiny-aligned"], SMALL),
    **dict.fromkeys(["tiny-tree", "tiny-tree-cr"], SMALL + TREE * 128),
    "tiny-lime": SMALL + memory(12, 128, 4, "static"),
    "tiny-lime-dynamic": SMALL + memory(12, 128, 4, "dynamic"),
    "tiny-lime-kv": SMALL + memory(12, 128, 4, "kv"),
    "tiny-hyper": SMALL + hyper(12, 128, 4),
    **dict.fromkeys(["jreg-170m", "baseline-170m"], llama(12, 768, 2048, 32000, tied=False)),
    **dict.fromkeys(["jreg-1b", "baseline-1b"], llama(16, 2048, 5376, 32000, tied=False)),
    **dict.fromkeys(["jreg-3.4b", "baseline-3.4b"], llama(30, 3072, 8192, 32000, tied=False)),
    "base-12l": llama(12, 768, 2048, 32000, tied=False),
    "base-14l": llama(14, 768, 2048, 32000, tied=False),
    **dict.fromkeys(["tree-12l", "cr-12l"], llama(12, 768, 2048, 32000, tied=False) + TREE * 768),
    "llama-1.2b": LARGE,
    "lime-1.2b": LARGE + memory(16, 2048, 32, "static"),
    "lime-dynamic-1.2b": LARGE + memory(16, 2048, 32, "dynamic"),
    "hyper-1.2b": LARGE + hyper(16, 2048, 4),
    **{f"llama-depth-{n}": llama(n, 256, 1024, 50257, tied=True) for n in (32, 64, 128)},
    **{f"lime-depth-{n}": llama(n, 256, 1024, 50257, tied=True) + memory(n, 256, 8, "static") for n in (32, 64, 128)},
}

ADAM = {"weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "clip": 1.0}
FINEWEB = {"data.name": "HuggingFaceFW/fineweb-edu", "data.config": "sample-100BT", "data.column": "text"}
JREG_TABLE_9 = ADAM | {"global_batch_size": 512, "sequence_length": 1024, "schedule": "cosine", "warmup_length": 1000}
JREG_TABLE_9 |= FINEWEB | {"steps": 200_000}  # Sec. 5.1
JREG_TABLE_9 |= {"decay": "all", "initializer.distribution": "truncated-normal", "initializer.output_scale": 1.0}
JREG_TABLE_9 |= {"model.rms_norm_eps": 1e-5}  # defaults of Meta Lingua, the paper's code base (App. A.2)
LIME_TABLE_3 = ADAM | {"learning_rate": 1e-3, "schedule": "cosine", "warmup_length": 200, "min_learning_rate": 1e-6}
LIME_TABLE_3 |= {"precision": "autocast", "sequence_length": 2048, "global_batch_size": 1024, "steps": 20_000}
LIME_TABLE_3 |= FINEWEB
LIME_TABLE_3 |= {"decay": "matrices", "initializer.distribution": "model", "initializer.output_scale": 1.0}
ROUTED = {"router_learning_rate": 1e-2, "initializer.memory": "pseudocode"}
CR_SEC_4 = ADAM | {"global_batch_size": 512, "sequence_length": 1024, "data.name": "monology/pile-uncopyrighted"}
SFT_APP_A3 = {"stage": "sft", "learning_rate": 2e-5, "schedule": "linear", "adam_beta1": 0.9, "adam_beta2": 0.95}
SFT_APP_A3 |= {"global_batch_size": 512, "steps": 957, "data.name": "allenai/tulu-v1-sft-mixture"}


def jreg_numbers(size: str) -> dict[str, Any]:
    """Table 9: learning rate, a tenth of it at the end (lr_min_ratio), and the local batch, here in two halves."""
    rate, local = {"170m": (9e-4, 128), "1b": (7e-4, 64), "3.4b": (5e-4, 32)}[size]
    return JREG_TABLE_9 | {"learning_rate": rate, "min_learning_rate": rate * 0.1, "micro_batch_size": local // 2}


APP_B = {"learning_rate": 0.1, "weight_decay": 1e-4, "global_batch_size": 256, "schedule": "multistep", "decay": "all"}
APP_B |= {"augmentation.flip": True, "augmentation.rotation": 15, "milestones": [0.5, 0.75], "method": "aligned"}
APP_B |= {"model.num_hidden_layers": 12}  # Table 1
APP_C2 = {"learning_rate": 2e-5, "sequence_length": 256, "method": "aligned"}

CARION = {"learning_rate": 1e-4, "backbone_learning_rate": 1e-5, "weight_decay": 1e-4, "clip": 0.1}
CARION |= {
    "global_batch_size": 64,
    "schedule": "multistep",
    "milestones": [0.66667],
    "initializer.distribution": "glorot",
    "augmentation.flip": True,
}
CARION |= {f"model.{part}_layers": 6 for part in ("encoder", "decoder")}  # Carion et al. 2020, Sec. 4 and App. A.4
CARION |= {"model.d_model": 256, "model.num_queries": 100, "model.dropout": 0.1, "data.image_size": 800}
CARION |= {f"model.{part}_attention_heads": 8 for part in ("encoder", "decoder")}
CARION |= {f"model.{part}_ffn_dim": 2048 for part in ("encoder", "decoder")}

PAPERS = {
    **dict.fromkeys(ALIGNED[:2], APP_B),
    "bert-glue": APP_C2 | {"global_batch_size": 32},
    "gpt2-wikitext": APP_C2 | {"global_batch_size": 8, "steps": 40_000},
    "detr-coco": CARION,
    **{name: jreg_numbers(name.partition("-")[2]) for name in JREG},
    "jreg-sft": SFT_APP_A3,
    **dict.fromkeys(CR, CR_SEC_4),
    **{name: LIME_TABLE_3 | (ROUTED if name.startswith("lime") else {}) for name in [*LIME, *DEPTH]},
}
SHAPES = {  # JREG Table 8, LIME Table 4, Sec. 5.4: layers, width, MLP, heads
    "170m": (12, 768, 2048, 12),
    "1b": (16, 2048, 5376, 16),
    "3.4b": (30, 3072, 8192, 24),
    "1.2b": (16, 2048, 8192, 32),
    **{f"depth-{layers}": (layers, 256, 1024, 8) for layers in (32, 64, 128)},
    "12l": (12, 768, 2048, 12),
    "14l": (14, 768, 2048, 12),
}
PROCESSES = dict.fromkeys(["jreg-170m", "baseline-170m"], 4) | dict.fromkeys(CR, 1)
"""Accelerators of the papers' runs where not 8 (JREG App. A.2; CR Sec. 4)."""


HOURS = dict.fromkeys(["170m"], 16) | {"1b": 55, "3.4b": 159}
"""Of the paper's runs (JREG App. A.2)."""


def test_checkpoints_of_the_papers_recipes_are_about_an_hour_apart() -> None:
    for name in (*JREG, *CR, *LIME, *DEPTH):
        asked = settings(name)
        rate, share = (312e12 if name in CR else 989e12), (0.2 if name in DEPTH else 0.4)
        config = build_config(asked.model, positions=asked.sequence_length)
        made = plan(asked, config, processes=PROCESSES.get(name, 8), rate=rate, utilisation=share)
        assert made.save_seconds is not None
        if name in JREG:
            assert HOURS[name.partition("-")[2]] * asked.save_every / asked.steps == pytest.approx(1, abs=0.02)
            assert made.save_seconds == pytest.approx(3600, rel=0.25)
        else:
            assert made.save_seconds == pytest.approx(3600, rel=0.05)


def test_every_recipe_is_there_and_says_what_it_is() -> None:
    known = [*TINY, *JREG, "jreg-sft", *CR, *LIME, *DEPTH, "smollm2-aligned", *TINY_CLASSIFIERS, *ALIGNED]
    assert set(known) <= set(recipes.names("train"))
    for name in recipes.names("train"):
        asked = settings(name)
        assert asked.about.endswith(".")
        assert len(asked.about) <= 120
        assert ". " not in asked.about
        assert asked.source.endswith(".")
        assert len(asked.source) > 80


@pytest.mark.parametrize("name", COUNTS)
def test_models_have_the_papers_sizes(name: str) -> None:
    assert parameters(name) == COUNTS[name]


def test_totals_are_those_that_the_papers_round() -> None:
    assert round(parameters("jreg-170m") / 1e6, 1) == 134.1
    assert round(parameters("jreg-170m", tie_word_embeddings=True) / 1e6, 1) == 109.5
    assert round(parameters("jreg-3.4b") / 1e9, 2) == 3.59
    assert round(parameters("jreg-3.4b", tie_word_embeddings=True) / 1e9, 2) == 3.50
    assert round(parameters("base-14l") / 1e6, 1) == 148.3
    table_6 = {"llama-1.2b": 1.1767, "lime-1.2b": 1.1768, "lime-dynamic-1.2b": 1.1856, "hyper-1.2b": 1.1771}
    assert {name: round(parameters(name) / 1e9, 4) for name in LIME} == table_6


def test_totals_that_recipes_state_are_their_models() -> None:
    for name in JREG:
        source = settings(name).source
        assert f"{parameters(name):,}" in source
        assert f"{parameters(name, tie_word_embeddings=True):,}" in source


@pytest.mark.parametrize("name", PAPERS)
def test_numbers_are_the_papers(name: str) -> None:
    document = settings(name).model_dump() | {"warmup_length": settings(name).warmup_length}
    for key, number in PAPERS[name].items():
        value: Any = document
        for part in key.split("."):
            value = value[part]
        assert value == pytest.approx(number) if isinstance(number, float) else value == number, key


def test_warm_up_follows_the_number_of_steps_unless_its_steps_are_given() -> None:
    recipe = recipes.read("tiny-llama", "train")  # a tenth of 300 steps
    lengths = [
        recipes.layer(TrainSettings, recipe, changes).warmup_length
        for changes in ({}, {"steps": 20}, {"steps": 20, "warmup_steps": 5}, {"warmup": 0.0})
    ]
    assert lengths == [30, 2, 5, 0]


@pytest.mark.parametrize("name", [*JREG, *CR, *LIME, *DEPTH])
def test_shapes_are_the_papers(name: str) -> None:
    size = name.partition("-")[2].removeprefix("dynamic-")
    config = build_config(settings(name).model, positions=settings(name).sequence_length)
    shape = (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads)
    assert shape == SHAPES[size]
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.hidden_act == "silu"
    assert config.rms_norm_eps == (1e-5 if name in JREG else 1e-6)  # Meta Lingua; LlamaConfig, as in LIME's code
    assert config.rope_parameters["rope_theta"] == 10_000
    assert config.initializer_range == 0.02
    assert config.vocab_size == (50257 if name in [*LIME, *DEPTH] else 32000)
    assert config.max_position_embeddings == settings(name).sequence_length


def test_epochs_are_the_aligned_papers() -> None:
    for name in ALIGNED[:2]:  # App. B: 200 epochs, divided at 100 and 150
        assert settings(name).steps == round(200 * 1_281_167 / 256)
    detr = settings("detr-coco")  # Carion et al. 2020: 300 epochs, the rate divided after 200
    assert detr.steps == round(300 * 118_287 / 64)
    assert detr.milestones[0] * 300 == pytest.approx(200, abs=0.01)
    glue = {"SST-2": 67_349, "MRPC": 3_668, "QNLI": 104_743, "RTE": 2_490, "QQP": 363_846, "MNLI": 392_702}
    source = settings("bert-glue").source  # App. C.2: three epochs
    for task, rows in glue.items():
        assert f"steps={math.ceil(3 * rows / 32)}" in source or settings("bert-glue").steps == round(3 * rows / 32), (
            task
        )


@pytest.mark.parametrize(
    ("name", "schedule"),  # App. B.3 alternates from scratch; C.2 and B.5 train every step with the loss
    [*((name, "alternate") for name in ALIGNED[:2]), *((name, "always") for name in [*ALIGNED[2:], "detr-coco"])],
)
def test_the_aligned_loss_is_the_papers(name: str, schedule: str, tmp_path: Path) -> None:
    asked = settings(name)
    if asked.model.checkpoint is not None:  # not at hand: any folder stands for it
        asked = asked.model_copy(update={"model": asked.model.model_copy(update={"checkpoint": str(tmp_path)})})
    terms = resolved(asked).objective.terms
    assert terms == {"aligned": {"weight": 1.0, "weights": "linear", "schedule": schedule}}


@pytest.mark.parametrize(("name", "millions"), [("deit-small-imagenet", 22.1), ("deit-base-imagenet", 86.6)])
def test_deits_have_the_papers_sizes(name: str, millions: float) -> None:
    task = "image-classification"
    config = build_config(settings(name).model, task=task, classes=[str(number) for number in range(1000)])
    assert meta_model(config, task).num_parameters() / 1e6 == pytest.approx(millions, abs=0.06)  # arXiv 2012.12877


def test_names_of_what_a_paper_leaves_open_are_in_the_source() -> None:
    """Where statements contradict each other, or a framework decides, the source names both."""
    for name in JREG:
        assert all(word in settings(name).source for word in ("Meta Lingua", "every parameter", "inputs**-0.5", "1e-5"))
    for name in [*LIME[1:3], *DEPTH[3:]]:
        width = settings(name).model.model_dump()["hidden_size"]
        assert f"within 1/{width:,} " in settings(name).source
    assert all(word in settings("lime-dynamic-1.2b").source for word in ("decay=routers", "Table 3", "Sec. 4.3"))
    assert "output_scale 0.5" in settings("hyper-1.2b").source


@pytest.mark.parametrize(
    ("name", "billions", "within"), [("jreg-1b", 100, 0.05), ("cr-12l", 11, 5e-5), ("lime-1.2b", 41.9, 0.002)]
)
def test_runs_read_as_many_tokens_as_the_papers(name: str, billions: float, within: float) -> None:
    asked = settings(name)
    assert asked.steps * asked.global_batch_size * asked.sequence_length == pytest.approx(billions * 1e9, rel=within)
    validation = {"jreg-1b": 11e6}.get(name)
    if validation:
        assert asked.data.validation_sequences * asked.sequence_length == pytest.approx(validation, rel=1e-4)
        assert asked.data.validation_share * 100e9 > validation


def test_penalties_are_the_papers() -> None:
    for name in ("tiny-jreg", "jreg-170m", "jreg-1b", "jreg-3.4b"):  # Sec. 6, Table 12
        assert make_objective(resolved(settings(name))).terms == {"jump": Jump(weight=1.0, alpha=1.0)}
    for name in ("tiny-tree-cr", "cr-12l"):  # Listing 2
        assert make_objective(resolved(settings(name))).terms == {
            "coherence": Coherence(weight=0.01, layers=[2, 4, 6, 8], target=0.35),
            "orthogonality": Orthogonality(weight=0.01, layers=[3, 5, 7, 9, 10]),
        }
    assert settings("cr-12l").objective.energy_warmup == 800
    paper, tiny = settings("cr-12l"), settings("tiny-tree-cr")
    assert tiny.objective.energy_warmup / tiny.steps == pytest.approx(800 / paper.steps, rel=0.06)
    assert make_objective(resolved(settings("tiny-aligned"))).terms == {
        "aligned": Aligned(weight=1.0, weights="linear", schedule="alternate")
    }
    assert make_objective(resolved(settings("smollm2-aligned"))).terms == {  # fine-tuning: at every step
        "aligned": Aligned(weight=1.0, weights="linear", schedule="always", positions=0.0625)
    }
    rest = {*recipes.names("train")} - {name for name in recipes.names("train") if settings(name).method != "standard"}
    assert {*LIME, *DEPTH, "tree-12l", "base-12l", "jreg-sft", "tiny-llama", "tiny-hyper"} <= rest
    assert not any(make_objective(resolved(settings(name))).terms for name in rest)


def test_trees_are_the_listing() -> None:
    listing = {1: [-1, 0], 2: [0, 1], 4: [0, 3], 6: [1, 5], 8: [1, 7]}
    for name in ("tree-12l", "cr-12l", "tiny-tree", "tiny-tree-cr"):
        config = build_config(settings(name).model, vocab_size=2048)
        assert {layer: list(sources) for layer, sources in config.tree.items()} == listing


def test_tiny_recipes_differ_in_their_method_only() -> None:
    def shared(name: str) -> dict[str, Any]:
        document = settings(name).model_dump() | {"warmup_length": settings(name).warmup_length}
        switches = {"type", "residual", "memory", "kv_init", "num_streams", "hyper_dynamic"}
        document["model"] = {key: value for key, value in document["model"].items() if key not in switches}
        return {
            k: v
            for k, v in document.items()
            if k not in ("about", "source", "method", "objective", "router_learning_rate")
        }

    for name in TINY:
        assert shared(name) == shared("tiny-llama"), name
        assert settings(name).router_learning_rate == (1e-2 if "lime" in name else None)


@pytest.mark.parametrize("name", [*JREG, "jreg-sft", *CR, *LIME, *DEPTH])
def test_batches_divide_among_the_papers_machines(name: str) -> None:
    processes = PROCESSES.get(name, 8)
    asked = settings(name)
    micro, accumulated = batch_split(asked, processes)
    assert micro * accumulated * processes == asked.global_batch_size
    assert asked.warmup_length <= asked.steps


def test_fine_tuning_continues_the_model_it_names(tmp_path) -> None:
    asked, base = settings("jreg-sft"), settings("jreg-3.4b")
    build_config(base.model, positions=base.sequence_length).save_pretrained(tmp_path)
    continued = ModelSettings(**asked.model.model_dump() | {"checkpoint": str(tmp_path)})
    config = build_config(continued, positions=asked.sequence_length)
    assert meta_model(config).num_parameters() == COUNTS["jreg-3.4b"]
    assert asked.method == "standard"  # App. A.3 names no penalty


@pytest.mark.parametrize("name", recipes.names("train"))
def test_a_dry_run_without_network_works_or_says_what_to_pass(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planning, "measure_rate", lambda device, dtype: 1e11)
    monkeypatch.chdir(tmp_path)
    try:
        dry_run_lines(settings(name))
    except FulldepthError as error:
        assert re.search(r"model\.num_labels=N|model\.checkpoint", str(error)), error  # noqa: PT017
