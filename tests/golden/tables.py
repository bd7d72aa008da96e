"""Results of today's code on small models, kept to prove that a restructuring changes no number.

    PYTHONPATH=tests python -m golden [NAME ...]

writes the tables anew, after a change that is meant to change them; say why in the commit. Only public functions are
called, so that the script outlives moves of the code behind them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import redirect_stdout, suppress
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import transformers as tf
import yaml
from PIL import Image

import fulldepth
import tiny_models
from fulldepth import skip
from fulldepth.cli import main
from fulldepth.data import builtin_texts, train_tokenizer
from tiny_models import seeded

HERE = Path(__file__).parent
Table = dict[str, list[Any]]
"""A row's name -> its numbers."""

KEYS = ("measure", "site", "layer", "other", "statistic")
OF_THE_MACHINE = {"throughput", "elapsed", "peak_memory", "other_load"}
MEASURED = ["llama", "depth_llama-dynamic", "gemma2", "gpt_neox", "bert", "vit"]
MODEL = {
    "type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RECIPES = {
    "train-jreg": {"method": "jreg", "micro_batch_size": 2},
    "train-tree-cr": {
        "model": {**MODEL, "type": "depth_llama", "residual": "tree", "tree": {"2": [0, 1], "3": [-1, 2]}},
        "objective": {
            "coherence": {"weight": 0.1, "layers": [1, 2]},
            "orthogonality": {"weight": 0.01, "layers": [1, 3]},
            "energy_warmup": 10,
        },
    },
}
STEPS = 30


def text():
    """A few pages of a novel."""
    return builtin_texts("heldout")[0][4000:30000]


def tokenizer():
    """Byte-level, 320 tokens."""
    return train_tokenizer([text()], vocab_size=320)


def labelled_texts(count=24):
    """Paragraphs of different lengths."""
    return [" ".join(p.split()) for p in text().split("\n\n") if 10 < len(p.split()) < 60][:count]


def images(folder, count=12, label="class"):
    """Folder of seeded pictures in three classes."""
    random = np.random.default_rng(0)
    for number in range(count):
        own = folder / f"{label}{number % 3}"
        own.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(own / f"{number}.png")
    return folder


def rows(table):
    """A tidy table of results as golden rows."""
    found = {}
    for row in table.itertuples(index=False):
        values = row._asdict()
        if values["measure"] in OF_THE_MACHINE or values["statistic"].startswith("bin_"):
            continue
        parts = [values.get(name) for name in ("step", *KEYS) if name in values]
        name = " ".join("-" if pd.isna(part) else str(part) for part in parts)
        found[name] = [_number(values["value"]), _number(values["count"]), values["unit"]]
    return found


def _number(value):
    return None if pd.isna(value) else float(value)


def measured(family):
    """`fulldepth.measure` in float64 on one family."""
    model = tiny_models.build(family, dtype=torch.float64)
    options = {"batch_size": 4, "dtype": "float64", "lens_tokens": None, "entropy_sequences": 64}
    if family == "vit":
        with tempfile.TemporaryDirectory() as folder:
            size = {"height": 16, "width": 16}
            processor = tf.ViTImageProcessorPil(size=size)
            processor.save_pretrained(Path(folder) / "model")
            model.save_pretrained(Path(folder) / "model")
            pictures = images(Path(folder) / "pictures")
            results = fulldepth.measure(Path(folder) / "model", pictures, **options)
    else:
        own = tokenizer()
        if family == "bert":
            own.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"})
        torch.manual_seed(0)
        model.resize_token_embeddings(len(own), mean_resizing=False)
        results = fulldepth.measure(
            model, labelled_texts(), tokenizer=own, sequence_length=32, order="first", **options
        )
    return rows(results.table)


