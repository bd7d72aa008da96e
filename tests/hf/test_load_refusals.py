"""Every broken checkpoint is refused in one readable sentence that says what is wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.hf import load_checkpoint, load_tokenizer, open_model, pick_dtype

WEIGHTS = "model.safetensors"


def reconfigure(folder, **changes):
    """Change entries of config.json; None removes one."""
    path = folder / "config.json"
    config = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}
    path.write_text(json.dumps(config))


def reweigh(folder, change):
    """Change the tensors of the weights' file."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_code_in_a_checkpoint_does_not_run_unasked(foreign):
    folder, mark = foreign
    with pytest.raises(FulldepthError, match=r"trust.remote.code"):
        load_checkpoint(folder)
    assert not mark.exists()


def refused(folder, *words, **options):
    with pytest.raises(FulldepthError) as error:
        load_checkpoint(folder, **options)
    message = str(error.value)
    assert "\n" not in message
    assert "Traceback" not in message
    assert len(message) < 700
    for word in words:
        assert word in message, message
    return message


@pytest.mark.parametrize("name", ["{tmp}/nowhere", "./nowhere", "~/nowhere", "a/b/c"])
def test_a_missing_folder(name, tmp_path):
    where = name.format(tmp=tmp_path)
    refused(where, "No such folder", where)


@pytest.mark.parametrize("name", ["/no/such", "sentencepiece:300", "a/b/c"])
def test_what_can_be_no_name_of_a_tokenizer(name):
    with pytest.raises(
        FulldepthError, match=f"No such folder: {name}. Expected a folder with a tokenizer or a Hub name"
    ):
        load_tokenizer(name)


def test_a_hub_name_without_a_network():
    refused("nobody/nothing-at-all", "nobody/nothing-at-all", "switched off by HF_HUB_OFFLINE", "Pass the folder")


@pytest.mark.parametrize("name", ["", "x" * 300, "x" * 5000, "a\0b"])
def test_a_name_that_can_be_no_name(name):
    refused(name)


def test_a_file_for_a_folder(saved):
    refused(saved / "config.json", "is a file", "config.json")


def test_no_configuration(broken):
    (broken / "config.json").unlink()
    refused(broken, "no config.json", WEIGHTS)


def test_an_empty_folder(tmp_path):
    refused(tmp_path, "no config.json", "nothing")


def test_no_weights(broken):
    (broken / WEIGHTS).unlink()
    refused(broken, "no weights", "safetensors")


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_only(broken, pickle):
    (broken / WEIGHTS).unlink()
    torch.save(tiny_models.build("llama").state_dict(), broken / pickle)
    refused(broken, pickle, "can run code", "safetensors")


def test_a_pickle_beside_the_weights_is_not_opened(broken):
    (broken / "pytorch_model.bin").write_bytes(b"no pickle at all")
    assert load_checkpoint(broken).warnings == ()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"\xff" * 32 + data[40:],
    ],
    ids=["half", "one byte short", "in the length", "empty", "length", "header"],
)
def test_weights_cut_short_or_corrupt(broken, spoil):
    path = broken / WEIGHTS
    path.write_bytes(spoil(path.read_bytes()))
    refused(broken, str(broken), "broken or cut short")


@pytest.mark.parametrize("key", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_a_weight_that_is_missing(broken, key):
    reweigh(broken, lambda tensors: tensors.pop(key))
    refused(broken, "lacks 1 weight", key, "random")


def test_a_configuration_of_more_layers_than_the_weights(broken):
    reconfigure(broken, num_hidden_layers=5)
    refused(broken, "lacks 18 weights", "model.layers.3.")


def test_a_weight_of_another_shape_is_named(broken):
    reweigh(broken, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    refused(broken, "model.norm.weight", "7", "32")


def test_a_configuration_of_another_width(broken):
    reconfigure(broken, hidden_size=64)
    refused(broken, str(broken), ".weight", "64", "32")


def test_a_shard_that_is_missing(tmp_path):
    tiny_models.build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path, shard.name)


def test_an_index_of_shards_that_is_no_json(tmp_path):
    tiny_models.build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    refused(tmp_path, "JSON")


@pytest.mark.parametrize("text", [b"{nope", b"", b"\xff\xfe\x00"], ids=["cut", "empty", "binary"])
def test_a_configuration_that_is_no_json(broken, text):
    (broken / "config.json").write_bytes(text)
    refused(broken, str(broken), "JSON")


def test_a_configuration_that_is_no_mapping(broken):
    (broken / "config.json").write_text("[1]")
    refused(broken, str(broken))


@pytest.mark.parametrize("names", [None, []])
def test_a_configuration_that_names_no_class(broken, names):
    reconfigure(broken, architectures=names)
    if names is None:
        assert "architectures" not in json.loads((broken / "config.json").read_text())
    refused(broken, "architectures")


@pytest.mark.parametrize(
    "name",
    ["LlamaForTeleportation", "LlamaConfig", "logging", "AutoTokenizer", "PreTrainedModel"],
)
def test_a_configuration_that_names_no_model_class(broken, name):
    reconfigure(broken, architectures=[name])
    refused(broken, "class", name)


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [3]])
def test_a_configuration_whose_class_is_no_list_of_names(broken, names):
    reconfigure(broken, architectures=names)
    refused(broken, "architectures")


def test_an_unknown_model_type(broken):
    reconfigure(broken, model_type="teleporter")
    refused(broken, "teleporter")


def test_a_configuration_without_a_model_type(broken):
    reconfigure(broken, model_type=None)
    refused(broken, "model_type")


def test_a_configuration_value_of_the_wrong_kind(broken):
    reconfigure(broken, hidden_size="wide")
    refused(broken, "hidden_size", "wide")


def test_foreign_code_of_a_known_type_needs_the_flag(broken):
    reconfigure(broken, architectures=["MyLlama"], auto_map={"AutoModelForCausalLM": "mine.MyLlama"})
    refused(broken, "MyLlama", "--trust-remote-code")


def test_foreign_code_that_is_not_there(broken):
    reconfigure(broken, architectures=["MyLlama"], auto_map={"AutoModelForCausalLM": "mine.MyLlama"})
    refused(broken, "mine.py", trust_remote_code=True)


def test_an_unknown_dtype(saved):
    refused(saved, "Unknown dtype 'float23'", "Did you mean 'float32'", "bfloat16", dtype="float23")
    with pytest.raises(FulldepthError, match="int8"):
        pick_dtype("int8")
    refused(saved, "int8", dtype=torch.int8)


@pytest.mark.parametrize("device", ["tpu9", "", "cuda:99"])
def test_a_device_that_is_not_there(saved, device):
    refused(saved, f"Device {device!r}", device=device)


def test_mps_is_refused_because_it_has_no_float64(saved, monkeypatch):
    """By name, and for a model that is there already; the message says what works."""
    refused(saved, "float64", "on the CPU", device="mps")
    monkeypatch.setattr("fulldepth.hf.opening.device_of", lambda model: torch.device("mps"))
    with pytest.raises(FulldepthError, match=r"model\.to\('cpu'\)"):
        open_model(tiny_models.build("gpt2"))


def test_a_device_without_memory_is_refused(saved):
    refused(saved, "meta", device="meta")


def test_a_device_map_that_means_nothing(saved):
    pytest.importorskip("accelerate")
    refused(saved, "sideways", device_map="sideways")
