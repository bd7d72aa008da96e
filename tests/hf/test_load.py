"""Checkpoints, tokenizers and image processors come back as they were saved."""

import json

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.hf import Checkpoint, load_checkpoint, load_processor, load_tokenizer, pick_device

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
    path = broken / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-3}))
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
    tensors = load_file(broken / WEIGHTS) | {"zebra.weight": torch.ones(2)}
    save_file(tensors, broken / WEIGHTS, metadata={"format": "pt"})
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


def test_code_in_a_checkpoint_runs_when_asked(foreign):
    folder, mark = foreign
    loaded = load_checkpoint(folder, trust_remote_code=True)
    assert mark.exists()
    assert loaded.model.scale.tolist() == [1.0, 2.0, 3.0]


# Tokenizers and image processors


def test_a_missing_tokenizer_is_said_so(saved):
    with pytest.raises(FulldepthError, match=f"Cannot load a tokenizer from {saved}"):
        load_tokenizer(saved)


def test_a_broken_tokenizer_is_said_so(broken):
    (broken / "tokenizer.json").write_text("{nope")
    (broken / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(FulldepthError, match=r"tokenizer|JSON"):
        load_tokenizer(broken)


def test_a_tokenizer_comes_back(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({"once": 0, "upon": 1, "?": 2}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny_models.build("llama").save_pretrained(tmp_path)
    tf.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("upon once never")["input_ids"] == [1, 0, 2]


def test_the_tokenizer_is_the_one_of_the_file_whatever_class_the_model_type_has(tmp_path):
    """transformers has a byte-level BPE of its own for qwen2; with these files it knows no word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({"once": 0, "upon": 1, "?": 2}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    tf.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?").save_pretrained(tmp_path)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("upon once never").ids
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer("upon once never")["input_ids"] == ids == [1, 0, 2]
    assert tokenizer.unk_token_id == 2


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
    with pytest.raises(FulldepthError, match=r"image processor|JSON"):
        load_processor(tmp_path, tiny_models.build("vit").config)


# Quantised


def test_an_int8_checkpoint_keeps_its_integers_and_is_measured(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    from fulldepth.execution import verify
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
