"""Memory of steps is used again, and never while an array in it is alive."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import numpy as np

from raysvc.collate.reused_memory import ReusedMemory

BYTES = 1 << 16


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_a_block_is_used_again_once_no_array_in_it_is_alive() -> None:
    blocks = ReusedMemory(small_bytes=0)
    first = blocks.take(BYTES)
    rows = first[64:128].view(np.int32).reshape(4, 4)[1:]
    first[:] = 7
    place = address(first)
    del first
    other = blocks.take(BYTES)
    other[:] = 9
    assert (rows.view(np.uint8) == 7).all(), "a view of a view holds it"
    del rows
    gc.collect()
    assert address(blocks.take(BYTES - 10)) == place


def test_a_block_that_is_sent_or_read_elsewhere_is_not_free() -> None:
    import torch

    blocks = ReusedMemory(small_bytes=0)
    for hold in (memoryview, torch.from_numpy, lambda array: np.frombuffer(array, np.uint16)):
        taken = blocks.take(BYTES)
        taken[:] = 3
        held, place = hold(taken), address(taken)
        del taken
        again = blocks.take(BYTES)
        assert address(again) != place, hold
        del held, again


def test_at_most_two_are_kept_none_much_larger_than_needed_and_small_ones_never() -> None:
    blocks = ReusedMemory(small_bytes=1000)
    assert len(blocks.take(10)) == 10
    assert blocks._kept == []
    held = [blocks.take(BYTES) for _ in range(5)]
    assert len({address(one) for one in held}) == 5
    assert len(blocks._kept) == 2
    del held
    small = blocks.take(BYTES // 3)
    assert [len(one) for one in blocks._kept] == [BYTES // 3], "larger ones are given back"
    blocks.forget()
    assert blocks._kept == []
    assert len(small) == BYTES // 3


def test_threads_never_get_the_same_block() -> None:
    blocks, wrong = ReusedMemory(small_bytes=0), []

    def use(number: int) -> None:
        for _ in range(300):
            taken = blocks.take(BYTES)
            taken[:] = number
            if not (taken == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


FAULTS = """
import resource, sys, threading
import numpy as np
from raysvc.collate.reused_memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def step():
    temporaries = [np.ones(1 << 18) for _ in range(8)]  # 2 MB each, as those of a packed step

def steps(count):
    thread = threading.Thread(target=lambda: [step() for _ in range(count)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

steps(3)
print(steps(40) / 40)
"""


def test_a_process_that_collates_writes_its_temporaries_into_pages_that_it_has() -> None:
    faults = {}
    for how in ("kept", "by itself"):
        command = [sys.executable, "-c", FAULTS, how]
        env = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "131072"}  # left to itself it depends on addresses
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        faults[how] = float(done.stdout)
    assert faults["by itself"] > 1000, "4096 pages a step"
    assert faults["kept"] < 500, "the first steps of a new thread alone"
