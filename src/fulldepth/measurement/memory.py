"""Estimates the memory of a run and checks it before the start."""

from __future__ import annotations

from fulldepth.errors import FulldepthError
from fulldepth.hf import available_memory
from fulldepth.measurement.plan import Plan
from fulldepth.measurement.subject import Subject

MIB = 1 << 20


def check_memory(plan: Plan, subject: Subject, batch_size: int) -> str:
    """One line on the estimated memory of the run.

    Raises:
        FulldepthError: if the estimate exceeds the free memory.
    """
    held = plan.memory
    setup = plan.setup
    layers = sum(setup.num_layers + 1 if site in ("residual", "reference") else setup.num_layers for site in plan.sites)
    layers += (setup.num_layers + 1) * plan.masked_pass
    sequences = min(batch_size, setup.num_sequences)
    batch = layers * sequences * setup.sequence_length * setup.width * subject.checkpoint.model.dtype.itemsize
    copies = 2 * held["reservoirs"]  # CKA converts the sample to float64
    total = held["accumulators"] + held["reservoirs"] + max(batch, copies)
    free = available_memory(setup.device)
    sentence = (
        f"Memory beside the model: accumulators {_mib(held['accumulators'])}, sample of {setup.reservoir_tokens} of "
        f"{setup.num_tokens} tokens {_mib(held['reservoirs'])}, activations of one batch {_mib(batch)}."
    )
    if free is not None and total > free:
        raise FulldepthError(
            f"Out of memory before the start. {sentence} Free: {_mib(free)}. Try a smaller --batch-size, "
            "--sequence-length or --reservoir-tokens, or fewer --measures."
        )
    return sentence


def _mib(size: int) -> str:
    """Bytes as MiB."""
    return f"{size / MIB:,.0f} MiB" if size >= 10 * MIB else f"{size / MIB:.1f} MiB"
