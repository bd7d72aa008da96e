"""The last step of a command, tried with few layers: what it refuses is refused before the work, what works is not."""

from __future__ import annotations

from types import SimpleNamespace

import gguf
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import tiny_models
from families import zoo
from families.test_cuts import build as deep
from fulldepth import exit
from fulldepth.core.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.hf import few_layers, load_checkpoint
from fulldepth.settings.search import ExportSettings
from fulldepth.skip import export, load
from fulldepth.skip.exports import export as exporting
from fulldepth.skip.heal import heal
from refusals import refused
from skip import planned
from skip.exports.test_gguf import source
from skip.word_tokenizer import checkpoint, tokenizer

TRIED = "This was a trial with a few layers, before the work"
FORMATS = {"folded": "attention", "fast": "any", "decilm": "attention", "layer": "layer"}
"""Format -> granularity of its plan."""
FAMILIES = {
    "qwen2": (*FORMATS,),
    **dict.fromkeys(("gemma2", "gemma3_text"), ("folded", "fast")),  # whole layers would need the list of their kinds
    **dict.fromkeys(("llama", "gpt2", "gpt_neox", "granite", "olmo2", "opt", "qwen3_moe"), ("folded", "fast", "layer")),
}
"""Model type -> formats that hold it; this Llama has heads of a width of their own."""


@pytest.fixture
def idle(monkeypatch):
    """`idle(model)`: no work is done, and the model computes nothing."""
    for place in (
        "skip.least_squares.heldout_losses",
        "skip.least_squares._heal",
        "exit.elastic.read_exits",
        "exit.elastic.truncated",
    ):
        monkeypatch.setattr(f"fulldepth.{place}", lambda *_: pytest.fail("the work was begun"))
    monkeypatch.setattr("fulldepth.skip.exports.export.LARGE", 0, raising=False)
    monkeypatch.setattr("fulldepth.exit.elastic.LARGE", 0, raising=False)

    def watched(model):
        model.register_forward_pre_hook(lambda *_: pytest.fail("the whole model computed something"))
        return model

    return watched


def dropped(*_):
    raise FulldepthError("The export is dropped: it does not load in a fresh process.")


@pytest.mark.parametrize("command", ["apply", "heal", "exit", "exit with data"])
def test_an_export_that_would_be_dropped_is_refused_before_the_work(command, idle, tmp_path, monkeypatch):
    for module in ("skip.exports.export", "exit.elastic"):
        monkeypatch.setattr(f"fulldepth.{module}.prove_export", dropped)
    model, target, own = idle(deep("llama")), tmp_path / "new" / "made", {"tokenizer": tokenizer()}
    plan = planned.plan(model, [2, 5], "attention")
    runs = {
        "apply": lambda: export(plan, model, "fast", target, **own),
        "heal": lambda: heal(plan, model, planned.texts(90), target, steps=0, **own),
        "exit": lambda: exit.export_layers(model, target, layers=4, **own),
        "exit with data": lambda: exit.export_layers(model, target, effective_depth=0.1, data=["w1 w2"] * 20, **own),
    }
    with refused(TRIED, "does not load in a fresh process"):
        runs[command]()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_tokenizer_that_does_not_load_is_found_by_the_fresh_process_before_the_fit(idle, tmp_path):
    folder = checkpoint(tmp_path / "model")
    (folder / "tokenizer.json").write_bytes(b'{"version": "1.0", "model": {}}')
    plan = planned.plan(tiny_models.build("llama"), [2], "layer")
    with refused(TRIED, "does not load in a fresh process"):
        heal(plan, folder, planned.texts(90), tmp_path / "made", steps=0)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("qwen3_moe", {"rank": 0, "steps": 1}, "does not store such a weight of a qwen3moe"),  # trained experts
        ("llama", {"gguf": "in/source.gguf/small.gguf"}, "Cannot write the export"),
        ("llama", {"free": 1000}, r"needs at least \d+\.\d\d [kM]B, and 1.00 kB are free"),
        ("llama", {"rounding": -1.0}, "Choose a larger type .--gguf-type"),
    ],
)
def test_a_gguf_file_that_cannot_be_written_is_refused_before_the_fit(
    kind, options, words, idle, tmp_path, monkeypatch
):
    (tmp_path / "in").mkdir()
    path, model = source(tmp_path / "in", kind, quantise=gguf.GGMLQuantizationType.Q4_1)
    plan = planned.plan(model, [2], "layer", None)
    options = {"gguf": "small.gguf", "steps": 0} | options
    if (rounding := options.pop("rounding", None)) is not None:
        monkeypatch.setattr("fulldepth.skip.exports.formats.gguf.ROUNDING", rounding)
    if (free := options.pop("free", None)) is not None:
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("fulldepth.hf.checkpoint_folder.shutil.disk_usage", lambda _: usage)
        monkeypatch.setattr("fulldepth.skip.heal.check_disk_space", lambda *_: None)
    with refused(words):
        heal(plan, path, planned.texts(90), tmp_path / "made", **options | {"gguf": str(tmp_path / options["gguf"])})
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


