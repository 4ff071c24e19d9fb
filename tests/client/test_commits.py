"""Commits that are not sent yet: pure, without Ray."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raysvc.actors.server.reader_lease import ReaderLease
from raysvc.client.commits import AT_MOST, Commit, Commits, covering

NOTED = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=20)  # (skipped, a move comes before it)


def noted(draws: list[tuple[bool, bool]]) -> list[Commit]:
    """As a loop makes them: steps go on within a move, and start again after one."""
    commits: list[Commit] = []
    for skipped, moved in draws:
        before = commits[-1] if commits else Commit(-1, False, 0)
        step = 0 if moved else before.step + 1
        commits.append(Commit(step, skipped, before.moves + moved))
    return commits


def told(commits: list[Commit]) -> tuple[int, tuple[int, ...]]:
    """What a lease knows after them."""
    lease = ReaderLease("", "a").attach("me", 0.0, 10.0, fence=1)
    for step, skipped, moves in commits:
        if moves > lease.seats[0].moves:
            lease = lease.move(1, 0, 0, 0.0, moves=moves)
        lease = lease.commit(1, step, 0, 0.0, moves=moves, skipped=skipped)
    return lease.frontier, lease.skipped


@given(NOTED)
def test_a_server_knows_as_much_from_the_commits_that_are_sent_as_from_all_of_them(
    draws: list[tuple[bool, bool]],
) -> None:
    commits = noted(draws)
    assert told(covering(commits)) == told(commits)


def test_steps_that_were_trained_in_a_row_are_one_message() -> None:
    commits = [Commit(step, False, 0) for step in range(5)]
    assert covering(commits) == commits[-1:]


def test_a_commit_wakes_somebody_unless_a_thread_looks_for_it_soon() -> None:
    commits = Commits()
    assert commits.note(Commit(0, False, 0)), "nobody looks"
    assert commits.take() == [Commit(0, False, 0)]
    with commits.looked_for():
        woken = [commits.note(Commit(step, False, 0)) for step in range(1, 1 + AT_MOST)]
        assert woken == [False] * (AT_MOST - 1) + [True], "a thread that does not come is not waited for"
    assert commits, "who looked has to look once more"
    assert commits.note(Commit(9, False, 0))
    assert commits.take() == [Commit(9, False, 0)]
    assert not commits
