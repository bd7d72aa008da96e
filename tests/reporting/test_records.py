"""One record makes a figure: it is drawn, has its place on the page, and its note on how to read it."""

from __future__ import annotations

import re
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from fulldepth import figures
from fulldepth.figures import record
from fulldepth.figures.record import (
    COMPARISON,
    EVALUATION,
    EVALUATIONS,
    EXIT,
    EXITS,
    GENERATION,
    SERIES,
    SINGLE,
    SKIP,
    TRAINING,
    TRAININGS,
    Figure,
    Method,
    Quantity,
)
from fulldepth.figures.style import figure
from fulldepth.reporting import kinds, render, sections
from fulldepth.reporting.payload import payload
from fulldepth.reporting.tables import Table


def drawing(source):
    """A dot whose height is the number of layers."""
    return figure([go.Scatter(x=[0], y=[source.layers])], alt="One dot.", xaxis={}, yaxis={})


FAKE = Figure(
    "fake",
    "geometry",
    drawing,
    title="A fake figure",
    subtitle="Higher is deeper",
    methods=(Method("A fake number", ("displacement",), "Counts layers.", formula="L", source="Nobody."),),
    curves=(Quantity("displacement", "mean", "Fake", "Fake (1)"),),
    followed=True,
)


EMPTY = Table("Nothing", [], [])


@pytest.fixture
def fake(monkeypatch):
    """The record among the others: in the one place that figures and pages read."""
    monkeypatch.setattr(figures, "FIGURES", (*figures.FIGURES, FAKE))


def where(page, name):
    return [section["id"] for section in page["sections"] if any(name in slot for slot in section["slots"])]


@pytest.mark.usefixtures("fake")
def test_one_record_is_a_figure_a_place_and_a_note(synthetic):
    results = synthetic.language_model(layers=12)
    drawn = results.figures()["fake"]
    assert drawn.data[0].y == (12,)
    page = payload(results)
    assert where(page, "fake") == ["geometry"]
    about = page["figures"]["fake"]["about"]
    assert (about["title"], about["subtitle"]) == ("A fake figure", "Higher is deeper")
    (note,) = re.findall(r'<details class="method"[^>]*><summary>A fake number.*?</details>', render(results), re.S)
    assert 'data-measures="displacement"' in note
    assert '<math display="block"><mi>L</mi></math>' in note
    assert "<p>Counts layers.</p>" in note
    assert '<p class="source">Nobody.</p>' in note


@pytest.mark.usefixtures("fake")
def test_its_curves_are_compared_and_followed(synthetic):
    compared, followed = payload(synthetic.comparison()), payload(synthetic.series())
    assert where(compared, "fake") == where(compared, "difference_fake") == ["geometry"]
    assert where(followed, "fake") == ["geometry"]
    assert where(followed, "steps_fake") == ["training"]
    one, other = (synthetic.comparison().figures()[name] for name in ("fake", "displacement"))
    assert [trace.y for trace in one.data] == [trace.y for trace in other.data]
    assert "fake" not in synthetic.training_comparison().figures()


EVERY = [SINGLE, SERIES, COMPARISON, TRAINING, TRAININGS, SKIP, EXIT, EXITS, GENERATION, EVALUATION, EVALUATIONS]


@pytest.mark.parametrize("kind", EVERY)
def test_every_figure_of_a_kind_has_a_name_of_its_own_and_a_section_that_is_there(kind):
    records = figures.records(kind)
    names = [record.name for record in records]
    assert len(set(names)) == len(names)
    known = {section.id for section in (*kinds.PAGES[kind].sections, sections.OVER_TRAINING)}
    assert {record.name for record in records if record.section not in known} <= {
        name for name in names if kind == TRAINING and name.startswith("steps_")
    }


def test_one_page_kind_is_a_page(synthetic, monkeypatch):
    """A verb of its own kind: figures by one record, everything around them by one `PageKind`."""
    monkeypatch.setitem(record.VERBS, "fake", "fake")
    monkeypatch.setattr(figures, "FIGURES", (*figures.FIGURES, replace(FAKE, section="depth", kinds=("fake",))))
    page = kinds.PageKind(
        "Fake report",
        byline=lambda source: f"{source.layers} layers",
        about=lambda source: [("Kind", source.kind), ("Unknown", "")],
        tables=lambda source: {"depth": [Table("Rows", ["Count"], [["all", str(len(source.table))]]), EMPTY]},
        sections=(sections.Section("depth", "Depth"),),
    )
    monkeypatch.setitem(kinds.PAGES, "fake", page)
    results = synthetic.language_model(layers=12)
    results.meta |= {"kind": "fake", "warnings": ["Mind."], "left_out": [{"measure": "a", "reason": "b"}]}
    made = payload(results)
    assert list(made["figures"]) == ["fake"]
    assert (made["kind"], made["kind_name"], made["byline"]) == ("fake", "Fake report", "12 layers")
    assert made["about"] == [["Kind", "fake"]]
    assert (made["warnings"], made["left_out"]) == (["Mind."], [["a", "b"]])
    (section,) = made["sections"]
    assert (section["title"], section["slots"]) == ("Depth", [["fake"]])
    assert [table["rows"] for table in section["tables"]] == [[["all", str(len(results.table))]]]
    view = made
    headline = list(results.meta["headline"].values())
    assert [*view["sentences"], *view["more_sentences"]] == [entry["sentence"] for entry in headline]
    assert len(view["cards"]) == len(headline)
