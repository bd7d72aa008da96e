"""GGUF files without blocks: computed by llama.cpp, against the stock model that computes the plan's definition."""

from __future__ import annotations

import copy
import re

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import gguf_files
import tiny_models
from cli.conftest import main  # noqa: F401
from fulldepth.execution.readers import with_llama_cpp
from fulldepth.hf import load_checkpoint
from fulldepth.hf.gguf import WINDOWS, load_gguf_config, read_header
from fulldepth.hf.stream_scale import GGUF_ENTRY
from fulldepth.results import Results
from fulldepth.skip import export, load
from fulldepth.skip.exports import export as exporting
from fulldepth.skip.exports.formats import export_obstacle, gguf_layers
from fulldepth.skip.exports.formats import gguf as writer
from fulldepth.skip.exports.formats.checkpoint import Weight
from fulldepth.skip.exports.formats.gguf import write_gguf
from fulldepth.skip.heal import heal
from refusals import refused
from skip import planned
from tiny_models import seeded

PARTS = {"attention": ("att",), "mlp": ("mlp",), "layer": ("att", "mlp")}
KINDS = gguf.GGMLQuantizationType
IDS = torch.tensor([[5, 9, 20, 77, 31, 8, 100, 64]])


def tiny(kind="llama", **options):
    """A tiny model with a vocabulary that GGUF files can hold, and rows that q8_0 can."""
    options = tiny_models.DECODER | {"vocab_size": 300, "intermediate_size": 64, "num_hidden_layers": 4} | options
    torch.manual_seed(0)
    return tiny_models.strengthened(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)), 4.0).eval()


def source(tmp_path, kind="llama", quantise=None, **options):
    """A GGUF file and the model that transformers reads from it."""
    entries = options.pop("entries", None)
    path = gguf_files.write(tmp_path / "source.gguf", tiny(kind, **options), quantise=quantise, entries=entries)
    return path, load_checkpoint(path).model


def without(model, removed, scalars=None):
    """[V] log-probabilities after `IDS` in float64, by hooks on the stock model."""
    model, scalars = copy.deepcopy(model).double(), scalars or {}
    layers = range(1, model.config.num_hidden_layers + 1)
    factors = {layer: dict.fromkeys(planned.NAMES, 1.0) | scalars.get(str(layer), {}) for layer in layers}
    for part, numbers in removed.items():
        for layer in numbers:
            factors[layer] |= {f"b_{name}": 0.0 for name in PARTS[part]}
    planned.scale(model, factors)
    with torch.no_grad():
        return model(input_ids=IDS).logits[0, -1].log_softmax(-1)


def by_llama_cpp(path):
    """[V] log-probabilities after `IDS`, in this process."""
    files = [str(path.with_name(name)) for name in ("inputs.pt", "logits.pt")]
    torch.save(IDS, files[0])
    with_llama_cpp.main(str(path), *files, "llama.cpp")
    return torch.load(files[1])[0].double()


def stored(path):
    """Name -> (type, bytes) of a file's tensors; key -> (types, value) of its metadata."""
    reader = gguf.GGUFReader(path)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    entries = {key: (field.types[:1], field.contents()) for key, field in fields.items()}
    return {t.name: (t.tensor_type, t.data.tobytes()) for t in reader.tensors}, entries


REMOVED = [
    ({"attention": [2, 4]}, "deci", [(1, 1), (0, 2), (3, 3), (0, 4)]),
    ({"attention": [1], "layer": [3]}, "deci", [(0, 1), (2, 2), (4, 4)]),
    ({"mlp": [2, 4]}, "deci", [(1, 1), (2, 0), (3, 3), (4, 0)]),
    ({"layer": [1, 3]}, "llama", [(2, 2), (4, 4)]),
    ({"mlp": [1], "attention": [2], "layer": [4]}, "llama", [(1, 2), (3, 3)]),
]
"""What is removed, and the layers of the file that each layer's attention and MLP are from (0 = none)."""


