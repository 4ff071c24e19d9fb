"""The groups of a rollout server, without Ray: one log, written outside the lock, read back to the same pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysvc.actors.rollouts.group_commit import GroupCommit
from raysvc.actors.rollouts.group_log import Spool
from raysvc.actors.rollouts.rollout_stream import RolloutStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import RolloutSpec
from raysvc.cache.store.posix import PosixStore
from raysvc.errors import SourceError, StoreError
from raysvc.job.config import PlanConfig
from raysvc.rl.group import Group
from raysvc.rl.group_table import late_table, table_of


def stream(folder: Path, batch_size: int = 2, mini: int = 1, **fields: Any) -> RolloutStream:
    plan = PlanConfig(
        batch_size=batch_size, mini_batch_size=mini, columns=("input_ids", "labels", *fields.get("late", ()))
    )
    spec = RolloutSpec(**{"max_staleness": None, **fields})
    return RolloutStream("rl", spec, Recipe(plan, 0), str(folder), {})


def group(number: int, rows: int = 2, **fields: Any) -> Group:
    return Group(f"g{number}", [[number, 7, row] for row in range(rows)], [[0, 1, 1]] * rows, **fields)


def put(rollouts: RolloutStream, *groups: Group, **options: Any) -> Any:
    """New and known groups; None: no room."""
    result = rollouts.put(table_of(groups), **options)
    return result and result[:2]


def reserve(rollouts: RolloutStream, uids: list[str], owner: str) -> list[str]:
    """The uids that are granted."""
    verdicts = rollouts.store.reserve(uids, 0, owner)
    return [uid for uid, said in verdicts.items() if said == "granted"]


def ids(rollouts: RolloutStream, step: int) -> list[list[list[int]]]:
    """[mini][row], the tokens of every row of a step."""
    _, shards = rollouts.make(step, (1,))
    out = []
    for shard in shards:
        real = shard.row_ids >= 0
        out.append(shard.arrays["input_ids"][: len(real)][real].tolist())
    return out


# -- timelines


def trained(rollouts: RolloutStream, steps: range) -> list[Any]:
    """What the documented loop trains; it tells the version after each step."""
    out = []
    for step in steps:
        assert rollouts.form(step, step)
        out.append(ids(rollouts, step))
        rollouts.store.set_version(step + 1, step + 1)
    return out


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("back_to", [0, 2, 5])
def test_going_back_restores_version_and_membership_and_the_loop_goes_on(
    tmp_path: Path, back_to: int, restart: bool
) -> None:
    calm, torn = stream(tmp_path / "calm", max_staleness=9), stream(tmp_path / "torn", max_staleness=9)
    for rollouts in (calm, torn):
        for number in range(20):
            put(rollouts, group(number))
    expected = trained(calm, range(10))
    assert trained(torn, range(6)) == expected[:6]
    timeline = torn.store.rewind(back_to, 6)
    assert timeline == (1, back_to, back_to, 6)
    if restart:
        torn = stream(tmp_path / "torn", max_staleness=9)
    assert (torn.pool.version, torn.pool.timeline) == (back_to, 1)
    assert trained(torn, range(back_to, 10)) == expected[back_to:]
    assert torn.store.rewind(10, 10) is None, "forward is no new timeline"


def test_what_was_evicted_stays_away_when_the_trainer_goes_back_and_the_server_restarts(
    tmp_path: Path,
) -> None:
    rollouts = stream(tmp_path, max_staleness=1)
    put(rollouts, *(group(number) for number in range(7)))
    trained(rollouts, range(2))
    assert rollouts.pool.evicted == 3, "of version 0, for weights of version 2"
    rollouts.store.rewind(0, 2)
    again = stream(tmp_path, max_staleness=1)
    for one in (rollouts, again):
        assert (one.pool.version, one.pool.ready, one.pool.evicted) == (0, [], 3)
        assert one.pool.capacity(0) == 0, "the steps that were formed are still to be trained"


def test_sequences_that_are_too_old_travel_without_a_target_and_stay_so_however_often_the_step_is_made(
    tmp_path: Path,
) -> None:
    rollouts = stream(tmp_path, max_staleness=1, on_stale="withhold", rows="merge")
    rollouts.store.set_version(5, 0)
    old, mixed, fresh = (
        group(number, weight_version=versions) for number, versions in enumerate(([3, 3], [3, 4], [5, 5]))
    )
    result = rollouts.put(table_of([old, mixed, fresh]), gate=0)
    assert result is not None
    assert result.verdicts == {"g0": "stale", "g1": "new", "g2": "new"}
    assert rollouts.form(0, 0)

    def targets() -> dict[tuple[int, int], bool]:
        """(group, row) -> whether it is trained."""
        info, shards = rollouts.make(0, (1,))
        assert info.rollouts is not None
        assert info.rollouts.columns["withheld"].tolist() == [1, 0, 0, 0]
        assert info.weight_versions == (3, 5)
        return {
            (int(ids[0]), int(ids[2])): bool((labels >= 0).any())
            for shard in shards
            for ids, labels in zip(shard.arrays["input_ids"], shard.arrays["labels"], strict=True)
        }

    expected = {(1, 0): False, (1, 1): True, (2, 0): True, (2, 1): True}
    assert targets() == expected
    rollouts.store.set_version(6, 1)
    assert targets() == expected
    rollouts.store.rewind(0, 1)
    rollouts = stream(tmp_path, max_staleness=1, on_stale="withhold", rows="merge")
    rollouts.store.set_version(6, 1)
    assert targets() == expected
    assert rollouts.pool.versions[("g1", 0)] == 4, "a group is as old as its newest sequence"


def test_an_open_group_that_grows_is_as_old_as_its_newest_sequence_where_old_ones_are_withheld(
    tmp_path: Path,
) -> None:
    for policy, version in (("withhold", 2), ("drop", 1)):
        rollouts = stream(tmp_path / policy, max_staleness=1, on_stale=policy)
        rollouts.store.set_version(2, 0)
        for first, own in enumerate((0 if policy == "withhold" else 1, 2)):
            put(rollouts, group(0, 1, weight_version=own, first_row=first, closed=first == 1))
            rollouts.form(0, 0)  # what is too old goes
        for each in (rollouts, stream(tmp_path / policy, max_staleness=1, on_stale=policy)):
            assert [ready.version for ready in each.pool.ready] == [version]


@pytest.mark.parametrize("policy", ["withhold", "drop"])
def test_rows_that_come_again_do_not_make_their_group_older_or_newer(tmp_path: Path, policy: str) -> None:
    rollouts = stream(tmp_path, max_staleness=2, on_stale=policy)
    put(rollouts, group(0, 1, weight_version=0, closed=False), group(1, 1, weight_version=1, closed=False))
    put(rollouts, group(0, 1, weight_version=1), group(1, 2, weight_version=[0, 1]))
    for each in (rollouts, stream(tmp_path, max_staleness=2, on_stale=policy)):
        assert {ready.key[0]: ready.version for ready in each.pool.ready} == {"g0": 0, "g1": 1}


def test_a_group_whose_late_columns_are_gone_is_named_and_quarantined(tmp_path: Path) -> None:
    rollouts = stream(tmp_path, late=("reward",))
    for number in range(2):
        put(rollouts, group(number))
        rollouts.store.add_columns(late_table(f"g{number}", {"reward": [1.0, 0.0]}))
    assert rollouts.form(0, 0)
    min((tmp_path / "columns").iterdir()).unlink()
    rollouts = stream(tmp_path, late=("reward",))
    with pytest.raises(KeyError):
        rollouts.make(0, (1,))
    assert rollouts.repair(0, (1,))
    assert rollouts.pool.quarantined == {("g0", 0): "its rows are gone"}


def test_versions_that_are_not_one_count_a_sequence_are_refused(tmp_path: Path) -> None:
    rollouts = stream(tmp_path, max_staleness=1)
    for versions, match in (
        ([1], "1 values in 'weight_version' for 2 sequences"),
        ([-1, 0], "not one count each"),
        ([0.5, 1.0], "not one count each"),
        ([0, 9], "weight version 9, and the newest that can be there is 1"),
    ):
        with pytest.raises(SourceError, match=match):
            put(rollouts, group(0, weight_version=versions))


@pytest.mark.parametrize("rows", ["keep", "merge"])
@pytest.mark.parametrize("columns", [{}, {"late": ("reward",)}, {"max_staleness": 1, "on_stale": "withhold"}])
def test_a_step_of_which_no_group_can_be_collated_is_made_without_rows(
    tmp_path: Path, rows: str, columns: dict[str, Any]
) -> None:
    rollouts = stream(tmp_path, rows=rows, **columns)
    for number in range(2):
        put(rollouts, group(number, tokens={"logprobs": [np.ones((3, 2), np.float32)] * 2}))
        if "late" in columns:
            rollouts.store.add_columns(late_table(f"g{number}", {"reward": [1.0, 0.0]}))
    assert rollouts.form(0, 0)
    rollouts.store.quarantine({("g0", 0): "bad", ("g1", 0): "bad"})
    info, shards = rollouts.make(0, (2,))
    assert [shard.row_ids.tolist() for shard in shards] == [[-1] * len(shard.row_ids) for shard in shards]
    assert not any(shard.arrays["labels"].max() >= 0 for shard in shards), "no token is trained"
    assert info.rollouts is not None
    assert info.rollouts.metrics() == {}
    assert rollouts.outline(0, 2).nbytes > 0
    assert rollouts.pool.trained(1) == 0


def test_a_version_that_jumps_or_that_no_weights_can_have_is_refused(tmp_path: Path) -> None:
    rollouts = stream(tmp_path, max_staleness=3)
    rollouts.store.set_version(100, 0)  # a run that goes on from other weights begins where it likes
    with pytest.raises(SourceError, match="of weight version 1000, and the newest that can be there is 101"):
        put(rollouts, group(0, weight_version=1000))
    put(rollouts, group(0, weight_version=100), group(1, weight_version=101))
    with pytest.raises(ValueError, match="107 is more than 1 above 100"):
        rollouts.store.set_version(107, 0)
    rollouts.store.set_version(101, 1)
    rollouts.store.set_version(101, 5)
    assert rollouts.pool.told[-1] == (1, 101), "the same version told again changes nothing"
    rollouts.store.set_version(105, 5)


def test_telling_a_version_does_not_walk_the_steps_that_are_trained(tmp_path: Path) -> None:
    pool = stream(tmp_path, max_staleness=1).pool
    num = 200_000
    pool.load({step: [(f"g{step}", 0)] for step in range(num)}, 0, set(), {})
    pool.told, pool.reached = [(num, num)], num
    begin = time.thread_time()
    for _ in range(200):
        pool.set_version(pool.version + 1, num + 1 + pool.version - num)
        pool.capacity(num)
        pool.trained(num)
    per_call_ms = (time.thread_time() - begin) / 600 * 1e3
    assert per_call_ms < 1, f"{per_call_ms:.2f} ms; a walk over all steps takes 20 and more"


# -- late columns, open groups, owners


def test_a_group_is_trained_when_its_late_columns_are_there_row_by_row(tmp_path: Path) -> None:
    rollouts = stream(tmp_path, 1, late=("reward", "advantages"))
    put(rollouts, group(0, 3), group(1))
    store = rollouts.store
    assert not rollouts.form(0, 0)
    assert store.add_columns(late_table("g1", {"reward": np.array([5, 6], np.float32)})) == 2
    assert store.add_columns(late_table("g0", {"reward": np.array([1, 3], np.float32)}, rows=[0, 2])) == 2
    assert store.add_columns(late_table("g0", {"reward": np.array([9, 2], np.float32)}, rows=[0, 1])) == 1, (
        "first wins"
    )
    vectors = [np.full(3, 0.25, np.float32), np.full(3, 0.5, np.float32), np.full(3, 0.75, np.float32)]
    assert not rollouts.form(0, 0)
    again = stream(tmp_path, 1, late=("reward", "advantages"))
    for one in (again,):
        one.store.add_columns(late_table("g0", {"advantages": vectors}))
        assert one.form(0, 0)
        assert not one.form(1, 1)
        _, (shard,) = one.make(0, (1,))
        assert shard.arrays["reward"][:3].tolist() == [1, 2, 3], "a second value for a row changes nothing"
        assert shard.arrays["advantages"][:3].tolist() == [[0.25] * 3, [0.5] * 3, [0.75] * 3]
    for uid, columns, what in [
        ("g7", {"reward": [1.0]}, "was never put"),
        ("g1", {"reward": [1.0] * 3}, "has no row 2"),
        ("g1", {"advantages": [[1.0]] * 2}, "1 values in 'advantages' for the 3 tokens of row 0"),
        ("g1", {"logprobs": [[1.0] * 3] * 2}, "not declared late"),
    ]:
        with pytest.raises(SourceError, match=what):
            again.store.add_columns(late_table(uid, columns))


def test_a_group_grows_until_it_is_closed_and_a_repeated_part_adds_nothing(tmp_path: Path) -> None:
    rollouts = stream(tmp_path, 1)
    parts = [
        Group("a", [[1, 2]], [[0, 1]], weight_version=4, closed=False),
        Group("a", [[3, 4], [5, 6]], [[0, 1]] * 2, weight_version=3, first_row=1, closed=False),
        Group("a", [[7, 8]], [[0, 1]], weight_version=5, first_row=3),
    ]
    assert put(rollouts, parts[0]) == (1, 0)
    with pytest.raises(SourceError, match="begins at row 3, and 1 rows of it were put"):
        put(rollouts, parts[2])
    put(rollouts, group(0))
    for _ in range(2):
        assert put(rollouts, parts[1]) == (0, 1)
        rollouts = stream(tmp_path, 1)
    assert put(rollouts, Group("a", [[3, 4], [5, 6], [9, 9]], [[0, 1]] * 3, first_row=1, closed=False)) == (
        0,
        1,
    )
    assert (rollouts.num_rows, [r.key for r in rollouts.pool.ready]) == (6, [("g0", 0)])
    put(rollouts, parts[2])
    rollouts = stream(tmp_path, 1)
    assert rollouts.form(0, 0)
    assert rollouts.form(1, 1)
    assert ids(rollouts, 1) == [[[1, 2], [3, 4], [5, 6], [9, 9]]], (
        "row 3 was there: what comes again is known"
    )
    assert rollouts.make(1, (1,))[0].weight_versions == (0, 4)
    assert put(rollouts, parts[1]) == (0, 1), "closed"


def test_an_open_group_can_be_closed_without_further_rows(tmp_path: Path) -> None:
    rollouts = stream(tmp_path, 1)
    put(rollouts, group(0, closed=False), group(1, closed=False))
    assert rollouts.store.close([("g0", 0), ("g9", 0)]) == 1
    for one in (rollouts, stream(tmp_path, 1)):
        assert [ready.key for ready in one.pool.ready] == [("g0", 0)]
        assert list(one.pool.waiting) == [("g1", 0)]


def test_what_a_dead_producer_reserved_or_left_open_comes_back_also_over_a_restart(tmp_path: Path) -> None:
    def at(now: list[float], folder: Path) -> RolloutStream:
        rollouts = stream(folder, max_staleness=1, producer_ttl_s=10)
        rollouts.store._now_s = lambda: now[0]
        rollouts.pool.leases = dict.fromkeys(rollouts.pool.leases, now[0] + 10)
        return rollouts

    now = [0.0]
    rollouts = at(now, tmp_path)
    assert reserve(rollouts, ["a", "b", "c"], "dead") == ["a", "b", "c"]
    assert reserve(rollouts, ["a", "d", "e"], "alive") == ["d"], "a is another's, and there are four"
    put(rollouts, group(0, closed=False), owner="dead")
    assert reserve(rollouts, ["f"], "alive") == []
    now[0] = 8
    rollouts = at(now, tmp_path)
    assert rollouts.pool.reserved == {"a": "dead", "b": "dead", "c": "dead", "d": "alive"}
    now[0] = 12
    rollouts.store.renew("alive")
    now[0] = 19
    assert reserve(rollouts, ["a", "d", "f", "g", "h"], "alive") == ["a", "d", "f", "g"]
    assert rollouts.store.dropped == {("g0", 0)}, "nobody will ever close it"
    assert put(rollouts, Group("b", [[1, 2]], [[0, 1]]), owner="dead") == (1, 0), "late, and still welcome"


def test_without_capacity_a_put_of_what_was_not_reserved_waits(tmp_path: Path) -> None:
    rollouts = stream(tmp_path, 1, max_staleness=0)
    rollouts.store.reserve(["g1"], 0, "me")
    assert put(rollouts, group(0), gate=0) is None
    assert put(rollouts, group(1), gate=0) == (1, 0)
    assert put(rollouts, group(0), gate=0) is None
    assert put(rollouts, group(1), gate=0) == (0, 1), "what is known needs no room"
    assert rollouts.form(0, 0)
    rollouts.store.set_version(1, 1)
    assert put(rollouts, group(0, weight_version=1), gate=1) == (1, 0)


# -- groups that cannot be collated


@pytest.mark.parametrize("policy", ["fill", "shrink"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_group_whose_rows_are_damaged_is_quarantined_and_its_step_goes_on(
    tmp_path: Path, policy: str, restart: bool
) -> None:
    rollouts = stream(tmp_path, 4, 2, on_bad_group=policy)
    for number in range(5):
        put(rollouts, group(number))
    assert rollouts.form(0, 0)
    whole = ids(rollouts, 0)
    rollouts.free()
    path = sorted((tmp_path / "groups").iterdir())[1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if restart:
        rollouts = stream(tmp_path, 4, 2, on_bad_group=policy)
        with pytest.raises(StoreError, match=path.name):
            rollouts.make(0, (1,))
        path.unlink()  # as the error says, where nobody has a copy
    with pytest.raises((KeyError, StoreError), match=r"g1|digest"):
        rollouts.make(0, (1,))
    assert rollouts.repair(0, (1,))
    assert not rollouts.repair(0, (1,)), "the rest is whole"
    assert list(rollouts.pool.quarantined) == [("g1", 0)]
    assert rollouts.form(0, 0)
    path.unlink(missing_ok=True)
    again = stream(tmp_path, 4, 2, on_bad_group=policy)
    for one in (rollouts, again):
        first, second = ids(one, 0)
        assert second == whole[1], "the other mini-batch is as it was"
        assert first == whole[0][:2] + ([[4, 7, 0], [4, 7, 1]] if policy == "fill" else [])
        assert list(one.pool.quarantined) == [("g1", 0)]


def test_a_step_waits_for_groups_only_when_it_must_be_filled(tmp_path: Path) -> None:
    for policy, goes_on in (("fill", False), ("shrink", True)):
        rollouts = stream(tmp_path / policy, 2, on_bad_group=policy)
        put(rollouts, group(0), group(1))
        assert rollouts.form(0, 0)
        rollouts.store.quarantine({("g0", 0): "tried"})
        assert rollouts.form(0, 0) is goes_on
        put(rollouts, group(2))
        assert rollouts.form(0, 0)


# -- the log


def test_appends_that_wait_together_are_written_together_and_in_order() -> None:
    written: list[list[int]] = []
    gate = threading.Event()

    def write(items: list[int]) -> None:
        if not written:
            gate.wait(60)
        written.append(list(items))
        items.clear()

    commit = GroupCommit(write)
    tickets = [commit.append(number) for number in range(5)]
    commit.seal()
    first = threading.Thread(target=commit.wait, args=(tickets[0],))
    first.start()
    while commit._pending:
        time.sleep(0.001)
    late = [commit.append(number) for number in range(5, 9)]
    commit.seal()
    waiting = [threading.Thread(target=commit.wait, args=(ticket,)) for ticket in late]
    for thread in waiting:
        thread.start()
    gate.set()
    for thread in (first, *waiting):
        thread.join(60)
    assert written == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]


def test_what_could_not_be_written_stays_first_in_line() -> None:
    written: list[int] = []
    broken = [True]

    def write(items: list[int]) -> None:
        while items:
            if items[0] == 2 and broken[0]:
                raise OSError("no space")
            written.append(items.pop(0))

    commit = GroupCommit(write)
    tickets = [commit.append(number) for number in range(4)]
    commit.seal()
    with pytest.raises(OSError, match="no space"):
        commit.wait(tickets[3])
    commit.wait(tickets[1])
    broken[0] = False
    commit.wait(tickets[3])
    assert written == [0, 1, 2, 3]


def test_nobody_who_asks_waits_for_a_slow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = stream(tmp_path, max_staleness=9)
    put(rollouts, group(0))
    publish, slow, begun = PosixStore._publish, threading.Event(), threading.Event()
    ended: list[bool] = []

    def held(self: PosixStore, staged: str, path: str) -> bool:
        begun.set()
        ended.append(slow.wait(100))
        return publish(self, staged, path)

    monkeypatch.setattr(PosixStore, "_publish", held)
    putting = threading.Thread(target=put, args=(rollouts, group(1)))
    putting.start()
    assert begun.wait(60)
    for _ in range(100):
        with rollouts.store.changed:
            rollouts.pool.capacity(0)
        rollouts.store.renew("me")
    assert not ended, "the store holds the write"
    slow.set()
    putting.join(60)


def test_many_small_puts_at_once_share_writes_and_each_is_there(tmp_path: Path) -> None:
    rollouts = stream(tmp_path)
    each = [threading.Thread(target=lambda n=n: [put(rollouts, group(100 * n + i)) for i in range(20)]) for n in range(8)]  # type: ignore[misc]  # fmt: skip
    for thread in each:
        thread.start()
    for thread in each:
        thread.join(60)
    files = list((tmp_path / "groups").iterdir())
    assert len(files) < 160, "some were written together"
    again = stream(tmp_path)
    assert [ready.key for ready in again.pool.ready] == [ready.key for ready in rollouts.pool.ready]
    assert len(again.pool.ready) == 160
    for one in (rollouts, again):
        assert one.form(0, 0)
    assert ids(rollouts, 0) == ids(again, 0)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["put", "open", "grow", "late", "form", "train", "back", "drop", "reserve", "restart", "close"]),
        st.integers(0, 12),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTS)
def test_a_restart_at_any_point_gives_the_same_pool(
    tmp_path_factory: Any, acts: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("history")
    make: Callable[[], RolloutStream] = lambda: stream(folder, 2, max_staleness=2, late=("reward",))  # noqa: E731
    rollouts, frontier = make(), 0
    for act, n in acts:
        store = rollouts.store
        version = max(0, rollouts.pool.version - n % 3)
        if act == "put":
            put(rollouts, group(n, 1 + n % 2, weight_version=version))
        elif act == "open":
            put(rollouts, group(n, 1, weight_version=version, closed=False), owner="me")
        elif act == "grow" and (known := store._groups.get((f"g{n}", 0))):
            put(
                rollouts,
                group(n, 1, weight_version=version, closed=n % 2 == 0, first_row=known.num_rows),
                owner="me",
            )
        elif act == "late" and (known := store._groups.get((f"g{n}", 0))):
            store.add_columns(late_table(f"g{n}", {"reward": np.ones(known.num_rows, np.float32)}))
        elif act == "close":
            store.close([(f"g{n}", 0)])
        elif act == "form":
            rollouts.form(frontier, frontier)
        elif act == "train" and rollouts.form(frontier, frontier):
            frontier += 1
            store.set_version(rollouts.pool.version + 1, frontier)
        elif act == "back" and frontier:
            store.rewind(frontier - 1 - n % frontier, frontier)
            frontier = rollouts.pool.reached
        elif act == "drop":
            store.drop([f"g{n}"])
        elif act == "reserve":
            store.reserve([f"g{n}"], frontier, "me")
        elif act == "restart":
            rollouts = make()
    again = make()
    for name in (
        "told",
        "timeline",
        "ready",
        "waiting",
        "steps",
        "versions",
        "reserved",
        "owners",
        "evicted",
    ):
        assert getattr(again.pool, name) == getattr(rollouts.pool, name), name
    assert (again.num_rows, again.store.dropped) == (rollouts.num_rows, rollouts.store.dropped)
    assert again.pool.capacity(frontier) == rollouts.pool.capacity(frontier)


def test_events_are_summed_up_so_that_a_restart_reads_few_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysvc.actors.rollouts.group_history.SNAPSHOT_EVERY", 5)
    rollouts = stream(tmp_path, max_staleness=9)
    for number in range(30):
        put(rollouts, group(number))
        rollouts.store.reserve([f"r{number}"], 0, "me")
        rollouts.store.drop([f"g{number - 1}"])
    assert len(list((tmp_path / "events").iterdir())) <= 7
    again = stream(tmp_path, max_staleness=9)
    assert (again.pool.reserved, again.pool.ready) == (rollouts.pool.reserved, rollouts.pool.ready)
    assert again.store.dropped == rollouts.store.dropped


def test_a_table_of_other_types_is_refused_at_the_put_and_steps_of_others_form(tmp_path: Path) -> None:
    rollouts = stream(tmp_path, 2)
    put(rollouts, group(0))
    table = table_of([group(1)])
    for name, column in (("uid", pa.array([1, 1])), ("input_ids", pa.array([[1.0], [2.0]]))):
        with pytest.raises(SourceError, match=f"has '{name}' of"):
            rollouts.put(table.set_column(table.column_names.index(name), name, column))
    put(rollouts, group(2))
    assert rollouts.form(0, 0)
    assert [len(mini) for mini in ids(rollouts, 0)] == [2, 2]


@pytest.mark.parametrize("wrong", [{"weight_version": 1000}, {"first_row": 4}])
def test_a_first_put_that_is_refused_fixes_no_type(tmp_path: Path, wrong: dict[str, Any]) -> None:
    rollouts = stream(tmp_path, max_staleness=1)
    with pytest.raises(SourceError):
        put(rollouts, replace(group(0), rows={"reward": [1, 0]}, **wrong))
    put(rollouts, replace(group(0), rows={"reward": [1.0, 0.5]}))


def test_a_put_with_late_values_that_do_not_fit_a_known_group_is_refused_whole(tmp_path: Path) -> None:
    rollouts = stream(tmp_path, late=("adv",))
    put(rollouts, group(0))
    longer = Group("g0", [[1, 2, 3, 4]], [[0, 1, 1, 1]], tokens={"adv": [[1.0] * 4]})
    fine = group(1, rows=1, tokens={"adv": [[1.0] * 3]})
    with pytest.raises(SourceError, match="has 4 values in 'adv' for the 3 tokens of row 0"):
        put(rollouts, fine, longer)
    raw = table_of([fine])
    short = pa.array([[1.0]], raw.column("token.adv").type)
    with pytest.raises(SourceError, match="has a 'adv' that is not as long as its input_ids"):
        rollouts.put(raw.set_column(raw.column_names.index("token.adv"), "token.adv", short))
    assert (list(rollouts.pool.versions), rollouts.store.num_rows) == ([("g0", 0)], 2)
    put(rollouts, group(1, rows=1, tokens={"adv": [[1] * 3]}))  # what was refused fixed no type either


def test_what_could_not_be_forgotten_is_still_known_and_never_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = stream(tmp_path, max_staleness=9)
    put(rollouts, *(group(number) for number in range(10)))
    for step in range(3):
        assert rollouts.form(step, step)

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(Spool, "forget", full)
        with pytest.raises(OSError, match="full"):
            rollouts.delete_before(2)
    assert rollouts.pool.kept_from == 0
    rollouts.delete_before(3)
    again = stream(tmp_path, max_staleness=9)
    for one in (rollouts, again):
        assert [ready.key[0] for ready in one.pool.ready] == ["g6", "g7", "g8", "g9"]
        assert put(one, group(1)) == (0, 1)


def test_a_group_that_was_closed_keeps_its_place_when_a_snapshot_replaced_the_record_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = stream(tmp_path)
    put(rollouts, group(0, closed=False))
    rollouts.store.close([("g0", 0)])
    put(rollouts, group(1))
    monkeypatch.setattr("raysvc.actors.rollouts.group_history.SNAPSHOT_EVERY", 1)
    rollouts.store.release(["nobody"])
    again = stream(tmp_path)
    for one in (rollouts, again):
        assert [ready.key[0] for ready in one.pool.ready] == ["g0", "g1"]
