"""The process in which GPTQModel quantises a checkpoint: `python -m fulldepth.skip.assessment.calibration JSON`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def main(request: dict[str, Any]) -> None:
    """Read a checkpoint and token ids, write the quantised checkpoint.

    Args:
        request: `source`, `target`, `tokens` (paths), `method`, `bits`, `group`, `device`, `seed`.
    """
    from gptqmodel import GPTQModel, QuantizeConfig  # noqa: PLC0415
    from gptqmodel.quantization import FORMAT, METHOD  # noqa: PLC0415

    torch.manual_seed(request["seed"])
    _any_tokenizer().save_pretrained(request["source"])
    awq = {"method": METHOD.AWQ, "format": FORMAT.GEMM} if request["method"] == "awq" else {}
    config = QuantizeConfig(bits=request["bits"], group_size=request["group"], **awq)
    model = GPTQModel.load(request["source"], config, device=request["device"])
    rows = json.loads(Path(request["tokens"]).read_text(encoding="utf-8"))
    model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in rows], batch_size=1)
    model.save(request["target"])


def _any_tokenizer() -> PreTrainedTokenizerFast:
    """GPTQModel does not start without a tokenizer, although the data come as ids."""
    core = Tokenizer(models.WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[PAD]", pad_token="[PAD]", eos_token="[PAD]")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