@pytest.mark.parametrize(("removed", "architecture", "layers"), REMOVED)
def test_llama_cpp_computes_what_is_left_from_the_sources_bytes(removed, architecture, layers, tmp_path):
    path, model = source(tmp_path)
    lacking = [[n for part in (own, "layer") for n in removed.get(part, [])] for own in ("attention", "mlp")]
    write_gguf(path, tmp_path / "small.gguf", *lacking)
    expected = without(model, removed)
    assert (by_llama_cpp(tmp_path / "small.gguf") - expected).abs().max() < 1e-5
    assert (expected - without(model, {})).abs().max() > 0.1

    (tensors, entries), (before, old) = stored(tmp_path / "small.gguf"), stored(path)
    for name, value in before.items():
        if not name.startswith("blk."):
            assert tensors.pop(name) == value
    for index, pair in enumerate(layers):
        for part, number in zip(("attn", "ffn"), pair, strict=True):
            for name, value in before.items():
                if number and name.startswith(f"blk.{number - 1}.{part}_"):
                    assert tensors.pop(f"blk.{index}.{name.split('.', 2)[2]}") == value
    assert not any(np.frombuffer(data, np.float32).any() for name, (_, data) in tensors.items() if "norm" not in name)

    heads, neurons = [4 * bool(a or not n) for n, (a, _) in enumerate(layers)], [64 if m else 1 for _, m in layers]
    changed = {"general.architecture": architecture, f"{architecture}.block_count": len(layers)}
    if architecture == "deci":
        changed |= {"deci.attention.head_count": heads, "deci.feed_forward_length": neurons}
        changed["deci.attention.head_count_kv"] = [2 * bool(attention) for attention, _ in layers]
    for key, (kind, value) in old.items():
        new = key.replace("llama.", f"{architecture}.", 1)
        assert entries.pop(new) == (kind, value) if new not in changed else entries.pop(new)[1] == changed[new]
    assert not entries


OTHERS = {
    "mistral": {"sliding_window": None},
    "phi3": {"num_key_value_heads": 1, "sliding_window": None, "entries": {"attention.sliding_window": 0}},
    "qwen2": {"tie_word_embeddings": True},
}
"""Types of models whose graph is that of `deci` -> settings."""


@pytest.mark.parametrize("quantise", [None, KINDS.Q8_0])
@pytest.mark.parametrize("kind", OTHERS)
def test_models_with_the_graph_of_deci_lose_attentions_and_mlps(kind, quantise, tmp_path):
    """Rows of queries and keys in another order, and joined matrices in parts; no byte of a row changes."""
    path, model = source(tmp_path, kind, quantise, **OTHERS[kind])
    removed = {"attention": [1, 3], "mlp": [2]}
    write_gguf(path, tmp_path / "small.gguf", [1, 3], [2])
    expected = without(model, removed)
    allowed = 0.03 if quantise else 1e-5  # llama.cpp rounds the inputs of such products to 8 bits
    assert (by_llama_cpp(tmp_path / "small.gguf") - expected).abs().max() < allowed
    assert (expected - without(model, {})).abs().max() > 0.1
    rows = [
        sorted(row.tobytes() for tensor in gguf.GGUFReader(file).tensors for row in tensor.data)
        for file in (path, tmp_path / "small.gguf")
    ]
    new = [row for row in rows[1] if row not in rows[0]]
    assert not any(any(row) for row in new)  # the neurons of zeros


def changed(model, factor=1.01):
    """Name -> weight, all of them other than the model's."""
    state = {name: weight * factor for name, weight in model.state_dict().items()}
    return {name: Weight(weight.to("meta"), lambda weight=weight: weight) for name, weight in state.items()}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3_text", "gpt2"])
