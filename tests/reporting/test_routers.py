"""The table of tokens that dynamic routers answer to."""

from __future__ import annotations

from fulldepth.reporting.payload import payload
from fulldepth.results import Results, tabulate

ROUTERS = [
    {"layer": 3, "source": 0, "head": 1, "tokens": [[" the", 0.8123], ["\n", 0.5], ["<b>\u202e", None]]},
    {"layer": 2, "source": 1, "head": 0, "tokens": [["x" * 100, None]]},
    {"layer": 2, "source": 0, "head": 0, "tokens": []},
]
ROW = ("retrieval_weight", "routing", 2, 0, "share", 0.5, 8, "1")


def section(found, rows=(ROW,)):
    packed = payload(Results(tabulate(list(rows)), {"model": {"num_layers": 3}, "router_tokens": found}))
    return next((section for section in packed["sections"] if section["id"] == "memory"), None)


def test_routers_stand_before_the_figures_of_the_memory():
    memory = section({"routers": ROUTERS, "of": 18})
    (table,) = memory["tables"]
    first, second = table["rows"]
    assert first == ["Layer 3, state 0, head 1", "·the ⏎ <b>⟨U+202E⟩", "0.812"]
    assert (second[0], len(second[1]), second[2]) == ("Layer 2, state 1, head 0", 40, "–")
    assert table["note"].startswith("The 2 of 18 routers, those with the nearest tokens first.")
    assert memory["slots"] == [["retrieval_weight"]]


def test_all_routers_are_said_to_be_all():
    assert section({"routers": ROUTERS, "of": 2})["tables"][0]["note"].startswith("All routers, those with")


def test_without_routers_there_is_no_table():
    assert section(None)["tables"] == []
    assert section({"routers": [], "of": 0}, rows=()) is None
