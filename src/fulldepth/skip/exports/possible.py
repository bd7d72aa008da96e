"""Checks which formats can hold a plan: for `export`, and for searches before they start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.hf import Anatomy
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.exports.fold import check_scalable, heals
from fulldepth.skip.exports.formats import FORMATS, Format, as_stock, as_text
from fulldepth.skip.plan import Plan


@dataclass(frozen=True)
class Outline:
    """The properties of a plan that decide which formats can hold it; known before a search runs."""

    granularity: str
    blocks: int
    """Number of skipped blocks."""
    healed: bool
    """Whether there are scalars other than 1."""
    per_channel: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The outline of a plan."""
        values = [value for own in plan.scalars.values() for value in own.values()]
        per_channel = any(isinstance(value, list) for value in values)
        return cls(plan.granularity, len(plan.blocks), heals(plan), per_channel)

    @classmethod
    def before(cls, settings: SearchSettings, blocks: int) -> Self:
        """The outline of the plan that a search will find."""
        return cls(settings.granularity, blocks, settings.fit, settings.per_channel)


def check_format(model: PreTrainedModel, outline: Outline, format: Format) -> Anatomy:
    """Refuse a format that cannot hold a plan of this model, regardless of its scalars.

    Returns:
        The anatomy of the stock model that the format is written from.

    Raises:
        FulldepthError: with the reason.
    """
    if outline.granularity not in format.granularities:
        fitting = [name for name, other in FORMATS.items() if outline.granularity in other.granularities]
        raise FulldepthError(
            f"The format {format.name} holds plans of granularity {' or '.join(format.granularities)}, this one skips "
            f"by {outline.granularity}. Use --format {' or '.join(fitting)}."
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
    format.check(stock, outline.blocks)
    stock = as_text(stock) if format.text_only else stock
    return anatomy if stock is model else find_anatomy(stock)


def check_scalars(anatomy: Anatomy, outline: Outline, format: Format) -> None:
    """Refuse a format that cannot hold scalars of this model, regardless of their values.

    Raises:
        FulldepthError: with the reason.
    """
    if outline.healed and (outline.per_channel or not format.keeps_scalars(anatomy.model)):
        check_scalable(anatomy, per_channel=outline.per_channel)


def possible_formats(model: PreTrainedModel, outline: Outline) -> tuple[list[str], dict[str, str]]:
    """The formats that can hold a plan, and the reason for every other format of its granularity.

    Reasons that depend on the scalars' values (a factor of the stream at 0 or below) are known only after the fit.
    """
    fitting, reasons = [], {}
    for name, format in FORMATS.items():
        if outline.granularity not in format.granularities:
            continue
        try:
            anatomy = check_format(model, outline, format)
            check_scalars(anatomy, outline, format)
            fitting.append(name)
        except FulldepthError as error:
            reasons[name] = str(error)
    return fitting, reasons


def announce(model: PreTrainedModel, settings: SearchSettings, blocks: int) -> str:
    """A sentence on the formats of the plan that a search will find.

    Raises:
        FulldepthError: if `settings.format` is not among them.
    """
    outline = Outline.before(settings, blocks)
    if settings.format is not None:
        format = FORMATS[settings.format]
        check_scalars(check_format(model, outline, format), outline, format)
    fitting, reasons = possible_formats(model, outline)
    distinct = {reason: [name for name in reasons if reasons[name] == reason] for reason in reasons.values()}
    reason_text = " ".join(f"Not {' or '.join(names)}: {reason}" for reason, names in distinct.items())
    first = f"The plan can be exported as {', '.join(fitting)}." if fitting else "The plan cannot be exported."
    return f"{first} {reason_text}".strip()
