"""Sentences of the documentation on what layers cause, from the numbers in `docs/gallery/causes.json`."""

from __future__ import annotations

from json_files import read_json
from places import ROOT


def sentences_on_causes():
    """What the tutorial says of removed layers and of the linear lens."""
    known = read_json(ROOT / "docs" / "gallery" / "causes.json")["smollm2"]
    effects = known["effects"]
    later, added, now, future = (
        {int(layer): values for layer, values in effects[name].items()}
        for name in ("later_future", "loss_added", "divergence_all", "divergence_future")
    )
    assert min(added, key=lambda layer: added[layer][0]) == 18
    assert future[29][0] < 0.01 * now[29][0]
    changes = ["{:.1f} ± {:.1f} %".format(*(100 * part for part in later[layer])) for layer in (1, 2, 29)]
    costs = ["{:.2f} ± {:.2f}".format(*added[layer]) for layer in (29, 18)]
    gain = "{:.1f} ± {:.1f}".format(*(100 * part for part in known["gain"]))
    return [
        f"Without layer 1, what later layers add at later tokens changes by {changes[0]}; without layer 2 by "
        f"{changes[1]}, without layer 29 by {changes[2]}.",
        f"Removing layer 29 adds {costs[0]} nats, nearly all of it at the token where the layer is missing. Layer 18 "
        f"adds least in this sample, {costs[1]} nats.",
        f"layers in the first half are right in {gain} % more of the tokens",
    ]
