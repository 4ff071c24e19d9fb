"""The cycle collector runs again after a pause, whoever else paused it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from raysvc.chat.garbage import no_collection


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_a_pause_ends_also_with_an_error_and_inside_of_another() -> None:
    with no_collection():
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), no_collection():
        raise KeyError
    assert gc.isenabled()


def test_who_runs_without_a_collector_keeps_running_without() -> None:
    gc.disable()
    with no_collection():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize("first_out", ["first in", "last in"])
def test_after_pauses_of_threads_that_overlap_it_runs(first_out: str) -> None:
    entered = {name: threading.Event() for name in ("first in", "last in")}
    may_leave = {name: threading.Event() for name in entered}

    def pause(name: str) -> None:
        with no_collection():
            entered[name].set()
            may_leave[name].wait()

    threads = {name: threading.Thread(target=pause, args=(name,)) for name in entered}
    for name, thread in threads.items():
        thread.start()
        entered[name].wait()
    for name in sorted(threads, key=lambda name: name != first_out):
        may_leave[name].set()
        threads[name].join()
    assert gc.isenabled()
