"""`mergekit`: a recipe for mergekit that copies the layers that stay, for plans of whole layers.

A recipe is a YAML file with half-open ranges of layers, which mergekit counts from 0:

    merge_method: passthrough
    slices:
      - sources:
          - {model: NAME, layer_range: [0, 6]}
      - sources:
          - {model: NAME, layer_range: [8, 30]}
    dtype: bfloat16

mergekit copies weights as they are on disk, and changes one entry of the configuration, the number of layers. Plans
with scalars and models whose configuration describes single layers are refused. Source: mergekit 0.1.5, `merge.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.execution import find_anatomy
from fulldepth.hf import Anatomy, cut_config, find_gguf, packaged
from fulldepth.hf.file_checks import INDEX, WEIGHTS, stored_file
from fulldepth.hf.model_hash import model_hash
from fulldepth.settings.search import ExportSettings
from fulldepth.skip.exports.fold import heals
from fulldepth.skip.exports.formats.checkpoint import Draft
from fulldepth.skip.exports.formats.format import Layer, remaining
from fulldepth.skip.plan import Plan
from fulldepth.subject import open_checkpoint


class Mergekit(Layer):
    """A recipe by which mergekit writes the checkpoint that `Layer` writes."""

    name = "mergekit"
    suffix = ".yaml"
    verified = False

    def check(self, model: PreTrainedModel, plan: Plan) -> None:
        """Refuse what `Layer` refuses, scalars, and a model that mergekit cannot cut or read.

        Raises:
            FulldepthError: with the reason.
        """
        super().check(model, plan)
        anatomy = find_anatomy(model)
        if heals(plan):
            raise FulldepthError(
                "A mergekit recipe copies weights and cannot hold the plan's scalars. Use --format layer, which folds "
                "them into the weights, or search with --no-fit."
            )
        if changed := cut_config(anatomy, remaining(plan, anatomy)).changed:
            raise FulldepthError(
                f"mergekit changes the number of layers alone, and the configuration of this {type(model).__name__} "
                f"also describes single layers ({', '.join(changed)}): the result would not load. Use --format layer."
            )
        if anatomy.config is not anatomy.model.config:
            raise FulldepthError(
                f"This {type(model).__name__} has several stacks of layers, and mergekit would cut all of them. Use "
                "--format layer."
            )

    def write(self, draft: Draft) -> list[str]:
        """Write the recipe.

        Raises:
            FulldepthError: for a model without a folder or name that mergekit can read.
        """
        anatomy = draft.anatomy
        layers = remaining(draft.plan, anatomy)
        source = readable_source(draft.model)
        recipe = {
            "merge_method": "passthrough",
            "slices": [{"sources": [{"model": source, "layer_range": [*ends]}]} for ends in ranges(layers)],
            "dtype": str(draft.model.dtype).removeprefix("torch."),
        }
        title = (
            f"# {one_line(draft.plan.model.name, 200)} without {draft.plan.what} (counted from 1; layer_range from 0)\n"
        )
        text = title + yaml.safe_dump(recipe, sort_keys=False, default_flow_style=None, allow_unicode=True)
        draft.folder.write_text(text, encoding="utf-8")
        return ["UNVERIFIED: mergekit has not run it. `mergekit-yaml RECIPE FOLDER` writes what --format layer holds."]


def ranges(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted 1-based layers as half-open ranges of numbers from 0: 1, 2, 5 are (0, 2) and (4, 5)."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return [(start - 1, end) for start, end in zip(starts, ends, strict=True)]


def readable_source(model: PreTrainedModel) -> str:
    """The folder or Hub name that mergekit reads a model from: an absolute path, or `NAME@COMMIT` of what was loaded.

    Raises:
        FulldepthError: for a model that was loaded from a GGUF file, or from nowhere.
    """
    source = packaged(model.name_or_path) if model.name_or_path else ""
    if not source or find_gguf(source) is not None:
        raise FulldepthError(
            f"mergekit reads checkpoint folders and Hub names; {source or 'this model'} is neither. Use --format layer."
        )
    if Path(source).is_dir():
        return str(Path(source).absolute())
    commit = getattr(model.config, "_commit_hash", None)
    return f"{source}@{commit}" if commit else source


def check_source(model: PreTrainedModel, plan: Plan, settings: ExportSettings) -> list[str]:
    """Refuse a loaded model whose weights are not those of the folder or Hub name that a recipe states.

    Such a model was changed after it was loaded, by merged adapters or training. The source is read from the disk, in
    the model's precision.

    Args:
        model: as passed in, the one that the plan is for.
        plan: a plan for it.
        settings: of the export.

    Returns:
        A note if the source cannot be compared: it is not on this machine, does not fit into the memory beside the
        model, is loaded as another class, or was quantised when it was loaded.

    Raises:
        FulldepthError: if the weights differ.
    """
    readable_source(model)
    source = packaged(model.name_or_path or "")
    commit = None if Path(source).is_dir() else getattr(model.config, "_commit_hash", None)
    unread = f"UNVERIFIED: the weights of {source} were not compared with those of the plan"
    if getattr(model, "is_quantized", False):
        return [f"{unread}, as the model is quantised."]
    if not any(stored_file(source, name, commit) for name in (WEIGHTS, INDEX)):
        return [f"{unread}, as they are not on this machine as safetensors."]
    changes = {"revision": commit, "device": "cpu", "device_map": None}
    dtype = str(model.dtype).removeprefix("torch.")
    try:
        stored = open_checkpoint(source, settings.model_copy(update=changes), dtype=dtype, plain=True).model
    except FulldepthError as error:
        return [f"{unread}: {error}"]
    if type(stored) is not type(model):
        return [f"{unread}, as the model is a {type(model).__name__} and they are those of a {type(stored).__name__}."]
    is_changed = model_hash(stored) != plan.model.hash
    if is_changed:  # some classes load single weights in float32; a model that was converted as a whole does not
        is_changed = model_hash(stored.to(model.dtype)) != plan.model.hash  # type: ignore[arg-type]
    if is_changed:
        raise FulldepthError(
            f"The weights of the model are not those of {source}, which it was loaded from and which a recipe would "
            "name: they were changed in memory. Save the model (save_pretrained), load it from that folder and export "
            "again, or use --format layer."
        )
    return []


def parameters_left(anatomy: Anatomy, plan: Plan) -> int:
    """Numbers in the weights of the checkpoint that mergekit writes."""
    blocks = [anatomy.blocks[layer - 1] for layer in plan.lacking("mlp")]
    removed = {parameter for block in blocks for parameter in block.parameters()}
    return sum(parameter.numel() for parameter in anatomy.model.parameters() if parameter not in removed)
