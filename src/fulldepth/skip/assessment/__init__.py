"""What it costs and wins: time and memory, the curve, quantisation, what changed inside the model."""
