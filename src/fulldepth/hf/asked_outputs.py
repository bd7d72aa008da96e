"""Configuration entries that change what a model returns: commands set them aside, and exports restore them."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.hf.anatomy import config_parts

PLAIN = {"output_attentions": False, "output_hidden_states": False, "return_dict": True, "torchscript": False}
"""Entry -> value with which a model returns the outputs that commands read."""
HALVING = "rescale_every"
"""Entry of RWKV: layers after which its stream is halved in inference; 0 = never."""
SET_ASIDE = "fulldepth_asked_outputs"
"""Attribute of a model that holds the values that were set aside."""
Asked = dict[tuple[str, str], bool]
"""Part of the configuration (empty for the whole) and entry -> value."""


def asked_outputs(model: PreTrainedModel) -> Asked:
    """The entries of a model's configuration that differ from `PLAIN`, and those that were set aside at load."""
    return {
        (part, name): value
        for part, config in config_parts(model.config).items()
        for name, plain in PLAIN.items()
        if isinstance(value := getattr(config, name, None), bool) and value is not plain
    } | getattr(model, SET_ASIDE, {})


def set_aside(model: PreTrainedModel) -> None:
    """Give the entries of a loaded model's configuration their plain values, and remember the others on the model."""
    setattr(model, SET_ASIDE, asked_outputs(model))
    make_plain(model.config)


def make_plain(config: PreTrainedConfig) -> None:
    """Give the entries of a configuration and its parts their plain values, in place."""
    for part in config_parts(config).values():
        for name, plain in PLAIN.items():
            if isinstance(value := getattr(part, name, None), bool) and value is not plain:
                setattr(part, name, plain)


def restore_outputs(asked: Asked, folder: Path) -> list[str]:
    """Write the entries of the original into the `config.json` of an export, except for `return_dict`.

    Returns:
        One sentence if the original's `return_dict=False` was left out; else empty.
    """
    path = folder / "config.json"
    if not asked:
        return []
    values = json.loads(path.read_text(encoding="utf-8"))
    for (part, name), value in asked.items():
        inner = values if not part else values.get(part)
        if isinstance(inner, dict) and name != "return_dict":
            inner[name] = value
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if not any(name == "return_dict" for _, name in asked):
        return []
    return ["The original's return_dict=False is left out: models of transformers 5 fail with it."]


def check_outputs(model: PreTrainedModel) -> None:
    """Refuse a model in memory whose configuration would have to change: it returns tuples, or halves its stream.

    Raises:
        FulldepthError: with the entry to set.
    """
    if not all(getattr(config, "return_dict", True) for config in config_parts(model.config).values()):
        raise FulldepthError(
            "The model's configuration has return_dict=False, so the model returns tuples without names. Set "
            "model.config.return_dict = True."
        )
    if halves_stream(model):
        raise FulldepthError(
            f"This {type(model).__name__} halves its residual stream between layers ({HALVING}="
            f"{getattr(model.config, HALVING)}), and its weights in the first forward pass. Give its folder or name, "
            f"or load it with {type(model).__name__}.from_pretrained(NAME, {HALVING}=0), which gives the same logits."
        )


def halves_stream(model: PreTrainedModel) -> bool:
    """Return True for an RWKV that halves the residual stream between its layers in inference (`rescale_every`)."""
    every = getattr(model.config, HALVING, 0)
    return isinstance(every, int) and 0 < every <= model.config.num_hidden_layers


def stop_halving(model: PreTrainedModel) -> str | None:
    """Make a model that was just loaded keep the scale of its residual stream, in place.

    RWKV halves the stream, and the weights that write into it, after every `rescale_every` layers, against overflow in
    float16. The stream is then no sum of branches, and what a layer computes depends on its number. All readers of the
    stream normalise it, so that the logits are the same without.

    Returns:
        A warning, or None if the model does not halve.
    """
    if not halves_stream(model):
        return None
    every = getattr(model.config, HALVING)
    setattr(model.config, HALVING, 0)
    return (
        f"The model halves its residual stream after every {every} layers in inference ({HALVING}={every}). This is "
        f"switched off ({HALVING}=0), in exports too: the logits are the same, and the states are those of training."
    )
