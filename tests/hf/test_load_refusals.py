"""Checkpoints, tokenizers and image processors from anyone: refused by the name of what is wrong, or loaded right."""

import io
import json
import os
import re
import shutil
import struct
import sys

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import tiny_models
from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.hf import find_tokenizer, load_checkpoint, load_processor, load_tokenizer, open_model
from fulldepth.hf.file_checks import locate
from json_files import read_json, write_json
from refusals import refused, refuses
from skip import word_tokenizer

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def processor(folder):
    return load_processor(folder, tiny_models.build("vit").config)


def entries(name, **changes):
    """Change entries of a JSON file; None removes one."""

    def change(folder):
        document = read_json(folder / name) | changes
        sys.set_int_max_str_digits(5000)
        text = json.dumps({key: value for key, value in document.items() if value is not None})
        sys.set_int_max_str_digits(4300)
        (folder / name).write_text(text)

    return change


def text(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def gone(name):
    return lambda folder: (folder / name).unlink()


def renamed(name, other):
    return lambda folder: (folder / name).rename(folder / other)


def tensors(change):
    def run(folder):
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return run


def raw(change):
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def declared(name, kind):
    """Change the type of one tensor in the header, and nothing else."""

    def run(folder):
        data = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        header[name]["dtype"] = kind
        changed = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + size :])

    return run


def replaced(name, make):
    """Something else in the place of a file."""

    def run(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return run


def pickled(folder):
    (folder / WEIGHTS).unlink()
    torch.save({}, folder / "pytorch_model.bin")


FOREIGN = {"architectures": ["MyLlama"], "auto_map": {"AutoModelForCausalLM": "mine.MyLlama"}}
NORM = "model.norm.weight"
BROKEN = [
    (gone(CONFIG), CONFIG),
    (gone(WEIGHTS), "has no weights at all; expected *.safetensors"),
    (renamed(WEIGHTS, "other.safetensors"), f"has no file named {WEIGHTS} or {INDEX}"),
    (pickled, "pytorch_model.bin"),
    *((raw(change), WEIGHTS) for change in (lambda data: data[:-1], lambda data: b"\xff" * 8 + data[8:])),
    (tensors(lambda weights: weights.pop(NORM)), NORM),
    (tensors(lambda weights: weights.update({NORM: torch.ones(7)})), NORM),
    (tensors(lambda weights: weights.update({NORM: torch.ones(32, dtype=torch.int8)})), NORM),
    (declared("model.layers.1.mlp.up_proj.weight", "U32"), "model.layers.1.mlp.up_proj.weight"),
    (entries(CONFIG, num_hidden_layers=5), "model.layers.3."),
    (entries(CONFIG, hidden_size="wide"), "hidden_size"),
    *((text(CONFIG, content), CONFIG) for content in (b"[1]", b"[" * 100_000, b'{"a": 1, "a": 2}')),
    (text("generation_config.json", b'{"a": 1, "a": 2}'), "generation_config.json"),
    (text("generation_config.json", b'{"bos_token_id": "fifo"}'), "bos_token_id"),
    *(  # transformers loads the model without the entries of such a file
        (text("generation_config.json", '{"eos_token_id": [2, 3]}'.encode(coding)), "generation_config.json")
        for coding in ("utf-8-sig", "utf-16", "utf-32-le")
    ),
    *((entries(CONFIG, architectures=names), "architectures") for names in (None, [3])),
    *((entries(CONFIG, architectures=[name]), name) for name in ("LlamaForTeleportation", "logging")),
    (entries(CONFIG, model_type="teleporter"), "teleporter"),
    (entries(CONFIG, hidden_act="glow"), "names what transformers does not know: 'glow'"),
    (entries(CONFIG, model_type=None), "model_type"),
    (entries(CONFIG, **FOREIGN), "--trust-remote-code"),
    (entries(CONFIG, attn_implementation="someone/kernel"), "someone/kernel"),
    (
        entries(CONFIG, transformers_weights="../model.safetensors"),
        "has the entry 'transformers_weights', which fulldepth does not",
    ),
    (entries(CONFIG, max_position_embeddings=None, vocab_size=10**9), CONFIG),
    (entries(CONFIG, num_hidden_layers=10**5), CONFIG),
    *((entries(CONFIG, **{key: 10**9}), CONFIG) for key in ("num_labels", "intermediate_size")),
    (entries(CONFIG, hidden_size=10**4000), CONFIG),
    *((replaced(name, os.mkfifo), name) for name in (CONFIG, WEIGHTS)),
    (replaced("generation_config.json", os.mkdir), "generation_config.json"),
    (replaced(WEIGHTS, lambda path: path.symlink_to("/dev/zero")), WEIGHTS),
    (replaced(CONFIG, lambda path: path.symlink_to(path.parent / "nowhere")), CONFIG),
]


@pytest.mark.parametrize(("spoil", "name"), BROKEN, ids=[f"{at}-{name}" for at, (_, name) in enumerate(BROKEN)])
def test_a_broken_checkpoint_is_refused_by_the_name_of_what_is_wrong(broken, spoil, name):
    spoil(broken)
    refuses(load_checkpoint, broken, name)


@pytest.mark.parametrize("name", ["{tmp}/nowhere", "~/nowhere", "", "x" * 5000, "a\0b", "no/net"])
def test_names_of_nothing(name, tmp_path):
    for load in (load_checkpoint, load_tokenizer, processor):
        refuses(load, name.format(tmp=tmp_path))
    refuses(load_checkpoint, tmp_path, str(tmp_path), CONFIG)


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float23"}, {"dtype": torch.int8}, {"device": "tpu9"}, {"device": "meta"}, {"device_map": "sideways"}],
)
def test_settings_that_mean_nothing(saved, options):
    refuses(load_checkpoint, saved, str(next(iter(options.values()))).removeprefix("torch."), **options)


