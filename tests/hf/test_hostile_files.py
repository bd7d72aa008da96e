"""Checkpoints, tokenizers and image processors from anyone: refused in one message, or loaded right."""

import contextlib
import io
import json
import os
import random
import shutil
import struct
import sys

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import tiny_models
from fulldepth.data import builtin_texts, open_source, prepare, train_tokenizer
from fulldepth.errors import FulldepthError
from fulldepth.hf import load_checkpoint, load_processor, load_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def refused(load, folder, *words):
    with pytest.raises(FulldepthError) as caught:
        load(folder)
    message = str(caught.value)
    assert len(message) < 1000
    assert "\n" not in message
    for word in (str(folder), *words):
        assert word in message, message


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.fixture
def sharded(tmp_path):
    folder = tmp_path / "sharded"
    tiny_models.build("llama").save_pretrained(folder, max_shard_size="20KB")
    return folder


# Names in the index, files that are none


@pytest.mark.parametrize(
    "name",
    [
        "pickled.bin",
        "../outside.safetensors",
        "/dev/stdin",
        "inner/model.safetensors",
        "..",
        ".safetensors",
        "a\\b.safetensors",
        "",
        3,
        None,
        ["model.safetensors"],
    ],
)
def test_the_index_names_plain_safetensors_files_of_the_folder_only(sharded, name):
    tensors = tiny_models.build("llama").state_dict()
    torch.save(tensors, sharded / "pickled.bin")
    for place in (sharded.parent / "outside.safetensors", sharded / "inner" / WEIGHTS):
        place.parent.mkdir(exist_ok=True)
        save_file(tensors, place, metadata={"format": "pt"})
    edit(sharded / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    refused(load_checkpoint, sharded, "model.norm.weight", "plain name")


@pytest.mark.parametrize(
    "document",
    [
        [],
        3,
        {"weight_map": {}},
        {"metadata": {}},
        {"metadata": {}, "weight_map": []},
        {"metadata": [], "weight_map": {"a": 1}},
    ],
)
def test_an_index_of_another_shape(sharded, document):
    (sharded / INDEX).write_text(json.dumps(document))
    refused(load_checkpoint, sharded, INDEX)


def test_two_files_with_the_same_tensor(sharded):
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file(load_file(second) | {name: torch.zeros_like(tensors[name])}, second, metadata={"format": "pt"})
    refused(load_checkpoint, sharded, name, second.name)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "generation_config.json"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "dangling"])
def test_what_is_no_regular_file_is_not_opened(broken, name, kind):
    path = broken / name
    path.unlink(missing_ok=True)
    make = {"fifo": os.mkfifo, "folder": os.mkdir}
    link = {"device": lambda p: p.symlink_to("/dev/zero"), "dangling": lambda p: p.symlink_to(broken / "nowhere")}
    (make | link)[kind](path)
    refused(load_checkpoint, broken, name)


def test_an_adapter_beside_the_model_is_refused_with_and_without_peft(saved, tmp_path):
    """transformers adds it to the weights, but only where peft is installed: other numbers, and no word of it."""
    peft = pytest.importorskip("peft")
    shutil.copytree(saved, tmp_path / "model")
    base = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tuned = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "model")
    refused(load_checkpoint, tmp_path / "model", "adapter_config.json", "merge_and_unload")
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    load_checkpoint(tmp_path / "merged")


GROWING = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aaaaaaaa"}
TWICE = [{"Sequence": {"id": "A", "type_id": 0}}] * 2
REPEATING = {"type": "TemplateProcessing", "single": TWICE, "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("part", "count"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [GROWING] * 8}}, "16777216"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [GROWING] * 4}]}}, ""),
        ({"decoder": {"type": "Sequence", "decoders": [GROWING] * 8}}, "16777216"),
        (
            {
                "post_processor": {
                    "type": "Sequence",
                    "processors": [REPEATING] * 30,
                }
            },
            str(2**30),
        ),
    ],
)
def test_rules_of_a_tokenizer_that_would_exhaust_memory(saved, tmp_path, part, count):
    train_tokenizer(builtin_texts("heldout")[:1], vocab_size=300).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | part))
    refused(load_tokenizer, tmp_path, "tokenizer.json", "characters of one", count)


def test_links_to_regular_files_are_followed_as_in_the_hubs_cache(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).symlink_to(path)
    state = load_checkpoint(tmp_path).model.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in load_checkpoint(saved).model.state_dict().items())


