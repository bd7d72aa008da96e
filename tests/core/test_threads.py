"""Threads with one torch thread each, over independent matrices."""

import threading

import pytest
import torch

from fulldepth.core.threads import map_threads


@pytest.fixture
def two_threads():
    """Two threads of torch, here and in every new thread, also after the test; no thread of ours is left."""
    before, values = torch.get_num_threads(), []
    torch.set_num_threads(2)
    yield
    new = threading.Thread(target=lambda: values.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert [torch.get_num_threads(), *values] == [2, 2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fulldepth")]
    torch.set_num_threads(before)


def test_results_come_in_order_from_threads_of_one_torch_thread(two_threads):
    meeting = threading.Barrier(2, timeout=20)  # passes only if two items run at once

    def work(item):
        meeting.wait()
        return item, torch.get_num_threads(), threading.current_thread() is threading.main_thread()

    assert map_threads(work, range(4), torch.ones(1)) == [(item, 1, False) for item in range(4)]


def test_an_exception_drops_the_rest_and_leaves_nothing_behind(two_threads):
    begun = []

    def work(item):
        begun.append(item)
        if item == 0:
            raise ValueError("item 0")
        threading.Event().wait(0.05)

    with pytest.raises(ValueError, match="item 0"):
        map_threads(work, range(1000))
    assert len(begun) < 1000


def test_modes_of_the_caller_hold_inside(two_threads):
    def modes(_):
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode():
        assert map_threads(modes, range(2)) == [(True, False)] * 2
    with torch.no_grad():
        assert map_threads(modes, range(2)) == [(False, False)] * 2
    assert map_threads(modes, range(2)) == [(False, True)] * 2


def test_other_devices_single_items_and_nested_calls_run_in_the_calling_thread(two_threads):
    def name(_):
        return threading.current_thread().name

    here = threading.current_thread().name
    assert map_threads(name, range(3), torch.ones(1, device="meta")) == [here] * 3
    assert map_threads(name, range(1)) == [here]
    inner = map_threads(lambda item: (name(item), map_threads(name, range(2))), range(2))
    assert all(found == [outer] * 2 for outer, found in inner)