def test_mps_is_refused_because_it_has_no_float64(saved, monkeypatch):
    """By name, and for a model that is there already."""
    refuses(load_checkpoint, saved, "float64", device="mps")
    monkeypatch.setattr("fulldepth.hf.load.device_of", lambda model: torch.device("mps"))
    refuses(open_model, tiny_models.build("gpt2"), "float64")


# Indices of several files


@pytest.fixture
def sharded(tmp_path):
    folder = tmp_path / "sharded"
    tiny_models.build("llama").save_pretrained(folder, max_shard_size="20KB")
    return folder


def named(name):
    def run(folder):
        index = read_json(folder / INDEX)
        index["weight_map"][NORM] = name
        write_json(folder / INDEX, index)

    return run


def doubled(folder):
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    save_file(load_file(second) | load_file(first), second, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        *((named(name), NORM) for name in ("pickled.bin", "../outside.safetensors", "inner/model.safetensors", "", 3)),
        (named("model-9.safetensors"), f"lacks model-9.safetensors, which {INDEX} names"),
        (text(INDEX, b"{"), INDEX),
        *(
            (text(INDEX, content), f"{INDEX}: it must hold the mapping `weight_map`")
            for content in (b'{"metadata": {}}', b'{"weight_map": []}')
        ),
        (doubled, "which another file of"),
    ],
)
def test_the_index_names_plain_safetensors_files_of_the_folder_only(sharded, spoil, name):
    for place in (sharded.parent / "outside.safetensors", sharded / "inner" / WEIGHTS):
        place.parent.mkdir(exist_ok=True)
        save_file(tiny_models.build("llama").state_dict(), place, metadata={"format": "pt"})
    spoil(sharded)
    refuses(load_checkpoint, sharded, name)