# Numbers


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 10**12),
        ("vocab_size", 10**9),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 10**5),
        ("intermediate_size", 10**9),
        ("num_labels", 10**9),
        ("hidden_size", 10**4000),
    ],
)
def test_sizes_that_would_exhaust_the_memory(broken, key, value):
    sys.set_int_max_str_digits(5000)
    edit(broken / "config.json", lambda config: config.update({key: value}))
    sys.set_int_max_str_digits(4300)
    refused(load_checkpoint, broken, "config.json")


def test_position_tables_that_would_exhaust_the_memory(tmp_path):
    tiny_models.build("bert").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", lambda config: config.update(max_position_embeddings=10**9))
    refused(load_checkpoint, tmp_path, "do not belong together")


def test_large_numbers_that_cost_nothing_are_fine(broken):
    edit(broken / "config.json", lambda c: c.update(rope_parameters={"rope_type": "default", "rope_theta": 10**10}))
    edit(broken / "config.json", lambda c: c.update(max_position_embeddings=10_485_760, note=[float("inf")]))
    assert load_checkpoint(broken).model.config.rope_parameters["rope_theta"] == 10**10


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 70 + "1" + "}" * 70, '{"a": 1, "a": 2}', '{"a": "\\ud800'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_no_one_can_read(broken, name, text):
    (broken / name).write_text(text)
    refused(load_checkpoint, broken, name)


# Types


