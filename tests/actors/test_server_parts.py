"""The parts of a server that need no Ray: shared steps, journal, spool, a server as a plain object."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raysvc.actors.rollouts import group_log
from raysvc.actors.rollouts.group_log import MOST_FORGOTTEN, ForgottenGroups, Spool
from raysvc.actors.rollouts.rollout_stream import RolloutStream
from raysvc.actors.server.batch_server import BatchServer
from raysvc.actors.server.journal import Journal
from raysvc.actors.server.lease_store import LeaseStore
from raysvc.actors.server.leases import Leases
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.orphan_watch import OrphanWatch
from raysvc.actors.server.spec import RolloutSpec, ServeSpec
from raysvc.actors.server.step_cache import SharedSteps
from raysvc.actors.server.step_maker import Stream
from raysvc.cache.store.posix import PosixStore
from raysvc.job.config import PlanConfig


def test_callers_of_one_key_wait_for_one_making_and_it_goes_when_all_have_taken_it() -> None:
    shared: SharedSteps[bytes] = SharedSteps(10**6)
    together = threading.Barrier(4)

    def take(_: int) -> bytes:
        together.wait()
        return shared.get("k", 4, lambda: b"x" * 100, len)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(take, range(4))) == {b"x" * 100}
    assert (shared.made, shared.nbytes) == (1, 0)


def test_what_is_kept_fits_and_what_fell_out_is_made_again() -> None:
    shared: SharedSteps[bytes] = SharedSteps(250)
    for key in (0, 1, 2, 2, 1):
        assert shared.get(key, None, lambda key=key: bytes([key]) * 100, len) == bytes([key]) * 100  # type: ignore[misc]
        assert shared.nbytes <= 250
    assert shared.made == 3
    shared.get(0, None, lambda: b"0" * 100, len)
    assert shared.made == 4
    assert shared.get(9, None, lambda: b"9" * 1000, len) == b"9" * 1000
    assert shared.nbytes == 1000, "one larger step is kept alone"


def test_a_failure_is_not_kept() -> None:
    shared: SharedSteps[bytes] = SharedSteps(100)

    def fail() -> bytes:
        raise OSError("gone for a moment")

    with pytest.raises(OSError, match="for a moment"):
        shared.get("k", None, fail, len)
    assert shared.get("k", None, lambda: b"there", len) == b"there"


def test_the_gauges_of_a_server_are_set_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray forgets a gauge that was set once: the groups that wait would vanish when producers pause."""
    from raysvc.actors.rollouts import rollout_server
    from raysvc.actors.server import orphan_watch

    rounds = {"groups_ready": 0, "producers_seen": 0, "leases_held": 0}
    twice = threading.Event()

    def count(name: str, value: float, **tags: str) -> None:
        rounds[name] = rounds.get(name, 0) + 1
        if min(rounds.values()) >= 2:
            twice.set()

    for module in (rollout_server, orphan_watch):
        monkeypatch.setattr(module, "record", count)
    spec = ServeSpec(
        name="s", sources=(), plan=PlanConfig(batch_size=2), pad_token_id=0, journal=str(tmp_path),
        rollouts=RolloutSpec(max_staleness=1), orphan_ttl_s=0.2,
    )  # fmt: skip
    server = rollout_server.RolloutServer(spec.model_dump_json(), "first")
    try:
        assert twice.wait(100), rounds
    finally:
        server._orphans._ended.set()


def test_a_server_is_no_orphan_while_who_started_it_waits_for_an_answer(tmp_path: Path) -> None:
    """On a busy machine a first answer took longer than `orphan_ttl_s`, and the server was reaped under its driver."""
    freed = threading.Event()

    class Maker:
        def free(self) -> bool:
            freed.set()
            return False

    spec = ServeSpec(
        name="s",
        sources=(),
        plan=PlanConfig(batch_size=2),
        pad_token_id=0,
        journal=None,
        orphan_ttl_s=0.6,  # the first visitor has to be here before it is over
    )
    leases = LeaseStore(Leases("s"), 10.0, "first", None)
    watch = OrphanWatch(spec, leases, Maker(), lambda: None)  # type: ignore[arg-type]
    try:
        with watch.visit():
            with watch.visit():
                assert not freed.wait(1.0)
            assert not freed.wait(1.0), "the first visitor is still here"
        assert freed.wait(60)
    finally:
        watch._ended.set()