def test_changed_weights_are_stored_as_transformers_reads_them_and_equal_ones_as_they_were(kind, tmp_path):
    """Queries and keys in pairs, norms with 1 added, transposed matrices."""
    fields = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64} if kind == "gpt2" else {}
    path, model = source(tmp_path, kind, quantise=KINDS.F16, **fields)
    write_gguf(path, tmp_path / "same.gguf", [], [], changed(model, 1))
    assert (tmp_path / "same.gguf").read_bytes() == path.read_bytes()
    write_gguf(path, tmp_path / "small.gguf", [2], [2], changed(model))
    again = load_checkpoint(tmp_path / "small.gguf").model.state_dict()
    numbers = {0: 0, 1: 2, 2: 3}
    for name, weight in again.items():
        origin = re.sub(r"(layers|h)\.(\d)\.", lambda found: f"{found[1]}.{numbers[int(found[2])]}.", name)
        assert torch.allclose(weight, 1.01 * model.state_dict()[origin], rtol=2**-11, atol=1e-6)


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize(
    ("quantise", "gguf_type", "kind", "allowed"),
    [
        (None, None, "F32", 1e-4),
        (None, "bf16", "BF16", 0.01),
        (KINDS.Q4_1, None, "Q4_1", 0.03),
        (KINDS.Q4_1, "q8_0", "Q8_0", 0.03),
        (KINDS.Q8_0, "f16", "F16", 0.03),
    ],
)
def test_folded_scalars_change_the_output_projections_alone(quantise, gguf_type, kind, allowed, tmp_path):
    """The oracle has the file's rounding, and the plan's scalars as hooks.

    Only llama.cpp's rounding of the inputs of products is allowed for.
    """
    path, model = source(tmp_path, quantise=quantise)
    scalars = planned.scalars([2], 4, low=0.5, high=2.0)
    report = export(planned.plan(model, values=scalars), path, "gguf", tmp_path / "o.gguf", gguf_type=gguf_type)
    for tensor in gguf.GGUFReader(report.path).tensors:
        number, name = re.search(r"(?:blk\.(\d)\.)?(\w+)", tensor.name).groups()
        if name in ("attn_output", "ffn_down") and tensor.name != "blk.1.attn_output.weight":
            block = model.model.layers[int(number)]
            weight = (block.self_attn.o_proj if name == "attn_output" else block.mlp.down_proj).weight.data
            rounded = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            weight.copy_(rounded * weight.square().sum() / (weight * rounded).sum())  # without the file's factor
    expected = without(model, {"attention": [2]}, scalars)
    assert (by_llama_cpp(report.path) - expected).abs().max() < allowed
    assert (without(model, {"attention": [2]}) - expected).abs().max() > 0.3, "the scalars do nothing here"
    tensors, before = stored(report.path)[0], stored(path)[0]
    assert "Rounding of changed weights" in report.notes[-1]
    assert "--gguf-type" not in report.notes[-1]
    other = {name for name, value in tensors.items() if value != before.get(name)}
    assert other == {f"blk.{n}.{name}.weight" for n in range(4) for name in ("attn_output", "ffn_down")} - {
        "blk.1.attn_output.weight"
    }
    assert {tensors[name][0].name for name in other} == {kind}
    factors = [1.0]
    for layer in "1234":
        factors.append(factors[-1] * scalars[layer].get("s_att", 1.0) * scalars[layer]["s_mlp"])
    assert read_header(report.path).metadata[GGUF_ENTRY] == pytest.approx(factors, rel=1e-6)
    assert report.bytes == report.path.stat().st_size


@pytest.mark.usefixtures("unproven")
def test_a_file_of_the_layers_that_are_left_states_the_scale_of_their_stream(tmp_path):
    path, model = source(tmp_path)
    scalars = planned.scalars([2], 4, "layer", low=0.9, high=1.1)
    plan = planned.plan(model, [2], "layer", values=scalars)
    report = export(plan, path, "gguf", tmp_path / "o.gguf")
    factors = [1.0]
    for layer in "134":
        factors.append(factors[-1] * scalars[layer]["s_att"] * scalars[layer]["s_mlp"])
    assert load_gguf_config(report.path).fulldepth_stream_scale == pytest.approx(factors, rel=1e-6)


