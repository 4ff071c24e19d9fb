"""Leases, fences and the frontier, as pure state."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.server.leases import Ledger
from raysvc.actors.server.ledgers import Ledgers
from raysvc.errors import FencedError, LeaseHeld, RaysvcError, ServerError, StateMismatch, StepOutOfOrder

TTL = 30.0


def test_a_second_holder_is_refused_while_the_first_one_lives() -> None:
    ledger = Ledger("s").attach("a", 0.0, TTL)
    with pytest.raises(LeaseHeld) as caught:
        ledger.attach("b", 20.0, TTL)
    assert (caught.value.holder, caught.value.since_s) == ("a", 20.0)


def test_a_lease_that_ran_out_can_be_taken_and_the_old_holder_is_fenced() -> None:
    first = Ledger("s").attach("a", 0.0, TTL)
    second = first.attach("b", 31.0, TTL)
    assert second.fence == first.fence + 1
    with pytest.raises(FencedError) as caught:
        second.commit(first.fence, 0)
    assert caught.value.newest == second.fence


def test_a_takeover_fences_a_living_holder() -> None:
    ledger = Ledger("s").attach("a", 0.0, TTL).attach("b", 1.0, TTL, takeover=True)
    with pytest.raises(FencedError):
        ledger.beat(1, 2.0)
    assert ledger.beat(2, 2.0).seen_s == 2.0


def test_attaching_twice_as_one_holder_gives_the_same_fence() -> None:
    once = Ledger("s").attach("a", 0.0, TTL)
    assert once.attach("a", 5.0, TTL).fence == once.fence


def test_a_heartbeat_keeps_the_lease_alive() -> None:
    ledger = Ledger("s").attach("a", 0.0, TTL).beat(1, 29.0)
    with pytest.raises(LeaseHeld):
        ledger.attach("b", 58.0, TTL)


def test_commits_go_step_by_step_and_twice_is_once() -> None:
    ledger = Ledger("s").attach("a", 0.0, TTL).commit(1, 0)
    assert ledger.commit(1, 0) == ledger
    with pytest.raises(StepOutOfOrder, match="expected step 1"):
        ledger.commit(1, 2)


def test_a_skipped_step_moves_the_frontier_and_is_remembered() -> None:
    ledger = Ledger("s").attach("a", 0.0, TTL).commit(1, 0, skipped=True).commit(1, 1)
    assert (ledger.frontier, ledger.skipped) == (2, (0,))


def test_moving_back_forgets_skips_behind_the_new_frontier() -> None:
    ledger = Ledger("s").attach("a", 0.0, TTL).commit(1, 0, skipped=True).move(1, 0, 10)
    assert (ledger.frontier, ledger.skipped) == (0, ())
    with pytest.raises(StepOutOfOrder):
        ledger.move(1, 11, 10)


def test_a_restored_ledger_lets_the_holder_say_where_it_is_once() -> None:
    ledger = Ledger("s").attach("a", 0.0, TTL).commit(1, 0)
    back = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
    ahead = back.commit(1, 7)
    assert ahead.frontier == 8
    with pytest.raises(StepOutOfOrder):
        ahead.commit(1, 10)


def test_a_record_of_another_version_is_refused() -> None:
    with pytest.raises(StateMismatch, match="version"):
        Ledger.from_json({**Ledger("s").to_json(), "version": 99})


CALLS = st.one_of(
    st.tuples(st.just("attach"), st.sampled_from("abc"), st.booleans()),
    st.tuples(st.just("commit"), st.integers(0, 6), st.integers(0, 5)),
    st.tuples(st.just("beat"), st.integers(0, 6), st.just(0)),
    st.tuples(st.just("detach"), st.integers(0, 6), st.just(0)),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(CALLS, max_size=40), st.lists(st.floats(0, 20), min_size=40, max_size=40))
def test_whatever_is_called_fences_never_repeat_and_only_the_newest_moves_the_frontier(
    calls: list[tuple[str, object, object]], gaps: list[float]
) -> None:
    ledger, now, given_out = Ledger("s"), 0.0, {0: ""}
    for (name, first, second), gap in zip(calls, gaps, strict=False):
        now += gap
        before = ledger
        try:
            if name == "attach":
                ledger = ledger.attach(str(first), now, TTL, takeover=bool(second))
            elif name == "commit":
                ledger = ledger.commit(int(str(first)), int(str(second)))
            elif name == "beat":
                ledger = ledger.beat(int(str(first)), now)
            else:
                ledger = ledger.detach(int(str(first)))
        except RaysvcError:
            assert ledger is before
            continue
        assert ledger.fence >= before.fence
        assert given_out.setdefault(ledger.fence, str(ledger.holder or before.holder)) is not None
        if ledger.frontier != before.frontier:
            assert (name, first, ledger.frontier) == ("commit", before.fence, before.frontier + 1)


def test_ranks_of_a_group_share_a_fence_and_the_slowest_one_is_the_frontier() -> None:
    ledger = Ledger("s")
    for rank in range(3):
        ledger = ledger.attach_rank("g", f"p{rank}", rank, 3, 0.0, TTL)
    assert ledger.fence == 1
    for rank, step in ((0, 0), (0, 1), (1, 0), (2, 0)):
        before = ledger.frontier
        ledger = ledger.commit(1, step, rank=rank)
        assert ledger.frontier == (1 if rank == 2 else before)
    with pytest.raises(StepOutOfOrder, match="expected step 1"):
        ledger.commit(1, 2, rank=1)
    back = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert back.seats == ledger.seats
    assert back.commit(1, 4, rank=1).seats[1].frontier == 5, "commits that were not flushed are told again"


def test_a_rank_that_left_still_counts_and_the_last_one_gives_the_lease_back() -> None:
    ledger = Ledger("s").attach_rank("g", "p0", 0, 2, 0.0, TTL).attach_rank("g", "p1", 1, 2, 0.0, TTL)
    ledger = ledger.commit(1, 0, rank=0).detach(1, 0)
    assert (ledger.holder, ledger.frontier) == ("g", 0)
    ledger = ledger.commit(1, 0, rank=1).detach(1, 1)
    assert (ledger.holder, ledger.frontier) == (None, 1)
    assert ledger.detach(1) == ledger


def test_a_group_of_another_size_or_a_second_process_on_a_seat_needs_a_takeover() -> None:
    ledger = Ledger("s").attach_rank("g", "p0", 0, 2, 0.0, TTL)
    assert ledger.attach_rank("g", "p0", 0, 2, 1.0, TTL).fence == 1, "the same process asks again"
    for group, holder, rank, num_ranks in (("g", "q0", 0, 2), ("g", "q1", 1, 3), ("h", "q1", 1, 2)):
        with pytest.raises(LeaseHeld):
            ledger.attach_rank(group, holder, rank, num_ranks, 1.0, TTL)
        taken = ledger.attach_rank(group, holder, rank, num_ranks, 1.0, TTL, takeover=True)
        assert (taken.fence, [seat.holder for seat in taken.seats if seat.holder]) == (2, [holder])


def test_readers_get_fences_of_one_count_and_their_own_frontiers() -> None:
    ledgers = Ledgers("s", shared=True)
    for reader in ("a", "b", "a"):
        ledgers, _ = ledgers.attached(
            reader, lambda ledger, fence: ledger.attach(f"{fence}", 0.0, TTL, takeover=True, fence=fence)
        )
    assert {name: ledger.fence for name, ledger in ledgers.by_reader.items()} == {"a": 3, "b": 2}
    ledgers, _ = ledgers.changed(2, lambda ledger: ledger.commit(2, 0))
    assert (ledgers.of("a").frontier, ledgers.of("b").frontier, ledgers.committed()) == (0, 1, 0)
    with pytest.raises(FencedError):
        ledgers.changed(1, lambda ledger: ledger.commit(1, 0))
    back = Ledgers("s", shared=True).restored(json.loads(json.dumps(ledgers.to_json())))
    assert back.fence == 3
    assert (back.without_frontiers().of("b").frontier, back.without_frontiers().fence) == (0, 3)
    with pytest.raises(ServerError, match="not shared"):
        Ledgers("s").of("a")
