"""The model card of an export."""

from __future__ import annotations

from collections.abc import Sequence

from fulldepth.errors import one_line
from fulldepth.hf import ModelCard
from fulldepth.skip.exports.formats import Format
from fulldepth.skip.plan import Plan
from fulldepth.skip.summary import in_sample

STOCK = """\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH")"""
CARRIED = """\
from fulldepth.skip import load

model = load("PATH")

# Without fulldepth, run the code that the checkpoint carries:
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)"""


def card_of(plan: Plan, format: Format, logit_error: float, parameters: int, notes: Sequence[str]) -> ModelCard:
    """The card of an export: what was removed, held-out losses, how far the logits are from the plan's."""
    name, blocks = one_line(plan.model.name, 200), ", ".join(map(str, sorted(plan.blocks)))
    title = f"{name} without the {plan.granularity} of layer{'s' * (len(plan.blocks) > 1)} {blocks}"
    scalars = "" if plan.healed_loss is None else ", and scalars fitted on the remaining blocks compensate for them"
    losses = {"Held-out loss of the original": plan.losses[0], "without the blocks": plan.losses[-1]}
    if plan.healed_loss is not None:
        losses["without the blocks, with scalars"] = plan.healed_loss
    numbers = {key: f"{loss:.4f} nats a token" for key, loss in losses.items()}
    heldout = plan.data.get("heldout")
    text = heldout.get("name") if isinstance(heldout, dict) else None
    shown = text if isinstance(text, str) else f"examples with the hash {plan.data['hash']}"
    numbers["Held-out text"] = one_line(shown, 200).replace("|", r"\|")
    numbers |= {"In-sample": sentence} if (sentence := in_sample(plan)) else {}
    return ModelCard(
        title=title,
        method=f"{title} (layers are counted from 1). The blocks were chosen by {plan.search} search with the "
        f"criterion {plan.criterion}{scalars}: [Hopscotch](https://arxiv.org/abs/2506.03303), with fulldepth.",
        numbers=numbers
        | {
            "Parameters": f"{parameters:,}",
            "Largest difference of a logit from the plan's model": f"{logit_error:.1e} of the largest logit",
            "Format": f"`{format.name}`",
        },
        loading=CARRIED if format.reader == "carried" else STOCK,
        source=plan.model.name,
        tags=["hopscotch", "pruning"],
        notes=["\n".join(f"- {note}" for note in notes)],
    )


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