def test_a_type_that_cannot_be_written_becomes_q8_0():
    values = np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256)
    given = KINDS.Q4_K, KINDS.Q6_K, KINDS.Q5_0
    assert [writer.encoded(values, kind)[1] for kind in given] == [KINDS.Q8_0, KINDS.Q8_0, KINDS.Q5_0]


GEMMA = {"num_hidden_layers": 12, "sliding_window": 4, "head_dim": 16}
SIXTH = [True, True, True, True, True, False] * 2


def test_whole_periods_of_sliding_windows_can_be_removed(tmp_path):
    path, model = source(tmp_path, "gemma3_text", **GEMMA)
    layers = list(range(3, 9))
    write_gguf(path, tmp_path / "small.gguf", layers, layers)
    difference = (by_llama_cpp(tmp_path / "small.gguf") - without(model, {"layer": layers})).abs().max()
    assert difference < 2e-3  # llama.cpp has a float16 table of GELU


def without_layers(model, layers):
    """[V] log-probabilities after `IDS` of a model whose layers return what they get; for any kinds of layers."""
    model = copy.deepcopy(model).double()
    for layer in layers:
        model.model.layers[layer - 1].register_forward_hook(lambda module, args, output: args[0])
    with torch.no_grad():
        return model(input_ids=IDS).logits[0, -1].log_softmax(-1)


def writable(architecture):
    """The mark of a test of files that older versions of `gguf` cannot write."""
    known = architecture in gguf.MODEL_ARCH_NAMES.values()
    return pytest.mark.skipif(not known, reason=f"this version of gguf does not know {architecture}")


@writable("lfm2")
def test_lists_with_a_value_for_each_layer_lose_those_of_removed_layers(tmp_path):
    """LFM2: heads for keys and values, 0 in layers that are short convolutions."""
    kinds = ["conv", "conv", "full_attention", "conv", "full_attention", "conv"]
    options = {"layer_types": kinds, "num_hidden_layers": 6, "norm_eps": 1e-5, "block_auto_adjust_ff_dim": False}
    path, model = source(tmp_path, "lfm2", **options)
    write_gguf(path, tmp_path / "small.gguf", [1, 3], [1, 3])
    assert read_header(tmp_path / "small.gguf").entries["attention.head_count_kv"] == (0, 0, 2, 0)
    expected = without_layers(model, [1, 3])
    assert (by_llama_cpp(tmp_path / "small.gguf") - expected).abs().max() < 1e-5
    assert (expected - without_layers(model, [])).abs().max() > 0.1


