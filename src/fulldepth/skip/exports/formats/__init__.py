"""Export formats."""

from contextlib import suppress

from transformers import PreTrainedModel

from fulldepth.architectures import SKIPPED
from fulldepth.core.errors import FulldepthError, unknown
from fulldepth.execution import find_anatomy
from fulldepth.hf import Anatomy, check_depth, without_layers
from fulldepth.hf.gguf import read_header
from fulldepth.hf.stock import as_stock
from fulldepth.hf.surgery import obstacle_to_removing
from fulldepth.skip.exports.fold import folding_obstacle
from fulldepth.skip.exports.formats.checkpoint import Draft, as_text, carries_code
from fulldepth.skip.exports.formats.decilm import DeciLM
from fulldepth.skip.exports.formats.fast import Fast
from fulldepth.skip.exports.formats.format import Folded, Format, Layer, misread_without
from fulldepth.skip.exports.formats.gguf import Gguf, gguf_of
from fulldepth.skip.exports.formats.gguf_layers import layers_of
from fulldepth.skip.exports.formats.mergekit import Mergekit
from fulldepth.skip.plan import Plan

FORMATS: dict[str, Format] = {
    format.name: format for format in (Folded(), Fast(), DeciLM(), Layer(), Gguf(), Mergekit())
}
"""Name -> format."""


def known_format(name: str) -> str:
    """Return the name of an export format.

    Raises:
        FulldepthError: if there is no such format.
    """
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return name


def check_format(model: PreTrainedModel, plan: Plan, format: Format, *, by_list: bool = False) -> Anatomy:
    """Refuse a format that cannot hold a plan of this model, or whose export some programs would misread.

    Args:
        model: as loaded.
        plan: of the model.
        format: of the export.
        by_list: see `ExportSettings`.

    Returns:
        The anatomy of the model that the format is written from: of a stock class, or (`folded`) of one whose
        checkpoints carry its code.

    Raises:
        FulldepthError: with the reason.
    """
    if carries_code(model) and not format.keeps_class:
        keeping = [name for name, other in FORMATS.items() if other.keeps_class]
        raise FulldepthError(
            f"The format {format.name} cannot hold this {type(model).__name__}, which no stock class computes. Use "
            f"--format {' or '.join(keeping)}."
        )
    stock = model if carries_code(model) else as_stock(model)
    if plan.kind not in format.granularities:
        raise FulldepthError(
            f"The format {format.name} holds plans of granularity {' or '.join(format.granularities)}, this one skips "
            f"by {plan.kind}.{_advice(stock, plan)}"
        )
    anatomy = find_anatomy(model)
    if anatomy.task != "causal-lm":
        raise FulldepthError(f"Only language models can be exported; {type(model).__name__} is not one.")
    check_depth(anatomy)
    if format.reader_of(stock) == "stock" and not type(stock).__module__.startswith("transformers."):
        raise FulldepthError(
            f"{type(model).__name__} is no class of transformers, which alone could read the format {format.name}: its "
            "code would be missing."
        )
    try:
        format.check(stock, plan)
    except FulldepthError as error:
        if "--format" in str(error):
            raise
        raise FulldepthError(f"{error}{_advice(stock, plan)}") from error
    stock = as_text(stock) if format.text_only else stock
    anatomy = anatomy if stock is model else find_anatomy(stock)
    if not by_list and (reason := format.misread(anatomy, plan)) is not None:
        raise FulldepthError(
            f"{reason}{_advice(stock, plan, without=format.name)} `fulldepth skip apply --format {format.name} "
            "--by-list` writes it nevertheless, for programs that read the configuration's lists."
        )
    return anatomy


def _advice(model: PreTrainedModel, plan: Plan, without: str = "") -> str:
    """A sentence on the formats that hold a plan, after a space; empty if none does.

    Args:
        model: of the class that exports are written from.
        plan: of the model.
        without: name of a format that is left out.
    """
    holding = [name for name in holding_formats(model, plan) if name != without]
    return f" Use --format {' or '.join(holding)}." if holding else ""


def holding_formats(model: PreTrainedModel, plan: Plan) -> list[str]:
    """Names of the formats that hold a plan of this model, if its scalars can be folded, and that no program misreads.

    Args:
        model: of the class that exports are written from.
        plan: of the model.
    """
    holding = []
    for name, format in FORMATS.items():
        if plan.kind in format.granularities and (format.keeps_class or not carries_code(model)):
            with suppress(FulldepthError):
                format.check(model, plan)
                if format.misread(find_anatomy(model), plan) is None:
                    holding.append(name)
    return holding


def format_for(plan: Plan, model: PreTrainedModel) -> str:
    """The format that holds a plan's model without its removed parts and that no program misreads, or `folded`."""
    if plan.kind == "layer" and FORMATS["layer"].misread(find_anatomy(as_stock(model)), plan) is None:
        return "layer"
    return "fast" if model.config.get_text_config(decoder=True).model_type in SKIPPED else "folded"


def export_obstacle(model: PreTrainedModel, granularity: str, *, fit: bool = False) -> str | None:
    """Return why exports cannot hold plans of a model, and what they can; None if nothing is known.

    What is tried is a removal in the middle layer, and with `fit` another scale of the stream.
    """
    try:
        anatomy = find_anatomy(as_stock(model))
    except FulldepthError as error:
        return f"No plan of this model can be exported. {error}"
    middle = (anatomy.num_layers + 1) // 2
    remaining = [layer for layer in anatomy.layers if layer != middle]
    obstacles = []
    if fit:
        try:
            reason = folding_obstacle(anatomy)
        except FulldepthError as error:
            reason = str(error).rstrip(".")
        if reason is not None:
            in_fast = anatomy.config.model_type in SKIPPED and Fast().keeps_scalars(anatomy.model)
            exported = "can be exported as fast only, and not be healed" if in_fast else "cannot be exported"
            obstacles.append(
                f"A plan with scalars {exported}: {reason}. Leave them out with --no-fit, and heal by `skip heal`."
            )
    if granularity == "layer":
        try:
            without_layers(anatomy, remaining)
        except FulldepthError as error:
            plans = "A plan of whole layers can be exported as folded only, with zeros in their place."
            if obstacle_to_removing(anatomy):
                plans = "Not every plan of whole layers can be exported."
            obstacles.append(f"{plans} {error}")
        else:
            reason = misread_without(anatomy, remaining)
            obstacles += [] if reason is None else [f"Not every plan of whole layers has an export. {reason}"]
    if (source := gguf_of(model)) is not None:
        without_attention = [] if granularity == "mlp" else [middle]
        without_mlp = [middle] if granularity in ("mlp", "layer") else []
        try:
            layers_of(read_header(source), without_attention, without_mlp)
        except FulldepthError as error:
            obstacles.append(f"Not every plan has a GGUF file. {error}")
    return " ".join(obstacles) or None


__all__ = [
    "FORMATS",
    "Draft",
    "Format",
    "as_stock",
    "check_format",
    "export_obstacle",
    "format_for",
    "holding_formats",
    "known_format",
]
