"""Finds the anatomy of a family that is not in the table, from the names and the order of its modules.

The finder only proposes; the numerical checks at load decide (branches must add up, the lens must give the logits).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError
from fulldepth.hf.families import BERT, LANGUAGE_HEADS, Family, Head

ATTENTION = re.compile(r"attn|attention|mixer", re.I)
MLP = re.compile(r"mlp|feed_?forward|ffn|^ff$|moe|dense_h_to_4h", re.I)
NORM = re.compile(r"norm|ln_?\d*|layernorm", re.I)
VALUE = re.compile(r"(^|\.)(v_proj|value|v|v_lin|wv)$")


def find_families(model: PreTrainedModel) -> list[Family]:
    """Proposals for a model's anatomy, likeliest first.

    The blocks are the longest `ModuleList` of one class; attention and MLP are its children of such a name; norms
    whose names speak of what comes *after* a branch are tried as parts of the branch.

    Raises:
        FulldepthError: if no list of blocks exists, or the model is an encoder-decoder; says what was found.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise FulldepthError(
            f"{type(model).__name__} is an encoder-decoder; only DETR's decoder is known among these. "
            "Measure its encoder or decoder as a model of its own, or describe the anatomy in the settings."
        )
    prefix = getattr(model, "base_model_prefix", "")
    body = getattr(model, prefix, model) if prefix else model
    lists = [
        (name, module)
        for name, module in body.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(m) for m in module}) == 1
    ]
    if not lists:
        children = ", ".join(f"{n} ({type(m).__name__})" for n, m in body.named_children()) or "no modules"
        raise FulldepthError(
            f"No stack of blocks found in {type(model).__name__}: it holds no ModuleList of one class, only "
            f"{children}. Name it in the settings: anatomy.blocks=PATH."
        )
    path, blocks = max(lists, key=lambda item: len(item[1]))
    proposals = list(_proposals(model, body, path, blocks[0]))
    if not type(model).__name__.endswith(tuple(LANGUAGE_HEADS)):
        # A head of unknown form costs the lens measures, not the others; a decoder's has to be found.
        proposals += [replace(family, heads={}) for family in proposals]
    return proposals


def _proposals(model: PreTrainedModel, body: nn.Module, path: str, block: nn.Module) -> Iterator[Family]:
    """Every design that the names in one block allow."""
    children = [name for name, _ in block.named_children()]
    norms = [name for name in children if NORM.search(name) and not isinstance(block.get_submodule(name), nn.Dropout)]
    branches = [name for name in children if name not in norms]
    attention = next((name for name in branches if ATTENTION.search(name)), None)
    mlp = next((name for name in branches if MLP.search(name)), None)
    mlp_branch = mlp
    if mlp is None and "fc1" in children and "fc2" in children:  # OPT keeps its MLP in the block itself
        mlp, mlp_branch = "fc1", "fc2"
    value = None
    if attention:
        names = [name for name, _ in block.get_submodule(attention).named_modules() if VALUE.search(name)]
        value = f"{attention}.{names[0]}" if len(names) == 1 else None
    found = Family(
        f"found ({model.config.model_type})",
        blocks=path,
        attention=attention,
        mlp=mlp,
        mlp_branch=mlp_branch,
        value=value,
        final_norm=_final_norm(body, path),
        branch_scale="residual_multiplier" if hasattr(model.config, "residual_multiplier") else None,
        modality="images" if model.main_input_name == "pixel_values" else "text",
        heads=_heads(model),
    )
    if {"attention", "intermediate", "output"} <= set(children):
        yield replace(BERT, name=found.name, blocks=path, heads=found.heads)
    before_mlp = _between(norms, attention, mlp)
    posts = [name for name in norms if "post" in name]
    after_attention = next((n for n in posts if ATTENTION.search(n)), None)
    after_mlp = next((n for n in posts if MLP.search(n)), None)
    if after_attention and after_mlp:  # sandwich, or norms on the branches alone
        inner = next((n for n in norms if "pre" in n and MLP.search(n)), None)
        yield replace(found, attention_branch=after_attention, mlp_branch=after_mlp, mlp_norm=inner)
    yield replace(found, mlp_norm=before_mlp)
    yield replace(found, mlp_norm=before_mlp, design="parallel")
    if len(norms) == 2:
        yield replace(found, design="post", attention_norm=norms[0], mlp_norm=norms[1])


def _between(norms: list[str], attention: str | None, mlp: str | None) -> str | None:
    """The norm that most likely stands before the MLP: the last one whose name does not tie it to attention."""
    candidates = [name for name in norms if not (ATTENTION.search(name) and "post" not in name)]
    if attention is None or mlp is None or not candidates:
        return None
    return candidates[-1] if len(norms) > 1 else None


def _final_norm(body: nn.Module, path: str) -> str | None:
    """The last norm registered beside the list of blocks, or beside its parent."""
    parents = [path.rpartition(".")[0]]
    while parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    for parent in parents:
        holder = body.get_submodule(parent) if parent else body
        names = [name for name, module in holder.named_children() if "norm" in type(module).__name__.lower()]
        names = [name for name in names if "emb" not in name and "pre" not in name]
        if names:
            return f"{parent}.{names[-1]}" if parent else names[-1]
    return None


def _heads(model: PreTrainedModel) -> dict[str, Head]:
    """Heads of usual names that are one module: over tokens, or over the whole sequence."""
    heads = dict(LANGUAGE_HEADS)
    masked = next((name for name in ("cls", "lm_head", "predictions") if hasattr(model, name)), None)
    if masked:
        heads["ForMaskedLM"] = Head((masked,), normed=False)
    classifier = getattr(model, "classifier", None)
    if isinstance(classifier, nn.Linear):
        heads["ForSequenceClassification"] = heads["ForImageClassification"] = Head(("classifier",), pool="first")
    elif classifier is not None:
        heads["ForSequenceClassification"] = Head(("classifier",), pool="inside", normed=False)
    return heads