def predicting_file(folder):
    """A GGUF file of Qwen3.5 with a block for multi-token prediction, of random weights."""
    model = tiny(
        "qwen3_5_text",
        num_hidden_layers=8,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.375}
        | {"mrope_section": [1, 1, 1], "mrope_interleaved": True},
        **{f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")},
        **{f"linear_{name}_head_dim": 8 for name in ("key", "value")},
    )
    width, heads, kv_heads = 32, 4 * 16, 2 * 16
    shapes = {"attn_q": (2 * heads, width), "attn_k": (kv_heads, width), "attn_v": (kv_heads, width)}
    shapes |= {"attn_output": (width, heads), "attn_q_norm": (16,), "attn_k_norm": (16,)}
    shapes |= {"ffn_gate": (64, width), "ffn_up": (64, width), "ffn_down": (width, 64), "nextn.eh_proj": (width, 64)}
    norms = ("attn_norm", "post_attention_norm", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
    shapes |= dict.fromkeys(norms, (width,))
    random = np.random.default_rng(0)
    block = {f"blk.8.{name}.weight": random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    recurrent = [layer % 4 != 3 for layer in range(8)] + [False]
    entries = {"block_count": 9, "nextn_predict_layers": 1, "full_attention_interval": 4}
    entries["attention.recurrent_layers"] = recurrent
    return gguf_files.write(folder / "source.gguf", model, extra=block, entries=entries), block


@writable("qwen35")
def test_a_block_for_multi_token_prediction_stays_the_last_one(tmp_path):
    path, block = predicting_file(tmp_path)
    model = load_checkpoint(path).model
    assert len(model.model.layers) == 8
    assert (by_llama_cpp(path) - without_layers(model, [])).abs().max() < 1e-3
    small = tmp_path / "small.gguf"
    write_gguf(path, small, range(3, 7), range(3, 7))
    expected = without_layers(model, range(3, 7))
    assert (by_llama_cpp(small) - expected).abs().max() < 1e-3
    assert (expected - without_layers(model, [])).abs().max() > 0.1
    tensors, entries = stored(small)
    assert entries["qwen35.block_count"][1] == 5
    assert entries["qwen35.nextn_predict_layers"][1] == 1
    assert entries["qwen35.attention.recurrent_layers"][1] == [True, True, True, False, False]
    for name, weight in block.items():
        assert tensors[name.replace("blk.8.", "blk.4.")][1] == weight.tobytes()
    with refused("any 4 neighbours"):
        write_gguf(path, tmp_path / "other.gguf", [3], [3])
    with refused("does not store weights"):
        write_gguf(path, tmp_path / "other.gguf", range(3, 7), range(3, 7), changed(model))


@pytest.mark.parametrize("pattern", [3, [False, True, True, False, True, True] * 2])
def test_windows_are_those_that_llama_cpp_reads_from_the_file(pattern, tmp_path):
    path, model = source(tmp_path, "gemma3_text", **GEMMA, entries={WINDOWS: pattern})
    assert (by_llama_cpp(path) - without(model, {})).abs().max() < 2e-3


def planned_file(tmp_path, blocks=("attention 2", "mlp 3"), granularity="any", **options):
    """A GGUF file and a plan for it, in a folder of their own."""
    (tmp_path / "in").mkdir()
    path, model = source(tmp_path / "in", **options)
    return path, model, planned.plan(model, blocks, granularity, values=None)


@pytest.mark.slow
def test_the_command_writes_what_a_fresh_process_has_computed(tmp_path, main):  # noqa: F811
    path, _, plan = planned_file(tmp_path, quantise=KINDS.Q8_0)
    files = [plan.save(tmp_path / "in" / "plan.json"), path, "--format", "gguf", "--output", tmp_path / "a" / "s.gguf"]
    code, out, error = main("skip", "apply", *files)
    assert code == 0, error
    assert "deci" in out + error
    assert "UNVERIFIED" not in out + error
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["s.gguf"]


@pytest.mark.slow
@pytest.mark.parametrize(("gguf_type", "allowed"), [(None, 1e-4), ("f16", 3e-3)])
def test_the_file_of_a_healed_model_is_its_checkpoint(gguf_type, allowed, tmp_path):
    path, model = source(tmp_path)
    plan, small = planned.plan(model, ["mlp 2", "attention 3"], "any", None), tmp_path / "small.gguf"
    texts = planned.texts(300)
    small.touch()
    with refused(r"small\.gguf exists"):
        heal(plan, path, texts, tmp_path / "healed", steps=0, gguf=str(small))
    small.unlink()
    results = heal(plan, path, texts, tmp_path / "healed", steps=0, gguf=str(small), gguf_type=gguf_type)
    size, before = (file.stat().st_size for file in (small, path))
    assert results.headline["gguf_size"]["value"] == size / 2**20
    words = f"{size / 1e6:.1f} MB, {1 - size / before:.1%} smaller than the original's {before / 1e6:.1f} MB"
    assert words in results.headline["gguf_size"]["sentence"]
    assert words in (tmp_path / "healed" / "report.html").read_text().replace("&#39;", "'")
    assert ("F16" in {tensor.tensor_type.name for tensor in gguf.GGUFReader(small).tensors}) == (gguf_type == "f16")
    healed = load(tmp_path / "healed", dtype="float64")
    expected = healed(input_ids=IDS).logits[0, -1].log_softmax(-1)
    assert (by_llama_cpp(small) - expected).abs().max() < allowed
    assert (without(model, {"mlp": [2], "attention": [3]}) - expected).abs().max() > 1e-3, "nothing was healed"


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_healing_whose_file_fails_is_kept_and_only_the_file_is_made_again(dtype, tmp_path, monkeypatch):
    path, _ = source(tmp_path)
    small, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    searched = load_checkpoint(path, dtype=dtype).model
    cost = {"forwards": 0, "flops": 0, "seconds": 0.0, "settings": {"dtype": dtype}}
    plan = planned.plan(searched, ["layer 2"], "any", None, cost=cost)
    texts = planned.texts(300)
    heal(plan, path, texts, tmp_path / "whole", steps=0, gguf=str(small))
    with monkeypatch.context() as failing:
        failing.setattr(
            "fulldepth.skip.least_squares.rehearse", lambda *_, **__: None
        )  # weights round worse after the work
        failing.setattr("fulldepth.skip.exports.formats.gguf.ROUNDING", -1.0)
        with refused(r"kept in .*healed: the same command, with another --gguf-type .*, writes .* does not heal again"):
            heal(plan, path, texts, tmp_path / "healed", steps=0, gguf=str(other))
    before = Results.load(tmp_path / "healed").table
    monkeypatch.setattr("fulldepth.skip.heal.refit", lambda *_, **__: pytest.fail("it was fitted again"))
    with refused("was healed with other settings: seed was 0, is 1; steps was 0, is 5"):
        heal(plan, path, texts, tmp_path / "healed", steps=5, seed=1, gguf=str(other))
    assert not other.exists()
    again = heal(plan, path, texts, tmp_path / "healed", steps=0, gguf=str(other))
    assert again.table.equals(before)
    assert other.read_bytes() == small.read_bytes()
    with refused("exists already"):
        heal(plan, path, texts, tmp_path / "healed", steps=0, gguf=str(other))
    with refused("was healed with other data: data was None, is 'corpus:builtin'"):
        heal(plan, path, "corpus:builtin", tmp_path / "healed", steps=0, gguf=str(tmp_path / "c.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
def test_a_file_is_proven_against_the_weights_that_it_holds(scaled, tmp_path, monkeypatch):
    """Rounding all weights to four bits is no fault of the file; another value of one of them is."""
    path, model = source(tmp_path, quantise=KINDS.Q4_1)
    scalars = planned.scalars([2], 4, low=0.9, high=1.1) if scaled else None
    generator = seeded(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.2 * torch.rand(weight.shape, generator=generator))
    expected = without(model, {"attention": [2]}, scalars)
    report = export(planned.plan(model, values=scalars), model, "gguf", tmp_path / "small.gguf")
    rounding = (by_llama_cpp(report.path) - expected).abs().max() / expected.abs().max()
    assert report.logit_error < rounding / 2
    assert "--gguf-type q8_0 rounds less" in report.notes[-1]
    encoded = writer.encoded
    monkeypatch.setattr(writer, "encoded", lambda values, *kind: encoded(1.3 * values, *kind))
    with refused(r"Q4_1 rounds the changed model\.\S+weight too much"):
        export(planned.plan(model, values=scalars), model, "gguf", tmp_path / "other.gguf")
    assert {file.name for file in tmp_path.glob("*.gguf")} == {path.name, "small.gguf"}


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_dropped(tmp_path, monkeypatch):
    path, _, plan = planned_file(tmp_path)
    monkeypatch.setattr(gguf_layers, "packed", lambda *_: [(1, 1), (2, 2), (4, 4)])
    with refused("its logits miss"):
        export(plan, path, "gguf", tmp_path / "out" / "small.gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("blocks", "granularity", "error"), [([2], "layer", 1e-6), (["attention 2"], "any", None)])
def test_without_llama_cpp_transformers_computes_what_it_can_and_the_export_says_so(
    blocks, granularity, error, tmp_path, monkeypatch
):
    path, _, plan = planned_file(tmp_path, blocks, granularity)
    monkeypatch.setattr(exporting, "find_spec", lambda _: None)
    report = export(plan, path, "gguf", tmp_path / "small.gguf")
    assert not report.verified
    assert "UNVERIFIED" in report.notes[-1]
    assert report.logit_error is None if error is None else report.logit_error < error


REFUSED = [
    ("safetensors", ["attention 2"], {}, {}, "convert_hf_to_gguf"),
    ("gemma3_text", ["attention 2"], GEMMA, {}, "gemma3"),
    ("gemma3_text", ["layer 2"], GEMMA, {}, "any 6 neighbours"),
    ("gemma3_text", ["layer 2"], GEMMA | {"entries": {WINDOWS: SIXTH}}, {}, "any 6 neighbours"),
    ("qwen3", ["attention 2"], {}, {}, "llama, phi3, qwen2 only .* a plan of whole layers"),
    ("llama", ["layer 1", "layer 2", "layer 3", "layer 4"], {}, {}, "all 4 layers"),
    ("llama", ["attention 2"], {}, {"output": "out"}, r"\.gguf"),
    ("llama", ["attention 2"], {}, {"output": "in/source.gguf"}, "exists already"),
    ("llama", ["attention 2"], {}, {"gguf_type": "q4_k"}, "q4_k"),
]


@pytest.mark.parametrize(("kind", "blocks", "fields", "options", "words"), REFUSED)
def test_what_cannot_be_is_refused(kind, blocks, fields, options, words, tmp_path):
    path, model, plan = planned_file(tmp_path, blocks, kind="llama" if kind == "safetensors" else kind, **fields)
    if kind == "safetensors":
        path = tmp_path / "in" / "folder"
        model.save_pretrained(path)
    options = {"output": "new/out.gguf"} | options
    target = tmp_path / options.pop("output")
    with refused(words):
        export(plan, path, "gguf", target, **options)
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


UNKNOWN = [
    ({"extra": {"blk.1.attn_q_norm.weight": np.ones(8, np.float32)}}, "attn_q_norm"),
    ({"extra": {"output.bias": np.ones(300, np.float32)}}, r"output\.bias"),
    ({"entries": {"rope.dimension_count": 4}}, "rotary positions in 4 of 8"),
    ({"entries": {"nextn_predict_layers": 1}}, "multi-token prediction"),
]


@pytest.mark.parametrize(("content", "words"), UNKNOWN)
def test_what_deci_does_not_compute_is_refused_by_name(content, words, tmp_path):
    path = gguf_files.write(tmp_path / "source.gguf", tiny(), **content)
    with refused(words):
        write_gguf(path, tmp_path / "small.gguf", [2], [])


def test_layers_that_the_file_counts_are_refused(tmp_path):
    path = gguf_files.write(tmp_path / "source.gguf", tiny(), entries={"leading_dense_block_count": 1})
    with refused("counts the layers .*leading_dense_block_count"):
        write_gguf(path, tmp_path / "small.gguf", [2], [2])


OBSTACLES = [
    ("llama", {}, "any", None),
    ("llama", {}, "layer", None),
    ("qwen2", {}, "attention", None),
    ("qwen3", {}, "mlp", "Not every plan has a GGUF file.*a plan of whole layers"),
    ("gemma3_text", GEMMA, "any", "Not every plan has a GGUF file.*a plan of whole layers"),
    ("gemma3_text", GEMMA, "layer", "count with the original's period.*any 6 neighbours.*GGUF file.*any 6 neighbours"),
]


@pytest.mark.parametrize(("kind", "fields", "granularity", "words"), OBSTACLES)
def test_a_search_says_first_which_plans_have_no_file(kind, fields, granularity, words, tmp_path):
    _, model = source(tmp_path, kind, **fields)
    said = export_obstacle(model, granularity)
    assert said is None if words is None else re.search(words, said)


def test_a_full_disk_leaves_nothing_and_is_said(tmp_path):
    path, _, plan = planned_file(tmp_path)
    with planned.full_disk():
        export(plan, path, "gguf", tmp_path / "new" / "small.gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["in"]
