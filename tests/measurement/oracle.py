"""States and logits straight from transformers, in float64: nothing here comes from fulldepth."""

from __future__ import annotations

import copy

import numpy as np
import torch


@torch.no_grad()
def taps(model, blocks, inputs, **modules):
    """[L+1, B, T, D] states between the blocks, and what each of `modules` (name -> path in a block) read."""
    layers = model.get_submodule(blocks)
    found = {name: {} for name in ("states", *modules)}

    def keep(module, name, index):
        def hook(_, args, kwargs):
            found[name][index] = (args[0] if args else kwargs["hidden_states"]).double().numpy().copy()

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def keep_last(_, args, output):
        found["states"][len(layers)] = (output[0] if isinstance(output, tuple) else output).double().numpy().copy()

    handles = [layers[-1].register_forward_hook(keep_last)]
    for index, block in enumerate(layers):
        handles.append(keep(block, "states", index))
        handles += [keep(block.get_submodule(path), name, index) for name, path in modules.items()]
    model(**inputs)
    for handle in handles:
        handle.remove()
    arrays = {name: np.stack([values[n] for n in sorted(values)]) for name, values in found.items()}
    return arrays.pop("states"), arrays


@torch.no_grad()
def exits(model, blocks, *inputs):
    """For each input [L+1, B, T or 1, V] logits of the model cut off after 0..L blocks: what stopping predicts."""
    parent, _, name = blocks.rpartition(".")
    count = len(model.get_submodule(blocks))
    found = []
    for depth in range(count + 1):
        cut = copy.deepcopy(model)
        setattr(cut.get_submodule(parent), name, cut.get_submodule(blocks)[:depth])
        for part in (cut, cut.get_submodule(parent)):
            part.config.num_hidden_layers = depth
        found.append([cut(**each).logits.double().numpy() for each in inputs])
    return [np.stack(of_input) for of_input in zip(*found, strict=True)]
