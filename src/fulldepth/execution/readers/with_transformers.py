"""Standalone program: loads an export with transformers, without this package, and computes its logits.

    python -P with_transformers.py FOLDER IDS.pt LOGITS.pt stock|carried [DEVICE_MAP]

`stock`: without `trust_remote_code`, and the class must be transformers' own. `carried`: transformers must refuse the
folder without `trust_remote_code`, and its own classes must refuse it too. The tokenizer must load. Writes the
logits of the ids; the last line of the output is a JSON object with the class and the largest difference of logits with
and without a cache, relative.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.modules["fulldepth"] = None  # type: ignore[assignment]  # an export must load without it

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402


def load(folder: str, carried: bool, device_map: str | None) -> Any:
    """The model; exits unless its weights and those of the folder are the same set."""
    if carried:
        try:
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
        except ValueError:
            pass
        else:
            raise SystemExit("transformers loads it without its code, as another model")
    # Classes that also read images are in another mapping.
    causal = type(AutoConfig.from_pretrained(folder, trust_remote_code=carried)) in AutoModelForCausalLM._model_mapping
    auto = AutoModelForCausalLM if carried or causal else transformers.AutoModelForImageTextToText
    placed: dict[str, Any] = {} if device_map is None else {"device_map": device_map, "offload_folder": "offloaded"}
    loaded: Any = auto.from_pretrained(
        folder, dtype="auto", trust_remote_code=carried, output_loading_info=True, **placed
    )
    model, info = loaded
    wrong = {name: sorted(map(str, keys))[:3] for name, keys in info.items() if keys}
    if wrong:
        raise SystemExit(f"the weights do not fit the class {type(model).__name__}: {wrong}")
    if not carried and not type(model).__module__.startswith("transformers."):
        raise SystemExit(f"{type(model).__name__} is no class of transformers")
    return model.eval()


def read_companions(folder: str, carried: bool) -> None:
    """Load the tokenizer and the image processor of the folder, and encode a text; those with code need `carried`."""
    files = {file.name: file for file in Path(folder).glob("*.json")}
    asked = {name: carried or b'"auto_map"' not in file.read_bytes() for name, file in files.items()}
    if asked.get("tokenizer_config.json", "tokenizer.json" in files):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=carried)
        tokenizer("A text.")
    if asked.get("preprocessor_config.json"):
        transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=carried)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, cached: bool) -> torch.Tensor:
    """[B, T, V] logits, at once, or most of the sequence first and then token by token with a cache."""
    mask = torch.ones_like(ids)
    if not cached:
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    length = ids.shape[1]
    start = max(1, length - 4)
    parts, cache = [], None
    for begin, end in [(0, start), *((at, at + 1) for at in range(start, length))]:
        outputs = model(
            input_ids=ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True
        )
        cache = outputs.past_key_values
        parts.append(outputs.logits)
    return torch.cat(parts, dim=1)


def main(folder: str, ids_file: str, logits_file: str, kind: str, device_map: str | None = None) -> None:
    """Load the export, write its logits, print the report."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = load(folder, kind == "carried", device_map)
    read_companions(folder, kind == "carried")
    ids = torch.load(ids_file, weights_only=True)
    expected = logits(model, ids, cached=False)
    again = logits(model, ids, cached=True)
    torch.save(expected, logits_file)
    error = float((expected.double() - again.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))
    print(json.dumps({"class": type(model).__name__, "cache_error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
