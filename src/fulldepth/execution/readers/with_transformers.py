"""Standalone program: loads a checkpoint with transformers, without this package, and computes its output.

    python -P with_transformers.py FOLDER INPUTS.pt OUTPUT.pt stock|carried [DEVICE_MAP]

`stock`: without `trust_remote_code`, and the class must be transformers' own. `carried`: with the code in the folder.
Tokenizer and image processor must load. INPUTS.pt holds the ids for a causal language model, which transformers must
refuse to load without the code that it carries; or the keyword arguments of the class that `config.json` names.
Writes the logits (of a detector joined with the boxes; without a head the last hidden state). The last line of the
printed text is a JSON object with the class and, of a causal language model, the largest difference of logits with and
without a cache, relative; 0 for other classes.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

sys.modules["fulldepth"] = None  # type: ignore[assignment]  # an export must load without it

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.modeling_outputs import BaseModelOutputWithPast  # noqa: E402

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""Name of the cache, which transformers 5.24 changed."""


def load_causal(folder: str, carried: bool, device_map: str | None) -> Any:
    """A causal language model, loaded by an Auto class."""
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
    model = load(auto, folder, carried, **placed)
    if not carried and not type(model).__module__.startswith("transformers."):
        raise SystemExit(f"{type(model).__name__} is no class of transformers")
    return model


def load_named(folder: str, carried: bool) -> Any:
    """A model of the class that its configuration names."""
    name = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    named = transformers.AutoModel if carried else getattr(transformers, name, None)
    if named is None:
        raise SystemExit(f"{name} is no class of transformers")
    return load(named, folder, carried)


def load(auto: Any, folder: str, carried: bool, **placed: Any) -> Any:
    """The model; exits unless its weights and those of the folder are the same set."""
    loaded: Any = auto.from_pretrained(
        folder, dtype="auto", trust_remote_code=carried, output_loading_info=True, **placed
    )
    model, info = loaded
    wrong = {name: sorted(map(str, keys))[:3] for name, keys in info.items() if keys}
    if wrong:
        raise SystemExit(f"the weights do not fit the class {type(model).__name__}: {wrong}")
    return model.eval()


def read_companions(folder: str, carried: bool) -> None:
    """Load the tokenizer and the image processor of the folder, and encode a text; those with code need `carried`."""
    asked = {file.name: carried or b'"auto_map"' not in file.read_bytes() for file in Path(folder).glob("*.json")}
    if asked.get("tokenizer_config.json", "tokenizer.json" in asked):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=carried)
        tokenizer("A text.")
    if asked.get("preprocessor_config.json"):
        transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=carried)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, cached: bool) -> torch.Tensor:
    """[B, T, V] logits, at once, or most of the sequence first and then token by token with a cache.

    As in `generate`, a class that takes positions is given them: Bamba counts wrongly by itself. There is no mask,
    because nothing is padding, and Mamba takes that of the new tokens alone. A class that returns no cache runs at
    once.
    """
    whole: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if not cached:
        return model(**whole).logits
    length = ids.shape[1]
    start = max(1, length - 4)
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    parts = []
    cache = None
    for begin, end in [(0, start), *((at, at + 1) for at in range(start, length))]:
        part: dict[str, Any] = {"input_ids": ids[:, begin:end], CACHE: cache}
        if takes_positions:
            part["position_ids"] = torch.arange(begin, end, device=ids.device).expand(len(ids), -1)
        outputs = model(**part, use_cache=True)
        cache = dict(outputs).get(CACHE)
        if cache is None:
            return model(**whole).logits
        parts.append(outputs.logits)
    return torch.cat(parts, dim=1)


def main(folder: str, inputs_file: str, output_file: str, kind: str, device_map: str | None = None) -> None:
    """Load the checkpoint, write its output, print the report."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    inputs = torch.load(inputs_file, weights_only=True)
    carried = kind == "carried"
    error = 0.0
    causal = isinstance(inputs, torch.Tensor)
    model = load_causal(folder, carried, device_map) if causal else load_named(folder, carried)
    read_companions(folder, carried)
    if causal:
        output = logits(model, inputs, cached=False)
        again = logits(model, inputs, cached=True)
        error = float((output.double() - again.double()).abs().max() / output.double().abs().max().clamp(min=1e-30))
    else:
        with torch.no_grad():
            outputs = model(**inputs)
        names = ("logits", "prediction_logits", "last_hidden_state")
        output = next(outputs[name] for name in names if name in outputs)
    torch.save(output, output_file)
    print(json.dumps({"class": type(model).__name__, "cache_error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
