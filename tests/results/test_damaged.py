"""Damaged result folders of every kind: a page, a comparison, or one clear error; never a traceback or half a file."""

from __future__ import annotations

import json
import random
import warnings

import pytest

from fulldepth.core.errors import FulldepthError
from fulldepth.reporting import render
from fulldepth.results import DOCUMENT, TABLE, Results, compare
from fulldepth.results.pages import together
from fuzz.mutations import change_content
from json_files import read_json, write_json
from reporting import plotted, synthetic

SLICES, CASES = 2, 20
"""Seeds in this test."""


def page(results):
    return render(results.table, results.meta)


KINDS = {name: make for name, make in plotted.KINDS.items() if name != "skips"}
"""Kind -> results of it; pages of several folders are not stored."""
PARTNERS = {
    "training": "training", "groups": "training", "exit": "exit", "decoder": "exit", "evaluation": "evaluation",
}  # fmt: skip
"""Kind -> what it is compared with; measurements for all others."""


class Ground:
    """Whole results of every kind, and folders to damage them in."""

    def __init__(self, root):
        self.root = root
        self.made = {kind: make() for kind, make in KINDS.items()}
        self.whole = {
            kind: self.made[kind].save(root / kind, page=False)
            for kind in ("language_model", "search", *set(PARTNERS.values()))
        }
        for seed, run in enumerate(synthetic.group("tiny-jreg", 0.06, 3.42, None, range(3))):
            self.whole[f"training {seed}"] = run.save(root / f"training {seed}", page=False)

    def case(self, seed):
        """One damaged folder, given to one command; the error that it ended with, or nothing."""
        draw = random.Random(seed)
        kind, verb = draw.choice(list(KINDS)), draw.choice(("report", "report", "compare", "together"))
        folder = self.root / f"case-{seed}"
        self.made[kind].save(folder, page=False)
        document = read_json(folder / DOCUMENT)
        if draw.random() < 0.9:
            del document["table"]  # an earlier version's: the table is read whatever it holds
            write_json(folder / DOCUMENT, document)
        change_content(draw, folder / draw.choice((DOCUMENT, DOCUMENT, TABLE)))
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        try:
            if verb == "report":
                page(Results.load(folder))
            elif verb == "together":
                page(together([folder, self.whole["search"]]))
            else:
                partner = PARTNERS.get(kind, "language_model")
                pair = draw.sample([folder, self.whole[partner]], 2)
                group = [self.whole[f"training {seed}"] for seed in (1, 2)] if partner == "training" else None
                pair = [pair[0], self.whole["training 2"]] if group else pair
                made = compare(pair, against=group).save(self.root / f"made-{seed}", page=False)
                page(Results.load(made))
        except FulldepthError as error:
            return str(error)
        finally:
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        return ""


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return Ground(tmp_path_factory.mktemp("ground"))


def test_whole_folders_of_every_kind_are_read_as_they_are(ground):
    for name, results in ground.made.items():
        again = Results.load(results.save(ground.root / f"again {name}", page=False))
        assert again.meta == {"schema_version": 1, **json.loads(json.dumps(results.meta))}
        assert list(again.table.columns) == list(results.table.columns)


@pytest.mark.parametrize("piece", range(SLICES))
def test_damaged_folders_end_in_a_page_or_a_clear_error(ground, piece):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ended = [ground.case(seed) for seed in range(piece * CASES, (piece + 1) * CASES)]
    errors = [message for message in ended if message]
    assert 0 < len(errors) < CASES
    assert all(10 < len(message) < 1000 for message in errors)


MISTAKES = (3, "x", [3], [None], [[1]], {"name": "text"}, [{}], [{"name": 3}])
"""Values of other types than an entry has."""


@pytest.mark.parametrize("entry", ["stacks", "tasks", "skipped", "quality_data"])
def test_entries_of_another_type_end_in_a_comparison_or_one_sentence(entry, ground, tmp_path):
    """Also entries that the folder did not have; and what is read as it should be still is."""
    kind = "language_model" if entry == "stacks" else "evaluation"
    refusals = []
    for mistake in MISTAKES:
        folder = ground.made[kind].save(tmp_path / "damaged", page=False)
        write_json(folder / DOCUMENT, {**read_json(folder / DOCUMENT), entry: mistake})
        for pair in ([folder, ground.whole[kind]], [ground.whole[kind], folder]):
            try:
                compare(pair)
            except FulldepthError as error:
                refusals.append(str(error))
    assert refusals
    assert all(10 < len(message) < 1000 for message in refusals)
    write_json(folder / DOCUMENT, {**read_json(folder / DOCUMENT), entry: None})
    assert compare([folder, ground.whole[kind]]).is_comparison
