"""The list of entries in which two documents differ."""

from __future__ import annotations

from fulldepth.core.errors import differences


def test_differences_name_the_entries_that_differ_and_nothing_else():
    before = {"seed": 0, "steps": 5, "places": [1, 2], "gone": "x", "none": None}
    assert differences(before, {"seed": 1, "steps": 5, "places": (1, 2), "new": True}) == (
        "gone was 'x', is None; new was None, is True; seed was 0, is 1"
    )
    assert differences(before, before) == ""
    many = {f"entry {number}": number for number in range(6)}
    assert differences({}, many).endswith("entry 3 was None, is 3; ...")


def test_two_long_paths_are_shown_where_they_differ():
    folder = "/" + "a_long_name_of_a_folder/" * 6
    for first, second in (("one/text.txt", "two/text.txt"), ("one", "one/further"), ("", "b" * 300)):
        message = differences({"data": folder + first}, {"data": folder + second})
        was, now = message.removeprefix("data was ").split(", is ")
        assert was.endswith(f"{first}'")
        assert now.rstrip("…").endswith(f"{second}'" if len(second) < 60 else "b" * 40)
        assert max(len(was), len(now)) <= 70
    whole = "x" * 66
    assert differences({"name": whole}, {"name": whole + "yy"}) == f"name was '{whole}', is '{whole}yy'"