@torch.no_grad()
def loaded_again(folder, ids, expected, _, reader, __):
    """`prove_export` in this process: the error of the logits of the model that was written."""
    model = load(folder) if reader == "carried" else AutoModelForCausalLM.from_pretrained(folder).eval()
    error = float((model(input_ids=ids).logits - expected).abs().max() / expected.abs().max())
    assert error < 1e-4
    return error


@pytest.mark.parametrize("family", FAMILIES)
def test_what_can_be_exported_is_tried_and_not_refused(family, tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(
        "fulldepth.skip.exports.export.prove_export", lambda *given: tried.append(loaded_again(*given)) or 0.0
    )
    model = deep(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for format, granularity in FORMATS.items():
        blocks = ["attention 5", "mlp 2", "attention 3"] if granularity == "any" else [5, 2]
        plan = planned.plan(model, blocks, granularity, None)
        if format not in FAMILIES[family]:
            with refused(None):
                exporting.check_format(model, plan, exporting.FORMATS[format])
            continue
        exporting.rehearse(plan, model, format, tmp_path / format, ExportSettings())
        assert len(tried) == 1, format
        tried.clear()
    assert tiny_models.same_weights(model, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "granularity"), [("llama", "any"), ("gemma3_text", "layer"), ("qwen2", "layer")])
def test_a_file_of_the_first_layers_is_proven_by_llama_cpp(kind, granularity, tmp_path, monkeypatch):
    """The copy has the source's layers; its changed weights are rounded to four bits as those of the whole would be."""
    seen = []
    write = exporting._export

    def watched(plan, model, *given, **named):
        seen.append((plan, model, write(plan, model, *given, **named)))

    monkeypatch.setattr(exporting, "_export", watched)
    fields = {"num_hidden_layers": 12, "sliding_window": 4, "head_dim": 256} if kind == "gemma3_text" else {}
    _, model = source(tmp_path, kind, quantise=gguf.GGMLQuantizationType.Q8_0, **fields)
    blocks = ["attention 2", "mlp 3"] if granularity == "any" else list(range(2, 8))
    plan = planned.plan(model, blocks, granularity, None)

    def change(copy):
        for name, weight in copy.named_parameters():
            if name.endswith("o_proj.weight"):
                weight.data.mul_(1.01)

    exporting.rehearse(plan, model, "gguf", tmp_path / "small.gguf", ExportSettings(), change=change)
    ((own, copy, report),) = seen
    assert report.verified
    assert any("Rounding of changed weights" in note for note in report.notes)
    assert own.kind == plan.kind
    assert copy.config.num_hidden_layers == 3
    for name, weight in copy.state_dict().items():
        factor = 1.01 if name.endswith("o_proj.weight") else 1
        assert_close(weight, factor * model.state_dict()[name])
    assert [file.name for file in tmp_path.iterdir()] == ["source.gguf"]


def test_every_kind_of_layer_is_tried_and_a_class_without_a_copy_is_not(tmp_path, monkeypatch):
    assert few_layers(find_anatomy(deep("llama"))) == 3
    assert few_layers(find_anatomy(deep("deepseek_v3", first_k_dense_replace=4))) == 5
    assert few_layers(find_anatomy(zoo.build("llama", "causal-lm", num_hidden_layers=1))) == 1
    monkeypatch.setattr(exporting, "_export", lambda *_, **__: pytest.fail("tried"))
    model = deep("llama")
    monkeypatch.setattr("fulldepth.skip.exports.formats.format.first_layers", dropped)
    exporting.rehearse(planned.plan(model), model, "folded", tmp_path / "x", ExportSettings())


@pytest.mark.usefixtures("unproven")
def test_the_bytes_of_a_file_are_known_before_it_is_written(tmp_path):
    path, model = source(tmp_path)
    format = exporting.FORMATS["gguf"]
    for blocks, granularity in (([2], "layer"), ([1, 3], "mlp")):
        plan = planned.plan(model, blocks, granularity, None)
        least = format.least_bytes(find_anatomy(load_checkpoint(path).model), plan, None)
        written = export(plan, path, "gguf", tmp_path / f"{granularity}.gguf").path
        stored = sum(tensor.n_bytes for tensor in gguf.GGUFReader(written).tensors)
        assert 0.98 * stored < least <= stored
