"""How results are shown: one line, the page; and one value per layer."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest

from fulldepth import reporting
from fulldepth.results import PAGE, Results, tabulate
from fulldepth.results import folder as results_folder
from refusals import refused

DEPTH = 4


def measured(name="model <a>", scale=1.0, **more):
    """Displacements by layer at two sites, and cosines of every pair of layers."""
    rows = [("displacement", "residual", k, None, "mean", scale * 0.1 / k, 9, "1") for k in range(1, DEPTH + 1)]
    rows += [("displacement", "final_normed", DEPTH, None, "mean", 0.5, 9, "1")]
    rows += [("cosine", "residual", i, j, "mean", i * j / 20, 9, "1") for i in range(DEPTH + 1) for j in range(i)]
    sentence = "The last layer <b>turns</b> the stream."
    headline = {"zeta_L": {"value": 7.5, "unit": "%", "sentence": sentence}}
    meta = {"kind": "measure", "model": {"name": name, "num_layers": DEPTH}, "data": {"name": "text.txt"}}
    return Results(tabulate(rows, **more), meta | {"headline": headline})


def series():
    parts = [measured(scale=scale).table.assign(step=step) for step, scale in ((10, 1.0), (20, 2.0))]
    return Results(pd.concat(parts, ignore_index=True), measured().meta)


def test_values_are_those_of_the_table():
    results = measured()
    rows = results.table
    plain = rows.query("measure == 'displacement' and statistic == 'mean' and site == 'residual'")
    found = results.values("displacement", "mean", "residual")
    assert found.to_dict() == dict(zip(plain.layer, plain.value, strict=True))
    column = rows.query("measure == 'cosine' and other == 1")
    assert results.values("cosine", "mean", other=1).tolist() == column.value.tolist()
    at_step = series().values("displacement", "mean", "residual", step=20)
    assert at_step.tolist() == [2 * value for value in found]


def test_values_of_a_whole_model_are_by_step_or_by_removed_blocks():
    loss = [tabulate([("validation_loss", "model", None, None, "mean", 3 / n, 9, "nats")], step=n) for n in (1, 2)]
    assert Results(pd.concat(loss)).values("validation_loss", "mean").to_dict() == {1: 3.0, 2: 1.5}
    curve = [tabulate([("loss", "model", n or None, None, "mean", 2.0 + n, 9, "nats")], removed=n) for n in (0, 1)]
    assert Results(pd.concat(curve)).values("loss", "mean").to_dict() == {0: 2.0, 1: 3.0}


@pytest.mark.parametrize(
    ("results", "request_", "words"),
    [
        (measured(), ("displacement", "mean"), "site is 'residual', 'final_normed'"),
        (measured(), ("cosine", "mean"), "other is 0, 1, 2, 3. Choose one, for example values('cosine', "),
        (series(), ("displacement", "mean", "final_normed"), "step is 10, 20. Choose one"),
    ],
)
def test_ambiguous_values_are_refused_with_the_choices(results, request_, words):
    with refused(None, words) as error:
        results.values(*request_)
    expression = str(error.value).partition("for example ")[2].rstrip(".")
    advised = eval(f"results.{expression}", {"results": results})
    assert not advised.index.duplicated().any()


def test_show_opens_the_page_or_displays_it_in_a_frame(monkeypatch, tmp_path):
    opened = []
    shown = []
    monkeypatch.setattr(results_folder.webbrowser, "open", opened.append)
    monkeypatch.setattr(results_folder.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    path = measured().show()
    assert path is not None
    assert opened == [path.as_uri()]
    assert path.read_text() == reporting.render(measured().table, measured().meta)
    monkeypatch.setattr(results_folder, "notebook_display", lambda: lambda framed: shown.append(framed._repr_html_()))
    assert measured().show() is None
    assert shown[0].startswith('<iframe sandbox="allow-scripts allow-downloads" srcdoc="&lt;!doctype html')


def test_a_page_is_written_although_only_results_was_imported(tmp_path):
    """`results` imports what renders pages."""
    program = (
        "import sys\nfrom fulldepth.results import Results, tabulate\n"
        "Results(tabulate([]), {'kind': 'measure'}).save(sys.argv[1])\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert (tmp_path / PAGE).exists()
