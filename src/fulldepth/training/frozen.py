"""Weights that a run leaves alone: branches that were removed, and the features of a classifier."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fulldepth.core.files import read_json
from fulldepth.execution import find_anatomy
from fulldepth.hf import Anatomy, add_exit_heads, exit_weights, find_output_weights, sample_inputs
from fulldepth.hf.exit_heads import output_layer
from fulldepth.hf.scalars import ROLES
from fulldepth.hf.stream_scale import EXPORT_NOTES

REMOVED = "fulldepth_removed"
"""Entry of a configuration: whether branches were removed by zeros, which stay zero when a checkpoint is trained."""


def keep_removed(model: PreTrainedModel, checkpoint: str) -> None:
    """Freeze the output weights of removed branches, which `skip apply --format folded` sets to zero.

    Training them would bring the branches back. The export says in its notes that it has such branches; the model's
    configuration says it to all runs that start from a checkpoint of this one.
    """
    notes = Path(checkpoint) / EXPORT_NOTES
    document = read_json(notes) if notes.is_file() else None
    is_folded = isinstance(document, dict) and document.get("format") == "folded"
    if not is_folded and getattr(model.config, REMOVED, None) is not True:
        return
    setattr(model.config, REMOVED, True)
    anatomy = find_anatomy(model)
    branches = product(anatomy.layers, ROLES)
    for weights in find_output_weights(anatomy, branches, sample_inputs(anatomy)["input_ids"]).values():
        parameters = [weights.branch.get_parameter(name) for name in weights.names]
        if all((parameter == -weights.offset).all() for parameter in parameters):
            for parameter in parameters:
                parameter.requires_grad_(False)


def freeze_features(anatomy: Anatomy) -> None:
    """Freeze a classifier, in place, and give every layer a new linear head; only the heads are trained.

    The head of layer l reads `h_l` as the model's head reads `h_L`: the final norm, the pooling and the modules before
    the head's last linear layer are frozen with the rest. No head has a bias, and all start at zero.

    Raises:
        FulldepthError: as `add_exit_heads`.

    Source: "Representation progression and aligned training", App. B.4 (transfer to different tasks, Fig. 17, right).
    """
    model = anatomy.model
    add_exit_heads(anatomy)
    model.requires_grad_(False)
    output = output_layer(anatomy)[2]
    with torch.no_grad():
        if output.bias is not None:
            output.bias.zero_()
        for weight in (*exit_weights(model), output.weight):
            weight.zero_().requires_grad_(True)
