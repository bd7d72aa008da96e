"""Checkpoints come back as they were saved, and every broken one is refused in one readable sentence."""

import json
import shutil
import sys

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.hf import Checkpoint, load_checkpoint, load_processor, load_tokenizer, pick_device, pick_dtype

WEIGHTS = "model.safetensors"
FAMILIES = [
    "llama",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "bert",
    "bert-classifier",
    "roberta",
    "vit",
    "clip",
    "detr",
    "granite",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "llama"
    tiny_models.build("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of a good checkpoint, to be broken."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


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


# What works


@pytest.mark.parametrize("name", FAMILIES)
def test_a_round_trip_keeps_class_weights_and_outputs(name, tmp_path):
    model = tiny_models.build(name)
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path, device="cpu")
    assert type(loaded.model) is type(model)
    assert loaded.name == str(tmp_path)
    assert loaded.warnings == ()
    assert not loaded.model.training
    state = loaded.model.state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(state[key], tensor), key
    batch = tiny_models.inputs(model) | (tiny_models.inputs(model, tower="vision") if name == "clip" else {})
    with torch.no_grad():
        one, two = model(**batch), loaded.model(**batch)
    torch.testing.assert_close(one[next(iter(one))], two[next(iter(two))])


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "vit", "clip"])
def test_the_config_hash_belongs_to_the_configuration(name, tmp_path):
    model = tiny_models.build(name)
    for folder in ("one", "two"):
        model.save_pretrained(tmp_path / folder)
    hashes = {load_checkpoint(tmp_path / folder).config_hash for folder in ("one", "two", "one")}
    hashes |= {load_checkpoint(tmp_path / "one", dtype="bfloat16").config_hash}
    hashes |= {Checkpoint(model, "in memory").config_hash, Checkpoint(tiny_models.build(name, seed=4), "").config_hash}
    assert len(hashes) == 1
    (digest,) = hashes
    assert digest.startswith("sha256:")
    assert len(digest) == 7 + 64


def test_another_configuration_has_another_hash(saved, broken):
    reconfigure(broken, rms_norm_eps=1e-3)
    assert load_checkpoint(broken).config_hash != load_checkpoint(saved).config_hash
    assert Checkpoint(tiny_models.build("gpt2"), "").config_hash != load_checkpoint(saved).config_hash


def test_running_the_model_does_not_change_its_hash(saved):
    loaded = load_checkpoint(saved)
    before = loaded.config_hash
    loaded.model(**tiny_models.inputs(loaded.model), output_hidden_states=True)
    assert loaded.config_hash == before


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("auto", None),
        (None, None),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("float64", torch.float64),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision_is_the_checkpoints_own_unless_asked(stored, asked, given, tmp_path):
    model = tiny_models.build("gpt2", dtype=stored)
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path, dtype=asked).model
    assert {p.dtype for p in loaded.parameters()} == {given or stored}
    expected = model.transformer.ln_f.weight.to(given or stored)
    assert torch.equal(loaded.transformer.ln_f.weight, expected)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_the_device_is_the_one_asked_for(saved, device):
    assert load_checkpoint(saved, device=device).model.device.type == "cpu"


def test_without_a_name_the_first_accelerator_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(None) == torch.device("cpu")


def test_a_device_map_places_the_model(saved):
    pytest.importorskip("accelerate")
    loaded = load_checkpoint(saved, device_map={"": "cpu"}).model
    assert loaded.device.type == "cpu"


def test_shards_are_read_together(tmp_path):
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded = load_checkpoint(tmp_path).model.state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items())


def test_weights_that_nothing_uses_are_told_of(broken):
    reweigh(broken, lambda tensors: tensors.update({"zebra.weight": torch.ones(2)}))
    (warning,) = load_checkpoint(broken).warnings
    assert "1 weight" in warning
    assert "zebra.weight" in warning


def test_loading_prints_nothing_and_leaves_the_librarys_verbosity(saved, capfd):
    level, bars = tf.logging.get_verbosity(), tf.logging.is_progress_bar_enabled()
    load_checkpoint(saved)
    assert (tf.logging.get_verbosity(), tf.logging.is_progress_bar_enabled()) == (level, bars)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_verbosity_is_restored_after_a_failure(broken):
    level, bars = tf.logging.get_verbosity(), tf.logging.is_progress_bar_enabled()
    (broken / WEIGHTS).write_bytes(b"")
    with pytest.raises(FulldepthError):
        load_checkpoint(broken)
    assert (tf.logging.get_verbosity(), tf.logging.is_progress_bar_enabled()) == (level, bars)


