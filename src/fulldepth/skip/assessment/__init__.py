"""Assessment of plans: time and memory, the curve, quantisation, changes inside the model."""
