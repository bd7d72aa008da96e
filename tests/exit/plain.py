"""Early exit written again for one sample at a time, from stock hidden states: the oracle of the sweeps."""

from __future__ import annotations

import math


def softmax(logits):
    top = max(logits)
    parts = [math.exp(value - top) for value in logits]
    return [part / sum(parts) for part in parts]


def certainty(logits, rule):
    probabilities = sorted(softmax(logits), reverse=True)
    if rule == "confidence":
        return probabilities[0]
    if rule == "margin":
        return probabilities[0] - probabilities[1]
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    return 1 - entropy / math.log(len(probabilities))


def leave(layers, rule, threshold, min_layer):
    """The layer, from 1, after which a sample leaves, given its logits at layers 1..L."""
    predictions = [row.index(max(row)) for row in layers]
    last = len(layers)
    if threshold == 1:
        return last
    for layer in range(min_layer, last):
        if rule == "patience":
            run = 1
            while layer - run >= min_layer and predictions[layer - run - 1] == predictions[layer - 1]:
                run += 1
            if run / last > threshold:
                return layer
        elif certainty(layers[layer - 1], rule) > threshold:
            return layer
    return last


def row(samples, targets, rule, threshold, min_layer):
    """Exits, accuracy, loss, agreement and speed-up of samples, each a list of logits at layers 1..L."""
    last = len(samples[0])
    layers = [leave(sample, rule, threshold, min_layer) for sample in samples]
    logits = [sample[layer - 1] for sample, layer in zip(samples, layers, strict=True)]
    predicted = [row.index(max(row)) for row in logits]
    full = [sample[-1].index(max(sample[-1])) for sample in samples]
    losses = [-math.log(softmax(row)[target]) for row, target in zip(logits, targets, strict=True)]
    count = len(samples)
    return {
        "exits": [layers.count(layer) for layer in range(1, last + 1)],
        "accuracy": sum(p == t for p, t in zip(predicted, targets, strict=True)) / count,
        "loss": sum(losses) / count,
        "agreement": sum(p == f for p, f in zip(predicted, full, strict=True)) / count,
        "theoretical_speedup": last * count / sum(layers),
    }
