"""What is gone from a spool is named when a server starts, and what was forgotten is not missed."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from raysvc.actors.rollouts import group_history
from raysvc.actors.rollouts.rollout_stream import RolloutStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import RolloutSpec
from raysvc.cache.store.claim import Claim, Owner
from raysvc.cache.store.posix import PosixStore
from raysvc.errors import StoreError
from raysvc.job.config import PlanConfig
from raysvc.rl.group import Group
from raysvc.rl.group_table import late_table, table_of

KINDS = ("groups", "columns", "events", "steps")


@contextmanager
def owned(folder: Path) -> Iterator[RolloutStream]:
    """A server's groups, as its process has them until it ends."""
    claim = Claim(PosixStore(str(folder)), Owner("server", "rl"))
    plan = PlanConfig(batch_size=2, columns=("input_ids", "labels", "reward"))
    spec = RolloutSpec(max_staleness=None, late=("reward",))
    rollouts = RolloutStream("rl", spec, Recipe(plan, 0), str(folder), {}, claim)
    assert rollouts.store is not None
    yield rollouts
    claim.release()


def numbers(folder: Path) -> dict[int, Path]:
    """number -> file, of all records that are there."""
    found = [path for kind in (*KINDS, "forgotten") for path in folder.glob(f"{kind}/*.*")]
    return {int(path.name.partition(".g")[0].rpartition(".")[2]): path for path in found}


