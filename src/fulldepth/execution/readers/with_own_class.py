"""Standalone program: loads a checkpoint of any class with transformers, without this package.

    python -P with_own_class.py FOLDER INPUTS.pt OUTPUT.pt stock|carried

INPUTS.pt holds keyword arguments of the model. `stock`: the class that `config.json` names must be transformers' own.
`carried`: the code in the folder is run. Tokenizer and image processor must load. Writes the logits (of
a detector joined with the boxes) or, without a head, the last hidden state; the last line of the output is a JSON
object with the class and 0, for the error of a cache, which is not tried.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

sys.modules["fulldepth"] = None  # type: ignore[assignment]  # an export must load without it

import torch  # noqa: E402
import transformers  # noqa: E402

read_companions = runpy.run_path(str(Path(__file__).with_name("with_transformers.py")))["read_companions"]


@torch.no_grad()
def main(folder: str, inputs_file: str, output_file: str, kind: str) -> None:
    """Load the export, write its output, print the report."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    chosen: Any = getattr(transformers, name, None) if kind == "stock" else transformers.AutoModel
    if chosen is None:
        raise SystemExit(f"{name} is no class of transformers")
    loaded: Any = chosen.from_pretrained(
        folder, dtype="auto", trust_remote_code=kind == "carried", output_loading_info=True
    )
    model, info = loaded
    wrong = {key: sorted(map(str, names))[:3] for key, names in info.items() if names}
    if wrong:
        raise SystemExit(f"the weights do not fit the class {name}: {wrong}")
    read_companions(folder, kind == "carried")
    output = model.eval()(**torch.load(inputs_file, weights_only=True))
    found = next(output[key] for key in ("logits", "prediction_logits", "last_hidden_state") if key in output)
    boxes = [output["pred_boxes"]] if "pred_boxes" in output else []
    torch.save(torch.cat([found, *boxes], -1), output_file)
    print(json.dumps({"class": type(model).__name__, "cache_error": 0.0}))


if __name__ == "__main__":
    main(*sys.argv[1:])
