"""Leases, fences and the frontier, as pure state."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.mesh import Mesh
from raysvc.actors.server.leases import Leases
from raysvc.actors.server.reader_lease import ReaderLease, SilentRank
from raysvc.errors import (
    FencedError,
    LeaseHeld,
    RaysvcError,
    SeatRefused,
    ServerError,
    StateMismatch,
    StepOutOfOrder,
)

TTL = 30.0


def fresh() -> ReaderLease:
    return Leases("s").of_reader("")


def attached(lease: ReaderLease, holder: str, now_s: float, takeover: bool = False) -> ReaderLease:
    return lease.attach(holder, now_s, TTL, fence=lease.fence + 1, takeover=takeover)


def seated(lease: ReaderLease, group: str, rank: int, num_ranks: int, now_s: float = 0.0) -> ReaderLease:
    fence = lease.fence + 1
    return lease.attach_rank(group, f"{group}{rank}", rank, Mesh(num_ranks), now_s, TTL, fence=fence)


def restored(lease: ReaderLease, now_s: float, read_s: float) -> ReaderLease:
    return fresh().from_json(json.loads(json.dumps(lease.to_json(now_s))), read_s)


def test_a_second_holder_is_refused_while_the_first_one_lives() -> None:
    lease = attached(fresh(), "a", 0.0)
    with pytest.raises(LeaseHeld) as caught:
        attached(lease, "b", 20.0)
    assert (caught.value.holder, caught.value.since_s) == ("a", 20.0)


def test_a_lease_that_ran_out_can_be_taken_and_the_old_holder_is_fenced() -> None:
    first = attached(fresh(), "a", 0.0)
    second = attached(first, "b", 31.0)
    assert second.fence == first.fence + 1
    with pytest.raises(FencedError) as caught:
        second.commit(first.fence, 0, 0, 31.0)
    assert caught.value.newest == second.fence


def test_a_takeover_fences_a_living_holder() -> None:
    lease = attached(attached(fresh(), "a", 0.0), "b", 1.0, takeover=True)
    with pytest.raises(FencedError):
        lease.beat(1, 0, 2.0)
    assert lease.beat(2, 0, 2.0).seen_s == 2.0


def test_attaching_twice_as_one_holder_gives_the_same_fence() -> None:
    once = attached(fresh(), "a", 0.0)
    assert attached(once, "a", 5.0).fence == once.fence


def test_a_heartbeat_keeps_the_lease_alive() -> None:
    lease = attached(fresh(), "a", 0.0).beat(1, 0, 29.0)
    with pytest.raises(LeaseHeld):
        attached(lease, "b", 58.0)


def test_a_commit_says_all_below_and_twice_is_once() -> None:
    lease = attached(fresh(), "a", 0.0).commit(1, 4, 0, 0.0)
    assert lease.frontier == 5
    assert lease.commit(1, 4, 0, 0.0) == lease
    assert lease.commit(1, 1, 0, 0.0) == lease


def test_a_commit_that_is_sent_again_after_its_holder_left_is_no_error() -> None:
    lease = attached(fresh(), "a", 0.0).commit(1, 4, 0, 0.0).detach(1, 0)
    assert lease.commit(1, 3, 0, 1.0) == lease
    with pytest.raises(FencedError):
        lease.commit(1, 5, 0, 1.0)


def test_a_skipped_step_moves_the_frontier_and_is_remembered() -> None:
    lease = attached(fresh(), "a", 0.0).commit(1, 1, 0, 0.0).commit(1, 0, 0, 0.0, skipped=True)
    assert (lease.frontier, lease.skipped) == (2, (0,))


def test_moving_back_forgets_skips_behind_the_new_frontier() -> None:
    lease = attached(fresh(), "a", 0.0).commit(1, 0, 0, 0.0, skipped=True).move(1, 0, 0, 0.0)
    assert (lease.frontier, lease.skipped) == (0, ())


def test_a_commit_from_before_a_rewind_changes_nothing() -> None:
    lease = attached(fresh(), "a", 0.0).commit(1, 6, 0, 0.0).move(1, 2, 0, 0.0, moves=1)
    assert lease.commit(1, 7, 0, 0.0, moves=0) == lease
    assert lease.commit(1, 2, 0, 0.0, moves=1).frontier == 3


@settings(max_examples=300)
@given(st.data())
def test_calls_of_a_holder_converge_in_any_order_and_however_often_they_arrive(data: st.DataObject) -> None:
    moves, frontier, calls = 0, 0, []
    for _ in range(data.draw(st.integers(1, 12))):
        is_move = data.draw(st.booleans())
        step = data.draw(st.integers(0, 30) if is_move else st.integers(frontier, frontier + 3))
        moves, frontier = moves + is_move, step if is_move else step + 1
        calls.append((is_move, step, moves))

    def after(arrivals: list[tuple[bool, int, int]]) -> tuple[int, tuple[int, ...]]:
        lease = attached(fresh(), "a", 0.0)
        for is_move, step, number in arrivals:
            if is_move:
                lease = lease.move(1, step, 0, 0.0, moves=number)
            else:
                lease = lease.commit(1, step, 0, 0.0, moves=number)
        return lease.frontier, tuple(seat.moves for seat in lease.seats)

    repeated = [*calls, *data.draw(st.lists(st.sampled_from(calls), max_size=10))]
    assert after(data.draw(st.permutations(repeated))) == after(calls) == (frontier, (moves,))


def test_a_restart_keeps_the_lease_and_gives_its_holder_a_whole_lease_time_on_the_new_clock() -> None:
    lease = attached(fresh(), "a", 1000.0).commit(1, 6, 0, 1010.0)
    back = restored(lease, 1020.0, read_s=5.0)
    assert (back.fence, back.holder, back.frontier) == (1, "a", 7)
    with pytest.raises(LeaseHeld) as caught:
        attached(back, "b", 34.0)
    assert caught.value.since_s == 49.0, "20 s in the old process, 29 s in this one"
    assert attached(back, "b", 36.0).fence == 2
    assert back.commit(1, 9, 0, 6.0).frontier == 10, (
        "commits that were not flushed are told again by the next"
    )


def test_who_committed_last_is_known_after_it_left_and_after_a_restart() -> None:
    lease = attached(fresh(), "a", 0.0)
    assert lease.committed_by == ""
    left = restored(lease.commit(1, 6, 0, 1.0).detach(1, 0), 2.0, read_s=5.0)
    came = attached(left, "b", 6.0)
    assert (came.committed_by, came.frontier) == ("a", 7), "b has said nothing yet"
    assert came.beat(2, 0, 7.0).committed_by == "a"
    assert came.move(2, 3, 0, 8.0).committed_by == "b", "its checkpoint says what is trained"
    assert came.commit(2, 7, 0, 8.0).committed_by == "b"


def test_a_commit_that_is_sent_again_does_not_change_who_committed_last() -> None:
    lease = seated(seated(fresh(), "g", 0, 2), "g", 1, 2)
    lease = lease.commit(1, 6, 0, 1.0).commit(1, 6, 1, 2.0)
    last = lease.committed_by
    assert lease.commit(1, 6, 0, 3.0).committed_by == last
    assert lease.detach(1, 1).commit(1, 6, 1, 3.0).committed_by == last, "it has left, and its group goes on"
    assert lease.detach(1, 1).move(1, 7, 1, 3.0).committed_by == last


def test_a_record_that_does_not_say_who_committed_is_read() -> None:
    earlier = attached(fresh(), "a", 0.0).commit(1, 6, 0, 1.0).to_json(1.0)
    del earlier["committed_by"]
    back = fresh().from_json(earlier, 1.0)
    assert (back.frontier, back.committed_by) == (7, "")


def test_a_record_of_another_version_is_refused() -> None:
    with pytest.raises(StateMismatch, match="version"):
        fresh().from_json({**fresh().to_json(0.0), "version": 99}, 0.0)


CALLS = st.one_of(
    st.tuples(st.just("attach"), st.sampled_from("abc"), st.booleans()),
    st.tuples(st.just("commit"), st.integers(0, 6), st.integers(0, 5)),
    st.tuples(st.just("beat"), st.integers(0, 6), st.just(0)),
    st.tuples(st.just("detach"), st.integers(0, 6), st.just(0)),
)


@settings(max_examples=200)
@given(st.lists(CALLS, max_size=40), st.lists(st.floats(0, 20), min_size=40, max_size=40))
def test_whatever_is_called_fences_never_repeat_and_only_the_newest_moves_the_frontier(
    calls: list[tuple[str, object, object]], gaps: list[float]
) -> None:
    lease, now, given_out = fresh(), 0.0, {0: ""}
    for (name, first, second), gap in zip(calls, gaps, strict=False):
        now += gap
        before = lease
        try:
            if name == "attach":
                lease = attached(lease, str(first), now, takeover=bool(second))
            elif name == "commit":
                lease = lease.commit(int(str(first)), int(str(second)), 0, now)
            elif name == "beat":
                lease = lease.beat(int(str(first)), 0, now)
            else:
                lease = lease.detach(int(str(first)), 0)
        except RaysvcError:
            assert lease is before
            continue
        assert lease.fence >= before.fence
        assert given_out.setdefault(lease.fence, str(lease.holder or before.holder)) is not None
        if lease.frontier != before.frontier:
            assert (name, first, lease.frontier) == ("commit", before.fence, int(str(second)) + 1)
            assert lease.frontier > before.frontier


def test_ranks_of_a_group_share_a_fence_and_the_slowest_one_is_the_frontier() -> None:
    lease = fresh()
    for rank in range(3):
        lease = seated(lease, "g", rank, 3)
    assert lease.fence == 1
    for rank, step in ((0, 0), (0, 1), (1, 0), (2, 0)):
        before = lease.frontier
        lease = lease.commit(1, step, rank, 0.0)
        assert lease.frontier == (1 if rank == 2 else before)
    back = restored(lease, 0.0, 0.0)
    assert back.seats == lease.seats
    assert back.commit(1, 4, 1, 0.0).seats[1].frontier == 5


def test_a_rank_learns_who_is_further_behind_than_its_look_ahead_and_who_is_silent() -> None:
    lease = fresh()
    for rank in range(3):
        lease = lease.attach_rank("g", f"p{rank}", rank, Mesh(3), 0.0, TTL, fence=lease.fence + 1, window=3)
    lease = lease.commit(1, 2, 0, 1.0).commit(1, 0, 1, 19.0)
    assert lease.peers(0, 20.0, TTL).behind == (), "three steps are its look-ahead and the step it trains"
    lease = lease.commit(1, 4, 0, 20.0)
    assert lease.peers(0, 21.0, TTL) == (0, ((1, 1), (2, 0)), (SilentRank(2, "p2", 21.0),))
    assert lease.peers(1, 21.0, TTL).behind == ()
    lease = lease.commit(1, 4, 1, 21.0)
    assert [lease.peers(rank, 21.0, TTL).behind for rank in range(3)] == [((2, 0),), (), ()], (
        "the first of those that are ahead hears it, and says it for all"
    )


@settings(max_examples=300)
@given(st.data())
def test_the_frontier_is_the_smallest_of_the_seats_once_all_are_taken(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 5))
    lease, counts = fresh(), [0] * num_ranks
    expected = 0
    for _ in range(data.draw(st.integers(1, 40))):
        rank, step = data.draw(st.integers(0, num_ranks - 1)), data.draw(st.integers(0, 4))
        if not lease.seats or lease.seats[rank].frontier is None:
            lease = lease.attach_rank("g", f"p{rank}", rank, Mesh(num_ranks), 0.0, TTL, fence=1)
        elif data.draw(st.booleans()):
            counts[rank] += 1
            lease = lease.move(1, step, rank, 0.0, moves=counts[rank])
        else:
            lease = lease.commit(1, step, rank, 0.0, moves=counts[rank])
        seats = [seat.frontier for seat in lease.seats]
        expected = expected if None in seats else min(step for step in seats if step is not None)
        assert lease.frontier == expected


def test_a_rank_that_left_still_counts_and_the_last_one_gives_the_lease_back() -> None:
    lease = seated(seated(fresh(), "g", 0, 2), "g", 1, 2)
    lease = lease.commit(1, 0, 0, 0.0).detach(1, 0)
    assert (lease.holder, lease.frontier) == ("g", 0)
    lease = lease.commit(1, 0, 1, 0.0).detach(1, 1)
    assert (lease.holder, lease.frontier) == (None, 1)
    assert lease.detach(1, 0) == lease


def test_a_group_of_another_size_or_a_second_process_on_a_seat_needs_a_takeover() -> None:
    lease = seated(fresh(), "g", 0, 2)
    assert seated(lease, "g", 0, 2, 1.0).fence == 1, "the same process asks again"
    for group, holder, rank, num_ranks in (("g", "q0", 0, 2), ("g", "q1", 1, 3), ("h", "q1", 1, 2)):
        with pytest.raises(LeaseHeld):
            lease.attach_rank(group, holder, rank, Mesh(num_ranks), 1.0, TTL, fence=2)
        taken = lease.attach_rank(group, holder, rank, Mesh(num_ranks), 1.0, TTL, fence=2, takeover=True)
        assert (taken.fence, [seat.holder for seat in taken.seats if seat.holder]) == (2, [holder])


def test_readers_get_fences_of_one_count_and_their_own_frontiers() -> None:
    leases = Leases("s", shared=True)
    for reader in ("a", "b", "a"):
        fence = leases.next_fence
        lease = leases.of_reader(reader).attach(f"{fence}", 0.0, TTL, fence=fence, takeover=True)
        leases = leases.having(lease)
    assert {reader: lease.fence for reader, lease in leases.by_reader.items()} == {"a": 3, "b": 2}
    leases = leases.having(leases.of_fence(2).commit(2, 0, 0, 0.0))
    assert [leases.of_reader(reader).frontier for reader in "ab"] == [0, 1]
    assert leases.committed() == 0
    with pytest.raises(FencedError):
        leases.of_fence(1)
    back = Leases("s", shared=True).from_json(json.loads(json.dumps(leases.to_json(0.0))), 0.0)
    assert back.next_fence == 4
    assert (back.without_frontiers().of_reader("b").frontier, back.without_frontiers().next_fence) == (0, 4)
    with pytest.raises(ServerError, match="not shared"):
        Leases("s").of_reader("a")


def in_mesh(lease: ReaderLease, mesh: Mesh, numbers: range | None = None) -> ReaderLease:
    for number in numbers or range(mesh.size):
        lease = lease.attach_rank("g", f"p{number}", number, mesh, 0.0, TTL, fence=1)
    return lease


def test_a_step_is_committed_when_all_seats_of_a_mesh_did_and_the_journal_keeps_the_mesh() -> None:
    mesh = Mesh(dp=2, tp=2, cp=2)
    lease = restored(in_mesh(fresh(), mesh), 0.0, 0.0)
    assert lease.mesh == mesh
    for number in range(8):
        assert lease.frontier == 0
        lease = lease.commit(1, 0, number, 0.0)
    assert lease.frontier == 1
    older = {name: value for name, value in lease.to_json(0.0).items() if name != "mesh"}
    assert fresh().from_json(older, 0.0).mesh == Mesh(8), "a record of before there were meshes"


def test_inside_a_group_coordinates_twice_and_another_mesh_are_named_and_no_takeover_is_suggested() -> None:
    mesh = Mesh(dp=2, tp=2)
    lease = in_mesh(fresh(), mesh)
    for asked, said in (
        (mesh, "on rank dp=1 tp=1, held by p3"),
        (Mesh(4), r"\(dp=4\) in a group of \(dp=2, tp=2\)"),
    ):
        with pytest.raises(SeatRefused, match=said) as caught:
            lease.attach_rank("g", "other", 3, asked, 1.0, TTL, fence=2)
        assert "takeover" not in str(caught.value)
    with pytest.raises(LeaseHeld, match="takeover") as held:
        lease.attach_rank("h", "other", 3, mesh, 1.0, TTL, fence=2)
    assert not isinstance(held.value, SeatRefused)


def test_peers_that_do_not_load_the_same_state_are_refused_by_name() -> None:
    lease = in_mesh(fresh(), Mesh(dp=2, tp=2)).move(1, 10, 0, 0.0)
    with pytest.raises(StepOutOfOrder, match="refused step 4: expected step 10, to which rank dp=0 tp=0"):
        lease.move(1, 4, 1, 0.0)
    with pytest.raises(StepOutOfOrder, match="rank dp=0 tp=1 to be there too"):
        lease.commit(1, 10, 0, 0.0, moves=1)
    lease = lease.move(1, 4, 2, 0.0)  # of another dp rank: not their business
    lease = lease.move(1, 10, 1, 0.0)
    lease = lease.commit(1, 10, 0, 0.0, moves=1).commit(1, 10, 1, 0.0, moves=1)
    assert [seat.frontier for seat in lease.seats] == [11, 11, 4, 0]
    ahead = lease.move(1, 0, 0, 0.0)
    assert ahead.commit(1, 11, 1, 0.0, moves=1).seats[1].frontier == 12, "sent before its peer moved"


def test_a_peer_that_left_keeps_nobody_from_going_on() -> None:
    lease = in_mesh(fresh(), Mesh(dp=1, tp=2)).detach(1, 1).move(1, 3, 0, 0.0)
    assert lease.commit(1, 3, 0, 0.0, moves=1).seats[0].frontier == 4
