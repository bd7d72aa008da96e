"""Formulas of the notes: MathML by hand, and well-formed in every note."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from fulldepth import figures
from fulldepth.figures.formulas import mathml


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("Ψ_l = 1", "<msub><mi>Ψ</mi><mi>l</mi></msub><mo>=</mo><mn>1</mn>"),
        (r"\frac{a + b}{2}", "<mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mn>2</mn></mfrac>"),
        ("∑_i^L x", "<munderover><mo>∑</mo><mi>i</mi><mi>L</mi></munderover><mi>x</mi>"),
        ("h^L_n", "<msubsup><mi>h</mi><mi>n</mi><mi>L</mi></msubsup>"),
        (r"\bar{Ψ}_k", "<msub><mover><mi>Ψ</mi><mo>¯</mo></mover><mi>k</mi></msub>"),
        ('t_"export"', "<msub><mi>t</mi><mtext>export</mtext></msub>"),
        (r"\{x < n\}", "<mo>{</mo><mi>x</mi><mo>&lt;</mo><mi>n</mi><mo>}</mo>"),
        (r"E \thin k", '<mi>E</mi><mspace width="0.1em"></mspace><mi>k</mi>'),
    ],
)
def test_signs_scripts_and_groups(formula, expected):
    assert mathml(formula) == expected


def test_every_note_is_well_formed():
    for note in {note for record in figures.FIGURES for note in record.methods if note.formula}:
        root = ElementTree.fromstring(f"<math>{mathml(note.formula)}</math>")
        assert {"_", "^", "\\"}.isdisjoint("".join(root.itertext())), note.title
