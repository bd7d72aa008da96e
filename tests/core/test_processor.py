"""bfloat16 on processors that announce what they may not use: one message, after one probe, and only when asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tiny_models
from fulldepth.core import processor
from fulldepth.core.processor import LIMIT, check_bfloat16, failing_bfloat16, has_bfloat16
from fulldepth.hf import load_checkpoint
from refusals import refused

HERE = os.environ.get(LIMIT)
"""As the tests' configuration sets it."""
DIES = "import os, sys; os.kill(os.getpid(), 4) if os.environ.get('ONEDNN_MAX_CPU_ISA') != {works!r} else None"


@pytest.fixture
def announces(monkeypatch):
    """A processor that announces AMX; returns the environments of the probes."""
    probes = []
    ending = processor._ending
    monkeypatch.setattr(processor, "_ending", lambda given: probes.append(given) or ending(given))
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags : avx2 amx_tile amx_bf16")
    monkeypatch.delenv(LIMIT, raising=False)
    failing_bfloat16.cache_clear()
    yield probes
    failing_bfloat16.cache_clear()


@pytest.mark.parametrize("works", ["AVX512_CORE_BF16", "AVX2", "nothing"])
def test_a_process_that_dies_is_one_message_with_what_helps(announces, monkeypatch, works):
    monkeypatch.setattr(processor, "PROBE", DIES.format(works=works))
    for _ in range(2):
        with refused(r"ends the process on this machine \(exit code -4\)") as caught:
            check_bfloat16()
        assert ("Use float32." in str(caught.value)) is (works == "nothing")
        assert (f"{LIMIT}={works}" in str(caught.value)) is (works != "nothing")
    assert not has_bfloat16()
    values = [probe.get(LIMIT) for probe in announces]
    assert values == [None, "AVX512_CORE_BF16", "AVX2"][: 2 if works == "AVX512_CORE_BF16" else 3], "probed once"


def test_the_probe_is_a_product_that_works_here(announces, monkeypatch):
    if HERE is not None:
        monkeypatch.setenv(LIMIT, HERE)
    check_bfloat16()
    assert has_bfloat16()
    assert len(announces) == 1


def test_without_instructions_nothing_is_probed(announces, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags : avx2 avx512f")
    assert not has_bfloat16()
    assert not announces


def test_only_bfloat16_is_probed(monkeypatch, tmp_path):
    monkeypatch.setattr(processor, "failing_bfloat16", lambda: ("exit code -4", "AVX2"))
    tiny_models.build("llama").save_pretrained(tmp_path / "single")
    tiny_models.build("llama").to(torch.bfloat16).save_pretrained(tmp_path / "half")
    load_checkpoint(tmp_path / "single")
    load_checkpoint(tmp_path / "half", dtype="float32")
    for folder, dtype in (("single", "bfloat16"), ("half", "auto")):
        with refused("A product in bfloat16 ends the process"):
            load_checkpoint(tmp_path / folder, dtype=dtype)
