"""GPTQ and AWQ: 4-bit weights whose rounding is calibrated on activations, by GPTQModel.

GPTQModel runs in a separate process, because importing it changes transformers and safetensors; transformers loads the
checkpoint that it saves. Needs the extra `gptq` or `awq`. Both methods target GPUs; on a CPU they work, slowly, for
some layer sizes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from fulldepth.data.batches import Example
from fulldepth.errors import FulldepthError
from fulldepth.hf import Anatomy
from fulldepth.skip.assessment.quantisers import EXTRAS, check_method
from fulldepth.skip.exports.fold import prepare
from fulldepth.skip.exports.formats import FORMATS, Draft
from fulldepth.skip.plan import Plan

BITS, GROUP = 4, 128
"""Bits per weight, and weights of a row that share a factor (fewer if rows are shorter)."""
SEQUENCES = 128
"""Most training examples for calibration, a random sample."""


def calibrated(
    anatomy: Anatomy, method: str, examples: Sequence[Example], plan: Plan | None, seed: int, keep: Path | None = None
) -> Anatomy:
    """A quantised copy of a model.

    Args:
        anatomy: the verified model; not changed.
        method: `gptq` or `awq`.
        examples: calibration data.
        plan: its blocks are skipped during calibration, without scalars; None = no blocks.
        seed: of the sample of examples.
        keep: folder to copy the quantised checkpoint to; must not exist. None = not kept.

    Raises:
        FulldepthError: if packages are missing, or cannot quantise or load this model on this machine.
    """
    check_method(method)
    model = anatomy.model
    order = np.random.default_rng(seed).permutation(len(examples))[:SEQUENCES]
    with tempfile.TemporaryDirectory() as folder:
        source, target, tokens = (Path(folder) / name for name in ("source", "quantised", "tokens.json"))
        _save(anatomy, plan, source)
        tokens.write_text(json.dumps([examples[i].input_ids.tolist() for i in order]), encoding="utf-8")
        request: dict[str, Any] = {
            "method": method,
            "source": str(source),
            "target": str(target),
            "tokens": str(tokens),
        }
        request |= {"device": str(model.device), "group": _group(anatomy), "bits": BITS, "seed": seed}
        _run(method, request)
        try:
            quantised = AutoModelForCausalLM.from_pretrained(
                target, device_map=str(model.device), dtype=model.dtype, trust_remote_code=False
            )
        except (ImportError, RuntimeError, ValueError, OSError) as error:
            raise FulldepthError(_failed(method, "load", str(error))) from error
        if keep is not None:
            shutil.copytree(target, keep)
    return replace(anatomy, model=quantised.eval())


def _save(anatomy: Anatomy, plan: Plan | None, folder: Path) -> None:
    """Write the model as a checkpoint in which the plan's blocks have output weights of zero."""
    if plan is None:
        anatomy.model.save_pretrained(folder)
        return
    bare = plan.changed(scalars={}, healed_loss=None, control_loss=None)
    folder.mkdir()
    FORMATS["folded"].write(Draft(anatomy, bare, prepare(anatomy, bare), folder))


def _group(anatomy: Anatomy) -> int:
    """The largest group that divides every row."""
    rows = {size for _, _, module in anatomy.projections() for size in module.get_parameter("weight").shape}
    return next(size for size in (GROUP, 64, 32, 16, 8, 4, 2, 1) if all(row % size == 0 for row in rows))


def _run(method: str, request: dict[str, Any]) -> None:
    """Quantise in a separate process."""
    environment = {"GPTQMODEL_CPU_WORKERS": "2", **os.environ}  # GPTQModel refuses to start with fewer
    program = [sys.executable, "-m", "fulldepth.skip.assessment.calibration", json.dumps(request)]
    process = subprocess.run(
        program, capture_output=True, text=True, env=environment, check=False, stdin=subprocess.DEVNULL
    )
    if process.returncode or not Path(request["target"], "config.json").is_file():
        lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        raise FulldepthError(_failed(method, "quantise", lines[-1] if lines else f"exit code {process.returncode}"))


def _failed(method: str, action: str, reason: str) -> str:
    where = "" if torch.cuda.is_available() else " There is no GPU here; its kernels on a CPU do not take every model."
    return (
        f"The packages of the extra {EXTRAS[method]!r} could not {action} this model with {method}: "
        f"{' '.join(reason.split())[:300]}.{where} Method int8 works anywhere."
    )
