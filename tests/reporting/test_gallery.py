"""The gallery's table and the reference values are those of the result folders that its pages show."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pandas as pd
import pytest

from fulldepth.reporting import reference

DOCS = Path(__file__).parents[2] / "docs"
NAMES = {"smollm2": "SmolLM2-135M-Instruct", "gemma": "Gemma 3 270M", "minilm": "MiniLM-L6"}


def numbers(name):
    """Findings, displacement and number of idle layers of a gallery folder, read without fulldepth."""
    folder = DOCS / "gallery" / name
    findings = json.loads((folder / "results.json").read_text())["headline"]
    table = pd.read_parquet(folder / "results.parquet").query("measure == 'displacement' and site == 'residual'")
    by_layer = table.pivot(index="layer", columns="statistic", values="value").sort_index()
    clearly_idle = int((by_layer["mean"] + 2 * by_layer["standard_error"] < 0.02).sum())
    keys = ["zeta_L", "zeta_L-1", "zeta_L-2", "last_layer_displacement", "mean_coherence"]
    found = {key: (findings[key]["value"], findings[key]["standard_error"]) for key in keys}
    whole = {key: findings[key]["value"] for key in ("median_saturation", "effective_depth") if key in findings}
    return found, whole, by_layer["mean"].tolist(), clearly_idle


@pytest.mark.parametrize("name", NAMES)
def test_the_gallerys_table_is_the_results(name):
    found, whole, displacement, _ = numbers(name)
    rows = [line for line in (DOCS / "gallery.md").read_text().splitlines() if line.startswith(f"| {NAMES[name]}, ")]
    (cells,) = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if "| built-in |" in row]
    assert cells[0] == f"{NAMES[name]}, {len(displacement)}"
    digits = {"last_layer_displacement": 4, "mean_coherence": 4}
    shown = [f"{v:.{digits.get(k, 2)}f} ± {e:.{digits.get(k, 2)}f}" for k, (v, e) in found.items()]
    assert cells[2:6] == shown[:4]
    assert cells[6] == f"{median(displacement[:-1]):.3f}"
    assert cells[7] == shown[4]
    assert cells[8:] == ([f"{value:.0f}" for value in whole.values()] or ["-", "-"])


@pytest.mark.parametrize("name", NAMES)
def test_reference_values_are_the_results(name):
    found, _, displacement, clearly_idle = numbers(name)
    layers = len(displacement)
    rows = {
        row.measure: row.value
        for row in reference.references()
        if row.source == "docs/gallery.md" and row.layers == layers
    }
    assert rows.keys() >= {"zeta_L", "zeta_L-1", "zeta_L-2", "idle_share", "last_over_median", "mean_coherence"}
    for key in ("zeta_L", "zeta_L-1", "zeta_L-2", "mean_coherence"):
        assert rows[key] == pytest.approx(found[key][0], rel=1e-3)
    assert rows["idle_share"] == pytest.approx(clearly_idle / layers, rel=1e-3)
    assert rows["last_over_median"] == pytest.approx(displacement[-1] / median(displacement[:-1]), rel=1e-3)
