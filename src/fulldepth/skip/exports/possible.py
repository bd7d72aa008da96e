"""Checks which formats can hold a plan: for `export`, and for searches before they start."""

from __future__ import annotations

from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.hf import Anatomy
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.exports.fold import check_scalable
from fulldepth.skip.exports.formats import FORMATS, Format, as_stock, as_text, known_format


def check_format(model: PreTrainedModel, granularity: str, skipped: int, format: Format) -> Anatomy:
    """Refuse a format that cannot hold a plan of this model, by its granularity and number of skipped blocks.

    Returns:
        The anatomy of the stock model that the format is written from.

    Raises:
        FulldepthError: with the reason.
    """
    if granularity not in format.granularities:
        fitting = [name for name, other in FORMATS.items() if granularity in other.granularities]
        raise FulldepthError(
            f"The format {format.name} holds plans of granularity {' or '.join(format.granularities)}, this one skips "
            f"by {granularity}. Use --format {' or '.join(fitting)}."
        )
    anatomy = find_anatomy(model)
    if anatomy.task != "causal-lm":
        raise FulldepthError(f"Only language models can be exported; {type(model).__name__} is not one.")
    stock = as_stock(model)
    if format.reader == "stock" and not type(stock).__module__.startswith("transformers."):
        raise FulldepthError(
            f"{type(model).__name__} is no class of transformers, which alone could read the format {format.name}: its "
            "code would be missing."
        )
    format.check(stock, skipped)
    stock = as_text(stock) if format.text_only else stock
    return anatomy if stock is model else find_anatomy(stock)


def possible_formats(
    model: PreTrainedModel, granularity: str, skipped: int, healed: bool
) -> tuple[list[str], dict[str, str]]:
    """The formats that can hold a plan, and the reason for every other format.

    Args:
        model: the model.
        granularity: of the plan.
        skipped: number of blocks that it skips.
        healed: whether it has scalars other than 1.

    Reasons that depend on the scalars' values (a factor of the stream at 0 or below) are known only after the fit.
    """
    fitting, reasons = [], {}
    for name, format in FORMATS.items():
        try:
            stock = check_format(model, granularity, skipped, format)
            if healed and not format.keeps_scalars(stock.model):
                check_scalable(stock)
            fitting.append(name)
        except FulldepthError as error:
            reasons[name] = str(error)
    return fitting, reasons


def announce(model: PreTrainedModel, settings: SearchSettings, blocks: int) -> str:
    """A sentence on the formats of the plan that a search will find.

    Raises:
        FulldepthError: if `settings.format` is not among them.
    """
    fitting, reasons = possible_formats(model, settings.granularity, blocks, settings.fit)
    if settings.format is not None and (reason := reasons.get(known_format(settings.format))) is not None:
        raise FulldepthError(reason)
    distinct: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if settings.granularity in FORMATS[name].granularities:
            distinct.setdefault(reason, []).append(name)
    first = f"The plan can be exported as {', '.join(fitting)}." if fitting else "The plan cannot be exported."
    return " ".join([first, *(f"Not {' or '.join(names)}: {reason}" for reason, names in distinct.items())])
