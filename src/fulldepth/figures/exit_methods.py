"""How the figures of early exit are made: speed-up, rules and thresholds."""

from __future__ import annotations

from fulldepth.figures.record import Method

SPEEDUP = Method(
    "Speed-up of early exit",
    (),
    (
        "In theory, time is proportional to the layers that are run: m<sub>i</sub> samples or tokens leave after layer "
        "i of L. What is measured is the time of the full model over the time with early exit, on the same data in "
        "the same run, so it includes what the rule itself costs: a final norm and a product with the head for each "
        "layer at which it decides. Of a detector only the layers of the decoder can be saved: backbone and encoder "
        "run for every image, so its theory counts floating-point operations instead of layers."
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
        "every sample takes all layers. A "
        "threshold that was chosen for a target accuracy was chosen on other data than its numbers are of."
    ),
)
