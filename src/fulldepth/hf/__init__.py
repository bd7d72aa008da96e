"""Everything that depends on Hugging Face's module names and files: loading, families, anatomy, heads."""

from fulldepth.hf.anatomy import Anatomy, anatomy_candidates, first_broken_weight, task_of
from fulldepth.hf.distributed_checkpoint import (
    OPTIMIZER_SHARDS,
    WEIGHT_SHARDS,
    first_failure,
    is_sharded,
    read_shards,
    stored_shapes,
    write_shards,
)
from fulldepth.hf.families import FAMILIES, Family, Head, rows_of
from fulldepth.hf.fewer_layers import renumber_layers, slice_lists
from fulldepth.hf.finder import unwrapped
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
from fulldepth.hf.modes import evaluating, frozen
from fulldepth.hf.offloading import device_of, in_memory, is_offloaded, loaded_weight
from fulldepth.hf.opening import find_tokenizer, open_model, open_tokenizer
from fulldepth.hf.output_weights import OutputWeights, find_output_weights, scale_obstacle
from fulldepth.hf.publishing import ModelCard, check_publishing, publish
from fulldepth.hf.run_checkpoints import (
    UNFINISHED,
    begin_checkpoint,
    checkpoint_of,
    drop_checkpoints,
    find_checkpoints,
    has_weights,
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
    "FAMILIES",
    "GRANULARITIES",
    "OPTIMIZER_SHARDS",
    "UNFINISHED",
    "WEIGHT_SHARDS",
    "Anatomy",
    "Checkpoint",
    "Classifier",
    "Family",
    "Head",
    "ModelCard",
    "OutputWeights",
    "Scalars",
    "StageHead",
    "StagedAnatomy",
    "StagedModel",
    "Switches",
    "anatomy_candidates",
    "available_memory",
    "begin_checkpoint",
    "check_publishing",
    "checkpoint_of",
    "depth_of",
    "device_of",
    "drop_checkpoints",
    "evaluating",
    "find_checkpoints",
    "find_gguf",
    "find_output_weights",
    "find_tokenizer",
    "first_broken_weight",
    "first_failure",
    "frozen",
    "has_weights",
    "in_memory",
    "is_offloaded",
    "is_sealed",
    "is_sharded",
    "load_checkpoint",
    "load_config",
    "load_processor",
    "load_tokenizer",
    "loaded_weight",
    "notes_of",
    "open_model",
    "open_tokenizer",
    "packaged",
    "pick_device",
    "pick_dtype",
    "publish",
    "read_shards",
    "renumber_layers",
    "resolve_stages",
    "rows_of",
    "sample_inputs",
    "scale_obstacle",
    "seal",
    "sealed_checkpoints",
    "settle_checkpoints",
    "skipping",
    "slice_lists",
    "stored_shapes",
    "task_of",
    "trained_steps",
    "truncated",
    "unwrapped",
    "write_shards",
]