def redeclare(path, name, kind):
    """Change the type of one tensor in the header, and nothing else."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header[name]["dtype"] = kind
    if kind in ("U8", "BOOL"):
        header[name]["shape"] = [*header[name]["shape"][:-1], header[name]["shape"][-1] * 4]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("kind", ["I32", "U32"])
def test_a_float_weight_declared_as_whole_numbers(broken, name, kind):
    redeclare(broken / WEIGHTS, name, kind)
    refused(load_checkpoint, broken, name, kind)


def test_weights_saved_as_whole_numbers(broken):
    tensors = load_file(broken / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].round().to(torch.int8)
    save_file(tensors, broken / WEIGHTS, metadata={"format": "pt"})
    refused(load_checkpoint, broken, "model.norm.weight", "I8")


def test_whole_numbers_that_no_weight_is_made_of_are_fine(tmp_path):
    tiny_models.build("bert").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
    tensors["zebra"] = torch.ones(3, dtype=torch.int64)
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    (warning,) = load_checkpoint(tmp_path).warnings
    assert "zebra" in warning


# Code


def test_no_code_of_a_processor_or_tokenizer_runs_though_the_terminal_says_yes(foreign, monkeypatch):
    folder, mark = foreign
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Mine", "auto_map": {"AutoImageProcessor": "mine.MineModel"}})
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.MineModel", None]}})
    )
    for load in (load_checkpoint, load_tokenizer, lambda f: load_processor(f, None)):
        monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
        refused(load, folder, "--trust-remote-code")
    assert not mark.exists()


def test_an_attention_kernel_of_others_is_not_fetched(broken):
    edit(broken / "config.json", lambda config: config.update(attn_implementation="someone/kernel"))
    refused(load_checkpoint, broken, "someone/kernel")


@pytest.mark.parametrize("name", ["../model.safetensors", "adapter_model.bin", "model.safetensors"])
def test_a_configuration_that_names_files_of_weights(broken, name):
    edit(broken / "config.json", lambda config: config.update(transformers_weights=name))
    refused(load_checkpoint, broken, "transformers_weights")


# Image processors


@pytest.mark.parametrize("size", [10**9, 0, {"height": 10**6, "width": 16}, {"shortest_edge": 10**5}])
def test_an_image_processor_of_absurd_size(tmp_path, size):
    tf.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    edit(tmp_path / "preprocessor_config.json", lambda document: document.update(size=size))
    refused(lambda folder: load_processor(folder, None), tmp_path, "pixels")


# Everything at once, seeded


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """A language model in shards and a vision model, each with all that belongs to it."""
    text, vision = (tmp_path_factory.mktemp("good") / name for name in ("text", "vision"))
    tiny_models.build("llama").save_pretrained(text, max_shard_size="20KB")
    train_tokenizer(builtin_texts("train")[:1], vocab_size=300).save_pretrained(text)
    tiny_models.build("vit").save_pretrained(vision)
    tf.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(vision)
    return {"text": text, "vision": vision}


VALUES = [
    None,
    True,
    0,
    -1,
    10**12,
    2**63,
    1.5,
    float("nan"),
    "",
    "../x",
    "/dev/stdin",
    "a" * 5000,
    [],
    [1],
    {},
    {"a": 1},
]


def places(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:5]) if isinstance(value, list) else ()
    for key, item in inner:
        if path != ("model", "vocab") or key in ("a", "b"):
            yield from places(item, (*path, key))


def mutate(raw, rng):
    """The bytes of a file, changed: a value of JSON replaced, removed or nested; bytes flipped or cut off."""
    try:
        document = json.loads(raw)
    except ValueError:
        document = None
    if document is not None and rng.random() < 0.8:
        *above, last = rng.choice([path for path in places(document) if path])
        holder = document
        for key in above:
            holder = holder[key]
        if rng.random() < 0.3:
            del holder[last]
        elif rng.random() < 0.1:
            holder[last] = json.loads("[" * 100 + "]" * 100)
        else:
            holder[last] = rng.choice(VALUES)
        return json.dumps(document).encode()
    data = bytearray(raw)
    if rng.random() < 0.4:
        return bytes(data[: rng.randrange(len(data))])
    for _ in range(rng.choice([1, 3, 20])):
        data[rng.randrange(min(len(data), rng.choice([16, len(data)])))] = rng.randrange(256)
    return bytes(data)


def use_tokenizer(folder):
    tokenizer = load_tokenizer(folder)
    source = open_source(["once upon a time there was a tokenizer " * 5])
    prepare(source, task="causal-lm", tokenizer=tokenizer, sequence_length=8, max_sequences=2, words=["time"])


def use_processor(folder):
    from PIL import Image

    source = open_source([{"image": Image.new("RGB", (20, 16))}])
    processor = load_processor(folder, tiny_models.build("vit").config)
    next(prepare(source, task="representation", processor=processor).batches(1))


USES = {
    "config.json": ("text", load_checkpoint),
    INDEX: ("text", load_checkpoint),
    "generation_config.json": ("text", load_checkpoint),
    WEIGHTS: ("vision", load_checkpoint),
    "tokenizer.json": ("text", use_tokenizer),
    "tokenizer_config.json": ("text", use_tokenizer),
    "preprocessor_config.json": ("vision", use_processor),
}


@pytest.mark.parametrize("name", USES)
def test_a_file_changed_at_random_is_refused_or_loads(good, tmp_path, name):
    kind, use = USES[name]
    messages = []
    for seed in range(25):
        rng = random.Random(f"{name} {seed}")
        folder = shutil.copytree(good[kind], tmp_path / str(seed))
        (folder / name).write_bytes(mutate((folder / name).read_bytes(), rng))
        with contextlib.suppress(FulldepthError):
            try:
                use(folder)
            except FulldepthError as error:
                messages.append(str(error))
                raise
    assert messages
    assert max(map(len, messages)) < 1000


# By a name of the Hub, from its cache


def test_what_the_hubs_cache_holds_is_checked_too(sharded, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "cache" / "models--some--model"
    snapshot = place / "snapshots" / ("0" * 40)
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    blobs = shutil.copytree(sharded, place / "blobs")
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    state = tiny_models.build("llama").state_dict()
    loaded = load_checkpoint("some/model").model.state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())
    torch.save(state, blobs / "pickled.bin")
    (snapshot / "pickled.bin").symlink_to(blobs / "pickled.bin")
    edit(blobs / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": "pickled.bin"}))
    with pytest.raises(FulldepthError, match=r"pickled\.bin.*plain name"):
        load_checkpoint("some/model")
    (blobs / "tokenizer.json").write_text("[" * 1000)
    (snapshot / "tokenizer.json").symlink_to(blobs / "tokenizer.json")
    with pytest.raises(FulldepthError, match=r"tokenizer\.json"):
        load_tokenizer("some/model")


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 300, "x" * 5000, "a/b/c/d", "../nowhere"])
def test_names_that_no_tokenizer_has(name):
    for load in (load_tokenizer, lambda n: load_processor(n, None)):
        with pytest.raises(FulldepthError) as caught:
            load(name)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["spiece.model", "vocab.txt", "tokenizer.json"])
def test_a_pipe_among_a_tokenizers_files(good, tmp_path, name):
    folder = shutil.copytree(good["text"], tmp_path / "pipe")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(load_tokenizer, folder, name)