CODE = """
import torch, transformers
class MineConfig(transformers.PretrainedConfig):
    model_type = "mine"
class MineModel(transformers.PreTrainedModel):
    config_class = MineConfig
    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.post_init()
    def forward(self, input_ids=None):
        return self.scale
open({marker!r}, "a").close()
"""


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A checkpoint that carries its own code, which leaves a mark when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder, mark = tmp_path / "foreign", tmp_path / "it-ran"
    folder.mkdir()
    (folder / "mine.py").write_text(CODE.format(marker=str(mark)))
    auto = {"AutoConfig": "mine.MineConfig", "AutoModel": "mine.MineModel"}
    config = {"model_type": "mine", "architectures": ["MineModel"], "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"scale": torch.tensor([1.0, 2.0, 3.0])}, folder / WEIGHTS, metadata={"format": "pt"})
    return folder, mark


def test_code_in_a_checkpoint_does_not_run_unasked(foreign):
    folder, mark = foreign
    with pytest.raises(FulldepthError, match="trust.remote.code"):
        load_checkpoint(folder)
    assert not mark.exists()


def test_code_in_a_checkpoint_runs_when_asked(foreign):
    folder, mark = foreign
    loaded = load_checkpoint(folder, trust_remote_code=True)
    assert mark.exists()
    assert loaded.model.scale.tolist() == [1.0, 2.0, 3.0]


# What does not


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


def test_a_hub_name_without_a_network():
    refused("nobody/nothing-at-all", "nobody/nothing-at-all", "connect")


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b"])
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


@pytest.mark.parametrize("device", ["tpu9", "", "cuda:99", "mps"])
def test_a_device_that_is_not_there(saved, device):
    refused(saved, f"Device {device!r}", device=device)


def test_a_device_without_memory_is_refused(saved):
    refused(saved, "meta", device="meta")


def test_a_device_map_that_means_nothing(saved):
    pytest.importorskip("accelerate")
    refused(saved, "sideways", device_map="sideways")


# Tokenizers and image processors


def test_a_missing_tokenizer_is_said_so(saved):
    with pytest.raises(FulldepthError, match=f"Cannot load a tokenizer from {saved}"):
        load_tokenizer(saved)


def test_a_broken_tokenizer_is_said_so(broken):
    (broken / "tokenizer.json").write_text("{nope")
    (broken / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(FulldepthError, match="tokenizer|JSON"):
        load_tokenizer(broken)


def test_a_tokenizer_comes_back(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({"once": 0, "upon": 1, "?": 2}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny_models.build("llama").save_pretrained(tmp_path)
    tf.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("upon once never")["input_ids"] == [1, 0, 2]


def picture(size):
    from PIL import Image

    return Image.new("RGB", (size, size), (255, 0, 127))


def test_a_saved_image_processor_is_used(tmp_path):
    saved = tf.ViTImageProcessorPil(size={"height": 8, "width": 8}, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    saved.save_pretrained(tmp_path)
    pixels = load_processor(tmp_path, tiny_models.build("vit").config)(picture(16), return_tensors="pt").pixel_values
    assert pixels.shape[-2:] == (8, 8)
    torch.testing.assert_close(pixels[0, :, 0, 0], torch.tensor([1.0, 0.0, 127 / 255]))


def test_without_a_saved_one_pictures_get_the_models_size_and_the_range_of_one(tmp_path):
    config = tiny_models.build("vit").config
    pixels = load_processor(tmp_path, config)(picture(40), return_tensors="pt").pixel_values
    assert pixels.shape == (1, 3, config.image_size, config.image_size)
    torch.testing.assert_close(pixels[0, :, 5, 5], torch.tensor([1.0, -1.0, 2 * 127 / 255 - 1]))


def test_a_broken_image_processor_is_said_so(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text("{nope")
    with pytest.raises(FulldepthError, match="image processor|JSON"):
        load_processor(tmp_path, tiny_models.build("vit").config)


# Quantised


def test_an_int8_checkpoint_keeps_its_integers_and_is_measured(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    from fulldepth.capture import verify
    from fulldepth.hf import anatomy_candidates

    tiny_models.build("llama").save_pretrained(tmp_path / "plain")
    settings = tf.TorchAoConfig(torchao.Int8WeightOnlyConfig())
    plain = load_checkpoint(tmp_path / "plain").model
    small = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=settings)
    small.save_pretrained(tmp_path / "int8")
    loaded = load_checkpoint(tmp_path / "int8")
    assert loaded.model.is_quantized
    batch = tiny_models.inputs(plain)
    with torch.no_grad():
        expected, got, exact = small(**batch).logits, loaded.model(**batch).logits, plain(**batch).logits
    assert torch.equal(got, expected)
    assert not torch.equal(got, exact)
    assert (got - exact).abs().max() < 0.2 * exact.abs().max()
    found = verify(anatomy_candidates(loaded.model), batch)
    assert found.branches
    assert found.classifier is not None
