"""The model card of an export."""

from __future__ import annotations

from collections.abc import Sequence

from fulldepth.errors import one_line
from fulldepth.hf import ModelCard
from fulldepth.skip.in_sample import in_sample
from fulldepth.skip.plan import Plan

STOCK = """\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH")"""
CARRIED = """\
from fulldepth.skip import load

model = load("PATH")

# Without fulldepth, run the code that the checkpoint carries:
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)"""


def card_of(
    plan: Plan, *, format: str, carries_code: bool, logit_error: float, parameters: int, notes: Sequence[str]
) -> ModelCard:
    """The card of an export: what was removed, held-out losses, how far the logits are from the plan's."""
    blocks = ", ".join(map(str, sorted(plan.blocks)))
    name, layers = one_line(plan.model.name, 200), f"layer{'s' * (len(plan.blocks) > 1)} {blocks}"
    healed = plan.healed_loss is not None
    scalars = ", and scalars fitted on the remaining blocks compensate for them" if healed else ""
    method = (
        f"`{name}` without the {plan.granularity} of {layers} of its depth (counted from 1). The blocks were chosen by "
        f"{plan.search} search with the criterion {plan.criterion}{scalars}: "
        "[Hopscotch](https://arxiv.org/abs/2506.03303), with fulldepth."
    )
    losses = {"Held-out loss of the original": plan.losses[0], "without the blocks": plan.losses[-1]}
    if plan.healed_loss is not None:
        losses["without the blocks, with scalars"] = plan.healed_loss
    numbers = {key: f"{loss:.4f} nats a token" for key, loss in losses.items()}
    numbers["Held-out text"] = _heldout(plan)
    numbers |= {"In-sample": sentence} if (sentence := in_sample(plan)) else {}
    numbers |= {
        "Parameters": f"{parameters:,}",
        "Largest difference of a logit from the plan's model": f"{logit_error:.1e} of the largest logit",
        "Format": f"`{format}`",
    }
    remarks = ["\n".join(f"- {note}" for note in notes)] if notes else []
    return ModelCard(
        title=f"{name} without the {plan.granularity} of {layers}",
        method=method,
        numbers=numbers,
        loading=CARRIED if carries_code else STOCK,
        source=plan.model.name,
        tags=["hopscotch", "pruning"],
        notes=[*remarks, "The plan is in `fulldepth_skip.json`."],
    )


def _heldout(plan: Plan) -> str:
    """Name of the text that the losses were measured on, or else the hash of the examples."""
    heldout = plan.data.get("heldout")
    name = heldout.get("name") if isinstance(heldout, dict) else None
    known = name if isinstance(name, str) else f"examples with the hash {plan.data['hash']}"
    return one_line(known, 200).replace("|", r"\|")


def quantised_card(label: str, method: str, name: str, plan: Plan | None, logit_error: float) -> ModelCard:
    """The card of a quantised checkpoint.

    Args:
        label: of the model, such as `quantised, then skipped`.
        method: of quantisation.
        name: of the original.
        plan: skipped blocks; None = none.
        logit_error: largest difference of a logit from the measured model's, relative to the largest.
    """
    blocks = ", ".join(map(str, sorted(plan.blocks))) if plan is not None else ""
    skipped = f", without the {plan.granularity} of layers {blocks} (counted from 1)" if plan is not None else ""
    return ModelCard(
        title=f"{one_line(name, 200)}: {label}",
        method=f"`{one_line(name, 200)}` quantised by the method `{method}`{skipped}, with fulldepth.",
        numbers={"Largest difference of a logit from the measured model": f"{logit_error:.1e} of the largest logit"},
        loading=STOCK,
        source=name,
        tags=["quantized"],
    )
