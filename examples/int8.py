"""Removal and int8 in both orders: the held-out loss of skip, then quantise, and of quantise, then skip.

python examples/int8.py MODEL plan/plan.json pairs.jsonl

The linear layers of all blocks become int8, weight-only (torchao); embeddings, norms, head and scalars stay as they
are. Quantise, then skip is a new search on the quantised model with the settings of the plan.
"""

import copy
import sys
from dataclasses import replace
from typing import Any

from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import PreTrainedModel

from fulldepth.core.progress import Watcher
from fulldepth.data.examples import units
from fulldepth.execution import find_anatomy
from fulldepth.execution.heldout import HeldoutLosses, heldout_losses
from fulldepth.results import difference_in_words
from fulldepth.settings import layer
from fulldepth.settings.search import PLACES, TARGETS
from fulldepth.skip import Plan, Scalars, SearchSettings, search, skipping
from fulldepth.skip.problem import read_data
from fulldepth.subject import Subject


def int8(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the linear layers of all blocks in int8."""
    model = copy.deepcopy(model)
    for number, block in enumerate(find_anatomy(model).block_list, start=1):
        linear = {id(module.weight) for module in block.modules() if isinstance(module, nn.Linear)}
        others = [name for name, weight in block.named_parameters() if weight.ndim > 1 and id(weight) not in linear]
        if others:  # such as GPT-2's transposed matrices and stacked experts
            raise SystemExit(f"torchao packs linear layers only; layer {number} also has {', '.join(others)}.")
        quantize_(block, Int8WeightOnlyConfig())
    return model


def searched_with(plan: Plan) -> SearchSettings:
    """The settings of the search that made a plan, but for those of its machine."""
    known = SearchSettings.model_fields.keys() - PLACES
    stated = {name: value for name, value in plan.cost.get("settings", {}).items() if name in known}
    if not any(stated.get(name) for name in TARGETS):
        stated["blocks"] = len(plan.blocks)
    return layer(SearchSettings, {"granularity": plan.granularity, **stated})


def main(model: str | PreTrainedModel, plan: str | Plan, data: Any, heldout: Any = None) -> tuple[HeldoutLosses, Plan]:
    """Print held-out losses with the error of every difference; returns them, and the plan of the quantised model."""
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    settings = searched_with(plan)
    with Subject.open(model, None, settings, needs={"language", "plain"}) as subject:
        original = subject.model
        plan.check_model(original)
        examples = read_data(subject, data, settings, heldout=heldout)
    quantised = int8(original)
    second = search(quantised, examples, settings=settings)
    held = units(examples.meta)
    losses: HeldoutLosses | None = None
    for name, one, used in (
        ("original", original, None),
        ("skipped", original, plan),
        ("quantised", quantised, None),
        ("quantised, then skipped", quantised, second),
        ("skipped, then quantised", quantised, plan),
    ):
        anatomy = find_anatomy(one)
        removed, scalars = used.blocks if used else (), None
        if used and used.scalars:
            scalars = Scalars.from_dict(used.scalars, anatomy.num_layers, used.granularity).to(one.device)
        with skipping(anatomy, removed, plan.granularity, scalars):
            read = heldout_losses({name: one}, examples.heldout, settings.batch_size, Watcher())["loss"]
        losses = read if losses is None else replace(losses, sums={**losses.sums, **read.sums})
        change = (
            "" if one is original and not used else f", {difference_in_words(losses.added(name), 'the original', held)}"
        )
        print(f"{name} {list(removed)}: {losses.mean(name):.4f} nats{change}")
    assert losses is not None
    order = losses.added("quantised, then skipped", "skipped, then quantised")
    print(f"Quantising first: {difference_in_words(order, 'quantising last', held)}.")
    return losses, second


if __name__ == "__main__":
    main(*sys.argv[1:5])
