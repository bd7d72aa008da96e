"""The curves over depth that are followed through training and compared between models, one line each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from fulldepth.figures.rows import Curve, curve, select
from fulldepth.figures.style import label

SHARE = {"range": [0, 1.04], "tickformat": ".0%"}
ZERO = {"rangemode": "tozero"}


@dataclass(frozen=True)
class Quantity:
    """Where a curve over layers stands in the table, and how it is shown."""

    name: str
    measure: str
    statistic: str
    title: str
    axis: str
    """Title of the value axis, with the unit."""
    site: str = "residual"
    form: str = ".4f"
    """d3 number format of hover boxes."""
    settings: dict[str, Any] = field(default_factory=lambda: ZERO)
    """Of the value axis."""
    to_last: bool = False
    """Whether the rows are pairs, of which those with the last layer are meant."""
    variant: str = ""
    """Which reading this is, where several share a figure's name."""

    def curve(self, table: pd.DataFrame, layers: int, column: str = "value") -> Curve:
        """The curve of a table of one model at one step."""
        return curve(table, self.measure, self.statistic, self.site, layers if self.to_last else None, column)


FIXED = (
    Quantity("displacement", "displacement", "mean", "Displacement", "Displacement Ψ"),
    Quantity(
        "jump_rate", "jump_rate", "value", "Jump rate", "ζ (%)", form=".2f", settings={**ZERO, "ticksuffix": " %"}
    ),
    Quantity(
        "cosine_to_last",
        "cosine",
        "mean",
        "Cosine similarity to the last layer",
        "Cosine",
        to_last=True,
        settings={"range": [-1.04, 1.04]},
    ),
    Quantity(
        "lens_accuracy",
        "lens_accuracy",
        "mean",
        "Accuracy",
        "Accuracy",
        form=".2%",
        settings={**ZERO, "tickformat": ".0%"},
    ),
    Quantity("lens_loss", "lens_loss", "mean", "Loss", "Loss (nats)"),
    Quantity(
        "saturation",
        "saturation",
        "cumulative",
        "Settled predictions",
        "Share of positions",
        form=".1%",
        settings=SHARE,
    ),
    Quantity(
        "coherence", "coherence", "mean", "Coherence", "Coherence", settings={"range": [0, 1.04]}, variant="Whole layer"
    ),
    Quantity(
        "coherence:attention",
        "coherence",
        "mean",
        "Coherence",
        "Coherence",
        site="attention",
        settings={"range": [0, 1.04]},
        variant="Attention sub-layer",
    ),
    Quantity("norm_ratio", "norm_ratio", "mean", "Residual dominance", "‖h‖ / ‖update‖", form=".3f"),
    Quantity("nc1", "nc1", "value", "Class collapse (NC1)", "NC1", form=".3~g", settings={"type": "log"}),
    Quantity("separability", "separability", "mean", "Linear separability", "Accuracy", form=".1%", settings=SHARE),
    Quantity(
        "expected_retrieval", "expected_retrieval", "value", "Expected retrieved state", "State m", site="routing"
    ),
    Quantity("mmd", "mmd", "value", "Distance from the reference model", "MMD²", form=".4~g"),
)
SITES = {"residual": "residual stream", "value": "value states"}


def quantities(table: pd.DataFrame) -> list[Quantity]:
    """`FIXED` and one quantity for each entropy and each projection that the table knows."""
    found = list(FIXED)
    entropies = select(table, "renyi_entropy")[["statistic", "site"]].drop_duplicates()
    for statistic, site in entropies.itertuples(index=False):
        parts = str(statistic).split(":")
        if len(parts) == 3 and parts[0] == "mean" and site in SITES:
            reading = f"{SITES[site].capitalize()}, {label(parts[1], 24)}, α = {label(parts[2], 8)}"
            found.append(
                Quantity(
                    f"renyi_entropy:{site}:{parts[1]}:{parts[2]}",
                    "renyi_entropy",
                    statistic,
                    "Matrix entropy",
                    "Entropy (nats)",
                    site=site,
                    variant=reading,
                )
            )
    norms = select(table, "spectral_norm")
    for site, statistic in norms[norms["statistic"] != "max"][["site", "statistic"]].dropna().drop_duplicates().values:
        found.append(
            Quantity(
                f"spectral_norm:{site}",
                "spectral_norm",
                statistic,
                "Spectral norm",
                "‖W‖₂",
                site=site,
                form=".3f",
                variant=label(site, 36) + (", mean of experts" if statistic == "mean" else ""),
            )
        )
    return found
