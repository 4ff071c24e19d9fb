"""Staging: right bytes whatever the order of events, bounded memory, nothing that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.staging.slots import NoFreeSlot, Slot, Slots, aligned
from raysvc.actors.staging.staging import Staging, StagingOptions
from raysvc.collate.shard import Shard
from raysvc.errors import ConfigError, WorkerFailed

from .fake_device import FakeDevice, ForgetsConsumed, ForgetsCopied, ForgetsHost
from .shards import bytes_shard

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHARD = sum(aligned(array.nbytes) for array in bytes_shard(0).arrays.values())
TOGGLES = [
    StagingOptions(prefetch, copy_stream, pin_memory, timing=timing)
    for prefetch in (True, False)
    for copy_stream in (True, False)
    for pin_memory in (True, False)
    for timing in (True, False)
]


def until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    begin = time.monotonic()
    while not true():
        assert time.monotonic() - begin < timeout_s
        time.sleep(0.002)


def same(tensors: dict[str, torch.Tensor], number: int) -> bool:
    expected = bytes_shard(number).arrays
    return tensors.keys() == expected.keys() and all(
        np.array_equal(tensors[name].cpu().numpy(), expected[name]) for name in expected
    )


def spoiled_shard() -> Shard:
    """It fails in the middle of its copy: torch has no such type."""
    shard = bytes_shard(99)
    return replace(shard, arrays={**shard.arrays, "text": np.array(["no tensor"], "S")})


def run_on(
    device: FakeDevice, ring_bytes: int | None, count: int = 12, compute_s: float = 3.0, spoil: bool = False
) -> list[bool]:
    """Stage shards two ahead of a slow compute, on a host that never waits for it; what its kernels saw.

    With `spoil` a put fails before every put.
    """
    staging = Staging(0, device, StagingOptions(ring_bytes=ring_bytes))
    seen: list[bool] = []
    for number in range(2):
        staging.put((number, 0), bytes_shard(number))
    for number in range(count):
        staged, _ = staging.take((number, 0), 1.0)
        tensors = staged.shard.arrays

        def look(tensors: dict[str, torch.Tensor] = tensors, number: int = number) -> None:
            seen.append(same(tensors, number))

        device.kernel(compute_s, look)
        staging.release()
        if spoil:
            with pytest.raises(AttributeError):
                staging.put((-1, number), spoiled_shard())
        if number + 2 < count:
            staging.put((number + 2, 0), bytes_shard(number + 2))
    device.synchronize()
    assert len(seen) == 2 * count
    return seen


@pytest.mark.parametrize("shards", [2, 2.5, 3, 7, None])
def test_every_kernel_sees_the_bytes_of_its_shard(shards: float | None) -> None:
    assert all(run_on(FakeDevice(), None if shards is None else int(shards * SHARD)))


@pytest.mark.parametrize("shards", [3, 4])
def test_a_put_that_fails_lets_nobody_write_under_a_running_kernel(shards: int) -> None:
    assert all(run_on(FakeDevice(), shards * SHARD, compute_s=9.0, spoil=True))


@pytest.mark.parametrize("mutant", [ForgetsConsumed, ForgetsCopied, ForgetsHost])
def test_forgetting_to_wait_for_any_event_gives_wrong_bytes(mutant: type[FakeDevice]) -> None:
    assert not all(run_on(mutant(), 2 * SHARD))


def test_copies_hide_behind_longer_compute() -> None:
    device = FakeDevice(copy_s=1.0)
    run_on(device, 2 * SHARD, count=12, compute_s=3.0)
    assert device.now == 1.0 + 12 * 3.0


def test_slots_are_made_once_and_hold_no_more_than_their_bytes() -> None:
    device = FakeDevice()
    staging = Staging(0, device, StagingOptions(ring_bytes=2 * SHARD))
    putter = threading.Thread(
        target=lambda: [staging.put((n, 0), bytes_shard(n)) for n in range(6)], daemon=True
    )
    putter.start()
    until(lambda: staging.stats().staged == 2)
    for number in range(6):
        staged, _ = staging.take((number, 0), 60.0)
        device.synchronize()
        assert same(staged.shard.arrays, number)
    putter.join(60.0)
    stats = staging.stats()
    assert (stats.staged, stats.allocations, stats.beside, device.buffers) == (6, 2, 0, 2)
    assert stats.ring_bytes == 2 * SHARD
    assert stats.blocked_s > 0


def test_without_a_limit_there_are_three_slots_of_the_largest_shard() -> None:
    staging = Staging(0, "cpu")
    for number, nbytes in enumerate((640, 640, 3200, 640, 3200, 3200, 640, 3200)):
        staging.put((number, 0), bytes_shard(number, nbytes))
        staging.take((number, 0), 1.0)
        staging.release()
    large = sum(aligned(array.nbytes) for array in bytes_shard(2, 3200).arrays.values())
    assert staging.stats().allocations == 3  # one of them is large enough for every large shard
    for number in range(8, 11):
        staging.put((number, 0), bytes_shard(number, 3200))
    assert staging.stats().allocations == 5  # two were too small
    assert staging.stats().ring_bytes == 3 * large


def test_a_shard_that_the_trainer_waits_for_is_never_kept_out_by_later_ones() -> None:
    staging = Staging(0, "cpu", StagingOptions(ring_bytes=2 * SHARD))
    staging.put((1, 0), bytes_shard(1))
    staging.put((2, 0), bytes_shard(2))
    taken: list[bool] = []

    def train() -> None:
        for number in range(4):
            taken.append(same(staging.take((number, 0), 60.0)[0].shard.arrays, number))

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    staging.put((3, 0), bytes_shard(3))  # no room, until the trainer waits for shard 0
    staging.put((0, 0), bytes_shard(0))
    trainer.join(60.0)
    assert taken == [True] * 4
    assert staging.stats().beside >= 1


def test_a_shard_larger_than_the_ring_is_refused_in_both_threads() -> None:
    staging = Staging(3, "cpu", StagingOptions(ring_bytes=SHARD - 64))
    with pytest.raises(ConfigError, match="ring_bytes"):
        staging.put((0, 0), bytes_shard(0))
    with pytest.raises(ConfigError, match="ring_bytes"):
        staging.take((0, 0), 1.0)


def test_a_shard_that_does_not_come_is_an_error_that_names_what_is_there() -> None:
    staging = Staging(1, "cpu")
    staging.put((4, 0), bytes_shard(4))
    with pytest.raises(WorkerFailed, match=r"\(3, 0\).*staged are \[\(4, 0\)\]"):
        staging.take((3, 0), 0.01)


@pytest.mark.parametrize("options", TOGGLES)
@pytest.mark.parametrize("where", ["fake", "cpu", pytest.param("cuda", marks=ON_CUDA)])
def test_no_toggle_changes_a_byte(options: StagingOptions, where: str) -> None:
    device = FakeDevice() if where == "fake" else where
    staging = Staging(0, device, options)
    for number in range(5):
        staging.put((number, 0), bytes_shard(number))
        staged, _ = staging.take((number, 0), 1.0)
        if isinstance(device, FakeDevice):
            device.advance(device.compute_free)
        assert same(staged.shard.arrays, number)
        assert staged.shard.row_ids.tolist() == [0, 1]


def test_clearing_gives_the_room_back() -> None:
    staging = Staging(0, "cpu", StagingOptions(ring_bytes=2 * SHARD))
    for _ in range(3):
        staging.put((0, 0), bytes_shard(0))
        staging.put((1, 0), bytes_shard(1))
        staging.clear()
    staging.put((5, 0), bytes_shard(5))
    assert same(staging.take((5, 0), 1.0)[0].shard.arrays, 5)


@settings(max_examples=150)
@given(
    st.one_of(st.none(), st.just(1024)), st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=40)
)
def test_slots_are_used_by_one_shard_at_a_time_within_their_bytes(
    limit: int | None, actions: list[tuple[bool, int]]
) -> None:
    changed = threading.Condition()
    slots = Slots(0, "cpu", StagingOptions(ring_bytes=limit), changed, lambda: False)
    taken: list[Slot] = []
    for take, size in actions:
        if take:
            found = slots.take_nowait(size)
            if isinstance(found, NoFreeSlot):
                used = sum(slot.nbytes for slot in taken)
                assert len(taken) == 3 if limit is None else used + aligned(size) > limit
                continue
            assert found.nbytes >= size
            assert found not in taken
            taken.append(found)
        elif taken:
            with changed:
                slots.give_back(taken.pop(size % len(taken)))
        assert slots.stats.ring_bytes <= (limit or 3 * aligned(500))


def test_a_slot_keeps_its_events_until_a_newer_one_is_known() -> None:
    changed = threading.Condition()
    slots = Slots(0, FakeDevice(), StagingOptions(), changed, lambda: False)
    lot = slots.load((0, 0), bytes_shard(0))
    with changed:
        slots.release(lot)
    events = (lot.slot.copied, lot.slot.consumed)
    others = [slots.load((0, number), bytes_shard(number)) for number in (1, 2)]
    assert slots.take_nowait(SHARD) is lot.slot
    with changed:
        slots.give_back(lot.slot)  # whoever took it did nothing
    assert (lot.slot.copied, lot.slot.consumed) == events
    assert len({id(other.slot) for other in (lot, *others)}) == 3


@pytest.mark.parametrize("copy_stream", [pytest.param(on, marks=ON_CUDA) for on in (True, False)])
def test_checksums_hold_under_a_long_kernel_and_a_tiny_ring(copy_stream: bool) -> None:
    nbytes = 8 << 20
    one = sum(aligned(array.nbytes) for array in bytes_shard(0, nbytes).arrays.values())
    shards = [bytes_shard(number, nbytes) for number in range(8)]
    expected = [int(shard.arrays["input_ids"].astype(np.int64).sum()) for shard in shards]
    staging = Staging(0, "cuda", StagingOptions(copy_stream=copy_stream, ring_bytes=2 * one))
    sums = []
    staging.put((0, 0), shards[0])
    staging.put((1, 0), shards[1])
    for number in range(64):
        staged, _ = staging.take((number, 0), 10.0)
        torch.cuda._sleep(20_000_000)  # some 10 ms in which the host runs ahead
        sums.append(staged.shard.arrays["input_ids"].long().sum())
        staging.release()
        if number + 2 < 64:
            staging.put((number + 2, 0), shards[(number + 2) % 8])
    assert [int(total) for total in sums] == [expected[number % 8] for number in range(64)]


def seconds_of(staging: Staging | None, nbytes: int, steps: int = 20, warm: int = 4) -> float:
    """Of so many steps on CUDA, each a kernel that is longer than a copy of `nbytes`; None: of the kernels alone.

    The first `warm` steps are not counted: they make the pinned slots.
    """
    shard = bytes_shard(0, nbytes)
    if staging is not None:
        staging.put((0, 0), shard)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number in range(warm + steps):
        if number == warm:
            torch.cuda.synchronize()
            start.record()
        if staging is not None:
            staging.take((number, 0), 10.0)
        torch.cuda._sleep(40_000_000)
        if staging is not None:
            staging.release()
            staging.put((number + 1, 0), shard)
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_to_the_device_hide_behind_compute(record_property: Callable[[str, object], None]) -> None:
    nbytes = 64 << 20
    alone = seconds_of(None, nbytes)
    beside, behind = (
        seconds_of(Staging(0, "cuda", StagingOptions(copy_stream=on)), nbytes) for on in (True, False)
    )
    hidden = 1 - (beside - alone) / (behind - alone)
    record_property("share of copies hidden", round(hidden, 4))
    assert behind > alone
    assert hidden >= 0.95, (alone, beside, behind)
