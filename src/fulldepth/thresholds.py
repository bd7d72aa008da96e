"""Thresholds above or below which sentences and figures call a number large or small."""

LARGE_JUMP = 10.0
"""Jump rate in per cent from which a jump is large. Source: "JREG: final-layer jumps"."""
COPY, NOISE = 0.7, 0.3
"""Mean coherence above which a sub-layer mostly copies its input, and below which its output is mostly noise."""
IDLE = 0.02
"""Mean displacement below which a layer is said to do little: it turns the stream by less than about 16 degrees."""
BUSY = 0.1
"""Largest share of the machine's processor time that other programs may use for times and memory to be compared."""
