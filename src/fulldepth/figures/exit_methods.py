"""How the figures of early exit are made: speed-up, rules and thresholds."""

from __future__ import annotations

from fulldepth.figures.record import Method

SPEEDUP = Method(
    "Speed-up of early exit",
    (),
    (
        "In theory, time is proportional to the layers that are run: m<sub>i</sub> samples or tokens leave after layer "
        "i of L. While a text is generated, later tokens need the layers that earlier ones left out, so there theory "
        "counts the layer positions that were computed, prompts included. What is measured is the time of the full "
        "model over the time with early exit, on the same data in interleaved rounds: the median of the rounds’ "
        "ratios, and a difference only where its 95 % interval does not hold 1. It includes what the rule itself "
        "costs: a final norm and a product with the head for each layer at which it decides. Of a detector only the "
        "layers of the decoder can be saved: backbone and encoder run for every image, so its theory counts "
        "floating-point operations instead of layers."
    ),
    formula=r"\frac{∑_i L m_i}{∑_i i m_i}",
    source="Jiang et al., <cite>Tracing Representation Progression</cite>, Sec. 5.",
)
RULES = Method(
    "Rules and thresholds",
    (),
    (
        "Confidence: the probability of the top prediction exceeds the threshold. Margin: its lead over the second "
        "does. Entropy: one minus the entropy of the prediction over its maximum does. Patience: the number of layers "
        "in a row with the same top prediction, divided by L, does. A detector’s image has the mean of these values "
        "over its queries, with “no object” as a class; for patience all queries keep their class. At threshold 1 "
        "every sample takes all layers. A threshold for a target accuracy is chosen on one part of the data (divided "
        "by the hash of each document, row or image) and reported on the other."
    ),
)