@pytest.mark.parametrize("ask", [lambda server: server.describe(), lambda server: server.attach("me")])
def test_a_slow_answer_to_who_starts_or_attaches_is_a_visit(
    ask: Callable[[BatchServer], Any],
    tmp_path: Path,
    entry: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reaped = threading.Event()

    class Slow(BatchServer):
        """Opens its entry longer than `orphan_ttl_s`."""

        @property
        def _train(self) -> Stream:
            reaped.wait(1.5)
            return super()._train

    monkeypatch.setattr(OrphanWatch, "_end", lambda watch: reaped.set())
    spec = ServeSpec(
        name="s", sources=[entry(8)], plan=PlanConfig(batch_size=2), pad_token_id=0, journal=str(tmp_path / "j"),
        orphan_ttl_s=1.0, reap=True,
    )  # fmt: skip
    server = Slow(spec.model_dump_json(), "first")
    try:
        ask(server)
        assert not reaped.is_set()
    finally:
        server._orphans._ended.set()


@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_a_journal_gives_its_newest_whole_record(tmp_path: Path, protocol: str) -> None:
    url = f"{protocol}{tmp_path}/journal"
    assert Journal(url).load() is None
    journal = Journal(url)
    for number in range(3):
        journal.save(lambda number=number: {"commits": number})
    assert Journal(url).load() == {"commits": 2}
    if not protocol:
        (tmp_path / "journal" / "000000000009.json").write_text('{"commits": 3, "half of')
        assert Journal(url).load() == {"commits": 2}
        again = Journal(url)
        again.save(lambda: {"commits": 4})
        assert Journal(url).load() == {"commits": 4}


@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_a_spool_gives_back_what_was_acknowledged_in_order_and_passes_over_a_torn_file(
    tmp_path: Path, protocol: str
) -> None:
    url = f"{protocol}{tmp_path}/spool"
    spool = Spool(url)
    assert spool.names() == []
    names = [spool.put(pa.table({"n": [number]})) for number in range(12)]
    spool.write_step(3, [("a", 0), ("b", 1)])
    again = Spool(url)
    assert [(name, again.read(name)["n"].to_pylist()) for name in again.names()] == [
        (name, [number]) for number, name in enumerate(names)
    ]
    assert again.steps() == ({3: [("a", 0), ("b", 1)]}, {})
    if not protocol:
        (tmp_path / "spool" / "groups" / "000000000012.torn.arrow").write_bytes(b"ARROW1\0\0 half of it")
        (tmp_path / "spool" / "steps" / "000000000004.json").write_text('{"step": 4, "gro')
        assert again.steps() == ({3: [("a", 0), ("b", 1)]}, {})
        with pytest.raises(pa.ArrowInvalid):
            again.read("000000000012.torn.arrow")
        assert again.put(pa.table({"n": [13]})) > "000000000012.torn.arrow"


def groups_table(numbers: list[int]) -> pa.Table:
    """A put of groups, each of two sequences that tell its number."""
    from raysvc.rl.group import Group
    from raysvc.rl.group_table import table_of

    return table_of(
        [Group(f"g{n}", [[n, 7], [n, 8, 9]], [[0, 1], [0, 1, 1]], weight_version=n) for n in numbers]
    )


def rollout_stream(folder: str) -> RolloutStream:
    plan = PlanConfig(batch_size=2, columns=("input_ids", "labels"))
    return RolloutStream("rl", RolloutSpec(max_staleness=None), Recipe(plan, 0), folder, {})


def filled(folder: str) -> RolloutStream:
    """Puts (0 1 2) (3 4) (5 6 7) (8): steps 0 to 3 have two groups each, group 8 is ready."""
    stream = rollout_stream(folder)
    for numbers in ([0, 1, 2], [3, 4], [5, 6, 7], [8]):
        stream.put(groups_table(numbers))
    for step in range(4):
        assert stream.form(step, 0)
    return stream


def seen(stream: RolloutStream, steps: range) -> list[object]:
    """What a trainer can see of these steps, and what decides the next ones."""
    made = [
        [(shard.row_ids.tolist(), shard.arrays["input_ids"].tolist()) for shard in stream.make(step, (1,))[1]]
        for step in steps
    ]
    ready = [group.key for group in stream.pool.ready]
    known = [number for number in range(10) if stream.pool.is_known((f"g{number}", 0))]
    return [made, ready, stream.num_rows, stream.pool.trained(4), known]


def test_what_is_forgotten_is_removed_with_its_put_and_the_rest_is_as_it_was(tmp_path: Path) -> None:
    from raysvc.errors import StepOutOfOrder

    folder = str(tmp_path / "rollouts")
    first = filled(folder)
    expected = seen(first, range(2, 4))
    assert first.delete_before(2) == 3, "put (0 1 2) and two steps; put (3 4) is needed"
    assert seen(first, range(2, 4)) == expected
    again = rollout_stream(folder)
    assert seen(again, range(2, 4)) == expected
    assert (again.put(groups_table([0, 4, 8])) or ())[:2] == (0, 3), "what was forgotten is still known"
    with pytest.raises(StepOutOfOrder, match="a step from 2 on"):
        again.form(1, 4)
    with pytest.raises(StepOutOfOrder, match="a step from 2 on"):
        again.make(1, (1,))
    again.put(groups_table([9]))
    assert again.form(4, 4)
    assert again.pool.steps[4] == [("g8", 0), ("g9", 0)]
    assert again.delete_before(1) == 0
    assert again.delete_before(5) == 7, "four puts and three steps"
    assert Spool(folder).names() == []
    last = rollout_stream(folder)
    assert (last.put(groups_table([3, 10])) or ())[:2] == (1, 1)
    assert Spool(folder).names()[0] > max(Spool(folder).forgotten().tables), (
        "numbers go on behind what is gone"
    )
    assert last.num_rows == 22


def test_what_was_forgotten_lies_in_few_files_however_often_and_a_death_between_them_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, known = str(tmp_path), dict[tuple[str, int], int]()
    spool = Spool(url)
    for step in range(3 * MOST_FORGOTTEN):
        known[f"g{step}", 0] = step
        spool.forget(ForgottenGroups(step, {(f"g{step}", 0): step}, {f"{step:012d}.arrow": 2}))
        assert len(list((tmp_path / "forgotten").iterdir())) <= MOST_FORGOTTEN
        assert Spool(url).forgotten().groups == known
    whole = ForgottenGroups(step, known, {f"{number:012d}.arrow": 2 for number in range(step + 1)})
    assert Spool(url).forgotten() == whole

    def killed(*_: object) -> None:
        raise SystemExit

    def forget_often() -> None:
        for _ in range(MOST_FORGOTTEN):
            spool.forget(ForgottenGroups(step, {}, {}))

    with monkeypatch.context() as dying:
        dying.setattr(PosixStore, "delete", killed)
        with pytest.raises(SystemExit):
            forget_often()
    assert Spool(url).forgotten() == whole
    Spool(url).forget(ForgottenGroups(step, {}, {}))
    assert Spool(url).forgotten() == whole
    assert len(list((tmp_path / "forgotten").iterdir())) == 1, "the next call removes what a killed one left"


def test_what_one_call_reads_to_forget_does_not_grow_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_log, "MOST_FORGOTTEN", 4)
    monkeypatch.setattr(group_log, "FULL", 2000)
    url, known, read = str(tmp_path), dict[tuple[str, int], int](), list[int]()
    spool, read_one = Spool(url), Spool._read

    def counted(self: Spool, path: str) -> bytes:
        data = read_one(self, path)
        read[-1] += len(data)
        return data

    monkeypatch.setattr(Spool, "_read", counted)
    for step in range(300):
        key = f"group {step}", 0
        known[key] = step
        read.append(0)
        spool.forget(ForgottenGroups(step, {key: step}, {f"{step:012d}.arrow": 2}))
    assert 0 < max(read[-50:]) < 5000, "records that are full are not read"
    read.append(0)
    assert Spool(url).forgotten().groups == known
    again = Spool(url)
    for step in range(300, 310):  # another process does not know which are full
        read.append(0)
        again.forget(ForgottenGroups(step, {}, {}))
    assert max(read[-9:]) < 5000
    assert Spool(url).forgotten().groups == known


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_server_parts as parts
from raysvc.cache.store.posix import PosixStore

def dying(method, left):
    def call(self, name, *args):
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return method(self, name, *args)
    return call

for point in range(9):
    folder = f"{sys.argv[1]}/{point}"
    stream = parts.filled(folder)
    if os.fork() == 0:
        left = [point]
        PosixStore._publish = dying(PosixStore._publish, left)
        PosixStore.delete = dying(PosixStore.delete, left)
        stream.delete_before(3)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_death_at_any_point_of_forgetting_loses_no_group_and_trains_none_twice(tmp_path: Path) -> None:
    expected = seen(filled(str(tmp_path / "calm")), range(3, 4))
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    codes = [int(line) for line in done.stdout.split()]
    assert codes == [-signal.SIGKILL] * 7 + [0] * 2, "a snapshot of events, a record, two puts, three steps"
    for point in range(9):
        stream = rollout_stream(str(tmp_path / str(point)))
        assert seen(stream, range(3, 4)) == expected
        assert stream.pool.kept_from == (3 if point > 1 else 0)
        stream.delete_before(3)
        assert len(Spool(str(tmp_path / str(point))).names()) == 2, (
            "what was left is removed by the next call"
        )
        assert seen(stream, range(3, 4)) == expected
