"""Lines of messages that repeat are passed on once."""

from fulldepth.core.progress import Watcher, without_repeats


def test_a_line_is_passed_on_once_and_every_step_counts():
    lines, steps = [], []
    watcher = without_repeats(Watcher(say=lines.append, begin=lambda *task: steps.append(task), advance=steps.append))
    for line in ("one", "two", "one", "one", "three"):
        watcher.say(line)
        watcher.begin("part", 2)
        watcher.advance(1)
    assert lines == ["one", "two", "three"]
    assert steps == [("part", 2), 1] * 5
