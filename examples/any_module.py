"""Measures a stack of modules that is no Transformer: a 9-layer MLP on handwritten digits, with and without residuals.

Without residual connections CKA calls the layers alike while cosine and layer-wise accuracy do not: features rotate
from layer to layer, which CKA does not see. With them the three agree ("Tracing Representation Progression", App. B.2).

Run it with `python examples/any_module.py`; it takes about a minute.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fulldepth.metrics import cka_matrix, cosine_matrix

LAYERS, WIDTH, CLASSES = 9, 64, 10
STEPS, BATCH = 1500, 128


class Layer(nn.Module):
    """One layer: `relu(W x)`, plus its input if `residual`."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.linear, self.residual = nn.Linear(WIDTH, WIDTH), residual

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        update = self.linear(x).relu()
        return x + update if self.residual else update


class Mlp(nn.Module):
    """Pixels, an input projection, nine layers and a linear classifier."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.project = nn.Linear(64, WIDTH)
        self.layers = nn.ModuleList(Layer(residual) for _ in range(LAYERS))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def states(self, pixels: Tensor) -> Tensor:
        """[B, 64] pixels -> [L+1, B, D] what layer 1 reads and every layer gives."""
        states = [self.project(pixels)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return torch.stack(states)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 64] pixels -> [B, 10] class scores."""
        return self.classifier(self.states(pixels)[-1])


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels and classes of 1,347 images to train on and 450 to measure."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(data.data, dtype=torch.float32)[order] / 16 - 0.3
    classes = torch.tensor(data.target)[order]
    return pixels[:1347], classes[:1347], pixels[1347:], classes[1347:]


def train(residual: bool, seed: int, steps: int = STEPS) -> Mlp:
    """A trained network; only the last layer's classification loss, as usual."""
    torch.manual_seed(seed)
    model = Mlp(residual)
    pixels, classes, _, _ = digits()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        rows = torch.randint(len(pixels), (BATCH,))
        loss = nn.functional.cross_entropy(model(pixels[rows]), classes[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


@torch.no_grad()
def measured(model: Mlp) -> dict[str, list[float]]:
    """Cosine and CKA to the last layer, and accuracy, of layers 1..L on the held-out images."""
    _, _, pixels, classes = digits()
    states = model.states(pixels)[1:]
    return {
        "cosine": cosine_matrix(states)[-1].tolist(),
        "cka": cka_matrix(states, debiased=True)[-1].tolist(),
        "accuracy": (model.classifier(states).argmax(-1) == classes).double().mean(1).tolist(),
    }


def main(seeds: int = 3, steps: int = STEPS) -> dict[bool, dict[str, Tensor]]:
    """Train and measure both networks; prints mean and standard deviation over seeds for every layer."""
    results = {}
    for residual in (False, True):
        runs = [measured(train(residual, seed, steps)) for seed in range(seeds)]
        curves = {name: torch.tensor([run[name] for run in runs]) for name in runs[0]}  # [seeds, L]
        results[residual] = curves
        print(f"\n{'With' if residual else 'Without'} residual connections ({seeds} seeds)")
        print("layer   " + "".join(f"{name:>18}" for name in curves))
        for layer in range(LAYERS):
            columns = (values[:, layer] for values in curves.values())
            print(f"{layer + 1:5}   " + "".join(f"{v.mean():11.3f} ± {v.std(correction=0):.2f} " for v in columns))
    return results


if __name__ == "__main__":
    main()
