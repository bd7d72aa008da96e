"""Thresholds at which sentences and figures call a number large or small; the angle of a displacement."""

import math

LARGE_JUMP = 10.0
"""Jump rate in per cent from which a jump is large. Source: "JREG: final-layer jumps"."""
COPY = 0.7
NOISE = 0.3
"""Mean coherence above which a sub-layer mostly copies its input, and below which its output is mostly noise."""
IDLE = 0.02
"""Mean displacement below which a layer is said to do little: an angle of 16.3 degrees."""
FEEDS = 0.1
"""Mean relative change of later updates, at later tokens, above which a layer is said to feed later computation."""
BUSY = 0.1
"""Largest share of the machine's processor time that other programs may use for times and memory to be compared."""


def degrees(displacement: float) -> float:
    r"""Angle of a displacement, in degrees: 16.3 for 0.02, 90 for 0.5.

    .. math:: \theta = \frac{180}{\pi} \arccos(1 - 2 \Psi)

    A displacement grows with the square of a small angle, so ratios of displacements are no ratios of angles. Of a mean
    displacement it is the angle whose cosine is the mean cosine, which is not the mean of the angles.

    Args:
        displacement: in [0, 1], see `fulldepth.metrics.displacement`.
    """
    return math.degrees(math.acos(1 - 2 * displacement))
