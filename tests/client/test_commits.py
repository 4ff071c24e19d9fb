"""Commits that are not sent yet: pure, without Ray."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raysvc.actors.server.reader_lease import ReaderLease
from raysvc.client.commits import AT_MOST, Commit, Commits, covering

# (skipped, to which step a move before it went; None: there was no move)
NOTED = st.lists(st.tuples(st.booleans(), st.one_of(st.none(), st.integers(0, 9))), max_size=20)


def noted(draws: list[tuple[bool, int | None]]) -> list[Commit]:
    """As a loop makes them: steps go on within a move, and from where it went after one."""
    commits: list[Commit] = []
    for skipped, target in draws:
        before = commits[-1] if commits else Commit(-1, False, 0)
        step = before.step + 1 if target is None else target
        commits.append(Commit(step, skipped, before.moves + (target is not None)))
    return commits


def told(commits: list[Commit], targets: list[int]) -> tuple[int, tuple[int, ...]]:
    """What a lease knows after them and the moves between them, which went to `targets`."""
    lease = ReaderLease("", "a").attach("me", 0.0, 10.0, fence=1)
    for step, skipped, moves in commits:
        for move in range(lease.seats[0].moves, moves):
            lease = lease.move(1, targets[move], 0, 0.0, moves=move + 1)
        lease = lease.commit(1, step, 0, 0.0, moves=moves, skipped=skipped)
    return lease.frontier, lease.skipped


@given(NOTED)
def test_a_server_knows_as_much_from_the_commits_that_are_sent_as_from_all_of_them(
    draws: list[tuple[bool, int | None]],
) -> None:
    commits = noted(draws)
    targets = [target for _, target in draws if target is not None]
    assert told(covering(commits), targets) == told(commits, targets)


def test_steps_that_were_trained_in_a_row_are_one_message() -> None:
    commits = [Commit(step, False, 0) for step in range(5)]
    assert covering(commits) == commits[-1:]


def woken() -> tuple[Commits, list[None]]:
    """Commits, and as many None as somebody was woken."""
    wakes: list[None] = []
    return Commits(lambda: wakes.append(None)), wakes


def test_a_commit_wakes_somebody_unless_a_thread_looks_for_it_soon() -> None:
    commits, wakes = woken()
    commits.note(0, False)
    assert len(wakes) == 1, "nobody looks"
    assert commits.take() == [Commit(0, False, 0)]
    commits.moves = 3
    with commits.looked_for():
        for step in range(1, AT_MOST):
            commits.note(step, False)
        assert len(wakes) == 1
        commits.note(AT_MOST, False)
        assert len(wakes) == 2, "a thread that does not come is not waited for"
    assert commits, "who looked has to look once more"
    commits.note(9, False)
    assert len(wakes) == 3
    assert commits.take() == [Commit(9, False, 3)]
    assert not commits


def test_somebody_is_woken_again_when_the_last_thread_that_looked_has_gone() -> None:
    commits, wakes = woken()
    with commits.looked_for():
        with commits.looked_for():
            commits.note(0, False)
        commits.note(1, False)
        assert not wakes, "another one looks still"
    commits.note(2, False)
    assert len(wakes) == 1
    assert commits.take() == [Commit(2, False, 0)]