def missed(folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the next start says."""
    caplog.clear()
    with owned(folder):
        return [record.getMessage() for record in caplog.records if "GONE FROM" in record.getMessage()]


def forgotten_tables(folder: Path) -> list[Path]:
    """Where the tables were that the records of what was forgotten name."""
    lines = [line for path in folder.glob("forgotten/*") for line in path.read_bytes().splitlines()]
    return [folder / "groups" / name for line in lines for name in json.loads(line)["tables"]]


def put(rollouts: RolloutStream, number: int) -> None:
    rollouts.put(table_of([Group(f"g{number}", [[number, 7]], [[0, 1]])]))
    rollouts.store.add_columns(late_table(f"g{number}", {"reward": np.ones(1, np.float32)}))


def some_steps(rollouts: RolloutStream, steps: range) -> None:
    for step in steps:
        put(rollouts, 2 * step)
        put(rollouts, 2 * step + 1)
        assert rollouts.form(step, step)
        rollouts.store.set_version(step + 1, step + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_of_any_kind_that_is_gone_is_named_with_its_number(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with owned(tmp_path) as rollouts:
        some_steps(rollouts, range(4))
    assert missed(tmp_path, caplog) == []
    victims = sorted((tmp_path / kind).iterdir())[1:3]
    for victim in victims:
        data = victim.read_bytes()
        victim.unlink()
        (said,) = missed(tmp_path, caplog)
        number = next(n for n, path in {**numbers(tmp_path), -1: victim}.items() if path == victim)
        number = int(victim.name.partition(".g")[0].rpartition(".")[2]) if number < 0 else number
        assert str(tmp_path) in said
        if kind == "steps":
            assert f"the record of step {int(victim.name[:12])}, number {number};" in said
        else:
            what = "events" if kind == "events" else "groups or columns"
            assert f"1 file of {what}, of numbers {number} to {number};" in said
        victim.write_bytes(data)
    assert missed(tmp_path, caplog) == []


def test_what_was_forgotten_summed_up_or_written_in_vain_is_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_history, "SNAPSHOT_EVERY", 5)
    monkeypatch.setattr("raysvc.actors.rollouts.group_log.MOST_FORGOTTEN", 2)
    with owned(tmp_path) as rollouts:
        for step in range(9):
            some_steps(rollouts, range(step, step + 1))
            rollouts.delete_before(step)
        assert not rollouts.pool.groups_below(7)
    there = sorted(numbers(tmp_path))
    assert len(there) < there[-1] / 3, "most are gone"
    assert missed(tmp_path, caplog) == []


def test_to_forget_reads_nothing_of_what_was_forgotten_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = PosixStore.read
    monkeypatch.setattr(
        PosixStore, "read", lambda self, path, *span: read.append(path) or real(self, path, *span)
    )
    with owned(tmp_path) as rollouts:
        for step in range(12):
            some_steps(rollouts, range(step, step + 1))
            rollouts.delete_before(step + 1)
            assert not list(tmp_path.glob("groups/*")), "it is removed"
            if step == 0:
                read.clear()
        assert [path for path in read if "forgotten" in path] == []
        put(rollouts, 99)
        rollouts.store.drop(["g99"])
        assert rollouts.delete_before(12) == rollouts.delete_before(3) == 0, "nothing more was forgotten"
        assert len(list(tmp_path.glob("groups/*"))) == 1


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "open", "close", "late", "train", "drop", "reserve", "forget", "restart", "full", "late answer"]),
        st.integers(0, 12),
    ),
    min_size=4,
    max_size=40,
)  # fmt: skip


@example(
    [("put", 4), ("late answer", 0), ("late", 0), *[("put", n) for n in (0, 0, 1, 2, 3, 5, 6)], ("late", 1), ("late", 4), ("train", 0), ("forget", 0)],
    118,
)  # fmt: skip
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTS, st.integers(0, 1000))
def test_random_histories_alarm_nobody_until_a_record_is_removed_and_then_name_it(
    tmp_path_factory: Any, caplog: pytest.LogCaptureFixture, acts: list[tuple[str, int]], which: int
) -> None:
    folder = tmp_path_factory.mktemp("gaps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_history, "SNAPSHOT_EVERY", 6)
        patch.setattr("raysvc.actors.rollouts.group_log.MOST_FORGOTTEN", 2)
        frontier = 0
        while acts:
            cut = next((at + 1 for at, (act, _) in enumerate(acts) if act == "restart"), len(acts))
            life, acts = acts[:cut], acts[cut:]
            assert missed(folder, caplog) == []
            with owned(folder) as rollouts:
                for act, n in life:
                    frontier = do(rollouts, act, n, frontier, patch)
    assert missed(folder, caplog) == []
    there = numbers(folder)
    newest = max(there, default=0)
    snapshot = max(
        (n for n, path in there.items() if "events" in path.parts and b'"snapshot"' in path.read_bytes()),
        default=0,
    )
    kept_from = max((int(path.name[:12]) for path in folder.glob("forgotten/*")), default=0)
    doubles = {}  # what was written, and written again when its answer was lost: one of them is enough
    for path in [*there.values(), *forgotten_tables(folder)]:
        doubles.setdefault(
            (path.parent.name, re.sub(r"(?:\d+\.)?\d+\.g\d+\.", "", path.name).partition("e")[0]), []
        ).append(path)
    counted = [
        n for n, path in there.items()
        if n < newest and path.parent.name in ("groups", "columns", "events") and (path.parent.name != "events" or n >= snapshot)
        and not any(path in each and len(each) > 1 for each in doubles.values())
    ]  # fmt: skip
    if counted:
        number = counted[which % len(counted)]
        there[number].unlink()
        said = missed(folder, caplog)
        ranges = [
            tuple(map(int, found)) for one in said for found in re.findall(r"of numbers (\d+) to (\d+)", one)
        ]
        assert any(begin <= number <= end for begin, end in ranges), (there[number], said, kept_from)


def do(rollouts: RolloutStream, act: str, n: int, frontier: int, patch: pytest.MonkeyPatch) -> int:
    store = rollouts.store
    if act in ("full", "late answer"):
        real: Callable[..., None] = PosixStore.write

        def broken(self: PosixStore, name: str, data: Any) -> None:
            if act == "late answer":
                real(self, name, data)
            raise OSError(errno.EIO, "the answer is lost")

        with patch.context() as once:
            once.setattr(PosixStore, "write", broken)
            with pytest.raises((StoreError, OSError)):
                rollouts.put(table_of([Group(f"x{n}-{store.num_rows}", [[n]], [[1]])]))
    elif act in ("put", "open"):
        rollouts.put(
            table_of([Group(f"g{n}-{frontier}", [[n, 7]], [[0, 1]], closed=act == "put")]), owner="me"
        )
    elif act == "close":
        store.close([(f"g{n}-{frontier}", 0)])
    elif act == "late":
        for uid, _ in [key for key, rows in store._groups.items() if not rows.late and rows.num_rows][
            : n + 1
        ]:
            store.add_columns(late_table(uid, {"reward": np.ones(1, np.float32)}))
    elif act == "train" and rollouts.form(frontier, frontier):
        frontier += 1
        store.set_version(rollouts.pool.version + 1, frontier)
    elif act == "drop":
        store.drop([f"g{n}-{frontier}"])
    elif act == "reserve":
        store.reserve([f"r{n}"], frontier, "me")
    elif act == "forget":
        rollouts.delete_before(max(0, frontier - n % 2))
    return frontier
