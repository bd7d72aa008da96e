"""Everything that depends on Hugging Face's module names and files: loading, families, anatomy, heads."""

from fulldepth.hf.anatomy import (
    Anatomy,
    anatomy_candidates,
    first_broken_weight,
    no_single_class,
    stacked_experts,
    task_of,
)
from fulldepth.hf.detections import DetectionHeads
from fulldepth.hf.exit_head_files import (
    EXIT_HEADS,
    find_exit_heads,
    load_exit_heads,
    restore_exit_heads,
    save_exit_heads,
)
from fulldepth.hf.exit_heads import (
    add_exit_heads,
    check_exit_heads,
    copy_to_exit_heads,
    exit_heads_of,
    exit_weights,
    has_exit_heads,
    outputs_by_layer,
)
from fulldepth.hf.families import FAMILIES, rows_of
from fulldepth.hf.family import Family, Head
from fulldepth.hf.fewer_layers import renumber_layers, slice_lists
from fulldepth.hf.finder import unwrapped
from fulldepth.hf.fsdp import uses_fsdp
from fulldepth.hf.gguf import find_gguf, packaged
from fulldepth.hf.heads import Classifier
from fulldepth.hf.load import (
    Checkpoint,
    depth_of,
    load_checkpoint,
    load_config,
    load_processor,
    load_tokenizer,
    pick_device,
    pick_dtype,
)
from fulldepth.hf.memory import available_memory
from fulldepth.hf.modes import evaluating, frozen, silent
from fulldepth.hf.offloading import device_of, in_memory, is_offloaded, loaded_weight
from fulldepth.hf.opening import find_tokenizer, open_model, open_tokenizer
from fulldepth.hf.output_weights import OutputWeights, find_output_weights, scale_obstacle
from fulldepth.hf.positions import unused_positions
from fulldepth.hf.publishing import ModelCard, check_publishing, publish
from fulldepth.hf.run_checkpoints import (
    UNFINISHED,
    begin_checkpoint,
    checkpoint_of,
    drop_checkpoints,
    find_checkpoints,
    has_weights,
    is_renamed,
    is_sealed,
    notes_of,
    seal,
    sealed_checkpoints,
    settle_checkpoints,
    trained_steps,
)
from fulldepth.hf.sample import sample_inputs
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.stages import StagedAnatomy, StagedModel, StageHead, resolve_stages
from fulldepth.hf.surgery import GRANULARITIES, Switches, skipping
from fulldepth.hf.truncation import truncated

__all__ = [
    "EXIT_HEADS",
    "FAMILIES",
    "GRANULARITIES",
    "UNFINISHED",
    "Anatomy",
    "Checkpoint",
    "Classifier",
    "DetectionHeads",
    "Family",
    "Head",
    "ModelCard",
    "OutputWeights",
    "Scalars",
    "StageHead",
    "StagedAnatomy",
    "StagedModel",
    "Switches",
    "add_exit_heads",
    "anatomy_candidates",
    "available_memory",
    "begin_checkpoint",
    "check_exit_heads",
    "check_publishing",
    "checkpoint_of",
    "copy_to_exit_heads",
    "depth_of",
    "device_of",
    "drop_checkpoints",
    "evaluating",
    "exit_heads_of",
    "exit_weights",
    "find_checkpoints",
    "find_exit_heads",
    "find_gguf",
    "find_output_weights",
    "find_tokenizer",
    "first_broken_weight",
    "frozen",
    "has_exit_heads",
    "has_weights",
    "in_memory",
    "is_offloaded",
    "is_renamed",
    "is_sealed",
    "load_checkpoint",
    "load_config",
    "load_exit_heads",
    "load_processor",
    "load_tokenizer",
    "loaded_weight",
    "no_single_class",
    "notes_of",
    "open_model",
    "open_tokenizer",
    "outputs_by_layer",
    "packaged",
    "pick_device",
    "pick_dtype",
    "publish",
    "remove_exit_heads",
    "renumber_layers",
    "resolve_stages",
    "restore_exit_heads",
    "rows_of",
    "sample_inputs",
    "save_exit_heads",
    "scale_obstacle",
    "seal",
    "sealed_checkpoints",
    "settle_checkpoints",
    "silent",
    "skipping",
    "slice_lists",
    "stacked_experts",
    "task_of",
    "trained_steps",
    "truncated",
    "unused_positions",
    "unwrapped",
    "uses_fsdp",
]