def trained(name):
    """What `fulldepth train` notes in 30 steps, and a checksum of the weights it ends with."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        paragraphs = [" ".join(p.split()) for p in builtin_texts("heldout")[0][:60_000].split("\n\n")]
        lines = [json.dumps({"text": paragraph}) for paragraph in paragraphs if len(paragraph.split()) > 20]
        (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
        tokenizer().save_pretrained(folder / "tokenizer")
        settings = {
            "model": MODEL,
            "data": {"name": str(folder / "text.jsonl"), "validation_share": 0.2, "validation_sequences": 6},
            "tokenizer": str(folder / "tokenizer"),
            "steps": STEPS,
            "global_batch_size": 4,
            "sequence_length": 24,
            "learning_rate": 3e-3,
            "warmup_steps": 5,
            "eval_every": 10,
            "save_every": STEPS,
            **RECIPES[name],
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
        command = ["fulldepth", "train", str(folder / "recipe.yaml"), "--output", str(folder / "run")]
        with patch.object(sys, "argv", command), redirect_stdout(StringIO()), suppress(SystemExit):
            main()
        table = pd.read_parquet(folder / "run" / "results.parquet")
        model = tf.AutoModelForCausalLM.from_pretrained(folder / "run" / f"checkpoint-{STEPS}")
        return {**rows(table), **checksums(model)}


def checksums(model):
    """Sum and sum of squares of every weight, in float64."""
    weights = ((name, weight.detach().double()) for name, weight in model.state_dict().items())
    return {f"weight {name}": [weight.sum().item(), weight.square().sum().item()] for name, weight in weights}


def learnt(dtype, characters):
    """A Llama after 60 steps, so that its blocks differ in what they are worth."""
    model, own = tiny_models.build("llama", dtype=dtype).train(), tokenizer()
    model.resize_token_embeddings(len(own), mean_resizing=False)
    ids = torch.tensor(own(text()[:characters])["input_ids"])
    windows = ids[: len(ids) // 16 * 16].view(-1, 16)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        model(input_ids=windows, labels=windows).loss.backward()
        optimiser.step()
    return model.eval()


def searched():
    """A greedy search of two blocks with its scalars, and the folded export of its plan."""
    model, own = learnt(torch.float64, 3000), tokenizer()
    plan = skip.search(model, text()[:6000].split("\n\n"), 2, tokenizer=own, batch_size=4, seed=0)
    table = {
        "blocks": list(plan.blocks),
        "losses": [float(loss) for loss in plan.losses],
        "healed": [plan.healed_loss, *plan.document()["control_loss"].values()],
        "cost": [plan.cost["forwards"], plan.cost["flops"]],
    }
    table |= {f"scalars {layer}": list(factors.values()) for layer, factors in plan.scalars.items()}
    with tempfile.TemporaryDirectory() as work:
        made = skip.export(plan, model, "folded", Path(work) / "folded", tokenizer=own)
        folded = tf.AutoModelForCausalLM.from_pretrained(Path(work) / "folded", dtype=torch.float64)
        table["export"] = [made.parameters, made.verified]
        return table | checksums(folded)


MAKERS = {
    **{f"measure-{family}": (lambda family=family: measured(family)) for family in MEASURED},
    **{name: (lambda name=name: trained(name)) for name in RECIPES},
    "search": searched,
}


def machine():
    """Hash of a few sums and exponentials: machines that agree here are asked for equal bits, others to rounding."""
    generator = seeded(0)
    digest = sha256(torch.__version__.encode())
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(96, 320, generator=generator, dtype=dtype)
        for values in (x @ x.T, torch.linalg.eigvalsh(x @ x.T), x.softmax(-1), x.tanh(), x.square().sum(0).sqrt()):
            digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def path(name):
    """The stored table."""
    return HERE / f"{name}.json"


def write(name):
    """Store a table as the present code gives it."""
    table = MAKERS[name]()
    lines = [f" {json.dumps(row)}: {json.dumps(values)}" for row, values in table.items()]
    body = ",\n".join(lines)
    path(name).write_text(f'{{"machine": {json.dumps(machine())}, "rows": {{\n{body}\n}}}}\n')