def test_what_the_hubs_cache_holds_is_checked_too(sharded, tmp_path, monkeypatch):
    """It consists of links to regular files."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "cache" / "models--some--model"
    snapshot = place / "snapshots" / ("0" * 40)
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    blobs = shutil.copytree(sharded, place / "blobs")
    (blobs / "tokenizer.json").write_text("[" * 1000)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert tiny_models.same_weights(load_checkpoint("some/model").model, tiny_models.build("llama"))
    named("pickled.bin")(blobs)
    refuses(load_checkpoint, "some/model", "pickled.bin")
    refuses(load_tokenizer, "some/model", "tokenizer.json")


# What is fine, and what belongs to others


def test_an_adapter_beside_the_model_is_refused_with_and_without_peft(saved, tmp_path):
    """transformers adds it to the weights, but only where peft is installed: other numbers, and no word of it."""
    peft = pytest.importorskip("peft")
    shutil.copytree(saved, tmp_path / "model")
    base = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tuned = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "model")
    refuses(load_checkpoint, tmp_path / "model", "adapter_config.json")
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    load_checkpoint(tmp_path / "merged")


def test_an_adapter_without_a_model_is_refused_with_the_commands_that_merge_it(saved, tmp_path):
    """The commands of the message, run as they are, give the model that peft merges."""
    peft = pytest.importorskip("peft")
    shutil.copytree(saved, tmp_path / "base")
    word_tokenizer.tokenizer().save_pretrained(tmp_path / "base")
    base = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    options = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(base, options)
    tuned.save_pretrained(tmp_path / "adapter")
    with refused(f"adapter holds an adapter of {tmp_path}/base and no model") as caught:
        load_checkpoint(tmp_path / "adapter")
    commands = re.findall(r'^python -c "(.+)"$', str(caught.value), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        exec(command)
    merged = load_checkpoint(tmp_path / "adapter-merged").model
    assert tiny_models.same_weights(merged, tuned.merge_and_unload())
    assert load_tokenizer(str(tmp_path / "adapter-merged")).get_vocab() == word_tokenizer.VOCABULARY
    word_tokenizer.tokenizer().save_pretrained(tmp_path / "adapter")  # its own, which may have more tokens
    with refused(f"from transformers .*from_pretrained.'{tmp_path}/adapter'"):
        load_checkpoint(tmp_path / "adapter")
    notes = tmp_path / "adapter" / "adapter_config.json"
    write_json(notes, read_json(notes) | {"base_model_name_or_path": None})
    with refused("does not name the model that it changes"):
        load_checkpoint(tmp_path / "adapter")


def test_whole_numbers_and_large_ones_that_cost_nothing_are_fine(tmp_path):
    tiny_models.build("bert").save_pretrained(tmp_path)
    more = {"bert.embeddings.position_ids": torch.arange(64)[None], "zebra": torch.ones(3, dtype=torch.int64)}
    tensors(lambda weights: weights.update(more))(tmp_path)
    entries(CONFIG, rope_theta=10**10, note=[float("inf")])(tmp_path)
    (warning,) = load_checkpoint(tmp_path).warnings
    assert "zebra" in warning
    entries(CONFIG, max_position_embeddings=10**9)(tmp_path)
    refuses(load_checkpoint, tmp_path, CONFIG)


def test_no_code_runs_unasked_though_the_terminal_says_yes(foreign, monkeypatch):
    folder, mark = foreign
    own = {"image_processor_type": "Mine", "auto_map": {"AutoImageProcessor": "mine.MineModel"}}
    write_json(folder / "preprocessor_config.json", own)
    own = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.MineModel", None]}}
    write_json(folder / "tokenizer_config.json", own)
    for load in (load_checkpoint, load_tokenizer, processor):
        monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
        refuses(load, folder, "--trust-remote-code")
    assert not mark.exists()
    assert load_checkpoint(folder, trust_remote_code=True).model.scale.tolist() == [1.0, 2.0, 3.0]
    assert mark.exists()
    (folder / "mine.py").unlink()
    refuses(load_checkpoint, folder, "mine.py", trust_remote_code=True)


# Tokenizers and image processors


@pytest.mark.parametrize("size", [10**9, 0, {"height": 10**6, "width": 16}, {"shortest_edge": 10**5}])
def test_an_image_processor_of_absurd_size(tmp_path, size):
    tf.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    entries("preprocessor_config.json", size=size)(tmp_path)
    refuses(processor, tmp_path, "pixels")


GROWING = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aaaaaaaa"}
REPEATING = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "pair": []}


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [GROWING] * 4}]}},
        {"post_processor": {"type": "Sequence", "processors": [{**REPEATING, "special_tokens": {}}] * 30}},
    ],
)
def test_rules_of_a_tokenizer_that_would_exhaust_memory(tmp_path, part):
    train_tokenizer(builtin_texts("heldout")[:1], vocab_size=300).save_pretrained(tmp_path)
    entries("tokenizer.json", **part)(tmp_path)
    refuses(load_tokenizer, tmp_path, "tokenizer.json", "characters of one")


def test_a_folder_without_a_tokenizer_is_refused_by_what_is_missing(tmp_path):
    """transformers would ask for sentencepiece or tiktoken."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "rows.jsonl").write_text("")
    with refused("holds no tokenizer; expected tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["nope/x/", "/nope/model", "a/b/c", "../mödel #1"])
def test_a_path_that_does_not_exist_is_no_name_of_the_hub(name):
    """Whatever reads the checkpoint first: huggingface_hub would speak of the characters of a repository's name."""
    for read in (load_checkpoint, load_tokenizer, lambda where: locate(where, "config.json")):
        with refused(f"No such folder: {name}. Expected "):
            read(name)


def test_a_checkpoints_own_tokenizer_comes_before_that_of_the_folder_above(tmp_path):
    """Also if it is of the older layout, without tokenizer.json."""
    tokenizer = train_tokenizer(builtin_texts("heldout")[:1], vocab_size=300)
    tokenizer.save_pretrained(tmp_path)
    child = tmp_path / "child"
    child.mkdir()
    assert find_tokenizer(child) == str(tmp_path)
    (child / "vocab.json").write_text('{"a": 0, "b": 1, "[UNK]": 2}')
    (child / "merges.txt").write_text("#version: 0.2\n")
    write_json(child / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "unk_token": "[UNK]"})
    assert find_tokenizer(child) == str(child)


def test_a_vocabulary_may_begin_with_a_character_beyond_ascii(tmp_path):
    """As those of byte-level tokenizers do; only a byte-order mark before it is refused."""
    text = '{"\u0120a": 0, "\u0120b": 1, "[UNK]": 2}'
    (tmp_path / "vocab.json").write_text(text, encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "unk_token": "[UNK]"})
    assert load_tokenizer(tmp_path).get_vocab()["\u0120b"] == 1
    (tmp_path / "vocab.json").write_text(text, encoding="utf-8-sig")
    with refused("vocab.json: it begins with a byte-order mark"):
        load_tokenizer(tmp_path)
