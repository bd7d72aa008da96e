"""Colours and labels, checked from outside: CIELAB, colour blindness, hostile text."""

from __future__ import annotations

import unicodedata

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulldepth.reporting.style import (
    ABOVE,
    BELOW,
    CATEGORICAL,
    DARK,
    OPPOSITE,
    PAPER,
    SEQUENTIAL,
    axis,
    figure,
    label,
    layer_axis,
)

TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)
VISION = {  # Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def cielab(rgb):
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("page", ["light", "dark"])
def test_line_colours_differ_for_every_eye(page, vision):
    colours = CATEGORICAL if page == "light" else [DARK[colour] for colour in CATEGORICAL]
    seen = [cielab(VISION[vision] @ linear(colour)) for colour in colours]
    distances = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(distances) > 17


@pytest.mark.parametrize("ramp", [SEQUENTIAL, OPPOSITE, ABOVE, BELOW], ids=["sequential", "opposite", "above", "below"])
@pytest.mark.parametrize("page", ["light", "dark"])
def test_scales_step_evenly_in_lightness(page, ramp):
    colours = ramp if page == "light" else [DARK[colour] for colour in ramp]
    lightness = np.array([cielab(linear(colour))[0] for colour in colours])
    steps = np.diff(lightness)
    assert (np.sign(steps) == (-1 if page == "light" else 1)).all()
    assert np.abs(steps).max() < 1.25 * np.abs(steps).min()
    assert abs(lightness[0] - cielab(linear(PAPER if page == "light" else DARK[PAPER]))[0]) < 12


def test_every_colour_has_one_dark_counterpart():
    assert len(set(DARK.values())) == len(DARK)
    assert {*CATEGORICAL, *SEQUENTIAL, *OPPOSITE, *ABOVE, *BELOW} <= set(DARK)


@given(st.text())
def test_labels_are_text_and_short(text):
    shown = label(text)
    assert not set(shown) & set("<>{")
    assert len(shown) <= 48 * len("&#123;")
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_labels_show_markup_as_it_is_written():
    assert label("<b>a & b</b> %{x}") == "&lt;b&gt;a &amp; b&lt;/b&gt; %&#123;x}"
    assert label("a\u202eb\x00c") == "a\ufffdb\ufffdc"
    assert label("y" * 1_000_000) == "y" * 47 + "…"


@pytest.mark.parametrize("layers", [1, 6, 13, 28, 126])
def test_layer_ticks_are_few_whole_and_end_at_the_last_layer(layers):
    axis = layer_axis(layers)
    assert len(axis["tickvals"]) <= 14
    assert axis["tickvals"][0] >= 1
    assert layers - axis["tickvals"][-1] <= layers / 12


def test_the_alternative_text_has_the_unit_of_the_ticks():
    """Shares have a format, jump rates a suffix."""
    curve = go.Scatter(name="Jump rate", x=[1, 2], y=[0.25, 22.71])
    alt = figure([curve], xaxis=layer_axis(2), yaxis={"ticksuffix": " %"}).layout.meta["alt"]
    assert alt == "Jump rate: 0.25 % at layer 1 to 22.7 % at layer 2."


def test_the_alternative_text_says_where_a_curve_is_lowest_and_highest():
    def told(y):
        traces = [go.Scatter(x=[0, 1, 2], y=y, name="Cosine")]
        return figure(traces, xaxis=layer_axis(2, 0), yaxis={}).layout.meta["alt"]

    assert told([-0.5, None, 0.25]) == "Cosine: −0.5 at layer 0 to 0.25 at layer 2."
    assert told([None, 3, None]) == "Cosine: 3 at layer 1."


@pytest.mark.parametrize(
    ("xaxis", "places", "told"),
    [
        (layer_axis(30, relative=True), [1 / 30, 1.0], "3% to −2 at relative depth 100%"),
        (layer_axis(30), [0, 30], "layer 0 to −2 at layer 30"),
        (axis("Step", unifiedhovertitle={"text": "Step %{x:,}"}), [1, 1_234_567], "step 1 to −2 at step 1,234,567"),
        (axis("Speed-up"), [1.03456789, 2.0], "speed-up 1.035 to −2 at speed-up 2"),
    ],
)
def test_places_in_words_are_rounded_for_people(xaxis, places, told):
    drawn = figure([go.Scatter(x=places, y=[-3.0, -2.0], name="a")], xaxis=xaxis, yaxis=axis("Loss"))
    assert drawn.layout.meta["alt"].endswith(f"{told}.")


@pytest.mark.parametrize("curves", [12, 80])
def test_the_alternative_text_covers_every_curve(curves):
    traces = [go.Scatter(x=[0, 1], y=[number, -number], name=f"Curve {number}") for number in range(curves)]
    *each, others = figure(traces, xaxis=layer_axis(1, 0), yaxis={}).layout.meta["alt"].split("Curve 4")
    assert each[0].endswith("Curve 3: −3 at layer 1 to 3 at layer 0. ")
    named = "".join(f", Curve {number}" for number in range(5, curves)) if curves == 12 else " to Curve 79 (76 curves)"
    assert others == f"{named}: between −{curves - 1} and {curves - 1}."
